"""y = (x - mean) * inv_std * weight + bias.

`transform` applies given statistics, `infer` running ones. `normalize` takes them from
the data first: what shares a statistic is read from memory once if it fits the cache (but see
`sweeps_apart`), else once for the statistics and once more, from its end, for the transform.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ..checks import statistics_dtype
from ..geometry import Geometry
from .elements import (
    LINE_ELEMENTS,
    are_dealt,
    as_accumulator,
    dense,
    device_function,
    flush,
    follow,
    kernel,
    lay,
    load,
    load_scratch,
    row_lead,
    scratch,
    stage_size,
    store,
    strict_function,
    way_ahead,
    write_on,
    write_rows,
    write_run,
)
from .memory import last_level_cache
from .pieces import (
    block_runs,
    column_runs,
    columns_part,
    columns_piece,
    divide,
    next_parameters,
    runs_row,
    segments_starts,
    task_runs,
)
from .plan import (
    FETCHED_BLOCK_BYTES,
    SLOW_THIRD_LEVEL,
    Columns,
    Rows,
    Runs,
    Segments,
    by_runs,
    plan,
    rows_plan,
    statistics_plan,
    stays_near,
    stretches,
    sweeps_apart,
    transform_plan,
)
from .pool import dismiss, hire, run
from .rows import (
    lays_before,
    normalize_rows,
    row_extents,
    row_parameter,
    squares_rows,
    transform_rows,
)
from .short_rows import short_normalization
from .statistics import (
    NONE,
    blend_running,
    channel_of_columns,
    columns_moments,
    merge_into,
    merge_parts,
    parameter,
    partial_moments,
    residual_times,
    save,
    segments_moments,
    take_given,
    update_running,
)
from .tasks import last_task, next_task, numbers, shared_kernel
from .threads import get_num_threads

__all__ = ["infer", "normalize", "transform"]

# Where the arrays of a call are larger than this together, its output bypasses the caches: it
# would push out the data still to be read and be gone itself before anyone reads it. A slow third
# level is large, but shared by many.
STREAMING_BYTES = min((48 if SLOW_THIRD_LEVEL else 64) << 20, last_level_cache()[0] // 4 * 3)


@strict_function
def _coefficients(x, statistic, parameter, residual, inv_std, weight, bias):
    """(scale, shift) of y = (x - mean) * scale + shift for a channel.

    The shift makes up for the residual: what rounding took from the mean.
    """
    scale = np.float64(load_scratch(inv_std, statistic))
    if weight.size:
        scale *= np.float64(load(weight, parameter))
    shift = np.float64(load(bias, parameter)) if bias.size else 0.0
    shift -= residual_times(residual, statistic, scale)
    return as_accumulator(x, scale), as_accumulator(x, shift)


# --- segments -----------------------------------------------------------------


@device_function
def _transformed(i, _, x, mean, scale, shift):
    return (load(x, i) - mean) * scale + shift


@device_function
def run_transform(x, y, start, end, mean, scale, shift, streaming, stage, staged, fetched, ahead):
    """Transform the elements [start, end) of one channel, by way of a stage as in `write_on`."""
    numbers = (x, mean, scale, shift)
    return write_on(
        y, start, end, streaming, _transformed, numbers, stage, staged, fetched, None, ahead
    )


@strict_function
def _take_coefficients(x, given_mean, given_var, eps, statistics, weight, bias, known):
    """`take_given`, then every statistic's mean, scale and shift into the last of `known` rows."""
    take_given(given_mean, given_var, eps, statistics)
    mean, inv_std, residual = statistics[0], statistics[1], statistics[2]
    means, scales, shifts = known[3], known[4], known[5]
    for i in range(inv_std.size):
        scale, shift = _coefficients(x, i, i, residual, inv_std, weight, bias)
        store(means, i, load_scratch(mean, i))
        store(scales, i, scale)
        store(shifts, i, shift)


@device_function
def _write_transformed(start, end, channel, x, y, mean, scales, shifts):
    center, scale = load_scratch(mean, channel), load_scratch(scales, channel)
    numbers = (x, center, scale, load_scratch(shifts, channel))
    write_run(y, start, end, _transformed, numbers)


