"""Gradients of y = (x - mean) * inv_std * weight + bias.

`reduce` sums dy and dy * (x - mean) over every channel, `input_gradient`
takes it from there; between the two a synchronized norm adds up its ranks.
`backward` does both at once: a channel that fits the cache is read from
memory once. With mean and inv_std computed from the n values of x,

    dx = weight * inv_std * (dy - sum_dy / n - (x - mean) * inv_std^2 * sum_dy_xmu / n)

(Ioffe and Szegedy, 2015, section 3); with given statistics the last two terms
are absent.
"""

from __future__ import annotations

import numpy as np

from ..geometry import Geometry
from .elements import (
    accumulate,
    as_accumulator,
    device_function,
    flat,
    kernel,
    load,
    load_scratch,
    next_task,
    scratch,
    store,
    store_streaming,
    streaming_range,
    strict_function,
)
from .pieces import (
    columns_part,
    columns_piece,
    segments_chunk,
    segments_chunks,
    segments_unit,
    spread,
)
from .plan import Columns, Segments, plan, stays_near
from .statistics import NONE, parameter, residual_times
from .threads import get_num_threads, run
from .transform import STREAMING_BYTES, columns_transform, segments_transform, transform

__all__ = ["backward", "input_gradient", "reduce"]


@strict_function
def _coefficients(x, statistic, g, residual, inv_std, weight, sum_dy, sum_dy_xmu, count):
    """(scale, slope, offset) of dx = dy * scale + ((x - mean) * slope + offset).

    The offset makes up for the residual: what rounding took from the mean.
    """
    r = np.float64(load(inv_std, statistic))
    scale = r * np.float64(load(weight, g)) if weight.size else r
    slope = -(scale * r) * (sum_dy_xmu * r / count)  # in this order nothing overflows
    offset = -scale * (sum_dy / count) - residual_times(residual, statistic, slope)
    return as_accumulator(x, scale), as_accumulator(x, slope), as_accumulator(x, offset)


@strict_function
def _write_sums(statistic, residual, total_dy, total_dy_xmu, sum_dy, sum_dy_xmu):
    """Write a channel's sums, the second one about the mean before rounding."""
    total_dy_xmu -= residual_times(residual, statistic, total_dy)
    store(sum_dy, statistic, as_accumulator(sum_dy, total_dy))
    store(sum_dy_xmu, statistic, as_accumulator(sum_dy, total_dy_xmu))


# --- segments -----------------------------------------------------------------


@device_function
def _run_reduce(dy, x, start, length, mean):
    sum_dy = as_accumulator(x, 0.0)
    sum_dy_xmu = as_accumulator(x, 0.0)
    for i in range(start, start + length):
        gradient = load(dy, i)
        sum_dy = accumulate(sum_dy, gradient)
        sum_dy_xmu = accumulate(sum_dy_xmu, gradient * (load(x, i) - mean))
    return sum_dy, sum_dy_xmu


@device_function
def _segments_part(
    dy, x, base, stride, outer, inner, chunk_rows, chunk_length, part_chunks, part, mean
):
    """Sums of dy and dy * (x - mean) over one part of the channel that begins at `base`."""
    chunks = segments_chunks(outer, inner, chunk_rows, chunk_length)
    sum_dy, sum_dy_xmu = 0.0, 0.0
    for chunk in range(part * part_chunks, min(chunks, (part + 1) * part_chunks)):
        row, rows, offset, length = segments_chunk(chunk, outer, inner, chunk_rows, chunk_length)
        for r in range(row, row + rows):
            run_dy, run_dy_xmu = _run_reduce(dy, x, base + r * stride + offset, length, mean)
            sum_dy += run_dy
            sum_dy_xmu += run_dy_xmu
    return sum_dy, sum_dy_xmu


