"""How a kernel reads, writes and adds single elements of a flat array.

Numba has no 16-bit float type on the CPU, so float16 travels as uint16 and
bfloat16 as int16: the integer type alone tells `load` and `store` which
conversion to compile. Elements widen to the accumulator type (float32, for
float64 arrays float64) in registers.

The accesses are bare: no wraparound of negative indices, no bounds check.
That is what lets LLVM turn the loops around them into plain vector code.
"""

from __future__ import annotations

import os

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic, overload

from .entry import Kernel
from .inlined import InlinedCompiler
from .plan import SLOW_THIRD_LEVEL
from .vectors import Vectors

if hasattr(os, "register_at_fork"):
    # A child forked while another thread compiles would inherit a compiler lock
    # that nobody releases. So a fork waits until nobody compiles.
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )

#: Elements of a cache line, at most.
LINE_ELEMENTS = 32

# Arrays of so many bytes do not stay in a second-level cache.
_FAR_BYTES = 4 << 20

# Results that wait in a first-level cache to be written past it.
_STAGE_BYTES = 2 << 10

# Memory that is read on and on is fetched so many lines ahead, so many at a time: a step of the
# loop over float32; of the next run no more than so many. Measured on Zen 5. Where the third level
# is slow (measured on an Intel Xeon) runs that are summed are fetched ahead, too, the next one
# after the end; but not shorter ones, of which the next is fetched at once.
_AHEAD_LINES = 64
_FETCHED_LINES = 4
_MOST_RUN_LINES = 160
_LEAST_RUN_LINES = 32

# So many float16 of a run are written in one step.
_BLOCK = 32

# Into the second-level cache: as many lines as that waits for may be on their way. The first
# level waits for fewer. Of memory in pieces so one gets twice as much.
_SECOND_LEVEL = 2

_FLOAT16 = types.uint16
_BFLOAT16 = types.int16
_HALF = np.dtype(np.float16)

# Where there are float16 instructions, LLVM writes vectors of float16 past no cache.
_HAS_HALF_VECTORS = get_host_cpu_features().get("avx512fp16", False)

#: What every kernel and every function it calls is compiled with. Contraction
#: to fused multiply-adds is the only liberty: reassociation would turn
#: sum(x - pivot) into sum(x) - n * pivot, and the digits would be gone.
_OPTIONS = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy"}

#: Of functions that Python does not call, but are inlined into those that it does.
_WITHIN = {
    "forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
    "pipeline_class": InlinedCompiler, **_OPTIONS,
}  # fmt: skip

#: Of those that do not count references: calls of functions that the compiler thinks too large
#: would count them to every array that they take, in atomic operations.
DEVICE = {"_nrt": False, **_WITHIN}

#: A function that kernels call, compiled into them.
device_function = njit(**DEVICE)

#: The same for those that allocate arrays, or return one: these do count references.
inlined_function = njit(**_WITHIN)

#: The options of a function without contraction (to be said: an overload else takes over its
#: caller's): the same bits whatever code it is compiled into. Several kernels fold the same partial
#: results and must agree about them.
STRICT = {**DEVICE, "fastmath": False}

#: A `device_function` without contraction.
strict_function = njit(**STRICT)


def kernel(function, source=None):
    """A function that Python calls; see `Kernel`."""
    return Kernel(function, _OPTIONS, source)


def accumulator(dtype):
    return types.float64 if dtype == types.float64 else types.float32


def _address(context, builder, array_type, array, index):
    struct = context.make_array(array_type)(context, builder, array)
    return builder.gep(struct.data, [index], inbounds=True)


def _scopes(module, *names):
    """A list of what memory is accessed as, for `alias.scope` and `noalias`."""
    domain = module.add_metadata(["cunorm"])
    return module.add_metadata([module.add_metadata([f"cunorm {name}", domain]) for name in names])


# What `load` reads, which no `store` changes before its time: an output may be the input itself,
# but an element is then read before the same element is written. What is streamed is an output,
# which no kernel reads. Saying so spares the loops tests for overlap, and keeps calls in place
# vectorized.
_INPUT, _STREAMED = "input", "streamed"


