"""Gradients of what `backward` computes.

With upstream gradients gdx, gdweight and gdbias, mean and inv_std = r computed from n values of
x, v = (x - mean) * r, h = weight * dy, k = gdweight * dy, and means <.> over these values,

    u   = r * (gdx - <gdx> - v * <gdx * v>)
    ddy = weight * u + gdweight * v + gdbias
    ddx = - r^2 * <h * v> * (gdx - <gdx>) - r^2 * <gdx * v> * (h - <h>) + r * (k - <k>)
          - v * (r^2 * (<(gdx - <gdx>) * (h - <h>)> - 3 * <gdx * v> * <h * v>) + r * <k * v>)
    ddweight = sum(dy * u)

where gdx, dy and x are read once if what shares a statistic fits the cache, else twice (see
docs/numerics.md for the derivation). With given statistics u = r * gdx and ddx = r * k.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ..checks import statistics_dtype
from ..geometry import Geometry
from .elements import (
    accumulate,
    as_accumulator,
    device_function,
    kernel,
    load,
    load_scratch,
    prefetch,
    scratch,
    store,
    store_streaming,
    streaming_range,
    strict_function,
)
from .pieces import (
    columns_chunk,
    columns_chunks,
    columns_part,
    columns_piece,
    segments_chunk,
    segments_chunks,
    segments_piece,
    spread,
)
from .plan import Columns, Rows, Segments, plan, rows_plan, stays_near
from .pool import run
from .rows import add_up, row_extents, row_parameter
from .statistics import NONE, optional, parameter, residual_times
from .tasks import last_task, next_task, numbers, shared_kernel
from .threads import get_num_threads
from .transform import STREAMING_BYTES

__all__ = ["double_backward"]

# --- what a statistic adds ------------------------------------------------------


@device_function
def _upstream(g, i, x):
    """An element of gdx; 0 if there is none, which is known when a kernel is compiled."""
    if g is None:
        return as_accumulator(x, 0.0)
    return load(g, i)


# The sums of a statistic, or of a part of it: how many elements, the means of g = gdx and of h,
# the sum of (g - mean) * (h - mean) about these, and the sums of g * xmu and h * xmu with
# xmu = x - mean of x, rounded. Channels, whose elements have one weight, have dy for h; rows have
# the sums of k and k * xmu besides. With given statistics the means count as 0.
_COUNT, _MEAN_G, _MEAN_H, _GH, _GX, _HX, _K, _KX = range(8)
_SUMS, _ROW_SUMS = 6, 8


@strict_function
def _merge(total, more):
    """Take the sums of other elements into `total`."""
    count = total[_COUNT] + more[_COUNT]
    share = more[_COUNT] / count
    delta_g, delta_h = more[_MEAN_G] - total[_MEAN_G], more[_MEAN_H] - total[_MEAN_H]
    total[_GH] += more[_GH] + delta_g * delta_h * (total[_COUNT] * share)
    total[_MEAN_G] += delta_g * share
    total[_MEAN_H] += delta_h * share
    total[_COUNT] = count
    for i in range(_GX, total.size):
        total[i] += more[i]


@strict_function
def _write_centered(sums, centered, count, center_g, center_h, sum_g, sum_h, sum_gh):
    """What is about means, from sums about centers that are close to them; or about 0."""
    correction_g, correction_h = sum_g / count, sum_h / count
    sums[_COUNT] = count
    sums[_MEAN_G] = center_g + correction_g if centered else 0.0
    sums[_MEAN_H] = center_h + correction_h if centered else 0.0
    sums[_GH] = sum_gh - sum_g * correction_h if centered else sum_gh


@strict_function
def _shares(r, low, sums, weight, mean_k, sum_kx):
    """(q, t, a, c, d), shared by the elements of a statistic.

    u = gdx * r + xmu * q + t,    ddx = gdx * a + h * q + k * r + xmu * r * c + d

    Here xmu = x - mean, of the mean rounded; `low` is what rounding took from it, and h is
    `weight` times that of the sums.
    """
    count, mean_g, mean_h = sums[_COUNT], sums[_MEAN_G], weight * sums[_MEAN_H]
    mean_gx, mean_hx = sums[_GX] / count, weight * (sums[_HX] / count)
    mean_kx = sum_kx / count
    if low != 0.0:
        mean_gx -= low * mean_g
        mean_hx -= low * mean_h
        mean_kx -= low * mean_k
    mean_gv, mean_hv, mean_kv = mean_gx * r, mean_hx * r, mean_kx * r
    q = -(r * r) * mean_gv
    a = -(r * r) * mean_hv
    together = weight * (sums[_GH] / count) - 3.0 * mean_gv * mean_hv
    c = -(r * r * together + r * mean_kv)  # of xmu * r: times r it might overflow
    t = -r * mean_g
    d = -a * mean_g - q * mean_h - r * mean_k
    if low != 0.0:
        t -= low * q
        d -= low * r * c
    return q, t, a, c, d


# --- channels: statistics whose elements have one weight ----------------------------


@strict_function
def _value(array, i, absent):
    return np.float64(load(array, i)) if array.size else absent


@strict_function
def _coefficients(x, channel, training, residual, inv_std, weight, gweight, gbias, sums):
    """Numbers of a channel: (e, f, s, a, c, d, r).

    ddy = gdx * e + xmu * f + s, ddx = gdx * a + dy * f + xmu * r * c + d.
    """
    r = np.float64(load(inv_std, channel))
    w, gw = _value(weight, channel, 1.0), _value(gweight, channel, 0.0)
    low = residual_times(residual, channel, 1.0)
    a, c, d = 0.0, 0.0, 0.0
    f, s = gw * r, _value(gbias, channel, 0.0)
    if training:
        q, t, a, c, d = _shares(r, low, sums, w, gw * sums[_MEAN_H], gw * sums[_HX])
        f += w * q
        s += w * t
    if low != 0.0:
        s -= low * r * gw
    return (
        as_accumulator(x, w * r), as_accumulator(x, f), as_accumulator(x, s),
        as_accumulator(x, a), as_accumulator(x, c), as_accumulator(x, d), load(inv_std, channel),
    )  # fmt: skip


@strict_function
def _write_weight(ddweight, channel, training, residual, inv_std, sums):
    """The sum of dy * u over a channel."""
    if ddweight.size:
        r = np.float64(load(inv_std, channel))
        total = r * sums[_GH]
        if training:
            low = residual_times(residual, channel, 1.0)
            low_dy = residual_times(residual, channel, sums[_COUNT] * sums[_MEAN_H])
            q, _, _, _, _ = _shares(r, low, sums, 1.0, 0.0, 0.0)
            total += q * (sums[_HX] - low_dy)
        store(ddweight, channel, as_accumulator(ddweight, total))


# --- segments -----------------------------------------------------------------


@device_function
def _run_totals(g, dy, x, start, length):
    sum_g, sum_dy = as_accumulator(x, 0.0), as_accumulator(x, 0.0)
    for i in range(start, start + length):
        sum_g = accumulate(sum_g, _upstream(g, i, x))
        sum_dy = accumulate(sum_dy, load(dy, i))
    return sum_g, sum_dy


@device_function
def _run_sums(g, dy, x, start, length, mean, center_g, center_dy):
    zero = as_accumulator(x, 0.0)
    sum_g, sum_gx, sum_dy, sum_dyx, sum_gdy = zero, zero, zero, zero, zero
    for i in range(start, start + length):
        upstream, gradient = _upstream(g, i, x), load(dy, i)
        xmu = load(x, i) - mean
        deviation_g, deviation_dy = upstream - center_g, gradient - center_dy
        sum_g = accumulate(sum_g, deviation_g)
        sum_gx = accumulate(sum_gx, upstream * xmu)
        sum_dy = accumulate(sum_dy, deviation_dy)
        sum_dyx = accumulate(sum_dyx, gradient * xmu)
        sum_gdy = accumulate(sum_gdy, deviation_g * deviation_dy)
    return sum_g, sum_gx, sum_dy, sum_dyx, sum_gdy


@device_function
def _run_outputs(put, g, dy, x, ddy, ddx, start, end, training, uses_x, mean, numbers):
    """`uses_x` is False if the statistics are given and nothing is upstream of dweight."""
    e, f, s, a, c, d, r = numbers
    zero = as_accumulator(x, 0.0)
    for i in range(start, end):
        upstream, gradient, xmu = _upstream(g, i, x), load(dy, i), load(x, i) - mean
        if not uses_x:
            gradient, xmu = zero, zero
        put(ddy, i, upstream * e + (xmu * f + s))
        rest = gradient * f
        if training:
            rest = upstream * a + (rest + (xmu * r * c + d))
        put(ddx, i, rest)


@device_function
def _both_streaming(ddy, ddx, start, end, streaming):
    """Where both outputs can be written past the caches; may be empty."""
    first, last = streaming_range(ddy, start, end, streaming)
    other, _ = streaming_range(ddx, start, end, streaming)
    return (first, last) if first == other else (end, end)


@device_function
def _segments_outputs(
    g, dy, x, ddy, ddx, base, stride, outer, inner, chunk_rows, chunk_length, first_chunk,
    last_chunk, training, uses_x, mean, coefficients, streaming,
):  # fmt: skip
    """Both outputs of the chunks [first_chunk, last_chunk) of the channel that begins at base."""
    numbers = (training, uses_x, mean, coefficients)
    for chunk in range(first_chunk, last_chunk):
        row, rows, offset, length = segments_chunk(chunk, outer, inner, chunk_rows, chunk_length)
        for r in range(row, row + rows):
            start = base + r * stride + offset
            end = start + length
            first, last = _both_streaming(ddy, ddx, start, end, streaming)
            _run_outputs(store, g, dy, x, ddy, ddx, start, first, *numbers)
            _run_outputs(store_streaming, g, dy, x, ddy, ddx, first, last, *numbers)
            _run_outputs(store, g, dy, x, ddy, ddx, last, end, *numbers)


@device_function
def _segments_chunk_sums(g, dy, x, start, stride, rows, length, mean, centered, sums):
    """Sums of a chunk: `rows` runs of `length` elements, `stride` apart.

    The centers of g and dy are the means of its first eighth, so sums of squares about them are
    at most eight times those about the means.
    """
    center_g, center_dy = as_accumulator(x, 0.0), as_accumulator(x, 0.0)
    if centered:
        first_rows, first_length = (rows + 7) // 8, length if rows > 1 else (length + 7) // 8
        total_g, total_dy = 0.0, 0.0
        for row in range(first_rows):
            if rows > 1:
                if g is not None:
                    prefetch(g, start + (row + 1) * stride, length)
                prefetch(dy, start + (row + 1) * stride, length)
            a, b = _run_totals(g, dy, x, start + row * stride, first_length)
            total_g, total_dy = total_g + a, total_dy + b
        number = np.float64(first_rows * first_length)
        center_g, center_dy = (
            as_accumulator(x, total_g / number),
            as_accumulator(x, total_dy / number),
        )
    sum_g, sum_gx, sum_dy, sum_dyx, sum_gdy = 0.0, 0.0, 0.0, 0.0, 0.0
    for row in range(rows):
        if rows > 1:
            if g is not None:
                prefetch(g, start + (row + 1) * stride, length)
            prefetch(dy, start + (row + 1) * stride, length)
            prefetch(x, start + (row + 1) * stride, length)
        a, b, c, d, e = _run_sums(g, dy, x, start + row * stride, length, mean, center_g, center_dy)
        sum_g, sum_gx, sum_dy, sum_dyx, sum_gdy = (
            sum_g + a, sum_gx + b, sum_dy + c, sum_dyx + d, sum_gdy + e
        )  # fmt: skip
    _write_centered(
        sums, centered, np.float64(rows * length), np.float64(center_g), np.float64(center_dy),
        sum_g, sum_dy, sum_gdy,
    )  # fmt: skip
    sums[_GX], sums[_HX] = sum_gx, sum_dyx


@device_function
def _segments_sums(
    g, dy, x, base, stride, outer, inner, chunk_rows, chunk_length, part_chunks, part, mean,
    centered, of_chunk, sums,
):  # fmt: skip
    """Sums over one part of the channel that begins at `base`."""
    chunks = segments_chunks(outer, inner, chunk_rows, chunk_length)
    sums[:] = 0.0
    for chunk in range(part * part_chunks, min(chunks, (part + 1) * part_chunks)):
        row, rows, offset, length = segments_chunk(chunk, outer, inner, chunk_rows, chunk_length)
        start = base + row * stride + offset
        _segments_chunk_sums(g, dy, x, start, stride, rows, length, mean, centered, of_chunk)
        _merge(sums, of_chunk)


@shared_kernel
def _reduce_segments(
    board, me, g, dy, x, ddy, ddx, mean, residual, inv_std, weight, gweight, gbias, partials,
    streaming, /, batch, outer, group, inner, members, parameters,
    block, chunk_rows, chunk_length, part_chunks, parts,
):  # fmt: skip
    """A task is one part of one block; `partials[channel, part]` gets the sums.

    If there are outputs they become those of given statistics.
    """
    chunks = segments_chunks(outer, inner, chunk_rows, chunk_length)
    stride = group * inner
    training, of_chunk = not ddx.size, np.empty(_SUMS)
    task = next_task(board, me)
    while task >= 0:
        first, part = segments_piece(task, batch, outer, group, block, parts)
        for channel in range(first, min(group, first + block)):
            base = channel * inner
            sums = partials[channel, part]
            center = load(mean, channel)
            _segments_sums(
                g, dy, x, base, stride, outer, inner, chunk_rows, chunk_length, part_chunks, part,
                center, training, of_chunk, sums,
            )  # fmt: skip
            if not training:
                coefficients = _coefficients(
                    x, channel, False, residual, inv_std, weight, gweight, gbias, sums
                )
                _segments_outputs(
                    g, dy, x, ddy, ddx, base, stride, outer, inner, chunk_rows, chunk_length,
                    part * part_chunks, min(chunks, (part + 1) * part_chunks), False,
                    gweight.size > 0, center, coefficients, streaming,
                )  # fmt: skip
        task = next_task(board, me)


@shared_kernel
def _transform_segments(
    board, me, g, dy, x, ddy, ddx, mean, residual, inv_std, weight, gweight, gbias, sums,
    streaming, /, batch, outer, group, inner, members, parameters,
    block, chunk_rows, chunk_length, part_chunks, parts,
):  # fmt: skip
    """A task is one part of one block; the last one goes first, being nearest."""
    chunks = segments_chunks(outer, inner, chunk_rows, chunk_length)
    task = last_task(board, me)
    while task >= 0:
        first, part = segments_piece(task, batch, outer, group, block, parts)
        for channel in range(first, min(group, first + block)):
            base = channel * inner
            coefficients = _coefficients(
                x, channel, True, residual, inv_std, weight, gweight, gbias, sums[channel]
            )
            _segments_outputs(
                g, dy, x, ddy, ddx, base, group * inner, outer, inner, chunk_rows, chunk_length,
                part * part_chunks, min(chunks, (part + 1) * part_chunks), True, True,
                load(mean, channel), coefficients, streaming,
            )  # fmt: skip
        task = last_task(board, me)


@shared_kernel
def _double_backward_segments(
    board, me, g, dy, x, ddy, ddx, mean, residual, inv_std, weight, gweight, gbias, ddweight,
    streaming, /, batch, outer, group, inner, members, parameters,
    block, chunk_rows, chunk_length, part_chunks, parts,
):  # fmt: skip
    """A task is one block of whole channels."""
    chunks = segments_chunks(outer, inner, chunk_rows, chunk_length)
    stride = group * inner
    sums, part_sums, of_chunk = np.empty(_SUMS), np.empty(_SUMS), np.empty(_SUMS)
    task = next_task(board, me)
    while task >= 0:
        for channel in range(task * block, min(group, (task + 1) * block)):
            base = channel * inner
            center = load(mean, channel)
            sums[:] = 0.0
            for part in range(parts):
                _segments_sums(
                    g, dy, x, base, stride, outer, inner, chunk_rows, chunk_length, part_chunks,
                    part, center, True, of_chunk, part_sums,
                )  # fmt: skip
                _merge(sums, part_sums)
            _write_weight(ddweight, channel, True, residual, inv_std, sums)
            coefficients = _coefficients(
                x, channel, True, residual, inv_std, weight, gweight, gbias, sums
            )
            _segments_outputs(
                g, dy, x, ddy, ddx, base, stride, outer, inner, chunk_rows, chunk_length, 0,
                chunks, True, True, center, coefficients, streaming,
            )  # fmt: skip
        task = next_task(board, me)


# --- columns ------------------------------------------------------------------


@device_function
def _column_centers(g, dy, start, stride, rows, width, center_g, center_dy, x):
    """Means of every position over `rows` rows."""
    for p in range(width):
        store(center_g, p, as_accumulator(x, 0.0))
        store(center_dy, p, as_accumulator(x, 0.0))
    for row in range(rows):
        a = start + row * stride
        for p in range(width):
            store(center_g, p, load_scratch(center_g, p) + _upstream(g, a + p, x))
            store(center_dy, p, load_scratch(center_dy, p) + load(dy, a + p))
    share = as_accumulator(x, 1.0 / rows)
    for p in range(width):
        store(center_g, p, load_scratch(center_g, p) * share)
        store(center_dy, p, load_scratch(center_dy, p) * share)


@device_function
def _row_sums(g, dy, x, start, width, mean, center_g, center_dy, sums):
    sum_g, sum_gx, sum_dy, sum_dyx, sum_gdy = sums
    for p in range(width):
        upstream, gradient = _upstream(g, start + p, x), load(dy, start + p)
        xmu = load(x, start + p) - load_scratch(mean, p)
        deviation_g = upstream - load_scratch(center_g, p)
        deviation_dy = gradient - load_scratch(center_dy, p)
        store(sum_g, p, load_scratch(sum_g, p) + deviation_g)
        store(sum_gx, p, load_scratch(sum_gx, p) + upstream * xmu)
        store(sum_dy, p, load_scratch(sum_dy, p) + deviation_dy)
        store(sum_dyx, p, load_scratch(sum_dyx, p) + gradient * xmu)
        store(sum_gdy, p, load_scratch(sum_gdy, p) + deviation_g * deviation_dy)


@device_function
def _columns_chunk(g, dy, x, start, stride, rows, width, before, mean, centered, of_chunk, totals):
    """Merge `rows` rows, summed two at a time, into the sums of `before` rows before."""
    zero = as_accumulator(x, 0.0)
    center_g, center_dy, sum_g, sum_gx, sum_dy, sum_dyx, sum_gdy = of_chunk
    sums = (sum_g, sum_gx, sum_dy, sum_dyx, sum_gdy)
    if centered:
        _column_centers(g, dy, start, stride, (rows + 7) // 8, width, center_g, center_dy, x)
    else:
        for p in range(width):
            store(center_g, p, zero)
            store(center_dy, p, zero)
    for i in range(5):
        for p in range(width):
            store(sums[i], p, zero)
    for row in range(0, rows - 1, 2):
        a = start + row * stride
        b = a + stride
        for p in range(width):
            center = load_scratch(mean, p)
            g_a, g_b = _upstream(g, a + p, x), _upstream(g, b + p, x)
            dy_a, dy_b = load(dy, a + p), load(dy, b + p)
            x_a, x_b = load(x, a + p) - center, load(x, b + p) - center
            store(sum_gx, p, load_scratch(sum_gx, p) + (g_a * x_a + g_b * x_b))
            store(sum_dyx, p, load_scratch(sum_dyx, p) + (dy_a * x_a + dy_b * x_b))
            g_a, g_b = g_a - load_scratch(center_g, p), g_b - load_scratch(center_g, p)
            dy_a, dy_b = dy_a - load_scratch(center_dy, p), dy_b - load_scratch(center_dy, p)
            store(sum_g, p, load_scratch(sum_g, p) + (g_a + g_b))
            store(sum_dy, p, load_scratch(sum_dy, p) + (dy_a + dy_b))
            store(sum_gdy, p, load_scratch(sum_gdy, p) + (g_a * dy_a + g_b * dy_b))
    if rows % 2:
        last = start + (rows - 1) * stride
        _row_sums(g, dy, x, last, width, mean, center_g, center_dy, sums)
    _merge_columns(rows, width, before, centered, of_chunk, totals)


@strict_function
def _merge_columns(rows, width, before, centered, of_chunk, totals):
    """What `_merge` does, for every position."""
    center_g, center_dy, sum_g, sum_gx, sum_dy, sum_dyx, sum_gdy = of_chunk
    count, old = np.float64(rows), np.float64(before)
    share = count / (old + count)
    for p in range(width):
        more_g, more_dy = np.float64(load_scratch(sum_g, p)), np.float64(load_scratch(sum_dy, p))
        total = totals[_GH]
        more_gdy = np.float64(load_scratch(sum_gdy, p))
        if centered:
            mean_g, mean_dy = load_scratch(totals[_MEAN_G], p), load_scratch(totals[_MEAN_H], p)
            correction_g, correction_dy = more_g / count, more_dy / count
            delta_g = np.float64(load_scratch(center_g, p)) + correction_g - mean_g
            delta_dy = np.float64(load_scratch(center_dy, p)) + correction_dy - mean_dy
            store(totals[_MEAN_G], p, mean_g + delta_g * share)
            store(totals[_MEAN_H], p, mean_dy + delta_dy * share)
            more_gdy -= more_g * correction_dy
            more_gdy += delta_g * delta_dy * (old * share)
        store(total, p, load_scratch(total, p) + more_gdy)
        total = totals[_GX]
        store(total, p, load_scratch(total, p) + np.float64(load_scratch(sum_gx, p)))
        total = totals[_HX]
        store(total, p, load_scratch(total, p) + np.float64(load_scratch(sum_dyx, p)))


@device_function
def _columns_sums(
    g, dy, x, start, stride, rows, width, tail_width, chunk_rows, mean, centered, of_chunk, totals
):
    """Sums of every position, over `rows` rows and, left of `tail_width`, one more."""
    totals[:, :width] = 0.0
    for chunk in range(columns_chunks(rows, tail_width, chunk_rows)):
        row, height, positions = columns_chunk(chunk, rows, width, tail_width, chunk_rows)
        _columns_chunk(
            g, dy, x, start + row * stride, stride, height, positions, row, mean,
            centered, of_chunk, totals,
        )  # fmt: skip


@strict_function
def _channel_sums(channel, channels, fold, inner, rows, tail_rows, totals, of_position, sums):
    """The sums of a channel from those of its positions (see `spread`).

    These have `rows` elements each, those of the first `tail_rows` copies one more.
    """
    sums[:] = 0.0
    for copy in range(fold):
        first = (copy * channels + channel) * inner
        for p in range(first, first + inner):
            of_position[_COUNT] = rows + (copy < tail_rows)
            for i in range(1, _SUMS):
                of_position[i] = totals[i, p]
            _merge(sums, of_position)


@device_function
def _row_outputs(put, g, dy, x, ddy, ddx, start, first, last, training, uses_x, mean, block):
    block_e, block_f, block_s, block_a, block_c, block_d, block_r = block
    zero = as_accumulator(x, 0.0)
    for p in range(first, last):
        i = start + p
        upstream, gradient = _upstream(g, i, x), load(dy, i)
        xmu = load(x, i) - load_scratch(mean, p)
        if not uses_x:
            gradient, xmu = zero, zero
        f = load_scratch(block_f, p)
        shifted = xmu * f + load_scratch(block_s, p)
        put(ddy, i, upstream * load_scratch(block_e, p) + shifted)
        rest = gradient * f
        if training:
            bent = xmu * load_scratch(block_r, p) * load_scratch(block_c, p)
            rest += bent + load_scratch(block_d, p)
            rest += upstream * load_scratch(block_a, p)
        put(ddx, i, rest)


@device_function
def _columns_outputs(
    g, dy, x, ddy, ddx, start, stride, rows, width, tail_width, training, uses_x, mean, block,
    streaming,
):  # fmt: skip
    """Both outputs of `rows` rows of `width` positions and, below them, of `tail_width`."""
    numbers = (training, uses_x, mean, block)
    for row in range(rows):
        a = start + row * stride
        first, last = _both_streaming(ddy, ddx, a, a + width, streaming)
        first, last = first - a, last - a
        _row_outputs(store, g, dy, x, ddy, ddx, a, 0, first, *numbers)
        _row_outputs(store_streaming, g, dy, x, ddy, ddx, a, first, last, *numbers)
        _row_outputs(store, g, dy, x, ddy, ddx, a, last, width, *numbers)
    _row_outputs(store, g, dy, x, ddy, ddx, start + rows * stride, 0, tail_width, *numbers)


@device_function
def _spread_means(first, channels, fold, inner, mean, block_mean):
    for channel in range(channels):
        spread(load(mean, first + channel), channel, channels, fold, inner, block_mean)


@device_function
def _spread_coefficients(
    x, first, channels, fold, inner, training, residual, inv_std, weight, gweight, gbias, sums,
    first_sums, block,
):  # fmt: skip
    """Every position's coefficients; the sums of channel `first` are those at `first_sums`."""
    for channel in range(channels):
        found = _coefficients(
            x, first + channel, training, residual, inv_std, weight, gweight, gbias,
            sums[first_sums + channel],
        )  # fmt: skip
        spread(found[0], channel, channels, fold, inner, block[0])
        spread(found[1], channel, channels, fold, inner, block[1])
        spread(found[2], channel, channels, fold, inner, block[2])
        spread(found[3], channel, channels, fold, inner, block[3])
        spread(found[4], channel, channels, fold, inner, block[4])
        spread(found[5], channel, channels, fold, inner, block[5])
        spread(found[6], channel, channels, fold, inner, block[6])


