"""What bounds the kernels on a GPU: its counters, by Nsight Compute.

    PYTHONPATH=. python benchmarks/counters.py [--only TEXT] [--output FOLDER]

Runs each operation of the first cases of `gpu.py`, or of those whose names contain TEXT, under
`ncu`, which comes with CUDA. FOLDER (benchmarks/results/) gets what it says of every kernel
(counters.txt) and the samples of each of its instructions, by what they waited for
(counters-source.csv).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import contenders
import gpu

MOST_CASES = 9

SECTIONS = (
    "SpeedOfLight", "MemoryWorkloadAnalysis", "SchedulerStats", "WarpStateStats", "SourceCounters",
    "LaunchStats", "Occupancy", "InstructionStats",
)  # fmt: skip


def call_all(only: str) -> None:
    """Call each operation of the chosen cases once where counters are read, and once before."""
    import cupy

    chosen = [case for case in dict.fromkeys(gpu.CASES) if only in str(case)]
    for case in chosen[:MOST_CASES]:
        for (operation, contender), call in contenders.calls_of(case, cupy, None).items():
            if contender != contenders.OUT:
                continue
            call()
            cupy.cuda.runtime.deviceSynchronize()
            print(f"{case}, {operation}", flush=True)
            cupy.cuda.profiler.start()
            call()
            cupy.cuda.runtime.deviceSynchronize()
            cupy.cuda.profiler.stop()


def commands(ncu: str, only: str, report: Path) -> dict[str, list[str]]:
    """What to run, and the files that get what it prints."""
    this = [sys.executable, __file__, "--only", only, "--call"]
    sections = [word for section in SECTIONS for word in ("--section", section)]
    leave = ["--clock-control", "none", "--profile-from-start", "off"]
    read = [ncu, "--import", f"{report}.ncu-rep"]
    return {
        "counters-calls.txt": [ncu, *leave, *sections, "-f", "-o", str(report), *this],
        "counters.txt": [*read, "--page", "details"],
        "counters-source.csv": [*read, "--page", "source", "--csv"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    folder = Path(__file__).parent / "results"
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--output", type=Path, default=folder, help="folder for results")
    parser.add_argument("--call", action="store_true", help=argparse.SUPPRESS)  # under ncu
    options = parser.parse_args()
    if options.call:
        call_all(options.only)
        return
    ncu = shutil.which("ncu")
    if ncu is None:
        parser.error("no ncu found: it comes with CUDA, as Nsight Compute")
    options.output.mkdir(parents=True, exist_ok=True)
    report = options.output / "counters"
    for name, command in commands(ncu, options.only, report).items():
        path = options.output / name
        with path.open("w") as file:
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
        print(f"{path}: {path.stat().st_size} bytes")
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{path.read_text()[-2000:]}")


if __name__ == "__main__":
    main()
