"""Rows of a few vectors, in registers of either size: of all widths, and the last one in part."""

import numpy as np
import pytest
from cases import DTYPES, check, group, layer, operands, rms
from numba import njit

from cunorm import get_num_threads
from cunorm.cpu import backward, short_rows, transform
from cunorm.geometry import group_norm_geometry, row_norm_geometry

pytestmark = pytest.mark.cpu

# By the bytes of a register: of narrower vectors, one and two; of whole ones, and with lanes that
# the last two have in common; the longest, and the longest of a backward pass.
LENGTHS = {64: [2, 3, 5, 9, 16, 17, 48, 63, 100, 128], 32: [5, 9, 31, 64, 65, 128]}

# A kernel takes seconds to compile, and one for another dtype differs in how a vector is read and
# written: some of every kind are enough for those, and about zero.
SOME_LENGTHS = [(64, 5), (64, 48), (64, 63), (32, 65)]

# The same of groups of channels that come last: of whole vectors, of one and a part, of narrow
# ones; the next two are the most.
PIECES = [
    (64, (37, 4, 64), 4),
    (64, (37, 2, 2, 44), 2),
    (64, (37, 3, 21), 3),
    (64, (37, 8, 32), 16),
    (64, (300, 4, 8, 16), 2),
    (32, (37, 2, 32), 2),
]
SOME_PIECES = PIECES[1:4:2]


def with_dtypes(names, cases, some):
    """Parameters of a test: all of the cases with float32, some with the other dtypes."""
    few = {dtype: cases if dtype is np.float32 else some for dtype in DTYPES}
    values = [(*case, np.dtype(dtype)) for dtype in DTYPES for case in few[dtype]]
    return pytest.mark.parametrize((*names, "dtype"), values, ids=str)


@pytest.fixture
def registers(monkeypatch):
    """A function that makes registers have so many bytes."""

    def have(size):
        monkeypatch.setattr(short_rows, "REGISTER_BYTES", size)
        forget()

    def forget():
        transform._fused.cache_clear()
        backward._fused.cache_clear()

    yield have
    forget()