@shared_kernel
def _reduce_columns(
    board, me, g, dy, x, ddy, ddx, mean, residual, inv_std, weight, gweight, gbias, partials,
    streaming, /, batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels,
):  # fmt: skip
    """A task is one part of one block; `partials[channel, part]` gets the sums.

    If there are outputs they become those of given statistics.
    """
    most = fold * block_channels * inner
    blocks, totals, of_position = scratch(x, (15, most)), np.empty((_SUMS, most)), np.empty(_SUMS)
    block_mean = blocks[0]
    block = (
        blocks[1], blocks[2], blocks[3], blocks[4], blocks[5], blocks[6], blocks[7]
    )  # fmt: skip
    of_chunk = (
        blocks[8], blocks[9], blocks[10], blocks[11], blocks[12], blocks[13], blocks[14]
    )  # fmt: skip
    training, none = not ddx.size, np.zeros((block_channels, _SUMS))
    task = next_task(board, me)
    while task >= 0:
        first, channels, part, start, height, tail = columns_piece(
            task, outer, group, inner, fold, rows, tail_rows, part_rows, parts, block_channels
        )
        width, tail_width = fold * channels * inner, tail * channels * inner
        stride = fold * group * inner
        _spread_means(first, channels, fold, inner, mean, block_mean)
        _columns_sums(
            g, dy, x, start, stride, height, width, tail_width, chunk_rows, block_mean,
            training, of_chunk, totals,
        )  # fmt: skip
        for channel in range(channels):
            _channel_sums(
                channel, channels, fold, inner, height, tail, totals, of_position,
                partials[first + channel, part],
            )  # fmt: skip
        if not training:
            _spread_coefficients(
                x, first, channels, fold, inner, False, residual, inv_std, weight, gweight, gbias,
                none, 0, block,
            )  # fmt: skip
            _columns_outputs(
                g, dy, x, ddy, ddx, start, stride, height, width, tail_width, False,
                gweight.size > 0, block_mean, block, streaming,
            )  # fmt: skip
        task = next_task(board, me)


