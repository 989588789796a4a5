"""Kernels for rows of a few vectors, which registers hold.

A loop over a row as short as that costs more to begin and to end than in between. Here a kernel is
compiled for so many pieces, which lie apart (one, but for channels that come last), of so many
vectors of so many lanes; the last of them ends where the piece does. Rows are taken in lots: what
is done once for a row, divisions and a square root that wait for each other, is done for all of a
lot side by side, between two sweeps over it.

What a row becomes depends on the row alone, to the bit, and not on the rows around it. For
statistics about zero there are kernels of their own, as of `rows`.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache, partial
from itertools import chain

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..geometry import Geometry
from .elements import (
    accumulator,
    as_accumulator,
    begins_at,
    copy_run,
    device_function,
    fetch,
    load_scratch,
    put,
    read,
    read_back,
    scratch,
    store,
)
from .rows import add_up_near, coefficients, laid_out, of_rows, slope_and_offset
from .statistics import LOT_BYTES, corrected, moved_to_mean, pivot_at, save, together
from .tasks import next_task, shared_kernel
from .vectors import REGISTER_BYTES, WORD, Vectors

__all__ = ["short_backward", "short_normalization"]

# Short rows have no more bytes when widened. In a backward pass, which has more to hold, they have
# no more vectors, and no more bytes in memory: longer ones are quicker one by one. Measured on
# Zen 3, whose vectors are half as long, and Zen 4.
_MOST_BYTES = 512
_BACKWARD_VECTORS, _BACKWARD_BYTES = 8, 256

# In pieces that lie apart, which are slow otherwise, no more vectors, fewer of few lanes; and a
# sample has no more bytes: rows of one have cache lines in common. Measured on Zen 3.
_MOST_APART, _MOST_A_LANE = 32, 4
_SAMPLE_BYTES = 8 << 10

# Bytes of rows that are taken at a time in a backward pass.
_BACKWARD_LOT = 1 << 10


def _shape(geometry: Geometry, itemsize: int) -> tuple[int, int, int]:
    """(lanes, vectors of a piece, pieces) of a row."""
    length = geometry.members * geometry.inner
    lanes = REGISTER_BYTES // max(4, itemsize)
    while lanes > length:
        lanes //= 2
    return lanes, -(-length // lanes), geometry.outer


def _are_short_pieces(geometry: Geometry, itemsize: int) -> bool:
    """Whether rows in pieces are short; those of single channels are not for kernels of rows."""
    lanes, vectors, outer = _shape(geometry, itemsize)
    few = outer * vectors <= min(_MOST_APART, _MOST_A_LANE * lanes)
    near = geometry.size // geometry.batch * itemsize <= _SAMPLE_BYTES
    return geometry.members > 1 and few and near


class _Row(Vectors):
    """Writes what is done with a row.

    `where` it lies is a tuple of Numba's: where it begins, the length of a piece, how many there
    are, and how far apart. Its `shape` are literals, of `lanes`, `vectors` of a piece, and whether
    pieces lie `apart`.
    """

    def __init__(self, context, builder, shape, where, number):
        lanes, vectors, self.apart = (literal.literal_value for literal in shape)
        super().__init__(builder, number, lanes)
        self.context = context
        self.start, length, self.pieces, self.stride = cgutils.unpack_tuple(builder, where)
        self.offsets = [WORD(lanes * i) for i in range(vectors - 1)]
        self.offsets.append(builder.sub(length, WORD(lanes)))
        self.common = builder.sub(WORD(lanes * vectors), length)  # lanes of the last two

    @contextmanager
    def piece(self):
        """Where a piece begins; what is done with it is done with every one."""
        if not self.apart:
            yield self.start
            return
        builder = self.builder
        with cgutils.for_range(builder, self.pieces) as loop:
            yield builder.add(self.start, builder.mul(loop.index, self.stride))

    def over_pieces(self, terms, number=1):
        """So many sums over pieces of the vectors that `terms` gives of where one begins."""
        if not self.apart:
            return terms(self.start)
        builder, nothing = self.builder, ir.Constant(self.vector, [0.0] * self.lanes)
        totals = [
            [cgutils.alloca_once(builder, self.vector) for _ in self.offsets] for _ in range(number)
        ]
        for total in chain(*totals):
            builder.store(nothing, total)
        with self.piece() as start:
            for total, term in zip(chain(*totals), chain(*terms(start)), strict=True):
                builder.store(self.plus([builder.load(total)], [term])[0], total)
        return [[builder.load(one) for one in total] for total in totals]

    def read(self, kind, array, start, before=False):
        """The elements of a piece, or their parameters, from `start` on."""
        builder = self.builder
        return [
            read(self.context, builder, kind, array, builder.add(start, offset), self.lanes, before)
            for offset in self.offsets
        ]

    def write(self, kind, array, start, vectors, streaming):
        """Write the elements from `start` on, past the caches or not."""
        builder = self.builder
        with builder.if_else(streaming) as branches:
            for branch, streamed in zip(branches, (True, False), strict=True):
                with branch:
                    for offset, vector in zip(self.offsets, vectors, strict=True):
                        index = builder.add(start, offset)
                        put(self.context, builder, kind, array, index, vector, streamed)

    def _each(self, operation, vectors, others):
        """An operation on each of some vectors and one of as many others, or all the same."""
        if not isinstance(others, list):
            others = [others] * len(vectors)
        pairs = zip(vectors, others, strict=True)
        return [operation(*pair, flags=("contract",)) for pair in pairs]

    def less(self, vectors, others):
        """Differences."""
        return self._each(self.builder.fsub, vectors, others)

    def times(self, vectors, others):
        """Products."""
        return self._each(self.builder.fmul, vectors, others)

    def plus(self, vectors, others):
        """Sums."""
        return self._each(self.builder.fadd, vectors, others)

    def normalized(self, x, mean, scale, shift, centered):
        """(x - mean) * scale + shift, or x * scale."""
        if not centered:
            return self.times(x, self.splat(scale))
        deviations = self.less(x, self.splat(mean))
        return self.plus(self.times(deviations, self.splat(scale)), self.splat(shift))

    def sum(self, vectors, factor=None):
        """Sum over the row, times a factor, if there is one, that sums over lanes have already."""
        *vectors, last = vectors
        vectors += self.without_first([last], self.common)
        while len(vectors) > 1:  # by pairs
            odd = vectors[len(vectors) // 2 * 2 :]
            vectors = self.plus(vectors[:-1:2], vectors[1::2]) + odd
        if factor is not None:
            vectors = self.times(vectors, self.splat(factor))
        return self.over_lanes(vectors[0])


@intrinsic(prefer_literal=True)
def _deviation(typing_context, x, where, center, reciprocal, lanes, vectors, apart):
    """Mean of x - center over a row, given 1 / count; of large numbers the sum might overflow."""

    def generate(context, builder, signature, arguments):
        data, where, center, reciprocal = arguments[:4]
        row = _Row(context, builder, shape, where, center.type)

        def terms(start):
            return [row.less(row.read(x, data, start), row.splat(center))]

        return row.sum(*row.over_pieces(terms), reciprocal)

    number, shape = accumulator(x.dtype), (lanes, vectors, apart)
    return number(x, where, number, number, *shape), generate


@intrinsic(prefer_literal=True)
def _sums_about(typing_context, x, where, center, lanes, vectors, apart):
    """Sums of x - center and of its square over a row."""

    def generate(context, builder, signature, arguments):
        data, where, center = arguments[:3]
        row = _Row(context, builder, shape, where, center.type)

        def terms(start):
            deviations = row.less(row.read(x, data, start), row.splat(center))
            return deviations, row.times(deviations, deviations)

        sums = [row.sum(vectors) for vectors in row.over_pieces(terms, 2)]
        return context.make_tuple(builder, signature.return_type, sums)

    number, shape = accumulator(x.dtype), (lanes, vectors, apart)
    return types.UniTuple(number, 2)(x, where, number, *shape), generate


def _numbers(x, mean):
    """Types of what `coefficients` gives."""
    number = accumulator(x.dtype)
    return (types.none, number, types.none) if mean == types.none else (number,) * 3


@intrinsic(prefer_literal=True)
def _transform(
    typing_context, x, y, where, mean, scale, shift, weight, bias, to_weight, streaming,
    lanes, vectors, apart,
):  # fmt: skip
    """Transform of a row; its parameters begin at `to_weight`."""

    def generate(context, builder, signature, arguments):
        of_x, of_y, where, *numbers, of_weight, of_bias, first, streaming = arguments[:10]
        row = _Row(context, builder, shape, where, numbers[1].type)
        weights = row.read(weight, of_weight, first)
        biases = row.read(bias, of_bias, first) if centered else []
        with row.piece() as start:
            # Before y is written, which may be x: the last vectors have elements in common.
            of_piece = row.read(x, of_x, start, before=True)
            result = row.times(row.normalized(of_piece, *numbers, centered), weights)
            if centered:
                result = row.plus(result, biases)
            row.write(y, of_y, start, result, streaming)
        return context.get_dummy_value()

    shape, centered = (lanes, vectors, apart), bias != types.none
    return types.void(
        x, y, where, *_numbers(x, mean), weight, bias, types.intp, types.boolean, *shape
    ), generate


@intrinsic(prefer_literal=True)
def _sums(
    typing_context, dy, x, where, mean, scale, shift, weight, to_weight, gradients,
    lanes, vectors, apart,
):  # fmt: skip
    """Sums of dy * weight and dy * weight * v over a row, where v is x normalized.

    Adds dy * v to the `gradients`, vector by vector of a piece, and dy to those that follow. About
    zero there are no sums of dy.
    """

    def generate(context, builder, signature, arguments):
        of_dy, of_x, where, *numbers, of_weight, first, sums = arguments[:9]
        row = _Row(context, builder, shape, where, numbers[1].type)

        def terms(start):
            gradient = row.read(dy, of_dy, start)
            normalized = row.normalized(row.read(x, of_x, start), *numbers, centered)
            product = row.times(gradient, normalized)
            return [product, gradient] if centered else [product]

        terms_of_row = row.over_pieces(terms, 2 if centered else 1)
        for i, term in enumerate(chain(*terms_of_row)):
            place = WORD(row.lanes * i)
            so_far = read_back(context, builder, gradients, sums, place, row.lanes)
            put(context, builder, gradients, sums, place, builder.fadd(so_far, term), False)
        factors = row.read(weight, of_weight, first)
        totals = [row.sum(row.times(one, factors)) for one in reversed(terms_of_row)]
        if not centered:
            totals.insert(0, ir.Constant(totals[0].type, 0.0))
        return context.make_tuple(builder, signature.return_type, totals)

    number, shape, centered = accumulator(x.dtype), (lanes, vectors, apart), mean != types.none
    return types.UniTuple(number, 2)(
        dy, x, where, *_numbers(x, mean), weight, types.intp, gradients, *shape
    ), generate


@intrinsic(prefer_literal=True)
def _gradient(
    typing_context, dy, x, dx, where, mean, scale, shift, slope, offset, weight, to_weight,
    streaming, lanes, vectors, apart,
):  # fmt: skip
    """Dx of a row with the given slope and offset; its weights begin at `to_weight`."""

    def generate(context, builder, signature, arguments):
        of_dy, of_x, of_dx, where, mean, scale, shift = arguments[:7]
        slope, offset, of_weight, first, streaming = arguments[7:12]
        row = _Row(context, builder, shape, where, scale.type)
        factors = row.times(row.read(weight, of_weight, first), row.splat(scale))
        with row.piece() as start:
            # Before dx is written, as in `_transform`.
            gradient = row.read(dy, of_dy, start, before=True)
            of_piece = row.read(x, of_x, start, before=True)
            normalized = row.normalized(of_piece, mean, scale, shift, centered)
            of_row = row.times(normalized, row.splat(slope))
            if centered:
                of_row = row.plus(of_row, row.splat(offset))
            result = row.plus(row.times(gradient, factors), of_row)
            row.write(dx, of_dx, start, result, streaming)
        return context.get_dummy_value()

    number, shape, centered = accumulator(x.dtype), (lanes, vectors, apart), mean != types.none
    return types.void(
        dy, x, dx, where, *_numbers(x, mean), number, number, weight, types.intp, types.boolean,
        *shape,
    ), generate  # fmt: skip


@device_function
def _streams(y, length, lanes, follow, streaming):
    """Whether rows are written past the caches: only whole cache lines are.

    Of rows that `follow` each other one may begin within a line that the one before has begun to
    write, at a multiple of 16 bytes, if it is of whole vectors. (NumPy's large arrays begin so.)
    """
    if follow:
        whole = lanes * y.itemsize % 16 == 0 and length % lanes == 0
        return streaming and whole and begins_at(y, 16)
    return streaming and length * y.itemsize % 64 == 0 and begins_at(y, 64)


@cache
def _normalization(lanes, vectors, apart):
    @shared_kernel
    def normalize_short_rows(
        board, me, x, y, weight, bias, running_mean, running_var, eps, bessel, factor, statistics,
        streaming, /, times, outer,
        batch, number, length, chunk_length, pieces, block, blocks,
    ):  # fmt: skip
        """What `normalize_rows` does, with weight and bias in order."""
        weights = laid_out(x, weight, 1.0, number * length, times, False)
        biases = laid_out(x, bias, 0.0, number * length, times, False)
        given = of_rows(statistics, bias)
        size, stride = outer * length, number * length
        lot, count = together(x, size, LOT_BYTES), np.float64(size)
        centers, sums, zero = scratch(x, lot), np.empty((2, lot)), as_accumulator(x, 0.0)
        totals, squares = sums[0], sums[1]
        reciprocal = as_accumulator(x, 1.0 / count)
        streams = _streams(y, length, lanes, number * outer == 1, streaming)
        task = next_task(board, me)
        while task >= 0:
            g = task % number
            last = min(batch, (task // number + 1) * block)
            for first in range(task // number * block, last, lot):
                rows = min(lot, last - first)
                row, begin = first * number + g, first * outer * stride + g * length
                if bias is not None:
                    for i in range(rows):
                        start = begin + i * outer * stride
                        where, center = (start, length, outer, stride), pivot_at(x, start)
                        off = _deviation(x, where, center, reciprocal, lanes, vectors, apart)
                        store(centers, i, center)
                        store(totals, i, np.float64(off))
                    for i in range(rows):
                        center, off = load_scratch(centers, i), load_scratch(totals, i)
                        store(centers, i, moved_to_mean(x, center, off, 1.0))
                    for i in range(rows):
                        where = (begin + i * outer * stride, length, outer, stride)
                        center = load_scratch(centers, i)
                        total, square = _sums_about(x, where, center, lanes, vectors, apart)
                        store(totals, i, np.float64(total))
                        store(squares, i, np.float64(square))
                    for i in range(rows):
                        mean, m2 = corrected(
                            np.float64(load_scratch(centers, i)), load_scratch(totals, i),
                            load_scratch(squares, i), count,
                        )  # fmt: skip
                        save(statistics, row + i * number, count, mean, m2, eps)
                else:
                    for i in range(rows):
                        where = (begin + i * outer * stride, length, outer, stride)
                        sums_of = _sums_about(x, where, zero, lanes, vectors, apart)
                        store(squares, i, np.float64(sums_of[1]))
                    for i in range(rows):
                        save(
                            statistics, row + i * number, count, 0.0, load_scratch(squares, i), eps
                        )
                for i in range(rows):
                    start = begin + i * outer * stride
                    if streaming:
                        for piece in range(outer):
                            fetch(x, start + (lot * outer + piece) * stride, length)
                    mean, scale, shift = coefficients(x, row + i * number, *given)
                    _transform(
                        x, y, (start, length, outer, stride), mean, scale, shift, weights, biases,
                        g * length, streams, lanes, vectors, apart,
                    )  # fmt: skip
            task = next_task(board, me)

    return normalize_short_rows


def short_normalization(geometry: Geometry, itemsize: int):
    """The kernel that does what `normalize_rows` does for rows as short as these, if there is one.

    Their pieces may lie apart, which those of `normalize_rows` do not.
    """
    lanes, vectors, outer = _shape(geometry, itemsize)
    if outer > 1:
        short = _are_short_pieces(geometry, itemsize)
    else:
        short = geometry.members * geometry.inner * max(4, itemsize) <= _MOST_BYTES
    return _normalization(lanes, vectors, outer > 1) if lanes > 1 and short else None


@cache
def _backward(lanes, vectors, apart):
    @partial(shared_kernel, last=add_up_near)
    def backward_short_rows(
        board, me, dy, x, dx, mean, residual, inv_std, weight, partials, dweight, dbias, streaming,
        /, inner, times, outer,
        batch, number, length, chunk_length, pieces, block, blocks,
    ):  # fmt: skip
        """What `backward_rows` does; without dx if that is empty."""
        weights = laid_out(x, weight, 1.0, number * length, times, False)
        given = (mean, residual, inv_std)
        count, stride = outer * length, number * length
        lot, size = together(x, count, _BACKWARD_LOT), lanes * vectors
        of_parameters, numbers = scratch(x, 2 * size), scratch(x, (2, lot))
        slopes, offsets = numbers[0], numbers[1]
        sums = np.empty((2, lot))
        totals, products = sums[0], sums[1]
        streams = _streams(dx, length, lanes, number * outer == 1, streaming)
        task = next_task(board, me)
        while task >= 0:
            g = task % number
            last = min(batch, (task // number + 1) * block)
            of_parameters[:] = 0.0
            for first in range(task // number * block, last, lot):
                rows = min(lot, last - first)
                row, begin = first * number + g, first * outer * stride + g * length
                for i in range(rows):
                    center, scale, shift = coefficients(x, row + i * number, *given)
                    total, product = _sums(
                        dy, x, (begin + i * outer * stride, length, outer, stride), center, scale,
                        shift, weights, g * length, of_parameters, lanes, vectors, apart,
                    )  # fmt: skip
                    store(totals, i, np.float64(total))
                    store(products, i, np.float64(product))
                for i in range(rows):
                    slope, offset = slope_and_offset(
                        x, row + i * number, mean, inv_std, load_scratch(totals, i),
                        load_scratch(products, i), count,
                    )  # fmt: skip
                    store(slopes, i, slope)
                    store(offsets, i, offset)
                for i in range(rows if dx.size else 0):
                    center, scale, shift = coefficients(x, row + i * number, *given)
                    _gradient(
                        dy, x, dx, (begin + i * outer * stride, length, outer, stride), center,
                        scale, shift, load_scratch(slopes, i), load_scratch(offsets, i), weights,
                        g * length, streams, lanes, vectors, apart,
                    )  # fmt: skip
            if partials.size:
                for k in range(2):
                    whole, first = size - lanes, k * size  # and the end of the last vector
                    result, start = partials[task // number, k], g * length
                    copy_run(result, start, of_parameters, first, whole)
                    rest = length - whole
                    copy_run(result, start + whole, of_parameters, first + size - rest, rest)
            task = next_task(board, me)

    return backward_short_rows


def short_backward(geometry: Geometry, itemsize: int):
    """The kernel that does what `backward_rows` does for rows as short as these, if there is one.

    As in `short_normalization`.
    """
    lanes, vectors, outer = _shape(geometry, itemsize)
    if outer > 1:
        short = _are_short_pieces(geometry, itemsize)
    else:
        near = geometry.members * geometry.inner * itemsize <= _BACKWARD_BYTES
        short = near and vectors <= _BACKWARD_VECTORS
    return _backward(lanes, vectors, outer > 1) if lanes > 1 and short else None
