"""Batch norm against the float64 reference: layouts, dtypes, strides, options."""

import itertools

import numpy as np
import pytest
import reference
import tolerances
from cases import DTYPES, draw, permuted, with_gaps
from tolerances import assert_within

import cunorm

#: (shape, channel axis): every kernel family, whole and odd lengths, few and many channels.
SHAPES = [
    ((8, 16, 4, 4), 1),  # short runs
    ((8, 5, 7, 7), 1),
    ((20, 6, 12, 13), 1),  # middling runs, many rows
    ((3, 7, 17, 19), 1),  # runs
    ((2, 3, 70, 71), 1),  # runs longer than a chunk
    ((1, 4, 33), 1),  # batch of one
    ((37, 10), 1),  # dense layers
    ((257, 3), 1),
    ((6, 1000), -1),
    ((4, 5, 6, 32), -1),  # channels last
    ((9, 5, 5, 3), -1),
    ((5, 2, 3, 4, 6), 1),  # 3-D
    ((5, 6, 7), 0),  # channels first of all
    ((2, 1), 1),
    ((3, 1, 1, 1), 1),
]


def check_forward(x, weight, bias, channel_axis, **options):
    number = x.shape[channel_axis]
    count = x.size // number
    wide = np.float64 if x.dtype == np.float64 else np.float32
    running = np.zeros(number, wide), np.ones(number, wide)
    y, saved = cunorm.batch_norm_forward(
        x, weight, bias, *running, channel_axis=channel_axis, **options
    )
    result = reference.forward(x, weight, bias, channel_axis=channel_axis)
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    accumulator = np.float64 if x.dtype == np.float64 else np.float32
    assert saved.mean.dtype == saved.inv_std.dtype == accumulator
    dtype = x.dtype
    assert_within(y, result.y, tolerances.y_bound(result, weight, bias, count, dtype), "y")
    bound = tolerances.mean_bound(result, count, dtype)
    assert_within(saved.mean, result.mean, bound, "mean")
    bound = tolerances.inv_std_bound(result, count, dtype)
    assert_within(saved.inv_std, result.inv_std, bound, "inv_std")
    # Blended with a factor of 0.1 into 0 and 1, and rounded.
    rounded = 4 * tolerances.roundoff(wide)
    expected = 0.1 * result.mean
    bound = 0.1 * tolerances.mean_bound(result, count, dtype) + rounded * np.abs(expected)
    assert_within(running[0], expected, bound, "running mean")
    bessel = count / (count - 1)
    expected = 0.9 + 0.1 * bessel * result.var
    bound = 0.1 * bessel * tolerances.var_bound(result, count, dtype) + rounded * expected
    assert_within(running[1], expected, bound, "running variance")
    return y, saved


def check_backward(dy, x, saved, weight, channel_axis, output_mask=(True, True, True)):
    actual = cunorm.batch_norm_backward(dy, x, saved, weight, output_mask=output_mask)
    count = x.size // x.shape[channel_axis]
    result = reference.forward(x, channel_axis=channel_axis)
    expected = reference.backward(dy, x, weight, channel_axis=channel_axis)
    bounds = tolerances.backward_bounds(expected, result, dy, weight, count, x.dtype)
    assert actual[0] is None or actual[0].dtype == x.dtype
    for name, wanted, got in zip(expected._fields, output_mask, actual, strict=True):
        if wanted:
            assert_within(got, getattr(expected, name), getattr(bounds, name), name)
        else:
            assert got is None, name
    return actual[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_training(rng, shape, axis, dtype):
    x, dy = draw(rng, shape, dtype), rng.standard_normal(shape).astype(dtype)
    accumulator = np.float64 if dtype == np.float64 else np.float32
    weight = rng.standard_normal(shape[axis]).astype(accumulator)
    bias = rng.standard_normal(shape[axis]).astype(accumulator)
    before = x.copy()
    _, saved = check_forward(x, weight, bias, axis)
    check_backward(dy, x, saved, weight, axis)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=lambda d: np.dtype(d).name)
