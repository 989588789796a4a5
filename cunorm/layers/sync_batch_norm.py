"""Batch normalization with the statistics of all ranks' samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from .base import check_channels
from .batch_norm import BatchNorm

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(BatchNorm):
    """Batch normalization over the samples of all ranks.

    In training the output on every rank is that of `BatchNorm` on all ranks' samples put
    together, but for rounding. The running statistics have the same bits on all ranks. In
    inference ranks do not communicate.

    ``forward`` gathers (count, mean, m2) of every rank, in float64 and one message, and merges
    them by counts in the order of ranks. ``backward`` adds up sum(dy) and sum(dy * (x - mean))
    over ranks, in one message, for dx. Gradients of weight and bias are those of this rank's
    samples: the training loop has to add up all gradients over ranks.

    Batches may be uneven, or empty on some ranks. All ranks have to call ``forward`` in training
    and its ``backward`` equally often and in the same order. What is wrong with x, dy or the
    layer's settings and arrays on one rank, or differs between ranks, raises the same error on
    all of them, before anything has changed.

    A deep copy of the layer shares its communicator. To keep or send a layer take its
    `state_dict`: of communicators, most cannot be pickled.

    Parameters
    ----------
    num_features : int
        Number of channels C; the same on all ranks.
    communicator
        Of mpi4py, `cupyx.distributed` or `cupy.cuda.nccl`, or a `cunorm.Communicator`.
    device_pointers : bool
        With mpi4py, whether its MPI is CUDA-aware: see `cunorm.as_communicator`.
    eps, correction : float
        As `BatchNorm`'s; the variance's divisor counts the values of all ranks.
    momentum, exponential_average_factor, affine, track_running_statistics, channel_axis, dtype
        As `BatchNorm`'s.

    Attributes
    ----------
    communicator : Communicator
        What `cunorm.as_communicator` made of the one given.

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
        self._ranks = _Ranks(as_communicator(communicator, device_pointers=device_pointers))

    def __repr__(self) -> str:
        size = self.communicator.size
        return f"{super().__repr__()[:-1]}, {size} rank{'s' if size > 1 else ''})"

    @property
    def communicator(self) -> Communicator:
        """What the ranks communicate by."""
        return self._ranks.communicator

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
            if ranks disagree about the number of channels, the dtype, eps, correction,
            exponential_average_factor or update_statistics; on all ranks alike.
        """
        if not self.training or self.frozen:
            return super().forward(x, update_statistics=update_statistics)
        self._ranks.spoken = False
        try:
            return super().forward(x, update_statistics=update_statistics)
        except Exception as error:
            if self._ranks.spoken:
                raise
            self._ranks.tell_of_failed_forward(error, self._zeros(self.num_features))

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
            Without a ``forward`` before, or for the second time after one; on this rank alone.
        ValueError, TypeError
            As `cunorm.batch_norm_backward`, on all ranks alike.
        """
        saved = None if self._cache is None else self._cache[1][1]
        if not isinstance(saved, _Saved):
            return super().backward(dy)
        self._ranks.spoken = False
        try:
            return super().backward(dy)
        except Exception as error:
            if self._ranks.spoken:
                raise
            self._ranks.tell_of_failed_backward(error, self._zeros(len(saved.mean)))

    def _zeros(self, number: Any) -> Array:
        """So many, of the library that this layer's arrays are of, whatever state it is in."""
        if type(number) is not int or not 0 <= number < 2**31:
            number = self._ranks.agreed or 0
        for array in (self.running_mean, self.weight):
            if type(array).__module__.partition(".")[0] == "cupy":
                return arrays.move(np.zeros(number), "cuda")
        return np.zeros(number)

    @property
    def _functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:  # type: ignore[override]
        if self.training and not self.frozen:
            forward = partial(_forward, self._ranks, self.num_features)
            return forward, partial(_backward, self._ranks)
        return BatchNorm._functions

    def _has_values(self, saved: Any) -> bool:
        if isinstance(saved, _Saved):
            return saved.count > 0 and saved.mean.size > 0
        return super()._has_values(saved)