@kernel
def _reduce_segments(
    counter, tasks, dy, x, mean, partials,
    batch, outer, group, inner, task_units, chunk_rows, chunk_length, part_chunks, parts,
):  # fmt: skip
    """A task is `task_units` parts; `partials[statistic, part]` gets the two sums."""
    units = batch * group * parts
    task = next_task(counter)
    while task < tasks:
        for unit in range(task * task_units, min(units, (task + 1) * task_units)):
            statistic, _, part, base = segments_unit(unit, outer, group, inner, parts)
            sums = _segments_part(
                dy, x, base, group * inner, outer, inner, chunk_rows, chunk_length, part_chunks,
                part, load(mean, statistic),
            )  # fmt: skip
            partials[statistic, part, 0], partials[statistic, part, 1] = sums
        task = next_task(counter)


@device_function
def _run_gradient(put, dy, x, dx, start, end, mean, scale, slope, offset):
    for i in range(start, end):
        put(dx, i, load(dy, i) * scale + ((load(x, i) - mean) * slope + offset))


@device_function
def _segments_gradient(
    dy, x, dx, base, stride, outer, inner, chunk_rows, chunk_length, first_chunk, last_chunk,
    mean, scale, slope, offset, streaming,
):  # fmt: skip
    for chunk in range(first_chunk, last_chunk):
        row, rows, begin, length = segments_chunk(chunk, outer, inner, chunk_rows, chunk_length)
        for r in range(row, row + rows):
            start = base + r * stride + begin
            end = start + length
            first, last = streaming_range(dx, start, end, streaming)
            _run_gradient(store, dy, x, dx, start, first, mean, scale, slope, offset)
            _run_gradient(store_streaming, dy, x, dx, first, last, mean, scale, slope, offset)
            _run_gradient(store, dy, x, dx, last, end, mean, scale, slope, offset)


@kernel
def _gradient_segments(
    counter, tasks, dy, x, dx, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, count,
    streaming,
    batch, outer, group, inner, task_units, chunk_rows, chunk_length, part_chunks, parts,
):  # fmt: skip
    """A task is `task_units` parts; the last part goes first, being nearest."""
    units = batch * group * parts
    chunks = segments_chunks(outer, inner, chunk_rows, chunk_length)
    task = tasks - 1 - next_task(counter)
    while task >= 0:
        for unit in range(task * task_units, min(units, (task + 1) * task_units)):
            statistic, g, part, base = segments_unit(unit, outer, group, inner, parts)
            scale, slope, offset = _coefficients(
                x, statistic, g, residual, inv_std, weight,
                np.float64(load(sum_dy, statistic)), np.float64(load(sum_dy_xmu, statistic)), count,
            )  # fmt: skip
            _segments_gradient(
                dy, x, dx, base, group * inner, outer, inner, chunk_rows, chunk_length,
                part * part_chunks, min(chunks, (part + 1) * part_chunks),
                load(mean, statistic), scale, slope, offset, streaming,
            )  # fmt: skip
        task = tasks - 1 - next_task(counter)


@kernel
def _backward_segments(
    counter, tasks, dy, x, dx, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, training,
    streaming,
    batch, outer, group, inner, task_units, chunk_rows, chunk_length, part_chunks, parts,
):  # fmt: skip
    """A task is `task_units` whole channels."""
    units = batch * group
    chunks = segments_chunks(outer, inner, chunk_rows, chunk_length)
    count = np.float64(outer * inner)
    zero = as_accumulator(x, 0.0)
    task = next_task(counter)
    while task < tasks:
        for unit in range(task * task_units, min(units, (task + 1) * task_units)):
            statistic, g, _, base = segments_unit(unit, outer, group, inner, 1)
            center = load(mean, statistic)
            total_dy, total_dy_xmu = 0.0, 0.0
            for part in range(parts):
                part_dy, part_dy_xmu = _segments_part(
                    dy, x, base, group * inner, outer, inner, chunk_rows, chunk_length,
                    part_chunks, part, center,
                )  # fmt: skip
                total_dy += part_dy
                total_dy_xmu += part_dy_xmu
            _write_sums(statistic, residual, total_dy, total_dy_xmu, sum_dy, sum_dy_xmu)
            scale, slope, offset = _coefficients(
                x, statistic, g, residual, inv_std, weight,
                np.float64(load_scratch(sum_dy, statistic)),
                np.float64(load_scratch(sum_dy_xmu, statistic)), count,
            )  # fmt: skip
            if training:
                _segments_gradient(
                    dy, x, dx, base, group * inner, outer, inner, chunk_rows, chunk_length,
                    0, chunks, center, scale, slope, offset, streaming,
                )  # fmt: skip
            else:
                segments_transform(
                    dy, dx, base, group * inner, outer, inner, chunk_rows, chunk_length,
                    0, chunks, zero, scale, zero, streaming,
                )  # fmt: skip
        task = next_task(counter)


