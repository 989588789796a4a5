"""Convolution and batch normalization as one layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod, sqrt
from typing import Any, Literal

import numpy as np

from .. import arrays, checks
from ..arrays import Array
from ..convolution import Convolution, Pair
from ..functional.conv_batch_norm import (
    ConvBatchNormSaved,
    checked_convolution,
    checked_options,
    conv_batch_norm_backward,
    conv_batch_norm_forward,
    pair,
)
from .base import check_channels, number_of
from .batch_norm import BatchNorm

__all__ = ["ConvBatchNorm"]


class ConvBatchNorm(BatchNorm):
    """A two-dimensional convolution followed by batch normalization.

    ``forward`` computes `cunorm.conv_batch_norm_forward` and keeps references to x and
    `conv_weight` (do not change either before ``backward``) and the saved mean and inverse
    standard deviation, but not the convolution's result, which ``backward`` computes again.

    `parameters`, `gradients` and state dicts have the convolution's weight as ``conv_weight``
    and all else under `cunorm.BatchNorm`'s names. The state of a PyTorch Conv2d without bias and
    a BatchNorm2d is loaded as ``{"conv_weight": conv["weight"], **norm}``.

    Parameters
    ----------
    in_channels, out_channels : int
        Numbers of channels C and O.
    kernel_size : int or pair of int
        Extents K and L of the window.
    stride, padding, dilation : int or pair of int
    groups : int
    convolution : Convolution, optional
        As in `cunorm.conv_batch_norm_forward`.
    eps, momentum, exponential_average_factor, correction, affine, track_running_statistics
        As in `cunorm.BatchNorm`.
    dtype : dtype or "bfloat16"
        Of `conv_weight`, `weight` and `bias`, as in `cunorm.BatchNorm`.
    rng : numpy.random.Generator, int or None
        What draws `conv_weight`: a generator, or the seed of one.

    Attributes
    ----------
    conv_weight : array, shape (O, C / groups, K, L)
        Initially uniform between plus and minus sqrt(1 / fan_in), fan_in being the number of
        elements of a window: PyTorch's convolutions.
    weight, bias, running_mean, running_var, num_batches_tracked, training, frozen
        As in `cunorm.BatchNorm`; `freeze` makes a constant of `conv_weight` too.

    Raises
    ------
    ValueError, TypeError
        For arguments as in `cunorm.conv_batch_norm_forward`.
    """

    _trained = ("conv_weight", *BatchNorm._trained)
    _names = ("conv_weight", *BatchNorm._names)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        *,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        convolution: Convolution | None = None,
        eps: float = 1e-5,
        momentum: float | None = None,
        exponential_average_factor: float | Literal["cumulative"] | None = None,
        correction: float = 1,
        affine: bool = True,
        track_running_statistics: bool = True,
        dtype: Any = np.float32,
        rng: np.random.Generator | int | None = None,
    ) -> None:
        number_of("out_channels", out_channels)
        super().__init__(
            out_channels,
            eps=eps,
            momentum=momentum,
            exponential_average_factor=exponential_average_factor,
            correction=correction,
            affine=affine,
            track_running_statistics=track_running_statistics,
            dtype=dtype,
        )
        self.in_channels = number_of("in_channels", in_channels)
        self.out_channels = self.num_features
        self.kernel_size = pair("kernel_size", kernel_size, 1)
        checked_convolution(convolution)
        self.convolution = convolution
        self.stride, self.padding, self.dilation, self.groups = checked_options(
            stride, padding, dilation, groups
        )
        for name, number in (("in_channels", in_channels), ("out_channels", out_channels)):
            if number % groups:
                raise ValueError(f"groups: expected a divisor of {name}, {number}, got {groups}")
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        bound = 1.0 / sqrt(max(prod(shape[1:]), 1))
        drawn = _generator(rng).uniform(-bound, bound, shape)
        own = {"conv_weight": drawn.astype(checks.floating_dtype("dtype", dtype))}
        self._parameters = own | self._parameters

    def __repr__(self) -> str:
        own = (
            f"ConvBatchNorm({self.in_channels}, {self.out_channels}, {self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"groups={self.groups}, convolution={self.convolution}, "
        )
        _, _, norm = super().__repr__().partition(", ")
        return own + norm.replace(f"channel_axis={self.channel_axis}, ", "")

    def _dtype(self) -> Any:
        return self.conv_weight.dtype

    @property
    def conv_weight(self) -> Array:
        """The convolution's weight."""
        return self._parameters["conv_weight"]

    @conv_weight.setter
    def conv_weight(self, value: Array) -> None:
        self._parameters["conv_weight"] = arrays.own("conv_weight", value)

    def forward(self, x: Array, *, update_statistics: bool = True) -> Array:
        """Convolve and normalize x, and keep what ``backward`` needs.

        Parameters
        ----------
        x : array, shape (N, C, H, W)
        update_statistics : bool
            False when a checkpoint recomputes a batch that was seen already:
            the same output, the running statistics left alone.

        Returns
        -------
        y : array, shape (N, O, ...)
            Dtype and memory order of x.

        Raises
        ------
        ValueError, TypeError
            As `cunorm.conv_batch_norm_forward`; the layer is as it was then.
        """
        return super().forward(x, update_statistics=update_statistics)

    def _check_channels(self, x: Array) -> None:
        if len(getattr(x, "shape", ())) == 4:  # of others the shape is wrong
            check_channels(x, self.in_channels, self.channel_axis)

    def fold_into(  # type: ignore[override]
        self, weight: Array | None = None, bias: Array | None = None
    ) -> tuple[Array, Array]:
        """Weight and bias of a convolution that does what the layer does in inference.

        Parameters
        ----------
        weight : array, shape of `conv_weight`, optional
            Another weight than `conv_weight`.
        bias : array, shape (O,), optional
            Of the convolution; the layer's own has none.

        Returns
        -------
        weight : array, shape of `conv_weight`
        bias : array, shape (O,)

        Raises
        ------
        ValueError, TypeError
            As `cunorm.fold_batch_norm`, and for a layer without running statistics.
        """
        weight = self.conv_weight if weight is None else weight
        shape = tuple(getattr(weight, "shape", ()))
        if shape != self.conv_weight.shape:
            raise ValueError(f"weight: expected shape {self.conv_weight.shape}, got {shape}")
        return super().fold_into(weight, bias)

    def _has_values(self, saved: Any) -> bool:
        return 0 not in saved.output_shape

    @property
    def _functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:  # type: ignore[override]
        options = {
            name: getattr(self, name)
            for name in ("stride", "padding", "dilation", "groups", "convolution")
        }
        return partial(_forward, self.conv_weight, options), partial(_backward, self.conv_weight)


def _forward(
    conv_weight: Array,
    options: dict[str, Any],
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    *,
    channel_axis: int,  # noqa: ARG001  (1)
    **norm: Any,
) -> tuple[Array, ConvBatchNormSaved]:
    return conv_batch_norm_forward(
        x, conv_weight, weight, bias, running_mean, running_var, **options, **norm
    )


def _backward(
    conv_weight: Array,
    dy: Array,
    x: Array,
    saved: ConvBatchNormSaved,
    weight: Array | None,
    **options: Any,
) -> tuple[Array | None, ...]:
    return conv_batch_norm_backward(dy, x, conv_weight, saved, weight, **options)


def _generator(rng: Any) -> np.random.Generator:
    try:
        return np.random.default_rng(rng)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"rng: expected a numpy.random.Generator, a seed of at least 0 or None, got {rng!r}"
        ) from error
