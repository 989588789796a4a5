"""Exactness where it is hard, special values, and the same bits every time."""

import ml_dtypes
import numpy as np
import pytest
import reference
import tolerances
from cases import DTYPES, accumulator, check, group, instance, layer, operands, rms, scale_shift
from tolerances import assert_within

import cunorm
from cunorm.cpu import plan

#: Norms whose statistics are a sample's own, and shapes for them.
BY_SAMPLE = [
    (layer(), (6, 300)),
    (layer(1), (5, 6, 50)),
    (rms(), (6, 300)),
    (rms(), (40, 33)),
    (group(2), (5, 4, 9, 11)),
    (group(4, -1), (5, 40, 8)),
    (instance(), (5, 3, 12, 13)),
    (instance(-1), (5, 40, 3)),
]

LAYOUTS = [((16, 3, 30, 31), 1), ((40, 3, 9, 9), 1), ((16, 30, 31, 3), -1), ((5000, 3), 1)]


@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6])
@pytest.mark.parametrize(("shape", "axis"), LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_mean_much_larger_than_std(rng, shape, axis, dtype, ratio):
    """No digit is lost beyond those that x itself has lost: the bound knows no |mean| / std."""
    x = (rng.standard_normal(shape) + ratio).astype(dtype)
    dy = rng.standard_normal(shape).astype(dtype)
    y, saved = cunorm.batch_norm_forward(x, channel_axis=axis)
    count = x.size // 3
    result = reference.forward(x, channel_axis=axis)
    bound = tolerances.y_bound(result, None, None, count, dtype)
    assert_within(y, result.y, bound, "y")
    dx, dweight, dbias = cunorm.batch_norm_backward(dy, x, saved)
    expected = reference.backward(dy, x, channel_axis=axis)
    bounds = tolerances.backward_bounds(expected, result, dy, None, count, dtype)
    assert_within(dx, expected.dx, bounds.dx, "dx")
    assert_within(dweight, expected.dweight, bounds.dweight, "dweight")
    assert_within(dbias, expected.dbias, bounds.dbias, "dbias")
    moments = cunorm.batch_norm_statistics(x, channel_axis=axis)
    bound = 2 * tolerances.var_bound(result, count, dtype)
    assert_within(moments.m2 / count, result.var, bound, "var")


@pytest.mark.parametrize(("shape", "axis"), LAYOUTS, ids=str)
def test_float64_mean_in_the_steps(rng, shape, axis):
    """Given a mean with all its digits, the steps lose none of float32 data either."""
    x = (rng.standard_normal(shape) + 1e4).astype(np.float32)
    dy = rng.standard_normal(shape).astype(np.float32)
    count = x.size // 3
    result = reference.forward(x, channel_axis=axis)
    y = cunorm.batch_norm_transform(x, result.mean, result.inv_std, channel_axis=axis)
    bound = tolerances.y_bound(result, None, None, count, np.float32)
    assert_within(y, result.y, bound, "y")
    sums = cunorm.batch_norm_backward_reduce(dy, x, result.mean, channel_axis=axis)
    expected = reference.backward(dy, x, channel_axis=axis)
    bounds = tolerances.backward_bounds(expected, result, dy, None, count, np.float32)
    assert_within(sums[1] * result.inv_std, expected.dweight, bounds.dweight, "sum_dy_xmu")
    dx = cunorm.batch_norm_backward_transform(
        dy, x, result.mean, result.inv_std, None, *sums, count, channel_axis=axis
    )
    assert_within(dx, expected.dx, bounds.dx, "dx")


@pytest.mark.parametrize(("shape", "axis"), LAYOUTS, ids=str)
def test_outlier_first(rng, shape, axis):
    """A pivot far from everything else costs nothing."""
    x = rng.standard_normal(shape).astype(np.float32)
    x[(0,) * x.ndim] = 1e6
    result = reference.forward(x, channel_axis=axis)
    count = x.size // 3
    moments = cunorm.batch_norm_statistics(x, channel_axis=axis)
    bound = tolerances.mean_bound(result, count, np.float32)
    assert_within(moments.mean, result.mean, bound, "mean")
    bound = tolerances.var_bound(result, count, np.float32)
    assert_within(moments.m2 / count, result.var, bound, "var")


@pytest.mark.parametrize(
    ("dtype", "value"), [(np.float32, 1e4), (np.float32, 4e18), (np.float64, 2e152)]
)
@pytest.mark.parametrize(
    ("shape", "sample"),
    [
        ((1, 100, 4096), np.s_[:, :, [i for i in range(64) if i % 16 < 4]]),
        ((4, 3, 1024), np.s_[0, :, [i for i in range(64) if i % 16 < 4]]),
        ((64, 700), np.s_[::4]),
    ],
    ids=["run", "runs", "columns"],
)
def test_sample_far_from_the_rest(rng, shape, sample, dtype, value):
    """The CPU's sums are about the mean of a sample, but not if that is far off, or too large."""
    x = (rng.standard_normal(shape) * (1e149 if dtype is np.float64 else 1)).astype(dtype)
    x[sample] = value * (1 + 0.1 * rng.random(x[sample].shape))
    count = x.size // shape[1]
    result = reference.forward(x)
    moments = cunorm.batch_norm_statistics(x)
    bound = tolerances.mean_bound(result, count, dtype)
    assert_within(moments.mean, result.mean, bound, "mean")
    bound = tolerances.var_bound(result, count, dtype)
    assert_within(moments.m2 / count, result.var, bound, "var")
    y, _ = cunorm.batch_norm_forward(x)
    bound = tolerances.y_bound(result, None, None, count, dtype)
    assert_within(y, result.y, bound, "y")


@pytest.mark.parametrize(("shape", "axis"), [((64, 700), 1), ((4, 30, 1024), 1)], ids=str)
def test_channels_beside_one_whose_sample_is_far_off(rng, shape, axis):
    """They are summed as if it were not there, to the bit."""
    x = rng.standard_normal(shape).astype(np.float32)
    expected, _ = cunorm.batch_norm_forward(x, channel_axis=axis)
    x[:, 5] = 0
    x[::4, 5] = 1e4
    found, _ = cunorm.batch_norm_forward(x, channel_axis=axis)
    np.testing.assert_array_equal(np.delete(found, 5, 1), np.delete(expected, 5, 1))


@pytest.mark.parametrize("steps", [0, 2, 7])
@pytest.mark.parametrize(("shape", "axis"), LAYOUTS, ids=str)
def test_data_that_drifts(rng, shape, axis, steps):
    """Sorted, or in a few levels: the first elements say little of the others."""
    count = int(np.prod(shape)) // 3
    values = np.sort(rng.standard_normal((count, 3)), 0) * 1e3
    if steps:
        values = np.arange(count)[:, None] * steps // count * 1e4 + rng.standard_normal((count, 3))
    moved = np.moveaxis(np.empty(shape), axis, -1).shape
    x = np.ascontiguousarray(np.moveaxis(values.reshape(moved), -1, axis), np.float32)
    result = reference.forward(x, channel_axis=axis)
    moments = cunorm.batch_norm_statistics(x, channel_axis=axis)
    bound = tolerances.mean_bound(result, count, np.float32)
    assert_within(moments.mean, result.mean, bound, "mean")
    bound = tolerances.var_bound(result, count, np.float32)
    assert_within(moments.m2 / count, result.var, bound, "var")
    y, _ = cunorm.batch_norm_forward(x, channel_axis=axis)
    bound = tolerances.y_bound(result, None, None, count, np.float32)
    assert_within(y, result.y, bound, "y")


@pytest.mark.parametrize("value", [0.1, -3e4, 1e-6, 12345.678])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("shape", "axis"), LAYOUTS, ids=str)
def test_constant_channel_is_exactly_bias(shape, axis, dtype, value):
    x = np.full(shape, value, dtype)
    accumulator = np.float64 if dtype == np.float64 else np.float32
    bias = np.array([0.5, -1.25, 3.0], accumulator)
    weight = np.array([1e3, 7.0, 0.1], accumulator)
    for eps in (1e-5, 1e-12):
        y, saved = cunorm.batch_norm_forward(x, weight, bias, eps=eps, channel_axis=axis)
        expected = np.broadcast_to(reference.per_channel(bias, x.ndim, axis), shape)
        np.testing.assert_array_equal(y.astype(np.float64), expected)
        np.testing.assert_array_equal(saved.mean, x[(0,) * x.ndim].astype(accumulator))
        np.testing.assert_array_equal(saved.inv_std, accumulator(1 / np.sqrt(eps)))


