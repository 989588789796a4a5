"""How many threads a call may use. Nothing here imports Numba."""

from __future__ import annotations

import os

from .. import checks

__all__ = ["get_num_threads", "set_num_threads"]


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
    global _threads
    number = checks.integer("number", number)
    if number < 1:
        raise ValueError(f"number: expected at least 1, got {number}")
    _threads = number
