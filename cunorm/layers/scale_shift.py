"""Scale-shift as a layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import checks
from ..arrays import Array
from ..functional.scale_shift import scale_shift_backward, scale_shift_forward
from .base import Layer, check_channels, number_of

__all__ = ["ScaleShift"]


class ScaleShift(Layer):
    """A scale and a shift of every channel, as parameters.

    ``forward`` computes `cunorm.scale_shift_forward` and keeps a reference to x
    for ``backward``; do not change x before that. The scale is called `weight`
    and the shift `bias`, here and in state dicts, like those of the norms.

    Parameters
    ----------
    num_features : int
        Number of channels C.
    channel_axis : int
        -1 for channels last.
    dtype : dtype or "bfloat16"
        Of `weight` and `bias`; float32 by default, which goes with data of any
        dtype. For all digits of float64 data take float64.

    Attributes
    ----------
    weight, bias : array, shape (C,)
        Scale and shift, initially 1 and 0.
    training, frozen : bool
        Set by `train`, `eval`, `freeze` and `unfreeze`; only `frozen` matters.

    Raises
    ------
    ValueError, TypeError
        For arguments as in `cunorm.scale_shift_forward`.
    """

    def __init__(
        self, num_features: int, *, channel_axis: int = 1, dtype: Any = np.float32
    ) -> None:
        super().__init__()
        self.num_features = number_of("num_features", num_features)
        self.channel_axis = checks.integer("channel_axis", channel_axis)
        dtype = checks.floating_dtype("dtype", dtype)
        self._parameters["weight"] = np.ones(num_features, dtype)
        self._parameters["bias"] = np.zeros(num_features, dtype)

    def __repr__(self) -> str:
        return (
            f"ScaleShift({self.num_features}, channel_axis={self.channel_axis}, "
            f"dtype={self._dtype()}, frozen={self.frozen})"
        )

    def forward(self, x: Array) -> Array:
        """Scale and shift x and keep what ``backward`` needs.

        Parameters
        ----------
        x : array, shape (N, C, ...) with C at `channel_axis`

        Returns
        -------
        y : array
            Shape, dtype and memory order of x.

        Raises
        ------
        ValueError, TypeError
            As `cunorm.scale_shift_forward`; the layer is as it was then.
        """
        check_channels(x, self.num_features, self.channel_axis)
        y = scale_shift_forward(x, self.weight, self.bias, channel_axis=self.channel_axis)
        self._keep(scale_shift_backward, x, channel_axis=self.channel_axis)
        return y