@shared_kernel
def _transform_runs(
    board, me, x, y, given_mean, given_var, eps, statistics, weight, bias, _,
    /, total, group, inner, runs,
):  # fmt: skip
    """A task is some whole runs, each of one channel; the last ones go first, being nearest.

    Each thread works out the channels' numbers: to fetch another's from its cache takes longer.
    """
    known = scratch(x, (6, group))
    if me == 0 or given_mean.size == 0:
        _take_coefficients(x, given_mean, given_var, eps, statistics, weight, bias, known)
    else:
        _take_coefficients(x, given_mean, given_var, eps, known, weight, bias, known)
    arguments = (x, y, known[3], known[4], known[5])
    task = last_task(board, me)
    while task >= 0:
        task_runs(task, runs, total, group, inner, _write_transformed, arguments)
        task = last_task(board, me)


@partial(shared_kernel, first=take_given)
def _transform_segments(
    board, me, x, y, given_mean, given_var, eps, statistics, weight, bias, streaming,
    /, batch, outer, group, inner, members, parameters, stretch,
):  # fmt: skip
    """A task is a stretch of memory; the last one goes first, being nearest."""
    mean, inv_std, residual = statistics[0], statistics[1], statistics[2]
    stage = np.empty(stage_size(y, inner, streaming), y.dtype)
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
                scale, shift = _coefficients(
                    x, statistic, parameter + run, residual, inv_std, weight, bias
                )
                staged = run_transform(
                    x, y, start, min(stop, end), load(mean, statistic), scale, shift, streaming,
                    stage, staged, x, ahead,
                )  # fmt: skip
                start, stop, run = stop, stop + inner, run + 1
        flush(y, staged, end, stage)
        task = last_task(board, me)


@shared_kernel
def _normalize_segments(
    board, me, x, y, weight, bias, running_mean, running_var, eps, bessel, factor, statistics,
    streaming, /, members, parameters, batch, outer, group, inner,
    block, chunk_rows, chunk_length, part_chunks, parts,
):  # fmt: skip
    """A task is one block of statistics; `statistics` gets what `save` writes.

    Group, inner and chunks are those of the merged geometry.
    """
    mean, inv_std, residual = statistics[0], statistics[1], statistics[2]
    heads, starts = np.empty(block, np.int64), np.empty(block * members, np.int64)
    coefficients = scratch(x, (3, block * members))
    centers, sums = scratch(x, block), np.empty((2, block))
    moments, part_moments = np.empty((3, block)), np.empty((3, block))
    means, scales, shifts = coefficients[0], coefficients[1], coefficients[2]
    length = inner // members
    stage = np.empty(stage_size(y, length, streaming), y.dtype)
    # What is fetched while a block is written: the next block, if that is not too large, but where
    # a stage is the next row, and in float32 that is read on and on the next lines.
    if outer > 1:
        near = block * outer * inner * x.itemsize <= FETCHED_BLOCK_BYTES
        ahead = group * inner if stage.size else near * block * inner
    else:
        ahead = block * inner if x.itemsize == 2 else way_ahead(x)
    task = next_task(board, me)
    while task >= 0:
        first = task * block
        last = min(batch * group, first + block)
        moments[:, :] = 0.0
        for part in range(parts):
            segments_moments(
                x, first, last, part, outer, group, inner, chunk_rows, chunk_length, part_chunks,
                heads, centers, sums, part_moments,
            )  # fmt: skip
            for i in range(last - first):
                merge_into(moments, i, part_moments[0, i], part_moments[1, i], part_moments[2, i])
        for i in range(last - first):  # vectorized
            save(statistics, first + i, moments[0, i], moments[1, i], moments[2, i], eps)
        for statistic in range(first, last):
            blend_running(statistics, statistic, running_mean, running_var, bessel, factor)
        segments_starts(first, last, outer, group, inner, heads)
        parameter = divide(first * members, parameters)[1]
        for statistic in range(first, last):
            begin = (statistic - first) * members
            for member in range(members):
                i = begin + member
                scale, shift = _coefficients(
                    x, statistic, parameter + member, residual, inv_std, weight, bias
                )
                store(means, i, load_scratch(mean, statistic))
                store(scales, i, scale)
                store(shifts, i, shift)
                starts[i] = heads[statistic - first] + member * length
            parameter = next_parameters(parameter, members, parameters)
        channels, stride = (last - first) * members, group * inner
        if streaming:
            staged = end = starts[0]
            for row in range(outer):
                for i in range(channels):
                    start = starts[i] + row * stride
                    staged = follow(y, staged, end, start, stage)
                    end = start + length
                    staged = run_transform(
                        x, y, start, end, load_scratch(means, i), load_scratch(scales, i),
                        load_scratch(shifts, i), True, stage, staged, x, ahead,
                    )  # fmt: skip
            flush(y, staged, end, stage)
        else:
            known = (x, y, means, scales, shifts)
            block_runs(starts, channels, outer, stride, length, _write_transformed, known)
        task = next_task(board, me)


