"""What every rank checks of synchronized batch norm; as a program, in a process of MPI.

mpiexec -n 2 python -m mpi4py tests/ranks.py
"""

import copy
import os
import pickle
import signal
import sys
import threading
from contextlib import suppress

import ml_dtypes
import numpy as np
import reference
import tolerances
from tolerances import assert_within

import cunorm

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def batch_sizes(size):
    """Ways to share out samples: evenly, unevenly, nothing for some, one sample each."""
    ways = [[4] * size, list(range(1, size + 1)), [0, 5, 0, 2][:size], [1] * size]
    return ways if size > 1 else [[4], [5]]


def same_everywhere(communicator, *arrays):
    """Bits are equal on all ranks."""
    for array in arrays:
        words = np.ascontiguousarray(array, np.float64).reshape(-1)
        gathered = communicator.all_gather(words)
        np.testing.assert_array_equal(gathered, np.tile(words, (communicator.size, 1)))


def check_training(communicator, sizes, dtype, channel_axis=1, features=(3, 5), offset=0.0):
    """Two steps: the numbers of the batches joined, in the bounds of batch norm itself."""
    rng = np.random.default_rng(7)
    channels, rank = 6, communicator.rank
    shape = [sum(sizes), channels, *features]
    if channel_axis == -1:
        shape.append(shape.pop(1))
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    accumulator = np.float64 if dtype == np.float64 else np.float32
    layer = cunorm.SyncBatchNorm(
        channels, communicator=communicator, channel_axis=channel_axis, dtype=accumulator
    )
    alone = cunorm.BatchNorm(channels, channel_axis=channel_axis, dtype=accumulator)
    weight, bias = rng.standard_normal((2, channels))
    for each in (layer, alone):
        each.weight[:], each.bias[:] = weight, bias
    for _ in range(2):
        x = (rng.standard_normal(shape) + offset).astype(dtype)
        dy = rng.standard_normal(shape).astype(dtype)
        y = layer(x[mine])
        dx = layer.backward(dy[mine])
        alone(x)
        count = x.size // channels
        result = reference.forward(x, layer.weight, layer.bias, channel_axis=channel_axis)
        expected = reference.backward(dy, x, layer.weight, channel_axis=channel_axis)
        bound = tolerances.y_bound(result, layer.weight, layer.bias, count, dtype)
        assert y.dtype == dx.dtype == dtype
        assert_within(y, result.y[mine], bound[mine], "y")
        bounds = tolerances.backward_bounds(expected, result, dy, layer.weight, count, dtype)
        assert_within(dx, expected.dx[mine], bounds.dx[mine], "dx")
        together = [
            communicator.all_reduce(layer.gradients[name].astype(np.float64))
            for name in ("weight", "bias")
        ]
        assert_within(together[0], expected.dweight, bounds.dweight, "dweight")
        assert_within(together[1], expected.dbias, bounds.dbias, "dbias")
        same_everywhere(communicator, layer.running_mean, layer.running_var)
    f = 1 - 0.9**2
    mean_bound = f * tolerances.mean_bound(result, count, dtype) + 4 * tolerances.roundoff(
        accumulator
    ) * np.abs(alone.running_mean)
    assert_within(layer.running_mean, alone.running_mean, 4 * mean_bound, "running mean")
    var_bound = f * tolerances.var_bound(result, count, dtype) + 4 * tolerances.roundoff(
        accumulator
    ) * np.abs(alone.running_var)
    assert_within(layer.running_var, alone.running_var, 4 * var_bound, "running variance")
    assert layer.num_batches_tracked == alone.num_batches_tracked == 2


def check_worked_example(communicator):
    """Channels last, eps 1e-3, factor 0.5, running statistics from 1."""
    rng = np.random.default_rng(0)
    parts = rng.uniform(size=(communicator.size, 2, 1, 2, 3)).astype(np.float32)
    layer = cunorm.SyncBatchNorm(
        3, communicator=communicator, eps=1e-3, exponential_average_factor=0.5, channel_axis=-1
    )
    layer.running_mean[:] = 1
    y = layer(parts[communicator.rank])
    values = parts.astype(np.float64).reshape(-1, 3)
    mean, var = values.mean(0), values.var(0)
    n = len(values)
    np.testing.assert_allclose(layer.running_mean, 0.5 + 0.5 * mean, rtol=1e-6)
    np.testing.assert_allclose(layer.running_var, 0.5 + 0.5 * var * n / (n - 1), rtol=1e-6)
    expected = (parts[communicator.rank] - mean) / np.sqrt(var + 1e-3)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    same_everywhere(communicator, layer.running_mean, layer.running_var)


