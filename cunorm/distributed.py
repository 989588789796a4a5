"""Moments of a part of the data and their exact merging; whom ranks communicate by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from . import arrays, checks
from .arrays import Array

__all__ = ["Communicator", "Moments", "as_communicator", "merge_moments"]


class Moments(NamedTuple):
    """Count, mean and centred sum of squares of every channel.

    Attributes
    ----------
    count : int
        Values a channel.
    mean : array, shape (C,)
        Their mean; 0 where there are none.
    m2 : array, shape (C,)
        Sum of (x - mean)^2, so that the biased variance is ``m2 / count``.
    """

    count: int  # type: ignore[assignment]
    mean: Array
    m2: Array


def merge_moments(moments: Sequence[Moments]) -> Moments:
    """Moments of all the data together from the moments of its parts.

    With n the sum of all counts n_i,

        mean = sum_i n_i mean_i / n
        m2   = sum_i m2_i + sum_i n_i (mean_i - mean)^2

    computed in float64 in the order given, whatever the dtype (Chan, Golub and
    LeVeque, "Algorithms for computing the sample variance", 1983, eq. 2.1 for
    any number of parts). Empty parts (count 0) change nothing.

    Parameters
    ----------
    moments : sequence of Moments
        At least one; means and m2 of shape (C,) and of one dtype.

    Returns
    -------
    Moments
        In the dtype of the parts.

    Raises
    ------
    TypeError
        For a part that is no (count, mean, m2), or parts of several dtypes.
    ValueError
        For no parts, a negative count, or parts of several numbers of channels.
    """
    if isinstance(moments, Moments):
        raise TypeError("moments: expected a sequence of Moments, got one that is in none")
    try:
        parts = list(moments)
    except TypeError as error:
        raise TypeError(
            f"moments: expected a sequence of Moments, got {type(moments).__name__}"
        ) from error
    if not parts:
        raise ValueError("moments: expected at least one part, got none")
    counts: list[int] = []
    means: list[np.ndarray] = []
    squares: list[np.ndarray] = []
    place: arrays.Place | None = None
    for i, part in enumerate(parts):
        if not isinstance(part, (tuple, list)) or len(part) != 3:
            raise TypeError(
                f"moments[{i}]: expected (count, mean, m2), as batch_norm_statistics returns, "
                f"got {type(part).__name__}"
            )
        count = checks.number_of_values(f"moments[{i}].count", part[0], 0)
        names = (f"moments[{i}].mean", f"moments[{i}].m2")
        for name, array in zip(names, part[1:], strict=True):
            checks.present(name, array)
        (mean, m2), its_place = arrays.adopt(names, part[1], part[2])
        place = place or its_place
        shape = means[0].shape if means else np.shape(mean)
        if len(shape) != 1:
            raise ValueError(f"{names[0]}: expected shape (C,), got {shape}")
        for name, array in zip(names, (mean, m2), strict=True):
            checks.statistic(name, array, shape)
            if array.dtype != (means[0] if means else mean).dtype:
                raise TypeError(
                    f"{name}: expected the dtype of moments[0].mean, "
                    f"{(means[0] if means else mean).dtype}, got {array.dtype}"
                )
        counts.append(count)
        means.append(mean)
        squares.append(m2)
    labels = [f"moments[{i}].{name}" for name in ("mean", "m2") for i in range(len(parts))]
    arrays.device_of_all(labels, means + squares)
    assert place is not None
    total = checks.number_of_values("moments", sum(counts), 0)
    dtype = means[0].dtype
    filled = [i for i, count in enumerate(counts) if count > 0]
    with place, np.errstate(all="ignore"):
        mean = place.xp.zeros(means[0].shape)
        m2 = place.xp.zeros(means[0].shape)
        if filled:
            pivot = means[filled[0]].astype(np.float64)
            pivot[~place.xp.isfinite(pivot)] = 0.0
            for i in filled:
                mean += (counts[i] / total) * (means[i] - pivot)
            mean += pivot
            for i in filled:
                m2 += squares[i] + counts[i] * place.xp.square(means[i] - mean)
        mean, m2 = mean.astype(dtype), m2.astype(dtype)
        return Moments(total, *place.export(mean, m2))


# --- communicators --------------------------------------------------------------


@runtime_checkable
class Communicator(Protocol):
    """What synchronized norms need of the processes they run in, the ranks.

    Any object with these four will do. Arrays are contiguous, of float64 and one axis, and the
    same length on every rank; where the data is CuPy's they may be CuPy's, on all ranks alike,
    else they are NumPy's. What comes back is of the same library and dtype. All ranks call the
    same methods in the same order.
    """

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def rank(self) -> int:
        """Of this process, from 0."""

    def all_gather(self, array: Array) -> Array:
        """Every rank's array, bit for bit, in the order of ranks: shape (size, array.size)."""

    def all_reduce(self, array: Array) -> Array:
        """Sum of every rank's array, the same bits on every rank."""


