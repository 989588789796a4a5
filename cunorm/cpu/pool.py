"""The threads that kernels run in.

A kernel runs without the interpreter lock and takes its tasks from a board that the threads
of a call share, so one call per thread is all it needs; which thread does which task never
shows in the result. Numba's own parallel layers would abort the process in a forked child or
when two Python threads use them at once.

The calling thread works too, and helpers that come when it has run out of tasks
find the call closed. So a call waits for running work alone, never for a place
in the pool: many callers at once, or no thread to be had, slow it down at worst.

After a call a helper listens for the next one for a moment before it goes to sleep, as
threads of OpenMP do, but yields its core to whoever wants it.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from typing import Any

from .tasks import ASLEEP, BUSY, STATE, TICKET, listen, ring, shares, sleeping_board, withdraw
from .threads import get_num_threads

__all__ = ["run"]

# Handing work to a sleeping thread and back takes 50 to 100 us, as long as one thread takes for
# about this much; to a thread that listens, a few.
_BYTES_PER_SLEEPER = 4 << 20
_BYTES_PER_LISTENER = 512 << 10

# Calls in such quick succession, in seconds, are worth waking helpers for: the next ones will
# find them listening.
_SOON = 1e-3


_pool: _Pool | None = None
_starting = threading.Lock()


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

    def __init__(self, kernel: Any, board: Any, ticket: int, arguments: tuple[Any, ...]) -> None:
        self.ticket = ticket  # of the latest call that helpers could hear of
        self._board = board
        self._kernel, self._arguments = kernel, arguments
        self._lock = threading.Lock()
        self._closed = False
        self._slots = 0  # of the board that helpers have taken
        self._helping = 0
        self._left: queue.SimpleQueue[None] = queue.SimpleQueue()  # an item for each who has
        self._error: BaseException | None = None

    def work(self, slot: int = 0) -> None:
        self._kernel(self._board, slot, *self._arguments)

    def help(self) -> None:
        """What a helper does; nothing if it comes too late."""
        with self._lock:
            if self._closed or self._slots + 1 == len(self._board):
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
                    withdraw(self._board)
                with self._lock:
                    self._closed = True
                while self._helping:  # and so an item is still to come
                    self._left.get()
                break
            except BaseException as raised:  # Ctrl-C
                interruption = raised
        self._arguments = ()  # who finds this call in the queue keeps no arrays
        raised_somewhere = interruption or self._error
        if raised_somewhere is not None:
            raise raised_somewhere


class _Pool:
    """Helpers, and the board where they learn of calls."""

    def __init__(self, threads: int) -> None:
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()  # for the sleeping
        self.call: _Call | None = None  # for the listening, on the board
        self.threads = threads  # that were asked for
        self.board = sleeping_board(threads)
        self.turn = threading.Lock()  # of the call that uses the board
        self.last = -math.inf  # when one did

    def start(self) -> bool:
        """Start the helpers; whether there is one."""
        for row in range(1, len(self.board)):
            helper = threading.Thread(
                target=self._serve, args=(row,), name=f"cunorm_{row}", daemon=True
            )
            try:
                helper.start()
            except RuntimeError:  # too many threads, or the interpreter is shutting down
                self.board = sleeping_board(row)
                break
        return len(self.board) > 1

    def dismiss(self) -> None:
        """Let the helpers end when they have nothing to do."""
        for _ in range(1, len(self.board)):
            self.calls.put(None)

    def _serve(self, row: int) -> None:
        """What a helper does all its life."""
        call = self.calls.get()
        while call is not None:
            self.board[row, STATE] = BUSY
            ticket = call.ticket
            call.help()
            call = None  # and the arrays with it, while waiting for the next
            call = self._next(row, ticket)

    def _next(self, row: int, ticket: int) -> _Call | None:
        """The next call after `ticket` for a helper, which is asleep if none comes soon."""
        while self.calls.empty() and listen(self.board, row, ticket):
            call = self.call
            if call is not None:
                return call
            ticket = int(self.board[0, TICKET])  # it was over soon
        self.board[row, STATE] = ASLEEP
        call = self.call
        if call is not None and call.ticket != ticket:  # it has come just now
            return call
        return self.calls.get()

    def run(
        self, kernel: Any, tasks: int, threads: int, nbytes: int, arguments: tuple[Any, ...]
    ) -> bool:
        """Call a kernel in up to so many threads; False if no helper is worth it."""
        if not self.turn.acquire(blocking=False):  # the board is another call's
            threads = min(threads, nbytes // _BYTES_PER_SLEEPER)
            if threads > 1:
                board, ticket = shares(tasks, threads).copy(), int(self.board[0, TICKET])
                self._share(_Call(kernel, board, ticket, arguments), threads - 1)
            return threads > 1
        try:
            threads = min(threads, len(self.board))
            asleep = ring(self.board, shares(tasks, threads))
            if asleep > 0 and time.monotonic() > self.last + _SOON:
                threads = max(threads - asleep, min(threads, nbytes // _BYTES_PER_SLEEPER))
                asleep = ring(self.board, shares(tasks, threads))
            if threads > 1:
                board = self.board[:threads]
                self.call = _Call(kernel, board, int(board[0, TICKET]), arguments)
                self._share(self.call, asleep)
            self.last = time.monotonic()
        except BaseException:
            self.board = sleeping_board(len(self.board))  # a helper may still be at the old one
            raise
        finally:
            self.call = None
            self.turn.release()
        return threads > 1

    def _share(self, call: _Call, sleepers: int) -> None:
        """Do a call with whoever hears of it and so many that are woken."""
        try:
            for _ in range(sleepers):
                self.calls.put(call)
            call.work()
        finally:
            call.close()


def _pool_of(threads: int) -> _Pool | None:
    """The pool, for calls in up to so many threads; None if there are no threads to be had."""
    global _pool
    with _starting:
        if _pool is None or _pool.threads != threads:
            if _pool is not None:
                _pool.dismiss()
            _pool = None
            pool = _Pool(threads)
            if not pool.start():
                return None
            _pool = pool
        return _pool


def run(kernel: Any, tasks: int, nbytes: int, *arguments: Any) -> None:
    """Call ``kernel(board, me, *arguments)`` in as many threads as ``nbytes`` keep busy."""
    threads = nbytes // _BYTES_PER_LISTENER
    if threads > 1 and tasks > 1 and (most := get_num_threads()) > 1:
        threads = min(most, tasks, threads)
        pool = _pool
        if pool is None or pool.threads != most:
            pool = _pool_of(most)
        if pool is not None and pool.run(kernel, tasks, threads, nbytes, arguments):
            return
    kernel(shares(tasks, 1).copy(), 0, *arguments)
