"""Gradients of y = (x - mean) * inv_std * weight + bias.

`reduce` sums dy and dy * (x - mean) over every channel, `input_gradient`
takes it from there; between the two a synchronized norm adds up its ranks.
`backward` does both at once: what shares a statistic is read from memory once if it
fits the cache (but see `sweeps_apart`). With mean and inv_std computed from n values of x,
and sums over these,

    dx = inv_std * (weight * dy - sum(weight * dy) / n
                    - (x - mean) * inv_std^2 * sum(weight * dy * (x - mean)) / n)

(Ioffe and Szegedy, 2015, section 3, where weight is the same for all of them); with given
statistics the last two terms are absent.
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..checks import statistics_dtype
from ..geometry import Geometry
from .elements import (
    LINE_ELEMENTS,
    accumulate,
    are_dealt,
    as_accumulator,
    begins_at,
    device_function,
    fetch,
    fetch_step,
    flush,
    follow,
    inlined_function,
    kernel,
    laid_from,
    lay,
    lay_in_order,
    load,
    load_scratch,
    prefetch,
    row_lead,
    runs_ahead,
    same_place,
    scratch,
    stage_size,
    store,
    store_streaming,
    streams_rows,
    strict_function,
    sums_ahead,
    way_ahead,
    write_on,
    write_rows,
    write_run,
)
from .pieces import (
    block_runs,
    column_runs,
    columns_chunk,
    columns_chunks,
    columns_part,
    columns_piece,
    divide,
    next_parameters,
    runs_row,
    segments_chunk,
    segments_chunks,
    segments_jump,
    segments_piece,
    segments_starts,
    spread,
    task_runs,
)
from .plan import (
    FETCHED_BLOCK_BYTES,
    Columns,
    Rows,
    Runs,
    Segments,
    by_runs,
    gradient_plan,
    plan,
    rows_plan,
    stays_near,
    stretches,
    sweeps_apart,
)
from .pool import dismiss, hire, run
from .rows import (
    ADDED_APART_BYTES,
    add_up,
    backward_rows,
    gradient_rows,
    lays_before,
    reduce_rows,
    row_extents,
    row_parameter,
)
from .short_rows import short_backward
from .statistics import FETCHED_BYTES, NONE, optional, parameter, residual_times
from .sums import sums_with, sums_with_scaled
from .tasks import last_task, next_task, numbers, shared_kernel
from .threads import get_num_threads
from .transform import STREAMING_BYTES, columns_transform, run_transform

__all__ = ["backward", "input_gradient", "reduce"]

# Whole rows of dy and x are read one after another if either is larger; but those of half types,
# with so many positions, two at a time, while the next two are fetched. Measured on Zen 5.
_READ_ON_BYTES = 2 << 20
_WIDE_HALF = 1024


@strict_function
def _weight_of(weight, parameter):
    return np.float64(load(weight, parameter)) if weight.size else 1.0


@strict_function
def _share(x, statistic, members, parameter, residual, inv_std, weight, sum_dy, sum_dy_xmu, count):
    """(slope, offset): what a statistic adds to dx, (x - mean) * slope + offset.

    Its weights begin at `parameter`. The offset makes up for the residual: what rounding took
    from the mean.
    """
    total, products = 0.0, 0.0
    for member in range(members):
        factor = _weight_of(weight, parameter + member)
        channel = statistic * members + member
        total += factor * np.float64(load_scratch(sum_dy, channel))
        products += factor * np.float64(load_scratch(sum_dy_xmu, channel))
    r = np.float64(load(inv_std, statistic))
    slope = -(r * r) * (products * r / count)  # in this order nothing overflows
    offset = -r * (total / count) - residual_times(residual, statistic, slope)
    return as_accumulator(x, slope), as_accumulator(x, offset)


@strict_function
def _scale(x, statistic, parameter, inv_std, weight):
    """The factor of dy in dx."""
    return as_accumulator(x, np.float64(load(inv_std, statistic)) * _weight_of(weight, parameter))


@strict_function
def _write_sums(channel, statistic, residual, total_dy, total_dy_xmu, sum_dy, sum_dy_xmu):
    """Write a channel's sums, the second one about the mean before rounding."""
    total_dy_xmu -= residual_times(residual, statistic, total_dy)
    store(sum_dy, channel, as_accumulator(sum_dy, total_dy))
    store(sum_dy_xmu, channel, as_accumulator(sum_dy, total_dy_xmu))


@device_function
def _write_block_sums(
    statistic, channels, members, residual, of_dy, of_dy_xmu, sum_dy, sum_dy_xmu
):  # fmt: skip
    """`_write_sums` for the members of some statistics; vectorized if they are many, or one."""
    if members == 1:
        for s in range(channels):
            _write_sums(
                statistic + s, statistic + s, residual, load_scratch(of_dy, s),
                load_scratch(of_dy_xmu, s), sum_dy, sum_dy_xmu,
            )  # fmt: skip
        return
    for s in range(channels):
        for channel in range(s * members, (s + 1) * members):
            _write_sums(
                statistic * members + channel, statistic + s, residual,
                load_scratch(of_dy, channel), load_scratch(of_dy_xmu, channel), sum_dy, sum_dy_xmu,
            )  # fmt: skip


@device_function
def _write_gradients(first, last, members, inv_std, sum_dy, sum_dy_xmu, dweight, dbias):
    """Those of the parameters of the channels [first, last), if the sums are of one sample.

    Either of dweight and dbias may be empty and is left out then.
    """
    if dweight.size:
        for channel in range(first, last):
            r = np.float64(load(inv_std, divide(channel, members)[0]))
            total = r * np.float64(load_scratch(sum_dy_xmu, channel))
            store(dweight, channel, as_accumulator(dweight, total))
    if dbias.size:
        for channel in range(first, last):
            store(dbias, channel, load_scratch(sum_dy, channel))


@device_function
def _store_totals(totals, result):
    for i in range(result.size):
        store(result, i, as_accumulator(result, load_scratch(totals, i)))


