"""Double backward passes: gradients of gradients, against their definition and in float64."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import reference
import tolerances
from cases import DTYPES, accumulator, permuted, with_gaps
from test_gradients import TOLERANCE, differences
from tolerances import assert_within

import cunorm

SUBSETS = list(itertools.product([True, False], repeat=3))
NAMES = ("dy", "x", "weight")


def given(use, *upstream):
    """Those of the upstream gradients that are wanted; None for the others."""
    return [array if wanted else None for wanted, array in zip(use, upstream, strict=True)]


def check_differences(forward, backward, double_backward, x, dy, weight, upstream, use):
    """All of them against differences of a function of the first gradients."""

    def loss():
        gradients = backward(dy, x, forward(), weight)
        pairs = zip(use, gradients, upstream, strict=True)
        return sum(float((gradient * other).sum()) for wanted, gradient, other in pairs if wanted)

    found = double_backward(*given(use, *upstream), dy, x, forward(), weight)
    for name, argument, actual in zip(NAMES, (dy, x, weight), found, strict=True):
        expected = differences(loss, argument)
        np.testing.assert_allclose(
            actual, expected, rtol=TOLERANCE, atol=10 * TOLERANCE, err_msg=name
        )


@pytest.mark.parametrize("use", SUBSETS, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 4), 1), ((3, 2, 5), 1), ((2, 3, 2, 3), -1), ((2, 2, 36), 1)], ids=str
)
def test_batch_norm_by_differences(rng, shape, axis, training, use):
    number = shape[axis]
    x, dy, gdx = rng.standard_normal((3, *shape))
    weight, bias, mean, gdweight, gdbias = rng.standard_normal((5, number))
    var = rng.uniform(0.5, 2, number)

    def forward():
        return cunorm.batch_norm_forward(
            x, weight, bias, mean, var, training=training, eps=0.1, channel_axis=axis,
            exponential_average_factor=0.0,
        )[1]  # fmt: skip

    check_differences(
        forward, cunorm.batch_norm_backward, cunorm.batch_norm_double_backward,
        x, dy, weight, (gdx, gdweight, gdbias), use,
    )  # fmt: skip


@pytest.mark.parametrize("use", SUBSETS, ids=str)
@pytest.mark.parametrize(
    ("shape", "axis"), [((4, 7), -1), ((3, 2, 5), 1), ((6,), 0), ((3, 1), -1)], ids=str
)
def test_layer_norm_by_differences(rng, shape, axis, use):
    x, dy, gdx = rng.standard_normal((3, *shape))
    weight, bias, gdweight, gdbias = rng.standard_normal((4, *shape[axis:]))

    def forward():
        return cunorm.layer_norm_forward(x, weight, bias, axis=axis, eps=0.1)[1]

    check_differences(
        forward, cunorm.layer_norm_backward, cunorm.layer_norm_double_backward,
        x, dy, weight, (gdx, gdweight, gdbias), use,
    )  # fmt: skip


# --- in every dtype and plan ---------------------------------------------------------


def draw(rng, shape, number, dtype, offset=0.7, of_gradients=(0.0, 0.0)):
    x = (rng.standard_normal(shape) * 1.5 + offset).astype(dtype)
    dy, gdx = (rng.standard_normal(shape) + mean for mean in of_gradients)
    dy, gdx = dy.astype(dtype), gdx.astype(dtype)
    weight, gdweight, gdbias = rng.standard_normal((3, *number)).astype(accumulator(dtype))
    return gdx, gdweight, gdbias, dy, x, weight


def check(norm, upstream, dy, x, saved, weight, function, statistics=None):
    """Against the reference within bounds; returns what was found."""
    kept = [None if a is None else a.copy() for a in (*upstream, dy, x, weight)]
    found = function(*upstream, dy, x, saved, weight)
    for before, after in zip(kept, (*upstream, dy, x, weight), strict=True):
        if before is not None:
            np.testing.assert_array_equal(after, before)
    options = statistics or {}
    expected = reference.double_backward(*upstream, dy, x, weight, norm=norm, **options)
    result = reference.forward(x, norm=norm, **options)
    count = norm.count if result.own else 1
    bounds = tolerances.double_backward_bounds(
        expected, result, *upstream, dy, weight, count, x.dtype
    )
    for name, actual in zip(expected._fields, found, strict=True):
        assert_within(actual, getattr(expected, name), getattr(bounds, name), name)
    assert (found[0].dtype, found[1].dtype) == (x.dtype, x.dtype)
    return found


def check_batch_norm(rng, shape, axis, dtype, training=True, use=(True, True, True), **options):
    number = (shape[axis],)
    *upstream, dy, x, weight = draw(rng, shape, number, dtype, **options)
    running = {}
    if not training:
        running = {
            "mean": rng.standard_normal(number).astype(accumulator(dtype)),
            "var": rng.uniform(0.5, 2, number).astype(accumulator(dtype)),
        }
    _, saved = cunorm.batch_norm_forward(
        x, weight, None, running.get("mean"), running.get("var"), training=training,
        channel_axis=axis,
    )  # fmt: skip
    norm = reference.channels(shape, axis)
    return check(
        norm, given(use, *upstream), dy, x, saved, weight, cunorm.batch_norm_double_backward,
        running,
    )  # fmt: skip


def check_layer_norm(rng, shape, axis, dtype, use=(True, True, True), **options):
    *upstream, dy, x, weight = draw(rng, shape, shape[axis:], dtype, **options)
    _, saved = cunorm.layer_norm_forward(x, weight, axis=axis)
    return check(
        reference.rows(shape, axis), given(use, *upstream), dy, x, saved, weight,
        cunorm.layer_norm_double_backward,
    )  # fmt: skip


CHANNELS = [
    ((2, 3, 4), 1),
    ((16, 5, 11, 13), 1),
    ((6, 24, 80), 1),
    ((5, 2, 1000), 1),
    ((3, 1, 2049), 1),
    ((300, 7), 1),
    ((9, 12, 17), -1),
    ((40, 6, 6, 70), -1),
    ((1, 3, 700), 1),
]
ROWS = [((2, 3), -1), ((19, 130), -1), ((3, 5, 7, 11), 2), ((2, 9001), -1), ((700, 3), -1)]


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("shape", "axis"), CHANNELS, ids=str)
def test_batch_norm(rng, shape, axis, dtype, training):
    check_batch_norm(rng, shape, axis, dtype, training)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("shape", "axis"), ROWS, ids=str)
def test_layer_norm(rng, shape, axis, dtype):
    check_layer_norm(rng, shape, axis, dtype)


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "streamed"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("use", [(True, True, True), (False, True, True)], ids=["all", "no gdx"])
def test_small_pieces(rng, small_pieces, dtype, resident, use):
    """All ways in which arrays are cut."""
    small_pieces(resident)
    for shape, axis in CHANNELS:
        check_batch_norm(rng, shape, axis, dtype, use=use)
        check_batch_norm(rng, shape, axis, dtype, training=False, use=use)
    for shape, axis in ROWS:
        check_layer_norm(rng, shape, axis, dtype, use=use)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float64], ids=str)
def test_large_means(rng, dtype):
    """Data far from zero: what rounding takes from the mean is made up for."""
    check_batch_norm(rng, (20, 3, 30), 1, dtype, offset=3e4)
    check_layer_norm(rng, (5, 400), -1, dtype, offset=3e4)


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "streamed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_large_means_of_gradients(rng, small_pieces, dtype, resident):
    """Their product is no part of the result, however large it is."""
    ranges = ((100.0, -200.0), (1e3, 500.0)) if dtype == np.float16 else ((1e3, -2e3), (1e4, 3e4))
    for means in ranges:
        for pieces in (False, True):
            if pieces:
                small_pieces(resident)
            for shape, axis in CHANNELS:
                check_batch_norm(rng, shape, axis, dtype, of_gradients=means)
            for shape, axis in ROWS[1:4]:  # not the shortest, whose numbers leave float16's range
                check_layer_norm(rng, shape, axis, dtype, of_gradients=means)


def test_gradients_that_jump(rng):
    """Where a sum begins says nothing of how it goes on."""
    shape = (40, 3, 500)
    gdx, gdweight, gdbias, dy, x, weight = draw(rng, shape, (3,), np.float32)
    for array in (gdx, dy):
        array[1] += 1e3
        array[20:] -= 2e3
        array[0, 0, 0] = 1e5
    _, saved = cunorm.batch_norm_forward(x, weight)
    upstream = (gdx, gdweight, gdbias)
    norm = reference.channels(shape)
    check(norm, upstream, dy, x, saved, weight, cunorm.batch_norm_double_backward)
    dy, x, gdx = (np.moveaxis(a, 1, 2).copy() for a in (dy, x, gdx))
    _, saved = cunorm.batch_norm_forward(x, weight, channel_axis=2)
    upstream = (gdx, gdweight, gdbias)
    norm = reference.channels(x.shape, 2)
    check(norm, upstream, dy, x, saved, weight, cunorm.batch_norm_double_backward)


@pytest.mark.parametrize("scale", [1e-16, 1e16])
def test_tiny_and_huge_deviations(rng, scale):
    """inv_std squared may be as large as float32 holds; its cube need not be in range."""
    *upstream, dy, x, weight = draw(rng, (20, 3, 30), (3,), np.float32)
    x *= np.float32(scale)
    _, saved = cunorm.batch_norm_forward(x, weight, eps=0.0)
    norm = reference.channels(x.shape)
    options = {"mean": None, "var": None, "eps": 0.0}
    check(norm, upstream, dy, x, saved, weight, cunorm.batch_norm_double_backward, options)
    *upstream, dy, x, weight = draw(rng, (7, 300), (300,), np.float32)
    x *= np.float32(scale)
    _, saved = cunorm.layer_norm_forward(x, weight, eps=0.0)
    norm = reference.rows(x.shape)
    check(norm, upstream, dy, x, saved, weight, cunorm.layer_norm_double_backward, options)


@pytest.mark.cpu
@pytest.mark.parametrize("resident", [True, False])
def test_every_kernel_is_taken(rng, small_pieces, monkeypatch, resident):
    """What the tests of small pieces rely on."""
    from cunorm.cpu import double_backward as module

    small_pieces(resident)
    assert module.STREAMING_BYTES == 0
    taken, run = set(), module.run

    def note(kernel, *arguments):
        taken.add(kernel.__name__.strip("_"))
        return run(kernel, *arguments)

    monkeypatch.setattr(module, "run", note)
    for shape, axis in CHANNELS:
        check_batch_norm(rng, shape, axis, np.float32)
    for shape, axis in ROWS:
        check_layer_norm(rng, shape, axis, np.float32)
    if resident:
        expected = {f"double_backward_{kind}" for kind in ("segments", "columns", "rows")}
    else:
        kinds = ("segments", "columns", "rows")
        expected = {f"{verb}_{kind}" for verb in ("reduce", "transform") for kind in kinds}
    assert expected <= taken


@pytest.mark.parametrize("use", SUBSETS, ids=str)
def test_subsets(rng, use):
    """What is None counts as zeros, to the bit where it is not multiplied away."""
    for training in (True, False):
        shape = (6, 5, 9)
        *upstream, dy, x, weight = draw(rng, shape, (5,), np.float32)
        running = np.zeros(5, np.float32), np.ones(5, np.float32)
        _, saved = cunorm.batch_norm_forward(x, weight, None, *running, training=training)
        found = cunorm.batch_norm_double_backward(*given(use, *upstream), dy, x, saved, weight)
        zeros = [a if u else np.zeros_like(a) for u, a in zip(use, upstream, strict=True)]
        expected = cunorm.batch_norm_double_backward(*zeros, dy, x, saved, weight)
        for actual, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(actual, other)


def test_without_weight(rng):
    """A weight of 1 everywhere, whose gradient is in the accumulator type."""
    for function, shape, number, forward in (
        (cunorm.batch_norm_double_backward, (6, 5, 9), (5,), cunorm.batch_norm_forward),
        (cunorm.layer_norm_double_backward, (6, 9), (9,), cunorm.layer_norm_forward),
    ):
        *upstream, dy, x, weight = draw(rng, shape, number, np.float16)
        weight = np.ones_like(weight)
        _, saved = forward(x)
        found = function(*upstream, dy, x, saved)
        for actual, other in zip(found, function(*upstream, dy, x, saved, weight), strict=True):
            np.testing.assert_array_equal(actual, other)
        assert found[2].dtype == np.float32


@pytest.mark.parametrize("weight_dtype", [np.float16, np.float32, np.float64])
def test_parameters_of_other_dtypes(rng, weight_dtype):
    shape = (6, 5, 9)
    gdx, gdweight, gdbias, dy, x, weight = draw(rng, shape, (5,), np.float16)
    weight = weight.astype(weight_dtype)
    _, saved = cunorm.batch_norm_forward(x, weight)
    found = cunorm.batch_norm_double_backward(
        gdx, gdweight.astype(np.float64), gdbias.astype(ml_dtypes.bfloat16), dy, x, saved, weight
    )
    rounded = gdbias.astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = cunorm.batch_norm_double_backward(
        gdx, gdweight, rounded, dy, x, saved, weight.astype(np.float32)
    )
    assert found[2].dtype == weight_dtype
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    # rounded once, to the dtype of weight
    roundoff = max(tolerances.roundoff(weight_dtype), tolerances.roundoff(np.float32))
    np.testing.assert_allclose(found[2], expected[2], rtol=1.001 * roundoff)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)], ids=str)
def test_memory_order(rng, order):
    """Results lie as x does; the other arrays may lie as they like."""
    gdx, gdweight, gdbias, dy, x, weight = draw(rng, (4, 5, 3, 6), (5,), np.float32)
    _, saved = cunorm.batch_norm_forward(x, weight)
    expected = cunorm.batch_norm_double_backward(gdx, gdweight, gdbias, dy, x, saved, weight)
    turned = permuted(x, order)
    _, saved = cunorm.batch_norm_forward(turned, weight)
    for change in (lambda a: permuted(a, order), lambda a: a, with_gaps, np.asfortranarray):
        found = cunorm.batch_norm_double_backward(
            change(gdx), gdweight, gdbias, change(dy), turned, saved, weight
        )
        for actual, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(actual, other, rtol=1e-5, atol=1e-4)
        for result in found[:2]:
            assert result.transpose(order).flags.c_contiguous
    rows = permuted(x, (1, 0, 2, 3))
    _, saved = cunorm.layer_norm_forward(rows, axis=2)
    found = cunorm.layer_norm_double_backward(gdx, None, None, dy, rows, saved)
    _, saved = cunorm.layer_norm_forward(x, axis=2)
    expected = cunorm.layer_norm_double_backward(gdx, None, None, dy, x, saved)
    for actual, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (2, 0, 4)], ids=str)
def test_nothing(shape):
    x = np.zeros(shape, np.float32)
    _, saved = cunorm.batch_norm_forward(x)
    ones = np.ones(shape[1], np.float32)
    ddy, ddx, ddweight = cunorm.batch_norm_double_backward(x, ones, ones, x, x, saved)
    assert ddy.shape == ddx.shape == shape
    assert ddweight.shape == (shape[1],)
    assert not ddweight.any()
    _, saved = cunorm.layer_norm_forward(x)
    ones = np.ones(shape[2], np.float32)
    ddy, ddx, ddweight = cunorm.layer_norm_double_backward(x, ones, ones, x, x, saved)
    assert ddy.shape == ddx.shape == shape
    assert ddweight.shape == (shape[2],)
    assert not ddweight.any()


def test_infinities_stay_in_their_channel(rng):
    gdx, gdweight, gdbias, dy, x, weight = draw(rng, (4, 3, 5), (3,), np.float32)
    _, saved = cunorm.batch_norm_forward(x, weight)
    expected = cunorm.batch_norm_double_backward(gdx, gdweight, gdbias, dy, x, saved, weight)
    gdx[2, 1, 3] = np.inf
    with np.errstate(all="raise"):
        found = cunorm.batch_norm_double_backward(gdx, gdweight, gdbias, dy, x, saved, weight)
    for actual, other in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(actual[:, ::2], other[:, ::2])
        assert not np.isfinite(actual[:, 1]).any()
    assert not np.isfinite(found[2][1])


@pytest.mark.parametrize("axis", [1, -1], ids=["first", "last"])
@pytest.mark.parametrize("streamed", [False, True])
def test_what_given_statistics_leave_out(rng, small_pieces, axis, streamed):
    """Infinities that the formula has not do no harm: 0 * inf is in no result."""
    if streamed:
        small_pieces(False)
    shape = (8, 6, 5, 6)
    gdx, gdweight, gdbias, dy, x, weight = draw(rng, shape, (6,), np.float32)
    running = rng.standard_normal(6).astype(np.float32), np.ones(6, np.float32)
    _, saved = cunorm.batch_norm_forward(
        x, weight, None, *running, training=False, channel_axis=axis
    )

    def found(*arguments):
        return cunorm.batch_norm_double_backward(*arguments, saved, weight)

    def finite(array):
        return np.isfinite(array).all()

    place = (3, 2, 1, 4)
    channel = place[axis]
    others = np.arange(6) != channel
    expected = found(gdx, gdweight, gdbias, dy, x)
    endless = gdx.copy()
    endless[place] = np.inf
    ddy, ddx, ddweight = found(endless, gdweight, gdbias, dy, x)
    np.testing.assert_array_equal(ddx, expected[1])
    elsewhere = np.ones(shape, bool)
    elsewhere[place] = False
    np.testing.assert_array_equal(ddy[elsewhere], expected[0][elsewhere])
    assert ddy[place] == np.copysign(np.inf, weight[channel])
    assert ddweight[channel] == np.copysign(np.inf, dy[place])
    np.testing.assert_array_equal(ddweight[others], expected[2][others])

    endless = x.copy()
    endless[place] = np.inf
    ddy, ddx, ddweight = found(gdx, gdweight, gdbias, dy, endless)
    np.testing.assert_array_equal(ddx, expected[1])
    np.testing.assert_array_equal(ddweight, expected[2])
    np.testing.assert_array_equal(ddy[elsewhere], expected[0][elsewhere])
    assert ddy[place] == np.copysign(np.inf, gdweight[channel])
    assert all(map(finite, found(gdx, None, gdbias, dy, endless)))

    endless = dy.copy()
    endless[place] = np.inf
    ddy, ddx, _ = found(gdx, None, gdbias, endless, x)
    assert finite(ddy)
    assert not ddx.any()
    ddy, ddx, _ = found(gdx, gdweight, gdbias, endless, x)
    np.testing.assert_array_equal(ddy, expected[0])
    assert ddx[place] == np.copysign(np.inf, gdweight[channel])
    np.testing.assert_array_equal(ddx[elsewhere], expected[1][elsewhere])

    weight = weight.copy()
    weight[channel] = np.inf
    ddy, ddx, ddweight = found(gdx, gdweight, gdbias, dy, x)
    np.testing.assert_array_equal(ddx, expected[1])
    np.testing.assert_array_equal(ddweight, expected[2])
    signs = np.copysign(np.inf, np.take(gdx, channel, axis))
    np.testing.assert_array_equal(np.take(ddy, channel, axis), signs)


def test_nothing_upstream_of_dx(rng):
    """Then dweight has no gradient with respect to the weight, whatever dy is."""
    _, gdweight, gdbias, dy, x, weight = draw(rng, (6, 3, 5), (3,), np.float32)
    dy[2, 1, 3] = np.inf
    for training in (True, False):
        running = np.zeros(3, np.float32), np.ones(3, np.float32)
        _, saved = cunorm.batch_norm_forward(x, weight, None, *running, training=training)
        ddy, _, ddweight = cunorm.batch_norm_double_backward(
            None, gdweight, gdbias, dy, x, saved, weight
        )
        assert np.isfinite(ddy).all()
        assert not ddweight.any()
    _, saved = cunorm.layer_norm_forward(x)
    ddy, _, ddweight = cunorm.layer_norm_double_backward(None, x[0, 0], None, dy, x, saved)
    assert np.isfinite(ddy).all()
    assert not ddweight.any()


@pytest.mark.cpu
def test_threads_make_no_difference(rng, threads, small_pieces):
    for resident in (True, False):
        small_pieces(resident)
        for shape, axis, forward, double_backward, number in (
            ((64, 5, 30), 1, cunorm.batch_norm_forward, cunorm.batch_norm_double_backward, (5,)),
            ((900, 6), -1, cunorm.batch_norm_forward, cunorm.batch_norm_double_backward, (6,)),
            ((64, 700), -1, cunorm.layer_norm_forward, cunorm.layer_norm_double_backward, (700,)),
        ):
            *upstream, dy, x, weight = draw(rng, shape, number, np.float32)
            named = "axis" if forward is cunorm.layer_norm_forward else "channel_axis"
            _, saved = forward(x, weight, **{named: axis})
            found = []
            for number_of_threads in (1, 2, 5):
                threads(number_of_threads)
                found.append(double_backward(*upstream, dy, x, saved, weight))
            for other in found[1:]:
                for actual, expected in zip(other, found[0], strict=True):
                    np.testing.assert_array_equal(actual, expected)


X = np.ones((4, 3, 5), np.float32)
VECTOR = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"gdx": X[:2]}, ValueError, r"gdx: expected the shape of x, \(4, 3, 5\), got \(2, 3, 5\)"),
        ({"gdx": X.astype(np.float64)}, TypeError, "gdx: expected the dtype of x, float32"),
        ({"gdx": 3}, TypeError, "gdx: expected an array"),
        ({"gdweight": np.ones(4)}, ValueError, r"gdweight: expected shape \(3,\), one value a cha"),
        ({"gdweight": np.ones(3, int)}, TypeError, "gdweight: expected dtype float16"),
        ({"gdbias": X}, ValueError, r"gdbias: expected shape \(3,\)"),
        ({"dy": None}, TypeError, "dy: expected an array, got None"),
        ({"dy": X[:2]}, ValueError, "dy: expected the shape of x"),
        ({"x": X[:2]}, ValueError, "x: expected the shape of the forward call"),
        ({"x": None}, TypeError, "x: expected an array, got None"),
        ({"weight": np.ones(4, np.float32)}, ValueError, r"weight: expected shape \(3,\)"),
        ({"saved": 3}, TypeError, "saved: expected the BatchNormSaved that batch_norm_forward"),
    ],
    ids=str,
)
def test_errors(bad, error, message):
    _, saved = cunorm.batch_norm_forward(X, VECTOR)
    good = {"gdx": X, "gdweight": VECTOR, "gdbias": VECTOR, "dy": X, "x": X, "saved": saved,
            "weight": VECTOR}  # fmt: skip
    with pytest.raises(error, match=message):
        cunorm.batch_norm_double_backward(**good | bad)
    with pytest.raises(TypeError, match="saved: expected the LayerNormSaved that layer_norm_forw"):
        cunorm.layer_norm_double_backward(X, None, None, X, X, saved)