@shared_kernel
def _transform_columns(
    board, me, g, dy, x, ddy, ddx, mean, residual, inv_std, weight, gweight, gbias, sums,
    streaming, /, batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels,
):  # fmt: skip
    """A task is one part of one block; the last part goes first, being nearest."""
    most = fold * block_channels * inner
    blocks = scratch(x, (8, most))
    block_mean = blocks[0]
    block = (
        blocks[1], blocks[2], blocks[3], blocks[4], blocks[5], blocks[6], blocks[7]
    )  # fmt: skip
    task = last_task(board, me)
    while task >= 0:
        first, channels, _, start, height, tail = columns_piece(
            task, outer, group, inner, fold, rows, tail_rows, part_rows, parts, block_channels
        )
        _spread_means(first, channels, fold, inner, mean, block_mean)
        _spread_coefficients(
            x, first, channels, fold, inner, True, residual, inv_std, weight, gweight, gbias,
            sums, first, block,
        )  # fmt: skip
        _columns_outputs(
            g, dy, x, ddy, ddx, start, fold * group * inner, height, fold * channels * inner,
            tail * channels * inner, True, True, block_mean, block, streaming,
        )  # fmt: skip
        task = last_task(board, me)


@shared_kernel
def _double_backward_columns(
    board, me, g, dy, x, ddy, ddx, mean, residual, inv_std, weight, gweight, gbias, ddweight,
    streaming, /, batch, outer, group, inner,
    fold, rows, tail_rows, chunk_rows, part_rows, parts, block_channels,
):  # fmt: skip
    """A task is one block of whole channels."""
    most = fold * block_channels * inner
    blocks, totals, of_position = scratch(x, (15, most)), np.empty((_SUMS, most)), np.empty(_SUMS)
    block_mean = blocks[0]
    block = (
        blocks[1], blocks[2], blocks[3], blocks[4], blocks[5], blocks[6], blocks[7]
    )  # fmt: skip
    of_chunk = (
        blocks[8], blocks[9], blocks[10], blocks[11], blocks[12], blocks[13], blocks[14]
    )  # fmt: skip
    sums, of_part = np.empty((block_channels, _SUMS)), np.empty(_SUMS)
    stride = fold * group * inner
    task = next_task(board, me)
    while task >= 0:
        first, channels, _, start, _, _ = columns_piece(
            task, outer, group, inner, fold, rows, tail_rows, rows, 1, block_channels
        )
        width = fold * channels * inner
        _spread_means(first, channels, fold, inner, mean, block_mean)
        sums[:, :] = 0.0
        for part in range(parts):
            height, tail = columns_part(part, rows, tail_rows, part_rows, parts)
            _columns_sums(
                g, dy, x, start + part * part_rows * stride, stride, height, width,
                tail * channels * inner, chunk_rows, block_mean, True, of_chunk, totals,
            )  # fmt: skip
            for channel in range(channels):
                _channel_sums(
                    channel, channels, fold, inner, height, tail, totals, of_position, of_part
                )
                _merge(sums[channel], of_part)
        for channel in range(channels):
            _write_weight(ddweight, first + channel, True, residual, inv_std, sums[channel])
        _spread_coefficients(
            x, first, channels, fold, inner, True, residual, inv_std, weight, gweight, gbias,
            sums, 0, block,
        )  # fmt: skip
        _columns_outputs(
            g, dy, x, ddy, ddx, start, stride, rows, width, tail_rows * channels * inner, True,
            True, block_mean, block, streaming,
        )  # fmt: skip
        task = next_task(board, me)