def test_training_far_from_the_caches(rng, dtype):
    """Whole rows of an array of more than 16 MB are read one after another."""
    shape = (150_001, 58)
    x, dy = draw(rng, shape, dtype), rng.standard_normal(shape).astype(dtype)
    assert x.nbytes > 16 << 20
    weight = rng.standard_normal(58).astype(np.float32)
    _, saved = check_forward(x, weight, None, 1)
    check_backward(dy, x, saved, weight, 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("sample", [(1001,), (45, 31), (150, 8)], ids=str)
def test_training_in_four_blocks(rng, sample, dtype):
    """Columns of 128 to 256 KB, the last block narrower."""
    shape = (200_000 // (np.dtype(dtype).itemsize * np.prod(sample)), *sample)
    x, dy = draw(rng, shape, dtype), rng.standard_normal(shape).astype(dtype)
    assert 128 << 10 <= x.nbytes <= 256 << 10
    weight = rng.standard_normal(shape[1]).astype(np.float32)
    _, saved = check_forward(x, weight, None, 1)
    check_backward(dy, x, saved, weight, 1)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_training_in_small_pieces(rng, small_pieces, backend, shape, axis, dtype, resident):
    """Every way of cutting an array gives the right numbers, also in place, streamed or not."""
    small_pieces(resident)
    x, dy = draw(rng, shape, dtype), rng.standard_normal(shape).astype(dtype)
    accumulator = np.float64 if dtype == np.float64 else np.float32
    weight = rng.standard_normal(shape[axis]).astype(accumulator)
    y, saved = check_forward(x, weight, None, axis)
    dx = check_backward(dy, x, saved, weight, axis)
    for streaming in (True, False) if backend == "cpu" else (True,):
        small_pieces(resident, streaming)
        in_place = dy.copy()
        cunorm.batch_norm_backward(in_place, x, saved, weight, out=in_place)
        np.testing.assert_array_equal(in_place, dx)
        in_place = x.copy()
        cunorm.batch_norm_forward(in_place, weight, channel_axis=axis, out=in_place)
        np.testing.assert_array_equal(in_place, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(
    ("shape", "axis"), [((6, 5, 9, 11), 1), ((6, 5, 7, 32), -1), ((40, 9), 1)], ids=str
)
def test_inference(rng, shape, axis, dtype):
    number = shape[axis]
    x, dy = draw(rng, shape, dtype), rng.standard_normal(shape).astype(dtype)
    weight, bias, mean = rng.standard_normal((3, number)).astype(np.float64)
    var = rng.uniform(0.5, 2.0, number)
    if dtype != np.float64:
        weight, bias, mean, var = (a.astype(np.float32) for a in (weight, bias, mean, var))
    y, saved = cunorm.batch_norm_forward(
        x, weight, bias, mean, var, training=False, channel_axis=axis
    )
    result = reference.forward(x, weight, bias, mean=mean, var=var, channel_axis=axis)
    bound = tolerances.y_bound(result, weight, bias, 1, dtype)
    assert_within(y, result.y, bound, "y")
    expected = reference.backward(dy, x, weight, mean=mean, var=var, channel_axis=axis)
    count = x.size // number
    bounds = tolerances.backward_bounds(expected, result, dy, weight, count, dtype)
    for mask in itertools.product([True, False], repeat=3):
        actual = cunorm.batch_norm_backward(dy, x, saved, weight, output_mask=mask)
        for name, wanted, got in zip(expected._fields, mask, actual, strict=True):
            if wanted:
                assert_within(got, getattr(expected, name), getattr(bounds, name), name)
            else:
                assert got is None, name


@pytest.mark.parametrize("resident", [True, False])
def test_inference_backward_in_small_pieces(rng, small_pieces, resident):
    """The statistics are given numbers: dx = dy * weight * inv_std, whatever x is."""
    small_pieces(resident)
    for shape, axis in SHAPES:
        x, dy = draw(rng, shape, np.float32), rng.standard_normal(shape).astype(np.float32)
        number = shape[axis]
        weight, mean = rng.standard_normal((2, number)).astype(np.float32)
        var = rng.uniform(0.5, 2.0, number).astype(np.float32)
        x.flat[0] = np.inf
        _, saved = cunorm.batch_norm_forward(
            x, weight, None, mean, var, training=False, channel_axis=axis
        )
        dx, _, dbias = cunorm.batch_norm_backward(dy, x, saved, weight)
        finite = np.ones_like(x)  # dx does not depend on x
        expected = reference.backward(dy, finite, weight, mean=mean, var=var, channel_axis=axis)
        assert_within(dx, expected.dx, 4 * 2.0**-24 * np.abs(expected.dx), "dx")
        axes = reference.reduced_axes(x.ndim, axis)
        bound = tolerances.gamma(x.size // number, np.float32) * np.abs(dy).sum(axes)
        assert_within(dbias, dy.astype(np.float64).sum(axes), bound, "dbias")


MASKS = list(itertools.product([True, False], repeat=3))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_output_mask(rng, mask):
    """What is left out is None, what is not has the same bits."""
    for shape, axis in [((6, 5, 20, 11), 1), ((6, 5, 7, 32), -1)]:
        x, dy = rng.standard_normal((2, *shape)).astype(np.float32)
        weight = rng.standard_normal(shape[axis]).astype(np.float32)
        _, saved = cunorm.batch_norm_forward(x, weight, channel_axis=axis)
        everything = cunorm.batch_norm_backward(dy, x, saved, weight)
        masked = cunorm.batch_norm_backward(dy, x, saved, weight, output_mask=mask)
        for wanted, whole, part in zip(mask, everything, masked, strict=True):
            if wanted:
                np.testing.assert_array_equal(part, whole)
            else:
                assert part is None


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_permuted_memory(rng, order, dtype):
    """A dense array is computed where it lies and its results lie the same way."""
    shape = (4, 3, 5, 6)
    x = permuted(draw(rng, shape, dtype), order)
    dy = permuted(rng.standard_normal(shape).astype(dtype), order)
    weight = rng.standard_normal(3).astype(np.float64 if dtype == np.float64 else np.float32)
    y, saved = check_forward(x, weight, None, 1)
    assert y.strides == x.strides
    dx = check_backward(dy, x, saved, weight, 1)
    assert dx.strides == x.strides


@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (6, 40, 7, 2), (2, 3, 40, 40)], ids=str)
def test_any_strides(rng, shape):
    """Gaps, reversed and broadcast axes, and operands in different orders."""
    base = draw(rng, shape, np.float32)
    weight = rng.standard_normal(shape[1]).astype(np.float32)
    variants = {
        "plain": base,
        "gaps": with_gaps(base),
        "reversed": base[::-1].copy()[::-1],
        "permuted": permuted(base, (0, 2, 3, 1)),
        "part": np.pad(base, ((1, 2), (3, 1), (0, 0), (2, 2)))[1:-2, 3:-1, :, 2:-2],
        "unaligned": np.frombuffer(b"\0" + base.tobytes(), np.float32, base.size, 1).reshape(shape),
    }
    gradient = rng.standard_normal(shape).astype(np.float32)
    gradients = {
        "plain": gradient,
        "gaps": with_gaps(gradient),
        "permuted": permuted(gradient, (3, 0, 2, 1)),
    }
    for x in variants.values():
        np.testing.assert_array_equal(x, base)
        _, saved = check_forward(x, weight, None, 1)
        for dy in gradients.values():
            kept = dy.copy(), x.copy()
            check_backward(dy, x, saved, weight, 1)
            np.testing.assert_array_equal(dy, kept[0])
            np.testing.assert_array_equal(x, kept[1])
            check_backward(dy, x, saved, weight, 1, output_mask=(False, True, True))
        moments = cunorm.batch_norm_statistics(x)
        np.testing.assert_allclose(moments.mean, saved.mean, rtol=1e-6)
    constant = np.broadcast_to(np.float32(3), shape)
    np.testing.assert_array_equal(cunorm.batch_norm_forward(constant)[0], np.zeros(shape))


@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (2, 3, 40, 40)], ids=str)
def test_out(rng, shape):
    """Any `out` of the right shape receives y and is what comes back."""
    x = draw(rng, shape, np.float32)
    expected, saved = cunorm.batch_norm_forward(x)
    dy = rng.standard_normal(shape).astype(np.float32)
    dx, _, _ = cunorm.batch_norm_backward(dy, x, saved)
    for empty in (
        np.empty(shape, np.float32),
        permuted(np.empty(shape, np.float32), (0, 2, 3, 1)),
        with_gaps(np.empty(shape, np.float32)),
    ):
        out = empty
        out[...] = np.nan
        y, _ = cunorm.batch_norm_forward(x, out=out)
        assert y is out
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
        out[...] = np.nan
        gradient, _, _ = cunorm.batch_norm_backward(dy, x, saved, out=out)
        assert gradient is out
        np.testing.assert_allclose(out, dx, rtol=1e-5, atol=1e-5)