# --- columns ------------------------------------------------------------------


@device_function
def _row_reduce(dy, x, start, width, mean, sum_dy, sum_dy_xmu):
    for p in range(width):
        gradient = load(dy, start + p)
        centered = load(x, start + p) - load_scratch(mean, p)
        store(sum_dy, p, load_scratch(sum_dy, p) + gradient)
        store(sum_dy_xmu, p, load_scratch(sum_dy_xmu, p) + gradient * centered)


@device_function
def _columns_chunk(
    dy, x, start, stride, rows, width, mean, sum_dy, sum_dy_xmu, total_dy, total_dy_xmu
):
    """Add `rows` rows, two at a time, in the accumulator type and then to the float64 totals."""
    zero = as_accumulator(x, 0.0)
    for p in range(width):
        store(sum_dy, p, zero)
        store(sum_dy_xmu, p, zero)
    for row in range(0, rows - 1, 2):
        a = start + row * stride
        b = a + stride
        for p in range(width):
            center = load_scratch(mean, p)
            first, second = load(dy, a + p), load(dy, b + p)
            products = first * (load(x, a + p) - center) + second * (load(x, b + p) - center)
            store(sum_dy, p, load_scratch(sum_dy, p) + (first + second))
            store(sum_dy_xmu, p, load_scratch(sum_dy_xmu, p) + products)
    if rows % 2:
        _row_reduce(dy, x, start + (rows - 1) * stride, width, mean, sum_dy, sum_dy_xmu)
    for p in range(width):
        total, total_xmu = load_scratch(total_dy, p), load_scratch(total_dy_xmu, p)
        store(total_dy, p, total + np.float64(load_scratch(sum_dy, p)))
        store(total_dy_xmu, p, total_xmu + np.float64(load_scratch(sum_dy_xmu, p)))


@device_function
def _columns_reduce(
    dy, x, start, stride, rows, width, tail_width, chunk_rows, mean,
    sum_dy, sum_dy_xmu, total_dy, total_dy_xmu,
):  # fmt: skip
    """Both sums of every position, over `rows` rows and, left of `tail_width`, one more."""
    for p in range(width):
        store(total_dy, p, 0.0)
        store(total_dy_xmu, p, 0.0)
    for row in range(0, rows, chunk_rows):
        _columns_chunk(
            dy, x, start + row * stride, stride, min(chunk_rows, rows - row), width, mean,
            sum_dy, sum_dy_xmu, total_dy, total_dy_xmu,
        )  # fmt: skip
    if tail_width > 0:
        _columns_chunk(
            dy, x, start + rows * stride, stride, 1, tail_width, mean,
            sum_dy, sum_dy_xmu, total_dy, total_dy_xmu,
        )  # fmt: skip


@strict_function
def _channel_sums(channel, channels, fold, inner, total_dy, total_dy_xmu):
    """Both sums of a channel from those of its positions (see `spread`)."""
    sum_dy, sum_dy_xmu = 0.0, 0.0
    for copy in range(fold):
        first = (copy * channels + channel) * inner
        for p in range(first, first + inner):
            sum_dy = accumulate(sum_dy, load_scratch(total_dy, p))
            sum_dy_xmu = accumulate(sum_dy_xmu, load_scratch(total_dy_xmu, p))
    return sum_dy, sum_dy_xmu


