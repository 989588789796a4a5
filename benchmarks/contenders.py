"""Who is measured: for a case, calls that each do a whole operation.

All calls of a case are named (operation, contender), and ("copy", "") is a plain copy of x.
Rivals are called the way their users call them, and allocate their outputs, as cunorm does
without ``out=``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import frontend
import numpy as np
from shapes import Case

import cunorm
from cunorm.convolution import cudnn_missing

__all__ = ["COPY", "FRESH", "OUT", "calls_of", "compile_kernels", "dtype_of"]

OUT = "cunorm, out="
FRESH = "cunorm"
COPY = ("copy", "")

Calls = dict[tuple[str, str], Callable[[], Any]]


def calls_of(case: Case, xp: Any, torch: Any, compiled: bool = False) -> Calls:
    """The calls of a case on NumPy's or CuPy's arrays, PyTorch's where `torch` is not None.

    `compiled`: torch.compile too, which takes seconds for every case.
    """
    x, dy, weight, bias = _operands(case, xp)
    on_gpu = xp is not np
    calls: Calls = {}
    if torch is not None:
        for name, context in _torch_paths(case, torch, on_gpu):
            calls |= _torch(case, torch, name, context, x, dy, weight, bias)
        if case.norm == "batch_norm" and case.shape[0] > 65535:  # in inference not cuDNN's
            calls.pop(("inference", "PyTorch, cuDNN"), None)
        if compiled and on_gpu:
            calls |= _torch(case, torch, "torch.compile", nullcontext, x, dy, weight, bias)
    calls |= _plain(case, xp, x, dy, weight, bias)
    if on_gpu and cudnn_missing() is None:
        calls |= frontend.calls_of(case, xp, x, dy, weight, bias)
    out = xp.zeros_like(x)
    calls[COPY] = lambda: xp.copyto(out, x)
    return calls | _cunorm(case, xp, x, dy, weight, bias, out)


def compile_kernels(cases: Iterable[Case]) -> None:
    """Compile all kernels that cunorm needs for these cases, for this process and later ones."""
    for case in cases:
        x, *others = _operands(case, np)
        for call in _cunorm(case, np, x, *others, np.empty_like(x)).values():
            call()


def _operands(case: Case, xp: Any) -> tuple[Any, Any, Any, Any]:
    """x, dy, weight and bias."""
    dtype = dtype_of(case)
    x, dy = (_numbers(case.elements, seed, xp).reshape(case.shape).astype(dtype) for seed in (0, 1))
    weight, bias = map(  # each on a GPU in memory of its own, which begins on a 16-byte boundary
        xp.asarray,
        np.random.default_rng(2).standard_normal((2, *case.parameters_shape), dtype=np.float32),
    )
    return x, dy, weight, bias


def dtype_of(case: Case) -> np.dtype:
    """X's dtype, bfloat16's included."""
    return cunorm.ScaleShift(1, dtype=case.dtype).weight.dtype  # type: ignore[no-any-return]


def _numbers(number: int, seed: int, xp: Any) -> Any:
    """Normally distributed numbers; of many, a prime number of them over and over."""
    numbers = np.random.default_rng(seed).standard_normal(min(number, 1_000_003), np.float32)
    return xp.resize(xp.asarray(numbers), number)


def _cunorm(case: Case, xp: Any, x: Any, dy: Any, weight: Any, bias: Any, out: Any) -> Calls:
    forward = getattr(cunorm, f"{case.norm}_forward")
    backward = getattr(cunorm, f"{case.norm}_backward")
    axis = {} if case.of_rows else {"channel_axis": case.channel_axis}
    affine = (weight,) if case.norm == "rms_norm" else (weight, bias)
    inputs = (x, case.groups, *affine) if case.groups else (x, *affine)
    if case.norm == "scale_shift":
        gradient_inputs, options = (dy, x, weight), axis
    else:
        _, saved = forward(*inputs, **axis)
        gradient_inputs, options = (dy, x, saved, weight), {}
    if case.norm == "batch_norm":
        inputs += (xp.zeros_like(weight), xp.ones_like(weight))  # running statistics
    calls: Calls = {
        ("forward", OUT): lambda: forward(*inputs, **axis, out=out),
        ("forward", FRESH): lambda: forward(*inputs, **axis),
        ("backward", OUT): lambda: backward(*gradient_inputs, **options, out=out),
        ("backward", FRESH): lambda: backward(*gradient_inputs, **options),
    }
    if "inference" in case.operations:
        calls["inference", OUT] = lambda: forward(*inputs, **axis, training=False, out=out)
        calls["inference", FRESH] = lambda: forward(*inputs, **axis, training=False)
    return calls


def _plain(case: Case, xp: Any, x: Any, dy: Any, weight: Any, bias: Any) -> Calls:
    """Straightforward expressions of NumPy or CuPy, in float32."""
    shape, axes, summed, wide = _lie(case)
    weight, bias = weight.reshape(wide), 0 if case.norm == "rms_norm" else bias.reshape(wide)
    running = xp.zeros_like(weight), xp.ones_like(weight)
    name = "NumPy" if xp is np else "CuPy"

    def wider(array: Any) -> Any:
        return array.astype(xp.float32, copy=False).reshape(shape)

    def back(array: Any) -> Any:
        return array.astype(x.dtype, copy=False).reshape(x.shape)

    if case.norm == "scale_shift":

        def gradients() -> Any:
            gradient = wider(dy)
            products = (gradient * wider(x)).sum(summed)
            return back(gradient * weight), products, gradient.sum(summed)

        return {
            ("forward", name): lambda: back(wider(x) * weight + bias),
            ("backward", name): gradients,
        }

    def statistics() -> tuple[Any, Any]:
        a = wider(x)
        if case.norm == "rms_norm":
            return 0, 1 / xp.sqrt((a * a).mean(axes, keepdims=True) + 1e-5)
        return a.mean(axes, keepdims=True), 1 / xp.sqrt(a.var(axes, keepdims=True) + 1e-5)

    saved = statistics()

    def apply(mean: Any, inv_std: Any) -> Any:
        return back((wider(x) - mean) * inv_std * weight + bias)

    def backward() -> Any:
        mean, inv_std = saved
        gradient, normalized = wider(dy), (wider(x) - mean) * inv_std
        products = gradient * normalized
        weighted = gradient * weight
        dx = weighted - normalized * (products * weight).mean(axes, keepdims=True)
        if case.norm != "rms_norm":
            dx -= weighted.mean(axes, keepdims=True)
        return back(dx * inv_std), products.sum(summed), gradient.sum(summed)

    calls: Calls = {
        ("forward", name): lambda: apply(*statistics()),
        ("backward", name): backward,
    }
    if "inference" in case.operations:
        calls["inference", name] = lambda: apply(*running)
    return calls


def _lie(case: Case) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """X's shape with groups apart, the axes of statistics and of sums, the parameters' shape."""
    if case.of_rows:
        return case.shape, (1,), (0,), (1, *case.shape[1:])
    ndim = len(case.shape)
    axis = case.channel_axis % ndim
    spatial = tuple(i for i in range(1, ndim) if i != axis)
    channels = case.shape[axis]
    wide = [1] * ndim
    wide[axis] = channels
    if case.norm == "group_norm":
        each = channels // case.groups
        shape = (*case.shape[:axis], case.groups, each, *case.shape[axis + 1 :])
        wide[axis : axis + 1] = [case.groups, each]
        apart = tuple(i + (i > axis) for i in spatial)
        return shape, tuple(sorted((axis + 1, *apart))), (0, *apart), tuple(wide)
    if case.per_sample:
        wide[0] = case.shape[0]
        return case.shape, spatial, spatial, tuple(wide)
    axes = spatial if case.norm == "instance_norm" else (0, *spatial)
    return case.shape, axes, (0, *spatial), tuple(wide)


def _torch_paths(case: Case, torch: Any, on_gpu: bool) -> Iterator[tuple[str, Any]]:
    """(name, context) of PyTorch's ways; batch and instance norm may have cuDNN's too on a GPU.

    PyTorch takes its own where it thinks that cuDNN cannot (_select_batch_norm_backend in
    aten/src/ATen/native/Normalization.cpp).
    """
    if not on_gpu or case.norm not in ("batch_norm", "instance_norm"):
        yield "PyTorch", nullcontext
        return
    yield "PyTorch, native", lambda: torch.backends.cudnn.flags(enabled=False)
    if case.norm == "instance_norm":  # one sample to PyTorch; parameters of the data's dtype
        cudnn = case.dtype == "float32"
    else:
        cudnn = case.dtype != "bfloat16" and len(case.shape) > 2 and case.shape[0] <= 880801
    if cudnn and case.elements < 2**31 - 1:
        yield "PyTorch, cuDNN", lambda: torch.backends.cudnn.flags(enabled=True)


def _torch(
    case: Case, torch: Any, name: str, context: Any, x: Any, dy: Any, weight: Any, bias: Any
) -> Calls:
    """PyTorch; scale-shift, for which it has no function, by broadcasting.

    Training records gradients, as it does for its users; inference does not. Parameters are
    float32 for batch norm and scale-shift, as ours; of the data's dtype for the others, whose
    operators accept no mixture everywhere.
    """
    kind = getattr(torch, case.dtype)

    def tensor(array: Any, kind: Any) -> Any:
        if array.dtype.itemsize == 2:  # not every DLPack knows bfloat16
            return torch.from_dlpack(array.view(np.int16)).view(kind).clone()
        return torch.from_dlpack(array).to(kind, copy=True)

    x, dy = tensor(x, kind), tensor(dy, kind)
    if not case.of_rows and case.channel_axis == -1:
        x, dy = x.movedim(-1, 1), dy.movedim(-1, 1)  # PyTorch's channels-last memory
    own = torch.float32 if case.norm in ("batch_norm", "scale_shift") else kind
    weight, bias = tensor(weight, own), tensor(bias, own)
    mean, var = torch.zeros_like(weight), torch.ones_like(weight)
    wide = (*weight.shape, *[1] * (x.ndim - 2)) if case.per_sample else (-1, *[1] * (x.ndim - 2))
    f = torch.nn.functional
    function = {
        "batch_norm": lambda x, w, b, training: f.batch_norm(x, mean, var, w, b, training),
        "group_norm": lambda x, w, b, _: f.group_norm(x, case.groups, w, b),
        "instance_norm": lambda x, w, b, _: f.instance_norm(x, weight=w, bias=b),
        "layer_norm": lambda x, w, b, _: f.layer_norm(x, w.shape, w, b),
        "rms_norm": lambda x, w, _b, _: f.rms_norm(x, w.shape, w, 1e-5),
        "scale_shift": lambda x, w, b, _: (x * w.view(wide) + b.view(wide)).to(kind),
    }[case.norm]
    if name == "torch.compile":
        function = torch.compile(function, dynamic=False)
    leaves = [array.detach().requires_grad_() for array in (x, weight, bias)]

    def forward() -> Any:
        with context():
            return function(*leaves, True)

    def inference() -> Any:
        with context():
            return function(x, weight, bias, False)

    y = forward()
    mean, var = torch.zeros_like(weight), torch.ones_like(weight)  # as if new
    inputs = leaves[: 2 if case.norm == "rms_norm" else 3]
    calls: Calls = {
        ("forward", name): forward,
        ("backward", name): lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True),
    }
    if "inference" in case.operations:
        calls["inference", name] = inference
    return calls
