"""All norms on the CPU beside a copy of the same array, NumPy and PyTorch, in one run.

Every case is measured round by round: in each round every contender runs once, so that
a busy neighbour disturbs all of them alike. It runs once untimed before, because OpenMP's
threads (PyTorch's) spin on a core for a while after their work. The medians go into a
table and, as JSON with the machine described, into benchmarks/results/.

    python benchmarks/cpu.py [--rounds 21] [--no-save] [--only NORM]

Arrays of 32 MB and more do not fit the caches, so every call finds them cold; smaller
ones are called many times over and measured warm. "passes" are the fewest times an array
of x's size must cross memory: 2 forward (read x, write y), 3 backward.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import re
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import norms
import numpy as np
from tqdm import tqdm

import cunorm

try:
    import torch
except ImportError:
    torch = None

# Of batch norm: (shape, channel axis, dtype)
CASES = [
    ((64, 256, 28, 28), 1, "float32"),
    ((64, 28, 28, 256), -1, "float32"),
    ((16, 64, 112, 112), 1, "float32"),
    ((64, 1024, 14, 14), 1, "float32"),
    ((64, 512, 7, 7), 1, "float32"),
    ((8, 16, 4, 4), 1, "float32"),
    ((64, 256, 28, 28), 1, "float16"),
    ((64, 256, 28, 28), 1, "bfloat16"),
]


def numpy_forward(x, weight, bias, axis):
    """As one would write it, for float32 and channels at `axis`."""
    axes = tuple(a for a in range(x.ndim) if a != axis % x.ndim)
    shape = [1] * x.ndim
    shape[axis] = -1
    mean = x.mean(axes, keepdims=True)
    inv_std = 1 / np.sqrt(x.var(axes, keepdims=True) + 1e-5)
    return (x - mean) * inv_std * weight.reshape(shape) + bias.reshape(shape)


def contenders(shape, axis, dtype):
    """{name: call} for one case; every call does the whole operation."""
    rng = np.random.default_rng(0)
    dtype = cunorm.BatchNorm(1, dtype=dtype).weight.dtype
    x, dy = (rng.standard_normal(shape, dtype=np.float32).astype(dtype) for _ in range(2))
    number = shape[axis]
    weight, bias, mean = rng.standard_normal((3, number)).astype(np.float32)
    var = np.ones(number, np.float32)
    out = np.zeros_like(x)
    _, saved = cunorm.batch_norm_forward(x, weight, bias, mean, var, channel_axis=axis)

    def forward(out=None, training=True):
        cunorm.batch_norm_forward(
            x, weight, bias, mean, var, channel_axis=axis, training=training, out=out
        )

    calls = {
        "copy": lambda: np.copyto(out, x),
        "forward out=": lambda: forward(out),
        "inference out=": lambda: forward(out, training=False),
        "backward out=": lambda: cunorm.batch_norm_backward(dy, x, saved, weight, out=out),
        "forward": forward,
        "inference": lambda: forward(training=False),
        "backward": lambda: cunorm.batch_norm_backward(dy, x, saved, weight),
    }
    if dtype == np.float32:
        calls["numpy forward"] = lambda: numpy_forward(x, weight, bias, axis)
    if torch is not None:
        calls |= torch_contenders(x, dy, weight, bias, axis)
    return x.nbytes, calls


def torch_contenders(x, dy, weight, bias, axis):
    """PyTorch as its users call it: F.batch_norm, and backward through autograd's operator."""
    kind = getattr(torch, x.dtype.name)
    x, dy = (torch.from_numpy(a.astype(np.float32)).to(kind) for a in (x, dy))
    if axis == -1:  # channels-last memory of an (N, C, H, W) tensor
        x, dy = x.movedim(-1, 1), dy.movedim(-1, 1)
    weight, bias = torch.from_numpy(weight).clone(), torch.from_numpy(bias).clone()
    mean, var = torch.zeros_like(weight), torch.ones_like(weight)
    weight.requires_grad_()
    bias.requires_grad_()
    leaf = x.detach().requires_grad_()
    y = torch.nn.functional.batch_norm(leaf, mean, var, weight, bias, training=True)

    def forward(training=True):
        with torch.no_grad():
            torch.nn.functional.batch_norm(x, mean, var, weight, bias, training=training)

    def backward():
        torch.autograd.grad(y, (leaf, weight, bias), dy, retain_graph=True)

    return {
        "torch forward": forward,
        "torch inference": lambda: forward(training=False),
        "torch backward": backward,
    }


