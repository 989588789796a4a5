"""What the benchmarks of both processors measure of the norms other than batch norm."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import cunorm


class Case(NamedTuple):
    """A norm, the shape and dtype of x, and the forward function's arguments."""

    norm: str
    shape: tuple[int, ...]
    dtype: str
    number: int = 0  # of groups
    channel_axis: int = 1
    per_sample: bool = False

    def __str__(self) -> str:
        name = {"rms_norm": "RMS norm", "scale_shift": "scale-shift"}.get(
            self.norm, self.norm.replace("_", " ")
        )
        name += f", {self.number} groups" if self.number else ""
        name += ", (N, C)" if self.per_sample else ""
        name += ", channels last" if self.channel_axis == -1 else ""
        return f"{name} | {'×'.join(map(str, self.shape))} {self.dtype}"


CPU_CASES = [
    Case("group_norm", (128, 256, 28, 28), "float32", 32),
    Case("group_norm", (128, 28, 28, 256), "float32", 32, -1),
    Case("group_norm", (128, 512, 7, 7), "float32", 32),
    Case("instance_norm", (32, 64, 56, 56), "float32"),
    Case("instance_norm", (32, 56, 56, 64), "float32", channel_axis=-1),
    Case("layer_norm", (1024, 12288), "float32"),
    Case("layer_norm", (1024, 12288), "bfloat16"),
    Case("layer_norm", (16384, 768), "float32"),
    Case("rms_norm", (16384, 4096), "bfloat16"),
    Case("rms_norm", (8192, 8192), "bfloat16"),
    Case("rms_norm", (131072, 128), "bfloat16"),
    Case("rms_norm", (131072, 128), "float32"),
    Case("scale_shift", (64, 256, 64, 64), "float32"),
    Case("scale_shift", (64, 256, 64, 64), "float32", per_sample=True),
    Case("scale_shift", (64, 64, 64, 256), "float32", channel_axis=-1),
]

GPU_CASES = [
    Case("group_norm", (256, 512, 56, 56), "float16", 32),
    Case("group_norm", (128, 256, 28, 28), "float32", 32),
    Case("group_norm", (128, 28, 28, 256), "float16", 32, -1),
    Case("instance_norm", (32, 64, 128, 128), "float32"),
    Case("layer_norm", (1024, 12288), "bfloat16"),
    Case("rms_norm", (16384, 4096), "bfloat16"),
    Case("rms_norm", (8192, 8192), "bfloat16"),
    Case("rms_norm", (131072, 128), "bfloat16"),
    Case("scale_shift", (64, 256, 64, 64), "float32"),
    Case("scale_shift", (64, 256, 64, 64), "float32", per_sample=True),
]


def parameters_shape(case: Case) -> tuple[int, ...]:
    if case.norm in ("layer_norm", "rms_norm"):
        return case.shape[1:]
    channels = case.shape[case.channel_axis]
    return (case.shape[0], channels) if case.per_sample else (channels,)


def contenders(xp: Any, case: Case) -> tuple[int, dict[str, Any]]:
    """Bytes of x, and {name: call}; every call does the whole operation on arrays of `xp`."""
    rng = np.random.default_rng(0)
    dtype = cunorm.BatchNorm(1, dtype=case.dtype).weight.dtype
    x, dy = (
        xp.asarray(rng.standard_normal(case.shape, dtype=np.float32)).astype(dtype)
        for _ in range(2)
    )
    weight = xp.ones(parameters_shape(case), np.float32)
    bias = xp.zeros_like(weight)
    out = xp.zeros_like(x)
    forward = getattr(cunorm, f"{case.norm}_forward")
    backward = getattr(cunorm, f"{case.norm}_backward")
    leading = (x, case.number) if case.norm == "group_norm" else (x,)
    affine = (weight,) if case.norm == "rms_norm" else (weight, bias)
    axis = {} if case.norm in ("layer_norm", "rms_norm") else {"channel_axis": case.channel_axis}
    if case.norm == "scale_shift":
        inputs, options = (dy, x, weight), axis
    else:
        _, saved = forward(*leading, *affine, **axis)
        inputs, options = (dy, x, saved, weight), {}
    return x.nbytes, {
        "copy": lambda: xp.copyto(out, x),
        "forward out=": lambda: forward(*leading, *affine, **axis, out=out),
        "backward out=": lambda: backward(*inputs, **options, out=out),
        "forward": lambda: forward(*leading, *affine, **axis),
        "backward": lambda: backward(*inputs, **options),
    }


def torch_contenders(torch: Any, case: Case, device: str, prefix: str) -> dict[str, Any]:
    """PyTorch as its users call it; of scale-shift, the broadcasting expression."""
    kind = getattr(torch, case.dtype)
    x, dy = (torch.randn(case.shape, device=device).to(kind) for _ in range(2))
    if case.channel_axis == -1:  # channels-last memory of an (N, C, H, W) tensor
        x, dy = x.movedim(-1, 1), dy.movedim(-1, 1)
    weight = torch.ones(parameters_shape(case), device=device, dtype=kind, requires_grad=True)
    bias = torch.zeros_like(weight).requires_grad_()
    leaf = x.detach().requires_grad_()
    inputs = (leaf, weight) if case.norm == "rms_norm" else (leaf, weight, bias)
    function = torch.nn.functional

    def apply(x: Any) -> Any:
        if case.norm == "group_norm":
            return function.group_norm(x, case.number, weight, bias)
        if case.norm == "instance_norm":
            return function.instance_norm(x, weight=weight, bias=bias)
        if case.norm == "layer_norm":
            return function.layer_norm(x, weight.shape, weight, bias)
        if case.norm == "rms_norm":
            return function.rms_norm(x, weight.shape, weight, 1e-5)
        wide = weight.shape + (1,) * (x.ndim - 2) if case.per_sample else (-1, 1, 1)
        return x * weight.view(wide) + bias.view(wide)

    y = apply(leaf)

    def forward() -> None:
        with torch.no_grad():
            apply(x)

    def backward() -> None:
        torch.autograd.grad(y, inputs, dy, retain_graph=True)

    return {f"{prefix} forward": forward, f"{prefix} backward": backward}
