"""How many threads a call may use. Nothing here imports Numba."""

from __future__ import annotations

import os

from .. import checks

__all__ = ["get_num_threads", "set_num_threads"]

MOST_THREADS = 1024


def _available() -> int:
    setting = os.environ.get("CUNORM_NUM_THREADS", "")
    if setting:
        try:
            number = int(setting)
        except ValueError:
            number = 0
        if not 1 <= number <= MOST_THREADS:
            raise ValueError(
                "environment variable CUNORM_NUM_THREADS: expected an integer from 1 to "
                f"{MOST_THREADS}, got {setting!r}"
            )
        return number
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), MOST_THREADS)
    return min(os.cpu_count() or 1, MOST_THREADS)


_threads = _available()


def get_num_threads() -> int:
    """Number of threads that a call on CPU arrays may use."""
    return _threads


def set_num_threads(number: int) -> None:
    """Let calls on CPU arrays use up to ``number`` threads, 1 to 1024. Results do not depend on it.

    The default is the number of processors this process may run on, or the
    environment variable ``CUNORM_NUM_THREADS``.

    Raises
    ------
    ValueError, TypeError
        If number is not an integer from 1 to 1024.
    """
    global _threads
    number = checks.integer("number", number)
    if not 1 <= number <= MOST_THREADS:
        raise ValueError(f"number: expected 1 to {MOST_THREADS}, got {number}")
    _threads = number