def test_scale_does_not_matter(rng):
    """Powers of two near the ends of float64's range: nothing in between overflows."""
    x, dy = rng.standard_normal((2, 16, 3, 40))
    expected, saved = cunorm.batch_norm_forward(x, eps=0)
    gradient = cunorm.batch_norm_backward(dy, x, saved)[0]
    for scale in (2.0**400, 2.0**-400):
        y, saved = cunorm.batch_norm_forward(x * scale, eps=0)
        np.testing.assert_array_equal(y, expected)
        dx = cunorm.batch_norm_backward(dy, x * scale, saved)[0]
        np.testing.assert_array_equal(dx * scale, gradient)


def test_outlier_among_few_rows(rng):
    """As many positions as elements: the merging of positions has a pivot of its own."""
    x = rng.standard_normal((508, 1))
    x[0] = 1000
    y, saved = cunorm.batch_norm_forward(x, eps=0)
    result = reference.forward(x, eps=0)
    assert_within(saved.mean, result.mean, tolerances.mean_bound(result, 508, x.dtype), "mean")
    assert_within(y, result.y, tolerances.y_bound(result, None, None, 508, x.dtype), "y")


@pytest.mark.parametrize("training", [True, False])
def test_float64_running_statistics_keep_their_digits(rng, training):
    """Of float32 data too."""
    x = (rng.standard_normal((64, 3, 20)) + 1e4).astype(np.float32)
    result = reference.forward(x)
    if training:
        mean, var = np.zeros(3), np.ones(3)
        cunorm.batch_norm_forward(x, None, None, mean, var, exponential_average_factor=1)
        u = 2.0**-24  # of the variance, and of the deviations' mean, but not of the mean
        assert_within(mean, result.mean, tolerances.gamma(1280, np.float32) * 1.0, "mean")
        assert u * 1e4 > 2 * tolerances.gamma(1280, np.float32)
    else:
        mean, var = result.mean, result.var
        y, saved = cunorm.batch_norm_forward(x, None, None, mean, var, training=False)
        assert_within(y, result.y, tolerances.y_bound(result, None, None, 1, np.float32), "y")
        dweight = cunorm.batch_norm_backward(x, x, saved, output_mask=(False, True, False))[1]
        expected = reference.backward(x, x, mean=mean, var=var)
        bounds = tolerances.backward_bounds(expected, result, x, None, 1280, np.float32)
        assert_within(dweight, expected.dweight, bounds.dweight, "dweight")