# --- columns ------------------------------------------------------------------


@device_function
def _position_transformed(i, p, begin, x, mean, scale, shift):
    centered = load(x, begin + i) - load_scratch(mean, p)
    return centered * load_scratch(scale, p) + load_scratch(shift, p)


@device_function
def columns_transform(
    x, y, start, stride, rows, width, tail_width, mean, scale, shift, streaming, rooms
):
    """Transform `rows` rows of `width` positions and, below them, `tail_width` positions.

    One row after another: several at a time would share what is loaded of the positions'
    numbers, but memory is fetched ahead where it is read on and on.
    """
    lead = row_lead(y, start, stride, streaming)
    mean, scale = lay(y, mean, rooms[0], width, lead), lay(y, scale, rooms[1], width, lead)
    numbers = (x, mean, scale, lay(y, shift, rooms[2], width, lead))
    write_rows(
        y, start, stride, rows, width, tail_width, lead, streaming, _position_transformed, numbers,
        x, None,
    )  # fmt: skip


@device_function
def _spread(
    x, statistic, channels, members, parameters, fold, inner, mean, residual, inv_std, weight,
    bias, block_mean, block_scale, block_shift,
):  # fmt: skip
    """Every position's numbers from those of the channels whose statistics begin at one."""
    length = inner // members
    first = statistic * members % parameters
    if length == 1:  # every position has parameters of its own: vectorized
        if members == 1:
            for channel in range(channels):
                s = statistic + channel
                scale, shift = _coefficients(x, s, first + channel, residual, inv_std, weight, bias)
                store(block_mean, channel, load_scratch(mean, s))
                store(block_scale, channel, scale)
                store(block_shift, channel, shift)
        else:
            for channel in range(channels):
                s = statistic + channel
                center = load_scratch(mean, s)
                for p in range(channel * inner, (channel + 1) * inner):
                    scale, shift = _coefficients(x, s, first + p, residual, inv_std, weight, bias)
                    store(block_mean, p, center)
                    store(block_scale, p, scale)
                    store(block_shift, p, shift)
        width = channels * inner
        for copy in range(width, fold * width, width):
            for p in range(width):
                store(block_mean, copy + p, load_scratch(block_mean, p))
                store(block_scale, copy + p, load_scratch(block_scale, p))
                store(block_shift, copy + p, load_scratch(block_shift, p))
        return
    for channel in range(channels):
        s = statistic + channel
        center = load_scratch(mean, s)
        for member in range(channel * members, (channel + 1) * members):
            scale, shift = _coefficients(x, s, first + member, residual, inv_std, weight, bias)
            for copy in range(fold):  # as in `spread`
                start = copy * channels * inner + member * length
                for p in range(start, start + length):
                    store(block_mean, p, center)
                    store(block_scale, p, scale)
                    store(block_shift, p, shift)


@partial(shared_kernel, first=take_given)
def _transform_columns(
    board, me, x, y, given_mean, given_var, eps, statistics, weight, bias, streaming,
    /, members, parameters, batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels,
):  # fmt: skip
    """A task is one part of one block; the last part goes first, being nearest."""
    mean, inv_std, residual = statistics[0], statistics[1], statistics[2]
    most = fold * block_channels * inner
    blocks = scratch(x, (6, most + LINE_ELEMENTS))
    block_mean, block_scale, block_shift = blocks[0], blocks[1], blocks[2]
    known = -1  # whose numbers are spread: often several parts of a block follow each other
    task = last_task(board, me)
    while task >= 0:
        statistic, channels, _, start, height, tail = columns_piece(
            task, outer, group, inner, fold, rows, tail_rows, part_rows, parts, block_channels
        )
        if statistic != known:
            _spread(
                x, statistic, channels, members, parameters, fold, inner, mean, residual, inv_std,
                weight, bias, block_mean, block_scale, block_shift,
            )  # fmt: skip
            known = statistic
        columns_transform(
            x, y, start, fold * group * inner, height, fold * channels * inner,
            tail * channels * inner, block_mean, block_scale, block_shift, streaming, blocks[3:],
        )  # fmt: skip
        task = last_task(board, me)