def as_communicator(communicator: Any, *, device_pointers: bool = False) -> Communicator:
    """Make a `Communicator` of what a program communicates by.

    Parameters
    ----------
    communicator
        A communicator of mpi4py, a `cupyx.distributed` backend, a
        `cupy.cuda.nccl.NcclCommunicator`, or a `Communicator`, which is returned as it is.
    device_pointers : bool
        For mpi4py with a CUDA-aware MPI: give it the addresses of CuPy arrays. Otherwise these go
        through pinned memory of the host.

    Raises
    ------
    TypeError
        For anything else, an intercommunicator among them.
    ValueError
        For a communicator of MPI that is null or freed, and for a rank that is none of `size`.
    """
    device_pointers = checks.flag("device_pointers", device_pointers)

    def has(*names: str) -> bool:
        return all(hasattr(communicator, name) for name in names)

    if isinstance(communicator, type):
        pass
    elif has("Allgather", "Allreduce", "Get_size", "Get_rank"):
        if not communicator:
            raise ValueError("communicator: expected one with ranks, got a null or freed one")
        if has("Is_inter") and communicator.Is_inter():
            raise TypeError(
                "communicator: expected one whose ranks all hear each other, "
                f"got {type(communicator).__name__}; its Merge() makes one"
            )
        return _MPI(communicator, device_pointers)
    elif has("allGather", "allReduce", "size", "rank_id"):
        return _nccl(communicator)
    elif has("all_gather", "all_reduce", "_n_devices", "rank"):
        return _cupyx(communicator)
    elif isinstance(communicator, Communicator) and callable(communicator.all_gather):
        size = checks.number_of_values("communicator.size", communicator.size, 1)
        if checks.number_of_values("communicator.rank", communicator.rank, 0) >= size:
            raise ValueError(
                f"communicator.rank: expected less than its size, {size}, got {communicator.rank}"
            )
        return communicator
    raise TypeError(
        "communicator: expected one of mpi4py, cupyx.distributed or cupy.cuda.nccl, or an object "
        f"with size, rank, all_gather and all_reduce, got {checks.shown(communicator)}"
    )


class _MPI:
    """A communicator of mpi4py."""

    def __init__(self, communicator: Any, device_pointers: bool) -> None:
        self._communicator = communicator
        self._device_pointers = device_pointers
        self.size: int = communicator.Get_size()
        self.rank: int = communicator.Get_rank()

    def all_gather(self, array: Array) -> Array:
        return self._communicate(array, (self.size, array.size), self._communicator.Allgather)

    def all_reduce(self, array: Array) -> Array:
        return self._communicate(array, array.shape, self._communicator.Allreduce)

    def _communicate(self, array: Array, shape: tuple[int, ...], function: Any) -> Array:
        if isinstance(array, np.ndarray):
            result = np.zeros(shape, array.dtype)  # none of an older message, should this one fail
            function(array, result)
            return result
        import cupy
        import cupyx

        if self._device_pointers:
            result = cupy.empty(shape, array.dtype)
            cupy.cuda.get_current_stream().synchronize()  # MPI knows nothing of streams
            function(array, result)
            return result
        sent, received = (cupyx.empty_pinned(s, array.dtype) for s in (array.shape, shape))
        array.get(out=sent)
        function(sent, received)
        return cupy.asarray(received)


class _OnGPU:
    """A communicator of NCCL, on the current stream; NumPy arrays take the way over the GPU.

    `gather` and `reduce` take contiguous CuPy arrays, what is sent and what is received.
    """

    def __init__(self, size: int, rank: int, gather: Any, reduce: Any) -> None:
        self.size, self.rank = size, rank
        self._gather, self._reduce = gather, reduce

    def all_gather(self, array: Array) -> Array:
        return self._communicate(array, (self.size, array.size), self._gather)

    def all_reduce(self, array: Array) -> Array:
        return self._communicate(array, array.shape, self._reduce)

    def _communicate(self, array: Array, shape: tuple[int, ...], function: Any) -> Array:
        import cupy

        sent, received = cupy.asarray(array), cupy.empty(shape, array.dtype)
        function(sent, received)
        return received.get() if isinstance(array, np.ndarray) else received


def _nccl(communicator: Any) -> _OnGPU:
    """Of a `cupy.cuda.nccl.NcclCommunicator`."""
    from cupy.cuda import get_current_stream, nccl

    def gather(sent: Any, received: Any) -> None:
        communicator.allGather(
            sent.data.ptr, received.data.ptr, sent.size, nccl.NCCL_FLOAT64,
            get_current_stream().ptr,
        )  # fmt: skip

    def reduce(sent: Any, received: Any) -> None:
        communicator.allReduce(
            sent.data.ptr, received.data.ptr, sent.size, nccl.NCCL_FLOAT64, nccl.NCCL_SUM,
            get_current_stream().ptr,
        )  # fmt: skip

    return _OnGPU(communicator.size(), communicator.rank_id(), gather, reduce)


def _cupyx(backend: Any) -> _OnGPU:
    """Of a `cupyx.distributed` backend."""

    def gather(sent: Any, received: Any) -> None:
        backend.all_gather(sent, received, sent.size)

    size = backend._n_devices  # it has no other name for it
    return _OnGPU(size, backend.rank, gather, backend.all_reduce)
