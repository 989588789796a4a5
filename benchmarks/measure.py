"""Timers: on the CPU's clock and on a GPU's, and the machine they ran on.

A case is measured round by round. In each round every contender runs once, slow ones in some
rounds only, so that a busy neighbour disturbs all of them alike; medians and quartiles are kept.
On a CPU every other round goes backwards, so that nobody always comes after the same other one.
"""

from __future__ import annotations

import io
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import llvmlite.binding

import cunorm

__all__ = ["machine", "on_cpu", "on_gpu"]

Times = dict[Any, dict[str, float]]

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 101

# A sample of a call that is over sooner is several calls: of so many seconds together.
_SAMPLE = 1e-3
_SLOW = 50e-3

# Of a call that takes longer, two samples must do: of the full table's time, plain code on large
# arrays would else take most.
_VERY_SLOW = 0.5

# For about half of this, in seconds, PyTorch's helper threads keep a core after a call, and
# yield it to nobody. Cores that have slept meanwhile are slower for a while: by a third for two
# milliseconds on an Intel Xeon in a virtual machine.
_PAUSE = 20e-3
_RISING = 5e-3


def _summary(samples: list[float]) -> dict[str, float]:
    return dict(zip(("low", "median", "high"), statistics.quantiles(samples, n=4), strict=True))


def _took(call: Callable[[], Any]) -> float:
    """Seconds of the shortest call, of as many as it takes until cores are awake."""
    clock = time.perf_counter
    now = clock()
    end, took = now + _RISING, math.inf
    while now < end:
        begin = clock()
        call()
        now = clock()
        took = min(took, now - begin)
    return took


def on_cpu(calls: dict[Any, Callable[[], Any]], seconds: float) -> Times:
    """Times of calls, in seconds, from about so many seconds of measuring.

    Large arrays do not fit the caches, so that every call finds them cold; small ones are
    called many times over and measured warm. Before each sample there is one that is not timed,
    to wake the contender's own helper threads; not so of the slow ones, to which that is nothing.
    After PyTorch's turn there is a pause until its threads sleep, and then a longer sample that is
    not timed, until all cores are awake.
    """
    clock = time.perf_counter
    took, repeats, rounds, slow = {}, {}, {}, set()
    for name, call in calls.items():
        call()  # compiles
        took[name] = _took(call)
        repeats[name] = max(1, round(_SAMPLE / max(took[name], 1e-7)))
        if took[name] > _SLOW:
            slow.add(name)
        fitting = seconds / len(calls) / (took[name] * 2 * repeats[name])
        least = 2 if took[name] > _VERY_SLOW else _LEAST_ROUNDS
        rounds[name] = max(least, min(_MOST_ROUNDS, round(fitting)))
    most = max(rounds.values())
    samples: dict[Any, list[float]] = {name: [] for name in calls}
    for name in slow:  # the first sample of these has been taken
        samples[name].append(took[name])
    previous = None
    for turn in range(1, most + 1):
        for name, call in list(calls.items())[:: 1 if turn % 2 else -1]:
            if turn * rounds[name] // most <= len(samples[name]):
                continue  # a slow one, whose rounds are spread over the others'
            untimed = _SAMPLE
            if previous == "PyTorch" != name[1]:
                time.sleep(_PAUSE)
                untimed = _RISING
            previous = name[1]
            number = repeats[name]
            if name not in slow:
                end = clock() + untimed
                for _ in range(number):  # the first ones may find its arrays in no cache
                    call()
                while clock() < end:
                    call()
            begin = clock()
            for _ in range(number):
                call()
            samples[name].append((clock() - begin) / number)
    return {name: _summary(times) for name, times in samples.items()}


def on_gpu(calls: dict[Any, Callable[[], Any]], seconds: float, flush: Any) -> Times:
    """The same on the GPU's clock, with a cold second-level cache.

    `flush` is an array of several times that cache's size. Filling it takes the GPU longer
    than a call the host, so that no launch is waited for; reading it leaves nothing in the
    cache to be written back.
    """
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()

    def sample(call: Callable[[], Any]) -> float:
        for _ in range(20):
            flush.fill(0)
        flush.max()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) * 1e-3

    for call in calls.values():
        call()
        sample(call)
    started = time.perf_counter()
    samples = {name: [sample(call)] for name, call in calls.items()}
    once = time.perf_counter() - started
    for _ in range(max(_LEAST_ROUNDS, min(_MOST_ROUNDS, round(seconds / once))) - 1):
        for name, call in calls.items():
            samples[name].append(sample(call))
    return {name: _summary(times) for name, times in samples.items()}


def machine(torch: Any) -> dict[str, Any]:
    """What the figures are measured on."""
    text = io.StringIO()
    cunorm.show_config(text)
    described: dict[str, Any] = dict(
        re.split(" {2,}", line, maxsplit=1) for line in text.getvalue().splitlines()
    )
    # Virtual machines call many processors by one name; the compiler knows their generation.
    described["processor"] += f" ({llvmlite.binding.get_host_cpu_name()})"
    described["torch"] = torch.__version__ if torch else "not installed"
    described["torch threads"] = torch.get_num_threads() if torch else 0
    described["cores"] = os.cpu_count()
    described["system"] = platform.platform()
    return described