def test_in_place(rng):
    """`out` may be x itself, for dx also dy, in any memory order."""
    for order in [(0, 1, 2, 3), (0, 2, 3, 1)]:
        base = permuted(draw(rng, (4, 3, 15, 16), np.float32), order)
        dy = permuted(rng.standard_normal(base.shape).astype(np.float32), order)
        expected, saved = cunorm.batch_norm_forward(base)
        x = permuted(base, order)
        y, _ = cunorm.batch_norm_forward(x, out=x)
        assert y is x
        np.testing.assert_array_equal(x, expected)
        dx, _, _ = cunorm.batch_norm_backward(dy, base, saved)
        x, gradient = permuted(base, order), permuted(dy, order)
        np.testing.assert_array_equal(
            cunorm.batch_norm_backward(gradient, base, saved, out=gradient)[0], dx
        )
        np.testing.assert_array_equal(gradient, dx)
        np.testing.assert_array_equal(cunorm.batch_norm_backward(dy, x, saved, out=x)[0], dx)
    # x in place, while dy lies in another order: neither may spoil the other.
    x, gradient = base.copy(), np.ascontiguousarray(dy)
    cunorm.batch_norm_backward(permuted(gradient, (3, 2, 1, 0)), x, saved, out=x)
    np.testing.assert_allclose(x, dx, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_parameters_of_another_dtype(rng, dtype):
    """Parameters and running statistics keep their own dtype."""
    x = draw(rng, (6, 4, 5, 5), dtype)
    dy = rng.standard_normal(x.shape).astype(dtype)
    for parameter in {np.dtype(dtype), np.dtype(np.float32), np.dtype(np.float64)}:
        weight, bias = rng.standard_normal((2, 4)).astype(parameter)
        running_mean, running_var = np.zeros(4, parameter), np.ones(4, parameter)
        y, saved = cunorm.batch_norm_forward(x, weight, bias, running_mean, running_var)
        result = reference.forward(x, weight, bias)
        count = x.size // 4
        assert_within(y, result.y, tolerances.y_bound(result, weight, bias, count, dtype), "y")
        _, dweight, dbias = cunorm.batch_norm_backward(dy, x, saved, weight)
        assert dweight.dtype == dbias.dtype == parameter
        v = tolerances.roundoff(parameter) + tolerances.roundoff(saved.mean.dtype)
        bound = tolerances.mean_bound(result, count, dtype) + 2 * v * np.abs(result.mean)
        assert_within(running_mean, 0.1 * result.mean, 0.1 * bound + 1e-45, "running_mean")
        var = 0.9 + 0.1 * result.var * count / (count - 1)
        bound = 0.1 * tolerances.var_bound(result, count, dtype) + 2 * v * var
        assert_within(running_var, var, bound, "running_var")


def test_optional_parameters(rng):
    """Each of weight, bias and the running statistics can be missing."""
    x = draw(rng, (6, 4, 5, 5), np.float32)
    dy = rng.standard_normal(x.shape).astype(np.float32)
    weight, bias = rng.standard_normal((2, 4)).astype(np.float32)
    for w, b in itertools.product([weight, None], [bias, None]):
        _, saved = check_forward(x, w, b, 1)
        check_backward(dy, x, saved, w, 1)
    both = np.zeros(4, np.float32), np.ones(4, np.float32)
    cunorm.batch_norm_forward(x, None, None, *both)
    mean, var = np.zeros(4, np.float32), np.ones(4, np.float32)
    cunorm.batch_norm_forward(x, running_mean=mean)
    cunorm.batch_norm_forward(x, running_var=var)
    np.testing.assert_array_equal(mean, both[0])
    np.testing.assert_array_equal(var, both[1])
    assert not np.array_equal(var, np.ones(4))


def test_dx_lies_like_x(rng):
    """Also where it is computed from dy alone."""
    x = np.asfortranarray(rng.standard_normal((8, 4)).astype(np.float32))
    dy = rng.standard_normal((8, 4)).astype(np.float32)
    for training in (True, False):
        _, saved = cunorm.batch_norm_forward(
            x, None, None, np.zeros(4), np.ones(4), training=training
        )
        for mask in ((True, True, True), (True, False, False)):
            dx = cunorm.batch_norm_backward(dy, x, saved, output_mask=mask)[0]
            assert dx.strides == x.strides


def test_dbias_has_the_dtype_of_bias(rng):
    x = rng.standard_normal((8, 4)).astype(np.float16)
    _, saved = cunorm.batch_norm_forward(x, np.ones(4, np.float16), np.zeros(4, np.float64))
    _, dweight, dbias = cunorm.batch_norm_backward(x, x, saved, np.ones(4, np.float16))
    assert dweight.dtype == np.float16
    assert dbias.dtype == np.float64
    _, saved = cunorm.batch_norm_forward(x)
    _, dweight, dbias = cunorm.batch_norm_backward(x, x, saved)
    assert dweight.dtype == dbias.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("shape", "axis"), [((8, 5, 6, 7), 1), ((8, 40, 30), 1), ((30, 17), -1)])
