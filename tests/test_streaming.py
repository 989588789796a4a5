"""Outputs that are written past the caches: the same bits as others, wherever they lie."""

import ml_dtypes
import numpy as np
import pytest

import cunorm
from cunorm.cpu import backward, plan, pool, rows, statistics, transform
from cunorm.cpu.entry import Kernel
from cunorm.cpu.short_rows import short_backward, short_normalization
from cunorm.geometry import batch_norm_geometry, row_norm_geometry

pytestmark = pytest.mark.cpu

#: Runs of all lengths about a stage's (512 float32), whole cache lines and not, and from a step's
#: (64 float16) to two; few and many channels; channels last, with rows that follow each other in
#: whole cache lines and not; groups.
SHAPES = [
    ((3, 40, 49), 1), ((3, 34, 64), 1), ((2, 33, 101), 1), ((20, 33, 7, 7), 1), ((6, 37, 196), 1),
    ((5, 35, 511), 1), ((4, 34, 512), 1), ((4, 33, 513), 1), ((2, 3, 5000), 1), ((1, 70, 33), 1),
    ((40, 9, 30), 2), ((300, 24), 1), ((700, 32), 1), ((70, 9, 64), 2), ((1001, 20), 1),
]  # fmt: skip


def _placed(array, offset):
    """A copy that begins `offset` elements after a cache line does."""
    line = 64 // array.itemsize
    memory = np.zeros(array.size + 2 * line, array.dtype)
    start = -memory.ctypes.data % 64 // array.itemsize + offset
    copy = memory[start : start + array.size].reshape(array.shape)
    copy[...] = array
    return memory, copy


def _outputs(norm, dy, x, parameters, axis, offset):
    """What a norm writes in all its ways, and whether the memory around it is left alone."""
    channels = x.shape[axis]
    weight, bias, mean, var = parameters[:, :channels].copy()
    axis = {"channel_axis": axis}
    forward = getattr(cunorm, f"{norm}_forward")
    differentiate = getattr(cunorm, f"{norm}_backward")
    if norm == "scale_shift":
        ways = [
            lambda out: forward(x, weight, bias, **axis, out=out),
            lambda out: differentiate(dy, x, weight, **axis, out=out)[0],
        ]
    else:
        _, saved = forward(x, weight, bias, **axis)
        _, given = forward(x, weight, bias, mean, var, training=False, **axis)
        ways = [
            lambda out: forward(x, weight, bias, **axis, out=out)[0],
            lambda out: forward(x, weight, bias, mean, var, training=False, **axis, out=out)[0],
            lambda out: differentiate(dy, x, saved, weight, out=out)[0],
            lambda out: differentiate(dy, x, given, weight, out=out)[0],
        ]
    for way in ways:
        memory, out = _placed(np.zeros_like(x), offset)
        memory[...] = 7
        way(out)
        yield out.copy()
        out[...] = 7
        assert (memory == 7).all()


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_streamed_outputs_have_the_same_bits(rng, monkeypatch, shape, axis, dtype, offset):
    dy, x = rng.standard_normal((2, *shape)).astype(dtype)
    parameters = rng.uniform(0.5, 2, (4, 70)).astype(np.float64 if dtype == "float64" else "f4")
    for norm in ("batch_norm", "scale_shift"):
        results = []
        for least in (0, 1 << 40):
            for module in (transform, backward):
                monkeypatch.setattr(module, "STREAMING_BYTES", least)
            results.append(list(_outputs(norm, dy, x, parameters, axis, offset)))
        for streamed, plain in zip(*results, strict=True):
            np.testing.assert_array_equal(streamed, plain)


