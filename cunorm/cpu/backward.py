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
)
from .plan import Columns, Segments, plan, stays_near
from .statistics import NONE
from .threads import get_num_threads, run
from .transform import (
    STREAMING_BYTES,
    columns_transform,
    segments_transform,
    transform,
)

__all__ = ["backward", "input_gradient", "reduce"]


@device_function
def _coefficients(x, g, residual, inv_std, weight, sum_dy, sum_dy_xmu, count):
    """(scale, slope, offset) of dx = dy * scale + ((x - mean) * slope + offset).

    The offset makes up for the residual: what rounding took from the mean.
    """
    scale = inv_std * np.float64(load(weight, g)) if weight.size else inv_std
    slope = -scale * (inv_std * inv_std) * (sum_dy_xmu / count)
    offset = -scale * (sum_dy / count) - residual * slope
    return as_accumulator(x, scale), as_accumulator(x, slope), as_accumulator(x, offset)


@device_function
def _residual(residual, statistic):
    return np.float64(load(residual, statistic)) if residual.size else 0.0


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
    pieces = -(-inner // chunk_length)
    chunks = -(-outer // chunk_rows) * pieces
    sum_dy, sum_dy_xmu = 0.0, 0.0
    for chunk in range(part * part_chunks, min(chunks, (part + 1) * part_chunks)):
        row = chunk // pieces * chunk_rows
        offset = chunk % pieces * chunk_length
        length = min(chunk_length, inner - offset)
        for r in range(row, min(row + chunk_rows, outer)):
            start = base + r * stride + offset
            run_dy, run_dy_xmu = _run_reduce(dy, x, start, length, mean)
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
    stride = group * inner
    task = next_task(counter)
    while task < tasks:
        for unit in range(task * task_units, min(units, (task + 1) * task_units)):
            statistic, part = unit // parts, unit % parts
            base = (statistic // group * outer * group + statistic % group) * inner
            sums = _segments_part(
                dy, x, base, stride, outer, inner, chunk_rows, chunk_length, part_chunks, part,
                load(mean, statistic),
            )  # fmt: skip
            partials[statistic, part, 0], partials[statistic, part, 1] = sums
        task = next_task(counter)


@device_function
def _run_gradient(dy, x, dx, start, end, mean, scale, slope, offset, streaming):
    first, last = streaming_range(dx, start, end) if streaming else (end, end)
    for i in range(start, first):
        store(dx, i, load(dy, i) * scale + ((load(x, i) - mean) * slope + offset))
    for i in range(first, last):
        store_streaming(dx, i, load(dy, i) * scale + ((load(x, i) - mean) * slope + offset))
    for i in range(last, end):
        store(dx, i, load(dy, i) * scale + ((load(x, i) - mean) * slope + offset))


@device_function
def _segments_gradient(
    dy, x, dx, base, stride, outer, inner, chunk_rows, chunk_length, first_chunk, last_chunk,
    mean, scale, slope, offset, streaming,
):  # fmt: skip
    pieces = -(-inner // chunk_length)
    for chunk in range(first_chunk, last_chunk):
        row = chunk // pieces * chunk_rows
        begin = chunk % pieces * chunk_length
        length = min(chunk_length, inner - begin)
        for r in range(row, min(row + chunk_rows, outer)):
            start = base + r * stride + begin
            _run_gradient(dy, x, dx, start, start + length, mean, scale, slope, offset, streaming)


@kernel
def _gradient_segments(
    counter, tasks, dy, x, dx, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, count,
    streaming,
    batch, outer, group, inner, task_units, chunk_rows, chunk_length, part_chunks, parts,
):  # fmt: skip
    """A task is `task_units` parts; the last part goes first, being nearest."""
    units = batch * group * parts
    stride = group * inner
    chunks = -(-outer // chunk_rows) * -(-inner // chunk_length)
    task = tasks - 1 - next_task(counter)
    while task >= 0:
        for unit in range(task * task_units, min(units, (task + 1) * task_units)):
            statistic, part = unit // parts, unit % parts
            g = statistic % group
            scale, slope, offset = _coefficients(
                x, g, _residual(residual, statistic), np.float64(load(inv_std, statistic)), weight,
                np.float64(load(sum_dy, statistic)), np.float64(load(sum_dy_xmu, statistic)), count,
            )  # fmt: skip
            _segments_gradient(
                dy, x, dx, (statistic // group * outer * group + g) * inner, stride, outer, inner,
                chunk_rows, chunk_length, part * part_chunks,
                min(chunks, (part + 1) * part_chunks),
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
    stride = group * inner
    chunks = -(-outer // chunk_rows) * -(-inner // chunk_length)
    count = np.float64(outer * inner)
    zero = as_accumulator(x, 0.0)
    task = next_task(counter)
    while task < tasks:
        for statistic in range(task * task_units, min(units, (task + 1) * task_units)):
            g = statistic % group
            base = (statistic // group * outer * group + g) * inner
            center, low = load(mean, statistic), _residual(residual, statistic)
            total_dy, total_dy_xmu = 0.0, 0.0
            for part in range(parts):
                part_dy, part_dy_xmu = _segments_part(
                    dy, x, base, stride, outer, inner, chunk_rows, chunk_length, part_chunks,
                    part, center,
                )  # fmt: skip
                total_dy += part_dy
                total_dy_xmu += part_dy_xmu
            total_dy_xmu -= low * total_dy
            store(sum_dy, statistic, as_accumulator(x, total_dy))
            store(sum_dy_xmu, statistic, as_accumulator(x, total_dy_xmu))
            scale, slope, offset = _coefficients(
                x, g, low, np.float64(load(inv_std, statistic)), weight,
                total_dy, total_dy_xmu, count,
            )  # fmt: skip
            if training:
                _segments_gradient(
                    dy, x, dx, base, stride, outer, inner, chunk_rows, chunk_length, 0, chunks,
                    center, scale, slope, offset, streaming,
                )  # fmt: skip
            else:
                segments_transform(
                    dy, dx, base, stride, outer, inner, chunk_rows, chunk_length, 0, chunks,
                    zero, scale, zero, streaming,
                )  # fmt: skip
        task = next_task(counter)


# --- columns ------------------------------------------------------------------


@device_function
def _columns_part(
    dy, x, start, stride, rows, width, tail_width, chunk_rows, mean,
    sum_dy, sum_dy_xmu, total_dy, total_dy_xmu,
):  # fmt: skip
    """Both sums of every position, in float64, by way of chunks in the accumulator type."""
    zero = as_accumulator(x, 0.0)
    for p in range(width):
        store(total_dy, p, 0.0)
        store(total_dy_xmu, p, 0.0)
    for first_row in range(0, rows, chunk_rows):
        for p in range(width):
            store(sum_dy, p, zero)
            store(sum_dy_xmu, p, zero)
        last_row = min(rows, first_row + chunk_rows)
        for row in range(first_row, last_row - 1, 2):
            a = start + row * stride
            b = a + stride
            for p in range(width):
                center = load_scratch(mean, p)
                first, second = load(dy, a + p), load(dy, b + p)
                products = first * (load(x, a + p) - center) + second * (load(x, b + p) - center)
                store(sum_dy, p, load_scratch(sum_dy, p) + (first + second))
                store(sum_dy_xmu, p, load_scratch(sum_dy_xmu, p) + products)
        if (last_row - first_row) % 2:
            _add_row(dy, x, start + (last_row - 1) * stride, width, mean, sum_dy, sum_dy_xmu)
        _add_sums(width, sum_dy, sum_dy_xmu, total_dy, total_dy_xmu)
    if tail_width > 0:
        for p in range(tail_width):
            store(sum_dy, p, zero)
            store(sum_dy_xmu, p, zero)
        _add_row(dy, x, start + rows * stride, tail_width, mean, sum_dy, sum_dy_xmu)
        _add_sums(tail_width, sum_dy, sum_dy_xmu, total_dy, total_dy_xmu)


@device_function
def _add_row(dy, x, start, width, mean, sum_dy, sum_dy_xmu):
    for p in range(width):
        gradient = load(dy, start + p)
        centered = load(x, start + p) - load_scratch(mean, p)
        store(sum_dy, p, load_scratch(sum_dy, p) + gradient)
        store(sum_dy_xmu, p, load_scratch(sum_dy_xmu, p) + gradient * centered)


@device_function
def _add_sums(width, sum_dy, sum_dy_xmu, total_dy, total_dy_xmu):
    for p in range(width):
        store(total_dy, p, load_scratch(total_dy, p) + np.float64(load_scratch(sum_dy, p)))
        store(
            total_dy_xmu, p, load_scratch(total_dy_xmu, p) + np.float64(load_scratch(sum_dy_xmu, p))
        )


@device_function
def _channel_sums(channel, channels, fold, inner, total_dy, total_dy_xmu):
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
        center = load(mean, statistic + channel)
        for copy in range(fold):
            position = (copy * channels + channel) * inner
            for p in range(position, position + inner):
                store(block_mean, p, center)


@kernel
def _reduce_columns(
    counter, tasks, dy, x, mean, partials,
    batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels,
):  # fmt: skip
    """A task is one part of one block; `partials[statistic, part]` gets the two sums."""
    blocks = -(-group // block_channels)
    most = fold * block_channels * inner
    block_mean, sum_dy, sum_dy_xmu = scratch(x, most), scratch(x, most), scratch(x, most)
    total_dy, total_dy_xmu = np.empty(most), np.empty(most)
    stride = fold * group * inner
    task = next_task(counter)
    while task < tasks:
        block = task % blocks
        part = task // blocks % parts
        entry = task // (blocks * parts)
        first = block * block_channels
        statistic = entry * group + first
        channels = min(block_channels, group - first)
        first_row = part * part_rows
        tail_width = tail_rows * group * inner if part == parts - 1 else 0
        _spread_means(statistic, channels, fold, inner, mean, block_mean)
        _columns_part(
            dy, x, (entry * outer * group + first) * inner + first_row * stride, stride,
            min(part_rows, rows - first_row), fold * channels * inner, tail_width, chunk_rows,
            block_mean, sum_dy, sum_dy_xmu, total_dy, total_dy_xmu,
        )  # fmt: skip
        for channel in range(channels):
            sums = _channel_sums(channel, channels, fold, inner, total_dy, total_dy_xmu)
            partials[statistic + channel, part, 0] = sums[0]
            partials[statistic + channel, part, 1] = sums[1]
        task = next_task(counter)


@device_function
def _rows_gradient(dy, x, dx, a, b, first, last, mean, scale, slope, offset):
    """Positions [first, last) of the two rows that begin at a and b."""
    for p in range(first, last):
        center, factor = load_scratch(mean, p), load_scratch(scale, p)
        tilt, constant = load_scratch(slope, p), load_scratch(offset, p)
        rest_a = (load(x, a + p) - center) * tilt + constant
        rest_b = (load(x, b + p) - center) * tilt + constant
        store(dx, a + p, load(dy, a + p) * factor + rest_a)
        store(dx, b + p, load(dy, b + p) * factor + rest_b)


@device_function
def _rows_gradient_streaming(dy, x, dx, a, b, first, last, mean, scale, slope, offset):
    for p in range(first, last):
        center, factor = load_scratch(mean, p), load_scratch(scale, p)
        tilt, constant = load_scratch(slope, p), load_scratch(offset, p)
        rest_a = (load(x, a + p) - center) * tilt + constant
        rest_b = (load(x, b + p) - center) * tilt + constant
        store_streaming(dx, a + p, load(dy, a + p) * factor + rest_a)
        store_streaming(dx, b + p, load(dy, b + p) * factor + rest_b)


@device_function
def _row_gradient(dy, x, dx, start, width, mean, scale, slope, offset):
    for p in range(width):
        centered = load(x, start + p) - load_scratch(mean, p)
        rest = centered * load_scratch(slope, p) + load_scratch(offset, p)
        store(dx, start + p, load(dy, start + p) * load_scratch(scale, p) + rest)


@device_function
def _columns_gradient(
    dy, x, dx, start, stride, rows, width, tail_width, mean, scale, slope, offset, streaming
):
    """Rows two at a time: they share what they load of their positions' numbers."""
    first, last = width, width
    if streaming and stride * dx.itemsize % 64 == 0:
        begin, end = streaming_range(dx, start, start + width)
        first, last = begin - start, end - start
    pairs = rows // 2 * 2
    for row in range(0, pairs, 2):
        a = start + row * stride
        b = a + stride
        _rows_gradient(dy, x, dx, a, b, 0, first, mean, scale, slope, offset)
        _rows_gradient_streaming(dy, x, dx, a, b, first, last, mean, scale, slope, offset)
        _rows_gradient(dy, x, dx, a, b, last, width, mean, scale, slope, offset)
    for row in range(pairs, rows):
        _row_gradient(dy, x, dx, start + row * stride, width, mean, scale, slope, offset)
    _row_gradient(dy, x, dx, start + rows * stride, tail_width, mean, scale, slope, offset)


@device_function
def _spread_coefficients(
    x, statistic, g, channels, fold, inner, residual, inv_std, weight,
    sum_dy, sum_dy_xmu, count, block_scale, block_slope, block_offset,
):  # fmt: skip
    for channel in range(channels):
        s = statistic + channel
        scale, slope, offset = _coefficients(
            x, g + channel, _residual(residual, s), np.float64(load(inv_std, s)), weight,
            np.float64(load_scratch(sum_dy, s)), np.float64(load_scratch(sum_dy_xmu, s)), count,
        )  # fmt: skip
        for copy in range(fold):
            position = (copy * channels + channel) * inner
            for p in range(position, position + inner):
                store(block_scale, p, scale)
                store(block_slope, p, slope)
                store(block_offset, p, offset)


@kernel
def _gradient_columns(
    counter, tasks, dy, x, dx, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, count,
    streaming,
    batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels,
):  # fmt: skip
    """A task is one part of one block; the last part goes first, being nearest."""
    blocks = -(-group // block_channels)
    most = fold * block_channels * inner
    block_mean, block_scale = scratch(x, most), scratch(x, most)
    block_slope, block_offset = scratch(x, most), scratch(x, most)
    stride = fold * group * inner
    task = tasks - 1 - next_task(counter)
    while task >= 0:
        block = task % blocks
        part = task // blocks % parts
        entry = task // (blocks * parts)
        first = block * block_channels
        statistic = entry * group + first
        channels = min(block_channels, group - first)
        first_row = part * part_rows
        tail_width = tail_rows * group * inner if part == parts - 1 else 0
        _spread_means(statistic, channels, fold, inner, mean, block_mean)
        _spread_coefficients(
            x, statistic, first, channels, fold, inner, residual, inv_std, weight,
            sum_dy, sum_dy_xmu, count, block_scale, block_slope, block_offset,
        )  # fmt: skip
        _columns_gradient(
            dy, x, dx, (entry * outer * group + first) * inner + first_row * stride, stride,
            min(part_rows, rows - first_row), fold * channels * inner, tail_width,
            block_mean, block_scale, block_slope, block_offset, streaming,
        )  # fmt: skip
        task = tasks - 1 - next_task(counter)


@kernel
def _backward_columns(
    counter, tasks, dy, x, dx, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, training,
    streaming,
    batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels,
):  # fmt: skip
    """A task is one block of whole channels."""
    blocks = -(-group // block_channels)
    most = fold * block_channels * inner
    block_mean, block_scale = scratch(x, most), scratch(x, most)
    block_slope, block_offset = scratch(x, most), scratch(x, most)
    total_dy, total_dy_xmu = np.empty(most), np.empty(most)
    stride = fold * group * inner
    zero = as_accumulator(x, 0.0)
    task = next_task(counter)
    while task < tasks:
        block = task % blocks
        entry = task // blocks
        first = block * block_channels
        statistic = entry * group + first
        channels = min(block_channels, group - first)
        width = fold * channels * inner
        start = (entry * outer * group + first) * inner
        sums = np.zeros((channels, 2))
        _spread_means(statistic, channels, fold, inner, mean, block_mean)
        for part in range(parts):
            first_row = part * part_rows
            _columns_part(
                dy, x, start + first_row * stride, stride, min(part_rows, rows - first_row), width,
                tail_rows * group * inner if part == parts - 1 else 0, chunk_rows,
                block_mean, block_slope, block_offset, total_dy, total_dy_xmu,
            )  # fmt: skip
            for channel in range(channels):
                part_dy, part_dy_xmu = _channel_sums(
                    channel, channels, fold, inner, total_dy, total_dy_xmu
                )
                sums[channel, 0] += part_dy
                sums[channel, 1] += part_dy_xmu
        for channel in range(channels):
            s = statistic + channel
            sums[channel, 1] -= _residual(residual, s) * sums[channel, 0]
            store(sum_dy, s, as_accumulator(x, sums[channel, 0]))
            store(sum_dy_xmu, s, as_accumulator(x, sums[channel, 1]))
        _spread_coefficients(
            x, statistic, first, channels, fold, inner, residual, inv_std, weight,
            sum_dy, sum_dy_xmu, np.float64(outer * inner), block_scale, block_slope, block_offset,
        )  # fmt: skip
        if training:
            _columns_gradient(
                dy, x, dx, start, stride, rows, width, tail_rows * group * inner,
                block_mean, block_scale, block_slope, block_offset, streaming,
            )  # fmt: skip
        else:
            for p in range(width):
                store(block_mean, p, zero)
            columns_transform(
                dy, dx, start, stride, rows, width, tail_rows * group * inner,
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
        total_dy_xmu -= _residual(residual, statistic) * total_dy
        store(sum_dy, statistic, as_accumulator(sum_dy, total_dy))
        store(sum_dy_xmu, statistic, as_accumulator(sum_dy, total_dy_xmu))


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
    """dx, into `out`, from sums over the `count` values that mean and inv_std were taken from."""
    cut = plan(geometry, x.itemsize, 2)
    none = NONE[mean.dtype]
    run(
        _GRADIENT[type(cut)], cut.tasks, 3 * x.nbytes, flat(dy), flat(x), flat(out),
        mean, none if residual is None else residual, inv_std,
        none if weight is None else weight, sum_dy, sum_dy_xmu, float(count),
        x.nbytes >= STREAMING_BYTES, *geometry, *cut.arguments,
    )  # fmt: skip


def backward(dy, x, mean, residual, inv_std, weight, training, geometry: Geometry, out):
    """dx, into `out`; returns the sums of dy and dy * (x - mean).

    In training mean and inv_std are those of x; otherwise they are given numbers.
    """
    cut = plan(geometry, x.itemsize, 2)
    if stays_near(cut, get_num_threads()):
        none = NONE[mean.dtype]
        sum_dy, sum_dy_xmu = np.empty((2, geometry.statistics), mean.dtype)
        run(
            _BACKWARD[type(cut)], cut.resident_tasks, 3 * x.nbytes, flat(dy), flat(x), flat(out),
            mean, none if residual is None else residual, inv_std,
            none if weight is None else weight, sum_dy, sum_dy_xmu, training,
            x.nbytes >= STREAMING_BYTES, *geometry, *cut.arguments,
        )  # fmt: skip
        return sum_dy, sum_dy_xmu
    sum_dy, sum_dy_xmu = reduce(dy, x, mean, residual, geometry)
    if training:
        input_gradient(
            dy,
            x,
            mean,
            residual,
            inv_std,
            weight,
            sum_dy,
            sum_dy_xmu,
            geometry.count,
            geometry,
            out,
        )
    else:
        transform(dy, np.zeros_like(mean), None, inv_std, weight, None, geometry, out)
    return sum_dy, sum_dy_xmu
