"""Batch normalization with the statistics of all ranks' samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np

from .. import arrays, checks
from ..arrays import Array
from ..distributed import Communicator, Moments, as_communicator, merge_moments
from ..functional.batch_norm import (
    batch_norm_backward_reduce,
    batch_norm_backward_transform,
    batch_norm_statistics,
    batch_norm_transform,
    update_running_statistics,
)
from ..functional.common import channels_of
from .batch_norm import BatchNorm

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(BatchNorm):
    """Batch normalization over the samples of all ranks.

    On every rank, in training, the same output as `BatchNorm` on all ranks' samples put
    together, and the same running statistics, in the same bits. In inference ranks do not
    communicate.

    ``forward`` gathers (count, mean, m2) of every rank, in float64 and one message, and merges
    them by counts in the order of ranks. ``backward`` adds up sum(dy) and sum(dy * (x - mean))
    over ranks, in one message, for dx. Gradients of weight and bias are those of this rank's
    samples, because training loops add up gradients over ranks anyway.

    Batches may be uneven, or empty on some ranks. All ranks have to call ``forward`` in training
    and its ``backward`` equally often and in the same order. What is wrong on one rank raises the
    same error on all of them, before anything has changed.

    Parameters
    ----------
    num_features : int
        Number of channels C; the same on all ranks.
    communicator
        Of mpi4py, `cupyx.distributed` or `cupy.cuda.nccl`, or a `cunorm.Communicator`.
    device_pointers : bool
        With mpi4py, whether its MPI is CUDA-aware: see `cunorm.as_communicator`.
    eps, momentum, exponential_average_factor, correction, affine,
    track_running_statistics, channel_axis, dtype
        As `BatchNorm`'s. The variance's divisor counts the values of all ranks.

    Attributes
    ----------
    communicator : Communicator

    Raises
    ------
    ValueError, TypeError
        For arguments as in `BatchNorm`, and for a communicator that is none.
    """

    def __init__(
        self,
        num_features: int,
        *,
        communicator: Any,
        device_pointers: bool = False,
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
        self.communicator = as_communicator(communicator, device_pointers=device_pointers)
        self._ranks = _Ranks(self.communicator, self.num_features)

    def forward(self, x: Array, *, update_statistics: bool = True) -> Array:
        """Normalize x and keep what ``backward`` needs.

        Parameters
        ----------
        x : array, shape (N, C, ...) with C at `channel_axis`
            N may differ from rank to rank, and be 0.
        update_statistics : bool
            False when a checkpoint recomputes a batch that was seen already: the same
            communication and output, the running statistics left alone.

        Returns
        -------
        y : array
            Shape, dtype and memory order of x.

        Raises
        ------
        ValueError, TypeError
            As `cunorm.batch_norm_forward`, if all ranks together have one value a channel, and
            if ranks disagree about the number of channels or the dtype; on all ranks alike.
        """
        if not self.training or self.frozen:
            return super().forward(x, update_statistics=update_statistics)
        with self._ranks.in_step(self._ranks.tell_of_failed_forward):
            return super().forward(x, update_statistics=update_statistics)

    def backward(self, dy: Array) -> Array:
        """Gradient with respect to x of the last ``forward``; sets `gradients`.

        The gradients of weight and bias are sums over this rank's samples.

        Parameters
        ----------
        dy : array
            Gradient with respect to y: shape and dtype of x.

        Returns
        -------
        dx : array
            Shape, dtype and memory order of x.

        Raises
        ------
        RuntimeError
            Without a ``forward`` before, or for the second time after one.
        ValueError, TypeError
            As `cunorm.batch_norm_backward`, on all ranks alike.
        """
        if self._cache is None or self._cache[0] != self._backward_together:
            return super().backward(dy)
        with self._ranks.in_step(self._ranks.tell_of_failed_backward):
            return super().backward(dy)

    @property
    def _functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:  # type: ignore[override]
        if self.training and not self.frozen:
            return self._forward_together, self._backward_together
        return BatchNorm._functions

    def _forward_together(
        self,
        x: Array,
        weight: Array | None,
        bias: Array | None,
        running_mean: Array | None,
        running_var: Array | None,
        *,
        exponential_average_factor: float,
        eps: float,
        correction: float,
        channel_axis: int,
        training: bool,  # noqa: ARG002  (it is: that is what this is for)
    ) -> tuple[Array, _Saved]:
        """Like `batch_norm_forward` in training; everything that can fail here comes first."""
        names = ("x", "weight", "bias", "running_mean", "running_var")
        (x, *vectors), place = arrays.adopt(names, x, weight, bias, running_mean, running_var)
        weight, bias, running_mean, running_var = vectors
        axis, number, _ = channels_of(x, channel_axis)
        for name, vector in zip(names[1:], vectors, strict=True):
            checks.per_channel(name, vector, number, x.dtype)
        checks.running_statistics(running_mean, running_var, x=x, weight=weight, bias=bias)
        local = batch_norm_statistics(x, channel_axis=axis, dtype=np.float64)

        count, mean, m2 = self._ranks.merge(local, x.dtype)
        checks.several_values_of_all_ranks(count)
        if running_var is not None and count > 0:
            checks.correctable(count, correction)
        with np.errstate(all="ignore"):
            var = m2 / max(count, 1)
            inv_std = (1.0 / np.sqrt(var + eps)).astype(checks.statistics_dtype(x.dtype))
        with place:
            mean, var, inv_std = (place.xp.asarray(array) for array in (mean, var, inv_std))
            y = batch_norm_transform(x, mean, inv_std, weight, bias, channel_axis=axis)
            update_running_statistics(
                running_mean, running_var, mean, var, count,
                exponential_average_factor=exponential_average_factor, correction=correction,
            )  # fmt: skip
            (y,) = place.export(y)
        dtypes = [inv_std.dtype if vector is None else vector.dtype for vector in (weight, bias)]
        return y, _Saved(mean, inv_std, count, axis, *dtypes)

    def _backward_together(
        self,
        dy: Array,
        x: Array,
        saved: _Saved,
        weight: Array | None,
        *,
        output_mask: tuple[bool, bool, bool],
    ) -> tuple[Array, Array | None, Array | None]:
        """Like `batch_norm_backward` after it."""
        (dy, x, weight), place = arrays.adopt(("dy", "x", "weight"), dy, x, weight)
        mean, inv_std, count, axis, *dtypes = saved
        checks.same_as_input("dy", dy, x)
        checks.per_channel("weight", weight, len(mean), x.dtype)
        sums = batch_norm_backward_reduce(dy, x, mean, channel_axis=axis)
        if count > 0:
            together = self._ranks.add_up(*sums)
            dx = batch_norm_backward_transform(
                dy, x, mean, inv_std, weight, *together, count, channel_axis=axis
            )
        else:
            dx = dy.copy()  # of nothing
        with place, np.errstate(all="ignore"):
            gradients = [
                values.astype(dtype) if wanted else None
                for values, dtype, wanted in zip(
                    (sums[1] * inv_std, sums[0]), dtypes, output_mask[1:], strict=True
                )
            ]
            dx, dweight, dbias = place.export(dx, *gradients)
        return dx, dweight, dbias

    def _has_values(self, saved: Any) -> bool:
        return saved.count > 0 if isinstance(saved, _Saved) else super()._has_values(saved)


# What messages between ranks hold besides numbers.
_GOOD, _FAILED = 0, 1
_DTYPES = ["float16", "bfloat16", "float32", "float64"]
_ERRORS = (TypeError, ValueError, MemoryError, RuntimeError)
_TEXT_BYTES = 512


class _Saved(NamedTuple):
    """What a synchronized forward pass keeps: statistics of all ranks' samples."""

    mean: Array  # float64
    inv_std: Array
    count: int  # type: ignore[assignment]
    channel_axis: int
    weight_dtype: Any  # those of the gradients
    bias_dtype: Any