@kernel
def _finish_sums(partials, training, residual, inv_std, sums, ddweight):
    """Sums of every channel from those of its parts, and ddweight."""
    for channel in range(partials.shape[0]):
        sums[channel, :] = 0.0
        for part in range(partials.shape[1]):
            _merge(sums[channel], partials[channel, part])
        _write_weight(ddweight, channel, training, residual, inv_std, sums[channel])


# --- rows ---------------------------------------------------------------------


@device_function
def _run_row_totals(g, dy, x, start, length, weight, to_weight):
    sum_g, sum_h = as_accumulator(x, 0.0), as_accumulator(x, 0.0)
    for i in range(start, start + length):
        sum_g = accumulate(sum_g, _upstream(g, i, x))
        sum_h = accumulate(sum_h, load(dy, i) * load(weight, i + to_weight))
    return sum_g, sum_h


@device_function
def _run_row_sums(g, dy, x, start, length, mean, center_g, center_h, weight, gweight, to_weight):
    zero = as_accumulator(x, 0.0)
    sum_g, sum_gx, sum_h, sum_hx, sum_gh, sum_k, sum_kx = zero, zero, zero, zero, zero, zero, zero
    for i in range(start, start + length):
        upstream, gradient = _upstream(g, i, x), load(dy, i)
        xmu = load(x, i) - mean
        h = gradient * load(weight, i + to_weight)
        k = gradient * load(gweight, i + to_weight)
        deviation_g, deviation_h = upstream - center_g, h - center_h
        sum_g = accumulate(sum_g, deviation_g)
        sum_gx = accumulate(sum_gx, upstream * xmu)
        sum_h = accumulate(sum_h, deviation_h)
        sum_hx = accumulate(sum_hx, h * xmu)
        sum_gh = accumulate(sum_gh, deviation_g * deviation_h)
        sum_k = accumulate(sum_k, k)
        sum_kx = accumulate(sum_kx, k * xmu)
    return sum_g, sum_gx, sum_h, sum_hx, sum_gh, sum_k, sum_kx


