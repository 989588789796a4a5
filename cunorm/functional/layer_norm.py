"""Layer normalization: over the last axes of every sample."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .. import checks
from ..arrays import Array
from ..geometry import row_norm_geometry
from .common import Layout, backward, double_backward, forward

__all__ = [
    "LayerNormSaved",
    "layer_norm_backward",
    "layer_norm_double_backward",
    "layer_norm_forward",
]


class LayerNormSaved(NamedTuple):
    """What `layer_norm_forward` keeps for `layer_norm_backward`.

    Attributes
    ----------
    mean : array, shape x.shape[:axis]
        Mean that was subtracted.
    inv_std : array, shape x.shape[:axis]
        ``1 / sqrt(var + eps)``.
    residual : array, shape x.shape[:axis], or None
        What rounding to the accumulator type took from the mean.
    axis : int
        First axis that was normalized over.
    shape : tuple of int
        Shape of x.
    bias_dtype : dtype or None
        Dtype that dbias will have, if a bias was given.
    """

    mean: Array
    inv_std: Array
    residual: Array | None
    axis: int
    shape: tuple[int, ...]
    bias_dtype: Any


def layer_norm_forward(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    out: Array | None = None,
) -> tuple[Array, LayerNormSaved]:
    """Normalize every row to zero mean and unit variance, then scale and shift its elements.

        y = (x - mean) * inv_std * weight + bias,    inv_std = 1 / sqrt(var + eps)

    A row is what `axis` and the axes after it hold; mean and var are its mean
    and its biased variance. (Ba, Kiros and Hinton, "Layer Normalization", 2016,
    section 3.)

    Parameters
    ----------
    x : array, at least 1-D
        float16, bfloat16, float32 or float64, any strides. A dense x is not
        copied, in whatever order of its axes, if the axes before `axis` are the
        slowest in memory.
    weight, bias : array, shape x.shape[axis:], optional
        Dtype of x, float32 or float64, any strides. Missing, they count as 1 and 0.
    axis : int
        First of the axes to normalize over.
    eps : float
        Added to the variance.
    out : array, optional
        Where y goes: shape and dtype of x. May be x itself, but then x is gone
        and `layer_norm_backward` cannot be called.

    Returns
    -------
    y : array
        Shape, dtype and memory order of x.
    saved : LayerNormSaved
        A named tuple that begins (mean, inv_std), both of shape x.shape[:axis]
        and in the accumulator type: float32, for float64 data float64. Keep it,
        and x, for `layer_norm_backward`.

    Raises
    ------
    ValueError
        For shapes and values, and for an `out` that overlaps an input in part.
    TypeError
        For types and dtypes.
        Nothing has been modified then.

    Notes
    -----
    A row has the same bits whatever rows are beside it. A constant row, and so a
    row of one value, gives exactly `bias` (if eps is not 0). An empty x gives an
    empty y.
    """
    y, (mean, inv_std, residual), layout, (shape, bias_dtype) = forward(
        x, weight, bias, out, lambda x: (row_layout(x, axis), checks.not_negative("eps", eps))
    )
    first = len(layout.statistics)
    return y, LayerNormSaved(mean, inv_std, residual, first, shape, bias_dtype)


def layer_norm_backward(
    dy: Array,
    x: Array,
    saved: LayerNormSaved,
    weight: Array | None = None,
    *,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    out: Array | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients of `layer_norm_forward` with respect to x, weight and bias.

        dbias   = sum(dy)
        dweight = sum(dy * xhat),    xhat = (x - mean) * inv_std

    over the rows, and with the mean taken over the elements of a row

        dx = inv_std * (g - mean(g) - xhat * mean(g * xhat)),    g = dy * weight

    (Ba, Kiros and Hinton, "Layer Normalization", 2016.)

    Parameters
    ----------
    dy : array
        Gradient with respect to y: shape and dtype of x.
    x : array
        What `layer_norm_forward` was given.
    saved : LayerNormSaved
        What it returned.
    weight : array, shape x.shape[axis:], optional
        What it was given.
    output_mask : three bools
        Which of dx, dweight and dbias to compute; the others are None.
    out : array, optional
        Where dx goes: shape and dtype of x. May be dy or x itself.

    Returns
    -------
    dx : array or None
        Shape, dtype and memory order of x.
    dweight, dbias : array, shape x.shape[axis:], or None
        In the dtype of weight and bias; in the accumulator type where there is none.

    Raises
    ------
    ValueError, TypeError
        As `layer_norm_forward`, and if dy, x and saved do not belong together.
    """
    checks.saved_by("layer_norm_forward", LayerNormSaved, saved)
    return backward(
        dy, x, saved, weight, output_mask, out, lambda x: row_layout(x, saved.axis),
        bias_dtype=saved.bias_dtype,
    )  # fmt: skip


def layer_norm_double_backward(
    gdx: Array | None,
    gdweight: Array | None,
    gdbias: Array | None,
    dy: Array,
    x: Array,
    saved: LayerNormSaved,
    weight: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of `layer_norm_backward` with respect to dy, x and weight.

    What second derivatives through a layer norm need. Given are the gradients of a loss with
    respect to what `layer_norm_backward` computed. With r = inv_std, v = (x - mean) * r,
    h = dy * weight, k = dy * gdweight and means <.> over the elements of a row,

        u   = r * (gdx - <gdx> - v * <gdx * v>)
        ddy = weight * u + gdweight * v + gdbias
        ddx = r^2 * (v * (3 * <gdx * v> * <h * v> - <gdx * h> + <gdx> * <h>)
                     - <h * v> * (gdx - <gdx>) - <gdx * v> * (h - <h>))
              + r * (k - <k> - v * <k * v>)
        ddweight = sum(dy * u)    over the rows

    (docs/numerics.md has the derivation.)

    Parameters
    ----------
    gdx : array or None
        Gradient with respect to dx: shape and dtype of x.
    gdweight, gdbias : array, shape x.shape[axis:], or None
        Gradients with respect to dweight and dbias, any floating dtype. What is None
        adds nothing.
    dy, x, saved, weight
        What `layer_norm_backward` was given.

    Returns
    -------
    ddy, ddx : array
        Shape, dtype and memory order of x.
    ddweight : array, shape x.shape[axis:]
        In the dtype of weight; in the accumulator type if there is none.

    Raises
    ------
    ValueError, TypeError
        As `layer_norm_backward`, and for gradients that do not go with x.

    Notes
    -----
    A large mean of x costs no digits; one of gdx or dy as many as in `layer_norm_backward`, those
    that its deviations have not: products of deviations are summed about means of chunks, which
    are merged in float64.
    """
    checks.saved_by("layer_norm_forward", LayerNormSaved, saved)
    return double_backward(
        gdx, gdweight, gdbias, dy, x, saved, weight, lambda x: row_layout(x, saved.axis)
    )


def row_layout(x: Any, axis: Any) -> Layout:
    """Layout of a norm over the axes of x from `axis` on."""
    checks.present("x", x)
    return _row_layout(x.shape, x.dtype, checks.integer("axis", axis))


@lru_cache(maxsize=1024)
def _row_layout(shape: tuple[int, ...], dtype: np.dtype, axis: int) -> Layout:
    first = checks.normalized_axes(shape, dtype, axis)
    return Layout(
        statistics=tuple(range(first)),
        parameters=tuple(range(first, len(shape))),
        statistics_shape=shape[:first],
        parameters_shape=shape[first:],
        meaning="that of the axes normalized over",
        leading=first,
        geometry=lambda shape, _: row_norm_geometry(shape, first),
    ).of(shape)