@pytest.mark.parametrize("shape", [(4, 20, 5000), (7000, 60)], ids=["segments", "columns"])
def test_only_what_is_larger_than_the_limit_is_streamed(rng, monkeypatch, shape):
    """All arrays of a call together; kernels are told by the last of the booleans they take."""
    x, dy = rng.standard_normal((2, *shape), np.float32)
    weight, bias, mean, var = rng.uniform(0.5, 2, (4, shape[1])).astype(np.float32)
    _, saved_rows = cunorm.layer_norm_forward(x, axis=-1)
    _, saved = cunorm.batch_norm_forward(x)
    _, given = cunorm.batch_norm_forward(x, None, None, mean, var, training=False)
    out = np.empty_like(x)
    told = []
    parts = (transform, rows, backward)
    kernels = {one for part in parts for one in vars(part).values() if isinstance(one, Kernel)}
    of_rows = row_norm_geometry(shape, x.ndim - 1)
    of_short_rows = short_normalization(of_rows, 4), short_backward(of_rows, 4)
    kernels |= {one for one in of_short_rows if one is not None}

    def listening(entry):
        def called(*arguments):
            told.extend([one for one in arguments if isinstance(one, bool)][-1:])
            return entry(*arguments)

        return called

    for operands, call in (
        (2, lambda: cunorm.batch_norm_forward(x, weight, bias, out=out)),
        (2, lambda: cunorm.batch_norm_forward(x, weight, bias, mean, var, training=False, out=out)),
        (2, lambda: cunorm.scale_shift_forward(x, weight, bias, out=out)),
        (2, lambda: cunorm.layer_norm_forward(x, axis=-1, out=out)),
        (3, lambda: cunorm.batch_norm_backward(dy, x, saved, out=out)),
        (3, lambda: cunorm.batch_norm_backward(dy, x, given, out=out)),
        (3, lambda: cunorm.layer_norm_backward(dy, x, saved_rows, out=out)),
    ):
        for excess in (0, 1):
            for module in (transform, backward):
                monkeypatch.setattr(module, "STREAMING_BYTES", operands * x.nbytes - excess)
            call()  # which compiles
            told.clear()
            with monkeypatch.context() as patch:
                for kernel in kernels:
                    patch.setattr(kernel, "entry", listening(kernel.entry))
                call()
            assert told[-1] == bool(excess)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("channels", [48, 64, 512, 1000, 1024])
def test_large_columns_have_the_same_bits_wherever_they_lie(rng, channels, dtype):
    """Rows that backward reads on and on are added from cache line to cache line."""
    most = max(statistics.FETCHED_BYTES, backward._READ_ON_BYTES)
    count = most // np.dtype(dtype).itemsize // channels + 9
    dy, x = rng.standard_normal((2, count, channels), np.float32).astype(dtype)
    weight = rng.uniform(0.5, 2, channels).astype(np.float32)
    results = []
    for offset in (0, 2, 7, 8):
        (_, dy), (_, x), (_, out) = (_placed(array, offset) for array in (dy, x, x))
        _, saved = cunorm.batch_norm_forward(x, weight, channel_axis=1, out=out)
        y = out.copy()
        gradients = cunorm.batch_norm_backward(dy, x, saved, weight, out=out)
        results.append((y, saved.mean, saved.inv_std, gradients[0].copy(), *gradients[1:]))
    for moved in results[1:]:
        for first, other in zip(results[0], moved, strict=True):
            np.testing.assert_array_equal(other, first)
    reference = x.astype(np.float64)
    np.testing.assert_allclose(results[0][1], reference.mean(axis=0), rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "shape", [(70, 256, 64), (6, 2, 98304), (20001, 64), (2500, 512), (1300, 1000), (650, 2016)]
)
def test_what_is_summed_and_written_in_one_loop_has_the_same_bits(rng, monkeypatch, shape, dtype):
    """Given statistics, arrays larger than a near cache; also into dy or x itself."""
    number = "float64" if dtype == "float64" else "float32"
    dy, x = rng.standard_normal((2, *shape)).astype(dtype)
    dy[dy < -1] = -0.0
    weight, mean, var = rng.uniform(0.5, 2, (3, shape[1])).astype(number)
    _, saved = cunorm.batch_norm_forward(x, weight, None, mean, var, training=False)
    assert x.nbytes > backward._READ_ON_BYTES

    def gradients(least, offset, into=None):
        for module in (transform, backward):
            monkeypatch.setattr(module, "STREAMING_BYTES", least)
        (_, of_y), (_, data), (memory, out) = (
            _placed(one, offset) for one in (dy, x, np.zeros_like(x))
        )
        memory[...] = 7
        out = {"dy": of_y, "x": data}.get(into, out)
        found = cunorm.batch_norm_backward(of_y, data, saved, weight, out=out)
        assert found[0] is out
        if into is None:
            found = out.copy(), *found[1:]
            out[...] = 7
            assert (memory == 7).all()
        return [one.view(f"u{one.itemsize}") for one in found]

    expected = gradients(1 << 40, 0)
    step = 16 // x.itemsize
    ways = [(0, None), (1, None), (2, None), (step, None), (step, "dy"), (0, "x"), (2, "x")]
    for offset, into in ways:
        for one, other in zip(gradients(0, offset, into), expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("groups", [2, 4])
def test_streamed_groups_have_the_same_bits(rng, monkeypatch, groups, dtype):
    """Several channels share a statistic, and their runs follow each other."""
    dy, x = rng.standard_normal((2, 6, 8, 300)).astype(dtype)
    weight, bias = rng.standard_normal((2, 8), dtype=np.float32)
    results = []
    for least in (0, 1 << 40):
        for module in (transform, backward):
            monkeypatch.setattr(module, "STREAMING_BYTES", least)
        y, saved = cunorm.group_norm_forward(x, groups, weight, bias)
        results.append((y, *cunorm.group_norm_backward(dy, x, saved, weight)))
    for streamed, plain in zip(*results, strict=True):
        np.testing.assert_array_equal(streamed, plain)


@pytest.fixture
def fresh_plans(monkeypatch, forget_plans):
    """Forgets what has been planned, when called.

    Plans are those for a fast third-level cache, with which more runs are taken as columns.
    """
    monkeypatch.setattr(plan, "_APART_BYTES", 3 << 20)
    for name in ("_MIDDLING_RUN", "_MIDDLING_HALF_RUN"):
        monkeypatch.setattr(plan, name, (128, 256, 256, 256))
    forget_plans()
    return forget_plans


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "shape", [(40, 7, 32), (17, 9, 33), (16, 5, 100), (33, 4, 8, 8), (20, 150, 32)]
)
def test_blocks_of_columns_and_a_sweep_of_runs_have_the_same_bits(
    rng, monkeypatch, fresh_plans, shape, dtype
):
    """Blocks are written position by position, or run by run; or runs when all is summed."""
    dy, x = rng.standard_normal((2, *shape)).astype(dtype)
    weight, bias = rng.standard_normal((2, shape[1])).astype("f8" if dtype == "float64" else "f4")
    geometry, threads = batch_norm_geometry(shape, 1), cunorm.get_num_threads()
    results, plans = [], []
    for least, runs in ((0, plan._whole_runs), (1 << 40, plan._whole_runs), (0, lambda *_: None)):
        monkeypatch.setattr(plan, "_APART_BYTES", least)
        monkeypatch.setattr(plan, "_whole_runs", runs)
        fresh_plans()
        running = np.zeros_like(weight), np.ones_like(bias)
        y, saved = cunorm.batch_norm_forward(x, weight, bias, *running)
        gradients = cunorm.batch_norm_backward(dy, x, saved, weight)
        results.append((y, saved.mean, saved.inv_std, *running, *gradients))
        forward = transform._fused(geometry, x.dtype, True, threads, False)
        plans.append((forward, backward._fused(geometry, x.dtype, True, threads, False)))
    assert plans[0][0].kernel is plans[0][1] is None
    for by_runs, (there, back) in zip((True, False), plans[1:], strict=True):
        assert there.kernel is transform._normalize_columns
        assert back.kernel is backward._backward_columns
        assert there.numbers[-1] == back.numbers[-1] == by_runs
        assert (min(there.tasks, back.tasks) > 1) == (shape[1] == 150)
    for others in results[1:]:
        for first, other in zip(results[0], others, strict=True):
            np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(40, 70, 33), (9, 2, 4096), (1, 900, 100), (5, 301, 64)])
