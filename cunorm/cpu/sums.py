"""Sums over runs of neighbouring elements, in vectors.

A compiler takes a run in steps of 32 to 64 elements and what is left of it one by one, which in
runs of up to some hundred takes longer than all the rest. Here what is left is one more vector. The
order of additions depends on the length of the run alone.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .elements import accumulator, fetch_line, put, read
from .vectors import REGISTER_BYTES, WORD, Vectors

__all__ = ["SAMPLED", "sum_about", "sum_of_sample", "sums_about", "sums_with", "sums_with_scaled"]

# A vector has so many bytes in memory, but fits a register when widened; and so many are summed
# side by side, since an addition takes as long as several can be begun in.
_MEMORY_BYTES = 32
_CHAINS = 4

# A sample is so many pieces of so many neighbouring elements, and they begin so many apart.
_PIECES, _PIECE, _STEP = 4, 4, 16

#: Elements of a sample.
SAMPLED = _PIECES * _PIECE


class _Writer(Vectors):
    """Writes sums of what `terms` makes of the elements [start, start + length) of some arrays.

    ``terms(builder, elements, center)`` gives the terms from an element of each, in numbers or
    vectors.
    """

    before = False  # whether elements are read before a store that may change them

    def __init__(
        self, context, builder, signature, arguments, terms, number_of_terms, lanes=0, fetched=None
    ):
        *arrays, self.start, self.length, self.center = arguments
        self.fetched = fetched  # how far ahead, and how far from the end the next run is
        self.context = context
        self.terms, self.number_of_terms = terms, number_of_terms
        self.arrays = list(zip(signature.args[: len(arrays)], arrays, strict=True))
        number = self.center.type
        bits, element = 32 if number == ir.FloatType() else 64, self.arrays[0][0].dtype.bitwidth
        most = min(8 * _MEMORY_BYTES // element, 8 * REGISTER_BYTES // bits)
        super().__init__(builder, number, lanes or most)

    def terms_at(self, offset, center, lanes):
        """The terms of elements from an offset in the run on."""
        index = self.builder.add(self.start, offset)
        elements = [
            read(self.context, self.builder, kind, array, index, lanes, self.before)
            for kind, array in self.arrays
        ]
        self.pass_on(index, elements)
        return self.terms(self.builder, elements, center)

    def pass_on(self, index, elements):
        """Do what else is done with elements from an index on."""

    def fetch(self, offset, number):
        """Fetch so many elements, ahead of those from an offset on, or of the next run."""
        builder, (ahead, jump) = self.builder, self.fetched
        there = builder.add(offset, ahead)
        within = builder.icmp_signed("<", there, self.length)
        there = builder.add(there, builder.select(within, WORD(0), jump))
        index = builder.add(self.start, there)
        for kind, array in self.arrays:
            for first in range(0, number, 8 * 64 // kind.dtype.bitwidth):
                fetch_line(self.context, builder, kind, array, builder.add(index, WORD(first)))

    def add(self, totals, terms):
        """Add terms to what some addresses hold."""
        for total, term in zip(totals, terms, strict=True):
            new = self.builder.fadd(self.builder.load(total), term, flags=("contract",))
            self.builder.store(new, total)

    def add_many(self, chains, center, end, fetches):
        """Add the terms of so many elements, as many vectors as chains at a time."""
        builder, lanes = self.builder, self.lanes
        step = lanes * len(chains)
        with cgutils.for_range_slice(builder, WORD(0), end, WORD(step)) as (offset, _):
            if fetches:
                self.fetch(offset, step)
            for i, totals in enumerate(chains):
                place = builder.add(offset, WORD(i * lanes))
                self.add(totals, self.terms_at(place, center, lanes))
        if fetches:
            with builder.if_then(builder.icmp_signed("<", end, self.length)):
                self.fetch(end, step)

    def add_whole(self, chains, center):
        """Add the terms of all whole vectors to the first chain; where they end."""
        builder, lanes = self.builder, self.lanes
        many, whole = (builder.and_(self.length, WORD(-of)) for of in (lanes * len(chains), lanes))
        if self.fetched is None:
            self.add_many(chains, center, many, False)
        else:  # a loop for each: in short runs a test at every step takes time
            fetches = builder.icmp_signed("!=", self.fetched[0], WORD(0))
            with builder.if_else(fetches, likely=False) as (fetching, otherwise):
                with fetching:
                    self.add_many(chains, center, many, True)
                with otherwise:
                    self.add_many(chains, center, many, False)
        totals = chains[0]
        for other in chains[1:]:
            self.add(totals, [builder.load(total) for total in other])
        with cgutils.for_range_slice(builder, many, whole, WORD(lanes)) as (offset, _):
            self.add(totals, self.terms_at(offset, center, lanes))
        return whole

    def add_vectors(self, chains, center):
        """The same, and those of one more vector, which ends where the run does."""
        builder, lanes = self.builder, self.lanes
        whole = self.add_whole(chains, center)
        with builder.if_then(builder.icmp_signed("<", whole, self.length)):
            offset = builder.sub(self.length, WORD(lanes))
            terms = self.terms_at(offset, center, lanes)
            self.add(chains[0], self.without_first(terms, builder.sub(whole, offset)))

    def chains(self):
        """Where vectors of sums are added up, side by side; they are zero."""
        builder, nothing = self.builder, ir.Constant(self.vector, [0.0] * self.lanes)
        terms = range(self.number_of_terms)
        chains = [
            [cgutils.alloca_once(builder, self.vector) for _ in terms] for _ in range(_CHAINS)
        ]
        for totals in chains:
            for total in totals:
                builder.store(nothing, total)
        return chains

    def write_whole(self):
        """The sums of a run of whole vectors."""
        chains = self.chains()
        self.add_whole(chains, self.splat(self.center))
        return [self.over_lanes(self.builder.load(total)) for total in chains[0]]

    def write(self):
        """The sums."""
        builder = self.builder
        sums = [cgutils.alloca_once(builder, self.number) for _ in range(self.number_of_terms)]
        center = self.splat(self.center)
        long = builder.icmp_signed(">=", self.length, WORD(self.lanes))
        with builder.if_else(long, likely=True) as (in_vectors, one_by_one):
            with in_vectors:
                chains = self.chains()
                self.add_vectors(chains, center)
                for place, total in zip(sums, chains[0], strict=True):
                    builder.store(self.over_lanes(builder.load(total)), place)
            with one_by_one:
                for place in sums:
                    builder.store(self.number(0.0), place)
                with cgutils.for_range(builder, self.length) as loop:
                    self.add(sums, self.terms_at(loop.index, self.center, 1))
        return [builder.load(place) for place in sums]


def _deviation(builder, elements, center):
    return [builder.fsub(elements[0], center)]


def _squared(builder, elements, center):
    deviation = builder.fsub(elements[0], center)
    return [deviation, builder.fmul(deviation, deviation, flags=("contract",))]


def _multiplied(builder, elements, center):
    factor, element = elements
    deviation = builder.fsub(element, center)
    return [factor, builder.fmul(factor, deviation, flags=("contract",))]


@intrinsic
def sum_about(typing_context, x, start, length, center):
    """Sum of x[i] - center for i in [start, start + length)."""

    def generate(context, builder, signature, arguments):
        return _Writer(context, builder, signature, arguments, _deviation, 1).write()[0]

    number = accumulator(x.dtype)
    return number(x, types.intp, types.intp, number), generate


@intrinsic
def sum_of_sample(typing_context, x, start, center):
    """Sum of x[i] - center over a sample of the 64 elements from `start` on."""

    def generate(context, builder, signature, arguments):
        data, first, pivot = arguments
        whole = [data, first, None, pivot]
        writer = _Writer(context, builder, signature, whole, _deviation, 1, _PIECE)
        center = writer.splat(pivot)
        pieces = [
            writer.terms_at(WORD(piece * _STEP), center, _PIECE)[0] for piece in range(_PIECES)
        ]
        total = pieces[0]
        for piece in pieces[1:]:
            total = builder.fadd(total, piece)
        return writer.over_lanes(total)

    number = accumulator(x.dtype)
    return number(x, types.intp, number), generate


@intrinsic
def sums_about(typing_context, x, start, length, center, ahead, jump):
    """Sums of x[i] - center and of its square, of a run.

    What lies so many elements `ahead` is fetched meanwhile, but for 0; where that is not in the
    run, in the next one, which begins so many elements after the end.
    """

    def generate(context, builder, signature, arguments):
        *first, ahead, jump = arguments
        writer = _Writer(context, builder, signature, first, _squared, 2, 0, (ahead, jump))
        sums = writer.write()
        return context.make_tuple(builder, signature.return_type, sums)

    number = accumulator(x.dtype)
    index = types.intp
    return types.UniTuple(number, 2)(x, index, index, number, index, index), generate


@intrinsic
def sums_with(typing_context, dy, x, start, length, center, ahead, jump):
    """Sums of dy[i] and of dy[i] * (x[i] - center), of a run, fetching as `sums_about` does."""

    def generate(context, builder, signature, arguments):
        *first, ahead, jump = arguments
        writer = _Writer(context, builder, signature, first, _multiplied, 2, 0, (ahead, jump))
        sums = writer.write()
        return context.make_tuple(builder, signature.return_type, sums)

    number = accumulator(x.dtype)
    index = types.intp
    return types.UniTuple(number, 2)(dy, x, index, index, number, index, index), generate


class _Scaler(_Writer):
    """Of whole vectors. Times a scale those of the first array go to an output past the caches."""

    before = True  # the output may be any of the arrays

    def __init__(self, context, builder, signature, arguments, output, fetched):
        super().__init__(context, builder, signature, arguments, _multiplied, 2, 0, fetched)
        self.kind, self.output, scale = output
        self.scale = self.splat(scale)

    def pass_on(self, index, elements):
        zero = ir.Constant(self.vector, [0.0] * self.lanes)
        scaled = self.builder.fadd(self.builder.fmul(elements[0], self.scale), zero)
        put(self.context, self.builder, self.kind, self.output, index, scaled, True)


@intrinsic
def sums_with_scaled(typing_context, dy, x, dx, start, length, center, scale, ahead, jump):
    """`sums_with` of a run of whole vectors; dx[i] = dy[i] * scale, written past the caches."""

    def generate(context, builder, signature, arguments):
        dy, x, dx, start, length, center, scale, *fetched = arguments
        output = signature.args[2], dx, scale
        first = dy, x, start, length, center
        sums = _Scaler(context, builder, signature, first, output, fetched).write_whole()
        return context.make_tuple(builder, signature.return_type, sums)

    number = accumulator(x.dtype)
    index = types.intp
    rest = index, index, number, number, index, index
    return types.UniTuple(number, 2)(dy, x, dx, *rest), generate