@device_function
def _run_row_outputs(
    put, g, dy, x, ddy, ddx, start, end, numbers, weight, gweight, gbias, to_weight, ddweight,
    to_ddweight,
):  # fmt: skip
    """Both outputs; adds to ddweight[i + to_ddweight]."""
    mean, r, low_r, q, t, a, c, d = numbers
    for i in range(start, end):
        upstream, gradient = _upstream(g, i, x), load(dy, i)
        xmu = load(x, i) - mean
        w, gw = load(weight, i + to_weight), load(gweight, i + to_weight)
        u = upstream * r + (xmu * q + t)
        put(ddy, i, w * u + (gw * (xmu * r - low_r) + load(gbias, i + to_weight)))
        put(ddx, i, upstream * a + (gradient * (w * q + gw * r) + (xmu * r * c + d)))
        total = load_scratch(ddweight, i + to_ddweight) + gradient * u
        store(ddweight, i + to_ddweight, total)


@device_function
def _row_outputs_of(
    g, dy, x, ddy, ddx, start, end, row, sums, mean, residual, inv_std, weight, gweight,
    gbias, to_weight, ddweight, to_ddweight, streaming,
):  # fmt: skip
    """Both outputs of the elements [start, end), which are in a row with the given sums."""
    r = np.float64(load(inv_std, row))
    low = residual_times(residual, row, 1.0)
    q, t, a, c, d = _shares(r, low, sums, 1.0, sums[_K] / sums[_COUNT], sums[_KX])
    numbers = (
        load(mean, row), load(inv_std, row), as_accumulator(x, low * r if low != 0.0 else 0.0),
        as_accumulator(x, q), as_accumulator(x, t), as_accumulator(x, a), as_accumulator(x, c),
        as_accumulator(x, d),
    )  # fmt: skip
    first, last = _both_streaming(ddy, ddx, start, end, streaming)
    rest = (weight, gweight, gbias, to_weight, ddweight, to_ddweight)
    _run_row_outputs(store, g, dy, x, ddy, ddx, start, first, numbers, *rest)
    _run_row_outputs(store_streaming, g, dy, x, ddy, ddx, first, last, numbers, *rest)
    _run_row_outputs(store, g, dy, x, ddy, ddx, last, end, numbers, *rest)


