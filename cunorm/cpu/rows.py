"""Kernels for rows: statistics of contiguous elements, each of which has its own parameters.

An array is ``(batch, number, length)``, and row ``[n, g]`` is scaled by ``weight[g]``. A row
that fits the cache is read from memory once, but twice in a backward pass of few long ones. The
gradients of the parameters are sums over the samples: a task takes a block of samples of one g,
adds up their contributions beside the sums of every row, and the blocks are added up in order.

What a row becomes depends on the row alone, to the bit, and not on the rows around it.

Statistics about zero have no mean, residual or bias: those are None, for which a kernel is compiled
without all that is done with them.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import types
from numba.extending import overload

from ..checks import statistics_dtype
from ..geometry import Geometry
from .elements import (
    LINE_ELEMENTS,
    STRICT,
    accumulate,
    are_dealt,
    as_accumulator,
    copy_run,
    device_function,
    half_of,
    inlined_function,
    lay,
    load,
    load_scratch,
    scratch,
    store,
    strict_function,
    sums_ahead,
    unless_none,
    write,
)
from .memory import empty
from .plan import SLOW_THIRD_LEVEL
from .pool import run
from .statistics import (
    LOT_BYTES,
    PARAMETER_BYTES,
    chunk_moments,
    lay_out,
    parameter,
    residual_times,
    save,
    take_given,
    together,
)
from .sums import sums_about
from .tasks import last_task, next_task, shared_kernel

__all__ = [
    "ADDED_APART_BYTES",
    "add_up",
    "add_up_near",
    "backward_rows",
    "coefficients",
    "gradient_rows",
    "laid_out",
    "lays_before",
    "normalize_rows",
    "of_rows",
    "reduce_rows",
    "row_extents",
    "row_parameter",
    "slope_and_offset",
    "squares_rows",
    "transform_rows",
]


def row_extents(geometry: Geometry) -> tuple[int, int, int]:
    """(batch, number, length) of the rows of a geometry."""
    batch, _, group, inner, members, _ = geometry
    return batch, group // members, members * inner


def row_parameter(array, dtype, geometry: Geometry, absent, offset=0.0, dealt=False):
    """A parameter as `parameter` gives it, with one value for each element of a sample.

    A missing one has the value `absent` everywhere: a version of every loop without it would
    spare no memory traffic.
    """
    if array is None:
        size = geometry.group * geometry.inner
        if size * dtype.itemsize >= PARAMETER_BYTES:
            values = empty((size,), dtype, PARAMETER_BYTES)
            values.fill(absent)
            return values
        return np.full(size, absent, dtype) if absent else np.zeros(size, dtype)  # is quicker
    return parameter(array, dtype, offset, geometry.inner, dealt)


def lays_before(geometry: Geometry, dtype: np.dtype) -> bool:
    """Whether parameters for x of this dtype are so large that `row_parameter` lays them out.

    Others the kernels do, every thread for itself.
    """
    size = geometry.group * geometry.inner
    return size * statistics_dtype(dtype).itemsize >= PARAMETER_BYTES


@inlined_function
def laid_out(x, values, absent, size, times, dealt):
    """A parameter as `row_parameter` gives it, for a sample of this size; `times` 0: it is one."""
    if values is None or times == 0 or (times == 1 and values.size > 0 and not dealt):
        return values
    laid = scratch(x, size)
    if values.size > 0:
        lay_out(values, 0.0, times, (size + 1) // 2 if dealt else 0, laid)
    else:
        laid[:] = absent
    return laid


# Rows longer than this are taken by twos in a backward pass.
_SINGLE_LENGTH = 2048

# While a row is written, what lies so many bytes ahead is fetched: in a forward pass of single
# rows that are no longer, but longer than so much if they follow each other, in a backward pass of
# rows that are longer than so much, of half types or others. Others the hardware reads as quickly,
# or more so. Measured on Zen 4 and 5, and on an Intel Xeon with a slow third level.
_AHEAD_BYTES = 16 << 10
_FOLLOWING_BYTES = 4 << 10
_SLOW_BYTES, _SLOW_WIDE_BYTES = (512, 3 << 10) if SLOW_THIRD_LEVEL else (5 << 9, 1 << 62)

# Blocks of a row's gradients are added up for so many elements at a time, in a near cache.
_ADDED_ELEMENTS = 1024

#: If they are so many bytes, that is done by a kernel of its own, in several threads.
ADDED_APART_BYTES = 256 << 10


@device_function
def _row_ahead(x, number, length):
    """How many elements ahead to fetch: to the next row with the same parameters, or farther."""
    return number * length if number > 1 else _AHEAD_BYTES // x.itemsize


# --- forward ------------------------------------------------------------------


@device_function
def _squares(x, base, length, chunk_length, ahead):
    """Sum of squares of a row; see `sums_about`."""
    total = 0.0
    for offset in range(0, length, chunk_length):
        size = min(chunk_length, length - offset)
        total += sums_about(x, base + offset, size, as_accumulator(x, 0.0), ahead, 0)[1]
    return total


@device_function
def _normalized(value, mean, scale, shift):
    """Of an element, with what `coefficients` gives."""
    if mean is None:
        return value * scale
    return (value - mean) * scale + shift


@device_function
def _transformed(i, p, x, mean, scale, shift, weight, bias):
    scaled = _normalized(load(x, i), mean, scale, shift) * load(weight, p)
    if bias is None:
        return scaled
    return scaled + load(bias, p)


@device_function
def _transform(x, y, start, end, row, statistics, weight, bias, to_weight, half, streaming, ahead):
    """Transform of the elements [start, end), which are in a row, beside numbers as `sweep` has.

    What is so far `ahead` is fetched meanwhile, but for 0.
    """
    mean, scale, shift = coefficients(x, row, *statistics)
    numbers = (x, mean, scale, shift, weight, bias)
    write(y, 0, start, end, streaming, _transformed, numbers, to_weight, half, x, None, ahead)


def coefficients(x, row, mean, residual, inv_std):
    """(mean, scale, shift) of the normalized x: (x - mean) * scale + shift.

    The shift makes up for the residual: what rounding took from the mean. About zero, mean and
    shift are None.
    """
    raise TypeError("for kernels only")


@overload(coefficients, jit_options=STRICT)
def _coefficients(x, row, mean, residual, inv_std):
    if mean == types.none:

        def about_zero(x, row, mean, residual, inv_std):
            return None, load_scratch(inv_std, row), None

        return about_zero

    def about_mean(x, row, mean, residual, inv_std):
        scale = load_scratch(inv_std, row)
        shift = -residual_times(residual, row, np.float64(scale))
        return load_scratch(mean, row), scale, as_accumulator(x, shift)

    return about_mean


@inlined_function
def of_rows(statistics, bias):
    """Mean, residual and inv_std of rows as `coefficients` takes them."""
    return unless_none(bias, statistics[0]), unless_none(bias, statistics[2]), statistics[1]


@shared_kernel
def normalize_rows(
    board, me, x, y, weight, bias, running_mean, running_var, eps, bessel, factor, statistics,
    streaming, /, times, _outer,
    batch, number, length, chunk_length, pieces, block, blocks,
):  # fmt: skip
    """A task is one block of samples of one g; `statistics` gets what `save` writes.

    Weight and bias are for so many elements each, one after another, or 0: `row_parameter` has
    them, dealt. Statistics of rows have no running ones: those are empty, and what belongs to them
    unused.
    """
    weights = laid_out(x, weight, 1.0, number * length, times, are_dealt(x))
    biases = laid_out(x, bias, 0.0, number * length, times, are_dealt(x))
    given = of_rows(statistics, bias)
    lot, row_bytes = together(x, length, LOT_BYTES), length * x.itemsize
    fetched = lot == 1 and row_bytes <= _AHEAD_BYTES
    fetched = fetched and (number > 1 or row_bytes > _FOLLOWING_BYTES)
    ahead = _row_ahead(x, number, length) if streaming and fetched else 0
    ahead_of_sums = sums_ahead(x, 1) if ahead == 0 and number == 1 else 0
    starts, centers, sums = np.empty(lot, np.int64), scratch(x, lot), np.empty((2, lot))
    moments = np.empty((3, lot))
    means, squares = moments[1], moments[2]
    task = next_task(board, me)
    while task >= 0:
        g = task % number
        last = min(batch, (task // number + 1) * block)
        for first in range(task // number * block, last, lot):
            rows = min(lot, last - first)
            row = first * number + g
            moments[:, :rows] = 0.0
            if bias is not None:
                for offset in range(0, length, chunk_length):
                    size = min(chunk_length, length - offset)
                    for i in range(rows):
                        starts[i] = (row + i * number) * length + offset
                    chunk_moments(
                        x, rows, starts, 1, 0, size, ahead_of_sums, centers, sums, moments
                    )
            else:
                for i in range(rows):
                    start = (row + i * number) * length
                    squares[i] = _squares(x, start, length, chunk_length, ahead_of_sums)
            count = np.float64(length)
            if number == 1:  # vectorized
                for i in range(rows):
                    save(statistics, row + i, count, means[i], squares[i], eps)
            else:
                for i in range(rows):
                    save(statistics, row + i * number, count, means[i], squares[i], eps)
            for i in range(row, row + rows * number, number):
                start = i * length
                _transform(
                    x, y, start, start + length, i, given, weights, biases, (g - i) * length,
                    (weights.size + 1) // 2, streaming, ahead,
                )  # fmt: skip
        task = next_task(board, me)


@shared_kernel
def squares_rows(
    board, me, x, partials, /, batch, number, length, chunk_length, pieces, block, blocks
):
    """A task is one piece of a row; `partials[piece]` gets counts, zeros and sums of squares."""
    ahead = sums_ahead(x, 1)
    task = next_task(board, me)
    while task >= 0:
        row, piece = task // pieces, task % pieces
        size = min(chunk_length, length - piece * chunk_length)
        partials[piece, 0, row] = size
        partials[piece, 1, row] = 0.0
        start = row * length + piece * chunk_length
        partials[piece, 2, row] = sums_about(x, start, size, as_accumulator(x, 0.0), ahead, 0)[1]
        task = next_task(board, me)


@device_function
def _transform_pieces(
    x, y, g, offset, size, batch, number, length, statistics, weight, bias, rooms, streaming
):
    """Transform of the same piece of all rows of one g, which share its parameters."""
    first, last = g * length + offset, g * length + offset + size
    weights = lay(y, weight[first:last], rooms[0], size, 0)
    biases = bias
    if bias is not None:
        biases = lay(y, bias[first:last], rooms[1], size, 0)
    for row in range(g, batch * number, number):
        start = row * length + offset
        _transform(
            x, y, start, start + size, row, statistics, weights, biases, -start, half_of(size),
            streaming, 0,
        )  # fmt: skip


@partial(shared_kernel, first=take_given)
def transform_rows(
    board, me, x, y, given_mean, given_var, eps, statistics, weight, bias, streaming,
    /, batch, number, length, chunk_length, pieces, block, blocks,
):  # fmt: skip
    """A task is the same piece of all rows of one g; the last one goes first, being nearest."""
    given = of_rows(statistics, bias)
    rooms = scratch(x, (2, chunk_length + LINE_ELEMENTS))
    task = last_task(board, me)
    while task >= 0:
        g, offset = task // pieces, task % pieces * chunk_length
        _transform_pieces(
            x, y, g, offset, min(chunk_length, length - offset), batch, number, length, given,
            weight, bias, rooms, streaming,
        )  # fmt: skip
        task = last_task(board, me)


# --- backward -----------------------------------------------------------------
#
# With n elements a row and its normalized elements v = (x - mean) * inv_std,
#   dx = inv_std * (dy * weight - sum(dy * weight) / n - v * sum(dy * weight * v) / n)
# where the second term is absent for statistics about zero.


@device_function
def _run_sums(dy, x, start, length, numbers, weight, to_weight, dweight, dbias, first):
    """Sums of dy * weight and dy * weight * v; adds to the gradients from `first` on.

    They are added up even if nobody wants them: another loop might have other bits. About zero
    there are no sums of dy, which the mean and the bias are for.
    """
    mean, scale, shift = numbers
    total, products = as_accumulator(x, 0.0), as_accumulator(x, 0.0)
    for i in range(length):
        gradient = load(dy, start + i)
        product = gradient * _normalized(load(x, start + i), mean, scale, shift)
        factor = load(weight, to_weight + i)
        products = accumulate(products, product * factor)
        store(dweight, first + i, load_scratch(dweight, first + i) + product)
        if mean is not None:
            total = accumulate(total, gradient * factor)
            store(dbias, first + i, load_scratch(dbias, first + i) + gradient)
    return total, products


@device_function
def _two_sums(
    dy, x, start, numbers, other_dy, other_x, other_start, other_numbers,
    length, weight, to_weight, dweight, dbias, first,
):  # fmt: skip
    """The same of two runs, so that twice as much memory is on its way.

    The gradients of the parameters are read and written half as often.
    """
    mean, scale, shift = numbers
    other_mean, other_scale, other_shift = other_numbers
    total, products = as_accumulator(x, 0.0), as_accumulator(x, 0.0)
    other_total, other_products = total, products
    for i in range(length):
        a, b = load(dy, start + i), load(other_dy, other_start + i)
        v = _normalized(load(x, start + i), mean, scale, shift)
        u = _normalized(load(other_x, other_start + i), other_mean, other_scale, other_shift)
        factor = load(weight, to_weight + i)
        products = accumulate(products, a * v * factor)
        other_products = accumulate(other_products, b * u * factor)
        store(dweight, first + i, load_scratch(dweight, first + i) + (a * v + b * u))
        if mean is not None:
            total = accumulate(total, a * factor)
            other_total = accumulate(other_total, b * factor)
            store(dbias, first + i, load_scratch(dbias, first + i) + (a + b))
    return total, products, other_total, other_products


@device_function
def _step(length):
    """How many rows a backward pass takes at a time."""
    return 2 if length > _SINGLE_LENGTH else 1


@device_function
def _partner(row, number, length, last):
    """The row that is taken together with this one, which comes before `last`; -1: none."""
    other = row + number
    return other if _step(length) > 1 and other < last else -1


@device_function
def _piece_sums(
    dy, x, row, other, g, length, offset, size, nothing, statistics, weight, dweight, dbias, first
):
    """Both sums over a piece of a row and of the `other`, which may be negative: none.

    A long row without another one goes with a row of `nothing`: a loop of its own might have
    other bits.
    """
    start, to_weight = row * length + offset, g * length + offset
    numbers = coefficients(x, row, *statistics)
    zero = as_accumulator(x, 0.0)
    if _step(length) == 1:
        total, products = _run_sums(
            dy, x, start, size, numbers, weight, to_weight, dweight, dbias, first
        )
        return total, products, zero, zero
    other_dy, other_x, other_start = nothing, nothing, 0
    none = unless_none(numbers[0], zero)
    other_numbers = none, zero, none
    if other >= 0:
        other_dy, other_x, other_start = dy, x, other * length + offset
        other_numbers = coefficients(x, other, *statistics)
    return _two_sums(
        dy, x, start, numbers, other_dy, other_x, other_start, other_numbers,
        size, weight, to_weight, dweight, dbias, first,
    )  # fmt: skip


@device_function
def _element_gradient(i, _, dy, x, mean, scale, shift, slope, offset, weight, to_weight):
    of_row = _normalized(load(x, i), mean, scale, shift) * slope
    if mean is not None:
        of_row += offset
    return load(dy, i) * (load(weight, i + to_weight) * scale) + of_row


@strict_function
def slope_and_offset(x, row, mean, inv_std, total, products, length):
    """What a row's sums add to dx, normalized * slope + offset."""
    scale = np.float64(load_scratch(inv_std, row))
    slope = as_accumulator(x, -scale * (products / length))
    if mean is None:
        return slope, as_accumulator(x, 0.0)
    return slope, as_accumulator(x, -scale * (total / length))


