"""Bytes that the CUDA kernels move through global memory, counted access by access.

A pass is one reading or writing of an array the size of x. What comes on top, parameters,
statistics and partial results, is O(C): it does not grow with the elements of a channel. Rows,
whose elements have parameters of their own, read these anew, from the caches.
"""

import numpy as np
import pytest
from cases import forget_plans, group, instance, layer, operands, rms, scale_shift

import cunorm
from cunorm.cuda import launch

RUNS = ((6, 3, 30, 30), 1)
COLUMNS = ((300, 64), -1)

#: Passes (read, written) by operation and plan.
PASSES = {
    ("training forward", "warp"): (1, 1),
    ("training forward", "block"): (1, 1),
    ("training forward", "cluster"): (1, 1),
    ("training forward", "cached"): (2, 1),
    ("training forward", "stream"): (2, 1),
    ("inference", "warp"): (1, 1),
    ("inference", "stream"): (1, 1),
    ("backward", "warp"): (2, 1),
    ("backward", "block"): (2, 1),
    ("backward", "cluster"): (2, 1),
    ("backward", "cached"): (4, 1),
    ("backward", "stream"): (4, 1),
    ("backward of inference", "warp"): (2, 1),
    ("backward of inference", "stream"): (2, 1),
    ("parameters' gradients", "block"): (2, 0),
    ("parameters' gradients", "cached"): (2, 0),
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


@pytest.fixture
def only(monkeypatch):
    """Have one candidate alone, however few the blocks."""

    def only(plan):
        candidate = (getattr(launch, f"_{plan}"),)
        monkeypatch.setattr(launch, "CANDIDATES", candidate)
        monkeypatch.setattr(launch, "ROW_CANDIDATES", candidate)
        monkeypatch.setattr(launch, "_SMALL_BYTES", 1 << 30)
        monkeypatch.setattr(launch, "_lag", lambda *_: 2)
        monkeypatch.setattr(launch, "_CACHED_LEAST", 0)
        if plan in ("warp", "stream"):
            monkeypatch.setattr(launch, "SWEEPS", candidate)
            elementwise = launch._warp if plan == "warp" else launch._scattered
            monkeypatch.setattr(launch, "ELEMENTWISE", (elementwise,))
        forget_plans()

    yield only
    forget_plans()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda d: d.__name__)
