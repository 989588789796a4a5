"""The tasks of a call, which threads share without the interpreter lock.

A call is announced on a *board*: a header, and below it a row for each thread with (next, end)
of the tasks that it has the first claim to. All of it happens in compiled code, in a fraction of
a microsecond where waking a sleeping thread takes 50. To fetch a cache line from another core takes
a good part of that, so what one thread writes and others read has lines of its own, and is written
at once.
"""

from __future__ import annotations

import inspect
import math
import os
import platform
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.callconv import RETCODE_OK
from numba.extending import intrinsic

from .elements import device_function, inlined_function, kernel

__all__ = [
    "boards",
    "helpers",
    "last_task",
    "next_task",
    "numbers",
    "ring",
    "serve",
    "shared_kernel",
]

# What the words of a header are, in bytes from its begin. Headers and rows are two cache lines.
_TICKET = 0  # number of the call: odd as long as helpers may enter it
_THREADS = 8  # that may take part in it, the caller included
_FUNCTION, _ARGUMENTS = 16, 24  # what they call
_FAILED = 32  # whether a helper has failed
_OTHER = 40  # address of another board, or 0
_TAKEN = 64  # whether the board is in use

# The words of a row.
_NEXT, _END = 0, 8
_BEGUN = 16  # whether the thread has taken a task
_INSIDE = 24  # whether it is in the call, or finds out if it may be
_SEEN = 64  # ticket of the last call that the helper took part in
_LINE = 64
_LINES = 2 * _LINE

# The words of what a helper knows of itself, by number.
ME = 0
BOARD = 1  # address of the first one
STATE = 2  # NOBODY before it is there, AWAKE, SLEEPS or RUNG_FOR
BELL = 3  # address of its lock
NATIVE = 4  # what the system calls its thread
CORES, CORE_BYTES = 5, 6  # where it may run: address and size of a bit for each core
MOVED = 7  # whether it is to say so itself when it is awake
LOOKS = 8  # how often it looks before it gives up,
LAST_LOOKS = 9  # and once more when it has said so, for who came before that and has not rung
# Of helper 0, which is the caller, there is but
ASLEEP = 0  # how many helpers are, those included that have just been rung for
_WORDS = 16

NOBODY, AWAKE, SLEEPS, RUNG_FOR = 0, 1, 2, 3

# How many callers at once find helpers; others do their work alone.
_BOARDS = 4

_LOOKS_PER_YIELD = 16

_HAS_YIELD = hasattr(os, "sched_yield")
_HAS_AFFINITY = hasattr(os, "sched_setaffinity")
_IS_X86 = platform.machine() in ("x86_64", "AMD64")
_WORD = ir.IntType(64)
_INT = ir.IntType(32)


def _place(builder, address):
    return builder.inttoptr(address, _WORD.as_pointer())


