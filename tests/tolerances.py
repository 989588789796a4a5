"""How far a result may be from the float64 reference, and why.

Let u be the unit roundoff of the accumulator type and v that of the array.
A sum of n terms t_i is formed in the accumulator type over chains of at most
k = min(n, 256) additions: a chunk of runs is 4096 elements in at least 16
vector lanes, a chunk of columns at most 256 rows; float64 takes over from
there. Rounding errors of a chain grow like the square root of its length with
a probability that leaves nothing to chance (Higham and Mary, "A new approach to
probabilistic rounding error analysis", 2019, lambda = 4), so

    |error of sum t_i| <= gamma(n) * sum |t_i|,   gamma(n) = 4 * (sqrt(k) + 2) * u,

the 2 for the few operations around the sum. Squares on the CPU are taken about a sample's mean
that is at most a standard deviation off, or the mean of all chunks before one, and are at
most twice those about the mean of all: 2 * gamma for the variance. A chunk of the CUDA
kernels is 16 to 256 elements of a thread, 8 tiles about the mean of the first of them; its
sum of squares is at most 9 times that about its own mean, which for chunks of k = 256
elements in vectors of 8 makes 9 * sqrt(k / 8) * u, within the bound. Float64 data
has no wider type to take over: k = n there. Its means, of chunks and of all, are rounded to float64
like everything, at most eight times one after another, which in units of the
standard deviation makes an error of 8 * u * |mean| / std; the other types keep
what rounding takes from the mean and make up for it.
"""

from __future__ import annotations

import numpy as np
from reference import Backward, DoubleBackward, Forward

ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 5e-324}


def roundoff(dtype):
    """Largest relative error of rounding to a dtype."""
    return ROUNDOFF[np.dtype(dtype).name]


def gamma(count, dtype):
    """Relative error of a sum of `count` terms of an array type."""
    if np.dtype(dtype) == np.float64:
        return 4 * (np.sqrt(count) + 2) * roundoff(np.float64)
    return 4 * (np.sqrt(min(count, 256)) + 2) * roundoff(np.float32)


def _rounded(values, dtype):
    return roundoff(dtype) * np.abs(values) + SMALLEST[np.dtype(dtype).name]


def _offset(result: Forward, dtype):
    """Error of the rounded mean in units of the standard deviation."""
    if np.dtype(dtype) != np.float64:
        return np.zeros_like(result.mean)
    return 8 * roundoff(np.float64) * np.abs(result.mean) * result.inv_std


def mean_bound(result: Forward, count, dtype):
    """Of the mean in the accumulator type."""
    wide = np.dtype(dtype) == np.float64
    rounded = 8 * _rounded(result.mean, np.float64) if wide else _rounded(result.mean, np.float32)
    return gamma(count, dtype) * np.sqrt(result.var) + rounded


def var_bound(result: Forward, count, dtype):
    """Of the variance: that of its sum, and the means' errors as deviations are squared."""
    return (2 * gamma(count, dtype) + 2 * _offset(result, dtype)) * result.var


def inv_std_bound(result: Forward, count, dtype):
    """Of 1 / sqrt(var + eps): half the relative error of the variance, and its rounding."""
    return (2 * gamma(count, dtype) + _offset(result, dtype)) * result.inv_std


def _normalized_bound(result: Forward, count, dtype):
    """Of (x - mean) * inv_std, seen in the shape of the norm: the mean's error and its own."""
    norm = result.norm
    normalized = np.abs(result.normalized.reshape(norm.split))
    g = gamma(count, dtype)
    return g * (normalized + norm.centered) + norm.per_statistic(_offset(result, dtype))


def y_bound(result: Forward, weight, bias, count, dtype):
    """Of y: its parts' relative errors, the mean's error in units of std, its own rounding."""
    w = np.abs(result.norm.per_parameter(weight, 1.0))
    b = np.abs(result.norm.per_parameter(bias, 0.0))
    bound = w * _normalized_bound(result, count, dtype) + gamma(count, dtype) * b
    return bound.reshape(result.y.shape) + _rounded(result.y, dtype)


def backward_bounds(gradients: Backward, result: Forward, dy, weight, count, dtype):
    """Of dx, dweight and dbias.

    A parameter's gradient is a sum over other elements than a statistic: its terms have the
    errors of what the statistics have made of x, and it has those of a sum of its own.
    """
    norm, spread = result.norm, result.norm.per_statistic
    g = gamma(count, dtype)
    dy = np.abs(np.asarray(dy).astype(np.float64)).reshape(norm.split)
    normalized = np.abs(result.normalized).reshape(norm.split)

    terms = dy.size // max(gradients.dbias.size, 1)
    summed = gamma(terms, dtype)
    dweight = summed * norm.of_parameters(dy * normalized)
    dweight += norm.of_parameters(dy * _normalized_bound(result, count, dtype))
    dbias = summed * norm.of_parameters(dy)

    inner = dy * np.abs(norm.per_parameter(weight, 1.0))
    bound = g * inner
    if result.own:  # the statistics' gradient is shared among their elements
        total = norm.of_statistics(inner * (normalized + norm.centered)) / max(count, 1)
        offset = spread(_offset(result, dtype))
        bound = bound + 2 * (g + offset) * (norm.centered + normalized) * spread(total)
    dx = (spread(result.inv_std) * bound).reshape(gradients.dx.shape)
    return Backward(dx + _rounded(gradients.dx, dtype), dweight, dbias)