@shared_kernel
def _normalize_columns(
    board, me, x, y, weight, bias, running_mean, running_var, eps, bessel, factor, statistics,
    streaming, /, members, parameters, batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels, runs,
):  # fmt: skip
    """A task is one block of whole channels; `statistics` gets what `save` writes.

    `runs`: whether it is written run by run.
    """
    mean, inv_std, residual = statistics[0], statistics[1], statistics[2]
    most = fold * block_channels * inner
    blocks = scratch(x, (6, most + LINE_ELEMENTS))
    center, total, squares = blocks[0], blocks[1], blocks[2]
    block_mean, block_scale, block_shift = blocks[3], blocks[4], blocks[5]
    positions = np.empty((2, most))
    position_mean, position_m2 = positions[0], positions[1]
    moments = np.empty((3, block_channels))
    stride = fold * group * inner
    task = next_task(board, me)
    while task >= 0:
        statistic, channels, _, start, _, _ = columns_piece(
            task, outer, group, inner, fold, rows, tail_rows, rows, 1, block_channels
        )
        width = fold * channels * inner
        moments[:, :] = 0.0
        for part in range(parts):
            height, tail = columns_part(part, rows, tail_rows, part_rows, parts)
            columns_moments(
                x, start + part * part_rows * stride, stride, height, width,
                tail * channels * inner, chunk_rows,
                center, total, squares, position_mean, position_m2,
            )  # fmt: skip
            for channel in range(channels):
                size, part_mean, part_m2 = channel_of_columns(
                    channel, channels, fold, inner, height, tail, position_mean, position_m2
                )
                merge_into(moments, channel, size, part_mean, part_m2)
        for channel in range(channels):
            save(
                statistics, statistic + channel,
                moments[0, channel], moments[1, channel], moments[2, channel], eps,
            )  # fmt: skip
        for s in range(statistic, statistic + channels):
            blend_running(statistics, s, running_mean, running_var, bessel, factor)
        copies, extent = (1, 1) if runs else (fold, inner)
        _spread(
            x, statistic, channels, members, parameters, copies, extent, mean, residual, inv_std,
            weight, bias, block_mean, block_scale, block_shift,
        )  # fmt: skip
        if runs:
            known = (x, y, block_mean, block_scale, block_shift)
            column_runs(
                start, channels, outer, group * inner, inner, _write_transformed, known,
            )  # fmt: skip
        else:
            columns_transform(
                x, y, start, stride, rows, width, tail_rows * channels * inner,
                block_mean, block_scale, block_shift, streaming, blocks[:3],
            )  # fmt: skip
        task = next_task(board, me)


@kernel
def _finish_normalization(partials, running_mean, running_var, eps, bessel, factor, statistics):
    merge_parts(partials)
    count, mean, m2 = partials[0, 0], partials[0, 1], partials[0, 2]
    for i in range(count.size):
        save(statistics, i, load_scratch(count, i), load_scratch(mean, i), load_scratch(m2, i), eps)
        blend_running(statistics, i, running_mean, running_var, bessel, factor)


@kernel
def _given_statistics(given_mean, given_var, eps, statistics):
    take_given(given_mean, given_var, eps, statistics)


# --- the verbs ----------------------------------------------------------------

_NORMALIZE = {Segments: _normalize_segments, Columns: _normalize_columns}


class _Call(NamedTuple):
    """What a call of a shared kernel needs that does not depend on the arrays' elements."""

    statistics: tuple[int, int]  # shape
    dtype: np.dtype  # accumulator type
    nbytes: int  # of x and the output
    kernel: Any = None
    laid: bool = False  # whether it takes parameters as `row_parameter` gives them
    tasks: int = 0
    numbers: Any = None
    # Whether to try the kernel's entry on the arguments as they are, and to look for what has to be
    # converted, which takes a fifth of a small call, only when that refuses.
    plain: bool = False


def _with_kernel(call: _Call, kernel: Any, laid: bool, tasks: int, arguments: Any) -> _Call:
    """The call, with its kernel and what that is given last."""
    return call._replace(
        kernel=kernel, laid=laid, tasks=tasks, numbers=numbers(*arguments), plain=not laid
    )


def _call(geometry: Geometry, dtype: np.dtype, rows: int) -> _Call:
    """A call with so many rows of statistics, and no kernel yet."""
    nbytes = 2 * geometry.size * dtype.itemsize
    return _Call((rows, geometry.statistics), statistics_dtype(dtype), nbytes)


