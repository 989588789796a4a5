"""How Python calls kernels."""

import gc
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from numba.core.caching import NullCache

from cunorm.cpu import elements

pytestmark = pytest.mark.cpu

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def kernel_of(function):
    """A kernel that is kept nowhere."""
    kernel = elements.kernel(function)
    kernel.compiled._cache = NullCache()
    return kernel


def double(x, scale, times, negative):
    """Write the double of every element, and return how many there are."""
    sign = -1.0 if negative else 1.0
    for _ in range(times):
        for i in range(x.size):
            value = elements.load(x, i) * sign * elements.as_accumulator(x, scale)
            elements.store(x, i, value)
    return x.size


doubling = kernel_of(double)


@pytest.mark.parametrize("dtype", DTYPES)
def test_types(dtype):
    x = np.arange(1, 8).astype(dtype)
    assert doubling(x, 2.0, 2, True) == 7
    assert doubling(x, 2.0, 1, False) == 7
    np.testing.assert_array_equal(x.astype(np.float64), np.arange(1, 8) * 8.0)


def test_one_entry_for_each_combination_of_types():
    kernel = kernel_of(double)
    arrays = [np.ones(3, dtype) for dtype in DTYPES]
    for _ in range(2):
        for array in arrays:
            kernel(array, 1.0, 1, False)
        assert len(kernel._entries) == 4
    array = np.ones(3, np.float32)
    fitting = [entry for entry in kernel._entries.values() if entry(array, 2.0, 1, False) == 3]
    assert len(fitting) == 1
    assert array.tolist() == [2.0, 2.0, 2.0]


def _apart(array):
    """The same elements, not side by side."""
    return np.repeat(array, 2)[::2]


def _unaligned(array):
    memory = np.zeros(array.nbytes + 1, np.uint8)
    made = memory[1:].view(array.dtype)
    made[...] = array
    return made


class Child(np.ndarray):
    """A subclass."""


ARRAY = np.ones(4, np.float32)


@pytest.mark.parametrize(
    "arguments",
    [
        (ARRAY.astype(np.float64), 1.0, 1, False),
        (ARRAY.astype(np.int32), 1.0, 1, False),
        (ARRAY.astype(">f4"), 1.0, 1, False),
        (ARRAY.astype(np.complex64), 1.0, 1, False),
        (ARRAY.reshape(2, 2), 1.0, 1, False),
        (np.float32(1.0), 1.0, 1, False),
        (np.array(1.0, np.float32), 1.0, 1, False),
        (_apart(ARRAY), 1.0, 1, False),
        (_unaligned(ARRAY), 1.0, 1, False),
        (ARRAY.view(Child), 1.0, 1, False),
        (ARRAY.tolist(), 1.0, 1, False),
        (None, 1.0, 1, False),
        (np.ndarray, 1.0, 1, False),
        (ARRAY, 1, 1, False),
        (ARRAY, np.float64(1.0), 1, False),
        (ARRAY, 1.0, 1.0, False),
        (ARRAY, 1.0, True, False),
        (ARRAY, 1.0, np.int64(1), False),
        (ARRAY, 1.0, 1, 0),
        (ARRAY, 1.0, 1, np.False_),
        (ARRAY, 1.0, 1, None),
        (ARRAY, 1.0, 1),
        (ARRAY, 1.0, 1, False, False),
        (),
    ],
)
def test_other_types_are_told_apart(arguments):
    doubling(ARRAY.copy(), 1.0, 1, False)
    found = [
        e
        for e in doubling._entries.values()
        if e(ARRAY.copy(), 1.0, 1, False) is not NotImplemented
    ]
    (entry,) = found
    assert entry(*arguments) is NotImplemented
    assert entry(ARRAY, 1.0, 1, False) == 4