def double_backward_bounds(
    gradients: DoubleBackward, result: Forward, gdx, gdweight, gdbias, dy, weight, count, dtype
):
    """Of ddy, ddx and ddweight, to which a mean of gdx or dy adds in proportion.

    With g = gdx, h = weight * dy and k = gdweight * dy, a mean <g v> has the error e * <|g| (|v| +
    1)>, where e = 10 * gamma is more than its sum, inv_std and a few roundings add, and 1 is for
    the error of the mean of x. The mean of (g - <g>) * (h - <h>) is taken about means of chunks
    or of the chunk's beginning, from which the squares are at most 9 times as large; h has a
    rounding, in float64 the means too: e * (rms(g) * std(h) + std(g) * rms(h)). In a product of two
    such numbers, or of one and an element, each counts with its value times the other's error,
    and errors times errors come on top.
    """
    norm, spread = result.norm, result.norm.per_statistic
    v = result.normalized.reshape(norm.split)
    r = spread(result.inv_std)
    g, dy = (
        np.zeros(norm.split) if a is None else np.asarray(a).astype(np.float64).reshape(norm.split)
        for a in (gdx, dy)
    )
    w, gw = norm.per_parameter(weight, 1.0), norm.per_parameter(gdweight, 0.0)
    h, k = w * dy, gw * dy
    e = 10 * (gamma(count, dtype) + spread(_offset(result, dtype)))

    def average(values):
        return spread(norm.of_statistics(values) / max(count, 1))

    def about_mean(values):
        """(rms, std, absolute deviations)."""
        deviations = values - average(values)
        squares = average(values**2), average(deviations**2)
        return np.sqrt(squares[0]), np.sqrt(squares[1]), np.abs(deviations)

    def with_v(values):
        """The mean of products with v, and its error."""
        return np.abs(average(values * v)), e * average(np.abs(values) * (np.abs(v) + 1))

    of_v = np.abs(v) + 1
    u = r * np.abs(g)
    ddx = e * r * np.abs(k)
    terms = dy.size // max(gradients.ddweight.size, 1)
    if result.own:
        (gv, gv_error), (hv, hv_error), (_, kv_error) = with_v(g), with_v(h), with_v(k)
        (g_rms, g_std, g_c), (h_rms, h_std, h_c) = about_mean(g), about_mean(h)
        product_error = gv * hv_error + gv_error * hv + gv_error * hv_error
        covariance_error = e * (g_rms * h_std + g_std * h_rms)
        together = g_std * h_std + 3 * gv * hv
        u = r * (np.abs(g) + average(np.abs(g)) + of_v * gv_error / e)
        ddx = ddx + r * (e * average(np.abs(k)) + of_v * kv_error)
        ddx = ddx + r**2 * of_v * (covariance_error + 3 * product_error + e * together)
        for this, mean, error, deviations in ((g, hv, hv_error, g_c), (h, gv, gv_error, h_c)):
            elements = np.abs(this) + average(np.abs(this))
            ddx = ddx + r**2 * (error * deviations + e * (mean + error) * elements)
    b = np.abs(norm.per_parameter(gdbias, 0.0))
    ddy = e * (np.abs(w) * u + np.abs(gw * v) + np.abs(gw) + b)
    if result.own and norm.statistics == norm.parameters:
        (_, of_dy_error), (of_dy_rms, of_dy_std, _) = with_v(dy), about_mean(dy)
        of_dy = np.abs(average(dy * v))
        ddweight = e * (g_rms * of_dy_std + g_std * of_dy_rms + gv * of_dy)
        ddweight = ddweight + gv * of_dy_error + gv_error * (of_dy + of_dy_error)
        ddweight = norm.of_parameters(r * ddweight * np.ones(norm.split))
    else:
        ddweight = norm.of_parameters((e + gamma(terms, dtype)) * np.abs(dy) * u)
    shape = gradients.ddx.shape
    return DoubleBackward(
        ddy.reshape(shape) + _rounded(gradients.ddy, dtype),
        ddx.reshape(shape) + _rounded(gradients.ddx, dtype),
        ddweight + SMALLEST["float32"],
    )


def assert_within(actual, expected, bound, what):
    """Every element is within its bound; NaN and infinity where the reference has them."""
    actual = np.asarray(actual).astype(np.float64)
    expected = np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected), err_msg=what)
    np.testing.assert_array_equal(actual[~finite], expected[~finite], err_msg=what)
    error = np.abs(actual - expected, where=finite, out=np.zeros(expected.shape))
    none = (error == 0) & (bound == 0)  # which is within
    with np.errstate(divide="ignore"):
        ratio = np.divide(error, bound, where=~none, out=np.zeros(expected.shape))
    worst = np.unravel_index(np.argmax(ratio), ratio.shape) if ratio.size else ()
    assert ratio.size == 0 or ratio[worst] <= 1.0, (
        f"{what}: {actual[worst]} instead of {expected[worst]} at {worst}, "
        f"{ratio[worst]:.3g} times the bound"
    )
