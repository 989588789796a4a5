"""How the CUDA kernels share an array out: pure functions of its geometry and the device.

Every kernel works in *groups* of threads: a block, a warp or a part of one that takes the
elements, or one part of them, of the channels it has. In *runs* (``inner`` > 1) a group has
one channel; in *columns* (``inner`` == 1) it has 64 to 128 bytes of neighbouring ones. *Rows*
are runs in which parameters change: neighbouring channels that share a statistic.

A plan is *resident* if a group, or the blocks of a cluster together, hold all elements
of their statistics at once, so that memory is read once; otherwise it *streams*: parts
of a channel go to blocks of their own, once for the statistics, once more, in reverse,
for the transform. Between the two is the *cached* one: the same blocks, in one launch in which
the transform follows the statistics so closely that the second-level cache has what it reads.
The candidates are tried in the order of `CANDIDATES`; one that does
not fit says why.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from math import gcd, lcm
from typing import NamedTuple, TypeAlias

import numpy as np

from ..geometry import Geometry

__all__ = [
    "Alignment", "Device", "Launch", "LaunchPlan", "adding", "alignment", "candidates",
    "elementwise", "plan", "sweep",
]  # fmt: skip

# Accesses that a thread has in flight for each input, by their bytes. Of 16 bytes, 4 make
# 32 KiB with 512 threads a multiprocessor; the latency of the memory of an H200 (4.8 TB/s,
# 0.7 us, 132 multiprocessors) asks for 25 KiB. More narrow ones cost too many registers.
_TILES = {16: 4, 8: 4, 4: 8, 2: 16}

# Whole warps of a block. Kernels take up to 128 registers a thread, so a multiprocessor
# (65536 registers) holds 512 threads of most at a time: in two blocks, or in one that has all of
# its shared memory.
_LEAST_THREADS = 64
_MOST_THREADS = 256
_SHARING = 2  # blocks that have the shared memory of a multiprocessor
_MOST_THREADS_ALONE = 512
_THREADS_AT_A_TIME = 512

# Columns: a row of a block is 128 bytes, a line of the second-level cache; two rows of
# 64 bytes where that keeps more multiprocessors busy.
_ROW_BYTES = 128
_LEAST_ROW_BYTES = 64

# Where no block keeps a statistic: so many threads have a row, as wide accesses as there are.
_SCATTERED_ROW_BYTES = 512
_SCATTERED_COLUMN_TILES = 4  # since a block makes coefficients for all of its columns

# Rows: bytes that a thread has of each input. To fold and finish a statistic costs every warp that
# works on it some 250 instructions, so a warp that needs no other takes as much as it can; where
# several meet for each row anyway, there are more of them, which wait for memory at the same time.
_WARP_THREAD_BYTES = 128
_BLOCK_THREAD_BYTES = 64

# Threads at a time of kernels that take rows in turns, whose warps wait for memory and for one
# another at each row: as many as no register has to be spilled for. By inputs and bytes of an
# element; where an access has one parameter, where statistics are about zero, elsewhere.
_ROW_THREADS = {
    (1, 2): (1024, 1024, 640),
    (1, 4): (1024, 768, 512),
    (2, 2): (1024, 640, 512),
    (2, 4): (1024, 768, 768),
}
_MOST_ROW_THREADS = 1024

# Below this a block of its own for each statistic is fast, even if few blocks are at work:
# one multiprocessor reads 64 KiB in about the time that a second launch takes.
_SMALL_BYTES = 64 << 10

# Streaming: so many blocks for each multiprocessor even out, each worth a few tiles; the
# parts of a statistic are folded by one warp, 16 by each of its lanes at most.
_STREAM_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 8
_COLUMN_BLOCKS = 2  # which fold many statistics each
_MOST_PARTS = 512

# Two sweeps in one launch: the second is so many bytes behind the first, of all inputs together,
# as make these percents of the second-level cache (16 of the 60 MB of an H200). Less, and it waits
# for statistics; more, and what it reads has left the cache, into which the output comes too.
_WINDOW_PERCENT = 27
# What a block takes in either sweep, if three of them have room for it on a multiprocessor.
_CACHED_PART_BYTES = 64 << 10
_CACHED_BLOCKS = 3
# Arrays have so many times as many bytes as the cache.
_CACHED_LEAST = 2
# A block's word of shared memory, after the header.
_TICKET_BYTES = 16

# The gradients of a row's parameters are sums over samples: chains of 256 of them at most, as
# in all sums.
_MOST_SAMPLES = 256

# Streamed rows: tiles of a part. What a row becomes must not depend on how many there are.
_ROW_PART_TILES = 4

# Rows whose parameters change more seldom are channels of their own where they are streamed.
_LONG_SPAN = 32

# Kernels narrower than this are not worth unaligned runs of full width: a run shorter
# than 32 accesses has too many of them at its ends.
_LEAST_UNALIGNED_BYTES = 512

# What the driver takes of a block's shared memory.
_RESERVED_SHARED = 1024

# Of a block that adds up what samples have (add_up.cu): each waits for memory most of the time.
_ADDING_THREADS = 512

_CLUSTERS = (2, 4, 8)  # 8 is the largest that every device with clusters has

# Multiprocessors of a GPC, within which a cluster has to be, at most; they come in pairs. Of the
# 132 of an H100 or H200 six GPCs have 16 and two 18.
_GPC = 18

# Bytes of a partial result and of the coefficients of one position (kernels/*.cu), by operands;
# of rows' double backward pass a partial result has more.
_PARTIAL_BYTES = {1: 24, 2: 24, 3: 48}
_PARTIAL_ROW_BYTES = 64
_COEFFICIENT_BYTES = {1: 32, 2: 32, 3: 64}

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
    cache: int  # bytes of the second-level cache


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
    parts: int  # of a channel, or of a row
    packed: bytes  # Geometry and Cut, as the kernels take them
    rows: bool  # statistics are runs in which parameters change
    samples: int  # that a block takes one after another; 0 unless it takes rows in turns
    sample_blocks: int  # that all samples are; 1 unless rows are taken in turns
    ahead: int = 0  # blocks that the first of two sweeps in one launch is ahead; 0: no such two


class Launch(NamedTuple):
    """How to launch a kernel that takes no geometry."""

    options: tuple[str, ...]
    blocks: int
    threads: int
    shared: int


class _Access(NamedTuple):
    """How the elements of a geometry are read."""

    width: int  # elements of an access
    aligned: bool
    windows: int  # accesses that cover a run
    shift: int  # elements


class _Problem(NamedTuple):
    geometry: Geometry  # of channels; of rows, with a row as a channel
    span: int  # elements of a row that share a parameter; 0 if these are no rows
    element: str
    itemsize: int
    operands: int  # arrays that are read: 1 forward, 2 backward, 3 in a double backward pass
    access: _Access
    device: Device
    centered: bool  # whether statistics are about the mean, not about zero
    kind: int  # of the parameters that change within a run (PARAMETERS in types.cuh)
    writes: bool = True  # whether the kernels write as much output


_Candidate: TypeAlias = Callable[[_Problem], "LaunchPlan | str"]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _macros(options: dict[str, int]) -> tuple[str, ...]:
    return tuple(f"-D{key}={value}" for key, value in options.items())


def _division(divisor: int) -> tuple[int, int]:
    """(factor, shift): number // divisor == number * factor >> shift, for numbers below 2^31.

    (Granlund and Montgomery, "Division by invariant integers using multiplication", 1994,
    theorem 4.2.) The divisor is below 2^31, too; 0 is none.
    """
    shift = 31 + max(0, divisor - 1).bit_length()
    return (_ceil_div(1 << shift, divisor), shift) if divisor else (0, 0)


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


def _access(geometry: Geometry, itemsize: int, lie: Alignment, rows: bool) -> _Access:
    """Rows have the same thread for the same element of each, wherever it lies.

    So they have the same bits, and their parameters' gradients can be kept by threads.
    """
    inner = geometry.inner
    # What divides the distance of any two rows or runs, and all addresses.
    channels = gcd(geometry.group, geometry.members) if geometry.members > 1 else geometry.group
    row_bytes = (channels if inner == 1 else inner) * itemsize
    together = row_bytes | lie.bytes
    width_bytes = together & -together
    if (
        inner > 1
        and width_bytes < min(8, 16 // itemsize * itemsize)
        and inner * itemsize >= _LEAST_UNALIGNED_BYTES
        and lie.shift >= 0
        and not rows
    ):
        width = 16 // itemsize
        return _Access(width, False, _ceil_div(inner + width - 1, width), lie.shift // itemsize)
    width = max(1, width_bytes // itemsize)
    return _Access(width, True, 0 if inner == 1 else inner // width, 0)


def _canonical(geometry: Geometry) -> tuple[Geometry, int]:
    """The same array with as long runs as possible, and the span of rows."""
    batch, outer, group, inner, members, parameters = geometry
    if outer == 1 and members > 1:
        return geometry.merged(), inner
    if group == 1:
        return Geometry(batch, 1, 1, outer * inner, 1, parameters), 0
    return geometry, 0


def _tile(p: _Problem) -> int:
    tile = _TILES[p.access.width * p.itemsize]
    # More would take more than 128 registers: of 8 elements, for two inputs or where each has
    # statistics or parameters of its own, or may be none of the run's; of rows, of single
    # elements and, for gradients of their parameters, of two wide inputs.
    many = p.access.width == 8 and (
        p.operands == 2
        or (p.geometry.inner == 1 and p.writes)
        or p.span > 0
        or not p.access.aligned
    )
    many |= p.span > 0 and (p.access.width == 1 or (p.operands == 2 and p.itemsize >= 4))
    if p.operands == 3:
        return max(1, tile // 4 if p.access.width == 8 else tile // 2)
    return tile // 2 if many else tile


def _held(p: _Problem, most: int) -> int:
    """Accesses that a thread has of a statistic, as long as more threads are to be had.

    Of a row so many bytes of each input, `most`.
    """
    tile = _tile(p)
    # Parameters of a thread's last tile stay in registers: to look for those of others again,
    # element by element, costs more than it saves. And without copies that go on by themselves
    # (compute capability 8.0) it is many threads that keep memory busy.
    if p.span == 0 or _spans(p) == 2 or p.device.compute_capability < 80:
        return tile
    return max(1, most // (tile * p.access.width * p.itemsize)) * tile


def _gradients(p: _Problem) -> bool:
    """Whether blocks keep the gradients of a row's parameters."""
    return p.span > 0 and p.operands >= 2


