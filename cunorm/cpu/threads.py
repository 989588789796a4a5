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
import queue
import threading
from typing import Any

import numpy as np

from .. import checks

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
_pool: queue.SimpleQueue[_Call | None] | None = None  # of calls that want help
_starting = threading.Lock()


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
    if _pool is not None:
        for _ in range(_threads - 1):  # its helpers end when they come to it
            _pool.put(None)
    _threads, _pool = number, None


def _forget_pool() -> None:
    global _pool, _starting
    _pool = None
    _starting = threading.Lock()  # whoever had it may not be here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


class _Call:
    """One call of a kernel, in which helpers may take part until it is closed.

    Ctrl-C may come between any two steps of the caller's. So there are no locks here but those
    of C, which a ``with`` statement takes and gives back in one step each (a `Condition` of the
    standard library is entered in several), and a wait may be repeated.
    """

    def __init__(self, kernel: Any, tasks: int, threads: int, arguments: tuple[Any, ...]) -> None:
        self._queue = _queue(tasks, threads)
        self._kernel, self._arguments = kernel, arguments
        self._lock = threading.Lock()
        self._closed = False
        self._slots = 0  # of the queue that helpers have taken
        self._helping = 0
        self._left: queue.SimpleQueue[None] = queue.SimpleQueue()  # an item for each who has
        self._error: BaseException | None = None

    def work(self, slot: int = 0) -> None:
        self._kernel(self._queue, slot, *self._arguments)

    def help(self) -> None:
        """What a helper does; nothing if it comes too late."""
        with self._lock:
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
        with self._lock:
            self._error = self._error or error
            self._helping -= 1
        self._left.put(None)

    def close(self) -> None:
        """Let nobody in any more and wait until everybody is out, come what may."""
        interruption: BaseException | None = None
        while True:
            try:
                if interruption is not None:  # no new tasks, but wait for those begun
                    self._queue[:, 0] = self._queue[-1, 1]
                with self._lock:
                    self._closed = True
                while self._helping:  # and so an item is still to come
                    self._left.get()
                break
            except BaseException as raised:  # Ctrl-C
                interruption = raised
        raised_somewhere = interruption or self._error
        if raised_somewhere is not None:
            raise raised_somewhere


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    """What a helper does all its life."""
    while (call := calls.get()) is not None:
        call.help()
        del call  # and the arrays with it, while waiting for the next


def _helpers() -> queue.SimpleQueue[_Call | None] | None:
    """Where calls that want help go; None if there are no threads to be had."""
    global _pool
    with _starting:
        if _pool is None:
            calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
            for number in range(_threads - 1):
                helper = threading.Thread(
                    target=_serve, args=(calls,), name=f"cunorm_{number}", daemon=True
                )
                try:
                    helper.start()
                except RuntimeError:  # too many threads, or the interpreter is shutting down
                    if number == 0:
                        return None
                    break
            _pool = calls
        return _pool


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
        pool = _helpers() if _pool is None else _pool
        if pool is not None:
            for _ in range(helpers):
                pool.put(call)
        call.work()
    finally:
        call.close()
