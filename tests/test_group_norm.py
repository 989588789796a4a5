"""Group and instance norm against the float64 reference: layouts, dtypes, strides, options."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import reference
import tolerances
from cases import (
    DTYPES,
    check,
    check_forward,
    draw,
    group,
    instance,
    operands,
    permuted,
    with_gaps,
)
from tolerances import assert_within

import cunorm

#: (case, shape): few and many channels a group, short and long runs, channels anywhere.
CASES = [
    (group(2), (3, 6, 5, 7)),
    (group(4), (2, 4, 33)),
    (group(1), (5, 12, 4)),
    (group(8), (2, 32, 8, 8)),
    (group(3, -1), (3, 5, 4, 12)),
    (group(8, -1), (2, 40, 32)),
    (group(2, 2), (3, 5, 4, 7)),
    (group(5), (4, 20)),
    (group(2), (5, 128, 7, 7)),
    (instance(), (3, 5, 7, 9)),
    (instance(), (2, 3, 70, 71)),
    (instance(-1), (3, 6, 6, 5)),
    (instance(2), (2, 5, 4, 3)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("case", "shape"), CASES, ids=str)
def test_reference(rng, case, shape, dtype):
    check(case, *operands(rng, case, shape, dtype))


@pytest.mark.parametrize("resident", [True, False])
def test_small_pieces(rng, small_pieces, backend, resident):
    """Every way of cutting an array gives the right numbers, also in place, streamed or not."""
    for dtype, (case, shape) in itertools.product(DTYPES[:3], CASES):
        small_pieces(resident)
        x, dy, weight, bias = operands(rng, case, shape, dtype)
        y, saved, dx, *_ = check(case, x, dy, weight, bias)
        for streaming in (True, False) if backend == "cpu" else (True,):
            small_pieces(resident, streaming)
            in_place = dy.copy()
            case.backward(in_place, x, saved, weight, out=in_place)
            np.testing.assert_array_equal(in_place, dx)
            in_place = x.copy()
            case.forward(in_place, weight, bias, out=in_place)
            np.testing.assert_array_equal(in_place, y)


@pytest.mark.parametrize("case", [group(2), instance()], ids=str)
def test_optional_parameters_and_output_mask(rng, case):
    """What is left out is None, what is not has the same bits."""
    x, dy, weight, bias = operands(rng, case, (3, 6, 5, 7), np.float32)
    for w, b in itertools.product([weight, None], [bias, None]):
        _, saved, *everything = check(case, x, dy, w, b)
        assert everything[1].dtype == everything[2].dtype == np.float32
        for mask in itertools.product([True, False], repeat=3):
            masked = case.backward(dy, x, saved, w, output_mask=mask)
            for wanted, whole, part in zip(mask, everything, masked, strict=True):
                if wanted:
                    np.testing.assert_array_equal(part, whole)
                else:
                    assert part is None


@pytest.mark.parametrize("case", [group(2), instance()], ids=str)
def test_permuted_memory(rng, case):
    """Results lie like x whatever lies slowest in it."""
    shape = (3, 4, 5, 6)
    base, gradient, weight, bias = operands(rng, case, shape, np.float32)
    for order in itertools.permutations(range(4)):
        x, dy = permuted(base, order), permuted(gradient, order)
        y, _, dx, *_ = check(case, x, dy, weight, bias)
        assert y.strides == dx.strides == x.strides


@pytest.mark.parametrize("case", [group(2), instance()], ids=str)
def test_any_strides(rng, case):
    shape = (4, 6, 5, 8)
    base, gradient, weight, bias = operands(rng, case, shape, np.float32)
    variants = [
        base,
        with_gaps(base),
        base[::-1].copy()[::-1],
        permuted(base, (0, 2, 3, 1)),
        permuted(base, (3, 0, 1, 2)),
        np.pad(base, ((1, 2), (3, 1), (0, 0), (2, 2)))[1:-2, 3:-1, :, 2:-2],
        np.frombuffer(b"\0" + base.tobytes(), np.float32, base.size, 1).reshape(shape),
    ]
    for x, dy in itertools.product(
        variants, [gradient, with_gaps(gradient), permuted(gradient, (3, 0, 2, 1))]
    ):
        check(case, x, dy, with_gaps(weight), bias)
    constant = np.broadcast_to(np.float32(3), shape)
    np.testing.assert_array_equal(case.forward(constant, None, None)[0], np.zeros(shape))


@pytest.mark.parametrize("case", [group(2), instance()], ids=str)
def test_out(rng, case):
    """Any `out` of the right shape receives the result and is what comes back."""
    shape = (3, 4, 5, 6)
    x, dy, weight, bias = operands(rng, case, shape, np.float32)
    y, saved, dx, *_ = check(case, x, dy, weight, bias)
    close = {"rtol": 1e-5, "atol": 1e-5}
    for order in [(0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 2, 3), None]:
        out = np.empty(shape, np.float32)
        out = with_gaps(out) if order is None else permuted(out, order)
        out[...] = np.nan
        assert case.forward(x, weight, bias, out=out)[0] is out
        np.testing.assert_allclose(out, y, **close)
        out[...] = np.nan
        assert case.backward(dy, x, saved, weight, out=out)[0] is out
        np.testing.assert_allclose(out, dx, **close)
        if order is not None:
            own, gradient = permuted(x, order), permuted(dy, order)
            assert case.backward(gradient, x, saved, weight, out=gradient)[0] is gradient
            np.testing.assert_allclose(gradient, dx, **close)
            case.backward(dy, own, saved, weight, out=own)
            np.testing.assert_allclose(own, dx, **close)
            own = permuted(x, order)
            case.forward(own, weight, bias, out=own)
            np.testing.assert_allclose(own, y, **close)


@pytest.mark.parametrize("case", [group(2), instance()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_parameters_of_another_dtype(rng, dtype, case):
    x, dy, weight, bias = operands(rng, case, (3, 4, 5, 5), dtype)
    for wide in {np.dtype(dtype), np.dtype(np.float32), np.dtype(np.float64)}:
        _, saved = check_forward(case, x, weight.astype(wide), bias.astype(wide))
        _, dweight, dbias = case.backward(dy, x, saved, weight.astype(wide))
        assert dweight.dtype == dbias.dtype == wide


@pytest.mark.parametrize("shape", [(4, 8, 8, 8), (4, 6, 7, 7), (4, 16, 2)], ids=str)
def test_infinite_weight(rng, shape):
    """As the formula says; other channels have none of it."""
    case = group(2)
    x, _, weight, bias = operands(rng, case, shape, np.float32)
    expected, _ = case.forward(x, weight, bias)
    weight[1] = np.inf
    y, saved = case.forward(x, weight, bias)
    mean = saved.mean.astype(float) + saved.residual
    deviation = x[:, 1] - mean[:, 0].reshape(-1, *[1] * (len(shape) - 2))
    np.testing.assert_array_equal(y[:, 1], np.sign(deviation) * np.inf)
    others = np.arange(shape[1]) != 1
    np.testing.assert_array_equal(y[:, others], expected[:, others])


def test_infinite_gradient(rng):
    """Of a loss that was scaled too far: where rounding took nothing from a mean, no NaN."""
    case, shape = group(2), (4, 8, 8, 8)
    x = rng.integers(-4, 5, shape).astype(np.float32)  # of which all sums are exact
    dy = rng.standard_normal(shape).astype(np.float32)
    dy[2, 5, 3, 3] = np.inf
    _, saved = case.forward(x, None, None)
    np.testing.assert_array_equal(saved.residual, 0)
    x[2, 5, 3, 3] = saved.mean[2, 1] + 1
    _, dweight, dbias = case.backward(dy, x, saved, None)
    others = np.arange(8) != 5
    np.testing.assert_array_equal([dweight[5], dbias[5]], np.inf)
    assert np.isfinite([dweight[others], dbias[others]]).all()


@pytest.mark.parametrize("case", [group(2), instance()], ids=str)
@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 4, 0), (3, 0, 5), (0, 0)], ids=str)
def test_empty(shape, case):
    x = np.zeros(shape, ml_dtypes.bfloat16)
    weight = np.ones(shape[1], np.float32)
    y, saved = case.forward(x, weight, weight)
    assert (y.shape, y.dtype) == (shape, x.dtype)
    assert saved.mean.shape == saved.inv_std.shape == case.norm(shape).statistics_shape
    np.testing.assert_array_equal(saved.mean, 0)
    np.testing.assert_array_equal(saved.inv_std, np.float32(1 / np.sqrt(1e-5)))
    dx, dweight, dbias = case.backward(x, x, saved, weight)
    assert dx.shape == shape
    np.testing.assert_array_equal([dweight, dbias], np.zeros((2, shape[1])))


@pytest.mark.parametrize(
    ("axis", "samples", "running_dtype"),
    [(1, 4, np.float32), (-1, 4, np.float64), (1, 700, np.float64)],
)
@pytest.mark.parametrize("correction", [0, 1, 3])
def test_running_statistics(rng, axis, samples, running_dtype, correction):
    """Those of every sample, unbiased over its own values, averaged over the batch."""
    shape = (samples, 3, 5, 6) if axis == 1 else (samples, 5, 6, 3)
    x = draw(rng, shape, np.float32)
    mean, var = np.full(3, 2, running_dtype), np.full(3, 5, running_dtype)
    cunorm.instance_norm_forward(
        x, None, None, mean, var, momentum=0.75, correction=correction, channel_axis=axis
    )
    result = reference.forward(x, norm=reference.groups(shape, 3, axis))
    n = 30
    bound = tolerances.mean_bound(result, n, np.float32).mean(0) + 2.0**-22
    assert_within(mean, 0.75 * 2 + 0.25 * result.mean.mean(0), bound, "running_mean")
    bound = tolerances.var_bound(result, n, np.float32).mean(0) + 2.0**-20
    expected = 0.75 * 5 + 0.25 * result.var.mean(0) * n / (n - correction)
    assert_within(var, expected, bound, "running_var")
    only = np.full(3, 5, running_dtype)
    cunorm.instance_norm_forward(
        x, None, None, None, only, momentum=0.75, correction=correction, channel_axis=axis
    )
    np.testing.assert_array_equal(only, var)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_over_many_samples(rng, dtype):
    """More than a thread asks for at a time on a GPU, of more channels than a block takes."""
    x, dy = rng.standard_normal((2, 700, 35, 3)).astype(dtype)
    check(instance(), x, dy, *rng.standard_normal((2, 35)).astype(dtype))


def test_float64_running_mean_keeps_its_digits(rng):
    x = (rng.standard_normal((4, 3, 20)) + 1e4).astype(np.float32)
    mean = np.zeros(3)
    cunorm.instance_norm_forward(x, None, None, mean, exponential_average_factor=1)
    np.testing.assert_allclose(mean, x.astype(float).mean((0, 2)), rtol=1e-10)


def test_running_statistics_left_alone(rng):
    """By an empty batch, and where they are used."""
    running = np.ones(3), np.ones(3)
    x = rng.standard_normal((4, 3, 6))
    cunorm.instance_norm_forward(x[:0], None, None, *running)
    cunorm.instance_norm_forward(x[..., :0], None, None, *running)
    cunorm.instance_norm_forward(x, None, None, *running, use_input_stats=False)
    np.testing.assert_array_equal(running, np.ones((2, 3)))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("shape", "axis"), [((4, 3, 5, 6), 1), ((4, 6, 3), -1), ((4, 3), 1)])
def test_with_running_statistics(rng, shape, axis, dtype):
    """The bits of batch norm in inference, and its gradients."""
    x, dy = draw(rng, shape, dtype), rng.standard_normal(shape).astype(dtype)
    weight, bias, mean = rng.standard_normal((3, 3))
    var = rng.uniform(0.5, 2, 3)
    if dtype != np.float64:
        weight, bias, mean, var = (a.astype(np.float32) for a in (weight, bias, mean, var))
    for order in [tuple(range(x.ndim)), tuple(range(x.ndim))[::-1]]:
        x, dy = permuted(x, order), permuted(dy, order)
        y, saved = cunorm.instance_norm_forward(
            x, weight, bias, mean, var, use_input_stats=False, channel_axis=axis
        )
        batch_y, _ = cunorm.batch_norm_forward(
            x, weight, bias, mean, var, training=False, channel_axis=axis
        )
        np.testing.assert_array_equal(y, batch_y)
        assert saved.mean.shape == saved.inv_std.shape == (4, 3)
        np.testing.assert_array_equal(saved.mean, np.tile(mean, (4, 1)))
        expected = reference.backward(dy, x, weight, mean=mean, var=var, channel_axis=axis)
        result = reference.forward(x, mean=mean, var=var, channel_axis=axis)
        bounds = tolerances.backward_bounds(expected, result, dy, weight, x.size // 3, dtype)
        for mask in itertools.product([True, False], repeat=3):
            gradients = cunorm.instance_norm_backward(dy, x, saved, weight, output_mask=mask)
            for name, wanted, actual in zip(expected._fields, mask, gradients, strict=True):
                assert wanted == (actual is not None)
                if wanted:
                    assert_within(actual, getattr(expected, name), getattr(bounds, name), name)
    y, saved = cunorm.instance_norm_forward(
        x[:0], None, None, mean, var, use_input_stats=False, channel_axis=axis
    )
    assert saved.mean.shape == (0, 3)


def test_group_norm_of_single_channels_is_instance_norm(rng):
    x = draw(rng, (3, 4, 5, 6), np.float32)
    for channel_axis in (1, -1):
        number = x.shape[channel_axis]
        y, saved = cunorm.group_norm_forward(x, number, channel_axis=channel_axis)
        z, other = cunorm.instance_norm_forward(x, channel_axis=channel_axis)
        np.testing.assert_array_equal(y, z)
        np.testing.assert_array_equal(saved.inv_std, other.inv_std)


def test_saved_says_what_it_is(rng):
    x = rng.standard_normal((2, 3, 4))
    _, saved = cunorm.group_norm_forward(x, 2, channel_axis=-1)
    assert saved._fields[:3] == ("mean", "inv_std", "residual")
    assert (saved.num_groups, saved.channel_axis, saved.shape) == (2, 2, (2, 3, 4))
    _, saved = cunorm.instance_norm_forward(x, None, np.zeros(3, np.float32))
    assert saved._fields[:3] == ("mean", "inv_std", "residual")
    assert (saved.use_input_stats, saved.bias_dtype) == (True, np.float32)