def test_integers_of_two_bytes_are_no_halves():
    doubling(np.ones(2, np.float16), 1.0, 1, False)
    doubling(np.ones(2, ml_dtypes.bfloat16), 1.0, 1, False)
    for dtype in (np.uint16, np.int16):
        array = np.ones(2, dtype)
        assert all(
            entry(array, 1.0, 1, False) is NotImplemented for entry in doubling._entries.values()
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_byte_order_in_both_of_its_letters(dtype):
    named = np.dtype(dtype).newbyteorder("<" if sys.byteorder == "little" else ">")
    x = np.ones(3, dtype).astype(named)
    assert x.dtype.byteorder != "="
    assert doubling(x, 2.0, 1, False) == 3
    assert x.tolist() == [2.0] * 3


def test_arrays_that_are_not_usual():
    """Read-only, of a subclass, empty or unaligned ones: the numbers are the same."""
    kernel = kernel_of(double)
    x = np.arange(4, dtype=np.float32)
    kernel(x, 1.0, 1, False)
    x.flags.writeable = False
    kernel(x, 2.0, 1, False)
    for _ in range(2):
        assert kernel(x.view(Child), 2.0, 1, False) == 4
    assert x.tolist() == [0.0, 8.0, 16.0, 24.0]
    assert kernel(np.empty(0, np.float32), 1.0, 1, False) == 0
    assert len(kernel._entries) == 1
    unaligned = _unaligned(ARRAY)
    kernel(unaligned, 2.0, 1, False)
    assert unaligned.tolist() == [2.0] * 4
    assert len(kernel._entries) == 2


def fill(places, missing):
    """Number the places by their indices."""
    rows, columns, depth = places.shape
    for i in range(rows):
        for j in range(columns):
            for k in range(depth):
                places[i, j, k] = 100 * i + 10 * j + k
    if missing is not None:
        places[:] *= missing


def test_arrays_of_several_axes():
    kernel = kernel_of(fill)
    for shape in ((2, 3, 4), (2, 1, 4), (1, 3, 1), (5, 1, 1), (0, 3, 4)):
        places = np.full(shape, np.nan)
        assert kernel(places, None) is None  # and no more
        i, j, k = np.indices(shape)
        np.testing.assert_array_equal(places, 100.0 * i + 10 * j + k)
    assert len(kernel._entries) == 1


def test_results_and_references():
    x = np.ones(3, np.float32)
    before = [sys.getrefcount(value) for value in (x, None, NotImplemented)]
    for _ in range(2000):
        doubling(x, 1.0, 1, True)
        doubling.entry()
    after = [sys.getrefcount(value) for value in (x, None, NotImplemented)]
    assert all(abs(new - old) < 1000 for new, old in zip(after, before, strict=True))


def test_error():
    """Only an allocation can fail."""

    def fail(number):
        if number > 1:
            raise MemoryError
        return np.empty(number).size

    kernel = kernel_of(fail)
    assert kernel(1) == 1
    with pytest.raises(MemoryError, match="no memory for the working arrays of a kernel"):
        kernel(2)
    assert kernel(1) == 1


def test_numbers_of_numpy_are_an_error():
    """Kernels are called with Python's own: others would never be recognized."""
    with pytest.raises(TypeError, match="double: no entry for"):
        doubling(ARRAY.copy(), np.float64(1.0), 1, False)


def test_an_entry_keeps_its_code():
    kernel = kernel_of(double)
    x = np.ones(3, np.float32)
    kernel(x, 1.0, 1, False)
    entry = kernel.entry
    del kernel
    gc.collect()
    assert entry(x, 2.0, 1, False) == 3
    assert x.tolist() == [2.0] * 3


def test_an_entry_outlives_its_module():
    """When Python ends: what it points to must be there still."""
    code = """
import gc
import numpy as np
import cunorm
cunorm.set_num_threads(1)
cunorm.batch_norm_forward(np.ones((4, 3), np.float32))
from cunorm.cpu import entry, transform
kept = transform._normalize_columns.entry
vars(transform).clear()
vars(entry).clear()
gc.collect()
assert kept.__name__ == "_normalize_columns"
assert kept() is NotImplemented
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONMALLOC": "debug"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