@lru_cache(maxsize=1024)
def _given(geometry: Geometry, dtype: np.dtype, threads: int, streaming: bool) -> _Call:
    """To transform x of this dtype with given statistics; `streaming`, if past the caches."""
    cut = transform_plan(geometry, dtype.itemsize, streaming)
    arguments: tuple[int, ...]
    if isinstance(cut, Runs):
        kernel, tasks, arguments = _transform_runs, cut.tasks, cut.arguments
    elif isinstance(cut, Rows):
        extents = row_extents(geometry)
        kernel, tasks = transform_rows, extents[1] * cut.pieces
        arguments = (*extents, *cut.arguments)
    elif isinstance(cut, Segments):
        kernel = _transform_segments
        tasks, stretch = stretches(geometry, dtype.itemsize, threads)
        arguments = (*geometry, stretch)
    else:
        kernel, tasks = _transform_columns, cut.tasks
        arguments = (*geometry[4:], *geometry.merged()[:4], *cut.arguments)
    call = _call(geometry, dtype, 3)
    return _with_kernel(call, kernel, isinstance(cut, Rows), tasks, arguments)


@lru_cache(maxsize=1024)
def _fused(
    geometry: Geometry, dtype: np.dtype, centered: bool, threads: int, streaming: bool
) -> _Call:
    """To normalize whole statistics while they are near; no kernel if that is not to be."""
    apart = _call(geometry, dtype, 4)
    cut = plan(geometry, dtype.itemsize, 1, centered)
    short = short_normalization(geometry, dtype.itemsize)
    if short and geometry.outer > 1:
        cut = rows_plan(geometry, dtype.itemsize, 1)
    laid = False
    if isinstance(cut, Rows):
        if not cut.resident:
            return apart
        kernel, tasks = short or normalize_rows, cut.resident_tasks
        laid = lays_before(geometry, dtype)
        times, extents = 0 if laid else geometry.inner, row_extents(geometry)
        arguments = (times, geometry.outer, *extents, *cut.arguments)
    else:
        merged = statistics_plan(geometry, dtype.itemsize)
        runs = by_runs(geometry, dtype.itemsize, merged, streaming)
        if not stays_near(merged, threads) or sweeps_apart(geometry, dtype.itemsize, runs):
            return apart
        kernel, tasks = _NORMALIZE[type(merged)], merged.resident_tasks
        arguments = (*geometry[4:], *geometry.merged()[:4], *merged.arguments)
        if isinstance(merged, Columns):
            arguments = (*arguments, runs)
    call = _call(geometry, dtype, 4)
    return _with_kernel(call, kernel, laid, tasks, arguments)


def _parameters(call: _Call, x, weight, bias, geometry: Geometry, centered=True):
    """Weight and bias as a call's kernel takes them; None for a bias if there can be none."""
    dtype = call.dtype
    if call.laid:
        dealt = call.kernel is normalize_rows and are_dealt(x)
        return (
            row_parameter(weight, dtype, geometry, 1.0, 0.0, dealt),
            row_parameter(bias, dtype, geometry, 0.0, 0.0, dealt) if centered else None,
        )
    return parameter(weight, dtype), parameter(bias, dtype) if centered else None


def _transform(
    call: _Call, x, given_mean, given_var, eps, statistics, weight, bias, geometry: Geometry, out,
    centered=True,
):  # fmt: skip
    """Transform with statistics as `save` writes them; from given ones, unless these are empty."""
    _, _, nbytes, kernel, _, tasks, last, _ = call
    # Rows of one element have kernels of channels, which take a bias.
    centered = centered or kernel is not transform_rows
    weight, bias = _parameters(call, x, weight, bias, geometry, centered)
    run(
        kernel, tasks, nbytes, x.ravel(), out.ravel(), given_mean, given_var, eps, statistics,
        weight, bias, nbytes > STREAMING_BYTES, last,
    )  # fmt: skip


def transform(x, mean, residual, inv_std, weight, bias, geometry: Geometry, out):
    """`out` = (x - (mean + residual)) * inv_std * weight + bias.

    Each of mean, residual, inv_std, weight and bias may be None.
    """
    call = _given(geometry, x.dtype, get_num_threads(), 2 * x.nbytes > STREAMING_BYTES)
    statistics = np.zeros(call.statistics, call.dtype)
    statistics[1] = 1.0 if inv_std is None else inv_std
    if mean is not None:
        statistics[0] = mean
    if residual is not None:
        statistics[2] = residual
    none = NONE[call.dtype]
    _transform(call, x, none, none, 0.0, statistics, weight, bias, geometry, out)