@device_function
def _spread_means(statistic, channels, fold, inner, mean, block_mean):
    for channel in range(channels):
        spread(load(mean, statistic + channel), channel, channels, fold, inner, block_mean)


@kernel
def _reduce_columns(
    counter, tasks, dy, x, mean, partials, batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels,
):  # fmt: skip
    """A task is one part of one block; `partials[statistic, part]` gets the two sums."""
    most = fold * block_channels * inner
    block_mean, sum_dy, sum_dy_xmu = scratch(x, most), scratch(x, most), scratch(x, most)
    total_dy, total_dy_xmu = np.empty(most), np.empty(most)
    task = next_task(counter)
    while task < tasks:
        statistic, _, channels, part, start, height, tail = columns_piece(
            task, outer, group, inner, fold, rows, tail_rows, part_rows, parts, block_channels
        )
        _spread_means(statistic, channels, fold, inner, mean, block_mean)
        _columns_reduce(
            dy, x, start, fold * group * inner, height, fold * channels * inner,
            tail * channels * inner, chunk_rows, block_mean,
            sum_dy, sum_dy_xmu, total_dy, total_dy_xmu,
        )  # fmt: skip
        for channel in range(channels):
            sums = _channel_sums(channel, channels, fold, inner, total_dy, total_dy_xmu)
            partials[statistic + channel, part, 0] = sums[0]
            partials[statistic + channel, part, 1] = sums[1]
        task = next_task(counter)


@device_function
def _row_gradient(dy, x, dx, start, width, mean, scale, slope, offset):
    for p in range(width):
        centered = load(x, start + p) - load_scratch(mean, p)
        rest = centered * load_scratch(slope, p) + load_scratch(offset, p)
        store(dx, start + p, load(dy, start + p) * load_scratch(scale, p) + rest)


@device_function
def _rows_gradient(put, dy, x, dx, a, stride, first, last, mean, scale, slope, offset):
    """Positions [first, last) of two rows, which share what is loaded of their numbers."""
    b = a + stride
    for p in range(first, last):
        center, factor = load_scratch(mean, p), load_scratch(scale, p)
        tilt, constant = load_scratch(slope, p), load_scratch(offset, p)
        rest_a = (load(x, a + p) - center) * tilt + constant
        rest_b = (load(x, b + p) - center) * tilt + constant
        put(dx, a + p, load(dy, a + p) * factor + rest_a)
        put(dx, b + p, load(dy, b + p) * factor + rest_b)


@device_function
def _columns_gradient(
    dy, x, dx, start, stride, rows, width, tail_width, mean, scale, slope, offset, streaming
):
    """Dx of `rows` rows of `width` positions and, below them, of `tail_width` positions."""
    # One alignment fits all rows only if they are whole cache lines apart.
    streaming = streaming and stride * dx.itemsize % 64 == 0
    first, last = streaming_range(dx, start, start + width, streaming)
    first, last = first - start, last - start
    numbers = (mean, scale, slope, offset)
    for row in range(0, rows - 1, 2):
        a = start + row * stride
        _rows_gradient(store, dy, x, dx, a, stride, 0, first, *numbers)
        _rows_gradient(store_streaming, dy, x, dx, a, stride, first, last, *numbers)
        _rows_gradient(store, dy, x, dx, a, stride, last, width, *numbers)
    if rows % 2:
        _row_gradient(dy, x, dx, start + (rows - 1) * stride, width, *numbers)
    _row_gradient(dy, x, dx, start + rows * stride, tail_width, *numbers)


@device_function
def _spread_coefficients(
    x, statistic, g, channels, fold, inner, residual, inv_std, weight, sum_dy, sum_dy_xmu, count,
    block_scale, block_slope, block_offset,
):  # fmt: skip
    for channel in range(channels):
        s = statistic + channel
        scale, slope, offset = _coefficients(
            x, s, g + channel, residual, inv_std, weight,
            np.float64(load_scratch(sum_dy, s)), np.float64(load_scratch(sum_dy_xmu, s)), count,
        )  # fmt: skip
        spread(scale, channel, channels, fold, inner, block_scale)
        spread(slope, channel, channels, fold, inner, block_slope)
        spread(offset, channel, channels, fold, inner, block_offset)


