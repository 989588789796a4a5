"""The benchmark: all norms beside a copy of the same bytes, plain code and other libraries.

    python benchmarks/run.py [--full] [--gpu] [--only TEXT] [--seconds 0.25] [--compiled]
                             [--output FOLDER] [--save-baseline]

In one run, interleaved, on NumPy's arrays or with --gpu on CuPy's. The table goes to standard
output and, with JSON, a Markdown file and two plots, into FOLDER (benchmarks/results/). What is
slower beside the copy than in benchmarks/baseline.json, where that is of the same processor, is
measured once more, and named at the end if it is slower again. What has been measured is written
after every case, as unfinished, and Ctrl-C ends with what there is.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import contenders
import measure
import numpy as np
import report
from shapes import FULL, HUGE, QUICK, Case
from tqdm import tqdm

try:
    import torch
except ImportError:
    torch = None

HERE = Path(__file__).parent
BASELINE = HERE / "baseline.json"

#: What no cache that a process has for itself holds.
LARGE = {"cpu": 32 << 20, "gpu": 64 << 20}


#: Processes that compile; each has arrays of the largest cases.
MOST_COMPILERS = 4


def compile_all(cases: list[Case]) -> None:
    """Compile the kernels of all cases on several cores: those that measure find them on disk."""
    alike = defaultdict(list)  # cases that have kernels in common
    for case in cases:
        alike[case.norm, case.dtype, case.channel_axis].append(case)
    longest_first = sorted(alike.values(), key=len, reverse=True)
    number = min(MOST_COMPILERS, os.cpu_count() or 1, max(1, len(alike)))
    ignoring = signal.signal, (signal.SIGINT, signal.SIG_IGN)  # that is for this process
    with multiprocessing.get_context("spawn").Pool(number, *ignoring) as pool:
        compiled = pool.imap_unordered(contenders.compile_kernels, longest_first)
        for _ in tqdm(compiled, "compiling", len(alike), unit="kind"):
            pass


def result_of(
    case: Case, xp: Any, timer: Callable[[Any], Any], compiled: bool = False
) -> dict[str, Any]:
    """One case measured, as it is in the JSON."""
    calls = contenders.calls_of(case, xp, torch, compiled)
    times = timer(calls)
    operations: dict[str, Any] = {operation: {} for operation in case.operations}
    for (operation, contender), summary in times.items():
        if operation in operations:
            operations[operation][contender] = summary
    return {
        "case": case._asdict(),
        "bytes": case.elements * contenders.dtype_of(case).itemsize,
        "copy": times[contenders.COPY],
        "operations": operations,
    }


def gpu_timer(seconds: float) -> Callable[[Any], Any]:
    """Times calls on the current GPU."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    flush = cupy.empty(4 * properties["l2CacheSize"], cupy.uint8)
    return lambda calls: measure.on_gpu(calls, seconds, flush)


def write(record: dict[str, Any], folder: Path, name: str) -> Path:
    """Write the record; the path of its file, which names the device, without the suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    device = re.sub(r"\W+", "-", record["device"]).strip("-").lower()
    path = folder / f"{record['backend']}-{device}-{name}"
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    return path


def save(record: dict[str, Any], folder: Path, name: str) -> list[report.Row]:
    """Write the record, its table and plots, and print what there is to see."""
    path = write(record, folder, name)
    found = report.rows(record["results"])
    table, short = report.markdown(found), report.summary(found, LARGE[record["backend"]])
    machine = record["machine"]
    title = f"cunorm {machine['cunorm']} on {record['device']}, {record['date'][:10]}"
    path.with_suffix(".md").write_text(f"# {title}\n\n{short}\n\n{table}\n")
    report.plot(found, title, path)
    print(f"{table}\n\n{short}\n\nfull figures: {path}.json, .md, -copy.png, -rivals.png")
    return found


def compare(
    record: dict[str, Any], found: list[report.Row], again: Callable[[Case], dict[str, Any]]
) -> None:
    """Name what got slower than the baseline, in this run and in a second one of these cases."""
    if not BASELINE.exists():
        print(f"no {BASELINE.name} to compare with")
        return
    baseline = json.loads(BASELINE.read_text())
    if baseline["device"] != record["device"]:
        print(f"{BASELINE.name} is of another processor, {baseline['device']}: not compared")
        return
    before = report.rows(baseline["results"])
    once = report.regressions(found, before)
    twice = report.rows([again(case) for case in dict.fromkeys(row.case for row, _ in once)])
    confirmed = {(row.case, row.operation) for row, _ in report.regressions(twice, before)}
    slower = [text for row, text in once if (row.case, row.operation) in confirmed]
    print("\n".join(["slower than the baseline:", *slower]) if slower else "nothing got slower")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="all cases instead of a few of each")
    parser.add_argument("--gpu", action="store_true", help="on CuPy arrays")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--seconds", type=float, default=0.25, help="of measuring a case (0.25)")
    parser.add_argument("--compiled", action="store_true", help="torch.compile too, on a GPU")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder for results")
    parser.add_argument("--save-baseline", action="store_true", help=f"as {BASELINE.name} as well")
    options = parser.parse_args()
    cases = QUICK if not options.full else FULL + HUGE if options.gpu else FULL
    chosen = [case for case in cases if options.only in str(case)]
    if not chosen:
        parser.error(f"--only: no case has {options.only!r} in its name")
    described = measure.machine(torch)
    if options.gpu:
        import cupy as xp

        timer = gpu_timer(options.seconds)
        device = xp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    else:
        xp, device = np, described["processor"]

        def timer(calls: Any) -> Any:
            return measure.on_cpu(calls, options.seconds)

    now = datetime.now(UTC)
    record: dict[str, Any] = {
        "date": now.isoformat(timespec="seconds"),
        "backend": "gpu" if options.gpu else "cpu",
        "device": device,
        "machine": described,
        "unit": "s",
        "results": [],
    }
    name = f"{now:%Y-%m-%d}{'-full' if options.full else ''}"
    began = time.monotonic()
    progress = tqdm(chosen, unit="case")
    try:
        if not options.gpu:  # nor for all cases, of which most compile nothing
            compile_all([case for case in chosen if case in QUICK])
        for case in progress:
            progress.set_postfix_str(str(case))
            record["results"].append(result_of(case, xp, timer, options.compiled))
            unfinished = write(record, options.output, f"{name}-unfinished")
            gc.collect()  # the arrays of a case go before those of the next come
            if options.gpu:
                xp.get_default_memory_pool().free_all_blocks()
    except KeyboardInterrupt:
        measured = len(record["results"])
        if measured:
            save(record, options.output, f"{name}-unfinished")
        sys.exit(f"interrupted after {measured} of {len(chosen)} cases: no baseline looked at")
    found = save(record, options.output, name)
    unfinished.with_suffix(".json").unlink()
    print(f"{len(chosen)} cases in {time.monotonic() - began:.0f} s")
    compare(record, found, lambda case: result_of(case, xp, timer))
    if options.save_baseline:
        BASELINE.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
