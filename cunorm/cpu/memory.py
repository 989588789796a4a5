"""Memory of large outputs, kept between calls.

The operating system zeroes fresh memory page by page as it is touched, and takes it back as
soon as an array of more than 32 MB is gone. For an output of 50 MB that takes longer than a
normalization. So large outputs lie in blocks that come back here with the array's end, and are
given to the next output of that size. Of all but those that came last the system may meanwhile
take the pages (MADV_FREE) if it has another use for them, and then they are fresh again.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["empty", "empty_like", "last_level_cache", "second_level_cache"]

# Smaller arrays are the C library's, which keeps memory of up to 32 MB itself.
LARGE_BYTES = 16 << 20

# Blocks are whole huge pages, so that arrays of about the same size fit the same blocks.
_UNIT = 2 << 20

_FREE = getattr(mmap, "MADV_FREE", None)  # Linux, macOS, BSD
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux


class _Pool:
    """Free blocks, the longest unused first.

    To offer a block to the system takes the other processors' attention, for every huge page:
    0.2 ms for 24 MB in a virtual machine, in which two threads write twice as much. So the last
    ones are not offered at once.

    No lock, since an array may end anywhere, here too; each operation on the lists is whole.
    """

    def __init__(self, most: int, most_recent: int) -> None:
        self.offered: list[mmap.mmap] = []
        self.recent: list[mmap.mmap] = []
        self.most = most  # bytes that are kept
        self.most_recent = most_recent  # and not offered
        self._advice = _FREE  # at the interpreter's end the module's names may be gone

    def take(self, nbytes: int) -> mmap.mmap:
        """A block of at least so many bytes."""
        size = -(-nbytes // _UNIT) * _UNIT
        for blocks in (self.recent, self.offered):
            for block in reversed(blocks):
                if len(block) == size:
                    try:
                        blocks.remove(block)
                    except ValueError:  # another thread was faster
                        continue
                    return block
        try:
            block = _map(size)
        except OSError:
            self.clear()  # perhaps for want of what they hold
            try:
                block = _map(size)
            except OSError as error:
                raise MemoryError(f"no memory for an array of {nbytes} bytes: {error}") from None
        if _HUGE is not None:
            with suppress(OSError):  # the system has none
                block.madvise(_HUGE)
        return block

    def give_back(self, block: mmap.mmap) -> None:
        """Keep a block for the next array of its size."""
        self.recent.append(block)
        while sum(map(len, self.recent)) > self.most_recent:
            try:
                block = self.recent.pop(0)
            except IndexError:  # another thread was faster
                break
            with suppress(OSError):  # locked in memory, say: it is not kept
                block.madvise(self._advice)  # type: ignore[arg-type]
                self.offered.append(block)
        while sum(map(len, self.offered)) > self.most - self.most_recent:
            try:
                self.offered.pop(0)
            except IndexError:
                break

    def clear(self) -> None:
        """Keep nothing."""
        self.recent.clear()
        self.offered.clear()


def _map(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def second_level_cache() -> int:
    """Bytes of the second-level cache; where the system does not say, those of many."""
    try:
        return int((_CACHES / "index2" / "size").read_text().removesuffix("K\n")) << 10
    except (OSError, ValueError):
        return 1 << 20


def last_level_cache() -> tuple[int, int]:
    """(bytes, bytes for each processor that shares it) of the third-level cache.

    Where the system does not say, those of many.
    """
    folder = _CACHES / "index3"
    try:
        size = int((folder / "size").read_text().removesuffix("K\n")) << 10
        shared = (folder / "shared_cpu_list").read_text().strip()  # 0-7,64-71
        processors = 0
        for span in shared.split(","):
            first, _, last = span.partition("-")
            processors += int(last or first) - int(first) + 1
    except (OSError, ValueError):
        return 128 << 20, 4 << 20
    return size, size // processors


def _memory(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may use: the machine's, or those of its control group."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # there is none
            size = min(size, int((groups / limit).read_text()))
    return size


_pool = _Pool(_memory() // 4, _memory() // 32) if _FREE is not None else _Pool(0, 0)


class _Lease:
    """The base of an array in a block: when it is gone, the block is free."""

    __slots__ = ("__array_interface__", "_block")

    def __init__(self, block: mmap.mmap, number: int, itemsize: int) -> None:
        self._block = block
        self.__array_interface__ = {
            "version": 3,
            "data": (np.frombuffer(block, np.uint8).__array_interface__["data"][0], False),
            "shape": (number,),
            "typestr": f"|V{itemsize}",
        }

    def __del__(self, pool: _Pool = _pool) -> None:
        pool.give_back(self._block)


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], large: int | None = None) -> Any:
    """An uninitialized NumPy array, in kept memory if it is large, so many bytes."""
    number = prod(shape)
    nbytes = number * dtype.itemsize
    if nbytes < (LARGE_BYTES if large is None else large) or _FREE is None:
        return np.empty(shape, dtype)
    lease = _Lease(_pool.take(nbytes), number, dtype.itemsize)
    return np.ndarray(shape, dtype, np.asarray(lease))


def empty_like(array: Any) -> Any:
    """The same in the memory order of a NumPy array."""
    if array.nbytes < LARGE_BYTES:
        return np.empty_like(array)
    order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    lying = empty(tuple(array.shape[axis] for axis in order), array.dtype)
    return lying.transpose(sorted(range(array.ndim), key=order.__getitem__))