def test_the_verbs_compose(rng, shape, axis, dtype):
    """Statistics, transform, reduce, input gradient: the same as forward and backward."""
    x, dy = draw(rng, shape, dtype), rng.standard_normal(shape).astype(dtype)
    number = shape[axis]
    accumulator = np.float64 if dtype == np.float64 else np.float32
    weight, bias = rng.standard_normal((2, number)).astype(accumulator)
    result = reference.forward(x, weight, bias, channel_axis=axis)
    count = x.size // number

    moments = cunorm.batch_norm_statistics(x, channel_axis=axis)
    assert moments.count == count
    assert isinstance(moments.count, int)
    bound = tolerances.mean_bound(result, count, dtype)
    assert_within(moments.mean, result.mean, bound, "mean")
    bound = tolerances.var_bound(result, count, dtype)
    assert_within(moments.m2 / count, result.var, 2 * bound, "var")

    inv_std = 1 / np.sqrt(moments.m2 / count + 1e-5)
    y = cunorm.batch_norm_transform(
        x, moments.mean, inv_std.astype(accumulator), weight, bias, channel_axis=axis
    )
    bound = tolerances.y_bound(result, weight, bias, count, dtype)
    assert_within(y, result.y, 2 * bound, "y")

    sums = cunorm.batch_norm_backward_reduce(dy, x, moments.mean, channel_axis=axis)
    dx = cunorm.batch_norm_backward_transform(
        dy, x, moments.mean, inv_std, weight, *sums, count, channel_axis=axis
    )
    expected = reference.backward(dy, x, weight, channel_axis=axis)
    bounds = tolerances.backward_bounds(expected, result, dy, weight, count, dtype)
    assert_within(dx, expected.dx, 2 * bounds.dx, "dx")
    assert_within(sums[0], expected.dbias, bounds.dbias, "sum_dy")
    assert_within(sums[1] * inv_std, expected.dweight, 2 * bounds.dweight, "sum_dy_xmu")
    in_place = dy.copy()
    result_in_place = cunorm.batch_norm_backward_transform(
        in_place, x, moments.mean, inv_std, weight, *sums, count, channel_axis=axis, out=in_place
    )
    assert result_in_place is in_place
    np.testing.assert_array_equal(in_place, dx)


