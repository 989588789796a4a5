"""How far a result may be from the float64 reference, and why.

Let u be the unit roundoff of the accumulator type and v that of the array.
A sum of n terms t_i is formed in the accumulator type over chains of at most
k = min(n, 256) additions: a chunk of runs is 4096 elements in at least 16
vector lanes, a chunk of columns at most 256 rows; float64 takes over from
there. Rounding errors of a chain grow like the square root of its length with
a probability that leaves nothing to chance (Higham and Mary, "A new approach to
probabilistic rounding error analysis", 2019, lambda = 4), so

    |error of sum t_i| <= gamma(n) * sum |t_i|,   gamma(n) = 4 * (sqrt(k) + 2) * u,

the 2 for the few operations around the sum. A chunk of the CUDA kernels is 16 to
256 elements of a thread, 8 tiles about the mean of the first of them; its sum of
squares is at most 9 times that about its own mean, which for chunks of k = 256
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
    """Of ddy, ddx and ddweight.

    Every term is a product of at most three numbers with errors: inv_std^2, of 4 * g; a mean of
    products with normalized values, of 2 * g of the mean of their absolute values, in which a
    normalized value counts one more for the error of the mean; and another such number. A few
    roundings added, 10 * g is no less.
    """
    norm, spread = result.norm, result.norm.per_statistic
    own = result.own
    v = np.abs(result.normalized).reshape(norm.split) + 1.0
    r = spread(result.inv_std)
    g, dy = (
        np.zeros(norm.split) if a is None else np.abs(np.asarray(a).astype(np.float64))
        for a in (gdx, dy)
    )
    g, dy = g.reshape(norm.split), dy.reshape(norm.split)
    w, gw = np.abs(norm.per_parameter(weight, 1.0)), np.abs(norm.per_parameter(gdweight, 0.0))
    h, k = w * dy, gw * dy

    def average(values):
        return spread(norm.of_statistics(values) / max(count, 1))

    u, ddx = r * g, r * k
    if own:
        gv, hv, kv = average(g * v), average(h * v), average(k * v)
        u = r * (g + average(g) + v * gv)
        ddx = r**2 * (v * (3 * gv * hv + average(g * h) + average(g) * average(h)))
        ddx = ddx + r**2 * (hv * (g + average(g)) + gv * (h + average(h)))
        ddx = ddx + r * (k + average(k) + v * kv)
    error = 10 * (gamma(count, dtype) + spread(_offset(result, dtype)))
    b = np.abs(norm.per_parameter(gdbias, 0.0))
    ddy = error * (w * u + gw * v + b)
    terms = dy.size // max(gradients.ddweight.size, 1)
    ddweight = norm.of_parameters((error + gamma(terms, dtype)) * dy * u)
    shape = gradients.ddx.shape
    return DoubleBackward(
        ddy.reshape(shape) + _rounded(gradients.ddy, dtype),
        (error * ddx).reshape(shape) + _rounded(gradients.ddx, dtype),
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
    ratio = np.where(finite, error / np.broadcast_to(bound, expected.shape), 0.0)
    worst = np.unravel_index(np.argmax(ratio), ratio.shape) if ratio.size else ()
    assert ratio.size == 0 or ratio[worst] <= 1.0, (
        f"{what}: {actual[worst]} instead of {expected[worst]} at {worst}, "
        f"{ratio[worst]:.3g} times the bound"
    )