@kernel
def _gradient_columns(
    counter, tasks, dy, x, dx, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, count,
    streaming, batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels,
):  # fmt: skip
    """A task is one part of one block; the last part goes first, being nearest."""
    most = fold * block_channels * inner
    block_mean, block_scale = scratch(x, most), scratch(x, most)
    block_slope, block_offset = scratch(x, most), scratch(x, most)
    task = tasks - 1 - next_task(counter)
    while task >= 0:
        statistic, g, channels, _, start, height, tail = columns_piece(
            task, outer, group, inner, fold, rows, tail_rows, part_rows, parts, block_channels
        )
        _spread_means(statistic, channels, fold, inner, mean, block_mean)
        _spread_coefficients(
            x, statistic, g, channels, fold, inner, residual, inv_std, weight,
            sum_dy, sum_dy_xmu, count, block_scale, block_slope, block_offset,
        )  # fmt: skip
        _columns_gradient(
            dy, x, dx, start, fold * group * inner, height, fold * channels * inner,
            tail * channels * inner, block_mean, block_scale, block_slope, block_offset, streaming,
        )  # fmt: skip
        task = tasks - 1 - next_task(counter)


@kernel
def _backward_columns(
    counter, tasks, dy, x, dx, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, training,
    streaming, batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels,
):  # fmt: skip
    """A task is one block of whole channels."""
    most = fold * block_channels * inner
    block_mean, block_scale = scratch(x, most), scratch(x, most)
    block_slope, block_offset = scratch(x, most), scratch(x, most)
    block_dy, block_dy_xmu = scratch(x, most), scratch(x, most)
    total_dy, total_dy_xmu = np.empty(most), np.empty(most)
    sums = np.empty((block_channels, 2))
    stride = fold * group * inner
    task = next_task(counter)
    while task < tasks:
        statistic, g, channels, _, start, _, _ = columns_piece(
            task, outer, group, inner, fold, rows, tail_rows, rows, 1, block_channels
        )
        width = fold * channels * inner
        tail_width = tail_rows * channels * inner
        _spread_means(statistic, channels, fold, inner, mean, block_mean)
        sums[:, :] = 0.0
        for part in range(parts):
            height, tail = columns_part(part, rows, tail_rows, part_rows, parts)
            _columns_reduce(
                dy, x, start + part * part_rows * stride, stride, height, width,
                tail * channels * inner, chunk_rows, block_mean,
                block_dy, block_dy_xmu, total_dy, total_dy_xmu,
            )  # fmt: skip
            for channel in range(channels):
                part_sums = _channel_sums(channel, channels, fold, inner, total_dy, total_dy_xmu)
                sums[channel, 0] += part_sums[0]
                sums[channel, 1] += part_sums[1]
        for channel in range(channels):
            _write_sums(
                statistic + channel, residual, sums[channel, 0], sums[channel, 1],
                sum_dy, sum_dy_xmu,
            )  # fmt: skip
        _spread_coefficients(
            x, statistic, g, channels, fold, inner, residual, inv_std, weight,
            sum_dy, sum_dy_xmu, np.float64(outer * inner), block_scale, block_slope, block_offset,
        )  # fmt: skip
        if training:
            _columns_gradient(
                dy, x, dx, start, stride, rows, width, tail_width,
                block_mean, block_scale, block_slope, block_offset, streaming,
            )  # fmt: skip
        else:
            for p in range(width):
                store(block_mean, p, as_accumulator(x, 0.0))
            columns_transform(
                dy, dx, start, stride, rows, width, tail_width,
                block_mean, block_scale, block_mean, streaming,
            )  # fmt: skip
        task = next_task(counter)


