"""How the CUDA kernels share an array out: pure functions of its geometry and the device.

Every kernel works in *groups* of threads: a warp or a block that takes the elements, or
one part of them, of the statistics it has. In *runs* (``inner`` > 1) a group has one
statistic; in *columns* (``inner`` == 1) it has 64 to 128 bytes of neighbouring ones.

A plan is *resident* if a group, or the blocks of a cluster together, hold all elements
of their statistics at once, so that memory is read once; otherwise it *streams*: parts
of a statistic go to blocks of their own, once for the statistics, once more, in reverse,
for the transform. The candidates are tried in the order of `CANDIDATES`; one that does
not fit says why.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from ..geometry import Geometry

__all__ = ["Alignment", "Device", "LaunchPlan", "alignment", "candidates", "plan", "sweep"]

# Accesses that a thread has in flight for each input, by their bytes. Of 16 bytes, 4 make
# 32 KiB with 512 threads a multiprocessor; the latency of the memory of an H200 (4.8 TB/s,
# 0.7 us, 132 multiprocessors) asks for 25 KiB. More narrow ones cost too many registers.
_TILES = {16: 4, 8: 4, 4: 8, 2: 16}

# Whole warps of a block. Kernels take up to 128 registers a thread, so a multiprocessor
# (65536 registers) holds 512 threads of any: in two blocks, or in one that has all of its
# shared memory.
_LEAST_THREADS = 64
_MOST_THREADS = 256
_MOST_THREADS_ALONE = 512

# Columns: a row of a block is 128 bytes, a line of the second-level cache; two rows of
# 64 bytes where that keeps more multiprocessors busy.
_ROW_BYTES = 128
_LEAST_ROW_BYTES = 64

# Below this a block of its own for each statistic is fast, even if few blocks are at work:
# one multiprocessor reads 64 KiB in about the time that a second launch takes.
_SMALL_BYTES = 64 << 10

# Streaming: so many blocks for each multiprocessor even out, each worth a few tiles; the
# parts of a statistic are folded by one warp, 16 by each of its lanes at most.
_STREAM_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 8
_MOST_PARTS = 512

# Kernels narrower than this are not worth unaligned runs of full width: a run shorter
# than 32 accesses has too many of them at its ends.
_LEAST_UNALIGNED_BYTES = 512

# What the driver takes of a block's shared memory.
_RESERVED_SHARED = 1024

_CLUSTERS = (2, 4, 8)  # 8 is the largest that every device with clusters has

# Bytes of a partial result and of the coefficients of one position (kernels/*.cu).
_PARTIAL_BYTES = 24
_COEFFICIENT_BYTES = 32

_MOST_BLOCKS = 2**31 - 1

# Elements, or numbers of partial results, from which on offsets take 64 bits. Below, signed
# 32-bit numbers hold all of them, and the steps of a block's threads beyond the end.
_WIDE_FROM = 2**31 - 2**24


class Device(NamedTuple):
    """What a plan needs to know of a device."""

    compute_capability: int  # 90 for 9.0
    multiprocessors: int
    shared_per_block: int  # bytes that a block can have at most
    shared_per_multiprocessor: int


class Alignment(NamedTuple):
    """How the arrays of a call lie relative to 16-byte boundaries."""

    bytes: int  # power of two, at most 16, that divides all addresses
    shift: int  # bytes from such a boundary to each of them; -1 if they differ


class LaunchPlan(NamedTuple):
    """How to launch the kernels for one geometry."""

    name: str  # of the candidate
    resident: bool
    options: tuple[str, ...]  # macros that the kernels are compiled with
    blocks: int
    threads: int
    shared: int  # bytes of dynamic shared memory of a block
    parts: int  # of a statistic
    packed: bytes  # Geometry and Cut, as the kernels take them


class _Access(NamedTuple):
    """How the elements of a geometry are read."""

    width: int  # elements of an access
    aligned: bool
    windows: int  # accesses that cover a run
    shift: int  # elements


class _Problem(NamedTuple):
    geometry: Geometry
    element: str
    itemsize: int
    operands: int  # arrays that are read
    access: _Access
    device: Device


_Candidate: TypeAlias = Callable[[_Problem], "LaunchPlan | str"]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(value: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, value - 1).bit_length()


_ALIGNED = Alignment(16, 0)


def alignment(*addresses: int) -> Alignment:
    """Alignment of arrays that begin at these addresses."""
    together = 16
    for address in addresses:
        together |= address
    if together & 15 == 0:
        return _ALIGNED
    shifts = {address % 16 for address in addresses}
    return Alignment(together & -together, shifts.pop() if len(shifts) == 1 else -1)


def _access(geometry: Geometry, itemsize: int, lie: Alignment) -> _Access:
    inner = geometry.inner
    # What divides the distance of any two rows or runs, and all addresses.
    row_bytes = (geometry.group if inner == 1 else inner) * itemsize
    together = row_bytes | lie.bytes
    width_bytes = together & -together
    if (
        inner > 1
        and width_bytes < min(8, 16 // itemsize * itemsize)
        and inner * itemsize >= _LEAST_UNALIGNED_BYTES
        and lie.shift >= 0
    ):
        width = 16 // itemsize
        return _Access(width, False, _ceil_div(inner + width - 1, width), lie.shift // itemsize)
    width = max(1, width_bytes // itemsize)
    return _Access(width, True, 0 if inner == 1 else inner // width, 0)


def _canonical(geometry: Geometry) -> Geometry:
    """The same array with as long runs as possible."""
    batch, outer, group, inner = geometry
    return Geometry(batch, 1, 1, outer * inner) if group == 1 else geometry


def _tile(p: _Problem) -> int:
    tile = _TILES[p.access.width * p.itemsize]
    # More of 8 elements would take more than 128 registers, for two inputs or where each
    # of the elements has statistics of its own.
    many = p.access.width == 8 and (p.operands == 2 or p.geometry.inner == 1)
    return tile // 2 if many else tile


def _built(
    p: _Problem, name: str, *, resident: bool, threads: int, group: int, across: int,
    share: int, parts: int, cluster: int,
) -> LaunchPlan:  # fmt: skip
    """The plan whose groups of `group` threads take `share` accesses (columns: rows)."""
    batch, _, number, inner = p.geometry
    columns = inner == 1
    width, tile = p.access.width, _tile(p)
    positions = across * width if columns else 1
    tiles = _ceil_div(share, group // across * tile)
    header = 0
    if group == threads:
        header = positions * ((threads // 32 + 1) * _PARTIAL_BYTES + _COEFFICIENT_BYTES)
        header = _ceil_div(header, 16) * 16
    kept = (tiles - 1) * tile * threads * width * p.itemsize * p.operands if resident else 0
    groups = batch * _ceil_div(number, positions) if columns else batch * number
    wide = max(p.geometry.size, 3 * p.geometry.statistics * parts) >= _WIDE_FROM
    options = {
        f"ELEMENT_{p.element.upper()}": 1,
        "WIDE": int(wide),
        "COLUMNS": int(columns),
        "WIDTH": width,
        "ALIGNED": int(p.access.aligned),
        "TILE": tile,
        "THREADS": threads,
        "GROUP": group,
        "ACROSS": across,
        "CLUSTER": cluster,
        "HEADER": header,
    }
    return LaunchPlan(
        name=name,
        resident=resident,
        options=tuple(f"-D{key}={value}" for key, value in options.items()),
        blocks=_ceil_div(groups, threads // group) * parts,
        threads=threads,
        shared=header + kept,
        parts=parts,
        packed=struct.pack(
            "=9q", *p.geometry, p.access.windows, share, parts, tiles, p.access.shift
        ),
    )


def _accesses(p: _Problem) -> int:
    """Accesses (columns: rows) of a statistic."""
    return p.geometry.outer * (1 if p.geometry.inner == 1 else p.access.windows)


def _warp(p: _Problem) -> LaunchPlan | str:
    """A warp holds a statistic in its registers; 4 share a block."""
    if p.geometry.inner == 1:
        return "statistics lie side by side: blocks take several at once"
    most = 32 * _tile(p)
    number = _accesses(p)
    if number > most:
        return f"{number} accesses a statistic; the registers of a warp hold {most}"
    return _built(
        p, "warp", resident=True, threads=128, group=32, across=1, share=number, parts=1, cluster=1
    )


def _across(p: _Problem, row_bytes: int) -> int:
    """Threads along a row of a block; 1 for runs."""
    if p.geometry.inner > 1:
        return 1
    wanted = _ceil_div(row_bytes, p.access.width * p.itemsize)
    needed = _ceil_div(p.geometry.group, p.access.width)
    return min(32, _power_of_two(min(wanted, needed)))


def _resident(
    p: _Problem, name: str, cluster: int, row_bytes: int, alone: bool
) -> LaunchPlan | str:
    """Blocks, or clusters of them, that hold whole statistics.

    They are `alone` on a multiprocessor, or two share it.
    """
    limit = p.device.shared_per_block
    if not alone:  # of two blocks one can load while the other stores
        limit = min(limit, p.device.shared_per_multiprocessor // 2 - _RESERVED_SHARED)
    most = _MOST_THREADS_ALONE if alone else _MOST_THREADS
    across = _across(p, row_bytes)
    share = _ceil_div(_accesses(p), cluster)
    threads = _power_of_two(_ceil_div(share * across, _tile(p)))
    threads = max(_LEAST_THREADS, min(most, threads))
    built = _built(
        p, name, resident=True, threads=threads, group=threads, across=across,
        share=share, parts=cluster, cluster=cluster,
    )  # fmt: skip
    if built.shared > limit:
        return f"needs {built.shared} bytes of shared memory a block; {limit} are to be had"
    bytes_each = share * across * p.access.width * p.itemsize * p.operands
    if bytes_each > _SMALL_BYTES and 2 * built.blocks < p.device.multiprocessors:
        return (
            f"{built.blocks} blocks would leave most of the {p.device.multiprocessors} "
            "multiprocessors idle"
        )
    return built


def _block(p: _Problem) -> LaunchPlan | str:
    """A block holds its statistics, and two blocks fit a multiprocessor."""
    return _resident(p, "block", 1, _ROW_BYTES, alone=False)


def _whole_block(p: _Problem) -> LaunchPlan | str:
    """A block holds its statistics with all shared memory of a multiprocessor."""
    return _resident(p, "whole_block", 1, _LEAST_ROW_BYTES, alone=True)


def _of_clusters(p: _Problem, name: str, alone: bool) -> LaunchPlan | str:
    if p.device.compute_capability < 90:
        return "clusters need compute capability 9.0"
    refusal = "a cluster needs two multiprocessors"
    for row_bytes in (_ROW_BYTES, _LEAST_ROW_BYTES):
        for cluster in _CLUSTERS:
            if cluster > p.device.multiprocessors:
                break
            built = _resident(p, name, cluster, row_bytes, alone)
            if isinstance(built, LaunchPlan):
                return built
            refusal = f"clusters of {cluster}: {built}"
    return refusal


def _cluster(p: _Problem) -> LaunchPlan | str:
    """A cluster of blocks holds its statistics, and two blocks fit a multiprocessor."""
    return _of_clusters(p, "cluster", alone=False)


def _whole_cluster(p: _Problem) -> LaunchPlan | str:
    """A cluster of blocks holds its statistics with all shared memory."""
    return _of_clusters(p, "whole_cluster", alone=True)


def _stream(p: _Problem) -> LaunchPlan | str:
    """Several blocks for a statistic, each of which takes a part of it."""
    across = _across(p, _ROW_BYTES)
    number = _accesses(p)
    threads = _power_of_two(_ceil_div(number * across, _tile(p)))
    threads = max(_LEAST_THREADS, min(_STREAM_THREADS, threads))
    positions = across * p.access.width if p.geometry.inner == 1 else 1
    groups = p.geometry.batch * _ceil_div(p.geometry.group, positions)
    a_tile = threads // across * _tile(p)
    wanted = _ceil_div(_BLOCKS_PER_MULTIPROCESSOR * p.device.multiprocessors, groups)
    parts = max(1, min(wanted, _MOST_PARTS, _ceil_div(number, a_tile)))
    # Whole tiles, except for the last part.
    share = _ceil_div(_ceil_div(number, parts), a_tile) * a_tile
    return _built(
        p, "stream", resident=False, threads=threads, group=threads, across=across,
        share=min(share, number), parts=_ceil_div(number, share), cluster=1,
    )  # fmt: skip


#: What is tried for statistics and transform together, in this order.
CANDIDATES: tuple[_Candidate, ...] = (
    _warp,
    _block,
    _cluster,
    _whole_block,
    _whole_cluster,
    _stream,
)

#: What is tried for kernels that read everything once anyway.
SWEEPS: tuple[_Candidate, ...] = (_warp, _stream)


def _problem(
    geometry: Geometry, dtype: np.dtype, operands: int, lie: Alignment, device: Device
) -> _Problem:
    geometry = _canonical(geometry)
    access = _access(geometry, dtype.itemsize, lie)
    return _Problem(geometry, dtype.name, dtype.itemsize, operands, access, device)


def candidates(
    geometry: Geometry, dtype: np.dtype, operands: int, lie: Alignment, device: Device
) -> dict[str, LaunchPlan | str]:
    """What every candidate of `plan` says: its plan, or why it refuses."""
    p = _problem(geometry, dtype, operands, lie, device)
    return {candidate.__name__[1:]: candidate(p) for candidate in CANDIDATES}


def _first(tried: tuple[_Candidate, ...], p: _Problem) -> LaunchPlan:
    for candidate in tried:
        built = candidate(p)
        if isinstance(built, LaunchPlan):
            if built.blocks > _MOST_BLOCKS:
                raise ValueError(
                    f"x: expected at most {_MOST_BLOCKS} blocks of channels on a GPU, "
                    f"got {built.blocks}"
                )
            return built
    raise AssertionError("the last candidate never refuses")


@lru_cache(maxsize=4096)
def plan(
    geometry: Geometry, dtype: np.dtype, operands: int, lie: Alignment, device: Device
) -> LaunchPlan:
    """Plan for statistics and transform of a geometry of at least one element.

    ``operands`` is the number of arrays that are read: 1 forward, 2 backward.
    """
    return _first(CANDIDATES, _problem(geometry, dtype, operands, lie, device))


@lru_cache(maxsize=4096)
def sweep(
    geometry: Geometry, dtype: np.dtype, operands: int, lie: Alignment, device: Device
) -> LaunchPlan:
    """Plan for a kernel that reads everything once, of a geometry of at least one element."""
    return _first(SWEEPS, _problem(geometry, dtype, operands, lie, device))
