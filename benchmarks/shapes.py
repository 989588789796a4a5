"""What is measured: one table of cases for all benchmarks."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

__all__ = ["FULL", "QUICK", "Case"]


class Case(NamedTuple):
    """A norm, the shape and dtype of x, and how its statistics and parameters lie on it."""

    norm: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    channel_axis: int = 1  # of the norms that have one
    groups: int = 0  # of group norm
    per_sample: bool = False  # parameters of scale-shift: (N, C) instead of (C,)

    @property
    def of_rows(self) -> bool:
        """Whether the norm takes rows, the last axis, and no channels."""
        return self.norm in ("layer_norm", "rms_norm")

    @property
    def operations(self) -> tuple[str, ...]:
        """What is timed; only batch norm has an inference of its own."""
        if self.norm == "batch_norm":
            return ("forward", "inference", "backward")
        return ("forward", "backward")

    @property
    def elements(self) -> int:
        """Number of elements of x."""
        return prod(self.shape)

    @property
    def parameters_shape(self) -> tuple[int, ...]:
        """Shape of weight and bias."""
        if self.of_rows:
            return self.shape[-1:]
        channels = self.shape[self.channel_axis]
        return (self.shape[0], channels) if self.per_sample else (channels,)

    def __str__(self) -> str:
        name = {"rms_norm": "RMS norm", "scale_shift": "scale-shift"}.get(
            self.norm, self.norm.replace("_", " ")
        )
        name += f", {self.groups} groups" if self.groups else ""
        name += ", (N, C)" if self.per_sample else ""
        last = ", channels last" if self.channel_axis == -1 else ""
        return f"{name} {'×'.join(map(str, self.shape))} {self.dtype}{last}"


#: Arrays that the operation has to read or write at least once.
PASSES = {"forward": 2, "inference": 2, "backward": 3}

DTYPES = ("float32", "float16", "bfloat16")


def _last(case: Case) -> Case:
    """The same with channels last."""
    samples, channels, *spatial = case.shape
    return case._replace(shape=(samples, *spatial, channels), channel_axis=-1)


def _everyway(cases: list[Case]) -> list[Case]:
    """In all dtypes, channels first and last (which are the same where nothing follows)."""
    typed = [case._replace(dtype=dtype) for dtype in DTYPES for case in cases]
    return typed + [_last(case) for case in typed if len(case.shape) > 2]


GRID = [
    Case("batch_norm", (batch, channels, *features))
    for batch in (8, 16, 32, 64, 128)
    for channels in (2, 32, 256, 1024)
    for features in (
        (16,), (32,), (64,), (128,), (256,), (1024,), (10240,), (102400,),
        (32, 32), (64, 64), (128, 128), (32, 32, 32), (64, 64, 64),
    )
    if batch * channels * prod(features) < 100_000_000
]  # fmt: skip

RESNET = [
    Case("batch_norm", shape)
    for shape in (
        (32, 512, 28, 28), (64, 512, 28, 28), (16, 64, 112, 112), (16, 256, 56, 56),
        (64, 1024, 14, 14), (32, 256, 56, 56), (64, 256, 56, 56), (64, 512, 7, 7),
    )
]  # fmt: skip

EXTREME = [
    Case("batch_norm", shape)
    for shape in (
        (1, 2, 6_500_000), (1024, 2, 6500), (16, 1024), (1, 1024, 16), (100_000, 3, 16),
        (100_000, 3), (1, 64, 512, 512), (32, 10, 40_000), (8, 2, 1024, 1024), (8, 16, 4, 4),
    )
]  # fmt: skip

GROUP = [
    Case("group_norm", (128, 256, 28, 28), groups=32),
    Case("group_norm", (128, 512, 7, 7), groups=32),
    Case("group_norm", (64, 512, 14, 14), groups=32),
]

INSTANCE = [Case("instance_norm", (32, 64, 56, 56)), Case("instance_norm", (8, 64, 256, 256))]

ROWS = [
    Case(norm, shape)
    for norm, shapes in (
        ("layer_norm", ((1024, 12288), (16384, 768), (8192, 1024), (2048, 33), (4, 2_000_000))),
        ("rms_norm", ((16384, 4096), (8192, 8192), (131072, 128))),
    )
    for shape in shapes
]

SCALE_SHIFT = [
    Case("scale_shift", (64, 256, 64, 64), per_sample=per_sample) for per_sample in (False, True)
]

#: Too large to measure on a CPU, with all contenders' arrays, but what people measure on a GPU.
HUGE = [
    Case("batch_norm", (4, 128, 1024, 1024), "float16"),
    Case("group_norm", (256, 512, 56, 56), groups=32),
    Case("group_norm", (256, 512, 56, 56), "float16", groups=32),
]

FULL = _everyway(GRID + RESNET + EXTREME + GROUP + INSTANCE + SCALE_SHIFT) + [
    case._replace(dtype=dtype) for dtype in DTYPES for case in ROWS
]

#: A few of each kind.
QUICK = [
    Case("batch_norm", (64, 256, 28, 28)),
    Case("batch_norm", (64, 28, 28, 256), channel_axis=-1),
    Case("batch_norm", (64, 256, 28, 28), "float16"),
    Case("batch_norm", (64, 256, 28, 28), "bfloat16"),
    Case("batch_norm", (64, 28, 28, 256), "bfloat16", channel_axis=-1),
    Case("batch_norm", (16, 64, 112, 112)),
    Case("batch_norm", (64, 1024, 14, 14)),
    Case("batch_norm", (64, 512, 7, 7)),
    Case("batch_norm", (32, 256, 1024)),
    Case("batch_norm", (128, 256, 32)),
    Case("batch_norm", (64, 32, 32, 32)),
    Case("batch_norm", (8, 16, 4, 4)),
    Case("batch_norm", (1, 2, 6_500_000)),
    Case("batch_norm", (16, 1024)),
    Case("batch_norm", (100_000, 3, 16)),
    Case("batch_norm", (32, 10, 40_000)),
    Case("group_norm", (128, 256, 28, 28), groups=32),
    Case("group_norm", (128, 28, 28, 256), channel_axis=-1, groups=32),
    Case("group_norm", (128, 512, 7, 7), groups=32),
    Case("instance_norm", (32, 64, 56, 56)),
    Case("instance_norm", (32, 56, 56, 64), channel_axis=-1),
    Case("layer_norm", (1024, 12288)),
    Case("layer_norm", (1024, 12288), "bfloat16"),
    Case("layer_norm", (16384, 768)),
    Case("rms_norm", (16384, 4096), "bfloat16"),
    Case("rms_norm", (131072, 128), "bfloat16"),
    Case("rms_norm", (131072, 128)),
    Case("scale_shift", (64, 256, 64, 64)),
    Case("scale_shift", (64, 256, 64, 64), per_sample=True),
    Case("scale_shift", (64, 64, 64, 256), channel_axis=-1),
]