def _add_up(sums, inv_std, members, parameters, dweight, dbias):
    """Dweight and dbias from the sums of all channels; either may be empty and is left out."""
    sum_dy, sum_dy_xmu = sums[0], sums[1]
    totals = np.zeros(parameters)
    if dweight.size:
        for first in range(0, sum_dy.size, parameters):
            if members == 1:  # a loop without one within it, which is vectorized
                for i in range(parameters):
                    r = np.float64(load(inv_std, first + i))
                    term = r * np.float64(load(sum_dy_xmu, first + i))
                    store(totals, i, load_scratch(totals, i) + term)
                continue
            statistic = first // members
            for begin in range(0, parameters, members):
                r = np.float64(load(inv_std, statistic + begin // members))
                for i in range(begin, begin + members):
                    term = r * np.float64(load(sum_dy_xmu, first + i))
                    store(totals, i, load_scratch(totals, i) + term)
        _store_totals(totals, dweight)
    if dbias.size:
        totals[:] = 0.0
        for first in range(0, sum_dy.size, parameters):
            for i in range(parameters):
                term = np.float64(load(sum_dy, first + i))
                store(totals, i, load_scratch(totals, i) + term)
        _store_totals(totals, dbias)


_add_up_samples = kernel(_add_up)
_add_up_within = inlined_function(_add_up)


@inlined_function
def _add_up_near(both_sums, inv_std, members, parameters, batch, dweight, dbias):
    """The same of several samples; one's are written with its sums."""
    if batch > 1:
        _add_up_within(both_sums, inv_std, members, parameters, dweight, dbias)


# --- segments -----------------------------------------------------------------


@device_function
def _look_up(
    x, first, last, outer, group, inner, members, parameters, mean, inv_std, weight,
    starts, means, scales,
):  # fmt: skip
    """Where the channels [first, last) begin, their means, and the factors of dy in dx.

    They are those of whole statistics.
    """
    segments_starts(first, last, outer, group, inner, starts)
    statistic, parameter = divide(first, members)[0], divide(first, parameters)[1]
    for begin in range(0, last - first, members):
        center = load(mean, statistic)
        for i in range(begin, begin + members):
            store(means, i, center)
            if inv_std.size:
                scale = _scale(x, statistic, parameter + i - begin, inv_std, weight)
                store(scales, i, scale)
        statistic += 1
        parameter = next_parameters(parameter, members, parameters)


@device_function
def _segments_sums(
    dy, x, dx, part, outer, inner, stride, chunk_rows, chunk_length, part_chunks,
    channels, starts, means, scales, streaming, stage, sums,
):  # fmt: skip
    """Sums of dy and dy * (x - mean) over one part of each of a block's channels.

    If there is a dx, it becomes that of given statistics while dy is near. Runs are read in
    turns, so that memory is read on and on.
    """
    chunks = segments_chunks(outer, inner, chunk_rows, chunk_length)
    zero = as_accumulator(x, 0.0)
    of_dy, of_dy_xmu = sums[0], sums[1]
    sums[:, :] = 0.0
    staged = end = starts[0]
    at_once = False  # whole vectors, read and written in one loop
    if dx is not None:
        streams = dx.size > 0 and streaming and begins_at(dx, 16)
        at_once = streams and stage.size == 0 and inner * dx.itemsize % 64 == 0
    for chunk in range(part * part_chunks, min(chunks, (part + 1) * part_chunks)):
        row, rows, offset, length = segments_chunk(chunk, outer, inner, chunk_rows, chunk_length)
        follows = outer > 1 and length == inner
        ahead = runs_ahead(x, 2, length) if follows else sums_ahead(x, 2)
        for r in range(row, row + rows):
            for i in range(channels):
                start = starts[i] + r * stride + offset
                if follows and ahead == 0:
                    prefetch(dy, start + stride, length)
                    prefetch(x, start + stride, length)
                jump = 0
                if ahead > 0:
                    jump = segments_jump(starts, i, channels, stride if follows else 0, length)
                if dx is not None and at_once:
                    sum_dy, sum_dy_xmu = sums_with_scaled(
                        dy, x, dx, start, length, load_scratch(means, i), load_scratch(scales, i),
                        ahead, jump,
                    )  # fmt: skip
                else:
                    sum_dy, sum_dy_xmu = sums_with(
                        dy, x, start, length, load_scratch(means, i), ahead, jump
                    )
                store(of_dy, i, load_scratch(of_dy, i) + sum_dy)
                store(of_dy_xmu, i, load_scratch(of_dy_xmu, i) + sum_dy_xmu)
                if dx is not None and dx.size and not at_once:
                    scale = load_scratch(scales, i)
                    staged = follow(dx, staged, end, start, stage)
                    end = start + length
                    staged = run_transform(
                        dy, dx, start, end, zero, scale, zero, streaming, stage, staged, None, 0
                    )
    if dx is not None:
        flush(dx, staged, end, stage)


@shared_kernel
def _reduce_segments(
    board, me, dy, x, dx, mean, inv_std, weight, partials, streaming,
    /, batch, outer, group, inner, members, parameters,
    block, chunk_rows, chunk_length, part_chunks, parts,
):  # fmt: skip
    """A task is one part of one block; `partials[part]` gets both sums of channels.

    If there is a dx, it becomes that of given statistics.
    """
    channels = block * members
    starts, numbers = np.empty(channels, np.int64), scratch(x, (2, channels))
    means, scales = numbers[0], numbers[1]
    sums = np.empty((2, channels))
    stage = np.empty(stage_size(dx, inner, streaming) if dx.size else 0, dx.dtype)
    task = next_task(board, me)
    while task >= 0:
        first, part = segments_piece(task, batch, outer, batch * group, channels, parts)
        last = min(batch * group, first + channels)
        _look_up(
            x, first, last, outer, group, inner, members, parameters, mean, inv_std, weight,
            starts, means, scales,
        )  # fmt: skip
        _segments_sums(
            dy, x, dx, part, outer, inner, group * inner, chunk_rows, chunk_length, part_chunks,
            last - first, starts, means, scales, streaming, stage, sums,
        )  # fmt: skip
        for i in range(last - first):
            partials[part, 0, first + i] = sums[0, i]
            partials[part, 1, first + i] = sums[1, i]
        task = next_task(board, me)


@device_function
def _gradient(i, _, dy, x, mean, scale, slope, offset):
    return load(dy, i) * scale + ((load(x, i) - mean) * slope + offset)


@device_function
def _run_gradient(
    dy, x, dx, start, end, mean, scale, slope, offset, streaming, stage, staged, ahead
):
    """Dx of the elements [start, end) of one channel, by way of a stage as in `write_on`."""
    numbers = (dy, x, mean, scale, slope, offset)
    return write_on(dx, start, end, streaming, _gradient, numbers, stage, staged, dy, x, ahead)


@shared_kernel
def _gradient_segments(
    board, me, dy, x, dx, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, count,
    streaming, /, batch, outer, group, inner, members, parameters, stretch,
):  # fmt: skip
    """A task is a stretch of memory; the last one goes first, being nearest."""
    stage = np.empty(stage_size(dx, inner, streaming), dx.dtype)
    ahead = way_ahead(x)
    task = last_task(board, me)
    while task >= 0:
        start, end = task * stretch, min(x.size, (task + 1) * stretch)
        staged = start
        while start < end:
            run, row_end, channel, parameter = runs_row(start, outer, group, inner, parameters)
            stop = row_end - (group - run - 1) * inner
            while start < min(end, row_end):
                statistic = divide(channel + run, members)[0]
                first = parameter + run - (channel + run - statistic * members)
                slope, offset = _share(
                    x, statistic, members, first, residual, inv_std, weight, sum_dy, sum_dy_xmu,
                    count,
                )  # fmt: skip
                scale = _scale(x, statistic, parameter + run, inv_std, weight)
                staged = _run_gradient(
                    dy, x, dx, start, min(stop, end), load(mean, statistic), scale, slope,
                    offset, streaming, stage, staged, ahead,
                )  # fmt: skip
                start, stop, run = stop, stop + inner, run + 1
        flush(dx, staged, end, stage)
        task = last_task(board, me)


@strict_function
def _take_shares(x, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, count, known):
    """Every channel's mean, scale, slope and offset, in so many rows."""
    means, scales, slopes, offsets = known[0], known[1], known[2], known[3]
    for i in range(inv_std.size):
        slope, offset = _share(x, i, 1, i, residual, inv_std, weight, sum_dy, sum_dy_xmu, count)
        store(means, i, load_scratch(mean, i))
        store(scales, i, _scale(x, i, i, inv_std, weight))
        store(slopes, i, slope)
        store(offsets, i, offset)


@device_function
def _write_gradient(start, end, channel, dy, x, dx, mean, scales, slopes, offsets):
    scale, slope = load_scratch(scales, channel), load_scratch(slopes, channel)
    numbers = (dy, x, load_scratch(mean, channel), scale, slope, load_scratch(offsets, channel))
    write_run(dx, start, end, _gradient, numbers)


@shared_kernel
def _gradient_runs(
    board, me, dy, x, dx, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, count, _,
    /, total, group, inner, runs,
):  # fmt: skip
    """A task is some whole runs, each of one channel; the last ones go first, being nearest.

    Each thread works out the channels' numbers, as in `_transform_runs`.
    """
    known = scratch(x, (4, group))
    _take_shares(x, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, count, known)
    arguments = (dy, x, dx, known[0], known[1], known[2], known[3])
    task = last_task(board, me)
    while task >= 0:
        task_runs(task, runs, total, group, inner, _write_gradient, arguments)
        task = last_task(board, me)


@partial(shared_kernel, last=_add_up_near)
def _backward_segments(
    board, me, dy, x, dx, mean, residual, inv_std, weight, both_sums, dweight, dbias, streaming,
    /, batch, outer, group, inner, members, parameters,
    block, chunk_rows, chunk_length, part_chunks, parts,
):  # fmt: skip
    """A task is one block of statistics; `both_sums` gets those of channels."""
    sum_dy, sum_dy_xmu = both_sums[0], both_sums[1]
    channels = block * members
    count = np.float64(outer * members * inner)
    starts, numbers = np.empty(channels, np.int64), scratch(x, (4, channels))
    means, scales, slopes, offsets = numbers[0], numbers[1], numbers[2], numbers[3]
    sums, part_sums = np.empty((2, channels)), np.empty((2, channels))
    of_dy, of_dy_xmu = sums[0], sums[1]
    stage = np.empty(stage_size(dx, inner, streaming), dx.dtype)
    near = 2 * channels * outer * inner * x.itemsize <= FETCHED_BLOCK_BYTES
    ahead = near * channels * inner if outer > 1 else way_ahead(x)  # the next block, or lines
    task = next_task(board, me)
    while task >= 0:
        first = task * channels
        last = min(batch * group, first + channels)
        _look_up(
            x, first, last, outer, group, inner, members, parameters, mean, inv_std, weight,
            starts, means, scales,
        )  # fmt: skip
        sums[:, :] = 0.0
        for part in range(parts):
            _segments_sums(
                dy, x, None, part, outer, inner, group * inner, chunk_rows, chunk_length,
                part_chunks, last - first, starts, means, scales, False, stage, part_sums,
            )  # fmt: skip
            for i in range(last - first):
                sums[0, i] += part_sums[0, i]
                sums[1, i] += part_sums[1, i]
        statistic, parameter = divide(first, members)[0], divide(first, parameters)[1]
        _write_block_sums(
            statistic, (last - first) // members, members, residual, of_dy, of_dy_xmu,
            sum_dy, sum_dy_xmu,
        )  # fmt: skip
        if batch == 1:
            _write_gradients(first, last, members, inv_std, sum_dy, sum_dy_xmu, dweight, dbias)
        for begin in range(0, last - first, members):
            slope, offset = _share(
                x, statistic, members, parameter, residual, inv_std, weight, sum_dy, sum_dy_xmu,
                count,
            )  # fmt: skip
            for i in range(begin, begin + members):
                store(slopes, i, slope)
                store(offsets, i, offset)
            statistic += 1
            parameter = next_parameters(parameter, members, parameters)
        if streaming:
            staged = end = starts[0]
            for row in range(outer):
                for i in range(last - first):
                    start = starts[i] + row * group * inner
                    staged = follow(dx, staged, end, start, stage)
                    end = start + inner
                    staged = _run_gradient(
                        dy, x, dx, start, end, load_scratch(means, i), load_scratch(scales, i),
                        load_scratch(slopes, i), load_scratch(offsets, i), True, stage, staged,
                        ahead,
                    )  # fmt: skip
            flush(dx, staged, end, stage)
        else:
            known = (dy, x, dx, means, scales, slopes, offsets)
            block_runs(starts, last - first, outer, group * inner, inner, _write_gradient, known)
        task = next_task(board, me)


# --- columns ------------------------------------------------------------------


@device_function
def _reads_on(x, stride, width):
    """Whether to read one row after another, two of which would share loads and stores.

    Memory, unlike a cache, is best read on and on, if arithmetic does not take longer.
    """
    near = x.size * x.itemsize <= _READ_ON_BYTES
    wide = x.itemsize == 2 and width >= _WIDE_HALF
    return stride == width and not (near or wide)


@device_function
def _row_range(row, rows, width, lead, on):
    """Which positions to add of a row that begins at ``row * width``.

    Rows that are read `on` and on are added from a cache line's begin to that in the next row,
    whose first positions come again at `width`: before them goes what precedes the first row's
    line, as the end of a row -1.
    """
    if not on:
        return 0, width
    return width if row < 0 else lead, width + lead if row < rows - 1 else width


@device_function
def _lead_back(sums, to_p, width, lead):
    """Move the sums of the first positions back from where `_row_range` has them."""
    for p in range(to_p, to_p + lead):
        store(sums, p, load_scratch(sums, p + width))


@device_function
def _row_reduce(dy, x, dx, put, start, first, last, to_p, mean, scale, zero, sum_dy, sum_dy_xmu):
    """Add a row to both sums; dx, if it is not None, becomes dy * scale, written with `put`."""
    for p in range(first, last):
        q = p + to_p
        gradient = load(dy, start + p)
        centered = load(x, start + p) - load_scratch(mean, q)
        store(sum_dy, q, load_scratch(sum_dy, q) + gradient)
        store(sum_dy_xmu, q, load_scratch(sum_dy_xmu, q) + gradient * centered)
        if dx is not None:
            put(dx, start + p, gradient * load_scratch(scale, q) + zero)


@device_function
def _two_rows(dy, x, a, b, start, length, mean, sum_dy, sum_dy_xmu):
    for p in range(start, start + length):
        center = load_scratch(mean, p)
        first, second = load(dy, a + p), load(dy, b + p)
        one, two = load(x, a + p) - center, load(x, b + p) - center
        store(sum_dy, p, load_scratch(sum_dy, p) + first + second)
        store(sum_dy_xmu, p, load_scratch(sum_dy_xmu, p) + first * one + second * two)


@device_function
def _columns_chunk(
    dy, x, dx, start, stride, rows, width, lead, mean, scale, sum_dy, sum_dy_xmu,
    total_dy, total_dy_xmu,
):  # fmt: skip
    """Add `rows` rows in the accumulator type, then to the float64 totals.

    Two of them at a time (but see `_reads_on`), one after the other: the bits are the same.
    If dx is not None, rows are read on, and it becomes dy * scale, past the caches.
    """
    zero, to_p = as_accumulator(x, 0.0), laid_from(lead)
    for p in range(to_p, to_p + width + lead):
        store(sum_dy, p, zero)
        store(sum_dy_xmu, p, zero)
    on = _reads_on(x, stride, width)
    twos = 0 if on else rows // 2 * 2
    far, step = x.size * x.itemsize > _READ_ON_BYTES, fetch_step(x)
    for row in range(0, twos, 2):
        a = start + row * stride
        b = a + stride
        if not far:
            _two_rows(dy, x, a, b, 0, width, mean, sum_dy, sum_dy_xmu)
            continue
        whole = width // step * step
        for p in range(0, whole, step):
            for i in (a + p, b + p):
                fetch(dy, i + 2 * stride, step)
                fetch(x, i + 2 * stride, step)
            _two_rows(dy, x, a, b, p, step, mean, sum_dy, sum_dy_xmu)
        _two_rows(dy, x, a, b, whole, width - whole, mean, sum_dy, sum_dy_xmu)
    ahead = sums_ahead(x, 2) if on and x.size * x.itemsize > FETCHED_BYTES else 0
    for row in range(-1 if on else twos, rows):
        begin = start + row * stride
        first, last = _row_range(row, rows, width, lead, on)
        known = (to_p, mean, scale, zero, sum_dy, sum_dy_xmu)
        if dx is not None and last - first == width:
            _row_reduce(dy, x, dx, store_streaming, begin, first, last, *known)
            continue
        if ahead > 0:
            for p in range(first, last - step + 1, step):
                fetch(dy, begin + p + ahead, step)
                fetch(x, begin + p + ahead, step)
                _row_reduce(dy, x, dx, store, begin, p, p + step, *known)
            first += (last - first) // step * step
        _row_reduce(dy, x, dx, store, begin, first, last, *known)
    if on:
        _lead_back(sum_dy, to_p, width, lead)
        _lead_back(sum_dy_xmu, to_p, width, lead)
    for p in range(width):
        total, total_xmu = load_scratch(total_dy, p), load_scratch(total_dy_xmu, p)
        store(total_dy, p, total + np.float64(load_scratch(sum_dy, p + to_p)))
        store(total_dy_xmu, p, total_xmu + np.float64(load_scratch(sum_dy_xmu, p + to_p)))


@device_function
def _columns_reduce(
    dy, x, dx, start, stride, rows, width, tail_width, chunk_rows, mean, moved_mean,
    sum_dy, sum_dy_xmu, total_dy, total_dy_xmu, zero, scale, streaming, rooms,
):  # fmt: skip
    """Both sums of every position, over `rows` rows and, left of `tail_width`, one more.

    If there is a dx, it becomes dy * scale while that is near.
    """
    on = _reads_on(x, stride, width)
    lead = row_lead(x, start, stride, on)
    at_once, moved_scale = False, scale  # whether dx is written in the loop that sums
    if dx is not None:
        # Not into x: dx does not depend on x, and what is said of inputs lets a compiler write it
        # before the same element of x is read.
        streams = dx.size > 0 and streaming and not (are_dealt(dx) or same_place(dx, x))
        at_once = streams and on and streams_rows(dx, start, stride)
        if at_once:
            lead = row_lead(dx, start, stride, True)
            if lead > 0:
                moved_scale = rooms[0]
                lay_in_order(scale, moved_scale, width, lead)
    if lead > 0:
        lay_in_order(mean, moved_mean, width, lead)
        mean = moved_mean
    for p in range(width):
        store(total_dy, p, 0.0)
        store(total_dy_xmu, p, 0.0)
    for chunk in range(columns_chunks(rows, tail_width, chunk_rows)):
        row, height, positions = columns_chunk(chunk, rows, width, tail_width, chunk_rows)
        first = start + row * stride
        known = (lead, mean, moved_scale, sum_dy, sum_dy_xmu, total_dy, total_dy_xmu)
        if dx is not None and at_once and row < rows:
            _columns_chunk(dy, x, dx, first, stride, height, positions, *known)
            continue
        _columns_chunk(dy, x, None, first, stride, height, positions, *known)
        if dx is not None and dx.size:
            columns_transform(
                dy, dx, first, stride, height, positions, 0, zero, scale, zero,
                streaming and row < rows, rooms,
            )  # fmt: skip


@strict_function
def _channel_sums(channel, channels, fold, inner, total_dy, total_dy_xmu):
    """Both sums of a channel from those of its positions (see `spread`)."""
    if fold * inner == 1:
        return load_scratch(total_dy, channel), load_scratch(total_dy_xmu, channel)
    sum_dy, sum_dy_xmu = 0.0, 0.0
    for copy in range(fold):
        first = (copy * channels + channel) * inner
        for p in range(first, first + inner):
            sum_dy = accumulate(sum_dy, load_scratch(total_dy, p))
            sum_dy_xmu = accumulate(sum_dy_xmu, load_scratch(total_dy_xmu, p))
    return sum_dy, sum_dy_xmu


# Where every channel is one position (fold and inner are 1), what follows is vectorized.


@device_function
def _spread_means(statistic, channels, fold, inner, mean, block_mean):
    if fold * inner == 1:
        for channel in range(channels):
            store(block_mean, channel, load(mean, statistic + channel))
        return
    for channel in range(channels):
        spread(load(mean, statistic + channel), channel, channels, fold, inner, block_mean)


@device_function
def _spread_scales(
    x, statistic, channels, members, parameters, fold, inner, inv_std, weight, block_scale
):
    length = inner // members
    first = statistic * members % parameters
    if fold * inner == 1:
        for channel in range(channels):
            scale = _scale(x, statistic + channel, first + channel, inv_std, weight)
            store(block_scale, channel, scale)
        return
    for channel in range(channels):
        if fold * length == 1:  # vectorized, too
            for member in range(channel * members, (channel + 1) * members):
                scale = _scale(x, statistic + channel, first + member, inv_std, weight)
                store(block_scale, member, scale)
            continue
        for member in range(channel * members, (channel + 1) * members):
            scale = _scale(x, statistic + channel, first + member, inv_std, weight)
            spread(scale, member, channels * members, fold, length, block_scale)


@shared_kernel
def _reduce_columns(
    board, me, dy, x, dx, mean, inv_std, weight, partials, streaming, /, members, parameters,
    batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels,
):  # fmt: skip
    """A task is one part of one block; `partials[part]` gets both sums of channels.

    If there is a dx, it becomes that of given statistics.
    """
    most = fold * block_channels * inner
    blocks, totals = scratch(x, (9, most + LINE_ELEMENTS)), np.empty((2, most))
    block_mean, sum_dy, sum_dy_xmu = blocks[0], blocks[1], blocks[2]
    block_scale, zero, moved_mean = blocks[3], blocks[4], blocks[8]
    total_dy, total_dy_xmu = totals[0], totals[1]
    zero[:] = 0.0
    length = inner // members
    task = next_task(board, me)
    while task >= 0:
        statistic, channels, part, start, height, tail = columns_piece(
            task, outer, group, inner, fold, rows, tail_rows, part_rows, parts, block_channels
        )
        _spread_means(statistic, channels, fold, inner, mean, block_mean)
        if dx.size:
            _spread_scales(
                x, statistic, channels, members, parameters, fold, inner, inv_std, weight,
                block_scale,
            )  # fmt: skip
        _columns_reduce(
            dy, x, dx, start, fold * group * inner, height, fold * channels * inner,
            tail * channels * inner, chunk_rows, block_mean, moved_mean,
            sum_dy, sum_dy_xmu, total_dy, total_dy_xmu, zero, block_scale, streaming, blocks[5:],
        )  # fmt: skip
        for channel in range(channels * members):
            sums = _channel_sums(channel, channels * members, fold, length, total_dy, total_dy_xmu)
            partials[part, 0, statistic * members + channel] = sums[0]
            partials[part, 1, statistic * members + channel] = sums[1]
        task = next_task(board, me)


@device_function
def _position_gradient(i, p, begin, dy, x, mean, scale, slope, offset):
    centered = load(x, begin + i) - load_scratch(mean, p)
    rest = centered * load_scratch(slope, p) + load_scratch(offset, p)
    return load(dy, begin + i) * load_scratch(scale, p) + rest


@device_function
def _columns_gradient(
    dy, x, dx, start, stride, rows, width, tail_width, mean, scale, slope, offset, streaming, rooms
):
    """Dx of `rows` rows of `width` positions and, below them, of `tail_width` positions."""
    lead = row_lead(dx, start, stride, streaming)
    mean, scale = lay(dx, mean, rooms[0], width, lead), lay(dx, scale, rooms[1], width, lead)
    slope, offset = lay(dx, slope, rooms[2], width, lead), lay(dx, offset, rooms[3], width, lead)
    numbers = (dy, x, mean, scale, slope, offset)
    write_rows(
        dx, start, stride, rows, width, tail_width, lead, streaming, _position_gradient, numbers,
        dy, x,
    )  # fmt: skip


@device_function
def _spread_shares(
    x, statistic, channels, members, parameters, fold, inner, residual, inv_std, weight,
    sum_dy, sum_dy_xmu, count, block_slope, block_offset,
):  # fmt: skip
    first = statistic * members % parameters
    if fold * inner == 1:
        for channel in range(channels):
            slope, offset = _share(
                x, statistic + channel, 1, first + channel, residual, inv_std, weight,
                sum_dy, sum_dy_xmu, count,
            )  # fmt: skip
            store(block_slope, channel, slope)
            store(block_offset, channel, offset)
        return
    for channel in range(channels):
        slope, offset = _share(
            x, statistic + channel, members, first + channel * members, residual, inv_std, weight,
            sum_dy, sum_dy_xmu, count,
        )  # fmt: skip
        spread(slope, channel, channels, fold, inner, block_slope)
        spread(offset, channel, channels, fold, inner, block_offset)


@shared_kernel
def _gradient_columns(
    board, me, dy, x, dx, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, count,
    streaming, /, members, parameters, batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels,
):  # fmt: skip
    """A task is one part of one block; the last part goes first, being nearest."""
    most = fold * block_channels * inner
    blocks = scratch(x, (8, most + LINE_ELEMENTS))
    block_mean, block_scale, block_slope, block_offset = blocks[0], blocks[1], blocks[2], blocks[3]
    known = -1  # whose numbers are spread, as in `_transform_columns`
    task = last_task(board, me)
    while task >= 0:
        statistic, channels, _, start, height, tail = columns_piece(
            task, outer, group, inner, fold, rows, tail_rows, part_rows, parts, block_channels
        )
        if statistic != known:
            _spread_means(statistic, channels, fold, inner, mean, block_mean)
            _spread_scales(
                x, statistic, channels, members, parameters, fold, inner, inv_std, weight,
                block_scale,
            )  # fmt: skip
            _spread_shares(
                x, statistic, channels, members, parameters, fold, inner, residual, inv_std, weight,
                sum_dy, sum_dy_xmu, count, block_slope, block_offset,
            )  # fmt: skip
            known = statistic
        _columns_gradient(
            dy, x, dx, start, fold * group * inner, height, fold * channels * inner,
            tail * channels * inner, block_mean, block_scale, block_slope, block_offset, streaming,
            blocks[4:],
        )  # fmt: skip
        task = last_task(board, me)


@partial(shared_kernel, last=_add_up_near)
def _backward_columns(
    board, me, dy, x, dx, mean, residual, inv_std, weight, both_sums, dweight, dbias, streaming,
    /, members, parameters, batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels, runs,
):  # fmt: skip
    """A task is one block of whole channels; `both_sums` gets those of channels.

    `runs`: whether it is written run by run.
    """
    sum_dy, sum_dy_xmu = both_sums[0], both_sums[1]
    most = fold * block_channels * inner
    blocks, totals = scratch(x, (8, most + LINE_ELEMENTS)), np.empty((2, most))
    block_mean, block_scale, block_slope, block_offset = blocks[0], blocks[1], blocks[2], blocks[3]
    block_dy, block_dy_xmu = blocks[4], blocks[5]
    total_dy, total_dy_xmu = totals[0], totals[1]
    sums = np.empty((2, block_channels * members))
    of_dy, of_dy_xmu = sums[0], sums[1]
    stride = fold * group * inner
    length = inner // members
    task = next_task(board, me)
    while task >= 0:
        statistic, channels, _, start, _, _ = columns_piece(
            task, outer, group, inner, fold, rows, tail_rows, rows, 1, block_channels
        )
        width = fold * channels * inner
        first = statistic * members
        _spread_means(statistic, channels, fold, inner, mean, block_mean)
        sums[:, :] = 0.0
        for part in range(parts):
            height, tail = columns_part(part, rows, tail_rows, part_rows, parts)
            _columns_reduce(
                dy, x, None, start + part * part_rows * stride, stride, height, width,
                tail * channels * inner, chunk_rows, block_mean, blocks[6],
                block_dy, block_dy_xmu, total_dy, total_dy_xmu, block_dy, block_dy, False, blocks,
            )  # fmt: skip
            for channel in range(channels * members):
                part_sums = _channel_sums(
                    channel, channels * members, fold, length, total_dy, total_dy_xmu
                )
                store(of_dy, channel, load_scratch(of_dy, channel) + part_sums[0])
                store(of_dy_xmu, channel, load_scratch(of_dy_xmu, channel) + part_sums[1])
        _write_block_sums(
            statistic, channels, members, residual, of_dy, of_dy_xmu, sum_dy, sum_dy_xmu
        )
        if batch == 1:
            _write_gradients(
                first, first + channels * members, members, inv_std, sum_dy, sum_dy_xmu, dweight,
                dbias,
            )  # fmt: skip
        copies, extent = (1, 1) if runs else (fold, inner)
        _spread_scales(
            x, statistic, channels, members, parameters, copies, extent, inv_std, weight,
            block_scale,
        )  # fmt: skip
        _spread_shares(
            x, statistic, channels, members, parameters, copies, extent, residual, inv_std, weight,
            sum_dy, sum_dy_xmu, np.float64(outer * inner), block_slope, block_offset,
        )  # fmt: skip
        if runs:
            _spread_means(statistic, channels, 1, 1, mean, block_mean)
            known = (dy, x, dx, block_mean, block_scale, block_slope, block_offset)
            column_runs(
                start, channels, outer, group * inner, inner, _write_gradient, known,
            )  # fmt: skip
        else:
            _columns_gradient(
                dy, x, dx, start, stride, rows, width, tail_rows * channels * inner,
                block_mean, block_scale, block_slope, block_offset, streaming, blocks[4:],
            )  # fmt: skip
        task = next_task(board, me)


# --- both ---------------------------------------------------------------------


@kernel
def _finish_sums(partials, members, residual, sum_dy, sum_dy_xmu):
    totals = np.zeros(partials.shape[1:])
    total_dy, total_dy_xmu = totals[0], totals[1]
    for part in range(partials.shape[0]):
        of_dy, of_dy_xmu = partials[part, 0], partials[part, 1]
        for channel in range(total_dy.size):
            store(total_dy, channel, load_scratch(total_dy, channel) + load(of_dy, channel))
            total = load_scratch(total_dy_xmu, channel) + load(of_dy_xmu, channel)
            store(total_dy_xmu, channel, total)
    for channel in range(total_dy.size):
        _write_sums(
            channel, divide(channel, members)[0], residual, load_scratch(total_dy, channel),
            load_scratch(total_dy_xmu, channel), sum_dy, sum_dy_xmu,
        )  # fmt: skip


_REDUCE = {Segments: _reduce_segments, Columns: _reduce_columns}
_BACKWARD = {Segments: _backward_segments, Columns: _backward_columns}


class _Call(NamedTuple):
    """What gradients need that are computed while x and dy are near, but the arrays' elements."""

    kernel: Any
    tasks: int
    numbers: Any
    sums: tuple[int, ...]  # shape of what is summed up
    rows: bool
    laid: bool  # whether it takes a weight as `row_parameter` gives it
    together: bool  # whether the kernel adds up what samples have
    without_dx: bool = False  # whether it has the sums alone, too, as those of rows in pieces do


@lru_cache(maxsize=1024)
def _fused(
    geometry: Geometry, dtype: np.dtype, centered: bool, threads: int, streaming: bool
) -> _Call | None:
    """To compute dx while x and dy are near; None if that is not to be."""
    cut = plan(geometry, dtype.itemsize, 2, centered)
    short = short_backward(geometry, dtype.itemsize)
    if short and geometry.outer > 1:
        cut = rows_plan(geometry, dtype.itemsize, 2)
    if isinstance(cut, Rows):
        if not cut.resident:
            return None
        extents = row_extents(geometry)
        _, number, length = extents
        kernel = short or backward_rows
        sums: tuple[int, ...] = (cut.blocks, 2, number * length)
        laid, inner = lays_before(geometry, dtype), geometry.inner
        times, outer = 0 if laid else inner, geometry.outer
        arguments = (inner, times, outer, *extents, *cut.arguments)
        together = prod(sums) * statistics_dtype(dtype).itemsize < ADDED_APART_BYTES
        last = numbers(*arguments)
        pieces = outer > 1
        return _Call(kernel, cut.resident_tasks, last, sums, True, laid, together, pieces)
    if not stays_near(cut, threads):
        return None
    runs = by_runs(geometry, dtype.itemsize, cut, streaming)
    if sweeps_apart(geometry, dtype.itemsize, runs):
        return None
    arguments = (*_extents(cut, geometry), *cut.arguments)
    if isinstance(cut, Columns):
        arguments = (*arguments, runs)
    sums = (2, geometry.batch * geometry.group)
    kernel, last = _BACKWARD[type(cut)], numbers(*arguments)
    return _Call(kernel, cut.resident_tasks, last, sums, False, False, True)


def _extents(cut, geometry: Geometry):
    """A geometry as the kernels of a plan take it."""
    if isinstance(cut, Columns):
        return *geometry[4:], *geometry.merged()[:4]
    return geometry


def _sums(dy, x, mean, residual, inv_std, weight, training, geometry: Geometry, out=None):
    """Both sums of every channel, in the accumulator type.

    `out`, if there is one, becomes dx for given statistics in the same sweep.
    """
    cut = plan(geometry, x.itemsize, 2 if training else 0)
    assert not isinstance(cut, Rows)
    channels = geometry.batch * geometry.group
    partials = np.empty((cut.parts, 2, channels))
    run(
        _REDUCE[type(cut)], cut.tasks, 2 * x.nbytes, dy.ravel(), x.ravel(),
        x.ravel()[:0] if out is None else out.ravel(), mean, inv_std, weight, partials,
        3 * x.nbytes > STREAMING_BYTES, numbers(*_extents(cut, geometry), *cut.arguments),
    )  # fmt: skip
    sums = np.empty((2, channels), mean.dtype)
    _finish_sums(partials, geometry.members, residual, sums[0], sums[1])
    return sums


def _backward_near(
    call: _Call, dy, x, mean, residual, inv_std, weight, offset, geometry: Geometry, out,
    dweight, dbias,
):  # fmt: skip
    """Gradients as `backward` has them; flat ones of the parameters, empty if not wanted."""
    kernel, tasks, last, shape, rows, laid, together, _ = call
    dtype, nbytes = inv_std.dtype, 3 * x.nbytes
    wanted = dweight.size + dbias.size > 0
    if rows and not wanted:
        shape = (*shape[:2], 0)
    sums = np.empty(shape, dtype)
    # By a kernel of its own: large ones need not be compiled for more than one type of these.
    apart = wanted and not (together and dweight.dtype is dbias.dtype is dtype)
    parameters = (NONE[dtype], NONE[dtype]) if apart else (dweight, dbias)
    dx = x.ravel()[:0] if out is None else out.ravel()
    arrays = dy.ravel(), x.ravel(), dx, mean, residual, inv_std
    streaming = nbytes > STREAMING_BYTES
    done: Any = NotImplemented
    board, me = hire(tasks, nbytes)
    if not (laid or offset):
        own = NONE[dtype] if weight is None else weight
        done = kernel.entry(board, me, tasks, *arrays, own, sums, *parameters, streaming, last)
    if done is NotImplemented:
        if laid:
            weight = row_parameter(weight, dtype, geometry, 1.0, offset)
        else:
            weight = parameter(weight, dtype, offset)
        kernel(board, me, tasks, *arrays, weight, sums, *parameters, streaming, last)
    if board:
        dismiss()
    if not apart:
        return
    if rows:
        add_up(sums, geometry, dweight, dbias)
    else:
        _add_up_samples(sums, inv_std, geometry.members, geometry.parameters, dweight, dbias)


def _backward_rows(
    dy, x, mean, residual, inv_std, weight, geometry: Geometry, cut: Rows, out, dweight, dbias
):
    """Gradients as `backward` has them, of rows that are read twice; `out` may be None."""
    statistics = mean, residual, inv_std
    extents = row_extents(geometry)
    _, number, length = extents
    # A sum over all samples is the gradient itself, where that has the same type.
    partials = np.empty((1, 2, number * length), inv_std.dtype)
    of_weight, of_bias = (
        wanted if wanted.size == room.size and wanted.dtype is room.dtype else room
        for wanted, room in zip((dweight, dbias), partials[0], strict=True)
    )
    sums = np.empty((geometry.statistics, cut.pieces, 2))
    run(
        reduce_rows, number * cut.pieces, 2 * x.nbytes, dy.ravel(), x.ravel(),
        *statistics, weight, sums, of_weight, of_bias, numbers(*extents, *cut.arguments),
    )  # fmt: skip
    if out is not None:
        run(
            gradient_rows, cut.tasks, 3 * x.nbytes, dy.ravel(), x.ravel(), out.ravel(),
            *statistics, weight, sums, 3 * x.nbytes > STREAMING_BYTES,
            numbers(*extents, *cut.arguments),
        )  # fmt: skip
    dweight, dbias = (
        NONE[inv_std.dtype] if there is wanted else wanted
        for there, wanted in ((of_weight, dweight), (of_bias, dbias))
    )
    if dweight.size + dbias.size > 0:
        add_up(partials, geometry, dweight, dbias)


# --- the verbs ----------------------------------------------------------------


def reduce(dy, x, mean, residual, geometry: Geometry):
    """Sums of dy and of dy * (x - (mean + residual)) over every channel; residual may be None."""
    none = NONE[mean.dtype]
    residual = optional(residual, mean.dtype)
    sums = _sums(dy, x, optional(mean, mean.dtype), residual, none, none, True, geometry)
    return sums[0], sums[1]


def input_gradient(
    dy, x, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, count, geometry: Geometry, out
):
    """`out` = dx from sums over the `count` values that mean and inv_std were taken from."""
    nbytes, dtype = 3 * x.nbytes, mean.dtype
    streaming = nbytes > STREAMING_BYTES
    given = [optional(array, dtype) for array in (mean, residual, inv_std)]
    sums = [optional(array, dtype) for array in (sum_dy, sum_dy_xmu)]
    arguments = [*given, parameter(weight, dtype), *sums, float(count)]
    cut = gradient_plan(geometry, x.itemsize, streaming)
    if isinstance(cut, Runs):
        kernel, tasks, last = _gradient_runs, cut.tasks, numbers(*cut.arguments)
    elif isinstance(cut, Segments):
        tasks, stretch = stretches(geometry, x.itemsize, get_num_threads())
        kernel, last = _gradient_segments, numbers(*geometry, stretch)
    elif isinstance(cut, Columns):
        last = numbers(*_extents(cut, geometry), *cut.arguments)
        kernel, tasks = _gradient_columns, cut.tasks
    run(kernel, tasks, nbytes, dy.ravel(), x.ravel(), out.ravel(), *arguments, streaming, last)


def backward(
    dy, x, mean, residual, inv_std, weight, training, geometry: Geometry, out, dweight, dbias,
    weight_offset=0.0,
):  # fmt: skip
    """Gradients with respect to x into `out`, to weight into `dweight`, to bias into `dbias`.

    Each of them may be None. In training mean and inv_std are those of x, or, if mean is None,
    those about zero, and there is no bias; otherwise they are given numbers, and None means 0 and
    1. Weights count `weight_offset` more.
    """
    dtype = statistics_dtype(x.dtype)
    none = NONE[dtype]
    centered = mean is not None or not training
    if centered:
        mean = np.zeros(geometry.statistics, dtype) if mean is None else mean
        residual = optional(residual, dtype)
    if inv_std is None:
        inv_std = np.ones(geometry.statistics, dtype)
    dweight = none if dweight is None else dweight.ravel()
    dbias = none if dbias is None else dbias.ravel()
    if training:
        streaming = 3 * x.nbytes > STREAMING_BYTES
        call = _fused(geometry, x.dtype, centered, get_num_threads(), streaming)
        if call is not None and (out is not None or call.without_dx):
            _backward_near(
                call, dy, x, mean, residual, inv_std, weight, weight_offset, geometry, out,
                dweight, dbias,
            )  # fmt: skip
            return
    cut = plan(geometry, x.itemsize, 2, centered)
    if isinstance(cut, Rows):
        weight = row_parameter(weight, dtype, geometry, 1.0, weight_offset)
        _backward_rows(dy, x, mean, residual, inv_std, weight, geometry, cut, out, dweight, dbias)
        return
    weight = parameter(weight, dtype, weight_offset)
    sums = _sums(
        dy, x, mean, residual, inv_std, weight, training, geometry, None if training else out
    )
    if training and out is not None:
        input_gradient(
            dy, x, mean, residual, inv_std, weight, sums[0], sums[1], geometry.count, geometry, out
        )
    _add_up_samples(sums, inv_std, geometry.members, geometry.parameters, dweight, dbias)