def _spans(p: _Problem) -> int:
    """Where the parameters of a run change (SPANS in types.cuh)."""
    if p.span <= 1:
        return 3 * p.span
    return 1 if p.span % p.access.width == 0 else 2


def _unit(p: _Problem) -> int:
    """Accesses that have all elements of their parameters, where gradients are kept of these."""
    return lcm(p.span, p.access.width) // p.access.width if _gradients(p) else 1


def _row_threads(p: _Problem) -> int:
    """Threads that a multiprocessor's registers hold of a kernel that takes rows in turns."""
    numbers = _ROW_THREADS.get((p.operands, p.itemsize))
    if numbers is None:
        return _THREADS_AT_A_TIME
    of_one, about_zero, elsewhere = numbers
    found = of_one if _spans(p) == 1 else elsewhere if p.centered else about_zero
    return min(found, _MOST_ROW_THREADS)


def _at_once(device: Device, each: int, cluster: int) -> int:
    """Blocks, in clusters of so many, that run at a time, `each` on a multiprocessor."""
    number = device.multiprocessors
    if cluster == 1:
        return each * number
    gpcs = _ceil_div(number, _GPC)
    least = number // gpcs // 2 * 2
    larger = (number - gpcs * least) // 2
    clusters = (gpcs - larger) * (each * least // cluster) + larger * (
        each * (least + 2) // cluster
    )
    return clusters * cluster


