"""What kernels are made of."""

import platform
import re

import numpy as np
import pytest
from llvmlite.binding import get_host_cpu_features
from numba import njit

from cunorm.cpu import elements, pieces

pytestmark = pytest.mark.cpu


@njit
def _lines_of(x, shape, places):
    working = elements.scratch(x, shape)
    for row in range(len(places)):
        places[row] = elements._address_of(working[row], 0) % 64
        working[row, :] = row
    return working.sum(axis=1)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("length", [1, 16, 97, 1056])
def test_rows_of_working_arrays_begin_with_a_line(dtype, length):
    """Each of them, wherever the memory is that the allocator has; and they do not overlap."""
    x, places = np.zeros(1, dtype), np.ones(5, np.int64)
    for _ in range(5):
        sums = _lines_of(x, (5, length), places)
        assert (places == 0).all()
        assert sums[1] >= length
        np.testing.assert_array_equal(sums, sums[1] * np.arange(5))


@njit
def _quotient_and_remainder(a, b):
    return pieces.divide(a, b)


def test_division_of_numbers():
    for a in (0, 1, 2, 5, 6, 7, 41, 2**40):
        for b in (1, 2, 6, 7, 2**33):
            assert _quotient_and_remainder(a, b) == divmod(a, b)


@pytest.mark.parametrize(
    "kind", [elements.device_function, elements.strict_function], ids=["device", "strict"]
)
def test_contraction_is_not_within_strict_functions(kind):
    """Whatever their caller allows itself: the square of the last bit is lost in rounding."""

    @kind
    def multiply_add(a, b, c):
        return a * b + c

    @njit(fastmath={"contract"})
    def caller(a, b, c):
        return multiply_add(a, b, c)

    last = 2.0**-30
    fused = get_host_cpu_features().get("fma", False) or platform.machine() in ("aarch64", "arm64")
    contracts = kind is elements.device_function and fused
    assert caller(1 + last, 1 + last, -1 - 2 * last) == (last**2 if contracts else 0)


@elements.device_function
def _negated(i, _, x):
    return -elements.load(x, i)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other instructions")
@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "near"])
@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.float32, np.float64])
def test_vectors_are_written_past_the_caches(dtype, streaming):
    """By instructions that do so, if asked; no result tells."""

    @njit(**elements._OPTIONS)
    def write(x, y):
        elements.write(y, 0, 0, y.size, streaming, _negated, (x,), 0, 0)

    x, y = np.ones((2, 1000), dtype)
    write(x, y)
    (code,) = write.inspect_asm().values()
    assert bool(re.search(r"\bv?movnt(ps|pd|dq)\b", code)) == streaming


@elements.device_function
def _doubled(x):
    return 2 * x


@njit
def _quadrupled(x):
    return _doubled(_doubled(x))


def test_no_machine_code_of_what_is_inlined():
    assert _quadrupled(3) == 12
    (made,) = _doubled.overloads.values()
    (caller,) = _quadrupled.overloads.values()
    engine = caller.library.codegen._engine
    assert engine.is_symbol_defined(caller.fndesc.mangled_name)
    assert not engine.is_symbol_defined(made.fndesc.mangled_name)
    assert made.fndesc.mangled_name in made.library.get_llvm_str()
