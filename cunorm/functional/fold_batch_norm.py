"""Folding of batch normalization into the convolution or dense layer before it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import arrays, checks
from ..arrays import Array

__all__ = ["fold_batch_norm", "output_channels"]

_NAMES = ("conv_weight", "conv_bias", "weight", "bias", "running_mean", "running_var")


def fold_batch_norm(
    conv_weight: Array,
    conv_bias: Array | None,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    *,
    eps: float = 1e-5,
    channel_axis: int = 0,
    groups: int = 1,
) -> tuple[Array, Array]:
    """Weight and bias of a convolution that includes the batch norm after it, for inference.

        scale = weight / sqrt(running_var + eps)
        w = conv_weight * scale,    b = (conv_bias - running_mean) * scale + bias

    where scale belongs to the output's channels. What is linear before the batch norm may be
    a convolution of any rank, grouped or transposed, or a dense layer. (Jacob et al.,
    "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
    Inference", 2018, section 3.2.)

    Parameters
    ----------
    conv_weight : array, with the C output channels at `channel_axis`
        Any floating dtype.
    conv_bias : array, shape (C,), or None
    weight, bias, running_mean, running_var : array, shape (C,)
        Of the batch norm, any floating dtypes; weight and bias may be None.
    eps : float
        The batch norm's.
    channel_axis : int
        0 for the weights of PyTorch and Chainer, -1 for those of Keras and Flax; 1 for
        PyTorch's transposed convolutions, -2 for Keras'.
    groups : int
        Of the convolution; only a transposed one has to give it, whose weight has the groups
        along axis 0, and C / groups channels at `channel_axis`.

    Returns
    -------
    w : array
        Shape and dtype of conv_weight.
    b : array, shape (C,)
        Dtype of conv_bias; without, that of conv_weight.
        Both are computed in float64 and rounded once.

    Raises
    ------
    ValueError, TypeError
        For shapes and values, among them missing running statistics, and for types and dtypes.
    """
    (conv_weight, conv_bias, weight, bias, running_mean, running_var), place = arrays.adopt(
        _NAMES, conv_weight, conv_bias, weight, bias, running_mean, running_var
    )
    checks.present("conv_weight", conv_weight)
    checks.floating("conv_weight", conv_weight.dtype)
    axis, number = output_channels("conv_weight", conv_weight.shape, channel_axis, groups)
    meaning = f"one value a channel at axis {axis} of conv_weight, {conv_weight.shape}"
    if groups > 1 and axis > 0:
        meaning += f", of each of {groups} groups"
    for name, array in (("running_mean", running_mean), ("running_var", running_var)):
        if array is None:
            raise ValueError(f"{name}: expected running statistics to fold, got None")
        checks.statistic(name, array, (number,), meaning)
    for name, array in (("conv_bias", conv_bias), ("weight", weight), ("bias", bias)):
        if array is not None:
            checks.statistic(name, array, (number,), meaning)
    eps = checks.not_negative("eps", eps)

    def wide(array: Any, default: float) -> Any:
        return default if array is None else array.astype(np.float64)

    with place, np.errstate(all="ignore"):
        scale = wide(weight, 1.0) / place.xp.sqrt(wide(running_var, 1.0) + eps)
        # a group's channels neighbours, and next to one another the groups
        shape = (groups, conv_weight.shape[0] // groups, *conv_weight.shape[1:])
        along = [1] * len(shape)
        along[0], along[axis + 1] = groups, number // groups
        folded = conv_weight.reshape(shape) * scale.reshape(along)
        shift = (wide(conv_bias, 0.0) - wide(running_mean, 0.0)) * scale + wide(bias, 0.0)
        w, b = place.export(
            folded.reshape(conv_weight.shape).astype(conv_weight.dtype),
            shift.astype(conv_weight.dtype if conv_bias is None else conv_bias.dtype),
        )
        return w, b


def output_channels(
    name: str, shape: tuple[int, ...], channel_axis: Any, groups: Any
) -> tuple[int, int]:
    """(channel axis from the front, number of the output's channels) of a weight."""
    channel_axis = checks.integer("channel_axis", channel_axis)
    groups = checks.number_of_values("groups", groups, 1)
    ndim = len(shape)
    if ndim < 2:
        raise ValueError(f"{name}: expected at least 2 dimensions, got shape {shape}")
    if not -ndim <= channel_axis < ndim:
        raise ValueError(
            f"channel_axis: expected {-ndim} to {ndim - 1} for {name} of shape {shape}, "
            f"got {channel_axis}"
        )
    axis = channel_axis % ndim
    if groups > 1 and axis > 1:
        raise ValueError(
            f"groups: expected 1 for a {name} with its channels at axis {axis}, all of which are "
            f"the output's, got {groups}"
        )
    if shape[0] % groups:
        raise ValueError(
            f"groups: expected a divisor of the first axis of {name}, {shape[0]}, got {groups}"
        )
    return axis, shape[axis] * (groups if axis else 1)
