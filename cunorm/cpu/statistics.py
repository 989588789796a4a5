"""Mean and centred sum of squares of every channel.

Of a chunk the sums of x - center and (x - center)^2 are taken, the first of which
corrects what the center is off (Chan, Golub and LeVeque, "Algorithms for
computing the sample variance", 1983, eq. 1.7), and chunks are merged in float64
(their eq. 2.1). The center of a part's first chunk is the mean of a sample of it, taken about
one of its elements, so that a large common offset costs no digits; if that is farther from
the mean than the standard deviation, or squares about it overflow, the chunk is read once
more, while it is in a near cache, about its own mean. The center of the other chunks is the
mean of all before them. With d between the means of a values and the next b <= a of them, the
squares of the b are b d^2 larger about the first mean than about their own; but
the merged sum of squares has a b d^2 / (a + b), at least half of that. So squares
are never more than twice what they belong to. A constant channel has exactly its
value as mean and exactly zero as sum of squares.

Of rows that registers hold (`short_rows`) the center is the mean of all of the row.

`moments` is the verb; the device functions also serve the fused forward pass.
"""

from __future__ import annotations

import math

import numpy as np

from .. import running
from ..geometry import Geometry
from .elements import (
    accumulate,
    apart,
    as_accumulator,
    dense,
    device_function,
    fetch,
    fetch_step,
    is_far,
    kernel,
    load,
    load_scratch,
    place,
    prefetch,
    runs_ahead,
    scratch,
    store,
    strict_function,
    sums_ahead,
)
from .memory import empty
from .pieces import (
    columns_chunk,
    columns_chunks,
    columns_piece,
    segments_chunk,
    segments_chunks,
    segments_jump,
    segments_piece,
    segments_starts,
)
from .plan import Columns, Segments, statistics_plan
from .pool import run
from .sums import SAMPLED, sum_about, sum_of_sample, sums_about
from .tasks import next_task, numbers, shared_kernel

__all__ = ["moments", "update_running"]

#: Rows of arrays of more bytes are fetched ahead also where they follow each other. Measured on
#: Zen 5: smaller ones come from the third-level cache, and are slower so.
FETCHED_BYTES = 8 << 20

# Of shorter runs all elements are the sample; of columns so many rows, or all if they are fewer
# than twice so many.
_SAMPLED_LENGTH = 64
_SAMPLED_ROWS = 16

# Runs that are taken at a time: so much memory of them, but no more than so many.
LOT_BYTES = 4 << 10
_MOST_TOGETHER = 16

#: Copies of parameters of so many bytes lie in kept memory: the C library gives its own back to the
#: system after every call.
PARAMETER_BYTES = 1 << 20

#: What stands for a missing array; kernels ask for its size.
NONE = {np.dtype(dtype): np.empty(0, dtype) for dtype in (np.float32, np.float64)}


def parameter(array, dtype, offset=0.0, times=1, dealt=False):
    """A parameter of any floating dtype and strides plus an offset, or None, for kernels.

    It has every value so many `times`, one after another, and may be `dealt` in halves.
    """
    if array is None:
        return NONE[dtype]
    flags = array.flags
    plain = flags.c_contiguous and flags.aligned
    if array.dtype is dtype and plain and not (offset or dealt):  # as a rule
        return array if times == 1 else array.repeat(times)
    size = array.size * times
    large = size * dtype.itemsize >= PARAMETER_BYTES
    values = empty((size,), dtype, PARAMETER_BYTES) if large else np.empty(size, dtype)
    half = (size + 1) // 2 if dealt else 0
    _lay_out(dense(array).ravel(), float(offset), times, half, values)
    return values


@strict_function
def _value(values, i, offset, result):
    value = as_accumulator(result, np.float64(load(values, i)))
    return value + as_accumulator(result, offset) if offset != 0.0 else value


