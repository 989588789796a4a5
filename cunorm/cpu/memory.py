"""Memory of large outputs, kept between calls.

The operating system zeroes fresh memory page by page as it is touched, and takes it back as
soon as an array of more than 32 MB is gone. For an output of 50 MB that takes longer than a
normalization. So large outputs lie in blocks that come back here with the array's end, and are
given to the next output of that size. Meanwhile the system may take their pages (MADV_FREE)
if it has another use for them, and then they are fresh again.
"""

from __future__ import annotations

import mmap
import os
from math import prod
from typing import Any

import numpy as np

__all__ = ["empty", "empty_like"]

# Smaller arrays are the C library's, which keeps memory of up to 32 MB itself.
LARGE_BYTES = 16 << 20

# Blocks are whole huge pages, so that arrays of about the same size fit the same blocks.
_UNIT = 2 << 20

_FREE = getattr(mmap, "MADV_FREE", None)  # Linux, macOS, BSD
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux

_blocks: list[mmap.mmap] = []  # free, the longest unused first


def _most() -> int:
    """Bytes of free blocks that are kept."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


class _Lease:
    """The base of an array in a block: when it is gone, the block is free."""

    __slots__ = ("__array_interface__", "_block")

    def __init__(self, block: mmap.mmap, number: int, itemsize: int) -> None:
        self._block = block
        self.__array_interface__ = {
            "version": 3,
            "data": (np.frombuffer(block, np.uint8).ctypes.data, False),
            "shape": (number,),
            "typestr": f"|V{itemsize}",
        }

    def __del__(self, free: Any = _blocks, advice: Any = _FREE) -> None:
        # Also at the interpreter's end, when the module's names may be gone.
        self._block.madvise(advice)
        free.append(self._block)


def _take(nbytes: int) -> mmap.mmap:
    """A block of at least so many bytes."""
    size = -(-nbytes // _UNIT) * _UNIT
    for block in reversed(_blocks):
        if len(block) == size:
            try:
                _blocks.remove(block)
            except ValueError:  # another thread was faster
                continue
            return block
    while sum(map(len, _blocks)) > _most():
        del _blocks[0]
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGE is not None:
        block.madvise(_HUGE)
    return block


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """An uninitialized NumPy array, in kept memory if it is large."""
    number = prod(shape)
    if number * dtype.itemsize < LARGE_BYTES or _FREE is None:
        return np.empty(shape, dtype)
    memory = np.asarray(_Lease(_take(number * dtype.itemsize), number, dtype.itemsize))
    return np.ndarray(shape, dtype, memory)


def empty_like(array: Any) -> Any:
    """The same in the memory order of a NumPy array."""
    if array.nbytes < LARGE_BYTES:
        return np.empty_like(array)
    strides = np.empty_like(array).strides  # whose memory is never touched
    return np.ndarray(array.shape, array.dtype, empty(array.shape, array.dtype), strides=strides)