class _Saved(NamedTuple):
    """What a synchronized forward pass keeps: statistics of all ranks' samples."""

    mean: Array  # float64
    inv_std: Array
    count: int  # type: ignore[assignment]
    channel_axis: int
    weight_dtype: Any  # those of the gradients
    bias_dtype: Any


def _forward(
    ranks: _Ranks,
    num_features: int,
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
    training: bool,  # noqa: ARG001  (it is: that is what this is for)
) -> tuple[Array, _Saved]:
    """Like `batch_norm_forward` in training.

    What can fail on one rank alone comes before the message, the memory for y too.
    """
    names = ("x", "weight", "bias", "running_mean", "running_var")
    (x, weight, bias, running_mean, running_var), place = arrays.adopt(
        names, x, weight, bias, running_mean, running_var
    )
    axis, number, _ = channels_of(x, channel_axis)
    check_channels(x, num_features, channel_axis)
    checks.per_channel(
        number, x.dtype,
        weight=weight, bias=bias, running_mean=running_mean, running_var=running_var,
    )  # fmt: skip
    checks.running_statistics(place, running_mean, running_var, x=x, weight=weight, bias=bias)
    eps = checks.not_negative("eps", eps)
    correction = checks.not_negative("correction", correction)
    updated = [running_mean is not None, running_var is not None]
    settings = {
        "eps": eps,
        "correction": correction,
        "update_statistics": float(2 * updated[0] + updated[1]),
        "exponential_average_factor": exponential_average_factor if any(updated) else 0.0,
    }
    with place:
        place.export(place.xp.empty(0, x.dtype))  # it can be done
        operands = arrays.Operands(place, x, (x,), None)
        (source,) = operands.inputs
        along = operands.order.index(axis)
        local = batch_norm_statistics(source, channel_axis=along, dtype=np.float64)

        count, mean, m2 = ranks.merge(local, x.dtype, settings)
        checks.several_values_of_all_ranks(count)
        if count > 0 and running_var is not None:
            checks.correctable(count, correction)
        with np.errstate(all="ignore"):
            var = m2 / max(count, 1)
            inv_std = (1.0 / np.sqrt(var + eps)).astype(checks.statistics_dtype(x.dtype))
        mean, var, inv_std = (place.xp.asarray(array) for array in (mean, var, inv_std))
        batch_norm_transform(
            source, mean, inv_std, weight, bias, channel_axis=along, out=operands.out
        )
        update_running_statistics(
            running_mean, running_var, mean, var, count,
            exponential_average_factor=exponential_average_factor, correction=correction,
        )  # fmt: skip
        (y,) = place.export(operands.finish())
    dtypes = [inv_std.dtype if vector is None else vector.dtype for vector in (weight, bias)]
    return y, _Saved(mean, inv_std, count, axis, *dtypes)


def _backward(
    ranks: _Ranks,
    dy: Array,
    x: Array,
    saved: _Saved,
    weight: Array | None,
    *,
    output_mask: tuple[bool, bool, bool],
) -> tuple[Array, Array | None, Array | None]:
    """Like `batch_norm_backward` after it; what can fail comes before the message here too."""
    (dy, x, weight), place = arrays.adopt(("dy", "x", "weight"), dy, x, weight)
    mean, inv_std, count, axis, *dtypes = saved
    checks.same_as_input("dy", dy, x)
    checks.per_channel(len(mean), x.dtype, weight=weight)
    with place, np.errstate(all="ignore"):
        place.export(place.xp.empty(0, x.dtype))  # it can be done
        operands = arrays.Operands(place, x, (x, dy), None)
        source, gradient = operands.inputs
        along = operands.order.index(axis)
        sums = batch_norm_backward_reduce(gradient, source, mean, channel_axis=along)
        r = inv_std if x.size > 0 else 0.0 * sums[0]  # sums of nothing, times infinity perhaps
        dweight, dbias = (
            values.astype(dtype) if wanted else None
            for values, dtype, wanted in zip(
                (sums[1] * r, sums[0]), dtypes, output_mask[1:], strict=True
            )
        )
        together = ranks.add_up(*sums)
        if count > 0:
            batch_norm_backward_transform(
                gradient, source, mean, inv_std, weight, *together, count, channel_axis=along,
                out=operands.out,
            )  # fmt: skip
        dx, dweight, dbias = place.export(operands.finish(), dweight, dbias)
    return dx, dweight, dbias