@pytest.mark.parametrize(("shape", "axis"), LAYOUTS, ids=str)
def test_infinite_scale(rng, shape, axis):
    """As the formula says: infinity of the deviation's sign, whatever rounding took."""
    x = rng.standard_normal(shape).astype(np.float32)
    mean = np.full(3, 0.1)
    expected = np.sign(x - 0.1) * np.inf
    y = cunorm.batch_norm_transform(x, np.float32(mean), np.full(3, np.inf), channel_axis=axis)
    np.testing.assert_array_equal(y, expected)
    running = np.float32(mean), np.zeros(3, np.float32)
    y, _ = cunorm.batch_norm_forward(
        x, None, None, *running, training=False, eps=0, channel_axis=axis
    )
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(("shape", "axis"), LAYOUTS, ids=str)
def test_infinite_weight_in_training(rng, shape, axis):
    """As the formula says, although rounding took something from the mean."""
    x = rng.standard_normal(shape).astype(np.float32)
    weight = np.array([2, np.inf, 3], np.float32)
    y, saved = cunorm.batch_norm_forward(x, weight, channel_axis=axis)
    assert saved.residual[1] != 0
    y, x = np.moveaxis(y, axis, 0), np.moveaxis(x, axis, 0)
    mean = saved.mean.astype(float) + saved.residual
    np.testing.assert_array_equal(y[1], np.sign(x[1] - mean[1]) * np.inf)
    assert np.isfinite(y[::2]).all()


def test_running_mean_beyond_float32(rng):
    """Counts as infinite for float32 data."""
    x = rng.standard_normal((6, 3, 5)).astype(np.float32)
    running = np.array([1e39, -1e39, 0.0]), np.ones(3)
    y, saved = cunorm.batch_norm_forward(x, None, None, *running, training=False, eps=0)
    np.testing.assert_array_equal(y[:, 0], -np.inf)
    np.testing.assert_array_equal(y[:, 1], np.inf)
    np.testing.assert_array_equal(saved.residual, 0)
    np.testing.assert_allclose(y[:, 2], x[:, 2])


