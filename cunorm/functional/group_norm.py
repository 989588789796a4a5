"""Group normalization: over groups of channels of every sample."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import checks
from ..arrays import Array
from ..geometry import group_norm_geometry
from .common import Layout, backward, forward

__all__ = ["GroupNormSaved", "group_norm_backward", "group_norm_forward"]


class GroupNormSaved(NamedTuple):
    """What `group_norm_forward` keeps for `group_norm_backward`.

    Attributes
    ----------
    mean : array, shape (N, num_groups)
        Mean that was subtracted.
    inv_std : array, shape (N, num_groups)
        ``1 / sqrt(var + eps)``.
    residual : array, shape (N, num_groups), or None
        What rounding to the accumulator type took from the mean.
    num_groups, channel_axis : int
    shape : tuple of int
        Shape of x.
    bias_dtype : dtype or None
        Dtype that dbias will have, if a bias was given.
    """

    mean: Array
    inv_std: Array
    residual: Array | None
    num_groups: int
    channel_axis: int
    shape: tuple[int, ...]
    bias_dtype: Any


def group_norm_forward(
    x: Array,
    num_groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    channel_axis: int = 1,
    eps: float = 1e-5,
    out: Array | None = None,
) -> tuple[Array, GroupNormSaved]:
    """Normalize groups of channels of every sample, then scale and shift every channel.

        y = (x - mean) * inv_std * weight + bias,    inv_std = 1 / sqrt(var + eps)

    mean and var are the mean and the biased variance of C / num_groups
    neighbouring channels of one sample. (Wu and He, "Group Normalization",
    2018, section 3.1.)

    Parameters
    ----------
    x : array, shape (N, C, ...) with C at `channel_axis`; at least 2-D
        float16, bfloat16, float32 or float64, any strides. A dense x is not
        copied, in whatever order of its axes, if the samples are the slowest in
        memory.
    num_groups : int
        A divisor of C.
    weight, bias : array, shape (C,), optional
        Dtype of x, float32 or float64. Missing, they count as 1 and 0.
    channel_axis : int
        -1 for channels last; not 0, which is the samples' axis.
    eps : float
        Added to the variance.
    out : array, optional
        Where y goes: shape and dtype of x. May be x itself, but then x is gone
        and `group_norm_backward` cannot be called.

    Returns
    -------
    y : array
        Shape, dtype and memory order of x.
    saved : GroupNormSaved
        A named tuple that begins (mean, inv_std), both of shape (N, num_groups)
        and in the accumulator type: float32, for float64 data float64. Keep it,
        and x, for `group_norm_backward`.

    Raises
    ------
    ValueError
        For shapes and values: among them one value per group of a sample, and
        an `out` that overlaps an input in part.
    TypeError
        For types and dtypes.
        Nothing has been modified then.

    Notes
    -----
    On a CPU a sample has the same bits whatever samples are beside it. A constant
    group gives exactly `bias` (if eps is not 0). An empty x gives an empty y.
    """
    num_groups = checks.integer("num_groups", num_groups)  # first: an array here is a slip

    def known_of(x: Any) -> tuple[Layout, float]:
        layout = group_layout(x, channel_axis, num_groups)
        checks.several_values_a_group(x.size, x.shape, num_groups)
        return layout, checks.not_negative("eps", eps)

    y, (mean, inv_std, residual), layout, (shape, bias_dtype) = forward(
        x, weight, bias, out, known_of
    )
    (axis,) = layout.parameters
    return y, GroupNormSaved(mean, inv_std, residual, num_groups, axis, shape, bias_dtype)


def group_norm_backward(
    dy: Array,
    x: Array,
    saved: GroupNormSaved,
    weight: Array | None = None,
    *,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    out: Array | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients of `group_norm_forward` with respect to x, weight and bias.

        dbias   = sum(dy)
        dweight = sum(dy * xhat),    xhat = (x - mean) * inv_std

    over all axes but the channels', and with the mean taken over a group of a sample

        dx = inv_std * (g - mean(g) - xhat * mean(g * xhat)),    g = dy * weight

    (Wu and He, "Group Normalization", 2018.)

    Parameters
    ----------
    dy : array
        Gradient with respect to y: shape and dtype of x.
    x : array
        What `group_norm_forward` was given.
    saved : GroupNormSaved
        What it returned.
    weight : array, shape (C,), optional
        What it was given.
    output_mask : three bools
        Which of dx, dweight and dbias to compute; the others are None.
    out : array, optional
        Where dx goes: shape and dtype of x. May be dy or x itself.

    Returns
    -------
    dx : array or None
        Shape, dtype and memory order of x.
    dweight, dbias : array, shape (C,), or None
        In the dtype of weight and bias; in the accumulator type where there is none.

    Raises
    ------
    ValueError, TypeError
        As `group_norm_forward`, and if dy, x and saved do not belong together.
    """
    checks.saved_by("group_norm_forward", GroupNormSaved, saved)
    return backward(
        dy, x, saved, weight, output_mask, out,
        lambda x: group_layout(x, saved.channel_axis, saved.num_groups),
        bias_dtype=saved.bias_dtype,
    )  # fmt: skip


def group_layout(x: Any, channel_axis: Any, num_groups: int | None) -> Layout:
    """Layout of a norm over groups of channels of every sample; None: over single channels."""
    checks.present("x", x)
    return _group_layout(x.shape, x.dtype, channel_axis, num_groups)


@checks.once
def _group_layout(
    shape: tuple[int, ...], dtype: np.dtype, channel_axis: Any, num_groups: int | None
) -> Layout:
    axis, channels, _ = checks.channels(shape, dtype, channel_axis)
    checks.samples_first(axis, channel_axis, shape)
    if num_groups is None:
        num_groups = channels
    else:
        checks.groups(num_groups, channels)
    return Layout(
        statistics=(0, axis),
        parameters=(axis,),
        statistics_shape=(shape[0], num_groups),
        parameters_shape=(channels,),
        meaning=checks.ONE_A_CHANNEL,
        leading=1,
        geometry=lambda shape, order: group_norm_geometry(shape, order.index(axis), num_groups),
    ).of(shape)