@pytest.mark.parametrize(("shape", "axis"), [RUNS, COLUMNS], ids=["runs", "columns"])
@pytest.mark.parametrize(("name", "plan"), list(PASSES), ids=lambda value: value)
def test_passes(rng, on_backend, only, name, plan, shape, axis, dtype):
    if on_backend is None:
        pytest.skip("accesses are counted where the kernels are executed on the CPU")
    if plan == "warp":
        if axis == -1:
            pytest.skip("columns are never taken by warps")
        shape = (2, 40, 12, 8)
    if plan == "cached":
        if axis == -1:
            pytest.skip("columns take a launch for each sweep")
        shape = (6, 9, 30, 30)  # enough channels to be ahead
    only(plan)
    x, dy, out = rng.standard_normal((3, *shape)).astype(dtype)
    call = operation(name, x, dy, out, axis)
    with on_backend.watching(x, dy, out):
        call()
    read, written, *others = on_backend.traffic.astype(int).tolist()
    assert read == PASSES[name, plan][0] * x.nbytes
    assert written == PASSES[name, plan][1] * x.nbytes
    # A thread reads the means of its channels, or four numbers of one; a channel of a block has 4
    # parameters, 5 statistics and 3 numbers of each of its parts, which every block may read.
    statistics = on_backend.blocks * min(shape[axis], 64 if axis == -1 else 4)
    parts = on_backend.blocks
    allowed = on_backend.threads * (8 * 8 // np.dtype(dtype).itemsize * 2 + 4 * 8)
    allowed += statistics * 8 * (9 + 3 * parts)
    assert sum(others) <= allowed


#: Passes (read, written) forward and backward, by plan.
RESIDENT = dict.fromkeys(("warp", "block", "cluster"), ((1, 1), (2, 1)))
STREAMED = {"stream": ((2, 1), (4, 1))}
ONE_SWEEP = dict.fromkeys(("warp", "stream"), ((1, 1), (2, 1)))

#: A norm, the shape for warps, and for all other plans.
NORMS = [
    (layer(), (20, 96), (40, 1200), RESIDENT | STREAMED),
    (rms(), (20, 96), (40, 1200), RESIDENT | STREAMED),
    (group(4), (9, 16, 8), (9, 16, 160), RESIDENT | STREAMED),
    (group(4, -1), None, (3, 200, 32), {"block": RESIDENT["block"],
                                       "cluster": RESIDENT["cluster"], **STREAMED}),
    (instance(), (9, 16, 48), (9, 16, 640), RESIDENT | STREAMED),
    (instance(-1), None, (3, 200, 32), {"block": RESIDENT["block"],
                                       "cluster": RESIDENT["cluster"], **STREAMED}),
    (scale_shift(False), (9, 16, 8), (9, 16, 160), ONE_SWEEP),
    (scale_shift(True), (9, 16, 48), (9, 16, 160), ONE_SWEEP),
    (scale_shift(True, -1), None, (3, 200, 32), {"stream": ONE_SWEEP["stream"]}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda d: d.__name__)
@pytest.mark.parametrize(
    ("case", "plan", "shape", "passes"),
    [
        (case, plan, small if plan == "warp" else large, passes)
        for case, small, large, plans in NORMS
        for plan, passes in plans.items()
        if small is not None or plan != "warp"
    ],
    ids=str,
)
def test_passes_of_norms(rng, on_backend, only, case, plan, shape, passes, dtype):
    if on_backend is None:
        pytest.skip("accesses are counted where the kernels are executed on the CPU")
    only(plan)
    x, dy, weight, bias = operands(rng, case, shape, dtype)
    out = np.empty_like(x)
    forward, backward = passes
    with on_backend.watching(x, dy, out):
        _, saved = case.forward(x, weight, bias, out=out)
    assert tuple(on_backend.traffic[:2] // x.nbytes) == forward
    assert not (on_backend.traffic[:2] % x.nbytes).any()
    with on_backend.watching(x, dy, out):
        case.backward(dy, x, saved, weight, out=out)
    assert tuple(on_backend.traffic[:2] // x.nbytes) == backward
    assert not (on_backend.traffic[:2] % x.nbytes).any()
    # Partial gradients, written and read again: two numbers a parameter and block of samples.
    number = weight.size * np.dtype(weight.dtype).itemsize
    assert on_backend.traffic[3] <= 16 * shape[0] * number + 64 * on_backend.blocks


#: Passes (read, written) of a double backward pass: with gdx, without, and with given statistics.
DOUBLE = {
    "warp": ((3, 2), (2, 2), (3, 2)),
    "block": ((3, 2), (2, 2), None),
    "cluster": ((3, 2), (2, 2), None),
    "stream": ((6, 2), (4, 2), (3, 2)),
}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("plan", list(DOUBLE))
@pytest.mark.parametrize("norm", ["runs", "columns", "rows"])
def test_passes_of_double_backward(rng, on_backend, only, norm, plan, dtype):
    if on_backend is None:
        pytest.skip("accesses are counted where the kernels are executed on the CPU")
    shapes = {"runs": ((4, 3, 20, 20), 1), "columns": ((120, 64), -1), "rows": ((9, 1200), -1)}
    shape, axis = shapes[norm]
    if plan == "warp":
        if norm == "columns":
            pytest.skip("columns are never taken by warps")
        shape = {"runs": (2, 40, 8, 6), "rows": (20, 96)}[norm]
    only(plan)
    x, dy, gdx = rng.standard_normal((3, *shape)).astype(dtype)
    number = shape[axis]
    vector, running = np.ones(number, dtype), (np.zeros(number, dtype), np.ones(number, dtype))
    if norm == "rows":
        calls = [cunorm.layer_norm_forward(x)[1]] * 2
        function = cunorm.layer_norm_double_backward
    else:
        calls = [cunorm.batch_norm_forward(x, channel_axis=axis)[1]] * 2
        _, given = cunorm.batch_norm_forward(
            x, None, None, *running, training=False, channel_axis=axis
        )
        calls += [given] if DOUBLE[plan][2] else []
        function = cunorm.batch_norm_double_backward
    for i, saved in enumerate(calls):
        upstream = None if i == 1 else gdx
        with on_backend.watching(x, dy, gdx):
            function(upstream, vector, vector, dy, x, saved, vector)
        read, _, _, others = on_backend.traffic.astype(int).tolist()
        assert read == DOUBLE[plan][i][0] * x.nbytes
        # The outputs are new arrays: what is written beyond them is of channels and parts.
        assert 0 <= others - DOUBLE[plan][i][1] * x.nbytes <= 64 * on_backend.blocks * number
