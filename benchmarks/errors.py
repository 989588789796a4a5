"""How far batch norm is from float64 on hard data: cunorm, PyTorch, plain NumPy.

    python benchmarks/errors.py

Writes docs/images/errors.png and benchmarks/results/errors-<date>.json. All inputs are float32,
and the reference is the definition in float64 of these rounded inputs; an error is the largest
of any element, in units of half the spacing of float32 numbers at the largest element: correctly
rounded results would have at most 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measure import machine

import cunorm

try:
    import torch
except ImportError:
    torch = None

FOLDER = Path(__file__).parent
EPS = 1e-5
AXES = (0, 2)

Result = dict[str, np.ndarray]


class Sweep(NamedTuple):
    """Data that get harder: `make(number, elements)` is (x, dy), of two channels each."""

    title: str
    label: str
    numbers: tuple[float, ...]
    shown: str  # the result whose error is drawn
    make: Callable[[float, int], tuple[np.ndarray, np.ndarray]]


def normal(elements: int) -> tuple[np.ndarray, np.ndarray]:
    """X and dy with mean 0 and standard deviation 1, in 16 samples."""
    rng = np.random.default_rng(20260101)
    x, dy = rng.standard_normal((2, 16, 2, max(1, elements // 16)))
    return x, dy


def _mean(number: float, elements: int) -> tuple[np.ndarray, np.ndarray]:
    x, dy = normal(elements)
    return x + number, dy


def _jump(number: float, elements: int) -> tuple[np.ndarray, np.ndarray]:
    x, dy = normal(elements)
    x[8:] += number
    return x, dy


def _upstream(number: float, elements: int) -> tuple[np.ndarray, np.ndarray]:
    x, dy = normal(elements)
    return x, dy + number


def _long(number: float, _: int) -> tuple[np.ndarray, np.ndarray]:
    x, dy = normal(int(number))
    return x + 1, dy + x


DECADES = tuple(10.0**e for e in np.arange(0, 6.5, 0.5))
LENGTHS = tuple(10.0**e for e in np.arange(2, 7.5, 0.5))

SWEEPS = (
    Sweep("y, large mean", "mean of x ÷ its standard deviation", DECADES, "y", _mean),
    Sweep("dx, large mean", "mean of x ÷ its standard deviation", DECADES, "dx", _mean),
    Sweep("y, jump in the middle of x", "jump ÷ standard deviation", DECADES, "y", _jump),
    Sweep("dx, large mean of dy", "mean of dy ÷ its standard deviation", DECADES, "dx", _upstream),
    Sweep("dweight, long sums", "elements of a channel", LENGTHS, "dweight", _long),
    Sweep("mean, long sums", "elements of a channel", LENGTHS, "mean", _long),
)


def definition(x: np.ndarray, dy: np.ndarray) -> Result:
    """Batch norm and its gradients as they are written, in the dtype of x."""
    mean = x.mean(AXES, keepdims=True)
    inv_std = 1 / np.sqrt(x.var(AXES, keepdims=True) + x.dtype.type(EPS))
    normalized = (x - mean) * inv_std
    dbias = dy.sum(AXES, keepdims=True)
    dweight = (dy * normalized).sum(AXES, keepdims=True)
    count = x.dtype.type(x.size // x.shape[1])
    dx = inv_std * (dy - dbias / count - normalized * (dweight / count))
    return {"y": normalized, "dx": dx, "dweight": dweight.ravel(), "mean": mean.ravel()}


def _cunorm(x: np.ndarray, dy: np.ndarray) -> Result:
    y, saved = cunorm.batch_norm_forward(x, eps=EPS)
    dx, dweight, _ = cunorm.batch_norm_backward(dy, x, saved)
    return {"y": y, "dx": dx, "dweight": dweight, "mean": saved.mean}


def _pytorch(x: np.ndarray, dy: np.ndarray, last: bool) -> Result:
    ordered = torch.from_numpy(x)[..., None]
    if last:
        ordered = ordered.contiguous(memory_format=torch.channels_last)
    weight, bias = torch.ones(2), torch.zeros(2)
    y, mean, inv_std = torch.native_batch_norm(ordered, weight, bias, None, None, True, 0.0, EPS)
    dx, dweight, _ = torch.ops.aten.native_batch_norm_backward(
        torch.from_numpy(dy)[..., None], ordered, weight, None, None, mean, inv_std, True, EPS,
        [True, True, True],
    )  # fmt: skip
    return {
        "y": y[..., 0].numpy(),
        "dx": dx[..., 0].numpy(),
        "dweight": dweight.numpy(),
        "mean": mean.numpy(),
    }


def contenders() -> dict[str, Callable[[np.ndarray, np.ndarray], Result]]:
    """Who computes it."""
    found: dict[str, Any] = {"NumPy, float32": definition}
    if torch is not None:
        version = torch.__version__.partition("+")[0]
        found[f"PyTorch {version}"] = lambda x, dy: _pytorch(x, dy, False)
        found[f"PyTorch {version}, channels last"] = lambda x, dy: _pytorch(x, dy, True)
    return found | {"cunorm": _cunorm}


def error(found: np.ndarray, exact: np.ndarray) -> float:
    """The largest, in half spacings at the largest element; infinite for what is not finite."""
    unit = np.spacing(np.float32(np.abs(exact).max())) / 2
    worst = np.abs(found.astype(np.float64) - exact).max() / unit
    return float(worst) if np.isfinite(worst) else float("inf")


def measured(sweep: Sweep, elements: int) -> Iterator[dict[str, float]]:
    """Errors of all contenders, for each number of a sweep."""
    for number in sweep.numbers:
        x, dy = (a.astype(np.float32) for a in sweep.make(number, elements))
        exact = definition(x.astype(np.float64), dy.astype(np.float64))[sweep.shown]
        yield {name: error(call(x, dy)[sweep.shown], exact) for name, call in contenders().items()}


def plot(errors: dict[str, list[dict[str, float]]], path: Path) -> None:
    """A panel for each sweep."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 11), layout="constrained")
    for axes, sweep in zip(figure.subplots(3, 2).flat, SWEEPS, strict=True):
        found = errors[sweep.title]
        for number, name in enumerate(contenders()):
            own = name == "cunorm"  # below, and wide, where others are as good
            style = {"color": f"C{number}", "lw": 4 if own else 1.5, "zorder": 2 if own else 3}
            axes.plot(sweep.numbers, [e[name] for e in found], label=name, **style)
        axes.axhline(1, color="black", lw=1)
        axes.set(xscale="log", yscale="log", title=sweep.title, xlabel=sweep.label)
        axes.set(ylabel="largest error, roundings of float32")
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--elements", type=int, default=1 << 16, help="of a channel")
    parser.add_argument("--images", type=Path, default=FOLDER.parent / "docs" / "images")
    parser.add_argument("--output", type=Path, default=FOLDER / "results")
    options = parser.parse_args()
    errors = {sweep.title: list(measured(sweep, options.elements)) for sweep in SWEEPS}
    for sweep in SWEEPS:
        print(f"\n{sweep.title} ({sweep.label})")
        for number, found in zip(sweep.numbers, errors[sweep.title], strict=True):
            print(f"{number:12.4g}  " + "  ".join(f"{n}: {e:.3g}" for n, e in found.items()))
    date = datetime.date.today().isoformat()
    content = {
        "machine": machine(torch),
        "date": date,
        "elements": options.elements,
        "errors": [
            {"sweep": s.title, "number": n, **e}
            for s in SWEEPS
            for n, e in zip(s.numbers, errors[s.title], strict=True)
        ],
    }
    path = options.output / f"errors-{date}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    plot(errors, options.images / "errors.png")


if __name__ == "__main__":
    main()
