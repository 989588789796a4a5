"""Every way that the CUDA kernels have of sharing an array out, forced on small arrays."""

import mmap
import re
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
import reference
import tolerances
from cases import check, forget_plans, group, instance, layer, operands, rms, scale_shift
from cases import check_forward as check_forward_of
from test_batch_norm import check_backward, check_forward
from test_double_backward import check_batch_norm, check_layer_norm
from tolerances import assert_within

import cunorm
from cunorm.cuda import launch, source

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]

#: (shape, channel axis) by candidate: whole and odd lengths, one tile and several.
RUNS = [
    ((3, 7, 5, 5), 1),
    ((11, 5, 12, 12), 1),
    ((20, 6, 12, 13), 1),
    ((5, 3, 401), 1),  # longer than 512 bytes and odd: unaligned accesses
    ((2, 3, 1030), 1),
    ((2, 3, 36, 72), 1),
    ((1, 1, 3001), 1),
]
COLUMNS = [
    ((257, 3), 1),
    ((37, 10), -1),
    ((300, 40), -1),
    ((14, 5, 5, 72), -1),
    ((400, 9), -1),
    ((3, 130), -1),
]


@pytest.fixture
def force(monkeypatch, backend):
    """Have a candidate chosen, with small blocks, so that little data makes many tiles."""

    def force(name, wide=False):
        if backend == "gpu" and "cluster" in name and source.device().compute_capability < 90:
            pytest.skip("this GPU has no clusters")
        candidate = (getattr(launch, f"_{name}"),)
        monkeypatch.setattr(launch, "CANDIDATES", candidate)
        monkeypatch.setattr(launch, "ROW_CANDIDATES", candidate)
        if name == "stream":
            monkeypatch.setattr(launch, "SWEEPS", candidate)
            monkeypatch.setattr(launch, "ELEMENTWISE", (launch._scattered,))
        monkeypatch.setattr(launch, "_MOST_THREADS", 64)
        monkeypatch.setattr(launch, "_MOST_THREADS_ALONE", 64)
        monkeypatch.setattr(launch, "_MOST_ROW_THREADS", 64)
        monkeypatch.setattr(launch, "_STREAM_THREADS", 64)
        monkeypatch.setattr(launch, "_SMALL_BYTES", 1 << 30)  # however few the blocks
        # Two steps behind, in the cache of any device.
        monkeypatch.setattr(launch, "_lag", lambda *_: 2)
        monkeypatch.setattr(launch, "_CACHED_PART_BYTES", 8 << 10)
        monkeypatch.setattr(launch, "_CACHED_LEAST", 0)
        if wide:
            monkeypatch.setattr(launch, "_WIDE_FROM", 0)
        forget_plans()

    yield force
    monkeypatch.undo()
    forget_plans()


def plans(monkeypatch):
    """The names of the plans that are made from here on."""
    made = []
    built = launch._built

    def note(*arguments, **options):
        plan = built(*arguments, **options)
        made.append(plan)
        return plan

    monkeypatch.setattr(launch, "_built", note)
    return made


#: As many statistics as it takes to be ahead; without parts, of one tile and of several.
CACHED = [
    ((2, 7, 5, 5), 1),
    ((11, 5, 12, 12), 1),
    ((3, 6, 1030), 1),
    ((2, 9, 36, 72), 1),
]

CASES = [
    ("warp", [RUNS[0], ((4, 6, 9, 3), 1), ((2, 9, 33), 1), ((1, 5, 8), 1)]),
    ("block", RUNS + COLUMNS),
    ("cluster", RUNS + COLUMNS),
    ("whole_block", [RUNS[5], COLUMNS[3]]),
    ("whole_cluster", [RUNS[5], COLUMNS[2]]),
    ("cached", CACHED),
    ("stream", RUNS + COLUMNS),
]


