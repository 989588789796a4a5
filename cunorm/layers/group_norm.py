"""Group normalization as a layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import checks
from ..arrays import Array
from ..functional.group_norm import group_norm_backward, group_norm_forward
from .base import Layer, check_channels, number_of, samples_first

__all__ = ["GroupNorm"]


class GroupNorm(Layer):
    """Group normalization with its parameters.

    ``forward`` computes `cunorm.group_norm_forward` and keeps what ``backward``
    needs: a reference to x (do not change x before ``backward``) and the saved
    mean and inverse standard deviation.

    Parameters
    ----------
    num_groups : int
        A divisor of num_channels.
    num_channels : int
        Number of channels C.
    eps : float
        Added to the variance.
    affine : bool
        Whether there are `weight` and `bias`.
    channel_axis : int
        -1 for channels last; not 0, which is the samples' axis.
    dtype : dtype or "bfloat16"
        Of `weight` and `bias`; float32 by default, which goes with data of any
        dtype. For all digits of float64 data take float64.

    Attributes
    ----------
    weight, bias : array, shape (C,), or None
        Initially 1 and 0.
    training, frozen : bool
        Set by `train`, `eval`, `freeze` and `unfreeze`; only `frozen` matters.

    Raises
    ------
    ValueError, TypeError
        For arguments as in `cunorm.group_norm_forward`.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        channel_axis: int = 1,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__()
        self.num_groups = checks.integer("num_groups", num_groups)
        self.num_channels = number_of("num_channels", num_channels)
        checks.groups(self.num_groups, self.num_channels)
        self.eps = checks.not_negative("eps", eps)
        self.channel_axis = checks.integer("channel_axis", channel_axis)
        samples_first(self.channel_axis)
        dtype = checks.floating_dtype("dtype", dtype)
        if checks.flag("affine", affine):
            self._parameters["weight"] = np.ones(num_channels, dtype)
            self._parameters["bias"] = np.zeros(num_channels, dtype)

    def __repr__(self) -> str:
        return (
            f"GroupNorm({self.num_groups}, {self.num_channels}, eps={self.eps:g}, "
            f"affine={self.weight is not None}, channel_axis={self.channel_axis}, "
            f"dtype={self._dtype()}, frozen={self.frozen})"
        )

    def forward(self, x: Array) -> Array:
        """Normalize x and keep what ``backward`` needs.

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
            As `cunorm.group_norm_forward`; the layer is as it was then.
        """
        check_channels(x, self.num_channels, self.channel_axis)
        y, saved = group_norm_forward(
            x,
            self.num_groups,
            self.weight,
            self.bias,
            channel_axis=self.channel_axis,
            eps=self.eps,
        )
        self._keep(group_norm_backward, x, saved)
        return y
