"""Scale-shift: the affine half of a norm, with parameters per channel or per sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import arrays, checks
from ..arrays import Array
from ..geometry import scale_shift_geometry
from .common import (
    Layout,
    empty_like_usual,
    flat,
    gradients_of,
    in_memory_order,
    lay,
    usual_gradients,
)

__all__ = ["scale_shift_backward", "scale_shift_forward"]


def scale_shift_forward(
    x: Array,
    scale: Array,
    shift: Array | None = None,
    *,
    channel_axis: int = 1,
    out: Array | None = None,
) -> Array:
    """Scale and shift every channel.

        y = x * scale + shift

    With parameters of shape (N, C) every sample has its own: the modulation of
    feature-wise linear modulation, adaptive instance norm and conditional batch
    norm. (Perez et al., "FiLM: Visual Reasoning with a General Conditioning
    Layer", 2018, equation 2.)

    Parameters
    ----------
    x : array, shape (N, C, ...) with C at `channel_axis`; at least 2-D
        float16, bfloat16, float32 or float64, any strides. A dense x is not
        copied, in whatever order of its axes; with parameters of shape (N, C),
        if the samples are the slowest in memory.
    scale : array, shape (C,) or (N, C)
        Dtype of x, float32 or float64, any strides.
    shift : array, shape of scale, optional
        Likewise. Missing, it counts as 0.
    channel_axis : int
        -1 for channels last; with parameters of shape (N, C) not 0, which is
        the samples' axis.
    out : array, optional
        Where y goes: shape and dtype of x. May be x itself.

    Returns
    -------
    y : array
        Shape, dtype and memory order of x.

    Raises
    ------
    ValueError
        For shapes and values, and for an `out` that overlaps an input in part.
    TypeError
        For types and dtypes.
        Nothing has been modified then.
    """
    backend = arrays.usual_backend(x)
    if backend is not None and type(scale) is type(x):
        layout = _layout_of(x.shape, x.dtype, channel_axis, scale.ndim == 2)
        shape = layout.parameters_shape
        if layout.plain is not None and checks.are_usual(
            x, shape, scale, shift, None, None, out, written=False
        ):
            y = empty_like_usual(x) if out is None else out
            if len(shape) != 1:
                scale, shift = flat(scale), flat(shift)
            backend.transform.transform(x, None, None, None, scale, shift, layout.plain, y)
            return y

    given = out
    (x, scale, shift, out), place = arrays.adopt(
        ("x", "scale", "shift", "out"), x, scale, shift, out
    )
    layout = _layout(x, scale, channel_axis)
    checks.parameter("shift", shift, layout.parameters_shape, "that of scale", x.dtype)
    if out is not None:
        checks.output(out, x, ("x",), x=x, scale=scale, shift=shift)

    with place:
        (source,), target, order, geometry, finish = lay(place, x, (x,), out, layout)
        if geometry is not None:
            place.backend.transform.transform(
                source, None, None, None, in_memory_order(scale, layout.parameters, order),
                in_memory_order(shift, layout.parameters, order),
                geometry, target,
            )  # fmt: skip
        (y,) = place.export(finish(), given=given)
        return y


def scale_shift_backward(
    dy: Array,
    x: Array,
    scale: Array,
    *,
    channel_axis: int = 1,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    out: Array | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients of `scale_shift_forward` with respect to x, scale and shift.

        dx = dy * scale,    dscale = sum(dy * x),    dshift = sum(dy)

    over all axes along which the parameters do not differ. (Perez et al.,
    "FiLM: Visual Reasoning with a General Conditioning Layer", 2018, equation 2.)

    Parameters
    ----------
    dy : array
        Gradient with respect to y: shape and dtype of x.
    x : array
        What `scale_shift_forward` was given.
    scale : array, shape (C,) or (N, C)
        What it was given.
    channel_axis : int
        What it was given.
    output_mask : three bools
        Which of dx, dscale and dshift to compute; the others are None.
    out : array, optional
        Where dx goes: shape and dtype of x. May be dy or x itself.

    Returns
    -------
    dx : array or None
        Shape, dtype and memory order of x.
    dscale, dshift : array, shape and dtype of scale, or None

    Raises
    ------
    ValueError, TypeError
        As `scale_shift_forward`, and if dy and x do not belong together.
    """
    backend = arrays.usual_backend(x)
    if backend is not None and type(scale) is type(x):
        layout, none = _layout_of(x.shape, x.dtype, channel_axis, scale.ndim == 2), (None,) * 3
        if layout.plain is not None and checks.are_usual_in_backward(
            dy, x, none, scale, None, out, layout
        ):
            wanted = checks.mask(output_mask, "dx", "dscale", "dshift")
            if wanted[0] and (wanted[1] or wanted[2]):
                return usual_gradients(
                    backend, dy, x, none, scale, False, layout, wanted,
                    (scale.dtype, scale.dtype), out, {},
                )  # fmt: skip

    given = out
    (dy, x, scale, out), place = arrays.adopt(("dy", "x", "scale", "out"), dy, x, scale, out)
    layout = _layout(x, scale, channel_axis)
    checks.same_as_input("dy", dy, x)
    wanted = checks.mask(output_mask, "dx", "dscale", "dshift")
    if out is not None:
        checks.gradient_output(out, wanted[0], dy, x, scale=scale)

    with place:
        dx, dscale, dshift = gradients_of(
            place, dy, x, None, None, None, scale, False, layout, wanted,
            (scale.dtype, scale.dtype), out,
        )  # fmt: skip
        dx, dscale, dshift = place.export(dx, dscale, dshift, given=given)
        return dx, dscale, dshift


def _layout(x: Any, scale: Any, channel_axis: Any) -> Layout:
    checks.present("x", x)
    checks.present("scale", scale)
    layout = _layout_of(x.shape, x.dtype, channel_axis, scale.ndim == 2)
    checks.parameter("scale", scale, layout.parameters_shape, layout.meaning, x.dtype)
    return layout


@checks.once
def _layout_of(
    shape: tuple[int, ...], dtype: np.dtype, channel_axis: Any, per_sample: bool
) -> Layout:
    axis, number, _ = checks.channels(shape, dtype, channel_axis)
    if per_sample:
        checks.samples_first(axis, channel_axis, shape)
    meaning = checks.ONE_A_CHANNEL
    return Layout(
        statistics=(),
        parameters=(0, axis) if per_sample else (axis,),
        statistics_shape=(),
        parameters_shape=(shape[0], number) if per_sample else (number,),
        meaning=f"{meaning} of every sample" if per_sample else meaning,
        leading=1 if per_sample else 0,
        geometry=lambda shape, order: scale_shift_geometry(shape, order.index(axis), per_sample),
    ).of(shape)