def test_merge_moments(rng):
    """Uneven and empty parts merge to the moments of the whole."""
    x = rng.standard_normal((50, 7, 3)).astype(np.float32) * 3 + 100
    whole = cunorm.batch_norm_statistics(x)
    cuts = [0, 0, 1, 20, 20, 47, 50]
    parts = [cunorm.batch_norm_statistics(x[a:b]) for a, b in itertools.pairwise(cuts)]
    merged = cunorm.merge_moments(parts)
    assert merged.count == 150
    np.testing.assert_allclose(merged.mean, whole.mean, rtol=3e-7)
    np.testing.assert_allclose(merged.m2, whole.m2, rtol=3e-6)
    assert merged.mean.dtype == np.float32
    empty = cunorm.merge_moments(parts[:1])
    assert empty.count == 0
    np.testing.assert_array_equal(empty.mean, np.zeros(7))
    one = cunorm.merge_moments([parts[0], whole, parts[3]])
    np.testing.assert_array_equal(one.mean, whole.mean)
    np.testing.assert_array_equal(one.m2, whole.m2)
    for wrong in (7, np.zeros(()), whole):
        with pytest.raises(TypeError, match="moments: expected a sequence of Moments, got"):
            cunorm.merge_moments(wrong)
    with pytest.raises(TypeError, match=r"moments\[0\].mean: expected an array, got None"):
        cunorm.merge_moments([whole._replace(mean=None)])
    with pytest.raises(ValueError, match="moments: expected 0 to 2\\^63 - 1, got 18"):
        cunorm.merge_moments([whole._replace(count=2**63 - 1)] * 2)


