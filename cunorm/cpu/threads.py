"""Threads for the kernels.

A kernel runs without the interpreter lock and takes its tasks from a shared
queue, so one call per thread is all it needs; which thread does which task never
shows in the result. A thread takes neighbouring tasks, the same ones in calls of
the same size, and then helps the others. Numba's own parallel layers would abort
the process in a forked child or when two Python threads use them at once.

The calling thread works too, and helpers that come when it has run out of tasks
find the call closed. So a call waits for running work alone, never for a place
in the pool: many callers at once, or no thread to be had, slow it down at worst.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import checks

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

__all__ = ["get_num_threads", "run", "set_num_threads"]

# Handing work to a sleeping thread and back takes 50 to 100 us, as long as one thread takes for
# about this much.
_BYTES_PER_THREAD = 4 << 20


def _available() -> int:
    setting = os.environ.get("CUNORM_NUM_THREADS", "")
    if setting:
        try:
            number = int(setting)
        except ValueError:
            number = 0
        if number < 1:
            raise ValueError(
                "environment variable CUNORM_NUM_THREADS: expected a positive integer, "
                f"got {setting!r}"
            )
        return number
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_threads = _available()
_pool: ThreadPoolExecutor | None = None


def get_num_threads() -> int:
    """Number of threads that a call on CPU arrays may use."""
    return _threads


def set_num_threads(number: int) -> None:
    """Let calls on CPU arrays use up to ``number`` threads. Results do not depend on it.

    The default is the number of processors this process may run on, or the
    environment variable ``CUNORM_NUM_THREADS``.

    Raises
    ------
    ValueError, TypeError
        If number is not an integer of at least 1.
    """
    global _threads, _pool
    number = checks.integer("number", number)
    if number < 1:
        raise ValueError(f"number: expected at least 1, got {number}")
    _threads = number
    _pool = None


def _forget_pool() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


class _Call:
    """One call of a kernel, in which helpers may take part until it is closed."""

    def __init__(self, kernel: Any, tasks: int, threads: int, arguments: tuple[Any, ...]) -> None:
        self._queue = _queue(tasks, threads)
        self._kernel, self._arguments = kernel, arguments
        self._slots = 0  # of the queue that threads have taken
        self._changed = threading.Condition(threading.Lock())
        self._closed = False
        self._helping = 0
        self._error: BaseException | None = None

    def work(self, slot: int = 0) -> None:
        self._kernel(self._queue, slot, *self._arguments)

    def help(self) -> None:
        """What a thread of the pool does; nothing if it comes too late."""
        with self._changed:
            if self._closed:
                return
            self._helping += 1
            self._slots += 1
            slot = self._slots
        error = None
        try:
            self.work(slot)
        except BaseException as raised:  # for the caller
            error = raised
        with self._changed:
            self._error = self._error or error
            self._helping -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more and wait until everybody is out, come what may."""
        interruption: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._closed = True
                    while self._helping:
                        self._changed.wait()
                break
            except BaseException as raised:  # Ctrl-C: no new tasks, but wait for those begun
                self._queue[:, 0] = self._queue[-1, 1]
                interruption = raised
        raised_somewhere = interruption or self._error
        if raised_somewhere is not None:
            raise raised_somewhere


def _call_helpers(call: _Call, helpers: int) -> None:
    """Ask the pool to take part."""
    global _pool
    pool = _pool
    if pool is None:
        from concurrent.futures import ThreadPoolExecutor

        pool = _pool = ThreadPoolExecutor(_threads, thread_name_prefix="cunorm")
    for _ in range(helpers):
        try:
            pool.submit(call.help)
        except RuntimeError:  # no more threads to be had, or the interpreter is shutting down
            return


def _queue(tasks: int, threads: int) -> Any:
    """Tasks in equal shares, as `next_task` takes them."""
    queue = np.zeros((threads, 2), np.int64)
    queue[-1, 1] = tasks
    for slot in range(1, threads):
        queue[slot - 1, 1] = queue[slot, 0] = tasks * slot // threads
    return queue


def run(kernel: Any, tasks: int, nbytes: int, *arguments: Any) -> None:
    """Call ``kernel(queue, me, *arguments)`` in as many threads as ``nbytes`` keep busy."""
    helpers = min(_threads, tasks, nbytes // _BYTES_PER_THREAD) - 1
    if helpers < 1:
        kernel(_queue(tasks, 1), 0, *arguments)
        return
    call = _Call(kernel, tasks, helpers + 1, arguments)
    try:
        _call_helpers(call, helpers)
        call.work()
    finally:
        call.close()
