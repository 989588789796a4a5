"""Threads for the kernels.

A kernel runs without the interpreter lock and takes its tasks from a shared
atomic counter, so one call per thread is all it needs; which thread does which
task never shows in the result. Numba's own parallel layers would abort the
process in a forked child or when two Python threads use them at once.

The calling thread works too, and helpers that have not begun when it has run
out of tasks are called off. So a call can wait for running work alone, never
for a place in the pool: many callers at once, or none of the pool's threads
left after a fork, slow it down at worst.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["get_num_threads", "run", "set_num_threads"]

# Waking a thread takes about 30 us; 512 KiB are about as long in the cache.
_BYTES_PER_THREAD = 512 << 10


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
    """
    global _threads, _pool
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"number: expected a positive integer, got {number!r}")
    _threads = number
    _pool = None


def _forget_pool() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _start(helpers: int, *call: Any) -> list[Future[None]]:
    """Submit a call to the pool that many times."""
    global _pool
    pool = _pool
    if pool is None:
        from concurrent.futures import ThreadPoolExecutor

        pool = _pool = ThreadPoolExecutor(_threads, thread_name_prefix="cunorm")
    try:
        return [pool.submit(*call) for _ in range(helpers)]
    except RuntimeError:  # the interpreter is shutting down: no new work for threads
        return []


def run(kernel: Any, tasks: int, nbytes: int, *arguments: Any) -> None:
    """Call ``kernel(counter, tasks, *arguments)`` in as many threads as ``nbytes`` keep busy."""
    counter = np.zeros(1, np.int64)
    helpers = min(_threads, tasks, nbytes // _BYTES_PER_THREAD) - 1
    if helpers < 1:
        kernel(counter, tasks, *arguments)
        return
    futures = _start(helpers, kernel, counter, tasks, *arguments)
    try:
        kernel(counter, tasks, *arguments)
    finally:
        for future in futures:
            if not future.cancel():
                future.result()
