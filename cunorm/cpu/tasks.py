"""The tasks of a call, which the threads that work on it share.

They lie in a *board*, an array with a row for each thread: (next, end) of the tasks that it
has the first claim to, and what threads tell each other. All of it happens without the
interpreter lock, in a few nanoseconds where waking a sleeping thread takes 50 us.
"""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .elements import device_function, kernel

__all__ = ["last_task", "listen", "next_task", "ring", "shares", "sleeping_board", "withdraw"]

# Columns of a board, whose rows are whole cache lines.
_NEXT, _END = 0, 1
STATE = 2  # of the helper that this row is of: one of
IDLE, BUSY, ASLEEP = 0, 1, 2
TICKET, CALLED = 3, 4  # in row 0: number of the call, and how many threads it wants
_COLUMNS = 8

# How often a thread looks before it gives up: for about half a millisecond.
_LOOKS = 2000

_HAS_YIELD = hasattr(os, "sched_yield")
_IS_X86 = platform.machine() in ("x86_64", "AMD64")


def _place(context, builder, array_type, array, slot, column):
    struct = context.make_array(array_type)(context, builder, array)
    columns = ir.Constant(ir.IntType(64), _COLUMNS)
    index = builder.add(builder.mul(slot, columns), column)
    return builder.gep(struct.data, [index], inbounds=True)


@intrinsic
def _take(typing_context, board, slot):
    """An atomic ``board[slot, _NEXT]++`` that returns the old value."""

    def generate(context, builder, signature, arguments):
        next_ = ir.Constant(ir.IntType(64), _NEXT)
        place = _place(context, builder, signature.args[0], *arguments, next_)
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(board, types.intp), generate


@intrinsic
def _look(typing_context, board, slot, column):
    """``board[slot, column]`` as it is now, and whatever was written before it."""

    def generate(context, builder, signature, arguments):
        place = _place(context, builder, signature.args[0], *arguments)
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(board, types.intp, types.intp), generate


@intrinsic
def _tell(typing_context, board, slot, column, value):
    """``board[slot, column] = value``, after whatever was written before."""

    def generate(context, builder, signature, arguments):
        place = _place(context, builder, signature.args[0], *arguments[:3])
        builder.store_atomic(arguments[3], place, "release", 8)
        return context.get_dummy_value()

    return types.void(board, types.intp, types.intp, types.int64), generate


@intrinsic
def _pause(typing_context):
    """Let others have the core for a moment, if there are any."""

    def generate(context, builder, signature, arguments):
        def call(name, result):
            kind = ir.FunctionType(result, [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])

        if _IS_X86:
            for _ in range(8):
                call("llvm.x86.sse2.pause", ir.VoidType())
        if _HAS_YIELD:
            call("sched_yield", ir.IntType(32))
        return context.get_dummy_value()

    return types.void(), generate


@lru_cache(maxsize=1024)
def shares(tasks: int, threads: int) -> Any:
    """A board with tasks in equal shares, of which every call takes a copy."""
    board = np.zeros((threads, _COLUMNS), np.int64)
    for slot in range(threads):
        board[slot, _NEXT] = tasks * slot // threads
        board[slot, _END] = tasks * (slot + 1) // threads
    return board


@device_function
def _claim(board, me):
    """(slot, task) of a task that is still to be had; the task is -1 if there is none.

    The calling thread, the first, then waits a little for helpers that are still busy: to
    leave the kernel it needs the interpreter lock, and so do they.
    """
    slots = board.shape[0]
    for i in range(me, me + slots):
        slot = i - slots if i >= slots else i
        if _look(board, slot, _NEXT) < board[slot, _END]:
            task = _take(board, slot)
            if task < board[slot, _END]:
                return slot, task
    if me == 0:
        looks = _LOOKS
        for slot in range(1, slots):
            while looks > 0 and _look(board, slot, STATE) == BUSY:
                _pause()
                looks -= 1
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
    slot, task = _claim(board, me)
    if task < 0:
        return task
    begin = board[slot - 1, _END] if slot > 0 else 0
    return begin + board[slot, _END] - 1 - task


def withdraw(board: Any) -> None:
    """Leave no tasks to be taken."""
    board[:, _NEXT] = board[-1, _END]


def sleeping_board(threads: int) -> Any:
    """A board whose helpers are all asleep."""
    board = np.zeros((threads, _COLUMNS), np.int64)
    board[1:, STATE] = ASLEEP
    return board


@kernel
def ring(board, tasks):
    """Put the tasks of a call on a board that helpers `listen` at; how many of them are asleep.

    The others hear of it when the calling thread takes its first task, and so has given the
    interpreter lock away.
    """
    threads = tasks.shape[0]
    asleep = 0
    for slot in range(threads):
        board[slot, _NEXT], board[slot, _END] = tasks[slot, _NEXT], tasks[slot, _END]
        asleep += slot > 0 and _look(board, slot, STATE) == ASLEEP
    board[0, CALLED] = threads
    _tell(board, 0, TICKET, board[0, TICKET] + 1)
    return asleep


@kernel
def listen(board, slot, ticket):
    """Wait a while for the next call after `ticket` that wants this thread; whether one came."""
    _tell(board, slot, STATE, IDLE)
    for _ in range(_LOOKS):
        if (
            _look(board, 0, TICKET) != ticket
            and slot < _look(board, 0, CALLED)
            and _look(board, 0, _NEXT) > 0
        ):
            _tell(board, slot, STATE, BUSY)
            return True
        _pause()
    return False