class _Ranks:
    """What the ranks of a layer tell each other, one message a pass.

    Forward: (status, count, dtype) as integers of 64 bits, mean, m2. Backward: the number of
    ranks that failed, sum_dy, sum_dy_xmu. The length of both depends on the number of channels,
    about which the ranks agree once, in a message of their own. Only where a rank has failed
    do they exchange what to raise.
    """

    def __init__(self, communicator: Communicator, channels: int) -> None:
        self._communicator = communicator
        self._channels = channels
        self._agreed = False
        self._spoken = False  # whether this pass' message has been sent

    @contextmanager
    def in_step(self, tell: Callable[[Exception], NoReturn]) -> Iterator[None]:
        """A pass: if it fails before its message, the others, who wait for that, are told."""
        self._spoken = False
        try:
            yield
        except Exception as error:
            if self._spoken:
                raise
            tell(error)

    def merge(self, local: Moments, dtype: np.dtype) -> Moments:
        """Moments of all ranks together, on the CPU, in the same bits on every rank."""
        rows = self._gather(_GOOD, local.count, _DTYPES.index(dtype.name), local.mean, local.m2)
        header = np.ascontiguousarray(rows[:, :3]).view(np.int64)
        if (header[:, 0] == _FAILED).any():
            self._raise_together(None)
        names = [_DTYPES[i] for i in header[:, 2]]
        for rank, name in enumerate(names):
            if name != names[0]:
                raise TypeError(
                    f"x: expected one dtype on all ranks, got {names[0]} on rank 0, "
                    f"{name} on rank {rank}"
                )
        means, squares = np.split(rows[:, 3:], 2, axis=1)
        parts = zip(header[:, 1], means, squares, strict=True)
        return merge_moments([Moments(int(count), mean, m2) for count, mean, m2 in parts])

    def tell_of_failed_forward(self, error: Exception) -> NoReturn:
        """Raise on every rank what has failed on this one."""
        nothing = np.zeros(self._channels)
        self._gather(_FAILED, 0, 0, nothing, nothing)
        self._raise_together(error)

    def add_up(self, sum_dy: Array, sum_dy_xmu: Array) -> tuple[Array, Array]:
        """Sums over all ranks, in float64."""
        joined = self._reduce(_GOOD, sum_dy, sum_dy_xmu)
        if joined[0] != _GOOD:
            self._raise_together(None)
        return joined[1 : 1 + self._channels], joined[1 + self._channels :]

    def tell_of_failed_backward(self, error: Exception) -> NoReturn:
        """Raise on every rank what has failed on this one."""
        nothing = np.zeros(self._channels)
        self._reduce(_FAILED, nothing, nothing)
        self._raise_together(error)

    def _gather(self, status: int, count: int, dtype: int, mean: Array, m2: Array) -> np.ndarray:
        self._agree()
        header = np.array([status, count, dtype], np.int64).view(np.float64)
        message = _joined(header, mean, m2)
        self._spoken = True
        return arrays.move(self._communicator.all_gather(message), "cpu")  # type: ignore[no-any-return]

    def _reduce(self, status: int, sum_dy: Array, sum_dy_xmu: Array) -> Array:
        message = _joined(np.array([status], np.float64), sum_dy, sum_dy_xmu)
        self._spoken = True
        return self._communicator.all_reduce(message)

    def _agree(self) -> None:
        """Make sure, once, that messages have the same length on all ranks."""
        if self._agreed:
            return
        self._spoken = True
        own = np.array([self._channels], np.int64).view(np.float64)
        found = self._communicator.all_gather(own).view(np.int64)[:, 0].tolist()
        for rank, channels in enumerate(found):
            if channels != found[0]:
                raise ValueError(
                    f"num_features: expected the same on all ranks, got {found[0]} on rank 0, "
                    f"{channels} on rank {rank}"
                )
        self._agreed, self._spoken = True, False

    def _raise_together(self, error: Exception | None) -> NoReturn:
        """Raise the error of the first rank that has one; all ranks call this."""
        text = b""
        if error is not None:
            kinds = (i for i, kind in enumerate(_ERRORS) if isinstance(error, kind))
            kind = next(kinds, len(_ERRORS) - 1)
            text = f"{kind}{error or type(error).__name__}".encode()[:_TEXT_BYTES]
        message = np.zeros(_TEXT_BYTES, np.uint8)
        message[: len(text)] = np.frombuffer(text, np.uint8)
        found = self._communicator.all_gather(message.view(np.float64)).view(np.uint8)
        for rank, row in enumerate(found):
            text = bytes(row).rstrip(b"\0")
            if text:
                kind, said = int(text[:1]), text[1:].decode(errors="ignore")
                raise _ERRORS[kind](f"{said} (on rank {rank})") from error
        raise RuntimeError("a rank has failed")


def _joined(header: np.ndarray, *vectors: Array) -> Array:
    """A header and vectors in one array of float64, NumPy's or CuPy's as the vectors are."""
    if isinstance(vectors[0], np.ndarray):
        return np.concatenate([header, *vectors], dtype=np.float64)
    import cupy

    return cupy.concatenate([cupy.asarray(header), *vectors], dtype=np.float64)
