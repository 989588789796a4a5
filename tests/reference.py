"""Batch norm in float64, written as the formulas stand in the papers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


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


def forward(x, weight=None, bias=None, *, mean=None, var=None, eps=1e-5, channel_axis=1):
    """Batch norm with the batch's own statistics or given ones."""
    x = np.asarray(x).astype(np.float64)
    axes = reduced_axes(x.ndim, channel_axis)
    number = x.shape[channel_axis]

    def spread(values):
        return per_channel(values, x.ndim, channel_axis)

    if mean is None:
        # Twice, so that a large mean costs this reference no digits either.
        mean = x.mean(axes)
        mean = mean + (x - spread(mean)).mean(axes)
        var = np.square(x - spread(mean)).mean(axes)
    mean, var = np.asarray(mean, np.float64), np.asarray(var, np.float64)
    inv_std = 1.0 / np.sqrt(var + eps)
    normalized = (x - spread(mean)) * spread(inv_std)
    weight = np.ones(number) if weight is None else weight
    bias = np.zeros(number) if bias is None else bias
    return Forward(normalized * spread(weight) + spread(bias), mean, var, inv_std, normalized)


class Backward(NamedTuple):
    dx: np.ndarray
    dweight: np.ndarray
    dbias: np.ndarray


def backward(dy, x, weight=None, *, mean=None, var=None, eps=1e-5, channel_axis=1):
    """Gradients, in training if mean is None."""
    dy = np.asarray(dy).astype(np.float64)
    axes = reduced_axes(dy.ndim, channel_axis)
    number = dy.shape[channel_axis]
    result = forward(x, mean=mean, var=var, eps=eps, channel_axis=channel_axis)

    def spread(values):
        return per_channel(values, dy.ndim, channel_axis)

    weight = np.ones(number) if weight is None else np.asarray(weight).astype(np.float64)
    dbias = dy.sum(axes)
    dweight = (dy * result.normalized).sum(axes)
    inner = dy
    if mean is None:
        count = dy.size // number
        inner = dy - spread(dbias / count) - result.normalized * spread(dweight / count)
    return Backward(inner * spread(weight * result.inv_std), dweight, dbias)
