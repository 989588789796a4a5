"""Everything there is to do on a GPU, in one command: tests, sanitizers, measurements.

    PYTHONPATH=. python benchmarks/gpu.py [--output FOLDER] [--minutes 9] [--only TEXT] [--full]
                                          [--no-tests] [--no-sanitizers]

Runs the test suite on CuPy arrays, in as many processes as there are cores, and at the same time a
part of it under compute-sanitizer's memcheck and racecheck, then times all norms beside a copy of
the same bytes, CuPy's own expression and, where they are installed, PyTorch with and without cuDNN
and cuDNN's front end, interleaved, with CUDA events and a cold second-level cache. It needs the
`test` extra; compute-sanitizer comes with CUDA.
Whatever is left when the minutes are over is left out, and said so. Results go into FOLDER
(benchmarks/results/) as JSON with the device named, and are printed as a Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import timeit
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import contenders
import measure
import run
from shapes import FULL, HUGE, QUICK, RESNET, Case

import cunorm
from cunorm import arrays

CHECKOUT = Path(__file__).parent.parent

#: In this order, until the time is over.
CASES = [
    Case("batch_norm", (4, 128, 1024, 1024), "float16"),
    Case("rms_norm", (16384, 4096), "bfloat16"),
    Case("rms_norm", (8192, 8192), "bfloat16"),
    Case("rms_norm", (131072, 128), "bfloat16"),
    Case("layer_norm", (1024, 12288), "bfloat16"),
    Case("batch_norm", (64, 256, 56, 56), "float16"),
    Case("batch_norm", (64, 56, 56, 256), "float16", -1),
    *RESNET,
    *QUICK,
    *HUGE,
]


# Cases of so many elements are not compiled before, several at a time: they need the memory.
_HUGE_FROM = 1 << 28


def host_times(cupy, torch):
    """Time that calls of tiny norms keep the host busy, in seconds.

    So few calls in a row that the GPU's queue has room for all.
    """
    x = cupy.ones((8, 16, 4, 4), cupy.float32)
    weight, bias = cupy.ones(16, cupy.float32), cupy.zeros(16, cupy.float32)
    mean, var = cupy.zeros(16, cupy.float32), cupy.ones(16, cupy.float32)
    _, saved = cunorm.batch_norm_forward(x, weight, bias, mean, var)
    layer = cunorm.BatchNorm(16).to("cuda")
    _, of_rows = cunorm.layer_norm_forward(x, axis=1)
    calls = {
        "forward": lambda: cunorm.batch_norm_forward(x, weight, bias, mean, var),
        "inference": lambda: cunorm.batch_norm_forward(x, weight, bias, mean, var, training=False),
        "backward": lambda: cunorm.batch_norm_backward(x, x, saved, weight),
        "layer forward": lambda: layer(x),
        "layer norm forward": lambda: cunorm.layer_norm_forward(x, axis=1),
        "layer norm backward": lambda: cunorm.layer_norm_backward(x, x, of_rows),
        "scale-shift forward": lambda: cunorm.scale_shift_forward(x, weight, bias),
        "cupy empty": lambda: cupy.empty((8, 16, 4, 4), cupy.float32),
    }
    if torch is not None:
        arrays = [torch.from_dlpack(a) for a in (x, mean, var, weight, bias)]
        calls["torch forward"] = lambda: torch.nn.functional.batch_norm(*arrays, training=True)
    times = {}
    for name, call in calls.items():
        call()
        samples = []
        for _ in range(60):
            cupy.cuda.runtime.deviceSynchronize()
            samples.append(timeit.timeit(call, number=40) / 40)
        times[name] = statistics.median(samples)
    return times


def compile_kernels(case):
    """Call all that cunorm does in a case, but a huge one, so that its kernels lie on disk."""
    import cupy

    if case.elements >= _HUGE_FROM:
        return
    for name, call in contenders.calls_of(case, cupy, None).items():
        if name[1] == contenders.OUT:
            call()
    cupy.cuda.runtime.deviceSynchronize()


def compile_all(work, items, seconds):
    """Do work that compiles kernels, in as many processes as there are cores.

    NVRTC compiles for one thread of a process at a time.
    """
    pool = ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))
    try:
        list(pool.map(work, items, timeout=seconds))
    except BaseException:
        for process in multiprocessing.active_children():  # they would go on beside what comes
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def execute(commands, folder, seconds):
    """Exit statuses of commands by name, that run side by side.

    What they print goes to files in a folder; the ends of these are printed.
    """
    deadline = time.monotonic() + seconds
    processes, statuses = {}, {}
    try:
        for name, command in commands.items():
            with (folder / f"{name}.log").open("w") as file:
                processes[name] = subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, cwd=CHECKOUT,
                    start_new_session=True,
                )  # fmt: skip
        for name, process in processes.items():
            try:
                statuses[name] = process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                statuses[name] = f"stopped after {seconds:.0f} s"
    finally:
        for process in processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its children use the GPU, too
                process.wait()
    for name, command in commands.items():
        lines = (folder / f"{name}.log").read_text(errors="replace").splitlines()[-12:]
        print(f"$ {' '.join(map(str, command))}\n" + "\n".join(lines), flush=True)
    return statuses


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    results_folder = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results_folder, help="folder for results")
    parser.add_argument("--minutes", type=float, default=9, help="after which no more is begun (9)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of measuring a case (0.5)")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--full", action="store_true", help="all cases, not a selection")
    parser.add_argument("--compiled", action="store_true", help="torch.compile too, which is slow")
    parser.add_argument("--no-tests", action="store_true", help="leave out the test suite")
    parser.add_argument("--no-sanitizers", action="store_true", help="and compute-sanitizer")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    missing = arrays.cuda_missing()
    if missing:
        parser.error(missing)
    import cupy

    now = datetime.now(UTC)
    record = {
        "date": now.isoformat(timespec="seconds"),
        "backend": "gpu",
        "device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "machine": measure.machine(run.torch),
        "unit": "s",
        "status": {},
        "results": [],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    # pytest-benchmark, where it is installed, warns under xdist, and warnings are errors.
    # One that hangs in the driver is ended by a thread, and named.
    pytest = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "--backend", "gpu",
        "--timeout", "240", "--timeout-method", "thread",
    ]  # fmt: skip
    name = f"{now:%Y-%m-%d-%H%M}"

    def left():
        return deadline - time.monotonic()

    def keep():
        """Write what there is so far; the file."""
        return run.write(record, options.output, f"{name}-unfinished").with_suffix(".json")

    def attempt(what, work, *arguments):
        """The result of some work; an error is put down, for the rest is still worth having."""
        try:
            return work(*arguments)
        except Exception as error:
            record["status"][what] = repr(error)
            return None
        finally:
            keep()

    commands = {}
    if not options.no_tests:
        commands["tests"] = [*pytest, "-n", "auto", "--dist", "worksteal", "--maxfail", "200"]
    sanitizer = shutil.which("compute-sanitizer")
    if not options.no_sanitizers and sanitizer is None:
        record["status"]["sanitizers"] = "left out: no compute-sanitizer found"
    elif not options.no_sanitizers:
        for tool, dtype in ("memcheck", "float32"), ("racecheck", "float16"):
            commands[tool] = [
                # Or overruns would stay within the pool.
                "env", "CUNORM_TEST_WITHOUT_POOL=1",
                sanitizer, "--tool", tool, "--error-exitcode", "9", *pytest,
                "tests/test_cuda_kernels.py", "-k", f"test_candidate and {dtype}",
            ]  # fmt: skip
    record["status"] |= execute(commands, options.output, 2 * left() / 3)
    chosen = [*CASES, *FULL] if options.full else CASES
    chosen = [case for case in dict.fromkeys(chosen) if options.only in str(case)]
    keep()
    print(f"status: {record['status']}", flush=True)
    begin = time.monotonic()
    if left() > 45:
        attempt("compiling", compile_all, compile_kernels, chosen, left() - 30)
    else:
        record["status"]["compiling"] = "left out: no time"
    print(f"kernels of {len(chosen)} cases: {time.monotonic() - begin:.0f} s", flush=True)
    record["host"] = attempt("host", host_times, cupy, run.torch) or {}
    timer = run.gpu_timer(options.seconds)
    for case in chosen:
        if left() < 15:
            record["status"]["measurements"] = f"left out from {case} on: no time"
            break
        result = attempt(str(case), run.result_of, case, cupy, timer, options.compiled)
        if result is not None:
            record["results"].append(result)
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
        if run.torch is not None:
            run.torch.cuda.empty_cache()
    print("host:", ", ".join(f"{n} {t * 1e6:.1f} µs" for n, t in record["host"].items()))
    print(f"status: {record['status']}", flush=True)
    run.save(record, options.output, name)
    keep().unlink()
    sys.exit(0 if all(status == 0 for status in record["status"].values()) else 1)


if __name__ == "__main__":
    main()
