"""The threads that kernels run in.

A kernel runs without the interpreter lock and shares its tasks with helpers that listen at
its board (`tasks`); which thread does which task never shows in the result. Numba's own parallel
layers would abort the process in a forked child or when two Python threads use them at once.

The calling thread works too, and helpers that come when it has run out of tasks find the call
closed. So a call waits for running work alone, or for another that starts the helpers, never for
a place in the pool: many callers at once, or no thread to be had, slow it down at worst.

After a call a helper listens for the next one for a moment before it goes to sleep, as
threads of OpenMP do, but yields its core to whoever wants it. It is no thread of Python's: all its
life is compiled code, since to wait for the interpreter lock, which a caller in a loop keeps for
milliseconds, takes longer than to be woken. Helpers, and what they look at, are kept for good.
Ctrl-C may come between any two steps of Python; to ring for a helper is one, and a helper that has
been started twice is there once.

Linux may wake a helper on the core of its caller while others have nothing to do: those of a
virtual machine that have gone to sleep do not count as idle. There the helper would wait for
milliseconds until it is moved. So while it is being woken it may not run on its caller's core.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np

from . import tasks
from .entry import keep
from .tasks import ASLEEP, MOVED, NATIVE, NOBODY, SLEEPS, STATE, ring, serve
from .threads import MOST_THREADS, get_num_threads

__all__ = ["dismiss", "hire", "run"]

# Waking a thread takes 50 to 100 us, as long as one thread takes for about this much; to be heard
# by one that listens takes less than one.
_BYTES_PER_SLEEPER = 4 << 20
_BYTES_PER_LISTENER = 128 << 10

# Calls in such quick succession, in seconds, are worth waking helpers for: the next ones will
# find them listening.
_SOON = 1e-3

_ALONE = 0, -1  # `hire` for a call in one thread

# How often helpers look before they give up, on x86 for half a millisecond, and once more.
_LOOKS, _LAST_LOOKS = 8_000, 1_000

_start_thread = ctypes.PYFUNCTYPE(ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p)(
    ("PyThread_start_new_thread", ctypes.pythonapi)
)
_NO_THREAD = ctypes.c_ulong(-1).value

#: The core that the caller runs on; None where threads cannot be told where to run.
_core: Any = None
if hasattr(os, "sched_setaffinity"):
    _core = getattr(ctypes.PyDLL(None), "sched_getcpu", None)


class _Pool:
    """Helpers, and the boards where they hear of calls."""

    def __init__(self) -> None:
        self.threads = 1  # that were asked for
        self.boards = tasks.boards(MOST_THREADS)  # few of its pages are ever touched
        self.address = self.boards.ctypes.data
        self.records = tasks.helpers(MOST_THREADS)
        self.helpers = memoryview(self.records)  # quicker to look at
        self.size = 1  # that there are
        self.cores: set[int] = set() if _core is None else os.sched_getaffinity(0)  # theirs too
        bits = sum(1 << core for core in self.cores)
        words = range(0, bits.bit_length(), 64)
        self.core_bits = np.array([bits >> word & 0xFFFFFFFFFFFFFFFF for word in words], np.uint64)
        self.last = -math.inf  # when a call ended
        for kept in (serve, self):  # helpers look at these while Python ends
            keep(kept)

    def start(self, threads: int) -> None:
        """Start helpers until there are so many threads, or no more to be had."""
        function, cores = serve(0), self.core_bits
        for me in range(1, threads):
            helper = self.records[me]
            if helper[STATE] == NOBODY:  # or not yet: a second one ends at once
                helper[tasks.ME], helper[tasks.BOARD] = me, self.address
                helper[tasks.LOOKS], helper[tasks.LAST_LOOKS] = _LOOKS, _LAST_LOOKS
                helper[tasks.CORES], helper[tasks.CORE_BYTES] = cores.ctypes.data, cores.nbytes
                if _start_thread(function, helper.ctypes.data) == _NO_THREAD:
                    break
            self.size = max(self.size, 1 + me)
        self.threads = threads

    def wake(self, threads: int, nbytes: int) -> None:
        """Wake those who sleep for a call, if they are worth it."""
        if time.monotonic() > self.last + _SOON:
            threads = min(threads, nbytes // _BYTES_PER_SLEEPER)
        for me in range(1, threads):
            if self.helpers[me, STATE] == SLEEPS:
                self._ring(me)

    def _ring(self, me: int) -> None:
        """Wake a helper elsewhere than on this core."""
        if _core is not None and (others := self.cores - {_core()}):
            thread = self.helpers[me, NATIVE]
            with suppress(OSError):  # none that matters: it may run here then
                # Otherwise someone has told it where to run, or another caller is waking it.
                if os.sched_getaffinity(thread) == self.cores:
                    self.helpers[me, MOVED] = True
                    os.sched_setaffinity(thread, others)
                    self.helpers[me, MOVED] = True  # should it have woken in between
        ring(self.records[me].ctypes.data)


_pool: _Pool | None = None
_starting = threading.RLock()


def _forget_pool() -> None:
    global _pool, _starting
    _pool = None
    _starting = threading.RLock()  # whoever had it may not be here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _pool_of(threads: int) -> _Pool | None:
    """The pool, for calls in up to so many threads; None if that cannot be had now."""
    global _pool
    # This thread may have the lock already: a signal's handler may call us. Should Ctrl-C leave it
    # taken, others do not wait for long. Nothing is started any more when Python ends.
    lock = _starting
    if sys.is_finalizing() or not lock.acquire(timeout=1):
        return None
    try:
        if _pool is None:
            pool = _Pool()
            if _pool is None:  # still
                _pool = pool
        if _pool.threads < threads:
            _pool.start(threads)
        return _pool
    finally:
        lock.release()


def hire(tasks: int, nbytes: int) -> tuple[int, int]:
    """(board, -threads) for a call of a shared kernel: as many threads as ``nbytes`` keep busy.

    Helpers that sleep are woken for it if that pays. After the call they are to be dismissed,
    which tells when it ended, unless the board is 0: then no call of its size needs any.
    """
    if nbytes < 2 * _BYTES_PER_LISTENER or tasks < 2 or (most := get_num_threads()) < 2:
        return _ALONE
    pool = _pool
    if pool is None or pool.threads < most:
        pool = _pool_of(most)
        if pool is None:
            return _ALONE
    threads = min(most, tasks, nbytes // _BYTES_PER_LISTENER, pool.size)
    if pool.helpers[0, ASLEEP]:
        pool.wake(threads, nbytes)
    return pool.address, -threads


def dismiss() -> None:
    """Note that a call with helpers has ended."""
    pool = _pool
    if pool is not None:
        pool.last = time.monotonic()


def run(kernel: Any, tasks: int, nbytes: int, *arguments: Any) -> None:
    """Call a shared kernel in as many threads as ``nbytes`` keep busy."""
    board, me = hire(tasks, nbytes)
    kernel(board, me, tasks, *arguments)
    if board:
        dismiss()