@device_function
def _gradient(
    dy, x, dx, start, end, row, g, length, statistics, total, products, weight, streaming, ahead
):
    """Dx of the elements [start, end), which are in a row with the given sums.

    What is so far `ahead` is fetched meanwhile, but for 0.
    """
    mean, scale, shift = coefficients(x, row, *statistics)
    slope, offset = slope_and_offset(x, row, statistics[0], statistics[2], total, products, length)
    numbers = (dy, x, mean, scale, shift, slope, offset, weight, (g - row) * length)
    write(dx, 0, start, end, streaming, _element_gradient, numbers, 0, 0, dy, x, ahead)


@device_function
def _clear(dweight, dbias, length):
    dweight[:length] = 0.0
    dbias[:length] = 0.0


@device_function
def _add_up_some(partials, k, inner, result, first, number, totals):
    size = number * inner
    totals[:size] = 0.0
    for block in range(partials.shape[0]):
        values = partials[block, k, first * inner :]
        for i in range(size):
            store(totals, i, load_scratch(totals, i) + np.float64(load(values, i)))
    if inner == 1:  # vectorized
        for i in range(number):
            store(result, first + i, as_accumulator(result, load_scratch(totals, i)))
        return
    for i in range(number):
        total = 0.0
        for j in range(i * inner, (i + 1) * inner):
            total = accumulate(total, load_scratch(totals, j))
        store(result, first + i, as_accumulator(result, total))


