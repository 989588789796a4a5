"""Predicted, not measured: times on GPUs from the launch plans and the bytes they move.

    python benchmarks/predict.py [--output FILE]

The CUDA backend is called with its launches caught, so plans and kernels are those that a GPU
of each kind would get. A kernel takes the bytes it moves at the memory's nominal bandwidth,
and the time of a launch on top:

    time = passes × bytes of x ÷ bandwidth + launches × 3 µs

How often each kernel crosses memory is what the tests count access by access
(tests/test_cuda_traffic.py). PyTorch's passes are read off its kernels' sources.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from contenders import dtype_of
from shapes import HUGE, QUICK, RESNET, Case

from cunorm import geometry
from cunorm.cuda import backward, source, transform
from cunorm.cuda.launch import Device

LAUNCH = 3e-6


class GPU(NamedTuple):
    """A device as plans see it, and its memory's nominal bandwidth in bytes a second."""

    name: str
    device: Device
    bandwidth: float


GPUS = [
    GPU("A100 80 GB", Device(80, 108, 163 << 10, 164 << 10, 40 << 20), 2.04e12),
    GPU("H100 SXM", Device(90, 132, 227 << 10, 228 << 10, 50 << 20), 3.35e12),
    GPU("H200", Device(90, 132, 227 << 10, 228 << 10, 60 << 20), 4.8e12),
    GPU("RTX 4090", Device(89, 128, 99 << 10, 100 << 10, 72 << 20), 1.01e12),
]

#: Arrays of x's size that a kernel reads and writes; the others see statistics only.
PASSES = {
    "moments": 1, "transform": 2, "normalize": 2, "normalize_cached": 2, "normalize_rows": 2,
    "reduce": 2, "input_gradient": 3, "backward": 3, "backward_cached": 3, "backward_rows": 3,
}  # fmt: skip

#: The same of PyTorch's native operators, forward and backward.
TORCH = {
    "batch_norm": (3, 5),
    "instance_norm": (3, 5),
    "group_norm": (3, 5),
    "layer_norm": (2, 5),
    "rms_norm": (2, 5),
    "scale_shift": (4, 7),
}


class Prediction(NamedTuple):
    """What a call launches on a device."""

    passes: int
    launches: int
    seconds: float


def _geometry(case: Case) -> geometry.Geometry:
    axis = case.channel_axis % len(case.shape)
    if case.of_rows:
        return geometry.row_norm_geometry(case.shape, 1)
    if case.norm == "scale_shift":
        return geometry.scale_shift_geometry(case.shape, axis, case.per_sample)
    if case.norm == "batch_norm":
        return geometry.batch_norm_geometry(case.shape, axis)
    return geometry.group_norm_geometry(case.shape, axis, case.groups or case.shape[axis])


@contextmanager
def _caught(device: Device) -> Iterator[list[str]]:
    """Names of the kernels that are launched meanwhile; arrays are NumPy's and stay untouched."""
    names: list[str] = []
    fakes = {
        "array_module": lambda: np,
        "pointer": lambda _: 1 << 20,
        "device": lambda: device,
        "clear": lambda *_: names.append("clear"),
        "launch": lambda _, name, *_rest: names.append(name),
    }
    real = {name: getattr(source, name) for name in fakes}
    try:
        for name, fake in fakes.items():
            setattr(source, name, fake)
        yield names
    finally:
        for name, function in real.items():
            setattr(source, name, function)


def predicted(case: Case, operation: str, gpu: GPU) -> Prediction:
    """What an operation of a case takes on a GPU."""
    lie, dtype = _geometry(case), dtype_of(case)
    x = np.broadcast_to(np.zeros((), dtype), case.shape)  # no memory behind it
    values = np.zeros(lie.parameters, np.float32)
    statistics: Any = np.zeros(lie.statistics, np.float32)
    centered = case.norm != "rms_norm"
    bias = values if centered else None
    with _caught(gpu.device) as names:
        if operation == "backward" and case.norm == "scale_shift":
            backward.backward(x, x, None, None, None, values, False, lie, x, values, values)
        elif operation == "backward":
            backward.backward(
                x, x, statistics if centered else None, None, statistics, values, True, lie, x,
                values, bias,
            )  # fmt: skip
        elif case.norm == "scale_shift":
            transform.transform(x, None, None, None, values, values, lie, x)
        elif operation == "inference":
            transform.infer(x, statistics, statistics, values, values, 1e-5, lie, x)
        else:
            own = (statistics, statistics) if case.norm == "batch_norm" else (None, None)
            transform.normalize(x, values, bias, *own, 1e-5, 1.0, 0.1, lie, x, centered)
    passes = sum(PASSES.get(name, 0) for name in names)
    if case.norm == "scale_shift" and operation == "backward":
        passes += 1  # `reduce` writes dx as well, where nothing depends on the sums
    if "backward_rows" in names and "input_gradient" in names:
        passes -= 1  # the first of two sweeps writes no dx
    seconds = passes * case.elements * dtype.itemsize / gpu.bandwidth + len(names) * LAUNCH
    return Prediction(passes, len(names), seconds)


def table(cases: list[Case]) -> str:
    """Markdown of all operations on all devices."""
    head = ["case", "operation", "PyTorch's passes", *(f"{gpu.name}: µs (passes, launches)"
            for gpu in GPUS)]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for case in cases:
        for operation in case.operations:
            torch = {"forward": TORCH[case.norm][0], "inference": 2}.get(
                operation, TORCH[case.norm][1]
            )
            cells = [str(case), operation, str(torch)]
            for gpu in GPUS:
                p = predicted(case, operation, gpu)
                cells.append(f"{p.seconds * 1e6:.1f} ({p.passes}, {p.launches})")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="a file for the table besides")
    options = parser.parse_args()
    text = (
        "# Predicted times, not measured\n\nFrom the launch plans: passes × bytes of x ÷ nominal "
        "bandwidth + 3 µs a launch.\nPyTorch's passes are read off its sources.\n\n"
    )
    text += table(list(dict.fromkeys(QUICK + RESNET + HUGE))) + "\n"
    if options.output:
        options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