def test_moments_in_float64(rng):
    """A mean 10^6 times the standard deviation: the separate steps are as exact as the fused."""
    x = (rng.standard_normal((6, 3, 50)) + 1e6).astype(np.float32)
    y, saved = cunorm.batch_norm_forward(x)
    count, mean, m2 = cunorm.batch_norm_statistics(x, dtype=np.float64)
    assert mean.dtype == m2.dtype == np.float64
    inv_std = 1 / np.sqrt(m2 / count + 1e-5)
    np.testing.assert_allclose(inv_std, saved.inv_std, rtol=2e-7)
    apart = cunorm.batch_norm_transform(x, mean, inv_std)
    np.testing.assert_allclose(apart, y, atol=1e-6, rtol=1e-6)
    empty = cunorm.batch_norm_statistics(x[:0], dtype="float64")
    assert empty.mean.dtype == np.float64
    with pytest.raises(TypeError, match="dtype: expected float32 or float64 for x of float32, got"):
        cunorm.batch_norm_statistics(x, dtype=np.float16)


@pytest.mark.cpu
def test_runs_that_are_fetched_ahead(rng):
    """An array of more than 4 MB in runs of less than 4 KB, forward, backward, inference."""
    x, dy = rng.standard_normal((2, 24, 64, 28, 28), dtype=np.float32)
    weight, bias = rng.standard_normal((2, 64), dtype=np.float32)
    y, saved = check_forward(x, weight, bias, 1)
    check_backward(dy, x, saved, weight, 1)
    mean, var = saved.mean, 1 / np.square(saved.inv_std) - np.float32(1e-5)
    again, _ = cunorm.batch_norm_forward(x, weight, bias, mean, var, training=False)
    np.testing.assert_allclose(again, y, atol=1e-5)