def test_half_does_not_overflow(rng):
    """Squares of values near float16's largest are summed in float32."""
    x = (rng.uniform(-1, 1, (64, 3, 20)) * 6e4).astype(np.float16)
    y, saved = cunorm.batch_norm_forward(x)
    result = reference.forward(x)
    bound = tolerances.y_bound(result, None, None, x.size // 3, np.float16)
    assert_within(y, result.y, bound, "y")
    assert np.isfinite(saved.inv_std).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("shape", "axis"), LAYOUTS, ids=str)
@pytest.mark.parametrize("place", [0, -1, 100])
def test_nan_and_inf_propagate(rng, shape, axis, dtype, place):
    """As the formula says, within their channel and nowhere else."""
    for values in ([np.nan], [np.inf], [-np.inf], [np.inf, -np.inf]):
        x = rng.standard_normal(shape).astype(dtype)
        channel = np.moveaxis(x, axis, 0)[1]
        flat = channel.reshape(-1).copy()
        flat[place] = values[0]
        flat[(place + 57) % flat.size] = values[-1]
        channel[...] = flat.reshape(channel.shape)
        y, saved = cunorm.batch_norm_forward(x, channel_axis=axis)
        with np.errstate(invalid="ignore"):
            mean = flat.astype(np.float64).mean()
        np.testing.assert_array_equal(saved.mean[1], mean)
        assert np.isnan(saved.inv_std[1])
        clean = reference.forward(np.where(np.isfinite(x), x, 0), channel_axis=axis).y
        y = np.moveaxis(y, axis, 0).astype(np.float64)
        clean = np.moveaxis(clean, axis, 0)
        assert np.isnan(y[1]).all()
        np.testing.assert_allclose(y[[0, 2]], clean[[0, 2]], rtol=2e-2, atol=2e-2)


def test_nan_gradient_stays_in_its_channel(rng):
    x, dy = rng.standard_normal((2, 8, 3, 40)).astype(np.float32)
    _, saved = cunorm.batch_norm_forward(x)
    dy[3, 1, 5] = np.nan
    dx, dweight, dbias = cunorm.batch_norm_backward(dy, x, saved)
    assert np.isnan(dx).any((0, 2)).tolist() == [False, True, False]
    assert np.isnan(dx[:, 1]).all()
    assert np.isnan(dweight).tolist() == np.isnan(dbias).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=lambda d: d.__name__)
def test_every_half_value_converts(dtype, backend):
    """Reading and rounding all 65,536 values, and the ties between them, as NumPy does."""
    every = np.arange(65536, dtype=np.uint16).view(dtype).reshape(-1, 1)
    if backend == "gpu" and dtype == ml_dtypes.bfloat16:
        # Float32 subnormals, and what 0.3 makes of them, count as zero there.
        every = every[~(np.abs(every.astype(np.float32)) < 2.0**-120)].reshape(-1, 1)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    y = cunorm.batch_norm_transform(every, zero, one)
    nan = np.isnan(every.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(y.astype(np.float32)), nan)
    np.testing.assert_array_equal(y.astype(np.float32)[~nan], every.astype(np.float32)[~nan])
    for scale in (np.float32(0.3), np.float32(1 / 3), np.float32(0.5), np.float32(1.5)):
        y = cunorm.batch_norm_transform(every, zero, one * scale)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = (every.astype(np.float32) * scale).astype(dtype)
        np.testing.assert_array_equal(y.astype(np.float32)[~nan], expected.astype(np.float32)[~nan])


@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("case", "shape"), BY_SAMPLE, ids=str)
def test_mean_much_larger_than_std_by_sample(rng, case, shape, dtype, ratio):
    x, dy, weight, bias = operands(rng, case, shape, dtype)
    x += dtype(ratio)
    check(case, x, dy, weight, bias)


