"""RMS normalization as a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import checks
from ..arrays import Array
from ..functional.rms_norm import rms_norm_backward, rms_norm_forward
from .base import Layer, check_trailing_axes, normalized

__all__ = ["RMSNorm"]


class RMSNorm(Layer):
    """RMS normalization over the last axes of x, with its weight.

    ``forward`` computes `cunorm.rms_norm_forward` and keeps what ``backward``
    needs: a reference to x (do not change x before ``backward``) and the saved
    inverse root mean square.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        Lengths of the last axes of x, which are normalized over.
    eps : float, optional
        Added to the mean square. By default the machine epsilon of the
        accumulator type: 2^-23, for float64 data 2^-52.
    affine : bool
        Whether there is a `weight`.
    weight_offset : float
        Added to the weight: 1 for Gemma's weights, which are stored less 1.
        Needs `affine`.
    dtype : dtype or "bfloat16"
        Of `weight`; float32 by default, which goes with data of any dtype. For
        all digits of float64 data take float64.

    Attributes
    ----------
    weight : array, shape normalized_shape, or None
        Initially 1 - weight_offset, which together with the offset scales by 1.
    training, frozen : bool
        Set by `train`, `eval`, `freeze` and `unfreeze`; only `frozen` matters.

    Raises
    ------
    ValueError, TypeError
        For arguments as in `cunorm.rms_norm_forward`.
    """

    _names = ("weight",)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float | None = None,
        affine: bool = True,
        weight_offset: float = 0.0,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__()
        self.normalized_shape = normalized(normalized_shape)
        self.eps = None if eps is None else checks.not_negative("eps", eps)
        self.weight_offset = checks.finite("weight_offset", weight_offset)
        dtype = checks.floating_dtype("dtype", dtype)
        if checks.flag("affine", affine):
            self._parameters["weight"] = np.full(
                self.normalized_shape, 1.0 - self.weight_offset, dtype
            )
        elif self.weight_offset != 0.0:
            raise ValueError(
                f"weight_offset: expected 0 when affine is False, got {weight_offset!r}"
            )

    def __repr__(self) -> str:
        eps = self.eps if self.eps is None else f"{self.eps:g}"
        return (
            f"RMSNorm({self.normalized_shape}, eps={eps}, affine={self.weight is not None}, "
            f"weight_offset={self.weight_offset:g}, dtype={self._dtype()}, frozen={self.frozen})"
        )

    def forward(self, x: Array) -> Array:
        """Normalize x and keep what ``backward`` needs.

        Parameters
        ----------
        x : array, shape (...) + normalized_shape

        Returns
        -------
        y : array
            Shape, dtype and memory order of x.

        Raises
        ------
        ValueError, TypeError
            As `cunorm.rms_norm_forward`; the layer is as it was then.
        """
        check_trailing_axes(x, self.normalized_shape)
        y, saved = rms_norm_forward(
            x,
            self.weight,
            axis=-len(self.normalized_shape),
            eps=self.eps,
            weight_offset=self.weight_offset,
        )
        self._keep(rms_norm_backward, x, saved)
        return y