@with_dtypes(
    ["size", "length"], [(size, n) for size in LENGTHS for n in LENGTHS[size]], SOME_LENGTHS
)
def test_reference_and_in_place(rng, registers, size, length, dtype):
    """More rows than are taken at a time, and groups, whose rows do not follow each other."""
    if dtype.itemsize == 8 and length > 64:
        length -= 8  # at most 512 bytes
    registers(size)
    geometry = row_norm_geometry((37, length), 1)
    call = transform._fused(geometry, dtype, True, get_num_threads(), False)
    assert call.kernel is short_rows.short_normalization(geometry, dtype.itemsize)
    short = short_rows.short_backward(geometry, dtype.itemsize) is not None
    vectors = -(-length * max(4, dtype.itemsize) // size)
    assert short == (vectors <= 8 and length * dtype.itemsize <= 256)
    cases = [(layer(), (37, length)), (group(2), (37, 2 * length))]
    if (size, length) in SOME_LENGTHS:
        cases.append((rms(), (37, length)))
    for case, shape in cases:
        x, dy, weight, bias = operands(rng, case, shape, dtype)
        y, saved, dx, *_ = check(case, x, dy, weight, bias)
        own, gradient = x.copy(), dy.copy()
        case.backward(gradient, x, saved, weight, out=gradient)
        np.testing.assert_array_equal(gradient, dx)
        case.backward(dy, own, saved, weight, out=own)
        np.testing.assert_array_equal(own, dx)
        own[...] = x
        case.forward(own, weight, bias, out=own)
        np.testing.assert_array_equal(own, y)


@with_dtypes(["size", "shape", "groups"], PIECES, SOME_PIECES)
def test_pieces(rng, registers, size, shape, groups, dtype):
    """Groups of channels that come last; without dx their sums have the same bits."""
    registers(size)
    case = group(groups, axis=-1)
    geometry = group_norm_geometry(shape, len(shape) - 1, groups)
    kernels = (
        (transform, short_rows.short_normalization), (backward, short_rows.short_backward)
    )  # fmt: skip
    for module, kernel in kernels:
        call = module._fused(geometry, dtype, True, get_num_threads(), False)
        assert call.kernel is kernel(geometry, dtype.itemsize)
        assert kernel(geometry._replace(outer=33), dtype.itemsize) is None
        assert kernel(geometry._replace(group=4096), dtype.itemsize) is None
        assert kernel(geometry.apart(), dtype.itemsize) is None
    x, dy, weight, bias = operands(rng, case, shape, dtype)
    y, saved, dx, dweight, dbias = check(case, x, dy, weight, bias)
    nothing, *sums = case.backward(dy, x, saved, weight, output_mask=(False, True, True))
    assert nothing is None
    for found, expected in zip(sums, (dweight, dbias), strict=True):
        np.testing.assert_array_equal(found, expected)
    gradient = dy.copy()
    case.backward(gradient, x, saved, weight, out=gradient)
    np.testing.assert_array_equal(gradient, dx)
    alone = case.forward(x[3:4], weight, bias)[0]
    np.testing.assert_array_equal(alone, y[3:4])
    case.forward(x, weight, bias, out=x)
    np.testing.assert_array_equal(x, y)


@njit
def _streams(y, length, lanes, follow):
    return short_rows._streams(y, length, lanes, follow, True)


@pytest.mark.parametrize(
    ("start", "length", "lanes", "whole", "follow"),
    [
        (0, 48, 8, True, True),  # bytes, elements, lanes; whether rows alone and in a row stream
        (16, 48, 8, False, True),
        (8, 48, 8, False, False),
        (0, 40, 8, False, True),
        (0, 44, 8, False, False),
        (16, 32, 2, False, False),
    ],
)
def test_which_are_written_past_the_caches(start, length, lanes, whole, follow):
    memory = np.zeros(100, np.float32)
    y = memory[(start - memory.ctypes.data) % 64 // 4 :]
    assert _streams(y, length, lanes, False) == whole
    assert _streams(y, length, lanes, True) == follow


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=lambda d: np.dtype(d).name)
def test_infinite_elements(rng, dtype):
    """They make a row's own results NaN, and no other's."""
    x, dy, weight, bias = operands(rng, layer(), (20, 23), dtype)
    y, saved = layer().forward(x, weight, bias)
    dx = layer().backward(dy, x, saved, weight)[0]
    for place in range(23):
        other = x.copy()
        other[7, place] = np.inf
        found, own = layer().forward(other, weight, bias)
        gradient = layer().backward(dy, other, own, weight)[0]
        for array, expected in ((found, y), (gradient, dx)):
            assert np.isnan(array[7]).all()
            array[7] = expected[7]
            np.testing.assert_array_equal(array, expected)


def test_far_outlier():
    """The sum of what the others differ from it is out of range, but not the mean."""
    x = np.full((3, 128), -1e37, np.float32)
    x[:, 0] = 1e37
    bias = np.arange(128, dtype=np.float32)
    y, saved = layer().forward(x, None, bias)
    np.testing.assert_allclose(saved.mean, (-127e37 + 1e37) / 128, rtol=1e-6)
    np.testing.assert_array_equal(saved.inv_std, 0)  # the variance is beyond float32
    np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=lambda d: np.dtype(d).name)
def test_rounding_of_vectors(rng, dtype):
    """To the nearest, ties to even, subnormals, infinities and NaN too: y is the bias here."""
    bits = rng.integers(0, 1 << 32, (60, 48), np.uint32)
    bits[:20] = bits[:20] & 0xFFFF0000 | 0x8000  # halfway between two bfloat16
    bits[20:40] &= 0xFFFFF000  # in reach of halfway between two float16
    bits[20:30] = bits[20:30] & 0x87FFFFFF | 0x38000000
    bits[40:42] &= 0x807FFFFF  # subnormal
    bits[42:46] = np.array([[0x7FFFFFFF], [0xFFFFFFFF], [0x7F7FFFFF], [0x7F800000]], np.uint32)
    x = rng.standard_normal((2, 48)).astype(dtype)
    for bias in bits.view(np.float32):
        y, _ = layer().forward(x, np.zeros(48, np.float32), bias)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = (bias + np.float32(0)).astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(y.astype(np.float32), np.broadcast_to(expected, y.shape))
