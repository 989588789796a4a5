"""What other constants of the GPU's launch plans would do.

    PYTHONPATH=. python benchmarks/plans.py NAME=VALUE[,NAME=VALUE] ... [--only TEXT] [--seconds 1]

Every argument is a variant: numbers in `cunorm/cuda/launch.py` that are others then. All of them
are compiled, in as many processes as there are cores, then timed on the cases of `gpu.py`,
interleaved, with CUDA events and a cold second-level cache. The table has the time of the plans as
they are, and that as a multiple of every variant's: above 1 the variant is faster.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import contenders
import gpu
import run
from shapes import Case

from cunorm import arrays
from cunorm.cuda import launch

Values = dict[str, float]


def values_of(text: str) -> Values:
    """The numbers of a variant, of the types that they have in `launch`."""
    values = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        old = getattr(launch, name, None)
        if type(old) not in (int, float):
            raise argparse.ArgumentTypeError(f"{name!r} is no number in cunorm/cuda/launch.py")
        try:
            values[name] = type(old)(value)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{name}: expected {type(old).__name__}, as {old}, got {value!r}"
            ) from None
    return values


@contextmanager
def planned_with(values: Values) -> Iterator[None]:
    """Plans that are made meanwhile have these numbers."""
    before = {name: getattr(launch, name) for name in values}

    def have(numbers: Values) -> None:
        for name, value in numbers.items():
            setattr(launch, name, value)
        for cached in (launch.plan, launch.sweep, launch.elementwise, launch.adding):
            cached.cache_clear()

    have(values)
    try:
        yield
    finally:
        have(before)


def ratios(
    calls: dict[str, Callable[[], Any]], variants: dict[str, Values], timer: Callable[[Any], Any]
) -> dict[str, list[float]]:
    """By operation, the time of the plans as they are, and it as a multiple of every variant's."""

    def planned(call: Callable[[], Any], values: Values) -> Callable[[], None]:
        def work() -> None:
            with planned_with(values):  # which the host does while the cache is flushed
                call()

        return work

    found = {}
    everything: dict[str, Values] = {"": {}, **variants}
    times = timer(
        {
            (operation, name): planned(call, values)
            for operation, call in calls.items()
            for name, values in everything.items()
        }
    )
    for operation in calls:
        now = times[operation, ""]["median"]
        found[operation] = [now, *(now / times[operation, name]["median"] for name in variants)]
    return found


def compile_variant(work: tuple[Case, Values]) -> None:
    """Call all that cunorm does in a case with a variant's plans, so that kernels lie on disk."""
    case, values = work
    with planned_with(values):
        gpu.compile_kernels(case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("variants", nargs="+", type=values_of, help="NAME=VALUE[,NAME=VALUE]")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--seconds", type=float, default=0.3, help="of measuring a case (0.3)")
    options = parser.parse_args()
    missing = arrays.cuda_missing()
    if missing:
        parser.error(missing)
    import cupy

    variants = {
        ", ".join(f"{name} = {value}" for name, value in values.items()): values
        for values in options.variants
    }
    chosen = [case for case in dict.fromkeys(gpu.CASES) if options.only in str(case)]
    gpu.compile_all(compile_variant, list(product(chosen, ({}, *options.variants))), 300)
    timer = run.gpu_timer(options.seconds)
    print(f"| case | operation | time | {' | '.join(variants)} |")
    print("|---" * (3 + len(variants)) + "|")
    table = []
    for case in chosen:
        calls = {
            operation: call
            for (operation, contender), call in contenders.calls_of(case, cupy, None).items()
            if contender == contenders.OUT
        }
        for operation, (now, *others) in ratios(calls, variants, timer).items():
            table.append(others)
            numbers = " | ".join(f"{ratio:.3f}" for ratio in others)
            print(f"| {case} | {operation} | {now * 1e6:.1f} µs | {numbers} |", flush=True)
        del calls
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
    if table:
        means = [statistics.geometric_mean(column) for column in zip(*table, strict=True)]
        print(f"| geometric mean | | | {' | '.join(f'{mean:.3f}' for mean in means)} |")


if __name__ == "__main__":
    main()
