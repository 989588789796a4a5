"""The threads that kernels run in.

A kernel runs without the interpreter lock and shares its tasks with helpers that listen at
its board (`tasks`); which thread does which task never shows in the result. Numba's own parallel
layers would abort the process in a forked child or when two Python threads use them at once.

The calling thread works too, and helpers that come when it has run out of tasks find the call
closed. So a call waits for running work alone, or for another that starts the helpers, never for
a place in the pool: many callers at once, or no thread to be had, slow it down at worst.

After a call a helper listens for the next one for a moment before it goes to sleep, as
threads of OpenMP do, but yields its core to whoever wants it. All its life is compiled code, since
to wait for the interpreter lock, which a caller in a loop keeps for milliseconds, takes longer than
to be woken. Ctrl-C may come between any two steps of Python; a helper is rung for in one.

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
from .tasks import LAST_LOOKS, LOOKS, SLEEPS, boards, ring, serve
from .threads import get_num_threads

__all__ = ["run"]

# Waking a thread takes 50 to 100 us, as long as one thread takes for about this much; to be heard
# by one that listens takes less than one.
_BYTES_PER_SLEEPER = 4 << 20
_BYTES_PER_LISTENER = 128 << 10

# Calls in such quick succession, in seconds, are worth waking helpers for: the next ones will
# find them listening.
_SOON = 1e-3

# Words of a row.
_STATE, _DISMISSED, _MOVED, _ASLEEP = (
    place // 8 for place in (tasks.STATE, tasks.DISMISSED, tasks.MOVED, tasks.ASLEEP)
)

# A lock of Python's own kind that is taken and released without the interpreter lock. They are
# kept for good, a few bytes each: a forked child could not free one that its parent waits for.
_allocate_lock = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThread_allocate_lock", ctypes.pythonapi))

#: The core that the caller runs on; None where threads cannot be told where to run.
_core: Any = None
if hasattr(os, "sched_setaffinity"):
    _core = getattr(ctypes.PyDLL(None), "sched_getcpu", None)


class _Pool:
    """Helpers, and the boards where they hear of calls."""

    def __init__(self, threads: int) -> None:
        self.threads = threads  # that were asked for
        self.boards = boards(threads)
        self.address = self.boards.ctypes.data
        self.words = memoryview(self.boards[0])  # header, row of the caller, rows of helpers
        self.bells: list[int] = []  # that wake helpers 1, 2, ...
        self.natives: list[Any] = []  # what the system calls them
        self.cores: set[int] = set() if _core is None else os.sched_getaffinity(0)  # theirs too
        bits = sum(1 << core for core in self.cores)
        words = range(0, bits.bit_length(), 64)
        self.core_bits = np.array([bits >> word & 0xFFFFFFFFFFFFFFFF for word in words], np.uint64)
        self.last = -math.inf  # when a call ended

    def start(self) -> bool:
        """Start the helpers; whether there is one."""
        for me in range(1, self.threads):
            bell = _allocate_lock()
            helper = threading.Thread(
                target=self._serve, args=(me, bell), name=f"cunorm_{me}", daemon=True
            )
            self.bells.append(bell)
            handled = sys.exc_info()[1]
            try:
                helper.start()
                self.natives.append(helper.native_id)
            except RuntimeError as error:
                cause = error.__context__
                if cause is not None and cause is not handled:  # Ctrl-C while it waited for the
                    raise cause from None  # thread: leaving its condition's lock failed then
                self.bells.pop()  # too many threads
                break
        return bool(self.bells)

    def _serve(self, me: int, bell: int) -> None:
        """What a helper does all its life."""
        cores = self.core_bits
        serve(self.address, me, bell, cores.ctypes.data, cores.nbytes, LOOKS, LAST_LOOKS)

    def dismiss(self) -> None:
        """Let the helpers end when they have nothing to do."""
        for me, bell in enumerate(self.bells, 1):
            self.words[1 + me, _DISMISSED] = True
            ring(self.address, me, bell)

    def wake(self, threads: int, nbytes: int) -> None:
        """Wake helpers for a call if they are worth it."""
        if self.words[1, _ASLEEP]:
            if time.monotonic() > self.last + _SOON:
                threads = min(threads, nbytes // _BYTES_PER_SLEEPER)
            for me in range(1, threads):
                if self.words[1 + me, _STATE] == SLEEPS:
                    self._ring(me)

    def _ring(self, me: int) -> None:
        """Wake a helper elsewhere than on this core."""
        if _core is not None and (others := self.cores - {_core()}):
            thread = self.natives[me - 1]
            with suppress(OSError):  # none that matters: it may run here then
                # Otherwise someone has told it where to run, or another caller is waking it.
                if os.sched_getaffinity(thread) == self.cores:
                    self.words[1 + me, _MOVED] = True
                    os.sched_setaffinity(thread, others)
        ring(self.address, me, self.bells[me - 1])


_pool: _Pool | None = None
_starting = threading.RLock()


def _forget_pool() -> None:
    global _pool, _starting
    _pool = None
    _starting = threading.RLock()  # whoever had it may not be here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _pool_of(threads: int) -> _Pool | None:
    """The pool, for calls in up to so many threads; None if there are no threads to be had."""
    global _pool
    # This thread may have the lock already: a signal's handler may call us. Should Ctrl-C leave it
    # taken, others do not wait for long. Threads do not start any more when Python ends.
    if sys.is_finalizing() or not _starting.acquire(timeout=1):
        return None
    try:
        if _pool is None or _pool.threads != threads:
            pool, old = _Pool(threads), None
            try:
                started = pool.start()
                old, _pool = _pool, pool if started else None
            finally:
                for other in (pool, old):
                    if other is not None and other is not _pool:
                        other.dismiss()
        return _pool
    finally:
        _starting.release()


def run(kernel: Any, tasks: int, nbytes: int, *arguments: Any) -> None:
    """Call a shared kernel in as many threads as ``nbytes`` keep busy."""
    threads = nbytes // _BYTES_PER_LISTENER
    if threads > 1 and tasks > 1 and (most := get_num_threads()) > 1:
        pool = _pool
        if pool is None or pool.threads != most:
            pool = _pool_of(most)
        if pool is not None:
            threads = min(most, tasks, threads, 1 + len(pool.bells))
            pool.wake(threads, nbytes)
            kernel(pool.address, -threads, tasks, *arguments)
            pool.last = time.monotonic()
            return
    kernel(0, -1, tasks, *arguments)
