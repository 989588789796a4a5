"""How the CPU kernels cut an array into pieces: pure functions of its geometry.

Two families of kernels cover every geometry.

*Segments* serve a long ``inner``: a channel is ``outer`` runs of ``inner``
contiguous elements, and a run is vectorized along itself.

*Columns* serve a short ``inner`` (1 in channels-last data): a row of
``group * inner`` contiguous positions is vectorized across positions, each
with statistics of its own that are merged into channels at the end. Short
rows are folded: several are taken as one, in whole cache lines.

Either way the data is cut three times, and nothing of it depends on the number
of threads, so neither do the bits of the result:

- a *chunk* is summed in the accumulator type and small enough to be read
  twice from a near cache;
- a *part* folds its chunks in order, in float64;
- a channel folds its parts in order, in float64.

A channel (or block of channels) whose parts together fit the cache is *resident*:
one task does its statistics and its transform while the data is near. Others
stream: the parts of all channels are the tasks, once for the statistics and
once, in reverse, for the transform.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple

from ..geometry import Geometry

__all__ = ["Columns", "Segments", "plan"]

# Runs are vectorized across positions where they are short, or not long and
# there are rows enough to spread the cost of a position's own statistics over.
# Measured on Zen 5: either family takes the same time at about these lengths.
_SHORT_RUN = 32
_MIDDLING_RUN = 256
_MANY_ROWS = 16

# Elements summed in the accumulator type before float64 takes over; a chunk of
# 4096 float32 is 16 KiB, half of a 32 KiB first-level cache.
_SEGMENT_CHUNK = 4096

# A chunk of columns is read twice from the second-level cache: 128 KiB of it,
# but no more than 256 rows, which are added up one after another.
_COLUMN_CHUNK_BYTES = 128 << 10
_COLUMN_CHUNK_ROWS = 256

# Positions of a block of columns: at least a cache line of them, else half of
# each line fetched is wasted; at most 1024, whose working arrays fit 32 KiB.
_LEAST_BLOCK_BYTES = 64
_MOST_BLOCK_POSITIONS = 1024
_FOLDED_POSITIONS = 512

# A part is worth a task of its own from about 256 KiB on; 32 parts a channel
# keep the memory for partial results under 1 KiB a channel.
_PART_BYTES = 256 << 10
_MOST_PARTS = 32

# What one task may keep near. Runs come back fast from a shared third-level
# cache too; narrow columns, a cache line here and there, only from the second.
_RESIDENT_RUNS_BYTES = 2 << 20
_RESIDENT_COLUMNS_BYTES = 768 << 10

# Less than this is not worth a task of its own: taking one is an atomic operation.
_TASK_BYTES = 32 << 10


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Segments(NamedTuple):
    """Channels of ``outer`` runs of ``inner`` elements."""

    tasks: int  # when every part is a unit of work
    resident_tasks: int  # when every channel is one
    resident: bool
    task_units: int  # units of work in a task
    chunk_rows: int  # runs in a chunk; 1 where a run is cut into several
    chunk_length: int  # elements of a run in a chunk
    part_chunks: int  # chunks in a part
    parts: int  # parts in a channel

    @property
    def arguments(self) -> tuple[int, ...]:
        """What the kernels need to know."""
        return self[3:]


class Columns(NamedTuple):
    """Rows of ``fold * group * inner`` positions, taken in blocks of channels."""

    tasks: int  # when every part of a block is one
    resident_tasks: int  # when every block is one
    resident: bool
    fold: int  # rows of the array taken as one
    rows: int  # such rows
    tail_rows: int  # rows of the array left over, fewer than fold
    chunk_rows: int
    part_rows: int
    parts: int
    block_channels: int

    @property
    def arguments(self) -> tuple[int, ...]:
        """What the kernels need to know."""
        return self[3:]


def _segments(geometry: Geometry, itemsize: int, operands: int) -> Segments:
    outer, inner = geometry.outer, geometry.inner
    pieces = _ceil_div(inner, _SEGMENT_CHUNK)
    if pieces > 1:
        # Pieces of equal length, whole 64-element steps of the vector loop.
        chunk_rows, chunk_length = 1, _ceil_div(_ceil_div(inner, pieces), 64) * 64
        pieces = _ceil_div(inner, chunk_length)
    else:
        chunk_rows, chunk_length = min(outer, _SEGMENT_CHUNK // inner), inner
    chunks = _ceil_div(outer, chunk_rows) * pieces
    channel_bytes = geometry.count * itemsize
    part_chunks = _ceil_div(chunks, min(_MOST_PARTS, _ceil_div(channel_bytes, _PART_BYTES)))
    parts = _ceil_div(chunks, part_chunks)
    task_units = max(1, _TASK_BYTES // channel_bytes)
    return Segments(
        tasks=_ceil_div(geometry.statistics * parts, task_units),
        resident_tasks=_ceil_div(geometry.statistics, task_units),
        resident=channel_bytes * operands <= _RESIDENT_RUNS_BYTES,
        task_units=task_units,
        chunk_rows=chunk_rows,
        chunk_length=chunk_length,
        part_chunks=part_chunks,
        parts=parts,
    )


def _columns(geometry: Geometry, itemsize: int, operands: int) -> Columns:
    batch, outer, group, inner = geometry
    row_positions = group * inner
    row_bytes = row_positions * itemsize
    # The fewest channels whose positions fill a cache line, and how many fit the cache.
    least = min(group, _ceil_div(_LEAST_BLOCK_BYTES, inner * itemsize))
    fitting = _RESIDENT_COLUMNS_BYTES // (outer * inner * itemsize * operands)
    resident = fitting >= least
    if resident and fitting < group:
        fold = 1
        most = min(_MOST_BLOCK_POSITIONS // inner, fitting)
        block_channels = max(least, min(group, most) // least * least)
    else:
        # Whole rows: several as one, of whole cache lines, where they are short.
        unit = 64 // gcd(64, row_bytes)
        fold = min(outer, _ceil_div(_FOLDED_POSITIONS, row_positions * unit) * unit)
        fold = 1 if row_positions >= _FOLDED_POSITIONS else fold
        block_channels = min(group, max(least, _MOST_BLOCK_POSITIONS // inner // least * least))
        if fold > 1:
            block_channels = group
    rows, tail_rows = divmod(outer, fold)
    block_bytes = fold * block_channels * inner * itemsize
    chunk_rows = max(1, min(rows, _COLUMN_CHUNK_ROWS, _COLUMN_CHUNK_BYTES // block_bytes))
    parts = min(_MOST_PARTS, _ceil_div(rows * block_bytes, _PART_BYTES))
    part_rows = _ceil_div(_ceil_div(rows, parts), chunk_rows) * chunk_rows
    parts = _ceil_div(rows, part_rows)
    blocks = batch * _ceil_div(group, block_channels)
    return Columns(
        tasks=blocks * parts,
        resident_tasks=blocks,
        resident=resident,
        fold=fold,
        rows=rows,
        tail_rows=tail_rows,
        chunk_rows=chunk_rows,
        part_rows=part_rows,
        parts=parts,
        block_channels=block_channels,
    )


@lru_cache(maxsize=1024)
def plan(geometry: Geometry, itemsize: int, operands: int) -> Segments | Columns:
    """Plan for a geometry of at least one element.

    ``operands`` is the number of arrays of that size that a channel's two
    sweeps read: 1 in a forward pass, 2 in a backward pass.
    """
    _, outer, _, inner = geometry
    if inner < _SHORT_RUN or (inner < _MIDDLING_RUN and outer >= _MANY_ROWS):
        return _columns(geometry, itemsize, operands)
    return _segments(geometry, itemsize, operands)


def stays_near(cut: Segments | Columns, threads: int) -> bool:
    """Whether to do whole channels as tasks: they fit the cache and keep the threads busy."""
    return cut.resident and (threads == 1 or cut.resident_tasks >= 4 * threads or cut.parts == 1)