def _several(kind, lanes):
    """A vector of so many of a kind; of one the kind itself."""
    return kind if lanes == 1 else ir.VectorType(kind, lanes)


def _constant(kind, number):
    """An integer, or a vector of it."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def _widen(builder, dtype, value, lanes=1):
    number, word = _several(ir.FloatType(), lanes), _several(ir.IntType(32), lanes)
    if dtype == _FLOAT16:
        return builder.fpext(builder.bitcast(value, _several(ir.HalfType(), lanes)), number)
    if dtype == _BFLOAT16:
        upper = builder.shl(builder.zext(value, word), _constant(word, 16))
        return builder.bitcast(upper, number)
    return value


def _read(context, builder, kind, array, index, lanes):
    """(instruction that reads, the value): an element, or a vector of neighbours."""
    address = _address(context, builder, kind, array, index)
    if lanes > 1:
        vector = _several(address.type.pointee, lanes)
        address = builder.bitcast(address, vector.as_pointer())
    value = builder.load(address, align=kind.dtype.bitwidth // 8)
    return value, _widen(builder, kind.dtype, value, lanes)


def read(context, builder, kind, array, index, lanes=1, before=False):
    """What `load` gives of an element of an array of this kind; of several neighbours a vector.

    Where the store of another vector may change one of them, they have to be read `before` that: a
    compiler is told that no store changes others before their time.
    """
    instruction, value = _read(context, builder, kind, array, index, lanes)
    if not before:
        instruction.set_metadata("alias.scope", _scopes(builder.module, _INPUT))
    return value


def read_back(context, builder, kind, array, index, lanes=1):
    """What `load_scratch` gives of an element; of several neighbours a vector."""
    instruction, value = _read(context, builder, kind, array, index, lanes)
    instruction.set_metadata("noalias", _scopes(builder.module, _INPUT, _STREAMED))
    return value


def _rounded(builder, value, lanes=1):
    """The bits of a float32, rounded to the nearest even bfloat16 in their upper half.

    By hand: the hardware's instruction flushes subnormals. A NaN, which arithmetic has made
    quiet, keeps its upper bits.
    """
    bits = builder.bitcast(value, _several(ir.IntType(32), lanes))
    half, one, below_tie = (_constant(bits.type, number) for number in (16, 1, 0x7FFF))
    odd = builder.and_(builder.lshr(bits, half), one)
    up = builder.add(builder.add(bits, below_tie), odd)
    return builder.select(builder.fcmp_unordered("uno", value, value), bits, up)


def _narrow(builder, dtype, value):
    if dtype == _FLOAT16:
        return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
    if dtype == _BFLOAT16:
        # Rounded as `_rounded` does it, but the step up comes after the truncation: twice as
        # many fit a register, and a store that truncates would not stream.
        word, half = ir.IntType(32), ir.IntType(16)
        bits = builder.bitcast(value, word)
        upper = builder.trunc(builder.lshr(bits, word(16)), half)
        lower = builder.trunc(bits, half)
        tie = builder.sub(half(1 << 15), builder.and_(upper, half(1)))  # goes to even
        up = builder.icmp_unsigned(">", lower, tie)
        number = builder.icmp_unsigned("<=", builder.and_(upper, half(0x7FFF)), half(0x7F80))
        return builder.add(upper, builder.zext(builder.and_(up, number), half))
    return value


def _narrow_vector(builder, dtype, vector):
    lanes = vector.type.count
    if dtype == _FLOAT16:
        narrow = builder.fptrunc(vector, _several(ir.HalfType(), lanes))
        return builder.bitcast(narrow, _several(ir.IntType(16), lanes))
    if dtype == _BFLOAT16:
        bits = _rounded(builder, vector, lanes)
        upper = builder.lshr(bits, _constant(bits.type, 16))
        return builder.trunc(upper, _several(ir.IntType(16), lanes))
    return vector


def _streamable(context, builder, kind, array, narrow):
    """What is to be streamed into an array, as integers for the compiler as well.

    They may have bits that are always 0, which a compiler cannot know: no array has 2^48 elements.
    """
    if kind.dtype != _FLOAT16 or not _HAS_HALF_VECTORS:
        return narrow
    size = context.make_array(kind)(context, builder, array).nitems
    zero = builder.trunc(builder.lshr(size, size.type(48)), ir.IntType(16))
    if isinstance(narrow.type, ir.VectorType):
        zero = Vectors(builder, zero.type, narrow.type.count).splat(zero)
    return builder.or_(narrow, zero)


def put(context, builder, kind, array, index, vector, streaming):
    """What `store` does, of a vector for several neighbours.

    What is streamed begins at a multiple of its size, or of 16 bytes.
    """
    narrow = _narrow_vector(builder, kind.dtype, vector)
    if streaming:
        narrow = _streamable(context, builder, kind, array, narrow)
    address = _address(context, builder, kind, array, index)
    address = builder.bitcast(address, narrow.type.as_pointer())
    element = kind.dtype.bitwidth // 8
    align = min(16, narrow.type.count * element) if streaming else element
    _emit_store(builder, narrow, address, streaming, align)


def _define_load(constant):
    def typer(typing_context, array, index):
        def generate(context, builder, signature, arguments):
            get = read if constant else read_back
            return get(context, builder, signature.args[0], *arguments)

        return accumulator(array.dtype)(array, types.intp), generate

    return typer


#: ``load(array, index)``: an element of an input, widened to the accumulator type.
load = intrinsic(_define_load(constant=True))

#: The same from a working array that the kernel itself writes.
load_scratch = intrinsic(_define_load(constant=False))


def _pack(builder, first, second):
    """Two neighbouring bfloat16 as the word that memory has them in."""
    word = ir.IntType(32)
    low = builder.lshr(_rounded(builder, first), word(16))
    return builder.or_(low, builder.and_(_rounded(builder, second), word(0xFFFF0000)))


def _emit_store(builder, value, address, streaming, align=None):
    instruction = builder.store(value, address, align=align)
    instruction.set_metadata("noalias", _scopes(builder.module, _INPUT))
    if streaming:
        instruction.set_metadata("alias.scope", _scopes(builder.module, _STREAMED))
        one = ir.Constant(ir.IntType(32), 1)
        instruction.set_metadata("nontemporal", builder.module.add_metadata([one]))


def _define_store(streaming):
    line = 64 if streaming else None

    def typer(typing_context, array, index, value, second=None):
        def generate(context, builder, signature, arguments):
            data, position, *numbers = arguments
            address = _address(context, builder, signature.args[0], data, position)
            if second is None:
                narrow = _narrow(builder, array.dtype, numbers[0])
                if streaming:
                    narrow = _streamable(context, builder, array, data, narrow)
                _emit_store(builder, narrow, address, streaming, line)
            else:
                word = _pack(builder, *numbers)
                address = builder.bitcast(address, word.type.as_pointer())
                _emit_store(builder, word, address, streaming, line or array.dtype.bitwidth // 8)
            return context.get_dummy_value()

        number = accumulator(array.dtype)
        if second is None:  # a default has a type too
            return types.void(array, types.intp, number, types.Omitted(None)), generate
        return types.void(array, types.intp, number, number), generate

    return typer


def _define_move(streaming):
    line = 64 if streaming else None

    def typer(typing_context, array, index, source, position):
        def generate(context, builder, signature, arguments):
            value = builder.load(_address(context, builder, signature.args[2], *arguments[2:]))
            address = _address(context, builder, signature.args[0], *arguments[:2])
            _emit_store(builder, value, address, streaming, line)
            return context.get_dummy_value()

        return types.void(array, types.intp, source, types.intp), generate

    return typer


#: ``store(array, index, value)``: write a value of the accumulator type; of bfloat16 arrays
#: also two values, the second of which comes next.
store = intrinsic(_define_store(streaming=False))

#: The same past the caches, for outputs that do not fit in them. The loop must
#: start on a 64-byte boundary: the vector stores it becomes rely on that.
store_streaming = intrinsic(_define_store(streaming=True))

#: ``_move(array, index, source, position)``: an element as it is, from a working array.
_move = intrinsic(_define_move(streaming=False))

#: The same past the caches, as `store_streaming` does it.
_move_streaming = intrinsic(_define_move(streaming=True))


@intrinsic
def accumulate(typing_context, total, term):
    """``total + term`` in an order that the compiler may choose.

    The order is fixed when the loop is compiled: the same machine always adds
    the same numbers in the same order.
    """

    def generate(context, builder, signature, arguments):
        return builder.fadd(*arguments, flags=("reassoc", "contract"))

    return total(total, total), generate


@intrinsic
def as_accumulator(typing_context, array, value):
    """A float64 value rounded to the accumulator type of ``array``."""
    number = accumulator(array.dtype)

    def generate(context, builder, signature, arguments):
        if number == types.float64:
            return arguments[1]
        return builder.fptrunc(arguments[1], ir.FloatType())

    return number(array, types.float64), generate


@intrinsic
def unless_none(typing_context, known, value):
    """A value, or None if `known` is None: so that the compiler, too, takes it for that."""
    kind = types.none if known == types.none else value

    def generate(context, builder, signature, arguments):
        if kind == types.none:
            return context.get_dummy_value()
        return impl_ret_borrowed(context, builder, kind, arguments[1])

    return kind(known, value), generate


@intrinsic
def _address_of(typing_context, array, index):
    def generate(context, builder, signature, arguments):
        address = _address(context, builder, signature.args[0], *arguments)
        return builder.ptrtoint(address, ir.IntType(64))

    return types.int64(array, types.intp), generate


def fetch_line(context, builder, kind, array, index):
    """Write that the cache line of an element is fetched, which need not lie in the array."""
    address = _address(context, builder, kind, array, index)
    byte = builder.bitcast(address, ir.IntType(8).as_pointer())
    word = ir.IntType(32)
    signature = ir.FunctionType(ir.VoidType(), [byte.type, word, word, word])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0i8")
    builder.call(function, [byte, word(0), word(_SECOND_LEVEL), word(1)])


@intrinsic
def _prefetch(typing_context, array, index):
    def generate(context, builder, signature, arguments):
        fetch_line(context, builder, signature.args[0], *arguments)
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def _per_line(typing_context, array):
    """How many elements a cache line has: unlike `itemsize` a number that the compiler knows."""

    def generate(context, builder, signature, arguments):
        return ir.Constant(ir.IntType(64), 64 * 8 // signature.args[0].dtype.bitwidth)

    return types.int64(array), generate


@device_function
def fetch(array, start, length):
    """Fetch what will be read soon, of an array or None; it need not lie in the array."""
    if array is not None:
        for i in range(start, start + length, _per_line(array)):
            _prefetch(array, i)


@device_function
def fetch_step(array):
    """How many elements to fetch at a time."""
    return _FETCHED_LINES * _per_line(array)


@device_function
def is_far(array):
    """Whether an array is too large to be near, in a second-level cache."""
    return array.size * array.itemsize >= _FAR_BYTES


@device_function
def apart(array, stride, width):
    """Whether rows lie apart in memory, so that the hardware starts anew with every one."""
    return stride > width and is_far(array)


@device_function
def prefetch(array, start, length):
    """`fetch` a run, but of small arrays, which are near already.

    The hardware notices only after some lines that a run is read on and on; long ones are left
    to it.
    """
    if is_far(array) and length <= _MOST_RUN_LINES * _per_line(array):
        fetch(array, start, length)


@device_function
def way_ahead(array):
    """How many elements ahead to fetch in memory that is read on and on."""
    return _AHEAD_LINES * _per_line(array)


@device_function
def sums_ahead(array, arrays):
    """The same where so many arrays like this one are summed; 0: the hardware does as well."""
    if not SLOW_THIRD_LEVEL or not is_far(array):
        return 0
    return way_ahead(array) // arrays


@device_function
def runs_ahead(array, arrays, length):
    """The same where they are summed run by run; 0: the next run is fetched at once."""
    if length < _LEAST_RUN_LINES * _per_line(array):
        return 0
    return min(length, sums_ahead(array, arrays))


@device_function
def _line_rest(array, i):
    """How many elements there are from one to the next begin of a cache line."""
    return (-_address_of(array, i) & 63) // array.itemsize


@device_function
def begins_at(array, size):
    """Whether an array begins at a multiple of so many bytes."""
    return _address_of(array, 0) % size == 0


@device_function
def same_place(first, second):
    """Whether two arrays begin in the same place."""
    return _address_of(first, 0) == _address_of(second, 0)


@device_function
def streaming_range(array, start, end, streaming):
    """The part of [start, end) to write with `store_streaming`; may be empty.

    It is whole cache lines, and many if there are others: a line written in part by
    streaming stores costs more than it saves.
    """
    if not streaming:
        return end, end
    line = _per_line(array)
    first = start + _line_rest(array, start)
    whole = first == start and (end - start) % line == 0
    if end - first < 8 * line and not whole:
        return end, end
    return first, first + (end - first) // line * line


@device_function
def place(p, half):
    """Where element p lies in an array that is `dealt` in halves of this length."""
    return p // 2 + p % 2 * half


def sweep(put, y, to_y, start, end, element, arguments, to_p, half):
    """y[i + to_y] = element(i, p, *arguments) for i in [start, end), written with `put`.

    p is where the i'th element's own numbers are: i + to_p, in arrays that are `dealt` in halves
    of this length if y is.
    """
    raise TypeError("for kernels only")


@overload(sweep, jit_options=DEVICE)
def _sweep(put, y, to_y, start, end, element, arguments, to_p, half):
    if y.dtype != _BFLOAT16:

        def one_by_one(put, y, to_y, start, end, element, arguments, to_p, half):
            for i in range(start, end):
                put(y, i + to_y, element(i, i + to_p, *arguments))

        return one_by_one

    # Two to a word, which spares the vector code moving lanes about to narrow and widen them;
    # nor need it take apart the numbers of the first ones and of the second ones.
    def by_twos(put, y, to_y, start, end, element, arguments, to_p, half):
        p, q = place(start + to_p, half), place(start + 1 + to_p, half)
        pairs = (end - start) // 2
        for k in range(pairs):
            i = start + 2 * k
            first, second = element(i, p + k, *arguments), element(i + 1, q + k, *arguments)
            put(y, i + to_y, first, second)
        if (end - start) % 2 == 1:
            put(y, end - 1 + to_y, element(end - 1, p + pairs, *arguments))

    return by_twos


@device_function
def _sweep_on(
    put, y, to_y, start, end, element, arguments, to_p, half, first, second, ahead
):  # fmt: skip
    """`sweep`, fetching what lies so many elements `ahead` in two arrays, or None; 0: nothing."""
    if first is None or ahead == 0:
        sweep(put, y, to_y, start, end, element, arguments, to_p, half)
        return
    step = fetch_step(y)
    whole = start + (end - start) // step * step
    for begin in range(start, whole, step):
        fetch(first, begin + ahead, step)
        fetch(second, begin + ahead, step)
        sweep(put, y, to_y, begin, begin + step, element, arguments, to_p, half)
    sweep(put, y, to_y, whole, end, element, arguments, to_p, half)


@device_function
def write(
    y, to_y, start, end, streaming, element, arguments, to_p, half, first=None, second=None, ahead=0
):
    """`sweep`, past the caches as far as that pays.

    `first` and `second` are arrays, or None, that are read beside it: what lies so many elements
    `ahead` is fetched meanwhile, but for 0.
    """
    lead, last = streaming_range(y, start + to_y, end + to_y, streaming)
    lead, last = lead - to_y, last - to_y
    _sweep_on(store, y, to_y, start, lead, element, arguments, to_p, half, first, second, ahead)
    if lead < end:
        _sweep_on(
            store_streaming, y, to_y, lead, last, element, arguments, to_p, half,
            first, second, ahead,
        )  # fmt: skip
        sweep(store, y, to_y, last, end, element, arguments, to_p, half)


@device_function
def streams_rows(y, start, stride):
    """Whether all rows begin in the same place of a cache line, an even number before the next.

    They do but in parts of arrays.
    """
    return stride * y.itemsize % 64 == 0 and _line_rest(y, start) % 2 == 0


@device_function
def row_lead(y, start, stride, streaming):
    """How many positions of a row come before a cache line begins, where streaming does.

    0 if nothing is streamed, or not all of them can be (see `streams_rows`).
    """
    return _line_rest(y, start) if streaming and streams_rows(y, start, stride) else 0


@device_function
def write_rows(
    y, start, stride, rows, width, tail_width, lead, streaming, element, arguments, first, second
):
    """`write` for `rows` rows of `width` positions and, below them, `tail_width` positions.

    The numbers of positions are as `lay` has laid them out for rows of this `lead`. Rows that
    follow each other are streamed in whole cache lines, which begin in one and may end in the
    next. The next row of `first` and `second`, arrays or None, is fetched ahead if rows lie apart.
    """
    far, to_p, half = apart(y, stride, width), laid_from(lead), half_of(width)
    bulk = rows - 1 if lead > 0 and stride == width else 0
    left = 0
    if bulk > 0:
        for begin in range(start, start + bulk * width, width):
            numbers = (begin, *arguments)
            sweep(store_streaming, y, begin, lead, lead + width, element, numbers, to_p, half)
        sweep(store, y, start, 0, lead, element, (start, *arguments), to_p, half)
        left = lead
    for row in range(max(0, bulk), rows + 1):
        begin = start + row * stride
        length = width if row < rows else tail_width
        ahead = begin + stride if far else 0
        write(
            y, begin, left, length, streaming, element, (begin, *arguments), to_p, half,
            first, second, ahead,
        )  # fmt: skip
        left = 0


@device_function
def laid_from(lead):
    """Where the numbers of a row's positions begin, so that those after its lead begin a line."""
    return -lead % LINE_ELEMENTS


