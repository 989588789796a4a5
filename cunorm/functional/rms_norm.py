"""RMS normalization: over the last axes of every sample, without a mean."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import checks
from ..arrays import Array
from .common import Layout, backward, forward
from .layer_norm import row_layout

__all__ = ["RMSNormSaved", "rms_norm_backward", "rms_norm_forward"]

_EPSILONS = {np.dtype(dtype): float(np.finfo(dtype).eps) for dtype in (np.float32, np.float64)}


class RMSNormSaved(NamedTuple):
    """What `rms_norm_forward` keeps for `rms_norm_backward`.

    Attributes
    ----------
    mean : None
        Nothing was subtracted.
    inv_std : array, shape x.shape[:axis]
        ``1 / sqrt(mean(x^2) + eps)``.
    residual : None
    axis : int
        First axis that was normalized over.
    shape : tuple of int
        Shape of x.
    weight_offset : float
        What was added to the weight.
    """

    mean: None
    inv_std: Array
    residual: None
    axis: int
    shape: tuple[int, ...]
    weight_offset: float


def rms_norm_forward(
    x: Array,
    weight: Array | None = None,
    *,
    axis: int = -1,
    eps: float | None = None,
    weight_offset: float = 0.0,
    out: Array | None = None,
) -> tuple[Array, RMSNormSaved]:
    """Scale every row to unit root mean square, then scale its elements.

        y = x * inv_std * (weight + weight_offset),    inv_std = 1 / sqrt(mean(x^2) + eps)

    A row is what `axis` and the axes after it hold, the mean that of a row.
    (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.)

    Parameters
    ----------
    x : array, at least 1-D
        float16, bfloat16, float32 or float64, any strides. A dense x is not
        copied, in whatever order of its axes, if the axes before `axis` are the
        slowest in memory.
    weight : array, shape x.shape[axis:], optional
        Dtype of x, float32 or float64, any strides. Missing, it counts as 1.
    axis : int
        First of the axes to normalize over.
    eps : float, optional
        Added to the mean square. By default the machine epsilon of the
        accumulator type: 2^-23, for float64 data 2^-52.
    weight_offset : float
        Added to the weight, in the accumulator type: 1 for Gemma's weights,
        which are stored less 1. Needs a weight.
    out : array, optional
        Where y goes: shape and dtype of x. May be x itself, but then x is gone
        and `rms_norm_backward` cannot be called.

    Returns
    -------
    y : array
        Shape, dtype and memory order of x.
    saved : RMSNormSaved
        A named tuple that begins (mean, inv_std): None, and an array of shape
        x.shape[:axis] in the accumulator type: float32, for float64 data
        float64. Keep it, and x, for `rms_norm_backward`.

    Raises
    ------
    ValueError
        For shapes and values, among them a weight_offset without a weight, and
        for an `out` that overlaps an input in part.
    TypeError
        For types and dtypes.
        Nothing has been modified then.

    Notes
    -----
    A row has the same bits whatever rows are beside it. Squares of float16 data
    do not overflow. An empty x gives an empty y.
    """
    weight_offset = _offset(weight, weight_offset)

    def known_of(x: Any) -> tuple[Layout, float]:
        layout = row_layout(x, axis)
        if eps is None:
            return layout, _EPSILONS[checks.statistics_dtype(x.dtype)]
        return layout, checks.not_negative("eps", eps)

    y, (inv_std,), layout, (shape, _) = forward(
        x, weight, None, out, known_of, centered=False, weight_offset=weight_offset
    )
    return y, RMSNormSaved(None, inv_std, None, len(layout.statistics), shape, weight_offset)


def rms_norm_backward(
    dy: Array,
    x: Array,
    saved: RMSNormSaved,
    weight: Array | None = None,
    *,
    output_mask: tuple[bool, ...] = (True, True),
    out: Array | None = None,
) -> tuple[Array | None, Array | None]:
    """Gradients of `rms_norm_forward` with respect to x and weight.

        dweight = sum(dy * xhat),    xhat = x * inv_std

    over the rows, and with the mean taken over the elements of a row

        dx = inv_std * (g - xhat * mean(g * xhat)),    g = dy * (weight + weight_offset)

    (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, section 4.2.)

    Parameters
    ----------
    dy : array
        Gradient with respect to y: shape and dtype of x.
    x : array
        What `rms_norm_forward` was given.
    saved : RMSNormSaved
        What it returned.
    weight : array, shape x.shape[axis:], optional
        What it was given.
    output_mask : two bools
        Which of dx and dweight to compute; the others are None. A third, which
        is for the bias of the other norms, is ignored.
    out : array, optional
        Where dx goes: shape and dtype of x. May be dy or x itself.

    Returns
    -------
    dx : array or None
        Shape, dtype and memory order of x.
    dweight : array, shape x.shape[axis:], or None
        In the dtype of weight; in the accumulator type if there is none.

    Raises
    ------
    ValueError, TypeError
        As `rms_norm_forward`, and if dy, x and saved do not belong together.
    """
    checks.saved_by("rms_norm_forward", RMSNormSaved, saved)
    if isinstance(output_mask, (tuple, list)) and len(output_mask) == 3:
        output_mask = tuple(output_mask[:2])
    dx, dweight, _ = backward(
        dy, x, saved, weight, output_mask, out, lambda x: row_layout(x, saved.axis),
        centered=False, weight_offset=_offset(weight, saved.weight_offset),
    )  # fmt: skip
    return dx, dweight


def _offset(weight: Any, weight_offset: Any) -> float:
    offset = checks.finite("weight_offset", weight_offset)
    if weight is None and offset != 0.0:
        raise ValueError(f"weight: expected an array to add weight_offset={offset:g} to, got None")
    return offset
