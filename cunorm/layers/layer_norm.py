"""Layer normalization as a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import checks
from ..arrays import Array
from ..functional.layer_norm import layer_norm_backward, layer_norm_forward
from .base import Layer, check_trailing_axes, normalized

__all__ = ["LayerNorm"]


class LayerNorm(Layer):
    """Layer normalization over the last axes of x, with its parameters.

    ``forward`` computes `cunorm.layer_norm_forward` and keeps what ``backward``
    needs: a reference to x (do not change x before ``backward``) and the saved
    mean and inverse standard deviation.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        Lengths of the last axes of x, which are normalized over.
    eps : float
        Added to the variance.
    affine : bool
        Whether there are `weight` and `bias`.
    dtype : dtype or "bfloat16"
        Of `weight` and `bias`; float32 by default, which goes with data of any
        dtype. For all digits of float64 data take float64.

    Attributes
    ----------
    weight, bias : array, shape normalized_shape, or None
        Initially 1 and 0.
    training, frozen : bool
        Set by `train`, `eval`, `freeze` and `unfreeze`; only `frozen` matters.

    Raises
    ------
    ValueError, TypeError
        For arguments as in `cunorm.layer_norm_forward`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        affine: bool = True,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__()
        self.normalized_shape = normalized(normalized_shape)
        self.eps = checks.not_negative("eps", eps)
        dtype = checks.floating_dtype("dtype", dtype)
        if checks.flag("affine", affine):
            self._parameters["weight"] = np.ones(self.normalized_shape, dtype)
            self._parameters["bias"] = np.zeros(self.normalized_shape, dtype)

    def __repr__(self) -> str:
        return (
            f"LayerNorm({self.normalized_shape}, eps={self.eps:g}, "
            f"affine={self.weight is not None}, dtype={self._dtype()}, frozen={self.frozen})"
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
            As `cunorm.layer_norm_forward`; the layer is as it was then.
        """
        check_trailing_axes(x, self.normalized_shape)
        y, saved = layer_norm_forward(
            x, self.weight, self.bias, axis=-len(self.normalized_shape), eps=self.eps
        )
        self._keep(layer_norm_backward, x, saved)
        return y