@pytest.mark.parametrize("value", [0.1, -3e4, 12345.678])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("case", "shape"), [c for c in BY_SAMPLE if c[0].has_bias], ids=str)
def test_constant_sample_is_exactly_bias(rng, case, shape, dtype, value):
    x, _, weight, _ = operands(rng, case, shape, dtype)
    x[...] = dtype(value)
    norm = case.norm(shape)
    bias = np.arange(weight.size).reshape(weight.shape).astype(accumulator(dtype)) / 4 - 2
    y, saved = case.forward(x, weight, bias, eps=1e-12)
    expected = np.broadcast_to(norm.per_parameter(bias, 0.0), norm.split).reshape(shape)
    np.testing.assert_array_equal(y.astype(np.float64), expected.astype(dtype).astype(np.float64))
    np.testing.assert_array_equal(saved.mean, x.flat[0].astype(accumulator(dtype)))
    np.testing.assert_array_equal(saved.inv_std, accumulator(dtype)(1e6))


def test_squares_of_float16_do_not_overflow(rng):
    """Nor does their sum."""
    for shape in [(4, 5000), (300, 40)]:
        x = (rng.choice([-1, 1], shape) * rng.uniform(0.9, 1, shape) * 6e4).astype(np.float16)
        dy = rng.standard_normal(shape).astype(np.float16)
        check(rms(), x, dy, np.ones(shape[1], np.float32), None)
        _, saved = cunorm.rms_norm_forward(x)
        assert np.isfinite(saved.inv_std).all()


def test_tiny_rows_of_rms_norm():
    """Rows far below eps are scaled by 1 / sqrt(eps)."""
    x = np.full((3, 40), 2.0**-60, np.float32)
    y, _ = cunorm.rms_norm_forward(x, eps=2.0**-24)
    np.testing.assert_array_equal(y, x * 2.0**12)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("case", "shape"), BY_SAMPLE, ids=str)
def test_nan_and_inf_stay_in_their_sample(rng, case, shape, dtype, value):
    """Nothing else has other bits."""
    x, dy, weight, bias = operands(rng, case, shape, dtype)
    y, saved = case.forward(x, weight, bias)
    dx = case.backward(dy, x, saved, weight)[0]
    x[2].flat[7] = value
    poisoned, saved = case.forward(x, weight, bias)
    gradient, dweight, _ = case.backward(dy, x, saved, weight)
    others = np.arange(shape[0]) != 2
    np.testing.assert_array_equal(poisoned[others], y[others])
    np.testing.assert_array_equal(gradient[others], dx[others])
    assert np.isnan(poisoned[2].astype(float)).any()
    assert np.isnan(gradient[2].astype(float)).any()
    assert np.isnan(dweight).any()
    if saved.mean is not None and not np.isnan(value):
        assert np.isinf(saved.mean[2]).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("case", "shape"), BY_SAMPLE, ids=str)
def test_samples_do_not_depend_on_each_other(rng, case, shape, dtype):
    """The same bits alone, among fewer, among more, and in another place."""
    x, dy, weight, bias = operands(rng, case, shape, dtype)

    def results(part):
        a, d = np.ascontiguousarray(x[part]), np.ascontiguousarray(dy[part])
        y, saved = case.forward(a, weight, bias)
        mean = saved.inv_std if saved.mean is None else saved.mean
        return y, case.backward(d, a, saved, weight)[0], saved.inv_std, mean

    whole = results(slice(None))
    many = np.tile(np.arange(shape[0]), 30)
    for part in [slice(3, 4), slice(0, None, 2), slice(None, None, -1), many]:
        for some, every in zip(results(part), whole, strict=True):
            np.testing.assert_array_equal(some, every[part])


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("case", "shape"),
    [
        (group(3, 2), (24, 128, 3, 57)),  # x is more than 2 MB
        (group(4, -1), (40, 1500, 50, 4)),
        (instance(-1), (9, 300, 700, 8)),  # a sample is
    ],
    ids=str,
)
def test_samples_do_not_depend_on_how_large_all_of_x_is(rng, case, shape):
    x, dy, weight, bias = operands(rng, case, shape, np.float32)
    y, saved = case.forward(x, weight, bias)
    dx = case.backward(dy, x, saved, weight)[0]
    alone, saved = case.forward(x[:1], weight, bias)
    np.testing.assert_array_equal(alone, y[:1])
    np.testing.assert_array_equal(case.backward(dy[:1], x[:1], saved, weight)[0], dx[:1])


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("case", "shape"),
    [
        (layer(), (3000, 768)),
        (layer(), (3, 700_000)),
        (layer(), (100_000, 7)),
        (rms(), (2000, 1000)),
        (rms(), (70_000, 16)),
        (group(8), (16, 64, 28, 28)),
        (group(32, -1), (8, 28, 28, 256)),
        (instance(), (16, 30, 60, 61)),
        (scale_shift(False), (16, 64, 28, 29)),
        (scale_shift(True), (16, 64, 28, 29)),
        (scale_shift(True, -1), (16, 28, 29, 64)),
    ],
    ids=str,
)
def test_same_bits_of_every_norm_with_any_number_of_threads(rng, threads, case, shape):
    x, dy = rng.standard_normal((2, *shape)).astype(np.float32)
    affine = case.norm(shape).parameters_shape
    weight, bias = rng.standard_normal((2, *affine)).astype(np.float32)

    def results():
        y, saved = case.forward(x, weight, bias)
        return y, *(saved or ())[:3], *case.backward(dy, x, saved, weight)

    threads(1)
    first = results()
    for number in (1, 2, 3, 7):
        threads(number)
        plan._plan.cache_clear()  # as in a process that begins with this number
        for a, b in zip(first, results(), strict=True):
            np.testing.assert_array_equal(a, b)


