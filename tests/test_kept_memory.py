"""Large outputs on the CPU lie in memory that is kept between calls."""

import gc
import mmap
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import cunorm
from cunorm.cpu import memory

pytestmark = pytest.mark.skipif(memory._FREE is None, reason="the system has no MADV_FREE")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Treat small arrays as large, from an empty pool."""
    monkeypatch.setattr(memory, "LARGE_BYTES", 1 << 10)
    gc.collect()
    memory._pool.clear()
    yield
    memory._pool.clear()


def kept():
    """The sizes of the free blocks, those first that are offered to the system."""
    return [len(block) for block in memory._pool.offered + memory._pool.recent]


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_like_any_array(dtype):
    dtype = cunorm.ScaleShift(1, dtype=dtype).weight.dtype
    array = memory.empty((7, 100, 3), dtype)
    assert type(array) is np.ndarray
    assert (array.shape, array.dtype) == ((7, 100, 3), dtype)
    flags = array.flags
    assert flags.c_contiguous
    assert flags.writeable
    assert flags.aligned
    assert address(array) % 64 == 0
    array[...] = 3
    assert (array.astype(np.float64) == 3).all()
    assert memory.empty((3,), dtype).flags.owndata  # a small one


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_memory_order(order):
    like = np.zeros((8, 9, 10), np.float32).transpose(order)
    array = memory.empty_like(like)
    assert array.shape == like.shape
    assert array.strides == np.empty_like(like).strides
    gaps = np.zeros((8, 18, 10), np.float32)[:, ::2].transpose(order)
    assert memory.empty_like(gaps).strides == np.empty_like(gaps).strides


def test_memory_comes_back():
    first = memory.empty((1000,), np.dtype(np.float32))
    place = address(first)
    view = first[10:].reshape(-1, 3)
    del first
    second = memory.empty((1000,), np.dtype(np.float32))  # while a view is alive
    assert address(second) != place
    del view
    assert len(kept()) == 1
    third = memory.empty((900,), np.dtype(np.float32))  # of the same size in huge pages
    assert address(third) == place
    assert not kept()
    other = memory.empty((1 << 20,), np.dtype(np.float32))
    assert address(other) not in (place, address(second))


def test_outputs_are_kept(rng):
    x = rng.standard_normal((4, 8, 16), dtype=np.float32)
    y, saved = cunorm.batch_norm_forward(x)
    dx, _, _ = cunorm.batch_norm_backward(y, x, saved)
    places = {address(y), address(dx)}
    expected = y.copy(), dx.copy()
    assert len(places) == 2
    del y, dx
    y, saved = cunorm.batch_norm_forward(x)
    dx, _, _ = cunorm.batch_norm_backward(y, x, saved)
    assert {address(y), address(dx)} == places
    assert y.tobytes() == expected[0].tobytes()
    assert dx.tobytes() == expected[1].tobytes()


@pytest.mark.parametrize("recent", [0, 3 << 20])
def test_no_more_than_so_much(monkeypatch, recent):
    monkeypatch.setattr(memory._pool, "most", 9 << 20)
    monkeypatch.setattr(memory._pool, "most_recent", recent)
    arrays = [memory.empty((1000,), np.dtype(np.float32)) for _ in range(8)]
    del arrays
    assert kept() == [2 << 20] * 4
    large = memory.empty((4 << 20,), np.dtype(np.float32))  # more than that alone
    del large
    assert sum(kept()) <= 9 << 20


def test_the_last_ones_are_not_offered(monkeypatch):
    """The system gets to hear of those that others have come after, and they are taken last."""
    offered = []

    class Block(mmap.mmap):
        def madvise(self, advice):
            if advice == memory._FREE:
                offered.append(len(self))
            super().madvise(advice)

    monkeypatch.setattr(memory.mmap, "mmap", Block)
    monkeypatch.setattr(memory._pool, "most_recent", 10 << 20)
    arrays = [memory.empty((size << 18,), np.dtype(np.float32)) for size in (2, 4, 6)]
    places = [address(array) for array in arrays]
    del arrays[0]
    del arrays[0]
    assert not offered
    del arrays[0]
    assert offered == [2 << 20]
    assert kept() == [2 << 20, 4 << 20, 6 << 20]
    again = [memory.empty((size << 18,), np.dtype(np.float32)) for size in (2, 4, 6)]
    assert [address(array) for array in again] == places
    assert not kept()


def test_memory_of_a_control_group(tmp_path):
    everything = memory._memory(tmp_path)
    assert everything == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._memory(tmp_path) == everything
    (tmp_path / "memory.max").write_text("1048576\n")
    assert memory._memory(tmp_path) == 1 << 20
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("2097152\n")
    assert memory._memory(tmp_path) == 2 << 20


def test_no_memory(monkeypatch):
    """Free blocks are given up for an array that there is no memory for; else an error says so."""
    with pytest.raises(MemoryError, match="no memory for an array of 140737488355328 bytes"):
        memory.empty((1 << 45,), np.dtype(np.float32))
    free = memory.empty((1000,), np.dtype(np.float32))
    del free
    real, left = memory._map, [OSError(12, "Cannot allocate memory")]

    def scarce(size):
        if kept():
            raise left[0]
        return real(size)

    monkeypatch.setattr(memory, "_map", scarce)
    assert memory.empty((1 << 20,), np.dtype(np.float32)).size == 1 << 20


@pytest.mark.filterwarnings("error")
def test_advice_refused(monkeypatch):
    """A system without huge pages; memory that is locked, which then is not kept."""
    monkeypatch.setattr(memory, "_HUGE", 9999)
    monkeypatch.setattr(memory._pool, "_advice", 9999)
    monkeypatch.setattr(memory._pool, "most_recent", 0)
    array = memory.empty((1000,), np.dtype(np.float32))
    array[:] = 1
    del array
    assert not kept()


def test_threads():
    errors = []

    def work(number):
        for i in range(300):
            array = memory.empty((300 + i % 3 * 600_000,), np.dtype(np.float32))
            array[:100] = number
            if not (array[:100] == number).all():
                errors.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_child():
    """A child has the parent's arrays and blocks, and writes to its own copies."""
    code = """
import os, numpy as np
from cunorm.cpu import memory
kept = memory.empty((5_000_000,), np.dtype(np.float32))
kept[:] = 1
free = memory.empty((5_000_000,), np.dtype(np.float32))
del free
child = os.fork()
if child == 0:
    kept[:] = 2
    again = memory.empty((5_000_000,), np.dtype(np.float32))
    again[:] = 3
    os._exit(0 if kept[0] == 2 and again[0] == 3 else 1)
assert os.waitpid(child, 0)[1] == 0
assert (kept == 1).all()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_the_end_of_the_interpreter():
    code = """
import numpy as np, cunorm, sys
y, saved = cunorm.batch_norm_forward(np.ones((64, 512, 12, 12), np.float32))
sys.modules["keep"] = y
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