@device_function
def _write_row_sums(g, dy, x, start, length, mean, weight, gweight, to_weight, sums):
    """Sums of a chunk of a row; centers as in `_segments_chunk_sums`."""
    eighth = (length + 7) // 8
    total_g, total_h = _run_row_totals(g, dy, x, start, eighth, weight, to_weight)
    center_g = as_accumulator(x, np.float64(total_g) / eighth)
    center_h = as_accumulator(x, np.float64(total_h) / eighth)
    sum_g, sum_gx, sum_h, sum_hx, sum_gh, sum_k, sum_kx = _run_row_sums(
        g, dy, x, start, length, mean, center_g, center_h, weight, gweight, to_weight
    )
    _write_centered(
        sums, True, np.float64(length), np.float64(center_g), np.float64(center_h),
        np.float64(sum_g), np.float64(sum_h), np.float64(sum_gh),
    )  # fmt: skip
    sums[_GX], sums[_HX], sums[_K], sums[_KX] = sum_gx, sum_hx, sum_k, sum_kx


@shared_kernel
def _double_backward_rows(
    board, me, g, dy, x, ddy, ddx, mean, residual, inv_std, weight, gweight, gbias, partials,
    streaming, /, batch, number, length, chunk_length, pieces, block, blocks,
):  # fmt: skip
    """A task is one block of samples; `partials[block, 0]` gets its part of ddweight."""
    sums, of_piece = np.empty(_ROW_SUMS), np.empty(_ROW_SUMS)
    task = next_task(board, me)
    while task >= 0:
        ddweight = partials[task, 0]
        for i in range(length):
            store(ddweight, i, as_accumulator(x, 0.0))
        for row in range(task * block, min(batch, (task + 1) * block)):
            base = row * length
            sums[:] = 0.0
            for offset in range(0, length, chunk_length):
                size = min(chunk_length, length - offset)
                _write_row_sums(
                    g, dy, x, base + offset, size, load(mean, row), weight, gweight, -base,
                    of_piece,
                )  # fmt: skip
                _merge(sums, of_piece)
            _row_outputs_of(
                g, dy, x, ddy, ddx, base, base + length, row, sums, mean, residual,
                inv_std, weight, gweight, gbias, -base, ddweight, -base, streaming,
            )  # fmt: skip
        task = next_task(board, me)


