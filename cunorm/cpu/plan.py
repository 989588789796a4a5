"""How the CPU kernels cut an array into pieces: pure functions of its geometry.

Three families of kernels cover every geometry; a fourth serves some of them in sweeps that sum
nothing. A *channel* is a group of one sample.

*Segments* serve a long ``inner``: a channel is ``outer`` runs of ``inner``
contiguous elements, and a run is vectorized along itself.

*Columns* serve a short ``inner`` (1 in channels-last data): a row of
``group * inner`` contiguous positions is vectorized across positions, each
with statistics of its own that are merged into channels at the end. Short
rows are folded: several are taken as one, in whole cache lines where there are enough.

*Rows* serve statistics of contiguous elements in which the parameters change every
few elements, or with every one: layer norm. A row is vectorized along itself, beside
the parameters.

*Runs* serve a sweep that sums nothing and whose output stays near: whole runs of single
channels, each vectorized along itself, in memory order. Blocks of columns whose output
stays near are written by such runs, too, once they are summed.

Either way the data that is summed is cut three times, and nothing of it depends on the number
of threads, so neither do the bits of the result (a *block* of segments, whose
channels are read in turns, does: it has a quarter of a thread's share at most):

- a *chunk* is summed in the accumulator type and small enough to be read
  once more from a near cache;
- a *part* folds its chunks in order, in float64;
- a channel folds its parts in order, in float64.

A channel (or block of channels) whose parts together fit the cache is *resident*:
one task does its statistics and its transform while the data is near, unless a
sweep over runs after columns is faster. Others stream: the parts of all channels are the
tasks, once for the statistics and once, in reverse, for the transform, of segments in
stretches of memory.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple

from ..geometry import Geometry
from .memory import last_level_cache, second_level_cache
from .threads import get_num_threads
from .vectors import REGISTER_BYTES

__all__ = [
    "FETCHED_BLOCK_BYTES",
    "SLOW_THIRD_LEVEL",
    "Columns",
    "Rows",
    "Runs",
    "Segments",
    "plan",
]

# A second-level cache of 2 MB is a server's whose third level is slow, and takes only what the
# second drops. Measured on an Intel Xeon with 2 MB, and on Zen 3 to 5 with less.
_SECOND_LEVEL_BYTES = second_level_cache()
SLOW_THIRD_LEVEL = _SECOND_LEVEL_BYTES >= 2 << 20

# Runs are vectorized across positions where they are short, or not long and
# there are rows enough to spread the cost of a position's own statistics over.
# Measured on Zen 4 and 5: either family takes the same time at about these lengths. With vectors of
# 32 bytes (measured on Zen 3, in float32) runs pay from half that length on in a backward pass, but
# of half types; on that Xeon much earlier.
_SHORT_RUN = 32
_SHORT_ONLY_RUN = 12  # of a channel: there are no rows to spread anything over
_SHORT_RUN_BYTES, _SOME_ROWS = 128, 4
_MIDDLING_RUN = _MIDDLING_HALF_RUN = (128, 256, 256, 256)  # by operands
if SLOW_THIRD_LEVEL:
    _MIDDLING_RUN, _MIDDLING_HALF_RUN = (128, 48, 48, 256), (128, 80, 128, 256)
elif REGISTER_BYTES < 64:
    _MIDDLING_RUN = (128, 256, 128, 256)
_MANY_ROWS = 16

# A streamed sweep that sums nothing has no use for positions where runs are as long as this,
# or, of 16-bit elements, a multiple of it, which their vector loops take in whole steps; but if
# there are many rows of few positions, whose numbers a first-level cache holds.
_TRANSFORMED_RUN = 64
_FEW_POSITIONS, _ROWS_OF_FEW = 2048, 64

# Where nothing is streamed, numbers of channels are worked out beforehand, and runs pay in place
# of columns from a vector's length on, or _SHORT_RUN if there are many rows or, of half types,
# _HALF_ROWS (measured on Zen 4). What is left of a run
# behind its last vector is written one element after another: if there are many rows, or of half
# types, it may be 1/16 of the run; of half types and many rows no more than a third may be left
# behind the last two vectors, too. Runs so long that a sweep takes them as segments anyway may
# leave what they like. Measured on Zen 3.
# Longer runs are cut; and of more channels the caller is not to work out numbers all alone.
_VECTOR, _HALF_ROWS = 16, 8
_LONGEST_RUN = 4096
_MOST_CHANNELS = 4096

# Columns of an x so large are summed first, and then a sweep over runs in memory order writes the
# output, if that stays near: faster than to write it block of columns by block of columns (measured
# on Zen 3, in two threads), unless what a block has left in the second level comes slowly from
# the third.
_APART_BYTES = 1 << 62 if SLOW_THIRD_LEVEL else 3 << 20

# Runs shorter than this that share a statistic, but no parameters, are taken as rows, or as
# columns if they are not neighbours. A forward pass of rows writes whole cache lines where runs
# begin and end within them; a backward pass keeps gradients for every element of a row near.
_SHORT_SPAN = (256, 256, 64, 64)  # by operands
_SHORT_COLUMN = 48

# On that Xeon whole lines pay in outputs that do not stay near, as those of small samples mostly
# do; the number of samples must not matter.
_SPAN_NEAR, _SMALL_SAMPLE_BYTES = 64, 256 << 10 if SLOW_THIRD_LEVEL else 0

# Elements summed in the accumulator type before float64 takes over; a chunk of
# 4096 float32 is 16 KiB, half of a 32 KiB first-level cache.
_SEGMENT_CHUNK = 4096

# A chunk of columns of one operand is 256 KiB, for which a sample of its rows is read first, of
# others 128 KiB, but no more than 256 rows, which are added up one after another.
_COLUMN_CHUNK_BYTES = tuple(size << 10 for size in (128, 256, 128, 128))  # by operands
_COLUMN_CHUNK_ROWS = 256

# Positions of a block of columns: at least a cache line of them, else half of
# each line fetched is wasted; at most 1024, whose working arrays fit 32 KiB, but in far arrays.
_LEAST_BLOCK_BYTES = 64
_MOST_BLOCK_POSITIONS = 1024
_FOLDED_POSITIONS = 512

# Statistics of samples so large, which do not stay near, take four rows at a time, each from a page
# of its own: the hardware, which fetches ahead, reads a page on and on. Measured on Zen 3.
_PAGED_BYTES = 16 << 20
_PAGE_BYTES = 4 << 10

# Samples of so many bytes, worth several threads but too small for several parts, are cut into
# four blocks, but of so many positions at least, unless they are as many themselves.
_SHARED_BYTES = 128 << 10
_SHARED_BLOCKS = 4
_SHARED_POSITIONS = 256

# A position costs about as much as so many of its elements: rows are folded as far as so many
# are left, or to so many positions.
_FOLDED_ROWS = 16
_LEAST_POSITIONS = 64

# A part with partial results is worth a task of its own from about 256 KiB on, one without
# from 64 KiB (but parts are whole chunks); 32 parts a channel keep the memory for partial
# results under 1 KiB a channel. A task of columns spreads its channels' numbers to their
# positions first; 256 of them keep threads busy enough.
_PART_BYTES = 256 << 10
_SWEEP_BYTES = 64 << 10
_MOST_PARTS = 32
_ENOUGH_TASKS = 256

# What one task may keep near. Blocks of runs, and whole samples, come back fast from a shared
# third-level cache too, channels of runs from half a processor's share of it, unless it is slow;
# narrow columns, a cache line here and there, only from the second.
_RESIDENT_CHANNEL_BYTES = min(max(2 << 20, last_level_cache()[1] // 2), 12 << 20)
if SLOW_THIRD_LEVEL:
    _RESIDENT_CHANNEL_BYTES = _SECOND_LEVEL_BYTES // 2 * 3
_RESIDENT_RUNS_BYTES = 2 << 20
_RESIDENT_COLUMNS_BYTES = 768 << 10

# A block of several channels of runs; and what is fetched while a block is written: the next one,
# if it is not larger. Where the third level is slow, both are to stay in the second.
_BLOCK_BYTES = _SECOND_LEVEL_BYTES // 4 if SLOW_THIRD_LEVEL else 2 << 20
FETCHED_BLOCK_BYTES = _BLOCK_BYTES if SLOW_THIRD_LEVEL else 1 << 62  # any

# Channels smaller than this are not left to threads that would write neighbouring runs of them in
# step: these take cache lines from each other. Where the third level is slow (measured on an Intel
# Xeon) it costs more to write what another thread has summed.
_IN_STEP_BYTES = 128 << 10 if SLOW_THIRD_LEVEL else 1 << 62  # any

# Rows a power of two apart share few places in a second-level cache: of so many ways, in each
# of which addresses so many bytes apart have the same place. Wider slices come back fast from
# the next cache, unless that is slow.
_WAYS = 16
_WAY_BYTES = (128 if SLOW_THIRD_LEVEL else 64) << 10
_WIDE_BYTES = 2 << 10 if SLOW_THIRD_LEVEL else 512

# Slices of rows narrower than this come from memory at half the speed of whole rows, which are
# quicker read twice where a sample is no more near after one sweep, being larger than this.
_SLICE_BYTES = 1 << 10
_NEAR_BYTES = 8 << 20

# The gradients of a row's parameters are added up in blocks of samples: 64 to keep many
# threads busy, fewer where their partial sums would be more than 1/16 of the data, but 16 tasks
# at least. Chains of additions are no longer than in columns. Where a block is so few samples
# that its sums are half as much as the data, rows of so many pieces are read twice instead: a task
# then takes the same piece of all rows, in blocks as large as may be.
_MOST_BLOCKS = 64
_LEAST_BLOCK_TASKS = 16
_BLOCK_SHARE = 16
_MOST_BLOCK_SAMPLES = 256
_TWICE_PIECES = 4

# Blocks of samples whose rows are in pieces have so many bytes: they stay in a near cache.
_APART_BLOCK_BYTES = 64 << 10

# Runs of neighbouring channels are read in turns, up to so much memory on end.
_STRETCH_BYTES = 32 << 10

# Less than this is not worth a task of its own: taking one is an atomic operation.
_TASK_BYTES = 32 << 10

# A sweep in memory order has so many tasks for each thread, or more that are as large as a part: to
# begin one costs about a tenth of a microsecond. Measured on an Intel Xeon.
_THREAD_TASKS = 4


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Segments(NamedTuple):
    """Channels of ``outer`` runs of ``inner`` elements."""

    tasks: int  # when every part of a block is one
    resident_tasks: int  # when every block is one
    resident: bool
    block: int  # statistics in a block
    chunk_rows: int  # runs in a chunk; 1 where a run is cut into several
    chunk_length: int  # elements of a run in a chunk
    part_chunks: int  # chunks in a part
    parts: int  # parts in a channel

    @property
    def arguments(self) -> tuple[int, ...]:
        """What the kernels need to know."""
        return self[3:]


class Columns(NamedTuple):
    """Rows of ``fold * group * inner`` positions, taken in blocks of channels.

    Of a merged geometry: the members of a statistic are one channel.
    """

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


class Rows(NamedTuple):
    """Contiguous statistics of ``members * inner`` elements."""

    tasks: int  # when every piece of a row is one
    resident_tasks: int  # when every block of samples of a statistic is one
    resident: bool
    chunk_length: int  # elements of a chunk, and of a piece of a row
    pieces: int  # of a row
    block: int  # samples in a block
    blocks: int

    @property
    def arguments(self) -> tuple[int, ...]:
        """What the kernels need to know."""
        return self[3:]


class Runs(NamedTuple):
    """Whole runs of ``inner`` elements, each of a single channel."""

    tasks: int
    total: int
    group: int  # neighbouring runs, of a channel each
    inner: int
    runs: int  # of a task

    @property
    def arguments(self) -> tuple[int, ...]:
        """What the kernels need to know."""
        return self[1:]


def _pieces(length: int) -> tuple[int, int]:
    """Number and length of the chunks that a run too long for one is cut into."""
    # Of equal length, whole 64-element steps of the vector loop.
    pieces = _ceil_div(length, _SEGMENT_CHUNK)
    chunk = length if pieces == 1 else _ceil_div(_ceil_div(length, pieces), 64) * 64
    return _ceil_div(length, chunk), chunk


@lru_cache(maxsize=1024)
def rows_plan(geometry: Geometry, itemsize: int, operands: int) -> Rows:
    """Plan for contiguous statistics, or short ones in pieces, with parameters of elements' own."""
    batch, outer, group, inner, members, _ = geometry
    length = members * inner
    pieces, chunk_length = _pieces(length)
    number = group // members
    row_bytes = outer * length * itemsize
    sums_bytes = 2 * max(4, itemsize)  # two in the accumulator type for an element of a piece
    fitting = batch * outer * itemsize // (sums_bytes * _BLOCK_SHARE)
    blocks = min(_MOST_BLOCKS, max(_ceil_div(_LEAST_BLOCK_TASKS, number), fitting))
    blocks = min(blocks, _ceil_div(batch * row_bytes, _TASK_BYTES), batch)
    block = min(_ceil_div(batch, blocks), _MOST_BLOCK_SAMPLES)
    if outer > 1:  # rows of one sample have cache lines in common
        least = _ceil_div(sums_bytes * _BLOCK_SHARE, outer * itemsize)
        near = _APART_BLOCK_BYTES // (number * row_bytes)
        block = min(batch, max(least, near), _MOST_BLOCK_SAMPLES)
    twice = operands == 2 and pieces >= _TWICE_PIECES and block * itemsize <= 2 * sums_bytes
    resident = row_bytes * operands <= _RESIDENT_RUNS_BYTES and not twice
    if not resident:  # blocks are no tasks
        block = min(batch, _MOST_BLOCK_SAMPLES)
    blocks = _ceil_div(batch, block)
    return Rows(
        tasks=batch * number * pieces,
        resident_tasks=number * blocks,
        resident=resident,
        chunk_length=chunk_length,
        pieces=pieces,
        block=block,
        blocks=blocks,
    )