@device_function
def lay_in_order(values, room, width, lead):
    """Move the numbers of a row's positions, and the first ones again after them, so that they do.

    The room is for `LINE_ELEMENTS` more.
    """
    to_p = laid_from(lead)
    for p in range(width):
        store(room, to_p + p, load_scratch(values, p))
    for p in range(lead):
        store(room, to_p + width + p, load_scratch(values, p))


@device_function
def half_of(width):
    """How long the halves are into which numbers of so many positions, and a line's, are dealt."""
    return (width + LINE_ELEMENTS) // 2


def lay(y, values, room, width, lead):
    """The numbers of a row's positions as `write_rows` takes them, with `lead` of the next row.

    Those that `sweep` takes dealt, or that would lie across cache lines where y does not, move
    into the `room`, which like `values` is for `LINE_ELEMENTS` more; others stay where they are.
    """
    raise TypeError("for kernels only")


@overload(lay, jit_options=DEVICE)
def _lay(y, values, room, width, lead):
    if y.dtype != _BFLOAT16:

        def in_order(y, values, room, width, lead):
            if lead == 0:
                return values
            lay_in_order(values, room, width, lead)
            return room

        return in_order

    def in_halves(y, values, room, width, lead):
        first, half = laid_from(lead) // 2, half_of(width)
        for k in range(width // 2):
            store(room, first + k, load_scratch(values, 2 * k))
            store(room, half + first + k, load_scratch(values, 2 * k + 1))
        if width % 2 == 1:
            store(room, first + width // 2, load_scratch(values, width - 1))
        for p in range(lead):
            store(room, place(2 * first + width + p, half), load_scratch(values, p))
        return room

    return in_halves


@device_function
def stage_size(array, length, streaming):
    """Elements of a stage for runs of `length` that follow each other; 0: none is needed.

    Short runs that begin and end within cache lines cannot be streamed one by one. Their
    results are gathered in a stage, and `flush` writes them in whole lines.
    """
    size = _STAGE_BYTES // array.itemsize
    whole = _address_of(array, 0) & 63 == 0 and length * array.itemsize % 64 == 0
    return size if streaming and not whole and length < size else 0


@device_function
def flush(array, start, end, stage):
    """Write the elements [start, end), with which the stage, if there is one, begins."""
    if stage.size == 0:
        return
    first, last = streaming_range(array, start, end, True)
    for i in range(start, first):
        _move(array, i, stage, i - start)
    for i in range(first, last):
        _move_streaming(array, i, stage, i - start)
    for i in range(last, end):
        _move(array, i, stage, i - start)


def write_run(y, start, end, element, arguments):
    """`sweep` of a run, which may be short, of elements without numbers of their own."""
    raise TypeError("for kernels only")


@overload(write_run, jit_options=DEVICE)
def _write_run(y, start, end, element, arguments):
    if y.dtype != _FLOAT16:

        def as_it_is(y, start, end, element, arguments):
            sweep(store, y, 0, start, end, element, arguments, 0, 0)

        return as_it_is

    # A step of `sweep` is 64 of these or more, and what is left goes by eights or sixteens; a loop
    # of constant length becomes vectors without tests between them.
    def by_blocks(y, start, end, element, arguments):
        body = start + (end - start) // _BLOCK * _BLOCK
        for begin in range(start, body, _BLOCK):
            for i in range(begin, begin + _BLOCK):
                store(y, i, element(i, i, *arguments))
        for i in range(body, end):
            store(y, i, element(i, i, *arguments))

    return by_blocks


@device_function
def write_on(y, start, end, streaming, element, arguments, stage, staged, first, second, ahead):
    """`write` of a run, by way of a stage if there is one, which begins with the element `staged`.

    The new `staged` is returned. `first` and `second` are arrays that are read beside it, or None:
    when streaming, what lies `ahead` is fetched, where the hardware would start anew with every
    run.
    """
    if stage.size == 0:
        if streaming:
            write(y, 0, start, end, True, element, arguments, 0, 0, first, second, ahead)
        else:
            write_run(y, start, end, element, arguments)
        return end
    while start < end:
        full = staged + stage.size
        stop = min(end, full)
        fetch(first, start + ahead, stop - start)
        fetch(second, start + ahead, stop - start)
        sweep(store, stage, -staged, start, stop, element, arguments, 0, 0)
        if stop == full:
            flush(y, staged, full, stage)
            staged = full
        start = stop
    return staged


@device_function
def follow(array, staged, end, start, stage):
    """What the stage begins with when a run from `start` on comes after one that ended at `end`."""
    if start == end:
        return staged
    flush(array, staged, end, stage)
    return start


@device_function
def copy_run(result, start, values, first, size):
    """result[start : start + size] = values[first : first + size], both working arrays.

    Of an assignment of slices the compiler would make more: the words of an error.
    """
    for i in range(size):
        value = np.float64(load_scratch(values, first + i))
        store(result, start + i, as_accumulator(result, value))


def scratch(x, shape):
    """A working array of the accumulator type of ``x``; its rows begin with a cache line.

    Vectors that lie in two lines take twice as long to load. Rows may be longer than asked for.
    """
    raise TypeError("for kernels only")


@overload(scratch, jit_options=_WITHIN)
def _scratch(x, shape):
    dtype = np.float64 if x.dtype == types.float64 else np.float32
    line = 64 // np.dtype(dtype).itemsize

    def one(x, shape):
        room = np.empty(shape + line, dtype)
        first = _line_rest(room, 0)
        return room[first : first + shape]

    def several(x, shape):
        rows, length = shape
        length = (length + line - 1) // line * line
        room = np.empty(rows * length + line, dtype)
        first = _line_rest(room, 0)
        return room[first : first + rows * length].reshape(rows, length)

    return one if isinstance(shape, types.Integer) else several


def dense(array: np.ndarray) -> np.ndarray:
    """The array itself if it is C-contiguous and aligned, else a copy that is."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else array.copy()


def are_dealt(array: np.ndarray) -> bool:
    """Whether `sweep` takes numbers of the elements' own dealt: the even ones first.

    Those of bfloat16 are.
    """
    return array.itemsize == 2 and array.dtype != _HALF


@overload(are_dealt, jit_options=DEVICE)
def _are_dealt(array):
    if array.dtype == _BFLOAT16:
        return lambda array: True  # noqa: ARG005
    return lambda array: False  # noqa: ARG005
