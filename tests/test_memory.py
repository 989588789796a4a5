"""Beyond its outputs a call allocates O(channels)."""

import tracemalloc
from functools import partial
from math import prod

import ml_dtypes
import numpy as np
import pytest
from cases import group, instance, layer, rms, scale_shift

import cunorm

CHANNELS = 32
# Partial results of 32 parts of 24 bytes a channel, a few working arrays of
# 1024 positions a thread, and what Python itself needs for a call.
ALLOWED = CHANNELS * 32 * 24 + 2 * 10 * 1024 * 8 + 64_000


def peak_of(function):
    function()  # compiled and cached
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        function()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize(
    ("shape", "axis", "order"),
    [
        ((32, CHANNELS, 48, 48), 1, (0, 1, 2, 3)),
        ((32, CHANNELS, 48, 48), 1, (0, 2, 3, 1)),
        ((32, CHANNELS, 48, 48), 1, (3, 1, 0, 2)),
        ((32, 48, 48, CHANNELS), -1, (0, 1, 2, 3)),
        ((9000, CHANNELS, 8), 1, (0, 1, 2)),
    ],
    ids=str,
)
def test_allocations(rng, shape, axis, order, dtype):
    x = rng.standard_normal(shape, dtype=np.float32).astype(dtype)
    x = x.transpose(order).copy().transpose(np.argsort(order))
    assert x.nbytes > 10 * ALLOWED
    number = np.ones(CHANNELS, np.float64 if dtype == np.float64 else np.float32)
    out = np.empty_like(x)
    forward = partial(cunorm.batch_norm_forward, x, number, number, channel_axis=axis)
    _, saved = forward()
    running = number.copy(), number.copy()
    calls = {
        "training": lambda: forward(*running, out=out),
        "inference": lambda: forward(*running, training=False, out=out),
        "backward": lambda: cunorm.batch_norm_backward(x, x, saved, number, out=out),
        "sums": lambda: cunorm.batch_norm_backward(
            x, x, saved, number, output_mask=(False, True, True)
        ),
        "statistics": lambda: cunorm.batch_norm_statistics(x, channel_axis=axis),
    }
    for name, call in calls.items():
        assert peak_of(call) < ALLOWED, name
    # Without `out`, the output itself and no more; also for strides with gaps.
    assert peak_of(forward) < x.nbytes + ALLOWED
    part = x[1:]
    assert peak_of(lambda: cunorm.batch_norm_forward(part, channel_axis=axis)) < x.nbytes + ALLOWED


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize(
    ("case", "shape", "order"),
    [
        (layer(), (2048, 1024), (0, 1)),
        (layer(2), (64, 32, 1024), (1, 0, 2)),
        (rms(), (16384, 128), (0, 1)),
        (rms(1), (512, 64, 32), (0, 2, 1)),
        (group(8), (32, CHANNELS, 48, 48), (0, 1, 2, 3)),
        (group(8), (32, CHANNELS, 48, 48), (0, 2, 3, 1)),
        (instance(), (32, CHANNELS, 48, 48), (0, 1, 2, 3)),
        (scale_shift(False), (32, CHANNELS, 48, 48), (3, 1, 0, 2)),
        (scale_shift(True), (32, CHANNELS, 48, 48), (0, 2, 3, 1)),
    ],
    ids=str,
)
def test_allocations_of_every_norm(rng, case, shape, order, dtype):
    """Statistics, parameters, and partial sums of an eighth of x at most."""
    x = rng.standard_normal(shape, dtype=np.float32).astype(dtype)
    x = x.transpose(order).copy().transpose(np.argsort(order))
    norm = case.norm(shape)
    wide = np.float64 if dtype == np.float64 else np.float32
    weight = np.ones(norm.parameters_shape, wide)
    allowed = ALLOWED + x.nbytes // 8 + 64 * prod(norm.statistics_shape) + 32 * weight.size
    assert x.nbytes > 2 * allowed
    out = np.empty_like(x)
    _, saved = case.forward(x, weight, weight, out=out)
    calls = {
        "forward": lambda: case.forward(x, weight, weight, out=out),
        "backward": lambda: case.backward(x, x, saved, weight, out=out),
        "sums": lambda: case.backward(x, x, saved, weight, output_mask=(False, True, True)),
    }
    for name, call in calls.items():
        assert peak_of(call) < allowed, name
    # Without `out`, the output itself and no more.
    assert peak_of(lambda: case.forward(x, weight, weight)) < x.nbytes + allowed