def error_of(call):
    """Type and message of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("nothing was raised")


def check_errors(communicator):
    """What is wrong on one rank is the same error on all; nothing has changed, nothing hangs."""
    size, rank = communicator.size, communicator.rank
    last = size - 1
    layer = cunorm.SyncBatchNorm(3, communicator=communicator)
    good = np.random.default_rng(rank).standard_normal((2, 3, 4)).astype(np.float32)

    def on_last(bad):
        return bad if rank == last else good

    def expect(call, kind, message):
        assert error_of(call) == (kind, message)

    for bad, kind, message in [
        (np.ones((2, 4, 4), np.float32), ValueError, "x: expected 3 channels at axis 1, got shape"),
        (None, TypeError, "x: expected an array, got None"),
        ("x", TypeError, "x: expected an array (NumPy, CuPy or anything with __dlpack__), got str"),
        (good.astype(np.int32), TypeError, "x: expected dtype float16, bfloat16, float32 or"),
    ]:
        found, said = error_of(lambda bad=bad: layer(on_last(bad)))
        assert found is kind
        assert said.startswith(message), said
        assert said.endswith(f"(on rank {last})"), said
    if size > 1:
        expect(
            lambda: layer(on_last(good.astype(np.float16))),
            TypeError,
            f"x: expected one dtype on all ranks, got float32 on rank 0, float16 on rank {last}",
        )
    found, said = error_of(lambda: layer(good[:1, :, :1] if rank == last else good[:0]))
    assert found is ValueError
    assert said.startswith("x: expected more than 1 value per channel on all ranks together"), said
    assert (layer.running_mean == 0).all()
    assert (layer.running_var == 1).all()
    assert layer.num_batches_tracked == 0

    y = layer(good)
    found, said = error_of(lambda: layer.backward(on_last(y[:1]) if rank == last else y))
    assert (found, said) == (
        ValueError,
        f"dy: expected the shape of x, (2, 3, 4), got (1, 3, 4) (on rank {last})",
    )
    assert layer.backward(y).shape == y.shape  # the ranks are still in step
    assert layer.num_batches_tracked == 1

    # No communication: not every rank takes part.
    layer.eval()
    if rank == 0:
        layer(good)
        layer.backward(good)
        layer.train().freeze()(good)
    other = cunorm.SyncBatchNorm(3 + (rank == last), communicator=communicator)
    if size > 1:
        x = np.ones((2, 3 + (rank == last), 4), np.float32)
        expect(
            lambda: other(x),
            ValueError,
            f"num_features: expected the same on all ranks, got 3 on rank 0, 4 on rank {last}",
        )


class Unreadable:
    """An array of another library that fails with a message of an odd kind."""

    def __init__(self, error):
        self.error = error

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        raise self.error


class SilentError(Exception):
    def __str__(self):
        raise RuntimeError("no message")


# While `left` arrays is 0, a thread has no memory for results; None: there is no end to it.
memory = threading.local()


def empty(shape, dtype, usual=cunorm.cpu.memory.empty):
    left = getattr(memory, "left", None)
    if left == 0:
        raise MemoryError("no memory for an array")
    memory.left = None if left is None else left - 1
    return usual(shape, dtype)


def empty_like(array, usual=cunorm.cpu.memory.empty_like):
    return empty(array.shape, array.dtype, lambda *_: usual(array))


def check_odd_errors(communicator):
    """Settings that differ, empty batches, no memory, errors that cannot be told: still in step."""
    size, rank = communicator.size, communicator.rank
    last = size - 1
    good = np.random.default_rng(rank).standard_normal((2, 3, 4)).astype(np.float32)
    layer = cunorm.SyncBatchNorm(3, communicator=communicator)
    same_y = layer(good)
    state = layer.state_dict()

    def still_in_step():
        y = layer(good)
        np.testing.assert_array_equal(y, same_y)
        assert layer.backward(y).shape == y.shape
        layer.load_state_dict(state)

    def fails(call, kind, message):
        found, said = error_of(call)
        assert (found, message in said) == (kind, True), said
        for name, array in layer.state_dict().items():
            np.testing.assert_array_equal(array, state[name])
        still_in_step()

    # backward of a batch that is empty everywhere
    layer(good[:0])
    fails(
        lambda: layer.backward(good[: int(rank == last)]),
        ValueError,
        f"dy: expected the shape of x, (0, 3, 4), got (1, 3, 4) (on rank {last})",
    )
    settings = {"eps": (1e-5, 0.5), "correction": (1, 0), "exponential_average_factor": (0.1, 0.5)}
    for name, (usual, other) in settings.items() if size > 1 else ():
        setattr(layer, name, other if rank == last else usual)
        error = error_of(lambda: layer(good))
        setattr(layer, name, usual)
        expected = f"{name}: expected the same on all ranks, got {float(usual)} on rank 0, "
        assert error == (ValueError, f"{expected}{float(other)} on rank {last}")
        still_in_step()
    for bad in (-1.0, None, "a"):
        for name in ("eps", "correction"):
            usual = getattr(layer, name)
            setattr(layer, name, bad if rank == last else usual)
            kind, said = error_of(lambda: layer(good))
            setattr(layer, name, usual)
            assert kind is (ValueError if bad == -1.0 else TypeError)
            assert said.startswith(f"{name}: expected"), said
            still_in_step()
    layer.correction = 1000
    assert error_of(lambda: layer(good))[0] is ValueError
    np.testing.assert_array_equal(layer.forward(good, update_statistics=False), same_y)
    layer.correction = 1
    layer.backward(same_y)
    still_in_step()
    if size > 1:
        for factor in (0.1, 0.0):
            layer.exponential_average_factor = factor
            fails(
                lambda: layer.forward(good, update_statistics=rank != last),
                ValueError,
                "update_statistics: expected the same on all ranks, got both running statistics on "
                f"rank 0, nothing on rank {last}",
            )
        layer.exponential_average_factor = 0.1
    for error in (
        ValueError("cannot open \udcff file"),
        SilentError(),
        ValueError("\0"),
        StopIteration(),
    ):
        kind, said = error_of(
            lambda error=error: layer(Unreadable(error) if rank == last else good)
        )
        assert kind in (TypeError, RuntimeError)
        assert said.endswith(f"(on rank {last})")
        still_in_step()

    # no memory for a result on one rank
    full = (MemoryError, f"no memory for an array (on rank {last})")
    # (as before, but in this function)
    cunorm.cpu.memory.empty, cunorm.cpu.memory.empty_like = empty, empty_like
    memory.left = 0 if rank == last else None
    assert error_of(lambda: layer(good)) == full
    memory.left = None
    y = layer(good)
    memory.left = 0 if rank == last else None
    assert error_of(lambda: layer.backward(y)) == full
    memory.left = None
    assert layer.backward(y).shape == y.shape
    layer.load_state_dict(state)

    # nor for arrays that have to be brought in another order
    wide = np.repeat(good, 2, axis=2)[:, :, ::2]
    turned = np.asfortranarray(layer(wide))
    np.testing.assert_array_equal(turned, same_y)
    expected = layer.backward(turned)
    for left in range(4):
        layer(wide)
        memory.left = left if rank == last else None
        with suppress(MemoryError):
            np.testing.assert_array_equal(layer.backward(turned), expected)
        memory.left = None
        if layer._cache is not None:
            np.testing.assert_array_equal(layer.backward(turned), expected)
    layer.load_state_dict(state)

    # a layer in a state in which nothing works
    for name, bad in [("running_mean", [0, 0, 0]), ("weight", "w"), ("num_batches_tracked", None)]:
        place = layer.parameters if name == "weight" else vars(layer)
        usual = place[name]
        place[name] = bad if rank == last else usual
        found, said = error_of(lambda: layer(good))
        place[name] = usual
        assert found is TypeError
        assert said.startswith(f"{name}: expected an array"), said
        still_in_step()

    # nothing, times infinity
    infinite = cunorm.SyncBatchNorm(3, communicator=communicator, eps=0.0)
    infinite.backward(infinite(good[:0]))
    assert (infinite.gradients["weight"] == 0).all()

    # a copy on one rank, which has not agreed on the number of channels
    ways = [copy.deepcopy]
    if isinstance(communicator, cunorm.distributed._MPI):
        ways.append(lambda layer: pickle.loads(pickle.dumps(layer)))
    for way in ways:
        fresh = cunorm.SyncBatchNorm(3, communicator=communicator)
        copied = way(layer)
        assert copied.communicator.size == size
        np.testing.assert_array_equal((copied if rank == last else fresh)(good), same_y)
    # fewer channels than at first
    layer.num_features = 2
    layer.weight, layer.bias = layer.weight[:2].copy(), layer.bias[:2].copy()
    layer.running_mean, layer.running_var = np.zeros(2, np.float32), np.ones(2, np.float32)
    fewer = good[:, :2].copy()
    layer(fewer)
    assert layer.backward(fewer).shape == fewer.shape
    kind, said = error_of(lambda: layer(None if rank == last else fewer))
    assert (kind, said) == (TypeError, f"x: expected an array, got None (on rank {last})")


def check_recomputation(communicator):
    """update_statistics=False: the same output; and batches of nothing change nothing."""
    layer = cunorm.SyncBatchNorm(3, communicator=communicator)
    x = np.random.default_rng(communicator.rank).standard_normal((3, 3, 4)).astype(np.float32)
    y = layer(x)
    before = {name: array.copy() for name, array in layer.state_dict().items()}
    np.testing.assert_array_equal(layer.forward(x, update_statistics=False), y)
    assert layer(x[:0]).shape == (0, 3, 4)
    assert layer.backward(x[:0]).shape == (0, 3, 4)
    for name, array in layer.state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    assert (layer.gradients["weight"] == 0).all()


def check_all(communicator):
    """Everything above."""
    for sizes in batch_sizes(communicator.size):
        for dtype in DTYPES:
            check_training(communicator, sizes, dtype)
        check_training(communicator, sizes, np.float32, channel_axis=-1)
        check_training(communicator, sizes, np.float32, offset=1e4)
    if communicator.size > 1:
        check_training(communicator, [1] * communicator.size, np.float32, features=())
    check_worked_example(communicator)
    check_errors(communicator)
    check_odd_errors(communicator)
    check_recomputation(communicator)


def check_communicators(mpi):
    """Those of MPI that will do and those that will not."""
    world = mpi.COMM_WORLD
    part = world.Split(world.rank % 2, -world.rank)  # in reverse order
    layer = cunorm.SyncBatchNorm(3, communicator=part)
    check_worked_example(copy.deepcopy(layer).communicator)
    freed = part.Dup()
    freed.Free()
    for none in (mpi.COMM_NULL, freed):
        expected = "communicator: expected one with ranks, got a null or freed one"
        assert error_of(lambda none=none: cunorm.as_communicator(none)) == (ValueError, expected)
    kind, said = error_of(lambda: cunorm.as_communicator(mpi.Intracomm))
    assert (kind, said[:26]) == (TypeError, "communicator: expected one")
    if world.size > 1:
        leaders = [max(range(parity, world.size, 2)) for parity in (0, 1)]
        between = part.Create_intercomm(0, world, leaders[1 - world.rank % 2])
        kind, said = error_of(lambda: cunorm.as_communicator(between))
        assert (kind, "got Intercomm; its Merge()" in said) == (TypeError, True)


def die_in_the_middle(communicator):
    """The last rank is killed while the others wait for its message."""
    layer = cunorm.SyncBatchNorm(3, communicator=communicator)
    x = np.ones((4, 3, 5), np.float32)
    layer(x)
    if communicator.rank == communicator.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    layer(x)
    print("went on", flush=True)


if __name__ == "__main__":
    from mpi4py import MPI

    cunorm.set_num_threads(1)
    ranks = cunorm.as_communicator(MPI.COMM_WORLD)
    {"all": check_all, "die": die_in_the_middle}[sys.argv[1]](ranks)
    check_communicators(MPI)
    print(f"rank {ranks.rank} of {ranks.size} has passed", flush=True)