def test_runs_have_the_same_bits_in_several_threads_and_streamed(
    rng, monkeypatch, threads, fresh_plans, shape, dtype
):
    """Tasks are so small that, but for two channels, they begin and end within a sample."""
    monkeypatch.setattr(pool, "_BYTES_PER_LISTENER", 1 << 10)
    monkeypatch.setattr(plan, "_SWEEP_BYTES", 1 << 10)
    fresh_plans()
    dy, x = rng.standard_normal((2, *shape)).astype(dtype)
    numbers = rng.uniform(0.5, 2, (6, shape[1])).astype("f8" if dtype == "float64" else "f4")
    mean, var, *sums, weight, bias = numbers
    results = []
    for number, least in ((1, 1 << 40), (3, 1 << 40), (2, 0)):
        threads(number)
        for module in (transform, backward):
            monkeypatch.setattr(module, "STREAMING_BYTES", least)
        y, _ = cunorm.batch_norm_forward(x, weight, bias, mean, var, training=False)
        dx = cunorm.batch_norm_backward_transform(dy, x, mean, var, weight, *sums, 99)
        results.append((y, dx))
    geometry = batch_norm_geometry(shape, 1)
    kernels = [transform._given(geometry, x.dtype, 2, streaming) for streaming in (False, True)]
    assert kernels[0].kernel is transform._transform_runs is not kernels[1].kernel
    assert kernels[0].tasks > 3
    for others in results[1:]:
        for first, other in zip(results[0], others, strict=True):
            np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize(
    ("shape", "dtype", "streaming", "apart"),
    [
        ((96, 256, 32), "float32", False, True),
        ((95, 256, 32), "float32", False, False),  # less than 3 MB
        ((128, 256, 32), "float16", False, False),  # 2 MB
        ((128, 256, 32), "float32", True, False),
        ((64, 32, 32, 32), "float32", False, False),  # segments
        ((128, 256, 31), "float32", False, False),  # no whole vectors
        ((128, 256, 126), "float16", False, False),  # nor here
        ((128, 256, 143), "float16", False, True),  # but these are long
    ],
)
@pytest.mark.usefixtures("fresh_plans")
def test_columns_that_a_sweep_of_runs_follows(shape, dtype, streaming, apart):
    geometry, dtype = batch_norm_geometry(shape, 1), np.dtype(dtype)
    forward = transform._fused(geometry, dtype, True, 2, streaming).kernel
    assert (forward is None) == apart
    assert (backward._fused(geometry, dtype, True, 2, streaming) is None) == apart


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("length", [3, 32, 49, 128, 200, 513])
def test_streamed_rows_have_the_same_bits(rng, monkeypatch, length, dtype, offset):
    """Rows that follow each other, shorter than a stage and longer, and those of two groups."""
    dy, x = rng.standard_normal((2, 150, 2 * length)).astype(dtype)
    weight, bias = rng.standard_normal((2, 2 * length)).astype("f8" if dtype == "float64" else "f4")
    rows = dy.reshape(300, length), x.reshape(300, length)
    of_row = weight[:length], bias[:length]
    results = []
    for least in (0, 1 << 40):
        for module in (transform, backward):
            monkeypatch.setattr(module, "STREAMING_BYTES", least)
        found = []
        for forward, differentiate, (gradient, data), parameters in (
            (cunorm.layer_norm_forward, cunorm.layer_norm_backward, rows, of_row),
            (cunorm.rms_norm_forward, cunorm.rms_norm_backward, rows, of_row[:1]),
            (
                lambda x, *own, out: cunorm.group_norm_forward(x, 2, *own, out=out),
                cunorm.group_norm_backward, (dy, x), (weight, bias),
            ),
        ):  # fmt: skip
            memory, out = _placed(np.zeros_like(data), offset)
            memory[...] = 7
            _, saved = forward(data, *parameters, out=out)
            found.append(out.copy())
            found += differentiate(gradient, data, saved, weight=parameters[0], out=out)[1:]
            found.append(out.copy())
            out[...] = 7
            assert (memory == 7).all()
        results.append(found)
    for streamed, plain in zip(*results, strict=True):
        np.testing.assert_array_equal(streamed, plain)