def infer(x, running_mean, running_var, weight, bias, eps, geometry: Geometry, out):
    """Transform of x with running statistics into `out`.

    Returns mean, inv_std and residual (what rounding took from the mean) as the first rows of
    one array, in the accumulator type.
    """
    call = _given(geometry, x.dtype, get_num_threads(), 2 * x.nbytes > STREAMING_BYTES)
    shape, dtype, nbytes, kernel, _, tasks, last, plain = call
    statistics = np.empty(shape, dtype)
    if plain:
        board, me = hire(tasks, nbytes)
        none = NONE[dtype]
        done = kernel.entry(
            board, me, tasks, x.ravel(), out.ravel(), running_mean, running_var, eps, statistics,
            none if weight is None else weight, none if bias is None else bias,
            nbytes > STREAMING_BYTES, last,
        )  # fmt: skip
        if done is not NotImplemented:
            if board:
                dismiss()
            return statistics
    mean, var = running_mean, running_var
    if not (mean.dtype is var.dtype is dtype and mean.flags.carray and var.flags.carray):
        # By a kernel of its own: large ones need not be compiled for more than one type of these.
        _given_statistics(dense(mean).ravel(), dense(var).ravel(), eps, statistics)
        mean = var = NONE[dtype]
    _transform(call, x, mean, var, eps, statistics, weight, bias, geometry, out)
    return statistics


def normalize(
    x, weight, bias, running_mean, running_var, eps, scale, factor, geometry: Geometry, out,
    centered=True, weight_offset=0.0,
):  # fmt: skip
    """Statistics of x, then its transform with them into `out`.

    The running statistics take in mean and var * scale. Not `centered`, statistics are taken
    about zero, and there is no bias: the mean is 0, and the variance the mean square. Weights
    count `weight_offset` more. Returns mean, inv_std, residual (what rounding took from the mean)
    and variance as the first rows of one array, in the accumulator type.
    """
    streaming = 2 * x.nbytes > STREAMING_BYTES
    call = _fused(geometry, x.dtype, centered, get_num_threads(), streaming)
    shape, dtype, nbytes, kernel, _, tasks, last, plain = call
    statistics = np.empty(shape, dtype)
    none = NONE[dtype]
    if weight_offset and weight is not None:
        weight = parameter(weight, dtype, weight_offset)
    if plain:
        board, me = hire(tasks, nbytes)
        done = kernel.entry(
            board, me, tasks, x.ravel(), out.ravel(),
            none if weight is None else weight, none if bias is None and centered else bias,
            none if running_mean is None else running_mean,
            none if running_var is None else running_var,
            eps, scale, factor, statistics, nbytes > STREAMING_BYTES, last,
        )  # fmt: skip
        if done is not NotImplemented:
            if board:
                dismiss()
            return statistics
    # Running statistics of the accumulator type are blended where the batch's are saved.
    mean = var = none
    if running_mean is not None and running_mean.dtype is dtype and running_mean.flags.carray:
        mean = running_mean
    if running_var is not None and running_var.dtype is dtype and running_var.flags.carray:
        var = running_var
    if kernel is None:
        if centered:
            partials = partial_moments(x, geometry)
        else:
            cut = plan(geometry, x.itemsize, 1, False)
            assert isinstance(cut, Rows)
            partials = np.empty((cut.pieces, 3, geometry.statistics))
            run(
                squares_rows, cut.tasks, x.nbytes, x.ravel(), partials,
                numbers(*row_extents(geometry), *cut.arguments),
            )  # fmt: skip
        _finish_normalization(partials, mean, var, eps, scale, factor, statistics)
        call = _given(geometry, x.dtype, get_num_threads(), streaming)
        _transform(call, x, none, none, eps, statistics, weight, bias, geometry, out, centered)
    else:
        weight, bias = _parameters(call, x, weight, bias, geometry, centered)
        run(
            kernel, tasks, nbytes, x.ravel(), out.ravel(), weight, bias, mean, var, eps, scale,
            factor, statistics, nbytes > STREAMING_BYTES, last,
        )  # fmt: skip
    if mean is not running_mean and running_mean is not None:
        center = statistics[0]
        if running_mean.dtype == np.float64:
            center = center + statistics[2].astype(np.float64)
        update_running(running_mean, None, center, none, scale, factor)
    if var is not running_var and running_var is not None:
        update_running(None, running_var, none, statistics[3], scale, factor)
    return statistics
