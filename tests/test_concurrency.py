"""Several callers at once, forked children, any number of threads."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import numpy as np
import pytest
from numba import njit
from numba.core.caching import NullCache

import cunorm
from cunorm.cpu import pool, tasks, undisturbed

SHAPES = [((16, 32, 28, 28), 1), ((8, 16, 4, 4), 1), ((40_000, 32), 1), ((3, 2, 500, 500), 1)]


def workload(seed):
    """Results of everything, for shapes that do and do not use several threads."""
    results = []
    rng = np.random.default_rng(seed)
    for shape, axis in SHAPES:
        x, dy = rng.standard_normal((2, *shape), dtype=np.float32)
        weight = rng.standard_normal(shape[axis], dtype=np.float32)
        y, saved = cunorm.batch_norm_forward(x, weight, channel_axis=axis)
        results += [y, *saved[:2], *cunorm.batch_norm_backward(dy, x, saved, weight)]
        results += cunorm.batch_norm_statistics(x, channel_axis=axis)[1:]
    return results


def assert_same(a, b):
    for left, right in zip(a, b, strict=True):
        np.testing.assert_array_equal(left, right)


def test_eight_callers_at_once(threads):
    threads(4)
    expected = [workload(seed) for seed in range(8)]
    found = [None] * 8
    barrier = threading.Barrier(8)

    def call(seed):
        barrier.wait()
        for _ in range(3):
            found[seed] = workload(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(300)
        assert not caller.is_alive()
    for a, b in zip(expected, found, strict=True):
        assert_same(a, b)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX says so, if it is imported
def test_forked_child(threads):
    """A child of a process whose pool has been at work computes the same bits with its own."""
    threads(2)
    expected = workload(3)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def child():
        results = workload(3)
        same = all(np.array_equal(a, b) for a, b in zip(expected, results, strict=True))
        queue.put((same, pool._pool.size - 1))

    for _ in range(3):
        process = context.Process(target=child)
        process.start()
        process.join(120)
        assert process.exitcode == 0
        same, new_threads = queue.get()
        assert same
        assert new_threads >= 1  # the child made a pool of its own
    assert_same(workload(3), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX says so, if it is imported
def test_fork_while_others_compute(threads):
    threads(3)
    expected = workload(1)
    stop = threading.Event()

    def call():
        while not stop.is_set():
            workload(2)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                same = False
                try:
                    found = zip(expected, workload(1), strict=True)
                    same = all(np.array_equal(a, b) for a, b in found)
                finally:
                    os._exit(0 if same else 3)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        stop.set()
        caller.join(300)


def test_no_more_threads_to_be_had(rng, threads, monkeypatch):
    """Those there are do the work, and no result comes back before they are done."""
    x = rng.standard_normal((16, 8, 256, 256), dtype=np.float32)
    threads(1)
    expected = cunorm.batch_norm_forward(x)[0]
    start = pool._start_thread
    monkeypatch.setattr(pool, "_pool", None)
    for number, allowed in ((6, 0), (7, 1), (8, 0), (9, 2)):
        threads(number)
        started = []

        def limited(function, helper, started=started, allowed=allowed):
            if len(started) >= allowed:
                return pool._NO_THREAD
            started.append(helper)
            return start(function, helper)

        monkeypatch.setattr(pool, "_start_thread", limited)
        before = 1 if pool._pool is None else pool._pool.size
        for _ in range(2):  # which does not try again
            y = cunorm.batch_norm_forward(x)[0]
        assert len(started) == allowed
        assert pool._pool.size == before + allowed
        np.testing.assert_array_equal(y, expected)


def kernel_of(function):
    """A shared kernel, like those of the package but kept nowhere."""
    kernel = tasks.shared_kernel(function)
    kernel.compiled._cache = NullCache()
    return kernel


def count_tasks(board, me, counts):
    task = tasks.next_task(board, me)
    while task >= 0:
        counts[task] += 1
        task = tasks.next_task(board, me)


@njit
def wait_for(address, value, looks):
    """Wait for a word, but not for ever."""
    while looks > 0 and tasks._look(address) < value:
        looks -= 1
        tasks._pause(looks)


def meet(board, me, places, looks):
    """Everybody takes a task and waits for the others."""
    if tasks.next_task(board, me) >= 0:
        tasks._add(places, 1)
        wait_for(places, 2, looks)


PATIENCE = 1 << 30  # a minute


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def asleep(helpers):
    """Whether all helpers are, and none has been rung for."""
    states = helpers.records[1 : helpers.size, tasks.STATE]
    return set(states) == {tasks.SLEEPS} and helpers.records[0, tasks.ASLEEP] == len(states)


@pytest.mark.parametrize("slots", [1, 2, 3, 7])
@pytest.mark.parametrize("number", [0, 1, 2, 5, 20])
@pytest.mark.parametrize("name", ["next_task", "last_task"])
def test_order_of_tasks(name, number, slots):
    """Every task is taken once, one's own first and in order, whoever else comes."""
    take_task = getattr(tasks, name)
    take = njit(lambda board, me: take_task(board, me))
    for me in range(slots):
        board = tasks.boards(slots)[0]
        board[0, tasks._THREADS // 8] = slots
        bounds = [number * slot // slots for slot in range(slots + 1)]
        board[1:, tasks._NEXT // 8], board[1:, tasks._END // 8] = bounds[:-1], bounds[1:]
        address = board.ctypes.data
        taken = []
        while (task := take(address, me)) >= 0:
            taken.append(task)
        assert sorted(taken) == list(range(number))
        own = list(range(bounds[me], bounds[me + 1]))
        assert taken[: len(own)] == (own if name == "next_task" else own[::-1])
        assert all(take(address, other) == -1 for other in range(slots))


@pytest.mark.parametrize("callers", [1, 2 + tasks._BOARDS])
def test_every_task_is_done_once(threads, callers):
    """However many threads there are and callers at once, more than boards among them."""
    kernel = kernel_of(count_tasks)
    threads(4)
    failures = []

    def call(seed):
        rng = np.random.default_rng(seed)
        for _ in range(3000):
            counts = np.zeros(rng.integers(1, 40), np.int64)
            pool.run(kernel, counts.size, 1 << 30, counts)
            if not (counts == 1).all():
                failures.append(counts)

    together = [threading.Thread(target=call, args=(seed,)) for seed in range(callers)]
    for caller in together:
        caller.start()
    for caller in together:
        caller.join(300)
        assert not caller.is_alive()
    assert not failures
    boards = pool._pool.boards
    assert not boards[:, 0, tasks._TAKEN // 8].any()
    assert not (boards[:, 0, tasks._TICKET // 8] % 2).any()
    assert not boards[:, 1:, tasks._INSIDE // 8].any()


def test_helpers_take_part(threads):
    """One that has to be woken, and one that listens."""
    kernel = kernel_of(meet)
    threads(2)
    places = np.full(1, 2, np.int64)
    pool.run(kernel, 2, 1 << 30, places.ctypes.data, PATIENCE)  # compiles it
    until(lambda: asleep(pool._pool))
    places[:] = 0
    pool.run(kernel, 2, 1 << 30, places.ctypes.data, PATIENCE)
    assert places[0] == 2
    heard = 0
    for _ in range(1000):  # it listens for half a millisecond, which may be over on a busy machine
        places[:] = 0
        kernel(pool._pool.address, -2, 2, places.ctypes.data, 10_000)
        heard += places[0] == 2
        if heard:
            break
        pool.run(kernel, 2, 1 << 30, places.ctypes.data, 10_000)
    assert heard


def test_call_between_listening_and_sleeping(threads, monkeypatch):
    """A helper that says that it sleeps listens on: who saw it awake has rung for nobody."""
    kernel = kernel_of(meet)
    threads(2)
    places = np.full(1, 2, np.int64)
    pool.run(kernel, 2, 1 << 30, places.ctypes.data, PATIENCE)  # compiles it
    monkeypatch.setattr(pool, "_LOOKS", 0)
    monkeypatch.setattr(pool, "_LAST_LOOKS", 1 << 24)
    helpers = pool._Pool()
    helpers.start(2)
    until(lambda: asleep(helpers))
    helpers.records[1, tasks.LAST_LOOKS] = 0
    places[:] = 0
    kernel(helpers.address, -2, 2, places.ctypes.data, PATIENCE)
    assert places[0] == 2


def test_small_calls_wake_helpers_when_they_come_soon(threads, monkeypatch):
    kernel = kernel_of(count_tasks)
    threads(2)
    counts = np.zeros(2, np.int64)
    pool.run(kernel, 2, 1 << 30, counts)
    helpers = pool._pool
    for soon in (True, False):
        until(lambda: asleep(helpers))
        helpers.last = np.inf if soon else -np.inf
        with monkeypatch.context() as patch:
            rung = Mock()
            patch.setattr(pool._Pool, "_ring", rung)
            pool.run(kernel, 2, 2 * pool._BYTES_PER_LISTENER, counts)
        assert rung.call_count == soon
        helpers.last = -np.inf


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_refused_entries_are_no_calls(threads, monkeypatch, training):
    """A small call that has to convert its weight wakes nobody because it has tried before."""
    threads(2)
    x, weight = np.ones((8, 16, 32, 32), np.float32), np.ones(16)
    running = np.zeros(16, np.float32), np.ones(16, np.float32)
    rung = Mock()
    for _ in range(2):
        cunorm.batch_norm_forward(x, weight, None, *running, training=training)
        until(lambda: asleep(pool._pool))
        pool._pool.last = -np.inf
        monkeypatch.setattr(pool._Pool, "_ring", rung)
    assert not rung.called
    pool._pool.last = np.inf
    cunorm.batch_norm_forward(x, weight, None, *running, training=training)
    assert rung.called


@pytest.mark.skipif(
    pool._core is None or len(os.sched_getaffinity(0)) < 2, reason="nowhere else to run"
)
def test_helpers_are_woken_elsewhere_than_their_caller(threads, monkeypatch):
    """And may run everywhere again, unless they have been told otherwise."""
    kernel = kernel_of(count_tasks)
    threads(2)
    counts = np.zeros(2, np.int64)
    pool.run(kernel, 2, 1 << 30, counts)
    helpers = pool._pool
    helper = helpers.records[1, tasks.NATIVE].item()
    everywhere = os.sched_getaffinity(0)
    told = []
    tell = os.sched_setaffinity

    def spy(thread, cores):
        told.append((thread, cores))
        tell(thread, cores)

    def rest():
        until(lambda: asleep(helpers) and not helpers.records[1, tasks.MOVED])
        until(lambda: os.sched_getaffinity(helper) == everywhere)
        told.clear()

    monkeypatch.setattr(os, "sched_setaffinity", spy)
    for core in everywhere:
        rest()
        monkeypatch.setattr(pool, "_core", lambda core=core: core)
        pool.run(kernel, 2, 1 << 30, counts)
        assert told == [(helper, everywhere - {core})]
    rest()
    tell(helper, {core})
    pool.run(kernel, 2, 1 << 30, counts)
    until(lambda: asleep(helpers))
    assert told == []
    assert os.sched_getaffinity(helper) == {core}
    tell(helper, everywhere)


def test_more_callers_than_boards(threads):
    """Who finds none does all the work."""
    kernel = kernel_of(count_tasks)
    threads(2)
    counts = np.zeros(7, np.int64)
    pool.run(kernel, 7, 1 << 30, counts)
    taken = pool._pool.boards[:, 0, tasks._TAKEN // 8]
    ticket = pool._pool.boards[:, 0, tasks._TICKET // 8].copy()
    taken[:] = 1
    try:
        pool.run(kernel, 7, 1 << 30, counts)
    finally:
        taken[:] = 0
    assert (counts == 2).all()
    np.testing.assert_array_equal(pool._pool.boards[:, 0, tasks._TICKET // 8], ticket)


def test_fewer_threads_than_before(threads, monkeypatch):
    """Helpers that are too many are neither woken nor take part; later there are none anew."""

    def who(board, me, places):
        task = tasks.next_task(board, me)
        while task >= 0:
            tasks._add(places + 8 * me, 1)
            task = tasks.next_task(board, me)

    kernel = kernel_of(who)
    monkeypatch.setattr(pool, "_pool", None)
    for number, size in ((4, 4), (2, 4), (3, 4), (5, 5)):
        threads(number)
        places = np.zeros(8, np.int64)
        for _ in range(200):
            pool.run(kernel, 50, 1 << 30, places.ctypes.data)
        assert pool._pool.size == size
        assert places.sum() == 200 * 50
        assert not places[number:].any()


@pytest.mark.parametrize("who", [0, 1])
def test_error_in_a_kernel(threads, who):
    """It reaches the caller, whosever it is, when everybody is out; the next call is right."""

    def fail(board, me, places, who):
        if tasks.next_task(board, me) >= 0:
            tasks._add(places, 1)
            wait_for(places, 2, PATIENCE >> 6)
            if me == who:
                raise MemoryError("at work")

    kernel = kernel_of(fail)
    counting = kernel_of(count_tasks)
    threads(2)
    places = np.full(1, 2, np.int64)
    pool.run(kernel, 2, 1 << 30, places.ctypes.data, 2)  # compiles it
    met = 0
    for _ in range(40):  # a helper that falls asleep as a call comes misses it, on a busy machine
        places = np.zeros(1, np.int64)
        error = ""
        try:
            pool.run(kernel, 2, 1 << 30, places.ctypes.data, who)
        except MemoryError as raised:
            error = str(raised)
        met += places[0] == 2
        assert ("working arrays" in error) == (places[0] == 2 or who == 0)
        counts = np.zeros(5, np.int64)
        pool.run(counting, 5, 1 << 30, counts)
        assert (counts == 1).all()
        if met == 20:
            break
    assert met == 20


def test_error_of_a_helper_without_tasks(threads):
    """The others have done its work."""

    def fail(board, me, places):
        if me == 1:
            tasks._add(places, 1)
            raise MemoryError("before work")
        wait_for(places, 1, PATIENCE)
        while tasks.next_task(board, me) >= 0:
            tasks._add(places, 1)

    kernel = kernel_of(fail)
    threads(2)
    places = np.ones(1, np.int64)
    pool.run(kernel, 4, 1 << 30, places.ctypes.data)  # compiles it
    places[:] = 0
    until(lambda: asleep(pool._pool))
    pool.run(kernel, 4, 1 << 30, places.ctypes.data)
    assert places[0] == 5


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
@pytest.mark.parametrize("interrupts", [True, False])
def test_signals_while_helpers_start(interrupts):
    """Their handler interrupts, or calls us itself: nothing hangs, and helpers do not pile up."""
    code = (
        f"interrupts = {interrupts}"
        + """
import faulthandler, os, random, signal, sys, time
faulthandler.dump_traceback_later(60, exit=True)
import numpy as np, cunorm

armed, raised, caught, swallowed = False, 0, 0, []
sys.unraisablehook = lambda error: swallowed.append(error.exc_type)  # in Python's own callbacks

def handler(*_):
    global raised
    if not interrupts:
        cunorm.batch_norm_forward(x)
        raised += 1
    elif armed:
        raised += 1
        raise KeyboardInterrupt

x = np.random.default_rng(0).standard_normal((16, 64, 1024), dtype=np.float32)
cunorm.set_num_threads(2)
expected = cunorm.batch_norm_forward(x)[0]
before = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
signal.signal(signal.SIGALRM, handler)
for i in range(400):
    cunorm.set_num_threads(2 + i % 2)
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3))
        cunorm.batch_norm_forward(x)
        armed = False
    except KeyboardInterrupt:
        armed = False
        caught += 1
signal.setitimer(signal.ITIMER_REAL, 0)
assert raised > 20
assert not interrupts or caught + len(swallowed) == raised
assert swallowed == [KeyboardInterrupt] * len(swallowed) and (interrupts or not swallowed)
cunorm.set_num_threads(4)
assert (cunorm.batch_norm_forward(x)[0] == expected).all()
from cunorm.cpu import pool
assert pool._pool.size == 4
if os.path.isdir("/proc/self/task"):
    assert len(os.listdir("/proc/self/task")) <= before + 2
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
@pytest.mark.parametrize("part", range(10))
def test_interruption_of_the_first_call(part):
    """Which imports Numba and loads the first kernels."""
    code = (
        f"part = {part}"
        + """
import os, signal, time
import numpy as np, cunorm
x = np.random.default_rng(0).standard_normal((8, 16, 4, 4))
pid = os.fork()
if pid == 0:  # how long it takes
    start = time.monotonic()
    cunorm.batch_norm_forward(x)
    os._exit(max(1, min(255, int(200 * (time.monotonic() - start)))))
whole = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) / 200
def handler(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, whole * (part + 0.5) / 10)
try:
    cunorm.batch_norm_forward(x)
    signal.setitimer(signal.ITIMER_REAL, 0)
except KeyboardInterrupt:
    pass
y, saved = cunorm.batch_norm_forward(x)
cunorm.batch_norm_backward(y, x, saved)
np.testing.assert_allclose(y.mean((0, 2, 3)), 0, atol=1e-12)
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
@pytest.mark.parametrize("caught", [True, False])
def test_interruption_of_a_compilation(tmp_path, caught):
    """It ends the call at once; Python, or the next call, waits for the compilation."""
    code = (
        f"caught = {caught}"
        + """
import signal, threading
import numpy as np, cunorm
x = np.random.default_rng(0).standard_normal((8, 16, 4, 4))
cunorm.arrays.cpu_backend()
def handler(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    cunorm.batch_norm_forward(x)
except KeyboardInterrupt:
    assert threading.active_count() == 2
    if not caught:
        raise
else:
    raise AssertionError("not interrupted")
y, saved = cunorm.batch_norm_forward(x)
cunorm.batch_norm_backward(y, x, saved)
np.testing.assert_allclose(y.mean((0, 2, 3)), 0, atol=1e-12)
"""
    )
    done = run_python(code, NUMBA_CACHE_DIR=str(tmp_path))
    if caught:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == -signal.SIGINT
        assert done.stderr.rstrip().endswith("KeyboardInterrupt")
        kept = [path.name for path in tmp_path.rglob("*.nbc")]
        assert any("_normalize_" in name for name in kept), kept


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
@pytest.mark.parametrize("samples", [1, 16])
def test_many_interruptions(samples):
    """Ctrl-C at any moment of calls in two threads: nothing hangs, and the next call is right."""
    code = (
        f"samples = {samples}"
        + """
import faulthandler, random, signal, time
faulthandler.dump_traceback_later(60, exit=True)
import numpy as np, cunorm

armed = False

def interrupt(*_):
    if armed:
        raise KeyboardInterrupt

cunorm.set_num_threads(2)
x = np.random.default_rng(0).standard_normal((samples, 64, 56, 56), dtype=np.float32)
expected = cunorm.batch_norm_forward(x)[0]
signal.signal(signal.SIGALRM, interrupt)
interruptions, end = 0, time.monotonic() + 6
while time.monotonic() < end:
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.01 * random.random())
        while time.monotonic() < end:
            cunorm.batch_norm_forward(x)
        armed = False
    except KeyboardInterrupt:
        interruptions += 1
signal.setitimer(signal.ITIMER_REAL, 0)
assert interruptions > 20, interruptions
assert (cunorm.batch_norm_forward(x)[0] == expected).all()
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


CHILD = """
import multiprocessing, os, sys
import numpy as np, cunorm

def train(layer, dtype):
    x = np.random.default_rng(0).standard_normal((64, 4, 400)).astype(dtype)
    y = layer.forward(x)
    return y, layer.backward(y), layer.running_mean

def child(layer, dtype, answers):
    answers.put((dtype, *train(layer, dtype)))

if __name__ == "__main__":
    if {warm}:
        cunorm.batch_norm_forward(np.ones((4, 4)))  # there are a pool and compiled kernels to leave
    context = multiprocessing.get_context("{method}")
    answers = context.SimpleQueue()
    dtypes = ["float32", "float64", "float32"]
    layers = [cunorm.BatchNorm(4) for _ in dtypes]
    children = [context.Process(target=child, args=(layer, dtype, answers))
                for layer, dtype in zip(layers, dtypes)]
    for process in children:
        process.start()
    found = [answers.get() for _ in children]
    for process in children:
        process.join()
        assert process.exitcode == 0, process.exitcode
    for dtype, *results in found:
        for a, b in zip(results, train(cunorm.BatchNorm(4), dtype)):
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), dtype
    print("the same bits")
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_children_by_other_ways(tmp_path, method):
    """Layers go to them pickled; where they are spawned, all compile kernels into one folder."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} on this system")
    script = tmp_path / "train.py"
    script.write_text(CHILD.replace("{method}", method).replace("{warm}", str(method == "spawn")))
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")} if method == "spawn" else {}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | cache,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "the same bits\n"), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork_while_a_kernel_is_compiled(tmp_path):
    """The child can compile too."""
    code = """
import os, sys, threading, time, numpy as np, cunorm
x = np.random.default_rng(0).standard_normal((16, 8, 20)).astype(np.float32)
cunorm.batch_norm_statistics(x)
caller = threading.Thread(target=cunorm.batch_norm_forward, args=(x,))
caller.start()  # compiles for seconds
time.sleep(0.2)
assert caller.is_alive()
pid = os.fork()
if pid == 0:
    y = cunorm.batch_norm_forward(x.astype(np.float64))[0]
    os._exit(0 if abs(y.mean()) < 1e-12 else 3)
caller.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    result = run_python(code, NUMBA_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr


def test_number_of_threads_from_the_environment():
    code = "import cunorm; print(cunorm.get_num_threads())"
    assert run_python(code, CUNORM_NUM_THREADS="5").stdout == "5\n"
    assert int(run_python(code, CUNORM_NUM_THREADS="").stdout) >= 1
    for bad in ("0", "-2", "many", "1025"):
        result = run_python(code, CUNORM_NUM_THREADS=bad)
        assert f"expected an integer from 1 to 1024, got {bad!r}" in result.stderr


def test_first_call_while_the_interpreter_shuts_down():
    """It is too late to import anything then: an error, and no thread is waited for in vain."""
    code = """
import sys, numpy as np, cunorm
x = np.random.default_rng(0).standard_normal((64, 64, 28, 28), dtype=np.float32)
class Last:
    def __del__(self):
        assert sys.is_finalizing()
        cunorm.batch_norm_forward(x)
_last = Last()  # gone before what it needs
"""
    result = run_python(code)
    assert "ImportError: sys.meta_path is None" in result.stderr


def test_first_call_in_an_import(tmp_path, monkeypatch):
    (tmp_path / "calling_cunorm.py").write_text(
        "from cunorm.cpu import undisturbed\nwait = undisturbed._can_wait()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import calling_cunorm

    assert not calling_cunorm.wait
    found = []
    caller = threading.Thread(target=lambda: found.append(undisturbed._can_wait()))
    caller.start()
    caller.join()
    assert found == [True]


def test_calls_while_the_interpreter_shuts_down():
    """No pool can be had then; the calling thread does all the work."""
    code = """
import atexit, numpy as np, cunorm
cunorm.set_num_threads(4)
x = np.random.default_rng(0).standard_normal((64, 64, 28, 28), dtype=np.float32)
first = cunorm.batch_norm_forward(x)[0]
class Late:
    def __del__(self):
        print(np.array_equal(cunorm.batch_norm_forward(x)[0], first))
late = Late()
atexit.register(lambda: print(np.array_equal(cunorm.batch_norm_forward(x)[0], first)))
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("True\n"), result.stdout + result.stderr
