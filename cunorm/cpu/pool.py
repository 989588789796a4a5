"""The threads that kernels run in.

A kernel runs without the interpreter lock and shares its tasks with helpers that listen at
its board (`tasks`); which thread does which task never shows in the result. Numba's own parallel
layers would abort the process in a forked child or when two Python threads use them at once.

The calling thread works too, and helpers that come when it has run out of tasks find the call
closed. So a call waits for running work alone, or for another that starts the helpers, never for
a place in the pool: many callers at once, or no thread to be had, slow it down at worst. Ctrl-C
may come between any two steps of Python: bells are `SimpleQueue`s, which are rung in one, not
events or conditions of the standard library, whose lock it could leave taken.

After a call a helper listens for the next one for a moment before it goes to sleep, as
threads of OpenMP do, but yields its core to whoever wants it.

Linux may wake a helper on the core of its caller while others have nothing to do: those of a
virtual machine that have gone to sleep do not count as idle. There the helper would wait for
milliseconds until it is moved. So while it is being woken it may not run on its caller's core.
"""

from __future__ import annotations

import ctypes
import math
import os
import queue
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from .tasks import LOOKS, boards, listen
from .threads import get_num_threads

__all__ = ["run"]

# Waking a thread takes 50 to 100 us, as long as one thread takes for about this much; to be heard
# by one that listens takes less than one.
_BYTES_PER_SLEEPER = 4 << 20
_BYTES_PER_LISTENER = 128 << 10

# Calls in such quick succession, in seconds, are worth waking helpers for: the next ones will
# find them listening.
_SOON = 1e-3

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
        self.bells: list[queue.SimpleQueue[bool]] = []  # that wake helpers 1, 2, ...
        self.natives: list[Any] = []  # what the system calls them
        self.asleep: set[int] = set()
        self.cores: set[int] = set() if _core is None else os.sched_getaffinity(0)  # theirs too
        self.moved: set[int] = set()  # who may not run on all of these while it wakes
        self.last = -math.inf  # when a call ended

    def start(self) -> bool:
        """Start the helpers; whether there is one."""
        for me in range(1, self.threads):
            bell: queue.SimpleQueue[bool] = queue.SimpleQueue()
            helper = threading.Thread(
                target=self._serve, args=(me, bell), name=f"cunorm_{me}", daemon=True
            )
            self.bells.append(bell)
            self.asleep.add(me)
            handled = sys.exc_info()[1]
            try:
                helper.start()
                self.natives.append(helper.native_id)
            except RuntimeError as error:
                cause = error.__context__
                if cause is not None and cause is not handled:  # Ctrl-C while it waited for the
                    raise cause from None  # thread: leaving its condition's lock failed then
                self.bells.pop().put(False)  # too many threads
                self.asleep.discard(me)
                break
        return bool(self.bells)

    def _serve(self, me: int, bell: queue.SimpleQueue[bool]) -> None:
        """What a helper does all its life."""
        while bell.get():
            while not bell.empty():
                if not bell.get():
                    return
            if me in self.moved:
                self.moved.discard(me)
                with suppress(OSError):
                    os.sched_setaffinity(0, self.cores)
            self.asleep.discard(me)
            listen(self.address, me, LOOKS)
            self.asleep.add(me)
            listen(self.address, me, LOOKS // 8)  # for who came before that, and has not rung

    def dismiss(self) -> None:
        """Let the helpers end when they have nothing to do."""
        for bell in self.bells:
            bell.put(False)

    def wake(self, threads: int, nbytes: int) -> None:
        """Wake helpers for a call if they are worth it."""
        if self.asleep:
            if time.monotonic() > self.last + _SOON:
                threads = min(threads, nbytes // _BYTES_PER_SLEEPER)
            for me in list(self.asleep):
                if me < threads:
                    self._ring(me)

    def _ring(self, me: int) -> None:
        """Wake a helper elsewhere than on this core."""
        if _core is not None and (others := self.cores - {_core()}):
            thread = self.natives[me - 1]
            with suppress(OSError):  # none that matters: it may run here then
                # Otherwise someone has told it where to run, or another caller is waking it.
                if os.sched_getaffinity(thread) == self.cores:
                    self.moved.add(me)
                    os.sched_setaffinity(thread, others)
        self.bells[me - 1].put(True)


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
