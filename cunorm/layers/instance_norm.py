"""Instance normalization as a layer."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ..functional.instance_norm import instance_norm_backward, instance_norm_forward
from .base import TrackingLayer, samples_first

__all__ = ["InstanceNorm"]


class InstanceNorm(TrackingLayer):
    """Instance normalization with its parameters and, if wanted, running statistics.

    ``forward`` computes `cunorm.instance_norm_forward` and keeps what ``backward``
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
        1: unbiased running variance (PyTorch); 0: biased.
    affine : bool
        Whether there are `weight` and `bias`; PyTorch's default is False.
    track_running_statistics : bool
        Whether to keep running statistics and, after `eval` or `freeze`, to
        normalize with them. Without, every sample has its own in inference too.
    channel_axis : int
        -1 for channels last; not 0, which is the samples' axis.
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
    num_batches_tracked : array of int64, shape (), or None
        Batches taken into the running statistics.
    training, frozen : bool
        Set by `train`, `eval`, `freeze` and `unfreeze`.

    Raises
    ------
    ValueError, TypeError
        For arguments as in `cunorm.instance_norm_forward`.
    """

    _functions = instance_norm_forward, instance_norm_backward
    _own = "use_input_stats"

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        momentum: float | None = None,
        exponential_average_factor: float | Literal["cumulative"] | None = None,
        correction: float = 1,
        affine: bool = True,
        track_running_statistics: bool = False,
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
        samples_first(self.channel_axis)