@shared_kernel
def _reduce_rows(
    board, me, g, dy, x, mean, weight, gweight, sums,
    /, batch, number, length, chunk_length, pieces, block, blocks,
):  # fmt: skip
    """A task is one piece of a row; `sums[row, piece]` gets its sums."""
    task = next_task(board, me)
    while task >= 0:
        row, offset = task // pieces, task % pieces * chunk_length
        _write_row_sums(
            g, dy, x, row * length + offset, min(chunk_length, length - offset), load(mean, row),
            weight, gweight, -row * length, sums[row, task % pieces],
        )  # fmt: skip
        task = next_task(board, me)


@kernel
def _merge_pieces(sums):
    """`sums[row, 0]` gets those of all pieces of a row."""
    for row in range(sums.shape[0]):
        for piece in range(1, sums.shape[1]):
            _merge(sums[row, 0], sums[row, piece])


@shared_kernel
def _transform_rows(
    board, me, g, dy, x, ddy, ddx, mean, residual, inv_std, weight, gweight, gbias, sums, partials,
    streaming, /, batch, number, length, chunk_length, pieces, block, blocks,
):  # fmt: skip
    """A task is one piece of all rows; `partials[0, 0]` gets that of ddweight."""
    of_block, total = scratch(x, chunk_length), np.empty(chunk_length)
    task = last_task(board, me)
    while task >= 0:
        offset = task * chunk_length
        size = min(chunk_length, length - offset)
        total[:] = 0.0
        for first in range(0, batch, block):
            of_block[:] = 0.0
            for row in range(first, min(batch, first + block)):
                start = row * length + offset
                _row_outputs_of(
                    g, dy, x, ddy, ddx, start, start + size, row, sums[row, 0], mean, residual,
                    inv_std, weight, gweight, gbias, -row * length, of_block, -start, streaming,
                )  # fmt: skip
            for i in range(size):
                term = np.float64(load_scratch(of_block, i))
                store(total, i, load_scratch(total, i) + term)
        for i in range(size):
            value = as_accumulator(x, load_scratch(total, i))
            store(partials[0, 0], offset + i, value)
        task = last_task(board, me)


