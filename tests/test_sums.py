"""Sums over runs, in registers of either size: of every length, at every place."""

import numpy as np
import pytest
from llvmlite import ir
from ml_dtypes import bfloat16
from numba import njit

from cunorm.cpu import elements, sums

pytestmark = pytest.mark.cpu

# How kernels see them, and the type they are summed in.
KINDS = {
    "float16": (np.float16, np.uint16, np.float32),
    "bfloat16": (bfloat16, np.int16, np.float32),
    "float32": (np.float32, np.float32, np.float32),
    "float64": (np.float64, np.float64, np.float64),
}
LENGTHS = [*range(140), 1000, 4097]


@pytest.fixture(params=[32, 64], ids="registers of {} bytes".format)
def all_sums(request, monkeypatch):
    """A function of (dy, x, start, length, center, ...) that gives all sums of a run."""
    monkeypatch.setattr(sums, "REGISTER_BYTES", request.param)

    @njit(fastmath={"contract"})
    def compiled(dy, x, start, length, center, ahead, jump):
        single = sums.sum_about(x, start, length, center)
        return (
            single,
            sums.sums_about(x, start, length, center, ahead, jump),
            sums.sums_with(dy, x, start, length, center, ahead, jump),
        )

    def called(dy, x, start, length, center, ahead=0, jump=0):
        number = KINDS[x.dtype.name][2]
        dy, x = (array.view(KINDS[array.dtype.name][1]) for array in (dy, x))
        single, (total, squares), (of_dy, of_products) = compiled(
            dy, x, start, length, number(center), ahead, jump
        )
        assert single == total or np.isnan(single) == np.isnan(total)
        return np.array([total, squares, of_dy, of_products])

    return called


@pytest.mark.parametrize("dtype", KINDS)
def test_sums_of_runs(rng, all_sums, dtype):
    """As float64 has them, but for an ulp of every partial sum; of nothing beyond the run."""
    kind, _, number = KINDS[dtype]
    center = number(0.3)
    for length in LENGTHS:
        values = rng.normal(1, 2, (2, length)).astype(kind)
        found = []
        for start in (0, 3):
            dy, x = np.full((2, start + length + 40), np.nan, kind)
            dy[start : start + length], x[start : start + length] = values
            found.append(all_sums(dy, x, start, length, center))
            found.append(all_sums(dy, x, start, length, center, 64, 1 << 20))
        for other in found[1:]:  # wherever they lie, and whatever is fetched
            np.testing.assert_array_equal(found[0], other)
        dy, x = values.astype(np.longdouble)
        deviation = x - center
        terms = np.array([deviation, deviation**2, dy, dy * deviation])
        bound = (length + 3) * np.finfo(number).eps * np.abs(terms).sum(axis=1)
        assert (np.abs(found[0] - terms.sum(axis=1)) <= bound).all(), length


@pytest.mark.parametrize("dtype", KINDS)
def test_what_is_fetched(monkeypatch, dtype):
    """The rest of a run and the begin of the next one, but for a step between them; or nothing."""

    def mark(context, builder, kind, array, index):
        address = elements._address(context, builder, kind, array, index)
        builder.store(ir.Constant(address.type.pointee, 1), address)

    monkeypatch.setattr(sums, "fetch_line", mark)
    kind, view, number = KINDS[dtype]
    line, step = 64 // np.dtype(kind).itemsize, 256 // np.dtype(kind).itemsize

    @njit
    def compiled(dy, x, start, length, ahead, jump):
        sums.sums_about(x, start, length, number(0), ahead, jump)
        sums.sums_with(dy, x, start, length, number(0), ahead, jump)

    for start, length, ahead, jump in [
        (3, 20 * line, 8 * line, 0), (0, 20 * line + 5, 8 * line, 1000), (7, 777, 777, 2000),
        (5, 40, 8 * line, 0), (0, 500, 0, 1000), (2 * line, 5 * line, 16 * line, 3000),
    ]:  # fmt: skip
        arrays = np.zeros((2, 8192), kind)
        dy, x = arrays
        compiled(dy.view(view), x.view(view), start, length, ahead, jump)
        end, following = start + length, start + length + jump
        wanted = {
            *range(start + ahead, end),
            *range(following + max(step, ahead - length), following + ahead),
        }
        begins = end, following, following + ahead
        beyond = {i for begin in begins for i in range(begin, begin + step)}
        for marked in map(np.flatnonzero, arrays):
            fetched = {i for first in marked for i in range(first, first + line)}
            if ahead == 0:
                assert not fetched
            else:
                assert not wanted - fetched
                assert not fetched - wanted - beyond


@pytest.mark.parametrize("registers", [32, 64])
@pytest.mark.parametrize("dtype", KINDS)
def test_sums_of_runs_that_are_scaled(rng, monkeypatch, dtype, registers):
    """The same bits as without; what is scaled may be where the elements were."""
    monkeypatch.setattr(sums, "REGISTER_BYTES", registers)
    kind, view, number = KINDS[dtype]
    center, scale = number(0.3), number(1.7)

    @njit(fastmath={"contract"})
    def compiled(dy, x, dx, start, length, center, scale):
        return (
            sums.sums_with(dy, x, start, length, center, 0, 0),
            sums.sums_with_scaled(dy, x, dx, start, length, center, scale, 64, 0),
        )

    line = 64 // np.dtype(kind).itemsize
    start = line // 4  # 16 bytes from where arrays begin
    for lines in (*range(1, 20), 100):
        length = lines * line
        values = rng.normal(1, 2, (2, length + line)).astype(kind)
        values[0, ::5] = -0.0
        run = slice(start, start + length)
        scaled = (values[0].astype(number) * scale + number(0)).astype(kind)
        for place in range(3):
            arrays = [*values.copy(), np.full(length + line, 7, kind)]
            expected = arrays[place].copy()
            expected[run] = scaled[run]
            dy, x = (one.view(view) for one in arrays[:2])
            dx = arrays[place].view(view)
            assert dx.ctypes.data % 16 == 0
            without, found = compiled(dy, x, dx, start, length, center, scale)
            assert found == without
            np.testing.assert_array_equal(dx, expected.view(view))


@pytest.mark.parametrize("dtype", KINDS)
def test_infinite_elements_of_runs(all_sums, dtype):
    """What the last vector has again counts for nothing, be it infinite."""
    kind = KINDS[dtype][0]
    for length in (17, 33, 70):
        for place in range(length):
            x = np.ones(length, kind)
            x[place] = np.inf
            found = all_sums(np.ones(length, kind), x, 0, length, 0.5)
            np.testing.assert_array_equal(found, [np.inf, np.inf, length, np.inf])


@pytest.mark.parametrize("dtype", KINDS)
def test_sum_of_a_sample(rng, dtype):
    """It is of four pieces of the next 64 elements, and of nothing beyond them."""
    kind, view, number = KINDS[dtype]
    sampled = [i for i in range(64) if i % 16 < 4]

    @njit
    def compiled(x, start, center):
        return sums.sum_of_sample(x, start, center)

    assert len(sampled) == sums.SAMPLED
    for start in (0, 3):
        x = np.full(start + 64, np.nan, kind)
        x[start:][sampled] = rng.normal(1, 2, sums.SAMPLED)
        deviation = x[start:][sampled].astype(np.longdouble) - number(0.3)
        bound = sums.SAMPLED * np.finfo(number).eps * np.abs(deviation).sum()
        found = compiled(x.view(view), start, number(0.3))
        assert abs(found - deviation.sum()) <= bound