# What messages between ranks hold besides numbers. The first two are unlikely in any other.
_GOOD, _FAILED = 0x5EED0001, 0x5EED0002
_DTYPES = ["float16", "bfloat16", "float32", "float64"]
_ERRORS = (TypeError, ValueError, MemoryError, RuntimeError)
_TEXT_BYTES = 512

# What of the running statistics a rank updates, by the setting that says so.
_UPDATED = ["nothing", "running_var alone", "running_mean alone", "both running statistics"]


class _Ranks:
    """What the ranks of a layer tell each other, one message a pass.

    Forward: (status, count, dtype) as integers of 64 bits, four settings, mean, m2. Backward: the
    numbers of ranks and of those that failed, sum_dy, sum_dy_xmu. The length of both depends on
    the number of channels, about which the ranks agree once, in a message of their own. Only where
    a rank has failed do they exchange what to raise.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.spoken = False  # whether this pass' message has been sent, so that nobody waits for it
        self.agreed: int | None = None  # the number of channels

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has agreed on nothing
        return _Ranks, (self.communicator,)

    def __deepcopy__(self, _: dict[int, Any]) -> _Ranks:
        return _Ranks(self.communicator)

    def merge(self, local: Moments, dtype: np.dtype, settings: dict[str, float]) -> Moments:
        """Moments of all ranks together, on the CPU, in the same bits on every rank."""
        count, mean, m2 = local
        rows = self._gather(
            _GOOD, count, _DTYPES.index(dtype.name), list(settings.values()), mean, m2
        )
        header = rows[:, :3].copy().view(np.int64)
        if not np.isin(header[:, 0], (_GOOD, _FAILED)).all():
            raise _out_of_step()
        if (header[:, 0] == _FAILED).any():
            self._raise_together(None)
        _same("x: expected one dtype", [_DTYPES[i] for i in header[:, 2]], TypeError)
        for name, values in zip(settings, rows[:, 3:7].T.tolist(), strict=True):
            if name == "update_statistics":
                values = [_UPDATED[int(value)] for value in values]
            _same(f"{name}: expected the same", values, ValueError)
        means, squares = np.split(rows[:, 7:], 2, axis=1)
        parts = zip(header[:, 1], means, squares, strict=True)
        return merge_moments([Moments(int(count), mean, m2) for count, mean, m2 in parts])

    def tell_of_failed_forward(self, error: Exception, zeros: Array) -> NoReturn:
        """Raise on every rank what has failed on this one; `zeros` has one a channel."""
        self._gather(_FAILED, 0, 0, [0.0, 0.0, 0.0, 0.0], zeros, zeros)
        self._raise_together(error)

    def add_up(self, sum_dy: Array, sum_dy_xmu: Array) -> tuple[Array, Array]:
        """Sums over all ranks, in float64."""
        joined = self._reduce(0, sum_dy, sum_dy_xmu)
        if joined[0] != self.communicator.size:
            raise _out_of_step()
        if joined[1] != 0:
            self._raise_together(None)
        number = sum_dy.size
        return joined[2 : 2 + number], joined[2 + number :]

    def tell_of_failed_backward(self, error: Exception, zeros: Array) -> NoReturn:
        """Raise on every rank what has failed on this one; `zeros` has one a channel."""
        self._reduce(1, zeros, zeros)
        self._raise_together(error)

    def _gather(
        self, status: int, count: int, dtype: int, settings: list[float], mean: Array, m2: Array
    ) -> np.ndarray:
        self._agree(mean.size)
        header = np.array([status, count, dtype], np.int64).view(np.float64)
        return self._gathered(_joined(header, np.array(settings), mean, m2))

    def _reduce(self, failed: int, sum_dy: Array, sum_dy_xmu: Array) -> Array:
        message = _joined(np.array([1, failed], np.float64), sum_dy, sum_dy_xmu)
        self.spoken = True
        total = self.communicator.all_reduce(message)
        return _answer("all_reduce", total, message.shape)

    def _gathered(self, message: Array) -> np.ndarray:
        """Every rank's message, on the CPU and contiguous."""
        self.spoken = True
        rows = self.communicator.all_gather(message)
        shape = (self.communicator.size, message.size)
        return np.ascontiguousarray(arrays.move(_answer("all_gather", rows, shape), "cpu"))

    def _agree(self, channels: int) -> None:
        """Make sure, once, that messages have the same length on all ranks."""
        if self.agreed == channels:
            return
        found = self._gathered(np.array([channels], np.int64).view(np.float64))
        _same("num_features: expected the same", found.view(np.int64)[:, 0].tolist(), ValueError)
        self.agreed, self.spoken = channels, False

    def _raise_together(self, error: Exception | None) -> NoReturn:
        """Raise the error of the first rank that has one; all ranks call this."""
        text = b"" if error is None else _packed(error)
        message = np.zeros(_TEXT_BYTES, np.uint8)
        message[: len(text)] = np.frombuffer(text, np.uint8)
        found = self._gathered(message.view(np.float64)).view(np.uint8)
        for rank, row in enumerate(found):
            text = bytes(row).rstrip(b"\0")
            if text:
                kind, said = int(text[:1]), text[1:].decode(errors="ignore")
                raise _ERRORS[kind](f"{said} (on rank {rank})") from error
        raise RuntimeError("a rank has failed")