# --- the verb -----------------------------------------------------------------

_REDUCE = {Segments: _reduce_segments, Columns: _reduce_columns}
_TRANSFORM = {Segments: _transform_segments, Columns: _transform_columns}
_FUSED = {Segments: _double_backward_segments, Columns: _double_backward_columns}


@lru_cache(maxsize=1024)
def _fused(geometry: Geometry, itemsize: int, threads: int):
    """(kernel, tasks, last arguments) while everything is near; None if that is not to be."""
    cut = plan(geometry, itemsize, 3)
    assert not isinstance(cut, Rows)
    if not stays_near(cut, threads):
        return None
    return _FUSED[type(cut)], cut.resident_tasks, numbers(*_extents(cut, geometry), *cut.arguments)


def _extents(cut, geometry: Geometry):
    """A geometry as the kernels of a plan take it."""
    return geometry if isinstance(cut, Segments) else geometry[:4]


def double_backward(
    gdx, gdweight, gdbias, dy, x, mean, residual, inv_std, weight, training, geometry: Geometry,
    ddy, ddx, ddweight,
):  # fmt: skip
    """Gradients of `backward` with respect to dy, x and weight into `ddy`, `ddx`, `ddweight`.

    Each of gdx, gdweight, gdbias, residual, weight and ddweight may be None; absent gradients are
    0, an absent weight is 1. In training mean and inv_std are those of x. Statistics are of single
    groups, or of rows in which every element is one.
    """
    dtype = statistics_dtype(x.dtype)
    mean, inv_std, residual = (optional(array, dtype) for array in (mean, inv_std, residual))
    ddweight = NONE[dtype] if ddweight is None else ddweight.ravel()
    arrays: list[Any] = [array.ravel() for array in (dy, x, ddy, ddx)]
    arrays.insert(0, None if gdx is None else gdx.ravel())
    nbytes = 5 * x.nbytes
    streaming = nbytes > STREAMING_BYTES
    if geometry.batch > 1 or geometry.members > 1:
        parameters = [
            row_parameter(array, dtype, geometry, absent)
            for array, absent in ((weight, 1.0), (gdweight, 0.0), (gdbias, 0.0))
        ]
        _of_rows(arrays, mean, residual, inv_std, parameters, geometry, ddweight, streaming)
        return
    parameters = [parameter(array, dtype) for array in (weight, gdweight, gdbias)]
    given = (mean, residual, inv_std, *parameters)
    fused = _fused(geometry, x.itemsize, get_num_threads()) if training else None
    if fused is not None:
        kernel, tasks, last = fused
        run(kernel, tasks, nbytes, *arrays, *given, ddweight, streaming, last)
        return
    cut = plan(geometry, x.itemsize, 3 if training else 0)
    assert not isinstance(cut, Rows)
    last = numbers(*_extents(cut, geometry), *cut.arguments)
    partials = np.empty((geometry.group, cut.parts, _SUMS))
    outputs = [output[:0] if training else output for output in arrays[3:]]
    run(
        _REDUCE[type(cut)], cut.tasks, nbytes, *arrays[:3], *outputs, *given, partials, streaming,
        last,
    )  # fmt: skip
    sums = np.empty((geometry.group, _SUMS))
    _finish_sums(partials, training, residual, inv_std, sums, ddweight)
    if training:
        run(_TRANSFORM[type(cut)], cut.tasks, nbytes, *arrays, *given, sums, streaming, last)


def _of_rows(arrays, mean, residual, inv_std, parameters, geometry: Geometry, ddweight, streaming):
    cut = rows_plan(geometry, arrays[2].itemsize, 3)
    extents = row_extents(geometry)
    nbytes = 5 * arrays[2].nbytes
    length = extents[2]
    given = (mean, residual, inv_std, *parameters)
    if cut.resident:
        partials = np.empty((cut.blocks, 1, length), mean.dtype)
        run(
            _double_backward_rows, cut.resident_tasks, nbytes, *arrays, *given, partials,
            streaming, numbers(*extents, *cut.arguments),
        )  # fmt: skip
    else:
        partials = np.empty((1, 1, length), mean.dtype)
        sums = np.empty((geometry.statistics, cut.pieces, _ROW_SUMS))
        run(
            _reduce_rows, cut.tasks, nbytes, *arrays[:3], mean, *parameters[:2], sums,
            numbers(*extents, *cut.arguments),
        )  # fmt: skip
        _merge_pieces(sums)
        run(
            _transform_rows, cut.pieces, nbytes, *arrays, *given, sums, partials, streaming,
            numbers(*extents, *cut.arguments),
        )  # fmt: skip
    if ddweight.size:
        add_up(partials, geometry, ddweight, NONE[mean.dtype])