@lru_cache(maxsize=1024)
def stretches(geometry: Geometry, itemsize: int, threads: int) -> tuple[int, int]:
    """(tasks, elements of a task) for a sweep over segments in memory order."""
    elements = geometry.batch * geometry.outer * geometry.group * geometry.inner
    line = 64  # elements: whole cache lines
    share = min(elements * itemsize // (_THREAD_TASKS * threads), _PART_BYTES)
    stretch = max(_SWEEP_BYTES // itemsize, share // itemsize, _ceil_div(elements, _ENOUGH_TASKS))
    stretch = _ceil_div(stretch, line) * line
    return _ceil_div(elements, stretch), stretch


@lru_cache(maxsize=1024)
def _segments(geometry: Geometry, itemsize: int, operands: int, threads: int) -> Segments:
    outer, inner, members = geometry.outer, geometry.inner, geometry.members
    pieces, chunk_length = _pieces(inner)
    chunk_rows = 1 if pieces > 1 else min(outer, _SEGMENT_CHUNK // inner)
    chunks = _ceil_div(outer, chunk_rows) * pieces
    channel_bytes = outer * inner * itemsize
    part_chunks = _ceil_div(chunks, min(_MOST_PARTS, _ceil_div(channel_bytes, _PART_BYTES)))
    parts = _ceil_div(chunks, part_chunks)
    statistic_bytes = channel_bytes * members
    block = _TASK_BYTES // statistic_bytes
    if outer > 1:
        wide = _ceil_div(_STRETCH_BYTES, members * inner * itemsize)
        fitting = _BLOCK_BYTES // (statistic_bytes * max(1, operands))
        block = max(block, min(wide, fitting, geometry.statistics // (4 * threads)))
    block = max(1, block)
    blocks = _ceil_div(geometry.statistics, block)
    # Two blocks of a part whose runs would be written in step are one thread's, more are streamed
    # if every one were a thread's.
    beside = geometry.batch == 1 and outer > 1 and parts == 1 and statistic_bytes < _IN_STEP_BYTES
    if beside and blocks == 2:
        block, blocks = geometry.statistics, 1
    in_step = beside and 1 < blocks <= threads
    return Segments(
        tasks=blocks * parts,
        resident_tasks=blocks,
        resident=statistic_bytes * operands <= _RESIDENT_CHANNEL_BYTES and not in_step,
        block=block,
        chunk_rows=chunk_rows,
        chunk_length=chunk_length,
        part_chunks=part_chunks,
        parts=parts,
    )


def _columns(geometry: Geometry, itemsize: int, operands: int) -> Columns:
    batch, outer, group, inner = geometry[:4]
    row_positions = group * inner
    row_bytes = row_positions * itemsize
    # The fewest channels whose positions fill a cache line, and how many fit the cache.
    least = min(group, _ceil_div(_LEAST_BLOCK_BYTES, inner * itemsize))
    fitting = _RESIDENT_COLUMNS_BYTES // (outer * inner * itemsize * max(1, operands))
    whole = outer * row_bytes * operands <= _RESIDENT_RUNS_BYTES  # a sample is one run
    narrow = least <= fitting < group and not whole
    places = _WAYS * _WAY_BYTES // gcd(row_bytes, _WAY_BYTES)
    crowded = fitting * inner * itemsize < _WIDE_BYTES and outer * operands > places
    far = fitting * inner * itemsize < _SLICE_BYTES and outer * row_bytes * operands > _NEAR_BYTES
    if narrow and (crowded or far):
        narrow, fitting = False, 0
    resident = fitting >= least or whole
    if narrow and operands:
        fold = 1
        most = min(_MOST_BLOCK_POSITIONS // inner, fitting)
        whole_channels = block_channels = max(least, min(group, most) // least * least)
    else:
        # Whole rows: several as one, of whole cache lines if that can be, where they are short.
        unit = 64 // gcd(64, row_bytes)
        fold = 1
        if row_positions < _FOLDED_POSITIONS:
            fold = _ceil_div(_FOLDED_POSITIONS, row_positions * unit) * unit
        if operands == 1 and not resident and outer * row_bytes > _PAGED_BYTES:
            fold = max(fold, _PAGE_BYTES // (row_bytes * unit) * unit)
        few = max(outer // _FOLDED_ROWS, _ceil_div(_LEAST_POSITIONS, row_positions))
        fold = min(fold, few, outer)
        fold = fold // unit * unit or fold
        most = _MOST_BLOCK_POSITIONS
        whole_channels = min(group, max(least, most // inner // least * least))
        if (
            operands
            and batch < _SHARED_BLOCKS
            and _SHARED_BYTES <= outer * row_bytes <= _PART_BYTES
        ):
            most = min(most, max(_SHARED_POSITIONS, row_positions // _SHARED_BLOCKS))
        block_channels = min(group, max(least, most // inner // least * least))
        if fold > 1:
            whole_channels = block_channels = group
    rows, tail_rows = divmod(outer, fold)
    block_bytes = fold * block_channels * inner * itemsize
    # Chunks are those of blocks that nobody shares, and parts those of a sample alone: its bits are
    # the same among others.
    chunk_bytes = fold * whole_channels * inner * itemsize
    chunk_rows = max(1, min(rows, _COLUMN_CHUNK_ROWS, _COLUMN_CHUNK_BYTES[operands] // chunk_bytes))
    blocks = _ceil_div(group, block_channels)
    parts = min(_MOST_PARTS, _ceil_div(_ENOUGH_TASKS, blocks))
    part_bytes = _PART_BYTES if operands else _SWEEP_BYTES
    parts = min(parts, _ceil_div(rows * block_bytes, part_bytes))
    part_rows = _ceil_div(_ceil_div(rows, parts), chunk_rows) * chunk_rows
    parts = _ceil_div(rows, part_rows)
    return Columns(
        tasks=batch * blocks * parts,
        resident_tasks=batch * blocks,
        resident=resident,
        fold=fold,
        rows=rows,
        tail_rows=tail_rows,
        chunk_rows=chunk_rows,
        part_rows=part_rows,
        parts=parts,
        block_channels=block_channels,
    )


def plan(
    geometry: Geometry, itemsize: int, operands: int, centered: bool = True
) -> Segments | Columns | Rows:
    """Plan for a geometry of at least one element.

    ``operands`` is the number of arrays of that size that two sweeps read: 1 in a
    forward pass, 2 in a backward pass, 3 in a double one, 0 if there is but one sweep.
    Statistics about zero (not ``centered``) are those of rows; those of single channels
    never are.
    """
    return _plan(geometry, itemsize, operands, centered, get_num_threads())


@lru_cache(maxsize=1024)
def _plan(
    geometry: Geometry, itemsize: int, operands: int, centered: bool, threads: int
) -> Segments | Columns | Rows:
    _, outer, group, inner, members, _ = geometry
    if outer == 1:
        span = _SHORT_SPAN[operands]
        if operands == 1 and group * inner * itemsize < _SMALL_SAMPLE_BYTES:
            span = _SPAN_NEAR
        if inner < span and (members > 1 or not centered):
            return rows_plan(geometry, itemsize, operands)
        if inner >= _SHORT_ONLY_RUN:
            return _segments(geometry, itemsize, operands, threads)
    short = inner < _SHORT_COLUMN
    if members == 1:
        middling = (_MIDDLING_RUN if itemsize > 2 else _MIDDLING_HALF_RUN)[operands]
        short = (
            inner < _SHORT_RUN
            or (inner * itemsize <= _SHORT_RUN_BYTES and outer >= _SOME_ROWS)
            or (inner < middling and outer >= _MANY_ROWS)
        )
    if short:
        return _columns(geometry.merged(), itemsize, operands)
    return _segments(geometry, itemsize, operands, threads)


def _whole_runs(geometry: Geometry, itemsize: int, cut: Segments | Columns | Rows) -> Runs | None:
    """Plan for a sweep whose output stays near, where that pays more than what is `cut`."""
    batch, outer, group, inner, members, _ = geometry
    few = outer < _MANY_ROWS
    vectors = outer < (_MANY_ROWS if itemsize > 2 else _HALF_ROWS)
    long = inner >= (_VECTOR if vectors else _SHORT_RUN)
    whole = inner % _VECTOR * _VECTOR <= inner  # most of a run is vectors
    if itemsize > 2:
        whole = whole or few
    elif not few:
        whole = whole and inner % (2 * _VECTOR) * 3 <= inner
    whole = whole or inner >= _MIDDLING_RUN[0]
    pays = isinstance(cut, Segments) or (long and whole)
    single = batch == members == 1 and group <= _MOST_CHANNELS
    if not single or inner > _LONGEST_RUN or not pays:
        return None
    runs = max(1, stretches(geometry, itemsize, get_num_threads())[1] // inner)
    total = outer * group
    return Runs(_ceil_div(total, runs), total, group, inner, runs)


def transform_plan(
    geometry: Geometry, itemsize: int, streaming: bool
) -> Segments | Columns | Rows | Runs:
    """Plan for one sweep that sums nothing; `streaming`, if its output passes the caches."""
    cut = plan(geometry, itemsize, 0)
    if not streaming and (runs := _whole_runs(geometry, itemsize, cut)):
        return runs
    inner = geometry.inner
    whole = inner >= _TRANSFORMED_RUN and (itemsize > 2 or inner % _TRANSFORMED_RUN == 0)
    few = geometry.outer >= _ROWS_OF_FEW and geometry.group * inner <= _FEW_POSITIONS
    if isinstance(cut, Columns) and whole and not few:
        return _segments(geometry, itemsize, 0, get_num_threads())
    return cut


def gradient_plan(geometry: Geometry, itemsize: int, streaming: bool) -> Segments | Columns | Runs:
    """Plan for dx from sums that are known; `streaming`, if it passes the caches."""
    cut = plan(geometry, itemsize, 2)
    assert not isinstance(cut, Rows)
    if not streaming and (runs := _whole_runs(geometry, itemsize, cut)):
        return runs
    return cut


def by_runs(
    geometry: Geometry, itemsize: int, cut: Segments | Columns | Rows, streaming: bool
) -> bool:
    """Whether, once columns are summed, whole runs are written rather than rows of positions."""
    if streaming or not isinstance(cut, Columns):
        return False
    return _whole_runs(geometry, itemsize, cut) is not None


def sweeps_apart(geometry: Geometry, itemsize: int, runs: bool) -> bool:
    """Whether to sum all of x before anything is written, if that is done `by_runs`."""
    return runs and geometry.size * itemsize >= _APART_BYTES


def statistics_plan(geometry: Geometry, itemsize: int) -> Segments | Columns:
    """Plan for mean and variance of the merged geometry, by kernels of the same family."""
    cut = plan(geometry, itemsize, 1)
    if isinstance(cut, Columns):
        return cut
    return _segments(geometry.merged(), itemsize, 1, get_num_threads())


def stays_near(cut: Segments | Columns, threads: int) -> bool:
    """Whether to do whole statistics as tasks: they fit the cache and keep the threads busy."""
    busy = threads == 1 or cut.resident_tasks >= 4 * threads or cut.parts == 1
    return cut.resident and (busy or (SLOW_THIRD_LEVEL and cut.resident_tasks % threads == 0))