@strict_function
def lay_out(values, offset, times, half, result):
    """Every value plus an offset so many `times`, dealt in halves of a length, but for 0."""
    if times > 1:
        for i in range(values.size):
            value = _value(values, i, offset, result)
            for p in range(i * times, (i + 1) * times):
                store(result, place(p, half) if half else p, value)
    elif half:  # vectorized, as the next
        for k in range(values.size // 2):
            store(result, k, _value(values, 2 * k, offset, result))
            store(result, half + k, _value(values, 2 * k + 1, offset, result))
        if values.size % 2 == 1:
            store(result, half - 1, _value(values, values.size - 1, offset, result))
    else:
        for i in range(values.size):
            store(result, i, _value(values, i, offset, result))


_lay_out = kernel(lay_out.py_func)


def optional(array, dtype):
    """Statistics in this dtype, or None, for kernels."""
    return NONE[dtype] if array is None else array


@strict_function
def residual_times(residual, statistic, factor):
    """What rounding took from a mean, times a factor; 0 if that is not finite."""
    value = np.float64(load_scratch(residual, statistic)) if residual.size else 0.0
    product = value * factor
    return product if math.isfinite(product) else 0.0


@device_function
def pivot_at(x, i):
    """An element to measure the others from; an infinite one would make every sum NaN."""
    value = load(x, i)
    return value if math.isfinite(value) else as_accumulator(x, 0.0)


@strict_function
def _center(x, mean):
    """The mean so far, to measure the next chunk from; 0 if it is not finite."""
    return as_accumulator(x, mean if math.isfinite(mean) else 0.0)


@strict_function
def merge_moments(count_a, mean_a, m2_a, count_b, mean_b, m2_b):
    """Mean and m2 of two sets together, of which b is not empty."""
    if count_a == 0:
        return mean_b, m2_b
    delta = mean_b - mean_a
    share = count_b / (count_a + count_b)
    mean = mean_a + delta * share
    m2 = m2_a + m2_b + delta * delta * (count_a * share)
    # Infinity stays infinity; infinities of both signs make NaN.
    return mean if math.isfinite(delta) else mean_a + mean_b, m2


@device_function
def merge_into(moments, i, count, mean, m2):
    """Merge a set into the i'th count, mean and m2, which are rows of `moments`."""
    counts, means, squares = moments[0], moments[1], moments[2]
    before = load_scratch(counts, i)
    merged_mean, merged_m2 = merge_moments(
        before, load_scratch(means, i), load_scratch(squares, i), count, mean, m2
    )
    store(counts, i, before + count)
    store(means, i, merged_mean)
    store(squares, i, merged_m2)


@strict_function
def moved_to_mean(x, center, total, reciprocal):
    """A center moved to the mean of elements that deviate from it by a total, given 1 / count."""
    return _center(x, np.float64(center) + np.float64(total) * reciprocal)


@strict_function
def corrected(center, total, squares, count):
    """Mean and m2 from the sums of (x - center) and (x - center)^2."""
    correction = total / count
    mean = center + correction if math.isfinite(center) else center
    # A variance beyond float64 stays infinite: infinity less infinity would be NaN.
    beyond = squares == math.inf and math.isfinite(total)
    m2 = squares if beyond else squares - total * correction
    return mean, 0.0 if m2 < 0.0 else m2  # NaN stays NaN


# --- segments -----------------------------------------------------------------


@device_function
def together(x, length, lot_bytes):
    """How many runs of this length, of so many bytes in all, are taken at a time.

    What lies between two sweeps over a run, divisions one after another, takes as long as a
    sweep over a short one; of several runs it is done side by side.
    """
    return max(1, min(_MOST_TOGETHER, lot_bytes // (length * x.itemsize)))


@device_function
def _center_runs(x, first, last, starts, length, centers, totals):
    """Centers of some runs: each is the mean of a sample of its run.

    That is of the first lines: elements farther away have yet to come from memory.
    """
    whole = length < _SAMPLED_LENGTH
    for i in range(first, last):
        pivot = pivot_at(x, starts[i])
        store(centers, i, pivot)
        if whole:
            total = sum_about(x, starts[i], length, pivot)
        else:
            total = sum_of_sample(x, starts[i], pivot)
        store(totals, i, np.float64(total))
    reciprocal = 1.0 / (length if whole else SAMPLED)
    for i in range(first, last):
        center = moved_to_mean(x, load_scratch(centers, i), load_scratch(totals, i), reciprocal)
        store(centers, i, center)


@device_function
def _add_run(x, i, start, length, centers, totals, squares, ahead, jump):
    """Add what a run deviates from the i'th center, and the squares of that; see `sums_about`."""
    total, square = sums_about(x, start, length, load_scratch(centers, i), ahead, jump)
    store(totals, i, load_scratch(totals, i) + total)
    store(squares, i, load_scratch(squares, i) + square)


@device_function
def _first_runs(x, channels, starts, stride, length, ahead, centers, totals, squares):
    """Centers of some channels, and the sums of their first runs about them.

    Longer runs of wide elements, which come from memory no sooner than they are worked on, are
    read on and on, one by one.
    """
    waiting = is_far(x) and x.itemsize > 2 and length >= _SAMPLED_LENGTH
    lot = 1 if waiting else together(x, length, LOT_BYTES)
    for begin in range(0, channels, lot):
        end = min(channels, begin + lot)
        _center_runs(x, begin, end, starts, length, centers, totals)
        for i in range(begin, end):
            if stride > 0 and ahead == 0:
                prefetch(x, starts[i] + stride, length)
            store(totals, i, 0.0)
            store(squares, i, 0.0)
            jump = segments_jump(starts, i, channels, stride, length) if ahead > 0 else 0
            _add_run(x, i, starts[i], length, centers, totals, squares, ahead, jump)


@strict_function
def _is_off(total, squares, reciprocal):
    """Whether a center is farther from the mean than the standard deviation, or out of range."""
    total, squares = np.float64(total), np.float64(squares)
    return total * (total * reciprocal) > 0.5 * squares or squares == math.inf


@device_function
def _center_again(x, channels, starts, rows, stride, length, centers, totals, squares):
    """Take the sums about the means where the `centers` are off."""
    reciprocal = 1.0 / np.float64(rows * length)
    for i in range(channels):
        total = load_scratch(totals, i)
        if not _is_off(total, load_scratch(squares, i), reciprocal):
            continue
        store(centers, i, moved_to_mean(x, load_scratch(centers, i), total, reciprocal))
        store(totals, i, 0.0)
        store(squares, i, 0.0)
        for r in range(rows):
            _add_run(x, i, starts[i] + r * stride, length, centers, totals, squares, 0, 0)


@device_function
def chunk_moments(x, channels, starts, rows, stride, length, ahead, centers, sums, moments):
    """Merge a chunk of each of some channels into their counts, means and m2, rows of `moments`.

    Of channel i it is `rows` runs of `length` elements, `stride` apart, from `starts[i]` on; that
    is 0 if no run follows. What lies so many elements `ahead` is fetched meanwhile, as
    `sums_about` does, or, if that is 0, the next run of each. All channels have the same count.
    `centers` and `sums` are room. What is computed once for a channel is vectorized.
    """
    counts, means, totals, squares = moments[0], moments[1], sums[0], sums[1]
    count = np.float64(rows * length)
    first = load_scratch(counts, 0) == 0.0
    if first:
        _first_runs(x, channels, starts, stride, length, ahead, centers, totals, squares)
    else:
        for i in range(channels):
            store(centers, i, _center(x, load_scratch(means, i)))
            store(totals, i, 0.0)
            store(squares, i, 0.0)
    for r in range(1 if first else 0, rows):
        for i in range(channels):
            start = starts[i] + r * stride
            if stride > 0 and ahead == 0:
                prefetch(x, start + stride, length)
            jump = segments_jump(starts, i, channels, stride, length) if ahead > 0 else 0
            # As `_add_run` has it; by way of that it took a tenth longer from memory, in float32.
            total, square = sums_about(x, start, length, load_scratch(centers, i), ahead, jump)
            store(totals, i, load_scratch(totals, i) + total)
            store(squares, i, load_scratch(squares, i) + square)
    if first:
        off, reciprocal = 0, 1.0 / count
        for i in range(channels):
            off += _is_off(load_scratch(totals, i), load_scratch(squares, i), reciprocal)
        if off > 0:
            _center_again(x, channels, starts, rows, stride, length, centers, totals, squares)
    for i in range(channels):
        center = np.float64(load_scratch(centers, i))
        mean, m2 = corrected(center, load_scratch(totals, i), load_scratch(squares, i), count)
        store(totals, i, mean)
        store(squares, i, m2)
    if first:
        for i in range(channels):
            store(counts, i, count)
            store(means, i, load_scratch(totals, i))
            store(moments[2], i, load_scratch(squares, i))
    else:
        for i in range(channels):
            merge_into(moments, i, count, load_scratch(totals, i), load_scratch(squares, i))


@device_function
def segments_moments(
    x, first, last, part, outer, group, inner, chunk_rows, chunk_length, part_chunks,
    starts, centers, sums, moments,
):  # fmt: skip
    """(count, mean, m2) of one part of each of the channels [first, last), into `moments`.

    Their runs are read in turns, so that memory is read on and on. `starts`, `centers` and
    `sums` are room for what is known of the channels.
    """
    channels = last - first
    chunks = segments_chunks(outer, inner, chunk_rows, chunk_length)
    stride = group * inner
    moments[:, :channels] = 0.0
    segments_starts(first, last, outer, group, inner, starts)
    here = 0
    for chunk in range(part * part_chunks, min(chunks, (part + 1) * part_chunks)):
        row, rows, offset, length = segments_chunk(chunk, outer, inner, chunk_rows, chunk_length)
        there = row * stride + offset
        for i in range(channels):
            starts[i] += there - here
        here = there
        follows = outer > 1 and length == inner
        ahead = runs_ahead(x, 1, length) if follows else sums_ahead(x, 1)
        chunk_moments(
            x, channels, starts, rows, stride if follows else 0, length, ahead, centers, sums,
            moments,
        )  # fmt: skip


@shared_kernel
def _moments_segments(
    board, me, x, partials, /, batch, outer, group, inner,
    block, chunk_rows, chunk_length, part_chunks, parts,
):  # fmt: skip
    """A task is one part of one block; `partials[part]` gets its counts, means and m2."""
    starts, centers, sums = np.empty(block, np.int64), scratch(x, block), np.empty((2, block))
    moments = np.empty((3, block))
    task = next_task(board, me)
    while task >= 0:
        first, part = segments_piece(task, batch, outer, batch * group, block, parts)
        last = min(batch * group, first + block)
        segments_moments(
            x, first, last, part, outer, group, inner, chunk_rows, chunk_length, part_chunks,
            starts, centers, sums, moments,
        )  # fmt: skip
        for i in range(last - first):
            _write_moments(partials, part, first + i, (moments[0, i], moments[1, i], moments[2, i]))
        task = next_task(board, me)


# --- columns: every position has moments of its own ---------------------------


@device_function
def _four_sums(x, a, b, c, d, start, length, center, total):
    for p in range(start, start + length):
        pivot = load_scratch(center, p)
        low = (load(x, a + p) - pivot) + (load(x, b + p) - pivot)
        high = (load(x, c + p) - pivot) + (load(x, d + p) - pivot)
        store(total, p, load_scratch(total, p) + (low + high))


@device_function
def _four_squares(x, a, b, c, d, start, length, center, total, squares):
    for p in range(start, start + length):
        middle = load_scratch(center, p)
        da, db = load(x, a + p) - middle, load(x, b + p) - middle
        dc, dd = load(x, c + p) - middle, load(x, d + p) - middle
        store(total, p, load_scratch(total, p) + ((da + db) + (dc + dd)))
        sums = (da * da + db * db) + (dc * dc + dd * dd)
        store(squares, p, load_scratch(squares, p) + sums)


@device_function
def _by_fours(x, start, stride, rows, width, new, add, arguments):
    """Call ``add(x, a, b, c, d, first, length, *arguments)`` for rows in fours; how many those are.

    The next four are fetched meanwhile if they are not near, being `new` and far.
    """
    fours, step = rows // 4 * 4, fetch_step(x)
    far = apart(x, stride, width) or x.size * x.itemsize > FETCHED_BYTES
    for row in range(0, fours, 4):
        a = start + row * stride
        b, c, d = a + stride, a + 2 * stride, a + 3 * stride
        if not (far and new):
            add(x, a, b, c, d, 0, width, *arguments)
            continue
        whole = width // step * step
        for p in range(0, whole, step):
            for i in (a + p, b + p, c + p, d + p):
                fetch(x, i + 4 * stride, step)
            add(x, a, b, c, d, p, step, *arguments)
        add(x, a, b, c, d, whole, width - whole, *arguments)
    return fours


@device_function
def _center_columns(x, start, stride, rows, width, center, total):
    """Move the centers of `width` positions to the means of so many `rows`.

    `total` is zero before and after.
    """
    fours = _by_fours(x, start, stride, rows, width, True, _four_sums, (center, total))
    for row in range(fours, rows):
        a = start + row * stride
        for p in range(width):
            deviation = load(x, a + p) - load_scratch(center, p)
            store(total, p, load_scratch(total, p) + deviation)
    reciprocal = 1.0 / rows
    for p in range(width):
        moved = moved_to_mean(x, load_scratch(center, p), load_scratch(total, p), reciprocal)
        store(center, p, moved)
        store(total, p, as_accumulator(x, 0.0))


@device_function
def _add_columns(x, start, stride, rows, width, new, center, total, squares):
    """Add what rows deviate from the centers, and the squares of that; see `_by_fours`."""
    numbers = (center, total, squares)
    fours = _by_fours(x, start, stride, rows, width, new, _four_squares, numbers)
    for row in range(fours, rows):
        a = start + row * stride
        for p in range(width):
            deviation = load(x, a + p) - load_scratch(center, p)
            store(total, p, load_scratch(total, p) + deviation)
            store(squares, p, load_scratch(squares, p) + deviation * deviation)


@device_function
def _move_off_centers(x, reciprocal, width, center, total, squares):
    """Move the centers that are off to the means; sums are zero then.

    Others stay: a position's bits must not depend on its neighbours.
    """
    zero = as_accumulator(x, 0.0)
    for p in range(width):
        if _is_off(load_scratch(total, p), load_scratch(squares, p), reciprocal):
            off, by = load_scratch(center, p), load_scratch(total, p)
            store(center, p, moved_to_mean(x, off, by, reciprocal))
        store(total, p, zero)
        store(squares, p, zero)


@device_function
def _columns_chunk(x, start, stride, rows, width, count, center, total, squares, mean, m2):
    """Merge `rows` rows into the moments that `width` positions have of `count` rows before."""
    zero = as_accumulator(x, 0.0)
    for p in range(width):
        pivot = _center(x, load_scratch(mean, p)) if count else pivot_at(x, start + p)
        store(center, p, pivot)
        store(total, p, zero)
        store(squares, p, zero)
    sampled = rows
    if count == 0:
        sampled = _SAMPLED_ROWS if rows >= 2 * _SAMPLED_ROWS else rows
        _center_columns(x, start, rows // sampled * stride, sampled, width, center, total)
    new = count > 0 or sampled < rows
    _add_columns(x, start, stride, rows, width, new, center, total, squares)
    if sampled < rows:
        off, reciprocal = 0, 1.0 / rows
        for p in range(width):
            off += _is_off(load_scratch(total, p), load_scratch(squares, p), reciprocal)
        if off > 0:
            _move_off_centers(x, reciprocal, width, center, total, squares)
            _add_columns(x, start, stride, rows, width, False, center, total, squares)
    for p in range(width):
        chunk_mean, chunk_m2 = corrected(
            np.float64(load_scratch(center, p)),
            np.float64(load_scratch(total, p)),
            np.float64(load_scratch(squares, p)),
            np.float64(rows),
        )
        merged_mean, merged_m2 = merge_moments(
            np.float64(count), load_scratch(mean, p), load_scratch(m2, p),
            np.float64(rows), chunk_mean, chunk_m2,
        )  # fmt: skip
        store(mean, p, merged_mean)
        store(m2, p, merged_m2)


@device_function
def columns_moments(
    x, start, stride, rows, width, tail_width, chunk_rows, center, total, squares, mean, m2
):
    """Moments of `width` positions over `rows` rows and, left of `tail_width`, one more."""
    for chunk in range(columns_chunks(rows, tail_width, chunk_rows)):
        row, height, positions = columns_chunk(chunk, rows, width, tail_width, chunk_rows)
        _columns_chunk(
            x, start + row * stride, stride, height, positions,
            row, center, total, squares, mean, m2,
        )  # fmt: skip


@strict_function
def channel_of_columns(channel, channels, fold, inner, rows, tail_rows, mean, m2):
    """(count, mean, m2) of a channel from the moments of its positions (see `spread`).

    These have `rows` elements each, those of the first `tail_rows` copies one more.
    """
    if fold * inner == 1:  # nothing to merge, and no other rows
        return np.float64(rows), load_scratch(mean, channel), load_scratch(m2, channel)
    pivot = load_scratch(mean, channel * inner)
    if not math.isfinite(pivot):
        pivot = 0.0
    count = np.float64((fold * rows + tail_rows) * inner)
    total = 0.0
    for copy in range(fold):
        first = (copy * channels + channel) * inner
        weight = np.float64(rows + (copy < tail_rows))
        for p in range(first, first + inner):
            total = accumulate(total, weight * (load_scratch(mean, p) - pivot))
    center = pivot + total / count
    total = 0.0
    squares = 0.0
    for copy in range(fold):
        first = (copy * channels + channel) * inner
        weight = np.float64(rows + (copy < tail_rows))
        for p in range(first, first + inner):
            deviation = load_scratch(mean, p) - center
            weighted = weight * deviation
            total = accumulate(total, weighted)
            squares = accumulate(squares, load_scratch(m2, p) + weighted * deviation)
    mean_of_all, m2_of_all = corrected(center, total, squares, count)
    return count, mean_of_all, m2_of_all


@shared_kernel
def _moments_columns(
    board, me, x, partials, /, batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels,
):  # fmt: skip
    """A task is one part of one block; `partials[part]` gets its counts, means and m2."""
    most = fold * block_channels * inner
    blocks, positions = scratch(x, (3, most)), np.empty((2, most))
    center, total, squares = blocks[0], blocks[1], blocks[2]
    mean, m2 = positions[0], positions[1]
    task = next_task(board, me)
    while task >= 0:
        statistic, channels, part, start, height, tail = columns_piece(
            task, outer, group, inner, fold, rows, tail_rows, part_rows, parts, block_channels
        )
        columns_moments(
            x, start, fold * group * inner, height, fold * channels * inner,
            tail * channels * inner, chunk_rows, center, total, squares, mean, m2,
        )  # fmt: skip
        for channel in range(channels):
            moments = channel_of_columns(channel, channels, fold, inner, height, tail, mean, m2)
            _write_moments(partials, part, statistic + channel, moments)
        task = next_task(board, me)


# --- both ---------------------------------------------------------------------


@device_function
def _write_moments(partials, part, statistic, moments):
    partials[part, 0, statistic] = moments[0]
    partials[part, 1, statistic] = moments[1]
    partials[part, 2, statistic] = moments[2]


@strict_function
def merge_parts(partials):
    """Merge the parts of all statistics, in order, into the first ones."""
    count, mean, m2 = partials[0, 0], partials[0, 1], partials[0, 2]
    for part in range(1, partials.shape[0]):
        sizes, means, squares = partials[part, 0], partials[part, 1], partials[part, 2]
        for i in range(count.size):  # vectorized
            size = load(sizes, i)
            merged_mean, merged_m2 = merge_moments(
                load_scratch(count, i), load_scratch(mean, i), load_scratch(m2, i),
                size, load(means, i), load(squares, i),
            )  # fmt: skip
            store(count, i, load_scratch(count, i) + size)
            store(mean, i, merged_mean)
            store(m2, i, merged_m2)


@strict_function
def take_given(given_mean, given_var, eps, statistics):
    """Statistics from a running mean and variance, if there are any."""
    mean, inv_std, residual = statistics[0], statistics[1], statistics[2]
    for i in range(given_mean.size):
        center = np.float64(load(given_mean, i))
        rounded = as_accumulator(mean, center)
        low = center - np.float64(rounded)
        deviation = math.sqrt(np.float64(load(given_var, i)) + eps)
        store(mean, i, rounded)
        store(inv_std, i, as_accumulator(mean, 1.0 / deviation))
        store(residual, i, as_accumulator(mean, low if math.isfinite(low) else 0.0))


@strict_function
def save(statistics, statistic, count, center, m2, eps):
    """Write a statistic's mean, inv_std, residual (what rounding took from the mean) and var."""
    mean, inv_std, residual, variance = statistics[0], statistics[1], statistics[2], statistics[3]
    rounded = as_accumulator(mean, center)
    low = center - np.float64(rounded) if math.isfinite(center) else 0.0
    var = m2 / count
    store(mean, statistic, rounded)
    store(inv_std, statistic, as_accumulator(mean, 1.0 / math.sqrt(var + eps)))
    store(residual, statistic, as_accumulator(mean, low))
    store(variance, statistic, as_accumulator(mean, var))


@kernel
def _finish_moments(partials, mean, m2):
    merge_parts(partials)
    means, squares = partials[0, 1], partials[0, 2]
    for i in range(mean.size):
        store(mean, i, as_accumulator(mean, load_scratch(means, i)))
        store(m2, i, as_accumulator(m2, load_scratch(squares, i)))


_MOMENTS = {Segments: _moments_segments, Columns: _moments_columns}


def partial_moments(x, geometry: Geometry):
    """Counts, means and m2 in float64 of every part of every statistic: (parts, 3, statistics)."""
    merged = geometry.merged()
    cut = statistics_plan(geometry, x.itemsize)
    partials = np.empty((cut.parts, 3, geometry.statistics))
    run(
        _MOMENTS[type(cut)],
        cut.tasks,
        x.nbytes,
        x.ravel(),
        partials,
        numbers(*merged[:4], *cut.arguments),
    )
    return partials


def moments(x, geometry: Geometry, dtype):
    """Mean and centred sum of squares (m2) of every channel, in the accumulator type or float64."""
    mean, m2 = np.empty((2, geometry.statistics), dtype)
    _finish_moments(partial_moments(x, geometry), mean, m2)
    return mean, m2


# --- running statistics -------------------------------------------------------

_blend = strict_function(running.blend)


@strict_function
def _blend_one(values, i, batch, factor):
    new = _blend(np.float64(load_scratch(values, i)), batch, factor)
    store(values, i, as_accumulator(values, new))


@strict_function
def blend_running(statistics, statistic, running_mean, running_var, bessel, factor):
    """Take a statistic that `save` has written into the running ones, of the same type."""
    if running_mean.size:
        _blend_one(
            running_mean, statistic, np.float64(load_scratch(statistics[0], statistic)), factor
        )
    if running_var.size:
        var = np.float64(load_scratch(statistics[3], statistic)) * bessel
        _blend_one(running_var, statistic, var, factor)


@strict_function
def _blend_all(values, batch, scale, factor):
    samples = batch.size // values.size
    for i in range(values.size):
        total = 0.0
        for sample in range(samples):
            total += np.float64(load(batch, sample * values.size + i))
        _blend_one(values, i, total / samples * scale, factor)


@kernel
def _update_running(running_mean, running_var, mean, var, scale, factor):
    _blend_all(running_mean, mean, 1.0, factor)
    _blend_all(running_var, var, scale, factor)


def update_running(running_mean, running_var, mean, var, scale, factor):
    """Take mean and var * scale into running statistics, in place.

    The running statistics may have any strides, or be None and are left out then;
    mean and var are contiguous, in an accumulator type. Of several rows of them, one for
    each sample, the average is taken in.
    """
    none = NONE[mean.dtype]
    mean_values = none if running_mean is None else dense(running_mean)
    var_values = none if running_var is None else dense(running_var)
    _update_running(mean_values, var_values, mean.ravel(), var.ravel(), scale, factor)
    if mean_values is not running_mean and running_mean is not None:
        running_mean[...] = mean_values
    if var_values is not running_var and running_var is not None:
        running_var[...] = var_values
