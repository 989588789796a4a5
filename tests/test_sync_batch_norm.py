"""Synchronized batch norm: ranks that are threads, real MPI processes, a stand-in for NCCL."""

import gc
import importlib.util
import os
import re
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
import ranks

import cunorm


class Thread:
    """A communicator of ranks that are threads of this process."""

    def __init__(self, rank, size, shared):
        self.rank, self.size, self._shared = rank, size, shared

    def all_gather(self, array):
        slots, barrier = self._shared
        slots[self.rank] = np.array(array)
        barrier.wait(60)
        rows = np.stack(slots)
        barrier.wait(60)
        return rows

    def all_reduce(self, array):
        return self.all_gather(array).sum(0)


def in_threads(size, work, make=Thread):
    """Run work(communicator) on so many ranks at once."""
    shared = [None] * size, threading.Barrier(size)
    errors = []

    def run(rank):
        try:
            work(make(rank, size, shared))
        except BaseException as error:
            errors.append(error)
            shared[1].abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    broken = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in broken or errors:
        raise error


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_as_threads(size):
    in_threads(size, ranks.check_all)


CHECKOUT = Path(__file__).parent.parent


def mpiexec(size, *arguments, script=CHECKOUT / "tests" / "ranks.py"):
    program = Path(sys.prefix, "bin", "mpiexec")
    if importlib.util.find_spec("mpi4py") is None or not program.exists():
        pytest.skip("needs an MPI: pip install mpi4py mpich")
    return subprocess.run(
        [program, "-n", str(size), sys.executable, "-m", "mpi4py", script, *arguments],
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_mpi(size):
    done = mpiexec(size, "all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("has passed") == size


def test_mpi_rank_that_dies():
    done = mpiexec(3, "die")
    assert done.returncode != 0
    assert "went on" not in done.stdout
    assert "has passed" not in done.stdout


# --- NCCL, through a stand-in with its interface -------------------------------------


class DeviceArray(np.ndarray):
    """A CuPy array as the adapters use it."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)

    def get(self):
        return np.array(self)


@pytest.fixture
def stand_in_for_cupy(monkeypatch):
    """Modules cupy and cupy.cuda with no more than NCCL's adapters take."""
    nccl = types.SimpleNamespace(NCCL_FLOAT64=8, NCCL_SUM=0)
    cuda = types.ModuleType("cupy.cuda")
    cuda.nccl, cuda.get_current_stream = nccl, lambda: types.SimpleNamespace(ptr=17)
    cupy = types.ModuleType("cupy")
    cupy.cuda, cupy.ndarray = cuda, type(None)
    cupy.asarray = lambda array: np.asarray(array).view(DeviceArray)
    cupy.empty = lambda shape, dtype: np.empty(shape, dtype).view(DeviceArray)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return cupy


def numbers_at(address, count):
    return np.ctypeslib.as_array((np.ctypeslib.ctypes.c_double * count).from_address(address))


class NcclCommunicator:
    """Like `cupy.cuda.nccl.NcclCommunicator`."""

    def __init__(self, rank, size, shared):
        self._thread = Thread(rank, size, shared)

    def size(self):
        return self._thread.size

    def rank_id(self):
        return self._thread.rank

    def allGather(self, sent, received, count, kind, stream):  # noqa: N802
        assert (kind, stream) == (8, 17)
        rows = self._thread.all_gather(numbers_at(sent, count))
        numbers_at(received, rows.size)[:] = rows.reshape(-1)

    def allReduce(self, sent, received, count, kind, operation, stream):  # noqa: N802
        assert (kind, operation, stream) == (8, 0, 17)
        numbers_at(received, count)[:] = self._thread.all_reduce(numbers_at(sent, count))


class NCCLBackend:
    """Like `cupyx.distributed`'s."""

    def __init__(self, rank, size, shared):
        self._thread, self.rank, self._n_devices = Thread(rank, size, shared), rank, size

    def all_gather(self, in_array, out_array, count, stream=None):
        assert count == in_array.size
        assert stream is None
        out_array[...] = self._thread.all_gather(in_array)

    def all_reduce(self, in_array, out_array, op="sum", stream=None):
        assert (op, stream) == ("sum", None)
        out_array[...] = self._thread.all_reduce(in_array)


@pytest.mark.parametrize("kind", [NcclCommunicator, NCCLBackend])
@pytest.mark.usefixtures("stand_in_for_cupy")
def test_nccl_stand_in(kind):
    def work(communicator):
        ranks.check_training(cunorm.as_communicator(communicator), [3, 1], np.float32)
        ranks.check_errors(cunorm.as_communicator(communicator))

    in_threads(2, work, kind)


# --- MPI and arrays on a GPU, through a stand-in ---------------------------------------


class OnDevice:
    """A CuPy array as MPI's adapter uses it: no NumPy array."""

    def __init__(self, array):
        self.array = np.array(array)
        self.shape, self.dtype, self.size = array.shape, array.dtype, array.size

    def get(self, out):
        out[...] = self.array


@pytest.mark.parametrize("device_pointers", [False, True])
def test_mpi_and_device_arrays(stand_in_for_cupy, monkeypatch, device_pointers):
    """Through pinned memory; or as they are, once the stream has written them."""
    cupy, events = stand_in_for_cupy, []
    cupy.asarray = OnDevice
    cupy.empty = lambda shape, dtype: OnDevice(np.empty(shape, dtype))
    stream = types.SimpleNamespace(synchronize=lambda: events.append("synchronized"))
    cupy.cuda.get_current_stream = lambda: stream
    cupyx = types.ModuleType("cupyx")
    cupyx.empty_pinned = lambda shape, dtype: events.append("pinned") or np.empty(shape, dtype)
    monkeypatch.setitem(sys.modules, "cupyx", cupyx)

    def communicate(sent, received):
        kind = OnDevice if device_pointers else np.ndarray
        assert type(sent) is type(received) is kind
        events.append("sent")
        source, target = (getattr(array, "array", array) for array in (sent, received))
        target[...] = source

    mpi = types.SimpleNamespace(
        Get_size=lambda: 2, Get_rank=lambda: 1, Allgather=communicate, Allreduce=communicate
    )
    communicator = cunorm.as_communicator(mpi, device_pointers=device_pointers)
    assert (communicator.size, communicator.rank) == (2, 1)
    values = np.arange(3.0)
    expected = {"all_gather": np.stack([values, values]), "all_reduce": values}
    for name, result in expected.items():
        events.clear()
        found = getattr(communicator, name)(OnDevice(values))
        np.testing.assert_array_equal(found.array, result)
        before = ["synchronized"] if device_pointers else ["pinned", "pinned"]
        assert events == [*before, "sent"]


# --- what docs/distributed.md shows -----------------------------------------------


@pytest.fixture(scope="module")
def documented():
    """The names that its snippets define."""
    text = (CHECKOUT / "docs" / "distributed.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) == 3
    names = {}
    for snippet in snippets:
        exec(compile(snippet, "distributed.md", "exec"), names)
    return names


def test_documented_steps(documented):
    """They do what the layer does."""

    def work(communicator):
        def exchange(moments):
            words = [np.array([moments.count], np.float64), moments.mean, moments.m2]
            rows = communicator.all_gather(np.concatenate(words))
            return [cunorm.Moments(int(row[0]), *np.split(row[1:], 2)) for row in rows]

        rng = np.random.default_rng(communicator.rank)
        x, dy = rng.standard_normal((2, 3 + communicator.rank, 4, 5))
        layer = cunorm.SyncBatchNorm(4, communicator=communicator, dtype=np.float64)
        mean, var = np.zeros(4), np.ones(4)
        y, saved = documented["sync_forward"](x, layer.weight, layer.bias, mean, var, exchange)
        add_up = communicator.all_reduce
        gradients = documented["sync_backward"](dy, x, saved, layer.weight, add_up)
        np.testing.assert_array_equal(layer(x), y)
        np.testing.assert_array_equal(layer.backward(dy), gradients[0])
        np.testing.assert_array_equal(layer.gradients["weight"], gradients[1])
        np.testing.assert_array_equal(layer.gradients["bias"], gradients[2])
        np.testing.assert_array_equal(layer.running_mean, mean)
        np.testing.assert_array_equal(layer.running_var, var)

    in_threads(2, work)


def test_documented_communicator(documented):
    def make(rank, _, shared):
        return documented["Threads"](rank, *shared)

    in_threads(3, ranks.check_worked_example, make)
    in_threads(2, ranks.check_errors, make)


def test_documented_conversion(documented, rng):
    layer = cunorm.BatchNorm(
        3, eps=1e-2, momentum=0.5, correction=0, channel_axis=-1, dtype=np.float64
    )
    layer.weight[...] = 3
    x = rng.standard_normal((4, 5, 3))
    layer(x)
    new = documented["synchronized"](layer, Odd(None, None))
    for name, array in layer.state_dict().items():
        np.testing.assert_array_equal(new.state_dict()[name], array, err_msg=name)
    settings = repr(new).removeprefix("Sync").removesuffix(", 2 ranks)")
    assert settings == repr(layer).removesuffix(")")
    np.testing.assert_array_equal(new.eval()(x), layer.eval()(x))


def test_example():
    """Both ways to train end with losses that began alike."""
    script = CHECKOUT / "examples" / "train_digits_parallel.py"
    done = mpiexec(2, "--epochs=1", script=script)
    assert done.returncode == 0, done.stdout + done.stderr
    (largest,) = re.findall(r"first 10 steps +(\S+)", done.stdout)
    assert float(largest) < 1e-3
    assert len(re.findall(r"^ +\d+ +\d\.\d{6} +\d\.\d{6}", done.stdout, re.MULTILINE)) == 5


# --- the rest ----------------------------------------------------------------------


def test_communicators_that_are_none():
    for bad in (None, 3, "COMM_WORLD", object(), types.SimpleNamespace(size=1, rank=0)):
        with pytest.raises(TypeError, match="communicator: expected one of mpi4py, cupyx"):
            cunorm.SyncBatchNorm(3, communicator=bad)
    own = Thread(0, 1, None)
    assert cunorm.as_communicator(own) is own
    assert cunorm.SyncBatchNorm(3, communicator=own).communicator is own
    with pytest.raises(TypeError, match="device_pointers: expected True or False, got 1"):
        cunorm.SyncBatchNorm(3, communicator=own, device_pointers=1)


@pytest.mark.parametrize(("size", "rank"), [("2", 0), (None, 0), (2.0, 0), (0, 0), (2, 2), (2, -1)])
def test_size_and_rank(size, rank):
    """Of a communicator of one's own: integers, of which rank is the smaller one."""
    with pytest.raises((TypeError, ValueError), match=r"communicator\.(size|rank): expected"):
        cunorm.SyncBatchNorm(3, communicator=Thread(rank, size, None))


def test_communicators_with_a_half_of_anothers_names():
    for names in (["allGather", "allReduce"], ["all_gather", "all_reduce", "_n_devices"]):
        bad = types.SimpleNamespace(**dict.fromkeys(names))
        with pytest.raises(TypeError, match="communicator: expected one of mpi4py, cupyx"):
            cunorm.as_communicator(bad)
    with pytest.raises(TypeError, match="communicator: expected one of mpi4py, cupyx"):
        cunorm.as_communicator(Thread)


class Odd(Thread):
    """Changes what is gathered, or summed."""

    def __init__(self, changed, change):
        super().__init__(0, 2, None)
        self.changed, self.change = changed, change

    def all_gather(self, array):
        rows = np.stack([array, array])
        return self.change(rows) if self.changed == "all_gather" and array.size > 1 else rows

    def all_reduce(self, array):
        total = 2 * array
        return self.change(total) if self.changed == "all_reduce" else total


@pytest.mark.parametrize("changed", ["all_gather", "all_reduce"])
@pytest.mark.parametrize(
    "change",
    [
        list,
        tuple,
        lambda _: None,
        lambda found: found[:1],
        lambda found: found.T if found.ndim == 2 else found[None],
        lambda found: found.astype(np.float32),
        lambda found: found.astype(">f8"),
        lambda found: np.concatenate([found, found]),
    ],
    ids=["list", "tuple", "None", "one", "turned", "float32", "big-endian", "twice"],
)
def test_what_a_communicator_returns(rng, changed, change):
    layer = cunorm.SyncBatchNorm(3, communicator=Odd(changed, change))
    x = rng.standard_normal((4, 3, 5)).astype(np.float32)
    message = rf"communicator\.{changed}: expected an array of shape .* and dtype float64, got"
    with pytest.raises(TypeError, match=message):
        layer.backward(layer(x))


@pytest.mark.parametrize("changed", ["all_gather", "all_reduce"])
def test_messages_of_another_kind(rng, changed):
    """What is no message of this pass is an error, not numbers."""
    layer = cunorm.SyncBatchNorm(3, communicator=Odd(changed, lambda found: 0 * found + 3))
    x = rng.standard_normal((4, 3, 5)).astype(np.float32)
    with pytest.raises(RuntimeError, match="communicator: the ranks are out of step"):
        layer.backward(layer(x))
    if changed == "all_gather":
        assert not layer.running_mean.any()


def test_gathered_with_gaps(rng):
    """Rows need not lie next to one another."""
    odd = Odd("all_gather", lambda rows: np.repeat(rows, 2, axis=1)[:, ::2])
    x = rng.standard_normal((4, 3, 5)).astype(np.float32)
    usual = cunorm.SyncBatchNorm(3, communicator=Odd(None, None))
    layer = cunorm.SyncBatchNorm(3, communicator=odd)
    np.testing.assert_array_equal(layer(x), usual(x))
    with pytest.raises(ValueError, match=r"x: expected 3 channels .* \(on rank 0\)"):
        layer(x[:, :2])


def test_what_is_let_go(rng):
    """A layer that is dropped between the passes takes x with it at once."""
    layer = cunorm.SyncBatchNorm(3, communicator=Odd(None, None))
    x = rng.standard_normal((4, 3, 5)).astype(np.float32)
    layer(x)
    reference = weakref.ref(x)
    gc.disable()
    try:
        del layer, x
        assert reference() is None
    finally:
        gc.enable()


class Copied:
    """An array of a library that copies what is given to its from_dlpack, as JAX may."""

    def __init__(self, array):
        self.array = np.array(array)
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __array_namespace__(self):
        return types.SimpleNamespace(from_dlpack=lambda array: Copied(np.from_dlpack(array)))


def test_results_of_other_libraries(rng):
    """They are handed over when they are complete."""
    x, dy = rng.standard_normal((2, 4, 3, 5)).astype(np.float32)
    usual = cunorm.SyncBatchNorm(3, communicator=Odd(None, None))
    layer = cunorm.SyncBatchNorm(3, communicator=Odd(None, None))
    np.testing.assert_array_equal(layer(Copied(x)).array, usual(x))
    np.testing.assert_array_equal(layer.backward(Copied(dy)).array, usual.backward(dy))
    for name, gradient in usual.gradients.items():
        np.testing.assert_array_equal(layer.gradients[name], gradient)


def test_communicator_stays():
    layer = cunorm.SyncBatchNorm(3, communicator=Odd(None, None))
    with pytest.raises(AttributeError):
        layer.communicator = Odd(None, None)
    assert repr(layer).endswith("training=True, frozen=False, 2 ranks)")


def test_no_channels():
    layer = cunorm.SyncBatchNorm(0, communicator=Odd(None, None))
    assert layer(np.zeros((4, 0, 5), np.float32)).shape == (4, 0, 5)
    assert layer.num_batches_tracked == 0


def test_state_is_that_of_batch_norm(rng):
    shared = [None], threading.Barrier(1)
    layer = cunorm.SyncBatchNorm(4, communicator=Thread(0, 1, shared))
    layer(rng.standard_normal((5, 4, 3)).astype(np.float32))
    other = cunorm.BatchNorm(4)
    other.load_state_dict(layer.state_dict())
    layer.load_state_dict(other.state_dict())
    assert "SyncBatchNorm(4" in repr(layer)


def test_65536_ranks(rng):
    """Uneven counts, some of them 0: merged in float64, in order, to about its precision."""
    number, channels = 65536, 3
    counts = rng.integers(0, 1000, number)
    counts[rng.integers(0, number, 1000)] = 0
    means = 100 + rng.standard_normal((number, channels))
    squares = counts[:, None] * rng.uniform(0.5, 2, (number, channels))
    parts = [
        cunorm.Moments(int(n), mean, m2) for n, mean, m2 in zip(counts, means, squares, strict=True)
    ]
    count, mean, m2 = cunorm.merge_moments(parts)
    assert count == counts.sum()
    wide = np.longdouble
    weights = counts[:, None].astype(wide)
    exact_mean = (weights * means.astype(wide)).sum(0) / weights.sum()
    deviations = np.square(means.astype(wide) - exact_mean)
    exact_m2 = (squares.astype(wide) + weights * deviations).sum(0)
    # Sums of n terms in order: at worst n roundings, 4 * sqrt(n) with near certainty.
    bound = 4 * np.sqrt(number) * 2.0**-53
    assert (np.abs(mean - exact_mean) <= bound * np.abs(exact_mean)).all()
    assert (np.abs(m2 - exact_m2) <= bound * exact_m2).all()
