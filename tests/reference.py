"""The norms in float64, written as the formulas stand in the papers."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np


class Norm(NamedTuple):
    """Which elements of x share a statistic, and which a parameter.

    Both have shapes to broadcast against x, seen in the shape `split`, and shapes in which
    callers have them.
    """

    split: tuple[int, ...]
    statistics: tuple[int, ...]
    parameters: tuple[int, ...]
    statistics_shape: tuple[int, ...]
    parameters_shape: tuple[int, ...]
    centered: bool = True

    def per_statistic(self, values):
        return np.asarray(values).astype(np.float64).reshape(self.statistics)

    def per_parameter(self, values, default):
        if values is None:
            return np.full(self.parameters, default)
        return np.asarray(values).astype(np.float64).reshape(self.parameters)

    def of_statistics(self, array):
        """Sums, in the callers' shape, of what shares a statistic."""
        return _sum_to(array, self.statistics).reshape(self.statistics_shape)

    def of_parameters(self, array):
        """Sums, in the callers' shape, of what shares a parameter."""
        return _sum_to(array, self.parameters).reshape(self.parameters_shape)

    @property
    def count(self):
        """Elements that share a statistic."""
        return prod(self.split) // max(prod(self.statistics), 1)


def _sum_to(array, shape):
    axes = tuple(i for i, length in enumerate(shape) if length == 1)
    return array.sum(axes, keepdims=True)


def channels(shape, channel_axis=1):
    """Batch norm's."""
    along = [1] * len(shape)
    along[channel_axis] = shape[channel_axis]
    number = (shape[channel_axis],)
    return Norm(tuple(shape), tuple(along), tuple(along), number, number)


def rows(shape, axis=-1, centered=True):
    """Layer norm's, and uncentred RMS norm's."""
    axis %= len(shape)
    before, after = tuple(shape[:axis]), tuple(shape[axis:])
    return Norm(
        before + after, before + (1,) * len(after), (1,) * axis + after, before, after, centered
    )


def groups(shape, number, channel_axis=1):
    """Group norm's; instance norm's with as many groups as channels."""
    axis = channel_axis % len(shape)
    sizes = (number, shape[axis] // number if number else 0)
    split = (*shape[:axis], *sizes, *shape[axis + 1 :])
    statistics, parameters = [1] * len(split), [1] * len(split)
    statistics[0], statistics[axis] = shape[0], number
    parameters[axis], parameters[axis + 1] = sizes
    return Norm(split, tuple(statistics), tuple(parameters), (shape[0], number), (shape[axis],))


def scale_shift(shape, per_sample, channel_axis=1):
    """Scale-shift's: statistics are one given mean of 0 and one variance of 1."""
    along = [1] * len(shape)
    along[channel_axis] = shape[channel_axis]
    number = (shape[channel_axis],)
    if per_sample:
        along[0] = shape[0]
        number = (shape[0], *number)
    return Norm(tuple(shape), (1,) * len(shape), tuple(along), (), number, centered=False)


def per_channel(values, ndim, channel_axis):
    """Values of shape (C,), to broadcast against an array."""
    shape = [1] * ndim
    shape[channel_axis] = -1
    return np.asarray(values, np.float64).reshape(shape)


def reduced_axes(ndim, channel_axis):
    return tuple(axis for axis in range(ndim) if axis != channel_axis % ndim)


class Forward(NamedTuple):
    y: np.ndarray
    mean: np.ndarray
    var: np.ndarray
    inv_std: np.ndarray
    normalized: np.ndarray
    norm: Norm
    own: bool  # whether the statistics are x's own


def forward(x, weight=None, bias=None, *, mean=None, var=None, eps=1e-5, channel_axis=1, norm=None):
    """A norm, by default batch norm, with x's own statistics or given ones."""
    x = np.asarray(x).astype(np.float64)
    norm = channels(x.shape, channel_axis) if norm is None else norm
    spread = norm.per_statistic
    split = x.reshape(norm.split)
    own = var is None
    if own:
        mean = np.zeros(norm.statistics_shape)
        # Twice, so that a large mean costs this reference no digits either.
        for _ in range(2 if norm.centered else 0):
            mean = mean + norm.of_statistics(split - spread(mean)) / norm.count
        var = norm.of_statistics(np.square(split - spread(mean))) / norm.count
    mean, var = np.asarray(mean, np.float64), np.asarray(var, np.float64)
    inv_std = 1.0 / np.sqrt(var + eps)
    normalized = (split - spread(mean)) * spread(inv_std)
    y = normalized * norm.per_parameter(weight, 1.0) + norm.per_parameter(bias, 0.0)
    return Forward(y.reshape(x.shape), mean, var, inv_std, normalized.reshape(x.shape), norm, own)


class Backward(NamedTuple):
    dx: np.ndarray
    dweight: np.ndarray
    dbias: np.ndarray


def backward(dy, x, weight=None, *, mean=None, var=None, eps=1e-5, channel_axis=1, norm=None):
    """Gradients, through x's own statistics if none are given."""
    result = forward(x, mean=mean, var=var, eps=eps, channel_axis=channel_axis, norm=norm)
    norm, spread = result.norm, result.norm.per_statistic
    shape = np.shape(dy)
    dy = np.asarray(dy).astype(np.float64).reshape(norm.split)
    normalized = result.normalized.reshape(norm.split)
    inner = dy * norm.per_parameter(weight, 1.0)
    if result.own:
        product = spread(norm.of_statistics(inner * normalized) / norm.count)
        offset = spread(norm.of_statistics(inner) / norm.count) if norm.centered else 0.0
        inner = inner - offset - normalized * product
    dx = (inner * spread(result.inv_std)).reshape(shape)
    return Backward(dx, norm.of_parameters(dy * normalized), norm.of_parameters(dy))


class DoubleBackward(NamedTuple):
    ddy: np.ndarray
    ddx: np.ndarray
    ddweight: np.ndarray


def double_backward(
    gdx, gdweight, gdbias, dy, x, weight=None, *, mean=None, var=None, eps=1e-5, norm
):
    """Gradients of `backward` with respect to dy, x and weight, of upstream ones or None."""
    result = forward(x, mean=mean, var=var, eps=eps, norm=norm)
    v, r = result.normalized.reshape(norm.split), norm.per_statistic(result.inv_std)
    g, dy = (
        np.zeros(norm.split) if a is None else np.asarray(a).astype(np.float64).reshape(norm.split)
        for a in (gdx, dy)
    )
    w, gw = norm.per_parameter(weight, 1.0), norm.per_parameter(gdweight, 0.0)
    h, k = w * dy, gw * dy

    def average(values):
        return norm.per_statistic(norm.of_statistics(values) / norm.count)

    if not result.own:
        u, ddx = r * g, r * k
    else:
        gv, hv, kv = average(g * v), average(h * v), average(k * v)
        g_c, h_c = g - average(g), h - average(h)
        u = r * (g_c - v * gv)
        ddx = r**2 * (v * (3 * gv * hv - average(g_c * h_c)) - hv * g_c - gv * h_c)
        ddx += r * (k - average(k) - v * kv)
        if norm.statistics == norm.parameters:
            dy = dy - average(dy)  # sum(u) = 0: this costs ddweight no digits
    ddy = w * u + gw * v + norm.per_parameter(gdbias, 0.0)
    return DoubleBackward(
        ddy.reshape(np.shape(x)), ddx.reshape(np.shape(x)), norm.of_parameters(dy * u)
    )