def _packed(error: Exception) -> bytes:
    """The kind of an error, and its message."""
    name = type(error).__name__
    kinds = [i for i, kind in enumerate(_ERRORS) if isinstance(error, kind)]
    try:
        said = f"{error}".replace("\0", " ").strip() or name
    except Exception:  # somebody else's class
        said = name
    if not kinds:
        kinds, said = [len(_ERRORS) - 1], f"{name}: {said}"
    return f"{kinds[0]}{said}".encode(errors="replace")[:_TEXT_BYTES]


def _out_of_step() -> RuntimeError:
    return RuntimeError(
        "communicator: the ranks are out of step; expected the same layer's forward or backward "
        "on all of them, and copies of it on all or on none"
    )


def _same(expectation: str, found: list[Any], error: type[Exception]) -> None:
    """What all ranks have to have alike."""
    for rank, value in enumerate(found):
        if value != found[0]:
            raise error(
                f"{expectation} on all ranks, got {found[0]} on rank 0, {value} on rank {rank}"
            )


def _answer(name: str, result: Any, shape: tuple[int, ...]) -> Array:
    """What a communicator returned, if it has this shape."""
    found = getattr(result, "shape", None), getattr(result, "dtype", None)
    if found != (shape, np.float64):
        raise TypeError(
            f"communicator.{name}: expected an array of shape {shape} and dtype float64, "
            f"got {checks.shown(result)}"
        )
    return result


def _joined(header: np.ndarray, *vectors: Array) -> Array:
    """A header and vectors in one array of float64, NumPy's or CuPy's as the last vector is."""
    if isinstance(vectors[-1], np.ndarray):
        return np.concatenate([header, *vectors], dtype=np.float64)
    import cupy

    return cupy.concatenate([cupy.asarray(header), *map(cupy.asarray, vectors)], dtype=np.float64)
