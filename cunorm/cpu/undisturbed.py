"""Work that Ctrl-C must not cut off.

It comes to the main thread, between any two steps of Python. A Numba that is cut off while it is
imported cannot be imported again; while it compiles, it may lose what has been registered with it
for good, or take a kernel for compiled that is not.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

__all__ = ["undisturbed"]

_Result = TypeVar("_Result")


def undisturbed(work: Callable[[], _Result]) -> _Result:
    """What `work` returns or raises, done in another thread, which Ctrl-C does not reach.

    It ends the waiting here at once, but not the work, and Python does not end before that.
    """
    if not _can_wait():
        return work()
    results: list[_Result] = []
    errors: list[BaseException] = []
    done = threading.Event()  # a `join` that is interrupted takes the thread for ended

    def do() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        done.set()

    try:
        threading.Thread(target=do, name="cunorm").start()
    except RuntimeError:  # no thread to be had
        return work()
    done.wait()
    if errors:
        raise errors[0]
    return results[0]


def _can_wait() -> bool:
    """Whether this thread can wait for what another one imports.

    Not while Python ends, when others do not run any more, nor in the middle of an import: Numba
    imports its extensions, which may be what this thread is importing.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is None and not sys.is_finalizing()