def _built(
    p: _Problem, name: str, *, resident: bool, threads: int, group: int, across: int,
    share: int, parts: int, cluster: int, shelves: int = 2, pieces: int = 0,
) -> LaunchPlan:  # fmt: skip
    """The plan whose groups of `group` threads take `share` accesses (columns: rows).

    So many `pieces`, not all parts, of a statistic have consecutive blocks, if that is given.

    Rows that are taken in turns have so many shelves.
    """
    batch, _, number, inner, members, _ = p.geometry
    columns = inner == 1
    width, tile = p.access.width, _tile(p)
    positions = across * width if columns else 1
    taken = positions // members * members if resident else positions
    tiles = _ceil_div(share, group // across * tile)
    partial = _PARTIAL_BYTES[p.operands]
    if p.operands == 3 and p.span > 0:
        partial = _PARTIAL_ROW_BYTES
    header = 0
    if group == threads:
        header = positions * ((threads // 32 + 1) * partial + _COEFFICIENT_BYTES[p.operands])
        header = _ceil_div(header, 16) * 16
    tile_elements = tile * threads * width
    kept = (tiles - 1) * tile_elements * p.itemsize * p.operands if resident else 0
    samples, sample_blocks, at_once = 0, 1, max(1, _THREADS_AT_A_TIME // threads)
    if p.span > 0 and (p.operands > 1 or (resident and shelves == 2)):  # rows in turns
        # Of gradients, a number of each element, or of each access whose elements share parameters.
        gradients = tile * threads * (width if _spans(p) > 1 else 1) * max(4, p.itemsize)
        if p.operands < 3:
            kept = shelves * tiles * tile_elements * p.itemsize * p.operands
        if p.operands == 2:  # those of the last tiles lie where rows were, in the end
            planes = 2 if p.centered else 1  # of weights, and of biases
            kept = max(kept, planes * gradients) + planes * (tiles - 1) * gradients
        elif p.operands == 3:
            kept += tiles * gradients
        turn = threads // group  # samples that a block takes at a time
        # As many blocks as run at the same time, and no more: each has much to do.
        room = p.device.shared_per_multiprocessor // (header + kept + _RESERVED_SHARED)
        at_once = max(1, _row_threads(p) // threads)
        running = _at_once(p.device, max(1, min(at_once, room)), cluster)
        wanted = max(1, running // (number * parts))
        turns = _ceil_div(batch, turn)
        waves = _ceil_div(turns, wanted * _MOST_SAMPLES)
        samples = _ceil_div(turns, wanted * waves) * turn
        sample_blocks = _ceil_div(batch, samples)
        blocks = sample_blocks * number * parts
    elif columns:
        blocks = batch * _ceil_div(number, taken) * parts
    else:
        blocks = _ceil_div(batch * number, threads // group) * parts
    numbers = p.geometry.batch * number * parts, 2 * sample_blocks * number * inner
    wide = (
        max(p.geometry.size, partial // 8 * numbers[0], numbers[1] if samples else 0) >= _WIDE_FROM
    )
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
        "AT_ONCE": at_once,
        "HEADER": header,
        "MERGED": int(resident and members > 1),
        "SPANS": _spans(p),
        "PARAMETERS": p.kind if p.span > 0 else 0,
        "CENTERED": int(p.centered),
        "SHELVES": shelves,
    }
    return LaunchPlan(
        name=name,
        resident=resident,
        options=_macros(options),
        blocks=blocks,
        threads=threads,
        shared=header + kept,
        parts=parts,
        packed=struct.pack(
            "=16q", *p.geometry, p.span, *_division(p.span),
            p.access.windows, share, parts, pieces or parts, tiles, p.access.shift, taken,
        ),
        rows=p.span > 0,
        samples=samples,
        sample_blocks=sample_blocks,
    )  # fmt: skip


def _accesses(p: _Problem) -> int:
    """Accesses (columns: rows) of a statistic."""
    return p.geometry.outer * (1 if p.geometry.inner == 1 else p.access.windows)


def _no_residence(p: _Problem) -> str | None:
    """Why no group of threads can hold whole statistics, if that is so."""
    if p.geometry.members > 1 and p.geometry.inner > 1:
        return "the runs of a statistic are of several channels each"
    if p.geometry.members > 32 * p.access.width:
        return f"{p.geometry.members} channels of a statistic; a row of a block has at most " + (
            f"{32 * p.access.width}"
        )
    return None


def _shared_limit(p: _Problem) -> int:
    """Of a block that shares a multiprocessor: one can load while another stores."""
    device = p.device
    each = device.shared_per_multiprocessor // _SHARING - _RESERVED_SHARED
    return min(device.shared_per_block, each)


def _refused(built: LaunchPlan, limit: int) -> str | None:
    if built.shared <= limit:
        return None
    return f"needs {built.shared} bytes of shared memory a block; {limit} are to be had"


def _warp(p: _Problem) -> LaunchPlan | str:
    """A warp, or 8 or 16 lanes of one, holds a channel in its registers; or a short row."""
    refusal = _no_residence(p)
    if refusal is not None:
        return refusal
    if p.geometry.inner == 1:
        return "statistics lie side by side: blocks take several at once"
    held = _held(p, _WARP_THREAD_BYTES)
    most = 32 * held
    number = _accesses(p)
    if number > most:
        return f"{number} accesses a statistic; a warp holds {most}"
    group = max(8, _power_of_two(_ceil_div(number, held)))
    built = _built(
        p, "warp", resident=True, threads=128, group=group, across=1, share=number, parts=1,
        cluster=1,
    )  # fmt: skip
    return _refused(built, _shared_limit(p)) or built


def _across(p: _Problem, row_bytes: int, resident: bool) -> int:
    """Threads along a row of a block; 1 for runs."""
    if p.geometry.inner > 1:
        return 1
    wanted = _ceil_div(row_bytes, p.access.width * p.itemsize)
    needed = _ceil_div(p.geometry.group, p.access.width)
    if resident:  # whole statistics
        wanted = max(wanted, _ceil_div(p.geometry.members, p.access.width))
    return min(32, _power_of_two(min(wanted, needed)))


def _resident(
    p: _Problem, name: str, cluster: int, row_bytes: int, alone: bool, shelves: int = 2
) -> LaunchPlan | str:
    """Blocks, or clusters of them, that hold whole statistics.

    They are `alone` on a multiprocessor, or two share it. Rows have so many shelves.
    """
    refusal = _no_residence(p)
    if refusal is not None:
        return refusal
    limit = p.device.shared_per_block if alone else _shared_limit(p)
    most = _MOST_THREADS_ALONE if alone else _MOST_THREADS
    across = _across(p, row_bytes, True)
    unit = _unit(p)
    share = _ceil_div(_ceil_div(_accesses(p), cluster), unit) * unit
    held = _held(p, _BLOCK_THREAD_BYTES)
    threads = _power_of_two(_ceil_div(share * across, held))
    threads = max(_LEAST_THREADS, min(most, threads))
    built = _built(
        p, name, resident=True, threads=threads, group=threads, across=across,
        share=share, parts=cluster, cluster=cluster, shelves=shelves,
    )  # fmt: skip
    refusal = _refused(built, limit)
    if refusal is not None:
        return refusal
    bytes_each = share * across * p.access.width * p.itemsize * p.operands
    few = 2 * built.blocks < p.device.multiprocessors and p.span == 0
    if bytes_each > _SMALL_BYTES and few:
        return (
            f"{built.blocks} blocks would leave most of the {p.device.multiprocessors} "
            "multiprocessors idle"
        )
    return built


def _shelves(p: _Problem, alone: bool) -> tuple[int, ...]:
    """How many shelves to try; where there is no room for two, a row is still read once."""
    return (2, 1) if alone and p.span > 0 and p.operands < 3 else (2,)


def _block(p: _Problem) -> LaunchPlan | str:
    """A block holds its statistics, and two blocks fit a multiprocessor."""
    return _resident(p, "block", 1, _ROW_BYTES, alone=False)


def _whole_block(p: _Problem) -> LaunchPlan | str:
    """A block holds its statistics with all shared memory of a multiprocessor."""
    for shelves in _shelves(p, alone=True):
        built = _resident(p, "whole_block", 1, _LEAST_ROW_BYTES, True, shelves)
        if isinstance(built, LaunchPlan):
            break
    return built


def _of_clusters(p: _Problem, name: str, alone: bool) -> LaunchPlan | str:
    if p.device.compute_capability < 90:
        return "clusters need compute capability 9.0"
    refusal = "a cluster needs two multiprocessors"
    lines = (_ROW_BYTES, _LEAST_ROW_BYTES)
    for shelves, row_bytes, cluster in product(_shelves(p, alone=alone), lines, _CLUSTERS):
        if cluster > p.device.multiprocessors:
            continue
        built = _resident(p, name, cluster, row_bytes, alone, shelves)
        if isinstance(built, LaunchPlan):
            return built
        refusal = f"clusters of {cluster}: {built}"
    return refusal


def _cluster(p: _Problem) -> LaunchPlan | str:
    """A cluster of blocks holds its statistics, and two blocks fit a multiprocessor."""
    return _of_clusters(p, "cluster", alone=False)


def _whole_cluster(p: _Problem) -> LaunchPlan | str:
    """A cluster of blocks holds its statistics with all shared memory."""
    if _gradients(p) and p.span >= _LONG_SPAN:
        return "a row's channels, streamed one by one, keep memory busier than such a cluster"
    return _of_clusters(p, "whole_cluster", alone=True)


def _apart(p: _Problem) -> _Problem:
    """Rows as what they are made of: channels that share statistics."""
    batch, _, number, length, _, _ = p.geometry
    members = length // p.span
    channels = Geometry(batch, 1, number * members, p.span, members, number * members)
    width = gcd(p.access.width, p.span)
    return p._replace(geometry=channels, span=0, access=_Access(width, True, p.span // width, 0))


def _streaming(p: _Problem) -> tuple[int, int, int]:
    """Threads of a block that streams, those along a row, accesses (columns: rows) of a tile."""
    across = _across(p, _ROW_BYTES, False)
    threads = _power_of_two(_ceil_div(_accesses(p) * across, _tile(p)))
    threads = max(_LEAST_THREADS, min(_STREAM_THREADS, threads))
    return threads, across, threads // across * _tile(p)


def _lag(p: _Problem, statistic_bytes: int) -> int:
    """Statistics by which a second sweep in the same launch is behind; 0 if one is too much."""
    return p.device.cache * _WINDOW_PERCENT // 100 // statistic_bytes


def _cached(p: _Problem) -> LaunchPlan | str:
    """Several blocks for a channel, whose part the cache has when it is read again."""
    if p.operands == 3:
        return "double backward passes take two launches"
    if p.span > 0 or p.geometry.members > 1:
        return "parameters change within a statistic"
    if p.device.compute_capability < 80:
        return "copies that go on by themselves need compute capability 8.0"
    if p.geometry.inner == 1:
        return "side by side, a part has statistics enough for a launch of their own to be quicker"
    threads, across, a_tile = _streaming(p)
    number = _accesses(p)
    access_bytes = p.access.width * p.itemsize * p.operands
    lag = _lag(p, number * access_bytes)
    if lag < 2:
        return f"{number * access_bytes} bytes of a statistic: too much for the cache"
    input_bytes = p.geometry.size * p.itemsize * p.operands
    if (
        p.geometry.batch * p.geometry.group <= 2 * lag
        or input_bytes < _CACHED_LEAST * p.device.cache
    ):
        return "little enough for the cache to have most of it between two launches"
    room = p.device.shared_per_multiprocessor // _CACHED_BLOCKS - 2 * _RESERVED_SHARED
    tiles = max(1, min(_CACHED_PART_BYTES, room) // (a_tile * access_bytes))
    parts = min(_MOST_PARTS, _ceil_div(number, tiles * a_tile))
    share = _ceil_div(_ceil_div(number, parts), a_tile) * a_tile
    parts = _ceil_div(number, share)
    built = _built(
        p, "cached", resident=False, threads=threads, group=threads, across=across,
        share=min(share, number), parts=parts, cluster=1,
    )  # fmt: skip
    held = _TICKET_BYTES + _ceil_div(share, a_tile) * a_tile * access_bytes
    return built._replace(shared=built.shared + held, ahead=lag * parts)


def _stream(p: _Problem) -> LaunchPlan | str:
    """Several blocks for a channel, each of which takes a part of it."""
    if _gradients(p) and p.span >= _LONG_SPAN:
        p = _apart(p)
    if p.geometry.inner == 1 and p.operands == 1:  # the second sweep has a plan of its own
        p = p._replace(writes=False)
    threads, across, a_tile = _streaming(p)
    number = _accesses(p)
    # Whole tiles, except for the last part.
    if _gradients(p):  # one, of whose elements a block has room for gradients
        share = a_tile // _unit(p) * _unit(p)
    elif p.span:
        parts = min(_MOST_PARTS, _ceil_div(number, _ROW_PART_TILES * a_tile))
        share = _ceil_div(_ceil_div(number, parts), a_tile) * a_tile
    else:
        each = _COLUMN_BLOCKS if p.geometry.inner == 1 else _BLOCKS_PER_MULTIPROCESSOR
        positions = across * p.access.width if p.geometry.inner == 1 else 1
        groups = p.geometry.batch * _ceil_div(p.geometry.group, positions)
        wanted = _ceil_div(each * p.device.multiprocessors, groups)
        parts = max(1, min(wanted, _MOST_PARTS, _ceil_div(number, a_tile)))
        share = _ceil_div(_ceil_div(number, parts), a_tile) * a_tile
    return _built(
        p, "stream", resident=False, threads=threads, group=threads, across=across,
        share=min(share, number), parts=_ceil_div(number, share), cluster=1,
        pieces=1 if p.geometry.inner == 1 else 0,  # neighbouring columns lie in the same rows
    )  # fmt: skip


def _scattered(p: _Problem) -> LaunchPlan | str:
    """Blocks of a tile each, one after another as they lie in memory, whatever statistic they have.

    Memory is fastest where what is under way lies together.
    """
    across = _across(p, _SCATTERED_ROW_BYTES, False)
    windows = p.access.windows
    number = _accesses(p)
    a_tile = _STREAM_THREADS // across * _tile(p)
    pieces = 1
    if p.geometry.inner == 1:
        share = min(_SCATTERED_COLUMN_TILES * a_tile, number)
    elif windows > a_tile // 2:  # parts of a run
        pieces = _ceil_div(windows, a_tile)
        share = _ceil_div(windows, pieces)
    else:
        share = min(a_tile // windows * windows, number)
    threads = _power_of_two(_ceil_div(share * across, _tile(p)))
    threads = max(_LEAST_THREADS, min(_STREAM_THREADS, threads))
    parts = _ceil_div(_ceil_div(number, share), pieces) * pieces
    positions = across * p.access.width if p.geometry.inner == 1 else 1
    return _built(
        p, "scattered", resident=False, threads=threads, group=threads, across=across,
        share=share, parts=parts, cluster=1, pieces=pieces,
    )._replace(shared=positions * _COEFFICIENT_BYTES[p.operands])  # fmt: skip


#: What is tried for statistics and transform together, in this order.
CANDIDATES: tuple[_Candidate, ...] = (
    _warp,
    _block,
    _cluster,
    _whole_block,
    _whole_cluster,
    _cached,
    _stream,
)

#: The same for rows: a block that is alone does not have to meet others twice a row.
ROW_CANDIDATES: tuple[_Candidate, ...] = (
    _warp,
    _block,
    _whole_block,
    _cluster,
    _whole_cluster,
    _stream,
)

#: What is tried for kernels that read everything once anyway.
SWEEPS: tuple[_Candidate, ...] = (_warp, _stream)

#: And of these for such that make nothing but their output.
ELEMENTWISE: tuple[_Candidate, ...] = (_warp, _scattered)


def _problem(
    geometry: Geometry, dtype: np.dtype, operands: int, lie: Alignment, device: Device,
    centered: bool = True, kind: int = 0,
) -> _Problem:  # fmt: skip
    geometry, span = _canonical(geometry)
    access = _access(geometry, dtype.itemsize, lie, span > 0)
    if operands == 3 and geometry.inner == 1:  # five numbers of a column take ten registers
        access = access._replace(width=min(access.width, 4))
    return _Problem(
        geometry, span, dtype.name, dtype.itemsize, operands, access, device, centered, kind
    )


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
    geometry: Geometry, dtype: np.dtype, operands: int, lie: Alignment, device: Device,
    centered: bool = True, kind: int = 0,
) -> LaunchPlan:  # fmt: skip
    """Plan for statistics and transform of a geometry of at least one element.

    ``operands`` is the number of arrays that are read: 1 forward, 2 backward, 3 in a double
    backward pass. Statistics are ``centered`` about the mean, or about zero. Parameters of rows
    are of a ``kind`` (`statistics.parameter`).
    """
    problem = _problem(geometry, dtype, operands, lie, device, centered, kind)
    return _first(ROW_CANDIDATES if problem.span > 0 else CANDIDATES, problem)


@lru_cache(maxsize=4096)
def sweep(
    geometry: Geometry, dtype: np.dtype, operands: int, lie: Alignment, device: Device,
    centered: bool = True,
) -> LaunchPlan:  # fmt: skip
    """Plan for a kernel that reads everything once, of a geometry of at least one element.

    Statistics are known: no channel needs another.
    """
    return _first(SWEEPS, _problem(geometry.apart(), dtype, operands, lie, device, centered))


@lru_cache(maxsize=4096)
def elementwise(
    geometry: Geometry, dtype: np.dtype, operands: int, lie: Alignment, device: Device,
    centered: bool = True,
) -> LaunchPlan:  # fmt: skip
    """Plan for a kernel that reads everything once and makes nothing but as much output.

    It takes a geometry of at least one element. Statistics are known: no channel needs another,
    and `geometry.apart()` says so where every channel has its own.
    """
    return _first(ELEMENTWISE, _problem(geometry, dtype, operands, lie, device, centered))


@lru_cache(maxsize=4096)
def adding(columns: int, dtype: np.dtype, numbers: int) -> Launch:
    """How to add up so many columns of numbers, in an accumulator type, over rows (add_up.cu)."""
    threads = _ADDING_THREADS
    options = {
        f"ELEMENT_{dtype.name.upper()}": 1,
        "WIDE": int(numbers >= _WIDE_FROM),
        "THREADS": threads,
        "GROUP": threads,
        **dict.fromkeys(
            ("WIDTH", "ALIGNED", "TILE", "ACROSS", "CLUSTER", "AT_ONCE", "CENTERED", "SHELVES"), 1
        ),
        **dict.fromkeys(("COLUMNS", "HEADER", "MERGED", "SPANS", "PARAMETERS"), 0),
    }
    return Launch(_macros(options), _ceil_div(columns, 32), threads, threads * 16)