def check_everything(rng, shape, axis, dtype):
    x = (rng.standard_normal(shape) * 1.5 + 0.7).astype(dtype)
    dy = rng.standard_normal(shape).astype(dtype)
    accumulator = np.float64 if dtype == np.float64 else np.float32
    weight, bias = rng.standard_normal((2, shape[axis])).astype(accumulator)
    before = x.copy(), dy.copy()
    y, saved = check_forward(x, weight, bias, axis)
    dx = check_backward(dy, x, saved, weight, axis)
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(dy, before[1])
    # The same bits again, whatever the order in which threads run, and in place.
    again, _ = cunorm.batch_norm_forward(x, weight, bias, channel_axis=axis, out=x.copy())
    np.testing.assert_array_equal(again, y)
    in_place = dy.copy()
    cunorm.batch_norm_backward(in_place, x, saved, weight, out=in_place)
    np.testing.assert_array_equal(in_place, dx)
    in_place = x.copy()
    cunorm.batch_norm_backward(dy, in_place, saved, weight, out=in_place)
    np.testing.assert_array_equal(in_place, dx)
    in_place = x.copy()
    cunorm.batch_norm_forward(in_place, weight, bias, channel_axis=axis, out=in_place)
    np.testing.assert_array_equal(in_place, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(
    ("name", "shape", "axis"),
    [(name, *case) for name, cases in CASES for case in cases],
    ids=str,
)
def test_candidate(rng, force, monkeypatch, name, shape, axis, dtype):
    force(name)
    made = plans(monkeypatch)
    check_everything(rng, shape, axis, dtype)
    assert {plan.name for plan in made} <= {name, "warp", "stream", "scattered"}
    assert any(plan.name == name for plan in made)


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize(("shape", "axis"), [RUNS[5], COLUMNS[1], COLUMNS[4]], ids=str)
def test_larger_clusters(rng, force, monkeypatch, size, shape, axis):
    """Also with more blocks than there is work for."""
    force("cluster")
    monkeypatch.setattr(launch, "_CLUSTERS", (size,))
    made = plans(monkeypatch)
    check_everything(rng, shape, axis, np.float32)
    assert all(f"-DCLUSTER={size}" in plan.options for plan in made if plan.name == "cluster")


def test_as_many_threads_as_a_block_has(rng, force, monkeypatch):
    force("whole_block")
    monkeypatch.setattr(launch, "_MOST_THREADS_ALONE", 512)
    made = plans(monkeypatch)
    check_everything(rng, *RUNS[5], np.float32)
    assert any(plan.threads == 512 for plan in made)


@pytest.mark.parametrize("name", ["warp", "block", "cluster", "cached", "stream"])
@pytest.mark.parametrize(("shape", "axis"), [((7, 6, 9, 3), 1), ((60, 40), -1)], ids=str)
def test_wide_offsets(rng, force, monkeypatch, name, shape, axis):
    """Kernels with 64-bit offsets, which arrays of 2^31 elements need."""
    if name in ("warp", "cached") and axis == -1:
        pytest.skip("columns are never taken so")
    force(name, wide=True)
    made = plans(monkeypatch)
    check_everything(rng, shape, axis, np.float32)
    assert all("-DWIDE=1" in plan.options for plan in made)


@pytest.mark.parametrize("name", ["block", "cluster", "cached", "stream"])
@pytest.mark.parametrize(("shape", "axis"), [((6, 9, 300), 1), ((300, 40), -1)], ids=str)
def test_large_constants(rng, force, name, shape, axis):
    """Whose squares float64 does not hold: parts and lanes without elements count for nothing."""
    if name == "cached" and axis == -1:
        pytest.skip("columns take a launch for each sweep")
    force(name)
    bias = rng.standard_normal(shape[axis])
    y, saved = cunorm.batch_norm_forward(np.full(shape, 1e200), None, bias, channel_axis=axis)
    np.testing.assert_array_equal(
        y, np.broadcast_to(np.expand_dims(bias, -1 if axis == 1 else 0), shape)
    )
    np.testing.assert_array_equal(saved.mean, np.full(shape[axis], 1e200))


@pytest.mark.parametrize("name", ["block", "cluster", "cached", "stream"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("inner", [600, 601, 607])
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_unaligned_arrays(rng, force, monkeypatch, name, dtype, inner, shift):
    """Arrays that begin anywhere: nothing before or after them is read or written."""
    force(name)
    made = plans(monkeypatch)
    shape = (3, 5 if name == "cached" else 2, inner)
    size = shape[0] * shape[1] * inner

    def placed(values):
        memory = np.full(size + 16, 99, dtype)
        memory[shift : shift + size] = values.reshape(-1)
        return memory, memory[shift : shift + size].reshape(shape)

    values = rng.standard_normal((2, *shape)).astype(dtype)
    (_, x), (_, dy) = placed(values[0]), placed(values[1])
    memory, out = placed(np.zeros(shape))
    result = reference.forward(x)
    y, saved = cunorm.batch_norm_forward(x, out=out)
    assert y is out
    assert_within(y, result.y, tolerances.y_bound(result, None, None, 3 * inner, dtype), "y")
    expected = reference.backward(dy, x)
    bounds = tolerances.backward_bounds(expected, result, dy, None, 3 * inner, dtype)
    dx, _, _ = cunorm.batch_norm_backward(dy, x, saved, out=out)
    assert_within(dx, expected.dx, bounds.dx, "dx")
    assert (memory[:shift] == 99).all()
    assert (memory[shift + size :] == 99).all()
    if (shift % 2 == 1 or inner % 2 == 1) and np.dtype(dtype).itemsize < 8:
        assert any("-DALIGNED=0" in plan.options for plan in made)


@pytest.mark.parametrize("name", ["warp", "block", "cluster", "cached", "stream"])
@pytest.mark.parametrize("shape", [(6, 9, 5), (40, 2, 120), (70, 33, 1)], ids=str)
def test_running_statistics_of_every_type(rng, force, name, shape):
    if name in ("warp", "cached") and shape != (6, 9, 5):
        pytest.skip("warps take short runs alone, two launches few statistics")
    force(name)
    number = shape[1]
    for dtype, running_dtype in [
        (np.float16, np.float16),
        (np.float16, np.float64),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (np.float32, np.float32),
        (np.float32, np.float64),
        (np.float64, np.float32),
    ]:
        x = rng.standard_normal(shape).astype(dtype)
        wide = np.zeros(2 * number, running_dtype)
        mean, var = wide[::2], np.ones(number, running_dtype)
        result = reference.forward(x)
        n = x.size // number
        cunorm.batch_norm_forward(x, None, None, mean, var, exponential_average_factor=0.25)
        u = tolerances.roundoff(running_dtype)
        bound = tolerances.mean_bound(result, n, dtype) + 2 * u * np.abs(result.mean)
        assert_within(mean, 0.25 * result.mean, bound, "running mean")
        expected = 0.75 + 0.25 * result.var * n / (n - 1)
        bound = tolerances.var_bound(result, n, dtype) + 2 * u * expected
        assert_within(var, expected, bound, "running var")
        assert not wide[1::2].any()
        y, saved = cunorm.batch_norm_forward(x, None, None, mean, var, training=False)
        given = reference.forward(x, mean=mean.astype(float), var=var.astype(float))
        assert_within(y, given.y, tolerances.y_bound(given, None, None, 1, dtype), "y")
        np.testing.assert_array_equal(
            saved.mean, mean.astype(np.float64 if dtype == np.float64 else np.float32)
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(
    ("name", "cases"), [pytest.param(*case, id=case[0]) for case in CASES if case[0] != "cached"]
)
def test_double_backward_by_candidate(rng, force, monkeypatch, name, cases, dtype):
    force(name)
    # three inputs are too much for some
    monkeypatch.setattr(launch, "CANDIDATES", (*launch.CANDIDATES, launch._stream))
    monkeypatch.setattr(launch, "ROW_CANDIDATES", (*launch.CANDIDATES, launch._stream))
    made = plans(monkeypatch)
    for shape, axis in cases:
        check_batch_norm(rng, shape, axis, dtype)
        check_batch_norm(rng, shape, axis, dtype, training=False)
    assert any(plan.name == name for plan in made)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(
    "name", ["warp", "block", "cluster", "whole_block", "whole_cluster", "stream"]
)
def test_double_backward_of_rows_by_candidate(rng, force, monkeypatch, name, dtype):
    force(name)
    made = plans(monkeypatch)
    shapes = [(20, 96), (7, 33)] if name == "warp" else [(9, 1200), (5, 700), (3, 1501)]
    for shape in shapes:
        check_layer_norm(rng, shape, -1, dtype)
    assert any(plan.name == name and plan.rows for plan in made)


@pytest.mark.parametrize("name", ["warp", "block", "cluster", "stream"])
def test_double_backward_of_large_means(rng, force, monkeypatch, name):
    """Gradients of gradients that are far from zero, and lie differently in every part."""
    force(name)
    made = plans(monkeypatch)
    long = name != "warp"
    for shape, axis in (((50, 6, 40), 1), ((150, 64), -1)) if long else (((7, 40, 12), 1),):
        means = np.linspace(1e3, 1.004e3, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        check_batch_norm(rng, shape, axis, np.float32, of_gradients=(means, -2 * means))
    check_layer_norm(rng, (9, 1200 if long else 96), -1, np.float32, of_gradients=(1e3, -2e3))
    assert {plan.name for plan in made} <= {name, "scattered"}
    assert any(plan.name == name for plan in made)


@pytest.mark.parametrize("name", ["block", "stream"])
def test_double_backward_with_wide_offsets(rng, force, monkeypatch, name):
    force(name, wide=True)
    made = plans(monkeypatch)
    check_batch_norm(rng, (7, 6, 9, 3), 1, np.float32)
    check_batch_norm(rng, (60, 40), -1, np.float32)
    check_layer_norm(rng, (9, 1200), -1, np.float32)
    assert all("-DWIDE=1" in plan.options for plan in made)


def test_parameters_of_every_type(rng):
    """Half, single and double ones, also mixed, for data of every type."""
    for dtype, weight_dtype, bias_dtype in [
        (np.float16, np.float16, np.float32),
        (np.float16, np.float64, np.float16),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16, np.float64),
        (np.float32, np.float32, np.float64),
        (np.float64, np.float32, np.float64),
    ]:
        x, dy = rng.standard_normal((2, 6, 9, 20)).astype(dtype)
        weight = rng.standard_normal(18).astype(weight_dtype)[::2]
        bias = rng.standard_normal(9).astype(bias_dtype)
        y, saved = cunorm.batch_norm_forward(x, weight, bias)
        result = reference.forward(x, weight.astype(float), bias.astype(float))
        w, b = weight.astype(float), bias.astype(float)
        assert_within(y, result.y, tolerances.y_bound(result, w, b, 120, dtype), "y")
        _, dweight, dbias = cunorm.batch_norm_backward(dy, x, saved, weight)
        assert dweight.dtype == weight_dtype
        assert dbias.dtype == bias_dtype
        expected = reference.backward(dy, x, w)
        bounds = tolerances.backward_bounds(expected, result, dy, w, 120, dtype)
        for got, want, bound in [
            (dweight, expected.dweight, bounds.dweight),
            (dbias, expected.dbias, bounds.dbias),
        ]:
            rounding = tolerances.roundoff(got.dtype) * np.abs(want)
            assert_within(got, want, bound + rounding, "gradient")


def test_steps_on_every_candidate_are_the_whole(rng, force):
    """Statistics, merge, transform; reduce, gradient: as in a synchronized batch norm."""
    force("stream")
    x = (rng.standard_normal((9, 5, 31)) + 100).astype(np.float32)
    dy = rng.standard_normal(x.shape).astype(np.float32)
    parts = [cunorm.batch_norm_statistics(part) for part in (x[:4], x[4:4], x[4:])]
    moments = cunorm.merge_moments(parts)
    result = reference.forward(x)
    n = x.size // 5
    bound = tolerances.mean_bound(result, n, x.dtype) + 2 * 2.0**-24 * 100
    assert_within(moments.mean, result.mean, bound, "mean")
    y = cunorm.batch_norm_transform(x, result.mean, result.inv_std)
    assert_within(y, result.y, tolerances.y_bound(result, None, None, n, x.dtype), "y")
    sums = cunorm.batch_norm_backward_reduce(dy, x, result.mean)
    dx = cunorm.batch_norm_backward_transform(dy, x, result.mean, result.inv_std, None, *sums, n)
    expected = reference.backward(dy, x)
    bounds = tolerances.backward_bounds(expected, result, dy, None, n, x.dtype)
    assert_within(dx, expected.dx, bounds.dx, "dx")


#: (case, shape) of statistics with several parameters: rows of whole and odd lengths, groups of
#: channels first, whose parameters change within accesses, between them and seldom, and last.
SHORT_ROWS = [
    (layer(), (37, 7)),
    (layer(), (21, 48)),
    (rms(), (6, 120)),
    (group(4), (5, 12, 5)),
    (group(3), (9, 24)),
]
ROWS = [
    (layer(), (70, 600)),
    (layer(), (5, 2001)),
    (rms(weight_offset=1.0), (7, 2050)),
    (group(2), (3, 8, 640)),
    (group(4), (5, 12, 49)),
    (group(2), (9, 48, 33)),
    (group(2), (3, 80, 20)),
]
MERGED = [
    (group(4, -1), (3, 50, 12)),
    (group(8, -1), (2, 70, 64)),
    (group(2, -1), (2, 300, 20)),
    (group(5, -1), (3, 33, 155)),
]
CHANNELS = [
    (instance(), (3, 5, 401)),
    (instance(), (4, 6, 12, 12)),
    (instance(-1), (3, 60, 10)),
]
NORMS = [
    ("warp", SHORT_ROWS),
    ("block", ROWS + MERGED + CHANNELS),
    ("cluster", ROWS + MERGED + CHANNELS),
    ("whole_block", [ROWS[0], ROWS[4], MERGED[1]]),
    ("whole_cluster", [ROWS[1], ROWS[6], MERGED[2]]),
    ("cached", CHANNELS[:2]),
    ("stream", [*ROWS, *MERGED, *CHANNELS, (group(4, 2), (3, 5, 12, 6))]),
]


def check_norm(rng, case, shape, dtype):
    """Against the reference, the same bits in place, and without dx or what else is wanted."""
    x, dy, weight, bias = operands(rng, case, shape, dtype)
    y, saved, dx, *gradients = check(case, x, dy, weight, bias)
    in_place = x.copy()
    case.forward(in_place, weight, bias, out=in_place)
    np.testing.assert_array_equal(in_place, y)
    in_place = dy.copy()
    case.backward(in_place, x, saved, weight, out=in_place)
    np.testing.assert_array_equal(in_place, dx)
    for mask in [(True, False, False), (False, True, True)]:
        masked = case.backward(dy, x, saved, weight, output_mask=mask)
        for wanted, whole, part in zip(mask, (dx, *gradients), masked, strict=True):
            assert (part is None) == (not wanted or whole is None)
            if part is not None:
                np.testing.assert_array_equal(part, whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(
    ("name", "case", "shape"), [(name, *case) for name, cases in NORMS for case in cases], ids=str
)
def test_candidate_of_norms(rng, force, monkeypatch, name, case, shape, dtype):
    force(name)
    made = plans(monkeypatch)
    check_norm(rng, case, shape, dtype)
    assert {plan.name for plan in made} <= {name, "warp", "stream", "scattered"}
    assert any(plan.name == name for plan in made)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("name", ["whole_block", "whole_cluster"])
@pytest.mark.parametrize(("case", "shape"), [ROWS[0], ROWS[2], (group(2), (3, 60, 21))], ids=str)
def test_rows_without_room_for_the_next(rng, force, monkeypatch, name, case, shape, dtype):
    force(name)
    monkeypatch.setattr(launch, "_shelves", lambda _p, **_: (1,))
    made = plans(monkeypatch)
    check_norm(rng, case, shape, dtype)
    assert any(plan.rows and "-DSHELVES=1" in plan.options for plan in made)


@pytest.mark.parametrize("name", ["warp", "block", "cluster", "stream"])
@pytest.mark.parametrize("index", [0, 3])
def test_wide_offsets_of_norms(rng, force, monkeypatch, name, index):
    force(name, wide=True)
    made = plans(monkeypatch)
    check_norm(rng, *(SHORT_ROWS if name == "warp" else ROWS)[index], np.float32)
    assert all("-DWIDE=1" in plan.options for plan in made)


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize(("case", "shape"), [ROWS[1], ROWS[3], ROWS[4], MERGED[3]], ids=str)
def test_larger_clusters_of_norms(rng, force, monkeypatch, size, case, shape):
    """Also where a parameter's elements fill fewer blocks than the cluster has."""
    force("cluster")
    monkeypatch.setattr(launch, "_CLUSTERS", (size,))
    check_norm(rng, case, shape, np.float32)


@pytest.mark.parametrize("name", ["warp", "block", "stream"])
@pytest.mark.parametrize("multiprocessors", [1, 2, 30])
def test_samples_in_blocks(rng, force, monkeypatch, on_backend, name, multiprocessors):
    """Many samples a block, one after another, and a few left over."""
    if on_backend is None:
        pytest.skip("a GPU has the multiprocessors that it has")
    device = on_backend.properties._replace(multiprocessors=multiprocessors)
    monkeypatch.setattr(on_backend, "properties", device)
    monkeypatch.setattr(launch, "_MOST_SAMPLES", 10)
    force(name)
    made = plans(monkeypatch)
    check_norm(rng, layer(), (333, 40) if name == "warp" else (83, 300), np.float32)
    assert any(plan.samples > 1 and plan.sample_blocks > 1 for plan in made)


@pytest.mark.parametrize("name", ["warp", "block", "stream"])
def test_parameters_anywhere(rng, force, name):
    """Rows read several parameters at once; these may begin anywhere, and be of any type."""
    force(name)
    shape = (6, 48) if name == "warp" else (4, 640)
    for dtype, weight_dtype, bias_dtype in [
        (np.float16, np.float16, np.float32),
        (np.float16, np.float64, np.float16),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16, np.float64),
        (np.float32, np.float64, np.float32),
        (np.float64, np.float32, np.float64),
    ]:
        x, dy, weight, bias = operands(rng, layer(), shape, dtype)
        weight, bias = (
            np.concatenate([values[:1], values]).astype(kind)[1:]
            for values, kind in ((weight, weight_dtype), (bias, bias_dtype))
        )
        _, saved = check_forward_of(layer(), x, weight, bias)
        _, dweight, dbias = layer().backward(dy, x, saved, weight)
        assert dweight.dtype == weight_dtype
        assert dbias.dtype == bias_dtype


@pytest.mark.parametrize("length", [257, 1001, 258])
@pytest.mark.parametrize("case", [layer(), rms(), group(1)], ids=str)
def test_rows_have_the_same_bits_wherever_they_lie(rng, case, length):
    """Rows of odd length begin at every distance from a 16-byte boundary."""
    x, dy, weight, bias = operands(rng, case, (1, length), np.float32)
    x, dy = np.repeat(x, 9, 0), np.repeat(dy, 9, 0)
    y, saved = case.forward(x, weight, bias)
    dx = case.backward(dy, x, saved, weight)[0]
    assert (y == y[0]).all()
    assert (dx == dx[0]).all()
    for i in range(1, 5):
        alone, saved = case.forward(x[i : i + 1], weight, bias)
        np.testing.assert_array_equal(alone, y[:1])
        dx_alone = case.backward(dy[i : i + 1], x[i : i + 1], saved, weight)[0]
        np.testing.assert_array_equal(dx_alone, dx[:1])


@pytest.mark.parametrize("per_sample", [True, False])
@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("name", ["warp", "stream"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_candidate_of_scale_shift(rng, force, name, axis, per_sample, dtype):
    """In one sweep forward, and in one backward."""
    if name == "warp" and axis == -1:
        pytest.skip("columns are never taken by warps")
    force(name)
    shape = (3, 12, 9, 3) if name == "warp" else (3, 20, 40) if axis == 1 else (3, 100, 12)
    check_norm(rng, scale_shift(per_sample, axis), shape, dtype)


def sparse(shape):
    """A float16 array of zeros that takes no memory before it is written."""
    memory = mmap.mmap(-1, int(np.prod(shape)) * 2)
    return np.frombuffer(memory, np.float16).reshape(shape)


def test_more_than_2_to_the_32_elements_in_runs(rng, on_backend, force):
    """The first and the last channel of 2^20, 6.4e9 elements apart."""
    if on_backend is None:
        pytest.skip("a GPU takes whole arrays: see test_large_arrays_on_a_gpu")
    force("block")
    x, dy, out = (sparse((3, 1 << 20, 2048)) for _ in range(3))
    ends = [0, (1 << 20) - 1]
    x[:, ends], dy[:, ends] = rng.standard_normal((2, 3, 2, 2048))
    result = reference.forward(x[:, ends])
    expected = reference.backward(dy[:, ends], x[:, ends])
    bounds = tolerances.backward_bounds(expected, result, dy[:, ends], None, 3 * 2048, x.dtype)
    with on_backend.only(*ends):
        _, saved = cunorm.batch_norm_forward(x, out=out)
        bound = tolerances.y_bound(result, None, None, 3 * 2048, x.dtype)
        assert_within(out[:, ends], result.y, bound, "y")
        _, dweight, dbias = cunorm.batch_norm_backward(dy, x, saved, out=out)
        assert_within(out[:, ends], expected.dx, bounds.dx, "dx")
        assert_within(dweight[ends], expected.dweight, bounds.dweight, "dweight")
        assert_within(dbias[ends], expected.dbias, bounds.dbias, "dbias")


def test_more_than_2_to_the_32_elements_in_columns(rng, on_backend, force):
    if on_backend is None:
        pytest.skip("a GPU takes whole arrays: see test_large_arrays_on_a_gpu")
    force("stream")
    rows = (1 << 26) + 3
    x, y = sparse((rows, 64)), sparse((rows, 64))
    x[:2], x[-2:] = rng.standard_normal((2, 2, 64))
    mean, inv_std = rng.standard_normal(64), np.ones(64)
    with on_backend.only(0):  # of the transform: the last part
        cunorm.batch_norm_transform(x, mean, inv_std, channel_axis=-1, out=y)
    np.testing.assert_allclose(y[-2:], x[-2:] - mean, atol=4e-3)
    assert not y[:2].any()


def test_update_of_running_statistics(rng):
    mean, var = rng.standard_normal((2, 300))
    running_mean, running_var = np.zeros(600, np.float32)[::2], np.ones(300, np.float16)
    cunorm.update_running_statistics(
        running_mean, running_var, mean, var, 5, exponential_average_factor=0.25
    )
    np.testing.assert_allclose(running_mean, 0.25 * mean, rtol=2e-7)
    np.testing.assert_allclose(running_var, 0.75 + 0.25 * var * 5 / 4, rtol=1e-3)
    before = running_var.copy()
    cunorm.update_running_statistics(None, running_var, mean, var, 5, momentum=1.0)
    np.testing.assert_array_equal(running_var, before)


def test_every_kernel_is_executed(rng, on_backend, force):
    """What no test executes does not exist."""
    if on_backend is None:
        pytest.skip("kernels are counted where they are executed on the CPU")
    names = set()
    for path in source.folder().glob("*.cu"):
        names |= set(re.findall(r"\b(\w+)\(\s*const \w+ a\s*\) \{", path.read_text()))
    before = Counter(on_backend.launched)
    x, dy = rng.standard_normal((2, 3, 8, 40)).astype(np.float32)
    for name in ("cached", "block", "stream"):
        force(name)
        _, saved = cunorm.batch_norm_forward(x)
        cunorm.batch_norm_backward(dy, x, saved)
        if name == "cached":
            continue
        cunorm.batch_norm_double_backward(dy, None, None, dy, x, saved)
        _, saved = cunorm.layer_norm_forward(x)
        cunorm.layer_norm_backward(dy, x, saved)
        cunorm.layer_norm_double_backward(dy, None, None, dy, x, saved)
        _, saved = cunorm.group_norm_forward(x, 2)
        cunorm.group_norm_backward(dy, x, saved)
    moments = cunorm.batch_norm_statistics(x)
    cunorm.update_running_statistics(
        np.zeros(8, np.float32), None, moments.mean, moments.m2, moments.count
    )
    assert set(on_backend.launched - before) == names
    assert len(names) == 21