@pytest.mark.parametrize("length", [1, 2, 33])
def test_rounding_to_bfloat16(rng, length):
    """To nearest, ties to even, subnormals kept, and no NaN becomes a number.

    Neighbours are different values, or the same ones.
    """
    bits = rng.integers(0, 1 << 32, 100_000, dtype=np.uint32)
    ties = (bits & 0xFFFF0000) | 0x8000
    edges = np.array(
        [0, 0x8000_0000, 1, 0x7FFF, 0x8000, 0x8001, 0x1_8000, 0x7F7F_FFFF, 0x7F7F_7FFF, 0x7F80_0000,
         0xFF80_0000, 0x7FC0_0000, 0x7FFF_FFFF, 0xFFFF_FFFF],
        np.uint32,
    )  # fmt: skip
    values = np.concatenate([bits, ties, edges]).view(np.float32)
    # A shift of x = 0 is rounded as it is.
    x = np.zeros((1, values.size, length), ml_dtypes.bfloat16)
    with np.errstate(all="ignore"):
        y = cunorm.scale_shift_forward(x, np.ones(values.size, np.float32), values)[0]
        values = np.repeat(values, length).reshape(y.shape)
        expected = values.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(values))
    numbers = ~np.isnan(values) & (values != 0)  # 0 + (-0) is 0
    np.testing.assert_array_equal(y[numbers].view(np.int16), expected[numbers].view(np.int16))


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)], ids=str)
def test_arrays_in_any_place_have_the_same_bits(rng, order):
    """Also an unaligned one, which is copied: in its own order."""
    shape = (19, 65, 196)
    values = rng.standard_normal((2, *shape), dtype=np.float32)

    def laid(array, offset):
        turned = array.transpose(order)
        room = np.empty(turned.nbytes + 128, np.uint8)
        first = -room.ctypes.data % 64 + offset
        copy = np.ndarray(turned.shape, np.float32, room, first)
        copy[...] = turned
        return copy.transpose(np.argsort(order))

    results = []
    for offset in (0, 4, 2):
        dy, x = (laid(array, offset) for array in values)
        assert x.flags.aligned == (offset != 2)
        y, saved = cunorm.batch_norm_forward(x)
        gradients = cunorm.batch_norm_backward(dy, x, saved)
        _, *apart = cunorm.batch_norm_backward(dy, x, saved, output_mask=(False, True, True))
        results.append((*cunorm.batch_norm_statistics(x), y, *saved[:2], *gradients, *apart))
    for others in results[1:]:
        for first, other in zip(results[0], others, strict=True):
            np.testing.assert_array_equal(other, first)