def measure(calls, nbytes, rounds):
    """Median and quartiles of every call's time in seconds."""
    repeats = max(1, min(1000, (4 << 20) // max(nbytes, 1)))
    times = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            call()  # meanwhile the threads of the contender before go to sleep
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            times[name].append((time.perf_counter() - begin) / repeats)
    return {
        name: dict(zip(("low", "median", "high"), statistics.quantiles(t, n=4), strict=True))
        for name, t in times.items()
    }


def machine():
    """What the figures were measured on."""
    text = io.StringIO()
    cunorm.show_config(text)
    described = dict(re.split(" {2,}", line, maxsplit=1) for line in text.getvalue().splitlines())
    described["torch"] = torch.__version__ if torch else "not installed"
    described["torch threads"] = torch.get_num_threads() if torch else 0
    described["cores"] = os.cpu_count()
    described["system"] = platform.platform()
    return described


def table(results):
    """Markdown: time with `out=`, as a multiple of the copy's, and PyTorch's as one of ours.

    PyTorch is compared with calls that allocate their outputs, as its own do.
    """
    lines = [
        "| x | copy of x | forward | inference | backward |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        times = {name: t["median"] for name, t in result["times"].items()}
        case = f"{'×'.join(map(str, result['shape']))} {result['dtype']}"
        if result["channel_axis"] == -1:
            case += ", channels last"
        cells = [case, shown(times["copy"])]
        for operation in ("forward", "inference", "backward"):
            ours, rival = times[f"{operation} out="], times.get(f"torch {operation}")
            ratio = f"; {rival / times[operation]:.1f}" if rival else ""
            cells.append(f"{shown(ours)} ({ours / times['copy']:.2f}{ratio})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def norms_table(results):
    """The same for the other norms, which have no inference of their own."""
    lines = ["| norm | x | copy of x | forward | backward |", "|---|---|---|---|---|"]
    for result in results:
        times = {name: t["median"] for name, t in result["times"].items()}
        cells = [str(norms.Case(**result["case"])), shown(times["copy"])]
        for operation in ("forward", "backward"):
            ours, rival = times[f"{operation} out="], times.get(f"torch {operation}")
            ratio = f"; {rival / times[operation]:.1f}" if rival else ""
            cells.append(f"{shown(ours)} ({ours / times['copy']:.2f}{ratio})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(seconds):
    """A time in the unit that suits it."""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} µs"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--no-save", action="store_true", help="print the table only")
    parser.add_argument("--only", default="", help="of the norms whose names contain this")
    options = parser.parse_args()
    results, others = [], []
    for shape, axis, dtype in tqdm(CASES if options.only in "batch_norm" else [], unit="case"):
        nbytes, calls = contenders(shape, axis, dtype)
        times = measure(calls, nbytes, options.rounds)
        results.append(
            {"shape": shape, "channel_axis": axis, "dtype": dtype, "bytes": nbytes, "times": times}
        )
    for case in tqdm([c for c in norms.CPU_CASES if options.only in c.norm], unit="case"):
        nbytes, calls = norms.contenders(np, case)
        if torch is not None:
            calls |= norms.torch_contenders(torch, case, "cpu", "torch")
        times = measure(calls, nbytes, options.rounds)
        others.append({"case": case._asdict(), "bytes": nbytes, "times": times})
    print(table(results), norms_table(others), sep="\n\n")
    if not options.no_save:
        now = datetime.now(UTC)
        record = {"date": now.isoformat(timespec="seconds"), "machine": machine(), "unit": "s"}
        record |= {"results": results, "other norms": others}
        path = Path(__file__).parent / "results" / f"cpu-{now:%Y-%m-%d}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"\nfull figures in {path}")


if __name__ == "__main__":
    main()