def everything(x, dy, axis):
    weight = np.linspace(0.5, 2, x.shape[axis]).astype(np.float32)
    running = np.zeros(x.shape[axis]), np.ones(x.shape[axis])
    y, saved = cunorm.batch_norm_forward(x, weight, None, *running, channel_axis=axis)
    gradients = cunorm.batch_norm_backward(dy, x, saved, weight)
    moments = cunorm.batch_norm_statistics(x, channel_axis=axis)
    sums = cunorm.batch_norm_backward_reduce(dy, x, saved.mean, channel_axis=axis)
    return [y, *saved[:3], *gradients, *running, *moments[1:], *sums]


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((16, 3, 200, 201), 1),
        ((2, 2, 900, 700), 1),
        ((8, 5, 20_000), 1),  # channels that fit the cache, but too few for many threads
        ((1250, 5, 18), 1),
        ((255, 16, 31), 1),
        ((127, 63, 2), 1),
        ((64, 256, 14, 14), 1),
        ((32, 64, 7, 7), 1),
        ((128, 48, 48, 3), -1),
        ((100_000, 17), 1),
        ((64, 20_000), 1),
        ((16, 20, 20, 256), -1),
    ],
    ids=str,
)
def test_same_bits_with_any_number_of_threads(rng, threads, shape, axis):
    """And in every run."""
    x, dy = rng.standard_normal((2, *shape)).astype(np.float32)
    threads(1)
    first = everything(x, dy, axis)
    for number in (1, 2, 3, 7):
        threads(number)
        plan._plan.cache_clear()  # as in a process that begins with this number
        for _ in range(2):
            for a, b in zip(first, everything(x, dy, axis), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.cpu
def test_unaligned_output_has_the_same_bits(rng):
    """Streaming stores start at cache lines; what lies before and after is written too."""
    x = rng.standard_normal((20, 3, 600, 601)).astype(np.float32)
    expected = cunorm.batch_norm_forward(x)[0]
    buffer = np.full(x.size + 64, np.nan, np.float32)
    for offset in (1, 5, 16, 31):
        out = buffer[offset : offset + x.size].reshape(x.shape)
        cunorm.batch_norm_forward(x, out=out)
        np.testing.assert_array_equal(out, expected)
        assert np.isnan(buffer[offset - 1])
        assert np.isnan(buffer[offset + x.size])
        buffer[...] = np.nan


@pytest.mark.cpu
@pytest.mark.parametrize("length", [5, 64, 300, 9000])
def test_variance_beyond_float64(rng, length):
    """It is infinite, and y the bias: of rows, runs and columns."""
    x = rng.normal(0, 1e170, (12, length))
    bias = rng.normal(size=length)
    y, saved = cunorm.layer_norm_forward(x, None, bias, axis=-1)
    np.testing.assert_array_equal(saved.inv_std, 0)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, x.shape))
    for shape, axis in (((4, 3, length), 1), ((4, length, 3), -1)):
        y, saved = cunorm.batch_norm_forward(
            x.reshape(shape), None, bias[:3].copy(), channel_axis=axis
        )
        np.testing.assert_array_equal(saved.inv_std, 0)
        expected = np.broadcast_to(bias[:3], (4, length, 3))
        np.testing.assert_array_equal(y, expected if axis < 0 else np.moveaxis(expected, -1, 1))
