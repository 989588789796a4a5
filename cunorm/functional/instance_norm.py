"""Instance normalization: over every channel of every sample."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from .. import arrays, checks
from ..arrays import Array
from ..geometry import batch_norm_geometry
from .common import Layout, backward, forward, normalize, running_scale, statistics_of_nothing
from .group_norm import group_layout

__all__ = ["InstanceNormSaved", "instance_norm_backward", "instance_norm_forward"]


class InstanceNormSaved(NamedTuple):
    """What `instance_norm_forward` keeps for `instance_norm_backward`.

    Attributes
    ----------
    mean : array, shape (N, C)
        Mean that was subtracted.
    inv_std : array, shape (N, C)
        ``1 / sqrt(var + eps)``.
    residual : array, shape (N, C), or None
        What rounding to the accumulator type took from the mean.
    use_input_stats : bool
        Whether mean and inv_std are those of x.
    channel_axis : int
    shape : tuple of int
        Shape of x.
    bias_dtype : dtype or None
        Dtype that dbias will have, if a bias was given.
    """

    mean: Array
    inv_std: Array
    residual: Array | None
    use_input_stats: bool
    channel_axis: int
    shape: tuple[int, ...]
    bias_dtype: Any


_FORWARD_NAMES = ("x", "weight", "bias", "running_mean", "running_var", "out")


def instance_norm_forward(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    *,
    use_input_stats: bool = True,
    momentum: float | None = None,
    exponential_average_factor: float | None = None,
    eps: float = 1e-5,
    correction: float = 1,
    channel_axis: int = 1,
    out: Array | None = None,
) -> tuple[Array, InstanceNormSaved]:
    """Normalize every channel of every sample, then scale and shift every channel.

        y = (x - mean) * inv_std * weight + bias,    inv_std = 1 / sqrt(var + eps)

    With the input's statistics, mean and var are the mean and the biased
    variance of the n values of a channel of a sample, and the running
    statistics, if given, are updated in place with the weight f of the new
    batch, over which the samples' statistics are averaged:

        running_mean = running_mean * (1 - f) + average(mean) * f
        running_var  = running_var  * (1 - f) + average(var) * n / (n - correction) * f

    Otherwise mean and var are the running statistics. (Ulyanov, Vedaldi and
    Lempitsky, "Instance Normalization", 2016, equation 4.)

    Parameters
    ----------
    x : array, shape (N, C, ...) with C at `channel_axis`; at least 2-D
        float16, bfloat16, float32 or float64, any strides. A dense x is not
        copied, in whatever order of its axes, if the samples are the slowest in
        memory.
    weight, bias : array, shape (C,), optional
        Dtype of x, float32 or float64. Missing, they count as 1 and 0.
    running_mean, running_var : array, shape (C,), optional
        Dtype of x, float32 or float64. Updated in place with use_input_stats, as
        far as they are given; both needed without.
    use_input_stats : bool
    momentum : float, optional
        1 - f: the weight **kept on the old** running value (Keras, Chainer's decay).
    exponential_average_factor : float, optional
        f: the weight **given to the new** batch (cuDNN; PyTorch's momentum).
        Give one of the two or neither, which means f = 0.1.
    eps : float
        Added to the variance.
    correction : float
        1: unbiased running variance (PyTorch); 0: biased.
    channel_axis : int
        -1 for channels last; not 0, which is the samples' axis.
    out : array, optional
        Where y goes: shape and dtype of x. May be x itself, but then x is gone
        and `instance_norm_backward` cannot be called.

    Returns
    -------
    y : array
        Shape, dtype and memory order of x.
    saved : InstanceNormSaved
        A named tuple that begins (mean, inv_std), both of shape (N, C) and in
        the accumulator type: float32, for float64 data float64. Keep it, and
        x, for `instance_norm_backward`.

    Raises
    ------
    ValueError
        For shapes and values: among them one spatial value per channel with the
        input's statistics, both of momentum and exponential_average_factor, an
        `out` that overlaps an input in part, read-only running statistics.
    TypeError
        For types and dtypes.
        Nothing has been modified then.

    Warns
    -----
    UserWarning
        If momentum is below 0.5: it is then most likely meant the other way round.

    Notes
    -----
    With the input's statistics, on a CPU, a sample has the same bits whatever
    samples are beside it. A constant channel gives exactly `bias` (if eps is not
    0). An empty x gives an empty y and leaves the running statistics alone.
    The order of arguments is not PyTorch's, which has the running statistics
    before weight and bias.
    """
    factor = checks.averaging_factor(momentum, exponential_average_factor)
    eps = checks.not_negative("eps", eps)
    correction = checks.not_negative("correction", correction)
    use_input_stats = checks.flag("use_input_stats", use_input_stats)

    def known_of(x: Any) -> tuple[Layout, float]:
        layout = group_layout(x, channel_axis, None)
        if x.size > 0:
            checks.several_spatial_values(x.size // prod(layout.statistics_shape), x.shape)
        return layout, eps

    if use_input_stats and running_mean is None and running_var is None:
        y, (mean, inv_std, residual), layout, (shape, bias_dtype) = forward(
            x, weight, bias, out, known_of
        )
        (axis,) = layout.parameters
        return y, InstanceNormSaved(mean, inv_std, residual, True, axis, shape, bias_dtype)

    given = out
    (x, weight, bias, running_mean, running_var, out), place = arrays.adopt(
        _FORWARD_NAMES, x, weight, bias, running_mean, running_var, out
    )
    layout = group_layout(x, channel_axis, None)
    axis, number = layout.parameters[0], layout.parameters_shape[0]
    checks.per_channel(
        number, x.dtype,
        weight=weight, bias=bias, running_mean=running_mean, running_var=running_var,
    )  # fmt: skip
    scale = running_scale(
        use_input_stats, "use_input_stats", running_mean is not None, running_var is not None,
        x.size // max(1, x.shape[0] * number), correction, checks.several_spatial_values, x.shape,
    )  # fmt: skip
    if use_input_stats:
        checks.running_statistics(place, running_mean, running_var, x=x, weight=weight, bias=bias)
    if out is not None:
        checks.output(
            out, x, ("x",),
            x=x, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var,
        )  # fmt: skip

    with place:
        if use_input_stats:
            y, rows = normalize(place, x, weight, bias, eps, layout, out)
            mean, inv_std, residual = rows[0], rows[1], rows[2]
            if x.size > 0 and (running_mean is not None or running_var is not None):
                center = mean
                if running_mean is not None and running_mean.dtype == np.float64:
                    center = mean + residual.astype(np.float64)
                place.backend.statistics.update_running(
                    running_mean, running_var, center, rows[3], scale, factor
                )
        else:
            operands = arrays.Operands(place, x, (x,), out)
            (source,) = operands.inputs
            if x.size == 0:
                dtype = checks.statistics_dtype(x.dtype)
                rows = statistics_of_nothing(
                    place.xp, running_mean, running_var, number, eps, dtype
                )
            else:
                geometry = batch_norm_geometry(source.shape, operands.order.index(axis))
                rows = place.backend.transform.infer(
                    source, running_mean, running_var, weight, bias, eps, geometry, operands.out
                )
            y = operands.finish()
            mean, inv_std, residual = (place.xp.tile(row, (x.shape[0], 1)) for row in rows[:3])
        y, mean, inv_std, residual = place.export(y, mean, inv_std, residual, given=given)
        saved = InstanceNormSaved(
            mean, inv_std, residual,
            use_input_stats, axis, x.shape, None if bias is None else bias.dtype,
        )  # fmt: skip
        return y, saved


def instance_norm_backward(
    dy: Array,
    x: Array,
    saved: InstanceNormSaved,
    weight: Array | None = None,
    *,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    out: Array | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients of `instance_norm_forward` with respect to x, weight and bias.

        dbias   = sum(dy)
        dweight = sum(dy * xhat),    xhat = (x - mean) * inv_std

    over all axes but the channels', and with the mean taken over a channel of a sample

        dx = inv_std * (g - mean(g) - xhat * mean(g * xhat)),    g = dy * weight

    after a forward call with the input's statistics, ``dx = g * inv_std`` otherwise.
    (Ulyanov, Vedaldi and Lempitsky, "Instance Normalization", 2016.)

    Parameters
    ----------
    dy : array
        Gradient with respect to y: shape and dtype of x.
    x : array
        What `instance_norm_forward` was given.
    saved : InstanceNormSaved
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
        As `instance_norm_forward`, and if dy, x and saved do not belong together.
    """
    checks.saved_by("instance_norm_forward", InstanceNormSaved, saved)
    return backward(
        dy, x, saved, weight, output_mask, out,
        lambda x: group_layout(x, saved.channel_axis, None),
        training=saved.use_input_stats, bias_dtype=saved.bias_dtype,
    )  # fmt: skip