@intrinsic
def _look(typing_context, address):
    """The word at an address as it is now, and whatever was written before it.

    All looks and additions have one order, the same for every thread: `_join` relies on it.
    """

    def generate(context, builder, signature, arguments):
        return builder.load_atomic(_place(builder, *arguments), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _tell(typing_context, address, value):
    """Write a word, after whatever was written before."""

    def generate(context, builder, signature, arguments):
        address, value = arguments
        builder.store_atomic(value, _place(builder, address), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _add(typing_context, address, value):
    """Add to a word, and return what it was before.

    Streaming stores are over then, too: on x86 a locked instruction empties the buffers that
    they wait in, and a plain store would not.
    """

    def generate(context, builder, signature, arguments):
        address, value = arguments
        return builder.atomic_rmw("add", _place(builder, address), value, "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _exchange(typing_context, address, expected, value):
    """Write a word if it is what is expected; whether it was."""

    def generate(context, builder, signature, arguments):
        address, expected, value = arguments
        place = _place(builder, address)
        found = builder.cmpxchg(place, expected, value, "acq_rel", "acquire")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


def _call_c(builder, name, result, *arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@intrinsic
def _pause(typing_context, looks):
    """Before the next look: rest, and now and then let others have the core."""

    def generate(context, builder, signature, arguments):
        if _IS_X86:
            _call_c(builder, "llvm.x86.sse2.pause", ir.VoidType())
        if _HAS_YIELD:
            rest = builder.urem(arguments[0], _WORD(_LOOKS_PER_YIELD))
            with builder.if_then(builder.icmp_unsigned("==", rest, _WORD(0)), likely=False):
                _call_c(builder, "sched_yield", _INT)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _new_bell(typing_context):
    """A lock of Python's C interface, or 0."""

    def generate(context, builder, signature, _):
        return _call_c(builder, "PyThread_allocate_lock", _WORD)

    return types.int64(), generate


@intrinsic
def _sleep(typing_context, bell):
    """Wait until a bell rings: a lock that is taken whenever nobody has rung."""

    def generate(context, builder, signature, arguments):
        _call_c(builder, "PyThread_acquire_lock", _INT, *arguments, _INT(1))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _wake(typing_context, bell):
    """Ring a bell."""

    def generate(context, builder, signature, arguments):
        _call_c(builder, "PyThread_release_lock", ir.VoidType(), *arguments)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _native_id(typing_context):
    """What the system calls this thread, as far as it can be told by that where to run."""

    def generate(context, builder, signature, _):
        if not _HAS_AFFINITY:
            return _WORD(0)
        return _call_c(builder, "PyThread_get_thread_native_id", _WORD)

    return types.int64(), generate


@intrinsic
def _run_on(typing_context, cores, nbytes):
    """Let this thread run on all cores of a set, so many bytes with a bit for each."""

    def generate(context, builder, signature, arguments):
        if _HAS_AFFINITY:
            cores, nbytes = arguments
            _call_c(builder, "sched_setaffinity", _INT, _INT(0), nbytes, cores)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _own_board(typing_context):
    """Address of a board for one thread, on the stack of the function that asks for it."""

    def generate(context, builder, signature, arguments):
        board = cgutils.alloca_once(builder, _WORD, size=2 * _LINES // 8)
        return builder.ptrtoint(board, _WORD)

    return types.int64(), generate


_WORK = ir.FunctionType(_WORD, [_WORD, _WORD, _WORD])


@intrinsic
def _work(typing_context, function, arguments, board, me):
    """Call what `_again` has made; whether that failed."""

    def generate(context, builder, signature, values):
        function = builder.inttoptr(values[0], _WORK.as_pointer())
        return builder.call(function, values[1:])

    return types.int64(*[types.int64] * 4), generate


@intrinsic
def _again(typing_context):
    """(function, arguments): addresses of this very call of a kernel, for `_work`.

    The arguments lie on the stack of the function that asks for them; board and me, the first
    two, are those that `_work` is given.
    """

    def generate(context, builder, signature, _):
        kernel = builder.function
        values = context.call_conv.get_arguments(kernel)[2:]
        pack = ir.LiteralStructType([value.type for value in values])
        place = cgutils.alloca_once(builder, pack)
        for i, value in enumerate(values):
            builder.store(value, cgutils.gep_inbounds(builder, place, 0, i))

        function = ir.Function(builder.module, _WORK, f"{kernel.name}.again")
        function.linkage = "internal"
        within = ir.IRBuilder(function.append_basic_block())
        packed, *first = function.args
        packed = within.inttoptr(packed, pack.as_pointer())
        for i in range(len(values)):
            first.append(within.load(cgutils.gep_inbounds(within, packed, 0, i)))
        result, error = (within.alloca(argument.type.pointee) for argument in kernel.args[:2])
        status = within.call(kernel, [result, error, *first])
        within.ret(within.zext(within.icmp_unsigned("!=", status, RETCODE_OK), _WORD))
        words = [builder.ptrtoint(pointer, _WORD) for pointer in (function, place)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.int64, 2)(), generate


@intrinsic
def _for_a_thread(typing_context):
    """Address of this very kernel as a thread begins with it: a function of an address."""

    def generate(context, builder, signature, _):
        kernel = builder.function
        kind = ir.FunctionType(ir.VoidType(), [_WORD])
        function = ir.Function(builder.module, kind, f"{kernel.name}.thread")
        function.linkage = "internal"
        within = ir.IRBuilder(function.append_basic_block())
        result, error = (within.alloca(argument.type.pointee) for argument in kernel.args[:2])
        within.call(kernel, [result, error, *function.args])
        within.ret_void()
        return builder.ptrtoint(function, _WORD)

    return types.int64(), generate


@device_function
def _row(board, thread):
    return board + _LINES * (1 + thread)


@device_function
def _word(helper, number):
    return helper + 8 * number


@device_function
def _deal(board, threads, tasks):
    """Put tasks on a board, in equal shares."""
    for thread in range(threads):
        _tell(_row(board, thread) + _NEXT, tasks * thread // threads)
        _tell(_row(board, thread) + _END, tasks * (thread + 1) // threads)
        _tell(_row(board, thread) + _BEGUN, 0)
    _tell(board + _THREADS, threads)


@device_function
def _call(board, threads, tasks, function, arguments):
    """Do a call on a board beside helpers that hear of it; whether it failed."""
    _deal(board, threads, tasks)
    _tell(board + _FUNCTION, function)
    _tell(board + _ARGUMENTS, arguments)
    _tell(board + _FAILED, 0)
    _tell(board + _TICKET, _look(board + _TICKET) + 1)
    failed = _work(function, arguments, board, 0) != 0
    _add(board + _TICKET, 1)
    for thread in range(1, threads):
        looks = 0
        while _look(_row(board, thread) + _INSIDE) != 0:  # who is in has begun what is left
            looks += 1
            _pause(looks)
    return failed or _look(board + _FAILED) != 0


@device_function
def _share(board, threads, tasks, function, arguments):
    """Do a call, on the first board that is free or else alone; whether it failed."""
    while board != 0:
        if _exchange(board + _TAKEN, 0, 1):
            failed = _call(board, threads, tasks, function, arguments)
            _tell(board + _TAKEN, 0)
            return failed
        board = _look(board + _OTHER)
    board = _own_board()
    _deal(board, 1, tasks)
    return _work(function, arguments, board, 0) != 0


@device_function
def _join(board, me):
    """Take part in a call, if there is one for this helper; whether there was."""
    row = _row(board, me)
    ticket = _look(board + _TICKET)
    if ticket % 2 == 0 or ticket == _look(row + _SEEN) or me >= _look(board + _THREADS):
        return False
    # Whoever closes the call either sees this, or is seen to have closed it.
    _add(row + _INSIDE, 1)
    wanted = _look(board + _TICKET) == ticket
    if wanted:
        _tell(row + _SEEN, ticket)
        failed = _work(_look(board + _FUNCTION), _look(board + _ARGUMENTS), board, me) != 0
        if failed and _look(row + _BEGUN) != 0:  # else the others do its work
            _tell(board + _FAILED, 1)
    _add(row + _INSIDE, -1)  # and what was streamed is in memory
    return wanted


@device_function
def _listen(first, me, most):
    """Take part in calls on this board and its others until so many looks have found none."""
    looks = 0
    while looks < most:
        looks += 1
        board = first
        while board != 0:
            if _join(board, me):
                looks = 0
            board = _look(board + _OTHER)
        _pause(looks)


@kernel
def serve(helper):
    """What a helper does all its life, if it is the first: listen, and sleep until its bell rings.

    For 0 the address of a function that does it.
    """
    if helper == 0:
        return _for_a_thread()
    bell = _new_bell()
    if bell == 0 or not _exchange(_word(helper, STATE), NOBODY, AWAKE):
        return 0
    me, board = _look(_word(helper, ME)), _look(_word(helper, BOARD))
    asleep = _word(helper, ASLEEP - me * _WORDS)
    _tell(_word(helper, NATIVE), _native_id())
    _tell(_word(helper, BELL), bell)
    _sleep(bell)  # which is new, and now waits to be rung
    while bell != 0:  # for ever, which Numba would not compile
        _listen(board, me, _look(_word(helper, LOOKS)))
        _tell(_word(helper, STATE), SLEEPS)
        _add(asleep, 1)
        _listen(board, me, _look(_word(helper, LAST_LOOKS)))
        _sleep(bell)
        if _exchange(_word(helper, MOVED), 1, 0):
            _run_on(_look(_word(helper, CORES)), _look(_word(helper, CORE_BYTES)))
        _tell(_word(helper, STATE), AWAKE)
        _add(asleep, -1)
    return 0


@kernel
def ring(helper):
    """Wake a helper, if it sleeps.

    In one step of Python: Ctrl-C between the two would leave a helper that nobody rings for again.
    """
    if _exchange(_word(helper, STATE), SLEEPS, RUNG_FOR):
        _wake(_look(_word(helper, BELL)))


@device_function
def _claim(board, me):
    """(thread, task) of a task that is still to be had; the task is -1 if there is none."""
    threads = _look(board + _THREADS)
    for i in range(me, me + threads):
        thread = i - threads if i >= threads else i
        row = _row(board, thread)
        end = _look(row + _END)
        if _look(row + _NEXT) < end:
            task = _add(row + _NEXT, 1)
            if task < end:
                _tell(_row(board, me) + _BEGUN, 1)
                return thread, task
    return 0, -1


@device_function
def next_task(board, me):
    """Take a task, or -1 if none is left.

    A thread takes those of its own row first. So neighbouring tasks, whose data are neighbours
    too, come to one thread, and in calls of the same size always to the same, whose caches may
    still have them.
    """
    _, task = _claim(board, me)
    return task


@device_function
def last_task(board, me):
    """The same, of every thread's tasks the last one first."""
    thread, task = _claim(board, me)
    if task < 0:
        return task
    begin = _look(_row(board, thread - 1) + _END) if thread > 0 else 0
    return begin + _look(_row(board, thread) + _END) - 1 - task


def _lines(*shape: int) -> Any:
    """Words that are 0, the last axis a number of whole cache lines."""
    size, line = math.prod(shape), _LINE // 8
    memory = np.zeros(size + line, np.int64)
    start = -memory.ctypes.data % _LINE // 8
    return memory[start : start + size].reshape(shape)


def boards(threads: int) -> Any:
    """Boards for calls in up to so many threads, as rows of words."""
    found = _lines(_BOARDS, 1 + threads, _LINES // 8)
    for board, other in pairwise(found):
        board[0, _OTHER // 8] = other.ctypes.data
    return found


def helpers(threads: int) -> Any:
    """What the helpers of so many threads know of themselves, as rows of words."""
    return _lines(threads, _WORDS)


@lru_cache(maxsize=1024)
def numbers(*values: int) -> Any:
    """The numbers of a plan as a shared kernel is given them."""
    return np.array(values, np.int64)


def shared_kernel(function: Any, first: Any = None, last: Any = None) -> Any:
    """A kernel whose tasks threads share: ``function(board, me, ..., /, ...)`` takes them.

    Python calls it with ``(board, -threads, tasks, ...)``, where the board is the address of the
    first of `boards`; for one thread it may be 0. The parameters after the ``/`` are the numbers
    of a plan, which it is given as one array, since that is faster to hand over. What is to be
    done `first` the caller does before the tasks, and what `last` after them: compiled functions
    of some of the other parameters.
    """
    code = function.__code__
    names = code.co_varnames[2 : code.co_argcount]
    given = code.co_posonlyargcount - 2 if code.co_posonlyargcount else len(names)
    inner = (*names[:given], *(f"numbers[{i}]" for i in range(len(names) - given)))
    outer = (*names[:given], *["numbers"][: len(names) - given])
    values = dict(zip(names, inner, strict=True))
    scope = {"__name__": __name__, "share": _share, "again": _again}
    scope |= {"own_board": _own_board, "deal": _deal, "body": inlined_function(function)}
    calls = {"first": "pass", "last": "pass"}
    for name, called in (("first", first), ("last", last)):
        if called is not None:
            scope[name] = called
            parameters = inspect.signature(called.py_func).parameters
            arguments = (values[parameter] for parameter in parameters)
            calls[name] = f"{name}({', '.join(arguments)})"
    exec(  # a function of *arguments takes longer to call
        f"def {function.__name__}(board, me, tasks, {', '.join(outer)}):\n"
        "    caller = me < 0\n"
        "    if caller:\n"
        f"        {calls['first']}\n"
        "    if me < -1:\n"
        "        if share(board, -me, tasks, *again()):\n"  # only an allocation can fail
        "            raise MemoryError('no memory for the working arrays of a kernel')\n"
        "    else:\n"
        "        if caller:\n"
        "            board, me = own_board(), 0\n"
        "            deal(board, 1, tasks)\n"
        f"        body(board, me, {', '.join(inner)})\n"
        "    if caller:\n"
        f"        {calls['last']}\n",
        scope,
    )
    return kernel(scope[function.__name__], function)
