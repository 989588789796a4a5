"""Any shape, axis, dtype, memory order and options: the reference's numbers."""

import numpy as np
import reference
import tolerances
from cases import DTYPES, check, group, instance, layer, rms, scale_shift
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_within

import cunorm


@st.composite
def arguments(draw):
    ndim = draw(st.integers(2, 5))
    longest = {2: 300, 3: 60, 4: 16, 5: 8}[ndim]
    shape = tuple(draw(st.lists(st.integers(0, longest), min_size=ndim, max_size=ndim)))
    axis = draw(st.integers(-ndim, ndim - 1))
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale, offset = draw(st.sampled_from([(1.0, 0.0), (0.01, 3.0), (30.0, -7.0)]))
    order = draw(st.permutations(range(ndim)))
    x, dy = rng.standard_normal((2, *shape))
    x = (x * scale + offset).astype(dtype)
    steps = tuple(slice(None, None, draw(st.sampled_from([1, 1, 1, -1, 2]))) for _ in shape)
    x, dy = x.transpose(order).copy().transpose(np.argsort(order))[steps], dy.astype(dtype)[steps]
    accumulator = np.float64 if dtype == np.float64 else np.float32
    number = x.shape[axis]
    weight = draw(st.sampled_from([None, rng.standard_normal(number).astype(accumulator)]))
    bias = draw(st.sampled_from([None, rng.standard_normal(number).astype(accumulator)]))
    eps = draw(st.sampled_from([1e-5, 1e-3, 1.0]))
    return x, dy, weight, bias, axis, eps


@settings(max_examples=400)
@given(arguments())
def test_training(case):
    x, dy, weight, bias, axis, eps = case
    number = x.shape[axis]
    count = x.size // number if number else int(np.prod(np.delete(x.shape, axis)))
    if count == 1:
        return
    y, saved = cunorm.batch_norm_forward(x, weight, bias, eps=eps, channel_axis=axis)
    dx, dweight, dbias = cunorm.batch_norm_backward(dy, x, saved, weight)
    assert y.shape == dx.shape == x.shape
    assert y.dtype == dx.dtype == x.dtype
    assert saved.mean.shape == dweight.shape == dbias.shape == (number,)
    if x.size == 0:
        assert not dweight.any()
        assert not dbias.any()
        return
    dtype = x.dtype
    result = reference.forward(x, weight, bias, eps=eps, channel_axis=axis)
    bound = tolerances.y_bound(result, weight, bias, count, dtype)
    assert_within(y, result.y, bound, "y")
    bound = tolerances.mean_bound(result, count, dtype)
    assert_within(saved.mean, result.mean, bound, "mean")
    expected = reference.backward(dy, x, weight, eps=eps, channel_axis=axis)
    bounds = tolerances.backward_bounds(expected, result, dy, weight, count, dtype)
    assert_within(dx, expected.dx, bounds.dx, "dx")
    assert_within(dweight, expected.dweight, bounds.dweight, "dweight")
    assert_within(dbias, expected.dbias, bounds.dbias, "dbias")


@st.composite
def samples(draw):
    """A norm over samples, and its operands."""
    ndim = draw(st.integers(2, 4))
    longest = {2: 200, 3: 40, 4: 12}[ndim]
    shape = tuple(draw(st.lists(st.integers(1, longest), min_size=ndim, max_size=ndim)))
    dtype = draw(st.sampled_from(DTYPES))
    axis = draw(st.integers(1, ndim - 1))
    divisors = [number for number in range(1, shape[axis] + 1) if shape[axis] % number == 0]
    case = draw(
        st.sampled_from(
            [
                layer(axis),
                rms(axis),
                rms(axis, weight_offset=1.0),
                group(draw(st.sampled_from(divisors)), axis),
                instance(axis),
                scale_shift(False, axis),
                scale_shift(True, axis),
            ]
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale, offset = draw(st.sampled_from([(1.0, 0.0), (0.01, 3.0), (30.0, -7.0)]))
    x, dy = rng.standard_normal((2, *shape))
    x, dy = (x * scale + offset).astype(dtype), dy.astype(dtype)
    order = draw(st.permutations(range(ndim)))
    x = x.transpose(order).copy().transpose(np.argsort(order))
    steps = [slice(None, None, draw(st.sampled_from([1, 1, 1, -1, 2]))) for _ in shape]
    steps[axis] = slice(None)  # channels in groups
    x, dy = x[tuple(steps)], dy[tuple(steps)]
    affine = case.norm(x.shape).parameters_shape
    accumulator = np.float64 if dtype == np.float64 else np.float32
    weight, bias = rng.standard_normal((2, *affine)).astype(accumulator)
    absent = draw(st.sampled_from(["", "weight", "bias"]))
    if case.weight_offset or case.given:
        absent = ""
    return case, x, dy, None if absent == "weight" else weight, None if absent == "bias" else bias


@settings(max_examples=250)
@given(samples())
def test_by_sample(operands):
    case, x, dy, weight, bias = operands
    if case.name.startswith(("group", "instance")) and case.norm(x.shape).count == 1:
        return
    y, _, dx, *_ = check(case, x, dy, weight, bias)
    assert y.shape == dx.shape == x.shape


counts = st.lists(st.integers(0, 2**40), min_size=1, max_size=8)


@settings(max_examples=200)
@given(counts, st.integers(0, 2**32), st.sampled_from([np.float32, np.float64]))
def test_merge_moments(counts, seed, dtype):
    """Against exact integer weights, for counts up to 2^40."""
    rng = np.random.default_rng(seed)
    means = (rng.standard_normal((len(counts), 3)) + 1e3).astype(dtype)
    squares = rng.uniform(0, 2, (len(counts), 3)).astype(dtype) * np.reshape(counts, (-1, 1))
    squares = squares.astype(dtype)
    merged = cunorm.merge_moments(
        [cunorm.Moments(*part) for part in zip(counts, means, squares, strict=True)]
    )
    total = sum(counts)
    assert merged.count == total
    if total == 0:
        np.testing.assert_array_equal(merged.mean, 0)
        return
    weights = np.array(counts, np.longdouble)[:, None]
    mean = (weights * means).sum(0) / total
    m2 = squares.astype(np.longdouble).sum(0) + (weights * np.square(means - mean)).sum(0)
    u = tolerances.roundoff(dtype)
    # Means near 1000 that differ by about 1: float64's own rounding is 1e3 * 2^-53.
    slack = 16 * 1e3 * 2.0**-53
    np.testing.assert_allclose(merged.mean, mean.astype(float), rtol=2 * u, atol=slack)
    np.testing.assert_allclose(merged.m2, m2.astype(float), rtol=4 * u + 16 * slack)