@kernel
def _finish_sums(partials, residual, sum_dy, sum_dy_xmu):
    for statistic in range(partials.shape[0]):
        total_dy, total_dy_xmu = 0.0, 0.0
        for part in range(partials.shape[1]):
            total_dy += partials[statistic, part, 0]
            total_dy_xmu += partials[statistic, part, 1]
        _write_sums(statistic, residual, total_dy, total_dy_xmu, sum_dy, sum_dy_xmu)


# --- the verbs ----------------------------------------------------------------

_REDUCE = {Segments: _reduce_segments, Columns: _reduce_columns}
_GRADIENT = {Segments: _gradient_segments, Columns: _gradient_columns}
_BACKWARD = {Segments: _backward_segments, Columns: _backward_columns}


def reduce(dy, x, mean, residual, geometry: Geometry):
    """Sums of dy and of dy * (x - (mean + residual)) over every channel; residual may be None."""
    cut = plan(geometry, x.itemsize, 2)
    partials = np.empty((geometry.statistics, cut.parts, 2))
    run(
        _REDUCE[type(cut)], cut.tasks, 2 * x.nbytes, flat(dy), flat(x), mean, partials,
        *geometry, *cut.arguments,
    )  # fmt: skip
    sum_dy, sum_dy_xmu = np.empty((2, geometry.statistics), mean.dtype)
    _finish_sums(partials, NONE[mean.dtype] if residual is None else residual, sum_dy, sum_dy_xmu)
    return sum_dy, sum_dy_xmu


def input_gradient(
    dy, x, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, count, geometry: Geometry, out
):
    """`out` = dx from sums over the `count` values that mean and inv_std were taken from."""
    cut = plan(geometry, x.itemsize, 2)
    run(
        _GRADIENT[type(cut)], cut.tasks, 3 * x.nbytes, flat(dy), flat(x), flat(out),
        mean, NONE[mean.dtype] if residual is None else residual, inv_std,
        parameter(weight, mean.dtype), sum_dy, sum_dy_xmu, float(count),
        x.nbytes >= STREAMING_BYTES, *geometry, *cut.arguments,
    )  # fmt: skip


def _sums_and_gradient(
    dy, x, mean, residual, inv_std, weight, training, geometry: Geometry, out
):  # fmt: skip
    cut = plan(geometry, x.itemsize, 2)
    if stays_near(cut, get_num_threads()):
        sum_dy, sum_dy_xmu = np.empty((2, geometry.statistics), mean.dtype)
        run(
            _BACKWARD[type(cut)], cut.resident_tasks, 3 * x.nbytes, flat(dy), flat(x), flat(out),
            mean, NONE[mean.dtype] if residual is None else residual, inv_std,
            parameter(weight, mean.dtype), sum_dy, sum_dy_xmu, training,
            x.nbytes >= STREAMING_BYTES, *geometry, *cut.arguments,
        )  # fmt: skip
        return sum_dy, sum_dy_xmu
    sum_dy, sum_dy_xmu = reduce(dy, x, mean, residual, geometry)
    if training:
        input_gradient(
            dy, x, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, geometry.count,
            geometry, out,
        )  # fmt: skip
    else:
        transform(dy, None, None, inv_std, weight, None, geometry, out)
    return sum_dy, sum_dy_xmu


def backward(
    dy, x, mean, residual, inv_std, weight, training, geometry: Geometry, out, dweight, dbias
):
    """Gradients with respect to x into `out`, to weight into `dweight`, to bias into `dbias`.

    Each of them may be None. In training mean and inv_std are those of x; otherwise they
    are given numbers.
    """
    if out is None:
        sum_dy, sum_dy_xmu = reduce(dy, x, mean, residual, geometry)
    else:
        sum_dy, sum_dy_xmu = _sums_and_gradient(
            dy, x, mean, residual, inv_std, weight, training, geometry, out
        )
    with np.errstate(all="ignore"):
        if dweight is not None:
            np.multiply(sum_dy_xmu, inv_std, out=dweight, casting="unsafe")
        if dbias is not None:
            dbias[...] = sum_dy
