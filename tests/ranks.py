"""What every rank checks of synchronized batch norm; as a program, in a process of MPI.

mpiexec -n 2 python -m mpi4py tests/ranks.py
"""

import os
import signal
import sys

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
    check_recomputation(communicator)


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
    print(f"rank {ranks.rank} of {ranks.size} has passed", flush=True)
