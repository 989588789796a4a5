"""Batch normalization as a layer."""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np

from ..arrays import Array
from ..functional.batch_norm import batch_norm_backward, batch_norm_forward
from ..functional.fold_batch_norm import fold_batch_norm, output_channels
from .base import TrackingLayer

__all__ = ["BatchNorm"]


class BatchNorm(TrackingLayer):
    """Batch normalization with its parameters and running statistics.

    ``forward`` computes `cunorm.batch_norm_forward` and keeps what ``backward``
    needs: a reference to x (do not change x before ``backward``) and the saved
    mean and inverse standard deviation.

    Parameters
    ----------
    num_features : int
        Number of channels C.
    eps : float
        Added to the variance.
    momentum : float, optional
        Weight **kept on the old** running value (Keras, Chainer's decay).
    exponential_average_factor : float or "cumulative", optional
        Weight **given to the new** batch (cuDNN; PyTorch's momentum).
        "cumulative" averages all batches equally. Give one of the two or
        neither, which means a factor of 0.1.
    correction : float
        1: unbiased running variance (PyTorch); 0: biased (Keras, Flax).
    affine : bool
        Whether there are `weight` and `bias`.
    track_running_statistics : bool
        Without running statistics the batch's own are used in inference too.
    channel_axis : int
        -1 for channels last.
    dtype : dtype or "bfloat16"
        Of `weight` and `bias`; float32 by default, which goes with data of any
        dtype. For all digits of float64 data take float64. Running statistics
        are float32, for float64 float64.

    Attributes
    ----------
    weight, bias : array, shape (C,), or None
        Initially 1 and 0.
    running_mean, running_var : array, shape (C,), or None
        Initially 0 and 1.
    num_batches_tracked : array of int64, shape ()
        Batches taken into the running statistics.
    training, frozen : bool
        Set by `train`, `eval`, `freeze` and `unfreeze`.

    Raises
    ------
    ValueError, TypeError
        For arguments as in `cunorm.batch_norm_forward`.
    """

    _functions = batch_norm_forward, batch_norm_backward
    _own = "training"

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        momentum: float | None = None,
        exponential_average_factor: float | Literal["cumulative"] | None = None,
        correction: float = 1,
        affine: bool = True,
        track_running_statistics: bool = True,
        channel_axis: int = 1,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__(
            num_features,
            eps=eps,
            momentum=momentum,
            exponential_average_factor=exponential_average_factor,
            correction=correction,
            affine=affine,
            track_running_statistics=track_running_statistics,
            channel_axis=channel_axis,
            dtype=dtype,
        )

    def freeze(self) -> Self:
        """Make the layer a constant: running statistics, weight and bias stay as they are.

        It normalizes with the running statistics and has no `parameters` to
        train, whatever `train` says, until `unfreeze`.

        Raises
        ------
        ValueError
            Without running statistics.
        """
        if self.running_mean is None:
            raise ValueError("freeze: expected a layer with running statistics, got one without")
        return super().freeze()

    def fold_into(
        self,
        weight: Array,
        bias: Array | None = None,
        *,
        channel_axis: int = 0,
        groups: int = 1,
    ) -> tuple[Array, Array]:
        """Weight and bias of the convolution before the layer, with the layer in them.

        What `cunorm.fold_batch_norm` makes of them, `weight`, `bias` and the running
        statistics: in inference that convolution does both. The layer stays as it is.

        Parameters
        ----------
        weight : array
            The convolution's or dense layer's, with C output channels at `channel_axis`.
        bias : array, shape (C,), optional
        channel_axis, groups : int
            As in `cunorm.fold_batch_norm`.

        Returns
        -------
        weight : array
            Shape and dtype of the one given.
        bias : array, shape (C,)

        Raises
        ------
        ValueError, TypeError
            As `cunorm.fold_batch_norm`, and for a layer without running statistics.
        """
        if self.running_mean is None:
            raise ValueError("fold_into: expected a layer with running statistics, got one without")
        shape = tuple(getattr(weight, "shape", ()))
        axis, number = output_channels("weight", shape, channel_axis, groups)
        if number != self.num_features:
            raise ValueError(
                f"weight: expected {self.num_features} output channels, got {number}, those at "
                f"axis {axis} of shape {shape} in {groups} group{'s' if groups > 1 else ''}"
            )
        if bias is not None and tuple(getattr(bias, "shape", ())) != (number,):
            got = getattr(bias, "shape", type(bias).__name__)
            raise ValueError(f"bias: expected shape ({number},), one value a channel, got {got}")
        return fold_batch_norm(
            weight, bias, self.weight, self.bias, self.running_mean, self.running_var,
            eps=self.eps, channel_axis=channel_axis, groups=groups,
        )  # fmt: skip
