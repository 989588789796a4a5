"""y = (x - mean) * inv_std * weight + bias.

`transform` applies given statistics. `normalize` takes them from the data
first: a channel that fits the cache is read from memory once, the others
once for the statistics and once more, from their end, for the transform.
"""

from __future__ import annotations

import math

import numpy as np

from ..checks import statistics_dtype
from ..geometry import Geometry
from .elements import (
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
from .statistics import (
    NONE,
    channel_of_columns,
    columns_part,
    merge_moments,
    merge_parts,
    partial_moments,
    segments_part,
)
from .threads import get_num_threads, run

__all__ = ["normalize", "transform"]

# Outputs at least this large bypass the caches: they would push out the data
# still to be read and be gone themselves before anyone reads them.
STREAMING_BYTES = 16 << 20


@device_function
def _coefficients(x, g, residual, inv_std, weight, bias):
    """(scale, shift) of y = (x - mean) * scale + shift for a channel of group g.

    The shift makes up for the residual: what rounding took from the mean.
    """
    scale = inv_std * np.float64(load(weight, g)) if weight.size else inv_std
    shift = np.float64(load(bias, g)) if bias.size else 0.0
    return as_accumulator(x, scale), as_accumulator(x, shift - residual * scale)


# --- segments -----------------------------------------------------------------


@device_function
def _run_transform(x, y, start, end, mean, scale, shift, streaming):
    first, last = streaming_range(y, start, end) if streaming else (end, end)
    for i in range(start, first):
        store(y, i, (load(x, i) - mean) * scale + shift)
    for i in range(first, last):
        store_streaming(y, i, (load(x, i) - mean) * scale + shift)
    for i in range(last, end):
        store(y, i, (load(x, i) - mean) * scale + shift)


@device_function
def segments_transform(
    x, y, base, stride, outer, inner, chunk_rows, chunk_length, first_chunk, last_chunk,
    mean, scale, shift, streaming,
):  # fmt: skip
    pieces = -(-inner // chunk_length)
    for chunk in range(first_chunk, last_chunk):
        row = chunk // pieces * chunk_rows
        offset = chunk % pieces * chunk_length
        length = min(chunk_length, inner - offset)
        for r in range(row, min(row + chunk_rows, outer)):
            start = base + r * stride + offset
            _run_transform(x, y, start, start + length, mean, scale, shift, streaming)


@kernel
def _transform_segments(
    counter, tasks, x, y, mean, residual, inv_std, weight, bias, streaming,
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
            scale, shift = _coefficients(
                x, g, np.float64(load(residual, statistic)) if residual.size else 0.0,
                np.float64(load(inv_std, statistic)), weight, bias,
            )  # fmt: skip
            segments_transform(
                x, y, (statistic // group * outer * group + g) * inner, stride, outer, inner,
                chunk_rows, chunk_length, part * part_chunks,
                min(chunks, (part + 1) * part_chunks),
                load(mean, statistic), scale, shift, streaming,
            )  # fmt: skip
        task = tasks - 1 - next_task(counter)


@kernel
def _normalize_segments(
    counter, tasks, x, y, weight, bias, eps, statistics, streaming,
    batch, outer, group, inner, task_units, chunk_rows, chunk_length, part_chunks, parts,
):  # fmt: skip
    """A task is `task_units` whole channels; `statistics` gets what `save` writes."""
    mean, inv_std, residual = statistics[0], statistics[1], statistics[2]
    units = batch * group
    stride = group * inner
    chunks = -(-outer // chunk_rows) * -(-inner // chunk_length)
    task = next_task(counter)
    while task < tasks:
        for statistic in range(task * task_units, min(units, (task + 1) * task_units)):
            g = statistic % group
            base = (statistic // group * outer * group + g) * inner
            count, center, m2 = 0.0, 0.0, 0.0
            for part in range(parts):
                part_count, part_mean, part_m2 = segments_part(
                    x, base, stride, outer, inner, chunk_rows, chunk_length, part_chunks, part
                )
                center, m2 = merge_moments(count, center, m2, part_count, part_mean, part_m2)
                count += part_count
            _save(statistics, statistic, count, center, m2, eps)
            scale, shift = _coefficients(
                x, g, np.float64(load_scratch(residual, statistic)),
                np.float64(load_scratch(inv_std, statistic)), weight, bias,
            )  # fmt: skip
            segments_transform(
                x, y, base, stride, outer, inner, chunk_rows, chunk_length, 0, chunks,
                load_scratch(mean, statistic), scale, shift, streaming,
            )  # fmt: skip
        task = next_task(counter)


# --- columns ------------------------------------------------------------------


@device_function
def _rows_transform(x, y, a, b, c, d, first, last, mean, scale, shift):
    """Positions [first, last) of the four rows that begin at a, b, c and d."""
    for p in range(first, last):
        center, factor, offset = (
            load_scratch(mean, p),
            load_scratch(scale, p),
            load_scratch(shift, p),
        )
        store(y, a + p, (load(x, a + p) - center) * factor + offset)
        store(y, b + p, (load(x, b + p) - center) * factor + offset)
        store(y, c + p, (load(x, c + p) - center) * factor + offset)
        store(y, d + p, (load(x, d + p) - center) * factor + offset)


@device_function
def _rows_transform_streaming(x, y, a, b, c, d, first, last, mean, scale, shift):
    for p in range(first, last):
        center, factor, offset = (
            load_scratch(mean, p),
            load_scratch(scale, p),
            load_scratch(shift, p),
        )
        store_streaming(y, a + p, (load(x, a + p) - center) * factor + offset)
        store_streaming(y, b + p, (load(x, b + p) - center) * factor + offset)
        store_streaming(y, c + p, (load(x, c + p) - center) * factor + offset)
        store_streaming(y, d + p, (load(x, d + p) - center) * factor + offset)


@device_function
def columns_transform(x, y, start, stride, rows, width, tail_width, mean, scale, shift, streaming):
    """Rows four at a time: they share what they load of their positions' numbers.

    Streaming needs a stride of whole cache lines, so that one alignment fits all rows.
    """
    first, last = width, width
    if streaming and stride * y.itemsize % 64 == 0:
        begin, end = streaming_range(y, start, start + width)
        first, last = begin - start, end - start
    fours = rows // 4 * 4
    for row in range(0, fours, 4):
        a = start + row * stride
        b, c, d = a + stride, a + 2 * stride, a + 3 * stride
        _rows_transform(x, y, a, b, c, d, 0, first, mean, scale, shift)
        _rows_transform_streaming(x, y, a, b, c, d, first, last, mean, scale, shift)
        _rows_transform(x, y, a, b, c, d, last, width, mean, scale, shift)
    for row in range(fours, rows):
        _row_transform(x, y, start + row * stride, width, mean, scale, shift)
    _row_transform(x, y, start + rows * stride, tail_width, mean, scale, shift)


@device_function
def _row_transform(x, y, start, width, mean, scale, shift):
    for p in range(width):
        centered = load(x, start + p) - load_scratch(mean, p)
        store(y, start + p, centered * load_scratch(scale, p) + load_scratch(shift, p))


@device_function
def _spread(
    x, statistic, g, channels, fold, inner, mean, residual, inv_std, weight, bias,
    block_mean, block_scale, block_shift,
):  # fmt: skip
    """Every position's numbers from those of the channels from `g` on."""
    for channel in range(channels):
        s = statistic + channel
        scale, shift = _coefficients(
            x, g + channel, np.float64(load_scratch(residual, s)) if residual.size else 0.0,
            np.float64(load_scratch(inv_std, s)), weight, bias,
        )  # fmt: skip
        center = load_scratch(mean, s)
        for copy in range(fold):
            position = (copy * channels + channel) * inner
            for p in range(position, position + inner):
                store(block_mean, p, center)
                store(block_scale, p, scale)
                store(block_shift, p, shift)


@kernel
def _transform_columns(
    counter, tasks, x, y, mean, residual, inv_std, weight, bias, streaming,
    batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels,
):  # fmt: skip
    """A task is one part of one block; the last part goes first, being nearest."""
    blocks = -(-group // block_channels)
    most = fold * block_channels * inner
    block_mean, block_scale, block_shift = scratch(x, most), scratch(x, most), scratch(x, most)
    stride = fold * group * inner
    task = tasks - 1 - next_task(counter)
    while task >= 0:
        block = task % blocks
        part = task // blocks % parts
        entry = task // (blocks * parts)
        first = block * block_channels
        channels = min(block_channels, group - first)
        first_row = part * part_rows
        tail_width = tail_rows * group * inner if part == parts - 1 else 0
        _spread(
            x, entry * group + first, first, channels, fold, inner,
            mean, residual, inv_std, weight, bias,
            block_mean, block_scale, block_shift,
        )  # fmt: skip
        columns_transform(
            x, y, (entry * outer * group + first) * inner + first_row * stride, stride,
            min(part_rows, rows - first_row), fold * channels * inner, tail_width,
            block_mean, block_scale, block_shift, streaming,
        )  # fmt: skip
        task = tasks - 1 - next_task(counter)


@kernel
def _normalize_columns(
    counter, tasks, x, y, weight, bias, eps, statistics, streaming,
    batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels,
):  # fmt: skip
    """A task is one block of whole channels; `statistics` gets what `save` writes."""
    mean, inv_std, residual = statistics[0], statistics[1], statistics[2]
    blocks = -(-group // block_channels)
    most = fold * block_channels * inner
    center, total, squares = scratch(x, most), scratch(x, most), scratch(x, most)
    block_mean, block_scale, block_shift = scratch(x, most), scratch(x, most), scratch(x, most)
    position_mean, position_m2 = np.empty(most), np.empty(most)
    moments = np.empty((block_channels, 3))
    stride = fold * group * inner
    task = next_task(counter)
    while task < tasks:
        block = task % blocks
        entry = task // blocks
        first = block * block_channels
        statistic = entry * group + first
        channels = min(block_channels, group - first)
        width = fold * channels * inner
        start = (entry * outer * group + first) * inner
        moments[:, :] = 0.0
        for part in range(parts):
            first_row = part * part_rows
            height = min(part_rows, rows - first_row)
            part_tail = tail_rows if part == parts - 1 else 0
            columns_part(
                x, start + first_row * stride, stride, height, width, part_tail * channels * inner,
                chunk_rows, center, total, squares, position_mean, position_m2,
            )  # fmt: skip
            for channel in range(channels):
                count, channel_mean, channel_m2 = channel_of_columns(
                    channel, channels, fold, inner, height, part_tail, position_mean, position_m2
                )
                merged = merge_moments(
                    moments[channel, 0], moments[channel, 1], moments[channel, 2],
                    count, channel_mean, channel_m2,
                )  # fmt: skip
                moments[channel, 0] += count
                moments[channel, 1], moments[channel, 2] = merged
        for channel in range(channels):
            _save(
                statistics, statistic + channel,
                moments[channel, 0], moments[channel, 1], moments[channel, 2], eps,
            )  # fmt: skip
        _spread(
            x, statistic, first, channels, fold, inner, mean, residual, inv_std, weight, bias,
            block_mean, block_scale, block_shift,
        )  # fmt: skip
        columns_transform(
            x, y, start, stride, rows, width, tail_rows * group * inner,
            block_mean, block_scale, block_shift, streaming,
        )  # fmt: skip
        task = next_task(counter)


# --- statistics that a forward pass saves -------------------------------------


@device_function
def _save(statistics, statistic, count, center, m2, eps):
    """Write a channel's mean, inv_std, residual (what rounding took from the mean) and var."""
    mean = statistics[0]
    rounded = as_accumulator(mean, center)
    low = center - np.float64(rounded) if math.isfinite(center) else 0.0
    var = m2 / count
    statistics[0, statistic] = rounded
    statistics[1, statistic] = as_accumulator(mean, 1.0 / math.sqrt(var + eps))
    statistics[2, statistic] = as_accumulator(mean, low)
    statistics[3, statistic] = as_accumulator(mean, var)


@kernel
def _finish_normalization(partials, eps, statistics):
    for statistic in range(partials.shape[0]):
        count, center, m2 = merge_parts(partials, statistic)
        _save(statistics, statistic, count, center, m2, eps)


# --- the verbs ----------------------------------------------------------------

_TRANSFORM = {Segments: _transform_segments, Columns: _transform_columns}
_NORMALIZE = {Segments: _normalize_segments, Columns: _normalize_columns}


def transform(x, mean, residual, inv_std, weight, bias, geometry: Geometry, out):
    """`out` = (x - (mean + residual)) * inv_std * weight + bias.

    residual, weight and bias may be None.
    """
    cut = plan(geometry, x.itemsize, 1)
    none = NONE[mean.dtype]
    run(
        _TRANSFORM[type(cut)], cut.tasks, 2 * x.nbytes, flat(x), flat(out),
        mean, none if residual is None else residual, inv_std,
        none if weight is None else weight, none if bias is None else bias,
        x.nbytes >= STREAMING_BYTES, *geometry, *cut.arguments,
    )  # fmt: skip


def normalize(x, weight, bias, eps, geometry: Geometry, out):
    """Statistics of x, then its transform with them into `out`.

    Returns mean, inv_std, residual (what rounding took from the mean) and the
    biased variance as the rows of one array, in the accumulator type.
    """
    cut = plan(geometry, x.itemsize, 1)
    statistics = np.empty((4, geometry.statistics), statistics_dtype(x.dtype))
    if stays_near(cut, get_num_threads()):
        none = NONE[statistics.dtype]
        run(
            _NORMALIZE[type(cut)], cut.resident_tasks, 2 * x.nbytes, flat(x), flat(out),
            none if weight is None else weight, none if bias is None else bias, eps, statistics,
            x.nbytes >= STREAMING_BYTES, *geometry, *cut.arguments,
        )  # fmt: skip
    else:
        _finish_normalization(partial_moments(x, geometry), eps, statistics)
        mean, inv_std, residual, _ = statistics
        transform(x, mean, residual, inv_std, weight, bias, geometry, out)
    return statistics
