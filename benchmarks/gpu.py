"""Everything there is to do on a GPU, in one command: tests, sanitizers, measurements.

    python benchmarks/gpu.py [--output FOLDER] [--minutes 9] [--no-tests] [--no-sanitizers]

Runs the test suite on CuPy arrays, a part of it under compute-sanitizer's memcheck and
racecheck, then times all norms beside a copy of the same bytes, CuPy's own expression and,
where it is installed, PyTorch with and without cuDNN, interleaved, with CUDA events and a
cold second-level cache. It needs the `test` extra; compute-sanitizer comes with CUDA.
Whatever is left when the minutes are over is left out, and said so. Results go into FOLDER
(benchmarks/results/) as JSON with the device named, and are printed as a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import timeit
from datetime import UTC, datetime
from pathlib import Path

import norms
import numpy as np

import cunorm
from cunorm import arrays

CHECKOUT = Path(__file__).parent.parent

# Of batch norm: (shape, channel axis, dtype)
CASES = [
    ((64, 256, 56, 56), 1, "float32"),
    ((64, 256, 56, 56), 1, "float16"),
    ((64, 56, 56, 256), -1, "float16"),
    ((32, 512, 28, 28), 1, "float32"),
    ((64, 512, 28, 28), 1, "bfloat16"),
    ((16, 64, 112, 112), 1, "float32"),
    ((64, 1024, 14, 14), 1, "float32"),
    ((64, 14, 14, 1024), -1, "float32"),
    ((64, 512, 7, 7), 1, "float32"),
    ((4, 128, 1024, 1024), 1, "float16"),
    ((8, 2, 1024, 1024), 1, "float32"),
    ((32, 10, 40000), 1, "float32"),
    ((128, 1024), 1, "float32"),
    ((8, 16, 4, 4), 1, "float32"),
]


def contenders(cupy, torch, shape, axis, dtype):
    """{name: call} for one case, each of which does the whole operation."""
    dtype = cunorm.BatchNorm(1, dtype=dtype).weight.dtype
    rng = cupy.random.default_rng(0)
    x, dy = (rng.standard_normal(shape, dtype=cupy.float32).astype(dtype) for _ in range(2))
    number = shape[axis]
    weight, bias = cupy.ones(number, cupy.float32), cupy.zeros(number, cupy.float32)
    mean, var = cupy.zeros(number, cupy.float32), cupy.ones(number, cupy.float32)
    out = cupy.empty_like(x)
    _, saved = cunorm.batch_norm_forward(x, weight, bias, mean, var, channel_axis=axis)

    def forward(out=None, training=True):
        cunorm.batch_norm_forward(
            x, weight, bias, mean, var, channel_axis=axis, training=training, out=out
        )

    def expression():
        axes = tuple(a for a in range(x.ndim) if a != axis % x.ndim)
        wide = x.astype(cupy.float32)
        centered = wide - wide.mean(axes, keepdims=True)
        inv_std = 1 / cupy.sqrt((centered * centered).mean(axes, keepdims=True) + 1e-5)
        return (centered * inv_std).astype(dtype)

    calls = {
        "copy": lambda: cupy.copyto(out, x),
        "forward out=": lambda: forward(out),
        "inference out=": lambda: forward(out, training=False),
        "backward out=": lambda: cunorm.batch_norm_backward(dy, x, saved, weight, out=out),
        "forward": forward,
        "inference": lambda: forward(training=False),
        "backward": lambda: cunorm.batch_norm_backward(dy, x, saved, weight),
        "cupy forward": expression,
    }
    if torch is not None:
        for name, cudnn in (("torch native", False), ("torch cudnn", True)):
            calls |= torch_contenders(torch, name, cudnn, shape, axis, dtype.name)
    return x.nbytes, calls


def torch_contenders(torch, name, cudnn, shape, axis, dtype):
    """PyTorch as its users call it, with or without cuDNN."""
    x, dy = torch.randn(2, *shape, device="cuda", dtype=getattr(torch, dtype)).unbind()
    if axis == -1:  # channels-last memory of an (N, C, H, W) tensor
        x, dy = x.movedim(-1, 1), dy.movedim(-1, 1)
    number = shape[axis]
    weight = torch.ones(number, device="cuda", requires_grad=True)
    bias = torch.zeros(number, device="cuda", requires_grad=True)
    mean, var = torch.zeros(number, device="cuda"), torch.ones(number, device="cuda")
    leaf = x.detach().requires_grad_()

    def forward(training=True):
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=cudnn):
            torch.nn.functional.batch_norm(x, mean, var, weight, bias, training=training)

    with torch.backends.cudnn.flags(enabled=cudnn):
        y = torch.nn.functional.batch_norm(leaf, mean, var, weight, bias, training=True)

    def backward():
        torch.autograd.grad(y, (leaf, weight, bias), dy, retain_graph=True)

    return {
        f"{name} forward": forward,
        f"{name} inference": lambda: forward(training=False),
        f"{name} backward": backward,
    }


def measure(cupy, calls, rounds, flush):
    """Median and quartiles of every call's time in seconds, on the GPU's clock."""
    times = {name: [] for name in calls}
    for call in calls.values():
        call()
        call()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    for _ in range(rounds):
        for name, call in calls.items():
            # Two milliseconds of other work, so that the host gets ahead; it ends with reading,
            # so that nothing is left in the second-level cache to be written back.
            for _ in range(20):
                flush.fill(0)
            flush.max()
            begin.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(cupy.cuda.get_elapsed_time(begin, end) * 1e-3)
    return {
        name: dict(zip(("low", "median", "high"), statistics.quantiles(t, n=4), strict=True))
        for name, t in times.items()
    }


def host_times(cupy, torch):
    """Time that a call of a tiny batch norm keeps the host busy, in seconds."""
    x = cupy.ones((8, 16, 4, 4), cupy.float32)
    weight, bias = cupy.ones(16, cupy.float32), cupy.zeros(16, cupy.float32)
    mean, var = cupy.zeros(16, cupy.float32), cupy.ones(16, cupy.float32)
    _, saved = cunorm.batch_norm_forward(x, weight, bias, mean, var)
    layer = cunorm.BatchNorm(16).to("cuda")
    calls = {
        "forward": lambda: cunorm.batch_norm_forward(x, weight, bias, mean, var),
        "inference": lambda: cunorm.batch_norm_forward(x, weight, bias, mean, var, training=False),
        "backward": lambda: cunorm.batch_norm_backward(x, x, saved, weight),
        "layer forward": lambda: layer(x),
        "cupy empty": lambda: cupy.empty((8, 16, 4, 4), cupy.float32),
    }
    if torch is not None:
        arrays = [torch.from_dlpack(a) for a in (x, mean, var, weight, bias)]
        calls["torch forward"] = lambda: torch.nn.functional.batch_norm(*arrays, training=True)
    times = {}
    for name, call in calls.items():
        call()
        samples = []
        for _ in range(15):
            cupy.cuda.runtime.deviceSynchronize()
            samples.append(timeit.timeit(call, number=200) / 200)
        times[name] = statistics.median(samples)
    return times


def table(results):
    """Time with `out=`, as a multiple of the copy's, and PyTorch's as multiples of ours."""
    lines = [
        "| x | copy | operation | time | × copy | torch native | torch cudnn |",
        "|---" * 7 + "|",
    ]
    for result in results:
        times = {name: t["median"] for name, t in result["times"].items()}
        case = f"{'×'.join(map(str, result['shape']))} {result['dtype']}"
        case += ", channels last" if result["channel_axis"] == -1 else ""
        for operation in ("forward", "inference", "backward"):
            ours = times[f"{operation} out="]
            rivals = [
                f"{times[name] / times[operation]:.2f}" if (name := f"{r} {operation}") in times
                else ""
                for r in ("torch native", "torch cudnn")
            ]  # fmt: skip
            cells = [case, f"{times['copy'] * 1e6:.1f} µs", operation, f"{ours * 1e6:.1f} µs",
                     f"{ours / times['copy']:.2f}", *rivals]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def norms_table(results):
    """The same for the other norms."""
    lines = ["| norm | x | copy | operation | time | × copy | torch |", "|---" * 7 + "|"]
    for result in results:
        times = {name: t["median"] for name, t in result["times"].items()}
        for operation in ("forward", "backward"):
            ours, rival = times[f"{operation} out="], times.get(f"torch {operation}")
            cells = [str(norms.Case(**result["case"])), f"{times['copy'] * 1e6:.1f} µs", operation,
                     f"{ours * 1e6:.1f} µs", f"{ours / times['copy']:.2f}",
                     f"{rival / times[operation]:.2f}" if rival else ""]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def run(command, log, seconds):
    """Exit status of a command whose output goes to a file; the end of it is printed."""
    if seconds < 5:
        return "left out: no time"
    with log.open("w") as file:
        try:
            status = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, cwd=CHECKOUT
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"stopped after {seconds:.0f} s"
    print(f"$ {' '.join(map(str, command))}\n" + "\n".join(log.read_text().splitlines()[-12:]))
    return status


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    results_folder = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results_folder, help="folder for results")
    parser.add_argument("--minutes", type=float, default=9, help="after which no more is begun (9)")
    parser.add_argument("--rounds", type=int, default=31, help="measurements of each call (31)")
    parser.add_argument("--no-tests", action="store_true", help="leave out the test suite")
    parser.add_argument("--no-sanitizers", action="store_true", help="and compute-sanitizer")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    missing = arrays.cuda_missing()
    if missing:
        parser.error(missing)
    import cupy

    try:
        import torch
    except ImportError:
        torch = None

    options.output.mkdir(parents=True, exist_ok=True)
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    now = datetime.now(UTC)
    record = {
        "date": now.isoformat(timespec="seconds"),
        "device": properties["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "versions": {
            "cunorm": cunorm.__version__,
            "cupy": cupy.__version__,
            "numpy": np.__version__,
            "torch": torch.__version__ if torch else None,
        },
        "status": {},
    }
    pytest = [sys.executable, "-m", "pytest", "-q", "--backend", "gpu"]

    def left():
        return deadline - time.monotonic()

    if not options.no_tests:
        record["status"]["tests"] = run(
            [*pytest, "--maxfail", "20"], options.output / "tests.log", left() / 2
        )
    sanitizer = shutil.which("compute-sanitizer")
    if not options.no_sanitizers:
        os.environ["CUNORM_TEST_WITHOUT_POOL"] = "1"  # or overruns would stay within the pool
        for tool in ("memcheck", "racecheck"):
            if sanitizer is None:
                record["status"][tool] = "left out: no compute-sanitizer found"
                continue
            record["status"][tool] = run(
                [sanitizer, "--tool", tool, "--error-exitcode", "9", *pytest,
                 "tests/test_cuda_kernels.py", "-k", "test_candidate and float32"],
                options.output / f"{tool}.log", min(left() / 3, 120),
            )  # fmt: skip
    flush = cupy.empty(4 * properties["l2CacheSize"], cupy.uint8)
    results = record["results"] = []
    for shape, axis, dtype in CASES:
        if left() < 10:
            record["status"]["measurements"] = f"left out from {shape} {dtype} on: no time"
            break
        nbytes, calls = contenders(cupy, torch, shape, axis, dtype)
        times = measure(cupy, calls, options.rounds, flush)
        results.append(
            {"shape": shape, "channel_axis": axis, "dtype": dtype, "bytes": nbytes, "times": times}
        )
        calls.clear()
        cupy.get_default_memory_pool().free_all_blocks()
    others = record["other norms"] = []
    for case in norms.GPU_CASES:
        if left() < 10:
            record["status"]["other norms"] = f"left out from {case} on: no time"
            break
        nbytes, calls = norms.contenders(cupy, case)
        if torch is not None:
            calls |= norms.torch_contenders(torch, case, "cuda", "torch")
        times = measure(cupy, calls, options.rounds, flush)
        others.append({"case": case._asdict(), "bytes": nbytes, "times": times})
        calls.clear()
        cupy.get_default_memory_pool().free_all_blocks()
    record["host"] = host_times(cupy, torch)
    record["unit"] = "s"
    name = record["device"].replace(" ", "-").lower()
    path = options.output / f"gpu-{name}-{now:%Y-%m-%d-%H%M}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(table(results), norms_table(others), sep="\n\n")
    print("\nhost:", ", ".join(f"{n} {t * 1e6:.1f} µs" for n, t in record["host"].items()))
    print(f"status: {record['status']}\nfull figures in {path}", flush=True)
    sys.exit(0 if all(s == 0 for s in record["status"].values()) else 1)


if __name__ == "__main__":
    main()
