"""Convolution and batch normalization that together keep one tensor for the backward pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import arrays, checks
from ..arrays import Array
from ..convolution import Convolution, Pair, default_convolution, empty_like, output_shape
from .batch_norm import (
    BatchNormSaved,
    batch_norm_backward,
    batch_norm_forward,
    forward_arguments,
)

__all__ = ["ConvBatchNormSaved", "conv_batch_norm_backward", "conv_batch_norm_forward"]


class ConvBatchNormSaved(NamedTuple):
    """What `conv_batch_norm_forward` keeps for `conv_batch_norm_backward`.

    Attributes
    ----------
    mean, inv_std : array, shape (O,)
        Mean of the convolution's result that was subtracted, and ``1 / sqrt(var + eps)``.
    residual : array, shape (O,), or None
        What rounding to the accumulator type took from the mean.
    training : bool
        Whether mean and inv_std are those of the batch.
    shape, weight_shape, output_shape : tuple of int
        Shapes of x, conv_weight and y.
    bias_dtype : dtype or None
        Dtype that dbias will have, if a bias was given.
    stride, padding, dilation : pair of int
    groups : int
    convolution : Convolution
    """

    mean: Array
    inv_std: Array
    residual: Array | None
    training: bool
    shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    bias_dtype: Any
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    convolution: Convolution


def conv_batch_norm_forward(
    x: Array,
    conv_weight: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    *,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    convolution: Convolution | None = None,
    training: bool = True,
    momentum: float | None = None,
    exponential_average_factor: float | None = None,
    eps: float = 1e-5,
    correction: float = 1,
) -> tuple[Array, ConvBatchNormSaved]:
    """Convolve and batch-normalize, keeping nothing of the size of the result.

        z = conv(x, conv_weight),    y = (z - mean) * inv_std * weight + bias

    with mean and inv_std of z as in `batch_norm_forward`. The convolution has no bias, which
    the mean would take away again. y lies where z was; `conv_batch_norm_backward` convolves
    once more. So between the passes x alone is kept, where a convolution and a batch norm
    keep x and z. (Rota Bulò, Porzi and Kontschieder, "In-Place Activated BatchNorm for
    Memory-Optimized Training of DNNs", 2018, section 3: checkpointing.)

    Parameters
    ----------
    x : array, shape (N, C, H, W)
        float16, bfloat16, float32 or float64, any strides.
    conv_weight : array, shape (O, C / groups, K, L)
        Dtype of x, float32 or float64.
    weight, bias : array, shape (O,), optional
    running_mean, running_var : array, shape (O,), optional
        As in `batch_norm_forward`.
    stride, padding, dilation : int or pair of int
        For H and W. Padding is with zeros, on both sides.
    groups : int
        Group g of the O output channels sees group g of the C input channels alone.
    convolution : Convolution, optional
        What convolves: `CudnnConvolution` for arrays on a GPU where it is installed, else
        `MatmulConvolution`.
    training, momentum, exponential_average_factor, eps, correction
        As in `batch_norm_forward`.

    Returns
    -------
    y : array, shape (N, O, ...)
        Dtype and memory order of x.
    saved : ConvBatchNormSaved
        A named tuple that begins (mean, inv_std). Keep it, and x, for
        `conv_batch_norm_backward`.

    Raises
    ------
    ValueError, TypeError
        For shapes and values, and for types and dtypes; nothing has been modified then.

    Warns
    -----
    UserWarning
        If momentum is below 0.5: it is then most likely meant the other way round.

    Notes
    -----
    Tensors of the size of the input and output: x and y while forward runs; x, dy, z and dx
    while backward runs, where the gradient with respect to z lies in z. Added to these is the
    convolution's workspace, and a copy of a dy that does not lie in memory as y does.
    """
    (x, conv_weight, weight, bias, running_mean, running_var), place = arrays.adopt(
        ("x", "conv_weight", "weight", "bias", "running_mean", "running_var"),
        x, conv_weight, weight, bias, running_mean, running_var,
    )  # fmt: skip
    factor = checks.averaging_factor(momentum, exponential_average_factor)
    training = checks.flag("training", training)
    checks.present("x", x)
    checks.present("conv_weight", conv_weight)
    checks.floating("x", x.dtype)
    options = checked_options(stride, padding, dilation, groups)
    checked_convolution(convolution)
    shape = _result_shape(x, conv_weight, options)
    values = shape[0] * shape[2] * shape[3]
    if training and values == 1 and shape[1] > 0:
        raise ValueError(
            "x: expected a convolution with more than 1 value per channel when training, got "
            f"input shape {x.shape}, output shape {shape}; take a larger batch, or the running "
            "statistics (training=False, eval())"
        )
    vectors = {
        "weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var
    }  # fmt: skip
    # Those of the batch norm, before anything is convolved.
    forward_arguments(
        shape, x.dtype, 1, training, eps, correction,
        running_mean is not None, running_var is not None,
    )  # fmt: skip
    checks.per_channel(shape[1], x.dtype, **vectors)
    if training:
        checks.running_statistics(
            place, running_mean, running_var, x=x, conv_weight=conv_weight, weight=weight, bias=bias
        )
    with place:
        if convolution is None:
            convolution = default_convolution(place.xp is not np)
        z = convolution.forward(x, conv_weight, **options._asdict())
        _check("forward", z, x, shape, x, conv_weight, *vectors.values())
        y, saved = batch_norm_forward(
            z, **vectors, training=training, exponential_average_factor=factor, eps=eps,
            correction=correction, out=z,
        )  # fmt: skip
        y, mean, inv_std, residual = place.export(y, *saved[:3])
    return y, ConvBatchNormSaved(
        mean, inv_std, residual, training, x.shape, conv_weight.shape, shape, saved.bias_dtype,
        *options, convolution,
    )  # fmt: skip


def conv_batch_norm_backward(
    dy: Array,
    x: Array,
    conv_weight: Array,
    saved: ConvBatchNormSaved,
    weight: Array | None = None,
    *,
    output_mask: tuple[bool, bool, bool, bool] = (True, True, True, True),
) -> tuple[Array | None, Array | None, Array | None, Array | None]:
    """Gradients of `conv_batch_norm_forward` with respect to x, conv_weight, weight and bias.

    z = conv(x, conv_weight) is computed again, the gradient with respect to it, as in
    `batch_norm_backward`, takes its place, and of that are made

        dx = conv_transposed(dz, conv_weight),    dconv_weight = correlation of dz with x

    The running statistics are left alone.

    Parameters
    ----------
    dy : array
        Gradient with respect to y: its shape and dtype.
    x, conv_weight : array
        What `conv_batch_norm_forward` was given, unchanged.
    saved : ConvBatchNormSaved
        What it returned.
    weight : array, shape (O,), optional
        What it was given.
    output_mask : four bools
        Which of dx, dconv_weight, dweight and dbias to compute; the others are None.

    Returns
    -------
    dx : array or None
        Shape, dtype and memory order of x.
    dconv_weight : array or None
        Shape and dtype of conv_weight.
    dweight, dbias : array, shape (O,), or None
        In the dtype of weight and bias; in the accumulator type where there is none.

    Raises
    ------
    ValueError, TypeError
        As `conv_batch_norm_forward`, and if dy, x and saved do not belong together.
    """
    checks.saved_by("conv_batch_norm_forward", ConvBatchNormSaved, saved)
    (dy, x, conv_weight, weight, mean, inv_std, residual), place = arrays.adopt(
        ("dy", "x", "conv_weight", "weight", "saved.mean", "saved.inv_std", "saved.residual"),
        dy, x, conv_weight, weight, *saved[:3],
    )  # fmt: skip
    wanted = checks.mask(output_mask, "dx", "dconv_weight", "dweight", "dbias")
    checks.present("x", x)
    checks.present("conv_weight", conv_weight)
    checks.present("dy", dy)
    checks.floating("x", x.dtype)
    for name, array, shape in (
        ("x", x, saved.shape), ("conv_weight", conv_weight, saved.weight_shape)
    ):  # fmt: skip
        if array.shape != shape:
            raise ValueError(
                f"{name}: expected the shape of the forward call, {shape}, got {array.shape}"
            )
    options, convolution = _options_of(saved), saved.convolution
    shape = _result_shape(x, conv_weight, options)
    if dy.shape != shape:
        raise ValueError(f"dy: expected the shape of the forward call's y, {shape}, got {dy.shape}")
    if dy.dtype != x.dtype:
        raise TypeError(f"dy: expected the dtype of x, {x.dtype}, got {dy.dtype}")
    want_dx, want_dconv, want_dweight, want_dbias = wanted
    want_dz = want_dx or want_dconv
    keywords = options._asdict()
    with place:
        out = None
        if want_dweight or (want_dz and saved.training):
            z = convolution.forward(x, conv_weight, **keywords)
            _check("forward", z, x, shape, dy, x, conv_weight, weight, mean, inv_std, residual)
            out = z if want_dz else None
        else:  # dy alone makes the gradients
            order = arrays.memory_order(x) or arrays.axes(x.ndim)
            if not arrays.is_plain(dy.transpose(order)):  # as y lies, so that the bits are the same
                turned = empty_like(x, shape)
                place.xp.copyto(turned, dy)
                dy = turned
                del turned
            z = dy
        dz, dweight, dbias = batch_norm_backward(
            dy, z,
            BatchNormSaved(mean, inv_std, residual, saved.training, 1, shape, saved.bias_dtype),
            weight, output_mask=(want_dz, want_dweight, want_dbias), out=out,
        )  # fmt: skip
        del z, out
        dx = dconv_weight = None
        if want_dconv:
            dconv_weight = convolution.backward_weight(dz, x, conv_weight, **keywords)
            _check("backward_weight", dconv_weight, conv_weight, conv_weight.shape,
                   dy, dz, x, conv_weight)  # fmt: skip
        if want_dx:
            dx = convolution.backward_input(dz, conv_weight, x, **keywords)
            _check("backward_input", dx, x, x.shape, dy, dz, x, conv_weight, dconv_weight)
        dx, dconv_weight, dweight, dbias = place.export(dx, dconv_weight, dweight, dbias)
    return dx, dconv_weight, dweight, dbias


class ConvolutionOptions(NamedTuple):
    """Where a convolution's windows lie: its keyword arguments."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int


def _options_of(saved: ConvBatchNormSaved) -> ConvolutionOptions:
    return ConvolutionOptions(saved.stride, saved.padding, saved.dilation, saved.groups)


def checked_options(stride: Any, padding: Any, dilation: Any, groups: Any) -> ConvolutionOptions:
    """Keyword arguments of a convolution from what a caller gave."""
    return ConvolutionOptions(
        pair("stride", stride, 1),
        pair("padding", padding, 0),
        pair("dilation", dilation, 1),
        checks.number_of_values("groups", groups, 1),
    )


def checked_convolution(convolution: Any) -> None:
    """A convolution, or None for the usual one."""
    names = ("forward", "backward_input", "backward_weight")
    if convolution is not None and (
        isinstance(convolution, type)
        or not all(callable(getattr(convolution, name, None)) for name in names)
    ):
        raise TypeError(
            "convolution: expected None or an object (not a class) with forward, backward_input "
            f"and backward_weight, got {convolution!r}"
        )


def pair(name: str, value: Any, least: int) -> Pair:
    """An integer for both axes, or one for each."""
    values = value if isinstance(value, (tuple, list)) else (value, value)
    if len(values) != 2:
        raise ValueError(f"{name}: expected an integer or two of them, got {value!r}")
    if isinstance(value, str):
        raise TypeError(f"{name}: expected an integer or two of them, got {value!r}")
    rows, columns = (checks.number_of_values(name, each, least) for each in values)
    if max(rows, columns) >= 2**31:
        raise ValueError(f"{name}: expected less than 2^31, got {value!r}")
    return rows, columns


def _result_shape(x: Any, conv_weight: Any, options: ConvolutionOptions) -> tuple[int, ...]:
    """Shape of a convolution's result, of arguments that are checked for it."""
    if x.ndim != 4:
        raise ValueError(f"x: expected shape (N, C, H, W), got {x.shape}")
    groups, channels = options.groups, x.shape[1]
    if channels % groups:
        raise ValueError(
            f"groups: expected a divisor of the {channels} channels of x, got {groups}"
        )
    expected = channels // groups
    if conv_weight.ndim != 4 or conv_weight.shape[1] != expected or 0 in conv_weight.shape[2:]:
        raise ValueError(
            f"conv_weight: expected shape (O, {expected}, K, L) for x of shape {x.shape} and "
            f"{groups} group{'s' if groups > 1 else ''}, got {conv_weight.shape}"
        )
    checks.parameter("conv_weight", conv_weight, conv_weight.shape, "", x.dtype)
    if conv_weight.shape[0] % groups:
        raise ValueError(
            f"groups: expected a divisor of the {conv_weight.shape[0]} output channels of "
            f"conv_weight, got {groups}"
        )
    shape = output_shape(x.shape, conv_weight.shape, *options[:3])
    if min(shape[2:]) < 1:
        raise ValueError(
            f"x: expected an image that the window of conv_weight, {conv_weight.shape[2:]}, fits "
            f"in, got shape {x.shape} with padding {options.padding}, dilation {options.dilation}"
        )
    return shape


def _check(name: str, result: Any, like: Any, shape: tuple[int, ...], *others: Any) -> None:
    """What a convolution returned: of the kind and dtype of `like`, writable and apart."""
    name = f"convolution.{name}"
    if type(result) is not type(like) or result.shape != shape or result.dtype != like.dtype:
        raise TypeError(
            f"{name}: expected a {type(like).__name__} of shape {shape} and dtype {like.dtype}, "
            f"got {checks.shown(result)}"
        )
    checks.writable(name, result)
    if any(other is not None and arrays.may_overlap(result, other) for other in others):
        raise ValueError(f"{name}: expected memory of its own, got an argument's")