@inlined_function
def add_up_near(partials, inner, dweight, dbias):
    """Gradients of the parameters from `partials`, as `add_up` has them; of one type."""
    most = max(1, _ADDED_ELEMENTS // inner)
    totals = np.empty(most * inner)
    for k in range(2):
        result = dweight if k == 0 else dbias
        for first in range(0, result.size, most):
            size = min(most, result.size - first)
            _add_up_some(partials, k, inner, result, first, size, totals)


@partial(shared_kernel, last=add_up_near)
def backward_rows(
    board, me, dy, x, dx, mean, residual, inv_std, weight, partials, dweight, dbias, streaming,
    /, inner, times, _outer,
    batch, number, length, chunk_length, pieces, block, blocks,
):  # fmt: skip
    """A task is one block of samples of one g.

    `partials[block]` gets the block's part of dweight and dbias, if there is room; see
    `add_up_near`. The weight is as in `normalize_rows`, but never dealt.
    """
    weights = laid_out(x, weight, 1.0, number * length, times, False)
    statistics = (mean, residual, inv_std)
    of_weight, of_bias = scratch(x, length), scratch(x, length)
    nothing = np.zeros(chunk_length, x.dtype)
    slow = length * x.itemsize > (_SLOW_BYTES if x.itemsize == 2 else _SLOW_WIDE_BYTES)
    ahead = _row_ahead(x, number, length) if streaming and slow else 0
    task = next_task(board, me)
    while task >= 0:
        g = task % number
        first = task // number * block * number + g
        last = min(batch * number, first + block * number)
        _clear(of_weight, of_bias, length)
        for row in range(first, last, _step(length) * number):
            other = -1
            total, products, other_total, other_products = 0.0, 0.0, 0.0, 0.0
            if _step(length) == 1:  # without the choice of `_piece_sums`, which costs a tenth
                numbers = coefficients(x, row, *statistics)
                for piece in range(pieces):  # a range with a step would divide for every row
                    offset = piece * chunk_length
                    sums = _run_sums(
                        dy, x, row * length + offset, min(chunk_length, length - offset), numbers,
                        weights, g * length + offset, of_weight, of_bias, offset,
                    )  # fmt: skip
                    total += sums[0]
                    products += sums[1]
            else:
                other = _partner(row, number, length, last)
                for offset in range(0, length, chunk_length):
                    size = min(chunk_length, length - offset)
                    pair_sums = _piece_sums(
                        dy, x, row, other, g, length, offset, size, nothing, statistics, weights,
                        of_weight, of_bias, offset,
                    )  # fmt: skip
                    total += pair_sums[0]
                    products += pair_sums[1]
                    other_total += pair_sums[2]
                    other_products += pair_sums[3]
            this = row
            while this >= 0:  # a loop, so that the sweep is compiled once
                _gradient(
                    dy, x, dx, this * length, (this + 1) * length, this, g, length, statistics,
                    total, products, weights, streaming, ahead,
                )  # fmt: skip
                this, other = other, -1
                total, products = other_total, other_products
        if partials.size:
            copy_run(partials[task // number, 0], g * length, of_weight, 0, length)
            if mean is not None:
                copy_run(partials[task // number, 1], g * length, of_bias, 0, length)
        task = next_task(board, me)


@shared_kernel
def reduce_rows(
    board, me, dy, x, mean, residual, inv_std, weight, sums, dweight, dbias,
    /, batch, number, length, chunk_length, pieces, block, blocks,
):  # fmt: skip
    """A task is one piece of the rows of one g in all samples.

    `sums[row, piece]` gets both sums; dweight and dbias are those of all elements of a sample.
    """
    statistics = (mean, residual, inv_std)
    of_weight, of_bias = scratch(x, chunk_length), scratch(x, chunk_length)
    nothing = np.zeros(chunk_length, x.dtype)
    total_dweight, total_dbias = np.empty(chunk_length), np.empty(chunk_length)
    task = next_task(board, me)
    while task >= 0:
        g, piece = task // pieces, task % pieces
        offset = piece * chunk_length
        size = min(chunk_length, length - offset)
        _clear(total_dweight, total_dbias, size)
        for sample in range(0, batch, block):
            first = sample * number + g
            last = min(batch * number, first + block * number)
            _clear(of_weight, of_bias, size)
            for row in range(first, last, _step(length) * number):
                other = _partner(row, number, length, last)
                run_sums = _piece_sums(
                    dy, x, row, other, g, length, offset, size, nothing, statistics, weight,
                    of_weight, of_bias, 0,
                )  # fmt: skip
                sums[row, piece, 0], sums[row, piece, 1] = run_sums[0], run_sums[1]
                if other >= 0:
                    sums[other, piece, 0], sums[other, piece, 1] = run_sums[2], run_sums[3]
            for i in range(size):
                term = np.float64(load_scratch(of_weight, i))
                store(total_dweight, i, load_scratch(total_dweight, i) + term)
                if mean is not None:
                    term = np.float64(load_scratch(of_bias, i))
                    store(total_dbias, i, load_scratch(total_dbias, i) + term)
        start = g * length + offset
        copy_run(dweight, start, total_dweight, 0, size)
        if mean is not None:
            copy_run(dbias, start, total_dbias, 0, size)
        task = next_task(board, me)


@shared_kernel
def gradient_rows(
    board, me, dy, x, dx, mean, residual, inv_std, weight, sums, streaming, /,
    batch, number, length, chunk_length, pieces, block, blocks,
):  # fmt: skip
    """A task is one piece of a row; the last one goes first, being nearest."""
    statistics = (mean, residual, inv_std)
    total, products = 0.0, 0.0
    known = -1  # whose pieces are added up: often several of a row follow each other
    task = last_task(board, me)
    while task >= 0:
        row, piece = task // pieces, task % pieces
        if row != known:
            total, products = 0.0, 0.0
            for other in range(pieces):
                total += sums[row, other, 0]
                products += sums[row, other, 1]
            known = row
        start = row * length + piece * chunk_length
        _gradient(
            dy, x, dx, start, min(start + chunk_length, (row + 1) * length), row, row % number,
            length, statistics, total, products, weight, streaming, 0,
        )  # fmt: skip
        task = last_task(board, me)


@shared_kernel
def _add_up_blocks(board, me, partials, inner, dweight, dbias, chunk):
    """Sums of `partials` over blocks and `inner` elements a channel; a task is `chunk` channels.

    Either of dweight and dbias may be empty and is left out then.
    """
    totals = np.empty(chunk * inner)
    task = next_task(board, me)
    while task >= 0:
        first = task * chunk
        if dweight.size:
            _add_up_some(
                partials, 0, inner, dweight, first, min(chunk, dweight.size - first), totals
            )
        if dbias.size:
            _add_up_some(partials, 1, inner, dbias, first, min(chunk, dbias.size - first), totals)
        task = next_task(board, me)


def add_up(partials, geometry: Geometry, dweight, dbias):
    """Sums of `partials`, of (blocks, dweight and dbias, elements of a sample), a parameter.

    Either of dweight and dbias, which are flat, may be empty and is left out then.
    """
    chunk = max(1, _ADDED_ELEMENTS // geometry.inner)
    tasks = -(-geometry.parameters // chunk)
    run(_add_up_blocks, tasks, partials.nbytes, partials, geometry.inner, dweight, dbias, chunk)
