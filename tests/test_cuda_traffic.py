"""Bytes that the CUDA kernels move through global memory, counted access by access.

A pass is one reading or writing of an array the size of x. What comes on top, parameters,
statistics and partial results, is O(C): it does not grow with the elements of a channel.
"""

import numpy as np
import pytest

import cunorm
from cunorm.cuda import launch

RUNS = ((6, 3, 30, 30), 1)
COLUMNS = ((300, 64), -1)

#: Passes (read, written) by operation and plan.
PASSES = {
    ("training forward", "warp"): (1, 1),
    ("training forward", "block"): (1, 1),
    ("training forward", "cluster"): (1, 1),
    ("training forward", "stream"): (2, 1),
    ("inference", "warp"): (1, 1),
    ("inference", "stream"): (1, 1),
    ("backward", "warp"): (2, 1),
    ("backward", "block"): (2, 1),
    ("backward", "cluster"): (2, 1),
    ("backward", "stream"): (4, 1),
    ("backward of inference", "block"): (2, 1),
    ("parameters' gradients", "block"): (2, 0),
    ("parameters' gradients", "stream"): (2, 0),
    ("statistics", "stream"): (1, 0),
}


def operation(name, x, dy, out, axis):
    channels = x.shape[axis]
    weight, bias = np.ones((2, channels), x.dtype)
    running = np.zeros(channels, x.dtype), np.ones(channels, x.dtype)
    options = {"channel_axis": axis, "out": out, "training": name != "backward of inference"}
    if name == "training forward":
        return lambda: cunorm.batch_norm_forward(x, weight, bias, *running, **options)
    if name == "inference":
        options["training"] = False
        return lambda: cunorm.batch_norm_forward(x, weight, bias, *running, **options)
    if name == "statistics":
        return lambda: cunorm.batch_norm_statistics(x, channel_axis=axis)
    options["out"] = None
    _, saved = cunorm.batch_norm_forward(x, weight, bias, *running, **options)
    if name == "parameters' gradients":
        return lambda: cunorm.batch_norm_backward(
            dy, x, saved, weight, output_mask=(False, True, True)
        )
    return lambda: cunorm.batch_norm_backward(dy, x, saved, weight, out=out)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda d: d.__name__)
@pytest.mark.parametrize(("shape", "axis"), [RUNS, COLUMNS], ids=["runs", "columns"])
@pytest.mark.parametrize(("name", "plan"), list(PASSES), ids=lambda value: value)
def test_passes(rng, on_backend, monkeypatch, name, plan, shape, axis, dtype):
    if on_backend is None:
        pytest.skip("accesses are counted where the kernels are executed on the CPU")
    if plan == "warp":
        if axis == -1:
            pytest.skip("columns are never taken by warps")
        shape = (2, 40, 12, 8)
    candidate = (getattr(launch, f"_{plan}"),)
    monkeypatch.setattr(launch, "CANDIDATES", candidate)
    monkeypatch.setattr(launch, "_SMALL_BYTES", 1 << 30)
    if plan != "block" and plan != "cluster":
        monkeypatch.setattr(launch, "SWEEPS", candidate)
    launch.plan.cache_clear()
    launch.sweep.cache_clear()
    try:
        x, dy, out = rng.standard_normal((3, *shape)).astype(dtype)
        call = operation(name, x, dy, out, axis)
        with on_backend.watching(x, dy, out):
            call()
        read, written, *others = on_backend.traffic.astype(int).tolist()
        assert read == PASSES[name, plan][0] * x.nbytes
        assert written == PASSES[name, plan][1] * x.nbytes
    finally:
        launch.plan.cache_clear()
        launch.sweep.cache_clear()
    # A thread reads the means of its channels; a channel of a block has 4 parameters, 5
    # statistics and 3 numbers of each of its parts, which every block may read.
    statistics = on_backend.blocks * min(shape[axis], 64 if axis == -1 else 4)
    parts = on_backend.blocks
    allowed = on_backend.threads * 8 * 8 // np.dtype(dtype).itemsize * 2
    allowed += statistics * 8 * (9 + 3 * parts)
    assert sum(others) <= allowed
