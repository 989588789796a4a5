"""Batch normalization, and the steps it is made of."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import arrays, checks, running
from ..arrays import Array
from ..distributed import Moments
from ..geometry import Geometry, batch_norm_geometry
from .common import (
    Layout,
    as_dtype,
    backward,
    channels_of,
    double_backward,
    empty_like_usual,
    running_scale,
    split_mean,
    statistics_of_nothing,
    usual_rows,
)

__all__ = [
    "BatchNormSaved",
    "batch_norm_backward",
    "batch_norm_backward_reduce",
    "batch_norm_backward_transform",
    "batch_norm_double_backward",
    "batch_norm_forward",
    "batch_norm_statistics",
    "batch_norm_transform",
    "update_running_statistics",
]


class BatchNormSaved(NamedTuple):
    """What `batch_norm_forward` keeps for `batch_norm_backward`.

    Attributes
    ----------
    mean : array, shape (C,)
        Mean that was subtracted.
    inv_std : array, shape (C,)
        ``1 / sqrt(var + eps)``; cuDNN's saved inverse variance.
    residual : array, shape (C,), or None
        What rounding to the accumulator type took from the mean.
    training : bool
        Whether mean and inv_std are those of the batch.
    channel_axis : int
    shape : tuple of int
        Shape of x.
    bias_dtype : dtype or None
        Dtype that dbias will have, if a bias was given.
    """

    mean: Array
    inv_std: Array
    residual: Array | None
    training: bool
    channel_axis: int
    shape: tuple[int, ...]
    bias_dtype: Any


_FORWARD_NAMES = ("x", "weight", "bias", "running_mean", "running_var", "out")


def batch_norm_forward(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    *,
    training: bool = True,
    momentum: float | None = None,
    exponential_average_factor: float | None = None,
    eps: float = 1e-5,
    correction: float = 1,
    channel_axis: int = 1,
    out: Array | None = None,
) -> tuple[Array, BatchNormSaved]:
    """Normalize every channel to zero mean and unit variance, then scale and shift it.

        y = (x - mean) * inv_std * weight + bias,    inv_std = 1 / sqrt(var + eps)

    In training, mean and var are the mean and the biased variance of each
    channel over all other axes of x, and the running statistics are updated in
    place with the weight f of the new batch (n values a channel):

        running_mean = running_mean * (1 - f) + mean * f
        running_var  = running_var  * (1 - f) + var * n / (n - correction) * f

    Otherwise mean and var are the running statistics. (Ioffe and Szegedy,
    "Batch Normalization", 2015, algorithms 1 and 2.)

    Parameters
    ----------
    x : array, shape (N, C, ...) with C at `channel_axis`; at least 2-D
        float16, bfloat16, float32 or float64, any strides. A dense x, in
        whatever order of its axes, is never copied.
    weight, bias : array, shape (C,), optional
        Dtype of x, float32 or float64. Missing, they count as 1 and 0.
    running_mean, running_var : array, shape (C,), optional
        Dtype of x, float32 or float64. Updated in place in training; needed otherwise.
    training : bool
    momentum : float, optional
        1 - f: the weight **kept on the old** running value (Keras, Chainer's decay).
    exponential_average_factor : float, optional
        f: the weight **given to the new** batch (cuDNN; PyTorch's momentum).
        Give one of the two or neither, which means f = 0.1.
    eps : float
        Added to the variance.
    correction : float
        1: unbiased running variance (PyTorch, cuDNN, TensorFlow's fused op);
        0: biased (Keras, Flax, ONNX).
    channel_axis : int
        -1 for channels last.
    out : array, optional
        Where y goes: shape and dtype of x. May be x itself, but then x is gone
        and `batch_norm_backward` cannot be called.

    Returns
    -------
    y : array
        Shape, dtype and memory order of x.
    saved : BatchNormSaved
        A named tuple that begins (mean, inv_std), both of shape (C,) and in
        the accumulator type: float32, for float64 data float64. Keep it, and
        x, for `batch_norm_backward`.

    Raises
    ------
    ValueError
        For shapes and values: among them one value per channel in training,
        both of momentum and exponential_average_factor, an `out` that overlaps
        an input in part, read-only running statistics.
    TypeError
        For types and dtypes.
        Nothing has been modified then.

    Warns
    -----
    UserWarning
        If momentum is below 0.5: it is then most likely meant the other way round.

    Notes
    -----
    An empty batch gives an empty y and leaves the running statistics alone.
    Sums are taken about a pivot, in chunks that are merged in float64: data
    whose mean is 10^4 times its standard deviation loses no digits, a constant
    channel gives exactly `bias` (if eps is not 0).
    The order of arguments is not PyTorch's, which has the running statistics
    before weight and bias.
    """
    factor = checks.averaging_factor(momentum, exponential_average_factor)
    backend = arrays.usual_backend(x)
    if backend is not None:
        shape = x.shape
        try:
            axis, number, training, eps, scale, geometry = _known_arguments(
                shape, x.dtype, channel_axis, training, eps, correction,
                running_mean is not None, running_var is not None,
            )  # fmt: skip
        except TypeError:  # of an argument without a hash, or wrong: see below
            geometry = None
        if geometry is not None and checks.are_usual(
            x, (number,), weight, bias, running_mean, running_var, out, written=training
        ):
            y = empty_like_usual(x) if out is None else out
            rows = _apply(
                backend, x, weight, bias, running_mean, running_var, training, eps,
                scale, factor, geometry, y,
            )  # fmt: skip
            mean, inv_std, residual = usual_rows(rows, (number,))
            bias_dtype = None if bias is None else bias.dtype
            fields = mean, inv_std, residual, training, axis, shape, bias_dtype
            return y, tuple.__new__(BatchNormSaved, fields)  # twice as quick

    given = out
    (x, weight, bias, running_mean, running_var, out), place = arrays.adopt(
        _FORWARD_NAMES, x, weight, bias, running_mean, running_var, out
    )
    checks.present("x", x)
    axis, number, training, eps, scale, geometry = forward_arguments(
        x.shape, x.dtype, channel_axis, training, eps, correction,
        running_mean is not None, running_var is not None,
    )  # fmt: skip
    checks.per_channel(
        number, x.dtype,
        weight=weight, bias=bias, running_mean=running_mean, running_var=running_var,
    )  # fmt: skip
    if training:
        checks.running_statistics(place, running_mean, running_var, x=x, weight=weight, bias=bias)
    if out is not None:
        checks.output(
            out, x, ("x",),
            x=x, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var,
        )  # fmt: skip

    with place:
        operands = arrays.Operands(place, x, (x,), out)
        (source,) = operands.inputs
        if geometry is None:
            given_mean, given_var = (None, None) if training else (running_mean, running_var)
            statistics = statistics_of_nothing(
                place.xp, given_mean, given_var, number, eps, checks.statistics_dtype(x.dtype)
            )
        else:
            statistics = _apply(
                place.backend, source, weight, bias, running_mean, running_var, training, eps,
                scale, factor, batch_norm_geometry(source.shape, operands.order.index(axis)),
                operands.out,
            )  # fmt: skip
        y, mean, inv_std, residual = place.export(
            operands.finish(), statistics[0], statistics[1], statistics[2], given=given
        )
        bias_dtype = None if bias is None else bias.dtype
        return y, BatchNormSaved(mean, inv_std, residual, training, axis, x.shape, bias_dtype)


def _apply(
    backend: Any,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    eps: float,
    scale: float,
    factor: float,
    geometry: Geometry,
    out: Any,
) -> Any:
    """Normalize x, in memory order, into `out`; mean, inv_std and residual as rows."""
    verbs = backend.transform
    if training:
        return verbs.normalize(
            x, weight, bias, running_mean, running_var, eps, scale, factor, geometry, out
        )
    return verbs.infer(x, running_mean, running_var, weight, bias, eps, geometry, out)


@checks.once
def forward_arguments(
    shape: tuple[int, ...],
    dtype: np.dtype,
    channel_axis: Any,
    training: Any,
    eps: Any,
    correction: Any,
    running_mean: bool,
    running_var: bool,
) -> tuple[int, int, bool, float, float, Geometry | None]:
    """(channel axis, channels, training, eps, scale, geometry) of a forward call.

    It is known here whether there are running statistics, but no more of them. The geometry is
    that of a C-contiguous x, and None if x is empty.
    """
    axis, number, count = checks.channels(shape, dtype, channel_axis)
    eps = checks.not_negative("eps", eps)
    correction = checks.not_negative("correction", correction)
    training = checks.flag("training", training)
    scale = running_scale(
        training, "training", running_mean, running_var, count, correction,
        checks.several_values, shape,
    )  # fmt: skip
    geometry = batch_norm_geometry(shape, axis) if number * count else None
    return axis, number, training, eps, scale, geometry


_known_arguments = forward_arguments.known  # type: ignore[attr-defined]


def batch_norm_backward(
    dy: Array,
    x: Array,
    saved: BatchNormSaved,
    weight: Array | None = None,
    *,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    out: Array | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients of `batch_norm_forward` with respect to x, weight and bias.

        dbias   = sum(dy)
        dweight = sum(dy * (x - mean)) * inv_std

    over all axes but the channels', and with n values a channel

        dx = weight * inv_std * (dy - dbias / n - (x - mean) * inv_std * dweight / n)

    after a forward call in training, ``dx = dy * weight * inv_std`` otherwise.
    (Ioffe and Szegedy, "Batch Normalization", 2015, section 3.)

    Parameters
    ----------
    dy : array
        Gradient with respect to y: shape and dtype of x.
    x : array
        What `batch_norm_forward` was given.
    saved : BatchNormSaved
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
        As `batch_norm_forward`, and if dy, x and saved do not belong together.
    """
    checks.saved_by("batch_norm_forward", BatchNormSaved, saved)
    return backward(
        dy, x, saved, weight, output_mask, out, lambda x: _layout(x, saved.channel_axis),
        training=saved.training, bias_dtype=saved.bias_dtype,
    )  # fmt: skip


def batch_norm_double_backward(
    gdx: Array | None,
    gdweight: Array | None,
    gdbias: Array | None,
    dy: Array,
    x: Array,
    saved: BatchNormSaved,
    weight: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of `batch_norm_backward` with respect to dy, x and weight.

    What second derivatives through a batch norm need: gradient penalties, products with a
    Hessian. Given are the gradients of a loss with respect to what `batch_norm_backward`
    computed. With r = inv_std, v = (x - mean) * r and means <.> over a channel's n values,

        u   = r * (gdx - <gdx> - v * <gdx * v>)
        ddy = weight * u + gdweight * v + gdbias
        ddx = weight * r^2 * (v * (3 * <gdx * v> * <dy * v> - <(gdx - <gdx>) * (dy - <dy>)>)
                              - <dy * v> * (gdx - <gdx>) - <gdx * v> * (dy - <dy>))
              + gdweight * r * (dy - <dy> - v * <dy * v>)
        ddweight = sum(dy * u)

    after a forward call in training, where mean and inv_std depend on x; otherwise they are
    constants and u = r * gdx, ddx = gdweight * r * dy. (docs/numerics.md has the derivation.)

    Parameters
    ----------
    gdx : array or None
        Gradient with respect to dx: shape and dtype of x.
    gdweight, gdbias : array, shape (C,), or None
        Gradients with respect to dweight and dbias, any floating dtype. What is None
        adds nothing.
    dy, x, saved, weight
        What `batch_norm_backward` was given.

    Returns
    -------
    ddy, ddx : array
        Shape, dtype and memory order of x.
    ddweight : array, shape (C,)
        In the dtype of weight; in the accumulator type if there is none.

    Raises
    ------
    ValueError, TypeError
        As `batch_norm_backward`, and for gradients that do not go with x.

    Notes
    -----
    A large mean of x costs no digits; one of gdx or dy as many as in `batch_norm_backward`, those
    that its deviations have not: products of deviations are summed about means of chunks, which
    are merged in float64.
    """
    checks.saved_by("batch_norm_forward", BatchNormSaved, saved)
    return double_backward(
        gdx, gdweight, gdbias, dy, x, saved, weight, lambda x: _layout(x, saved.channel_axis),
        training=saved.training,
    )  # fmt: skip


def batch_norm_statistics(x: Array, *, channel_axis: int = 1, dtype: Any = None) -> Moments:
    """Count, mean and centred sum of squares of every channel.

        mean = sum(x) / n,    m2 = sum((x - mean)^2)

    over all axes but the channels'. The first step of a synchronized batch
    norm; `merge_moments` joins the moments of several arrays.

    Parameters
    ----------
    x : array, shape (N, C, ...) with C at `channel_axis`; at least 2-D
        float16, bfloat16, float32 or float64, any strides.
    channel_axis : int
    dtype : dtype, optional
        Of mean and m2: the accumulator type if not given, or float64, in which the
        moments of all data are computed.

    Returns
    -------
    Moments
        (count, mean, m2): an int and two arrays of shape (C,). An empty x has
        count 0 and zeros. Rounding a mean to float32 is an error of up to
        ``6e-8 * |mean| / std`` standard deviations in what is computed from it;
        a mean in float64 has none, nor has `batch_norm_forward`.

    Raises
    ------
    ValueError, TypeError
        For shapes, and for types and dtypes.
    """
    (x,), place = arrays.adopt(("x",), x)
    axis, number, count = channels_of(x, channel_axis)
    own = checks.statistics_dtype(x.dtype)
    dtype = own if dtype is None else checks.floating_dtype("dtype", dtype)
    if dtype not in (own, np.float64):
        raise TypeError(f"dtype: expected {own} or float64 for x of {x.dtype}, got {dtype}")
    with place:
        if x.size == 0:
            mean, m2 = place.xp.zeros((2, number), dtype)
        else:
            order, (source,) = arrays.dense((x,))
            geometry = batch_norm_geometry(source.shape, order.index(axis))
            mean, m2 = place.backend.statistics.moments(source, geometry, dtype)
        return Moments(count, *place.export(mean, m2))


def batch_norm_transform(
    x: Array,
    mean: Array,
    inv_std: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    channel_axis: int = 1,
    out: Array | None = None,
) -> Array:
    """Apply given statistics: ``y = (x - mean) * inv_std * weight + bias``.

    Parameters
    ----------
    x : array, shape (N, C, ...) with C at `channel_axis`; at least 2-D
        float16, bfloat16, float32 or float64, any strides.
    mean, inv_std : array, shape (C,)
        Any floating dtype. inv_std is used in the accumulator type; a float64
        mean keeps its digits whatever the dtype of x.
    weight, bias : array, shape (C,), optional
        Dtype of x, float32 or float64.
    channel_axis : int
    out : array, optional
        Where y goes; may be x itself.

    Returns
    -------
    y : array
        Shape, dtype and memory order of x.

    Raises
    ------
    ValueError, TypeError
        For shapes and values, and for types and dtypes.
    """
    given = out
    (x, mean, inv_std, weight, bias, out), place = arrays.adopt(
        ("x", "mean", "inv_std", "weight", "bias", "out"), x, mean, inv_std, weight, bias, out
    )
    axis, number, _ = channels_of(x, channel_axis)
    checks.statistic("mean", mean, (number,))
    checks.statistic("inv_std", inv_std, (number,))
    checks.per_channel(number, x.dtype, weight=weight, bias=bias)
    if out is not None:
        checks.output(out, x, ("x",), x=x, mean=mean, inv_std=inv_std, weight=weight, bias=bias)

    dtype = checks.statistics_dtype(x.dtype)
    with place:
        operands = arrays.Operands(place, x, (x,), out)
        (source,) = operands.inputs
        if x.size > 0:
            place.backend.transform.transform(
                source, *split_mean(mean, dtype, place.xp), as_dtype(inv_std, dtype), weight, bias,
                batch_norm_geometry(source.shape, operands.order.index(axis)), operands.out,
            )  # fmt: skip
        (result,) = place.export(operands.finish(), given=given)
        return result


def batch_norm_backward_reduce(
    dy: Array, x: Array, mean: Array, *, channel_axis: int = 1
) -> tuple[Array, Array]:
    """The two sums of a batch norm's backward pass.

        sum_dy = sum(dy),    sum_dy_xmu = sum(dy * (x - mean))

    over all axes but the channels'. A synchronized batch norm adds these up
    over its ranks; ``dbias = sum_dy`` and ``dweight = sum_dy_xmu * inv_std``.

    Parameters
    ----------
    dy, x : array, shape (N, C, ...) with C at `channel_axis`; at least 2-D
        Of one shape and dtype: float16, bfloat16, float32 or float64.
    mean : array, shape (C,)
        Any floating dtype; a float64 mean keeps its digits whatever the dtype of x.
    channel_axis : int

    Returns
    -------
    sum_dy, sum_dy_xmu : array, shape (C,)
        In the accumulator type.

    Raises
    ------
    ValueError, TypeError
        For shapes, and for types and dtypes.
    """
    (dy, x, mean), place = arrays.adopt(("dy", "x", "mean"), dy, x, mean)
    axis, number, _ = channels_of(x, channel_axis)
    checks.same_as_input("dy", dy, x)
    checks.statistic("mean", mean, (number,))
    dtype = checks.statistics_dtype(x.dtype)
    with place:
        if x.size == 0:
            sum_dy, sum_dy_xmu = place.xp.zeros((2, number), dtype)
        else:
            order, (gradient, source) = arrays.dense((dy, x))
            geometry = batch_norm_geometry(source.shape, order.index(axis))
            sum_dy, sum_dy_xmu = place.backend.backward.reduce(
                gradient, source, *split_mean(mean, dtype, place.xp), geometry
            )
        sum_dy, sum_dy_xmu = place.export(sum_dy, sum_dy_xmu)
        return sum_dy, sum_dy_xmu


def batch_norm_backward_transform(
    dy: Array,
    x: Array,
    mean: Array,
    inv_std: Array,
    weight: Array | None,
    sum_dy: Array,
    sum_dy_xmu: Array,
    count: int,
    *,
    channel_axis: int = 1,
    out: Array | None = None,
) -> Array:
    """Gradient with respect to x from the sums of `batch_norm_backward_reduce`.

        dx = weight * inv_std * (dy - sum_dy / n - (x - mean) * inv_std^2 * sum_dy_xmu / n)

    Parameters
    ----------
    dy, x : array, shape (N, C, ...) with C at `channel_axis`; at least 2-D
        Of one shape and dtype: float16, bfloat16, float32 or float64.
    mean, inv_std : array, shape (C,)
        Statistics that the forward pass used; any floating dtype.
    weight : array, shape (C,), or None
        Dtype of x, float32 or float64.
    sum_dy, sum_dy_xmu : array, shape (C,)
        Sums over all `count` values, on this rank and the others; any floating dtype.
    count : int
        n: values a channel that the statistics were taken over; at least 1.
    channel_axis : int
    out : array, optional
        Where dx goes; may be dy or x itself.

    Returns
    -------
    dx : array
        Shape, dtype and memory order of x.

    Raises
    ------
    ValueError, TypeError
        For shapes and values, and for types and dtypes.
    """
    given = out
    (dy, x, mean, inv_std, weight, sum_dy, sum_dy_xmu, out), place = arrays.adopt(
        ("dy", "x", "mean", "inv_std", "weight", "sum_dy", "sum_dy_xmu", "out"),
        dy, x, mean, inv_std, weight, sum_dy, sum_dy_xmu, out,
    )  # fmt: skip
    axis, number, _ = channels_of(x, channel_axis)
    checks.same_as_input("dy", dy, x)
    per_channel = {"mean": mean, "inv_std": inv_std, "sum_dy": sum_dy, "sum_dy_xmu": sum_dy_xmu}
    for name, array in per_channel.items():
        checks.statistic(name, array, (number,))
    checks.per_channel(number, x.dtype, weight=weight)
    count = checks.number_of_values("count", count, 1)
    if out is not None:
        checks.output(out, x, ("x", "dy"), dy=dy, x=x, weight=weight, **per_channel)

    dtype = checks.statistics_dtype(x.dtype)
    with place:
        xp = place.xp
        operands = arrays.Operands(place, x, (x, dy), out)
        source, gradient = operands.inputs
        if x.size > 0:
            place.backend.backward.input_gradient(
                gradient, source, *split_mean(mean, dtype, xp), as_dtype(inv_std, dtype), weight,
                as_dtype(sum_dy, dtype), as_dtype(sum_dy_xmu, dtype), count,
                batch_norm_geometry(source.shape, operands.order.index(axis)), operands.out,
            )  # fmt: skip
        (result,) = place.export(operands.finish(), given=given)
        return result


def update_running_statistics(
    running_mean: Array | None,
    running_var: Array | None,
    mean: Array,
    var: Array,
    count: int,
    *,
    momentum: float | None = None,
    exponential_average_factor: float | None = None,
    correction: float = 1,
) -> None:
    """Take a batch into running statistics, in place.

        running_mean = running_mean * (1 - f) + mean * f
        running_var  = running_var  * (1 - f) + var * n / (n - correction) * f

    Parameters
    ----------
    running_mean, running_var : array, shape (C,), or None
        Any floating dtype, any strides. None is left out.
    mean, var : array, shape (C,)
        Mean and **biased** variance of the batch; any floating dtype.
    count : int
        n: values a channel in the batch. 0 changes nothing.
    momentum, exponential_average_factor, correction : float
        1 - f, or f, and the divisor's correction, as in `batch_norm_forward`.

    Raises
    ------
    ValueError, TypeError
        For shapes and values, and for types and dtypes; nothing has been modified then.
    """
    (running_mean, running_var, mean, var), place = arrays.adopt(
        ("running_mean", "running_var", "mean", "var"), running_mean, running_var, mean, var
    )
    if mean is None or mean.ndim != 1:
        got = "None" if mean is None else f"shape {mean.shape}"
        raise ValueError(f"mean: expected an array of shape (C,), got {got}")
    number = mean.shape[0]
    checks.statistic("mean", mean, (number,))
    checks.statistic("var", var, (number,))
    for name, array in (("running_mean", running_mean), ("running_var", running_var)):
        if array is not None:
            checks.statistic(name, array, (number,))
    checks.running_statistics(place, running_mean, running_var)
    factor = checks.averaging_factor(momentum, exponential_average_factor)
    correction = checks.not_negative("correction", correction)
    count = checks.number_of_values("count", count, 0)
    if count == 0 or number == 0:
        return
    if running_var is not None:
        checks.correctable(count, correction)
    if running_mean is None and running_var is None:
        return
    scale = 1.0 if running_var is None else running.bessel(count, correction)
    with place:
        place.backend.statistics.update_running(
            running_mean,
            running_var,
            mean.astype(np.float64),
            var.astype(np.float64),
            scale,
            factor,
        )
        for array in (running_mean, running_var):
            if array is not None:
                place.export(array, given=array)


def _layout(x: Any, channel_axis: int) -> Layout:
    checks.present("x", x)
    return _channels_layout(x.shape, x.dtype, channel_axis)


@checks.once
def _channels_layout(shape: tuple[int, ...], dtype: np.dtype, channel_axis: Any) -> Layout:
    axis, number, _ = checks.channels(shape, dtype, channel_axis)
    return Layout(
        statistics=(axis,),
        parameters=(axis,),
        statistics_shape=(number,),
        parameters_shape=(number,),
        meaning=checks.ONE_A_CHANNEL,
        leading=0,
        geometry=lambda shape, order: batch_norm_geometry(shape, order.index(axis)),
    ).of(shape)
