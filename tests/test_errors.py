"""Bad input: a clear error that names the argument, and nothing is modified."""

import ml_dtypes
import numpy as np
import pytest
from cases import group, instance, layer, rms, scale_shift

import cunorm
from cunorm import arrays

SHAPE = (6, 4, 5)


class State:
    """Valid arguments of every function, and copies to compare with afterwards."""

    def __init__(self):
        rng = np.random.default_rng(7)
        self.x, self.dy, self.out = rng.standard_normal((3, *SHAPE)).astype(np.float32)
        vectors = rng.standard_normal((3, 4)).astype(np.float32)
        self.weight, self.bias, self.running_mean = (v.copy() for v in vectors)  # none is a view
        self.running_var = rng.uniform(1, 2, 4).astype(np.float32)
        self.saved = cunorm.batch_norm_forward(self.x)[1]

    def forward(self, **changes):
        names = ("x", "weight", "bias", "running_mean", "running_var", "out")
        return cunorm.batch_norm_forward(**{n: getattr(self, n) for n in names} | changes)

    def backward(self, **changes):
        names = ("dy", "x", "saved", "weight", "out")
        return cunorm.batch_norm_backward(**{n: getattr(self, n) for n in names} | changes)


@pytest.fixture
def state():
    """Fails the test if an array of the state has changed."""
    state = State()
    before = {n: v.copy() for n, v in vars(state).items() if isinstance(v, np.ndarray)}
    yield state
    for name, value in before.items():
        np.testing.assert_array_equal(getattr(state, name), value, err_msg=name)


def like(dtype, shape=SHAPE):
    return np.zeros(shape, dtype)


FORWARD = [
    ({"x": None}, TypeError, "x: expected an array, got None"),
    ({"x": [[1.0, 2.0]]}, TypeError, r"x: expected an array .* got list"),
    ({"x": np.ma.zeros(SHAPE)}, TypeError, "x: .* masked array"),
    ({"x": np.zeros(6, np.float32)}, ValueError, r"x: expected at least 2 dimensions.*\(6,\)"),
    ({"x": np.ones((), np.float32)}, ValueError, "x: expected at least 2 dimensions"),
    ({"x": like(np.int64)}, TypeError, "x: expected dtype float16, .* got int64"),
    ({"x": like(np.complex64)}, TypeError, "x: expected dtype float16, .* got complex64"),
    ({"x": like(object)}, TypeError, "x: expected dtype float16, .* got object"),
    ({"x": like(bool)}, TypeError, "x: expected dtype float16, .* got bool"),
    ({"x": like(np.longdouble)}, TypeError, "x: expected dtype float16, .* got"),
    ({"x": like(">f4")}, TypeError, "x: .* native byte order, got >f4"),
    ({"x": like(np.dtype(ml_dtypes.bfloat16).newbyteorder("S"))}, TypeError, "x: .* native byte"),
    ({"eps": 10**400}, ValueError, "eps: expected a number .* too large for a float"),
    ({"x": like(ml_dtypes.float8_e4m3)}, TypeError, "x: expected dtype float16"),
    ({"channel_axis": 3}, ValueError, r"channel_axis: expected -3 to 2 .* got 3"),
    ({"channel_axis": -4}, ValueError, r"channel_axis: expected -3 to 2 .* got -4"),
    ({"channel_axis": 1.0}, TypeError, r"channel_axis: expected an integer, got 1\.0"),
    ({"channel_axis": True}, TypeError, "channel_axis: expected an integer, got True"),
    ({"channel_axis": [1]}, TypeError, r"channel_axis: expected an integer, got \[1\]"),
    *(
        case
        for name in ("weight", "bias", "running_mean", "running_var")
        for case in [
            ({name: like(np.float32, 5)}, ValueError, rf"{name}: expected shape \(4,\).*\(5,\)"),
            ({name: like(np.float32, (1, 4))}, ValueError, rf"{name}: expected shape \(4,\)"),
            ({name: like(np.float32, ())}, ValueError, rf"{name}: expected shape \(4,\)"),
            (
                {name: like(np.float16, 4)},
                TypeError,
                f"{name}: expected dtype float32 .* got float16",
            ),
            ({name: like(np.int32, 4)}, TypeError, f"{name}: expected dtype float32 .* int32"),
            ({name: like(np.int64, 4)}, TypeError, f"{name}: expected dtype float32 .* int64"),
            ({name: like(complex, 4)}, TypeError, f"{name}: expected dtype float32 .* complex"),
            ({name: [1.0] * 4}, TypeError, f"{name}: expected an array .* got list"),
        ]
    ),
    ({"momentum": 0.9, "exponential_average_factor": 0.1}, ValueError, "momentum and expon"),
    ({"momentum": 1.5}, ValueError, "momentum: expected a number from 0 to 1, got 1.5"),
    ({"momentum": -0.1}, ValueError, "momentum: expected a number from 0 to 1"),
    ({"exponential_average_factor": 1.01}, ValueError, "exponential_average_factor: expected"),
    ({"exponential_average_factor": -1}, ValueError, "exponential_average_factor: expected"),
    ({"exponential_average_factor": float("nan")}, ValueError, "exponential_average_factor"),
    ({"exponential_average_factor": "0.1"}, TypeError, "exponential_average_factor: .*'0.1'"),
    ({"training": 1}, TypeError, "training: expected True or False, got 1"),
    ({"momentum": np.full(9, 0.9)}, TypeError, r"momentum: .* got ndarray of shape \(9,\)"),
    ({"channel_axis": np.arange(3.0)}, TypeError, r"channel_axis: .* got ndarray of shape"),
    ({"x": "x" * 1000}, TypeError, "x: expected an array .* got str$"),
    ({"eps": -1e-5}, ValueError, "eps: expected a finite number of at least 0, got -1e-05"),
    ({"eps": float("nan")}, ValueError, "eps: expected a finite number"),
    ({"eps": float("inf")}, ValueError, "eps: expected a finite number"),
    ({"eps": None}, TypeError, "eps: expected a number of at least 0, got None"),
    ({"correction": -1}, ValueError, "correction: expected"),
    ({"correction": 30}, ValueError, "correction: expected less than the 30 values"),
    ({"correction": True}, TypeError, "correction: expected"),
    ({"training": False, "running_mean": None}, ValueError, "running_mean: .*training is False"),
    ({"training": False, "running_var": None}, ValueError, "running_var: .*training is False"),
    ({"out": like(np.float32, (6, 5, 4))}, ValueError, r"out: expected shape \(6, 4, 5\)"),
    ({"out": like(np.float64)}, TypeError, "out: expected dtype float32, got float64"),
]


@pytest.mark.parametrize(("changes", "error", "message"), FORWARD)
def test_forward(state, changes, error, message):
    """Also without an `out`, where the usual arguments are not looked at one by one."""
    for default in ({}, {"out": None}):
        with pytest.raises(error, match=message):
            state.forward(**default | changes)


BACKWARD = [
    ({"dy": None}, TypeError, "dy: expected an array"),
    ({"dy": like(np.float32, (6, 4, 6))}, ValueError, r"dy: expected the shape of x, \(6, 4, 5\)"),
    ({"dy": like(np.float32, (6, 20))}, ValueError, "dy: expected the shape of x"),
    ({"dy": like(np.float64)}, TypeError, "dy: expected the dtype of x, float32, got float64"),
    ({"dy": like(np.int32)}, TypeError, "dy: expected the dtype of x"),
    ({"x": like(np.float32, (7, 4, 5))}, ValueError, r"x: expected the shape of the forward"),
    ({"x": like(np.float64)}, TypeError, "x: expected the dtype of the forward call"),
    ({"x": None}, TypeError, "x: expected an array, got None"),
    ({"weight": like(np.float32, 5)}, ValueError, r"weight: expected shape \(4,\)"),
    ({"weight": like(np.float16, 4)}, TypeError, "weight: expected dtype float32"),
    (
        {"saved": None},
        TypeError,
        "saved: expected the BatchNormSaved that batch_norm_forward returned, got NoneType",
    ),
    (
        {"saved": (1, 2)},
        TypeError,
        "saved: expected the BatchNormSaved that batch_norm_forward returned, got tuple",
    ),
    ({"output_mask": (True, True)}, ValueError, "output_mask: expected three booleans"),
    ({"output_mask": (1, 1, 1)}, ValueError, "output_mask: expected three booleans"),
    ({"output_mask": None}, ValueError, "output_mask: expected three booleans"),
    ({"output_mask": (False, True, True)}, ValueError, "out: expected None"),
    ({"out": like(np.float32, (6, 5, 4))}, ValueError, "out: expected shape"),
    ({"out": like(np.float16)}, TypeError, "out: expected dtype"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BACKWARD)
def test_backward(state, changes, error, message):
    with pytest.raises(error, match=message):
        state.backward(**changes)


@pytest.mark.numpy
def test_read_only(state):
    with pytest.raises(ValueError, match="out: expected a writable"):
        state.forward(out=np.broadcast_to(np.float32(0), SHAPE))
    for name in ("running_mean", "running_var", "out"):
        getattr(state, name).flags.writeable = False
        with pytest.raises(ValueError, match=f"{name}: expected a writable array"):
            state.forward()
        if name != "out":  # inference only reads them
            state.forward(training=False, out=None)
        getattr(state, name).flags.writeable = True
    for name in ("x", "weight", "bias"):  # inputs may be read-only
        getattr(state, name).flags.writeable = False
    state.dy.flags.writeable = False
    _, saved = cunorm.batch_norm_forward(state.x, state.weight, state.bias)
    cunorm.batch_norm_backward(state.dy, state.x, saved, state.weight)


def test_overlapping_out(state):
    """Part of x, another view of x, memory of a parameter."""
    base = np.zeros((7, *SHAPE[1:]), np.float32)
    x = base[:6]
    with pytest.raises(ValueError, match="out: expected memory apart from x unless it is x itself"):
        state.forward(x=x, out=base[1:])
    square = np.zeros((4, 4), np.float32)
    with pytest.raises(ValueError, match=r"out: .* overlaps it"):
        state.forward(x=square, out=square.T)
    with pytest.raises(ValueError, match=r"out: .* overlaps it"):
        state.backward(dy=x, out=base[1:])
    row = np.zeros(24, np.float32)
    with pytest.raises(ValueError, match="out: expected memory apart from weight"):
        state.forward(x=np.ones((6, 4), np.float32), weight=row[:4], out=row.reshape(6, 4))
    line = np.zeros(10, np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(line, 5, writeable=True)
    with pytest.raises(ValueError, match="out: expected elements apart from each other"):
        cunorm.batch_norm_forward(np.ones((6, 5), np.float32), out=windows)
    alone = np.ones((1, 4, 5), np.float32)
    cunorm.batch_norm_forward(alone, out=alone[0][None])  # x itself, whatever the stride of N
    # Interleaved, but apart.
    pairs = np.zeros((*SHAPE, 2), np.float32)
    cunorm.batch_norm_forward(pairs[..., 0], out=pairs[..., 1])


def test_running_statistics_apart(state):
    """They are written while other threads may still read what lies in the same memory."""
    for running, other in [
        ("running_var", "running_mean"), ("running_mean", "weight"), ("running_var", "bias"),
    ]:  # fmt: skip
        shared = getattr(state, other)
        for out in (state.out, None):
            with pytest.raises(ValueError, match=f"{running}: expected memory apart from {other}"):
                state.forward(**{running: shared}, out=out)
        if other != "running_mean":  # inference only reads
            state.forward(**{running: shared}, training=False, out=None)
    with pytest.raises(ValueError, match="running_var: expected memory apart from weight"):
        state.forward(running_mean=None, running_var=state.weight, out=None)
    x = state.running_mean.view(np.float16).reshape(2, 4)
    with pytest.raises(ValueError, match="running_mean: expected memory apart from x"):
        state.forward(x=x, out=None)
    state.forward(x=x, out=None, training=False)


def test_one_value_per_channel(state):
    for shape in [(1, 4), (1, 4, 1, 1)]:
        x = np.ones(shape, np.float32)
        with pytest.raises(ValueError, match="more than 1 value per channel when training"):
            state.forward(x=x, out=None)
        y, _ = state.forward(x=x, out=None, training=False)
        assert y.shape == shape
        moments = cunorm.batch_norm_statistics(x)
        assert moments.count == 1
        np.testing.assert_array_equal(moments.mean, np.ones(4))
        np.testing.assert_array_equal(moments.m2, np.zeros(4))


@pytest.mark.parametrize(
    "shape", [(0, 4, 5), (6, 4, 0), (0, 4), (6, 0, 5), (0, 0, 0), (1, 0), (1, 0, 1)], ids=str
)
@pytest.mark.parametrize("training", [True, False])
def test_empty(shape, training):
    """Empty outputs, zero parameter gradients, untouched running statistics."""
    x = np.zeros(shape, np.float16)
    number = shape[1]
    weight = np.ones(number, np.float32)
    running_mean, running_var = np.full(number, 2.0), np.full(number, 3.0)
    y, saved = cunorm.batch_norm_forward(
        x, weight, weight, running_mean, running_var, training=training
    )
    assert y.shape == shape
    assert y.dtype == np.float16
    assert saved.mean.shape == (number,)
    np.testing.assert_array_equal(running_mean, np.full(number, 2.0))
    np.testing.assert_array_equal(running_var, np.full(number, 3.0))
    dx, dweight, dbias = cunorm.batch_norm_backward(x, x, saved, weight)
    assert dx.shape == shape
    np.testing.assert_array_equal(dweight, np.zeros(number, np.float32))
    np.testing.assert_array_equal(dbias, np.zeros(number, np.float32))
    moments = cunorm.batch_norm_statistics(x)
    assert not moments.mean.any()
    sums = cunorm.batch_norm_backward_reduce(x, x, moments.mean)
    assert not np.any(sums)
    assert cunorm.batch_norm_transform(x, weight, weight).shape == shape
    dx = cunorm.batch_norm_backward_transform(x, x, weight, weight, None, *sums, 1)
    assert dx.shape == shape


def verbs(state):
    x, dy, row = state.x, state.dy, state.weight
    longer = np.zeros(5, np.float32)
    longest = np.zeros(4)
    number = np.zeros(4, np.int64)
    gradient = cunorm.batch_norm_backward_transform
    update = cunorm.update_running_statistics
    moments = cunorm.batch_norm_statistics(x)
    return [
        (cunorm.batch_norm_statistics, (x[0, 0],), {}, ValueError, "x: expected at least 2"),
        (cunorm.batch_norm_statistics, (x.astype(int),), {}, TypeError, "x: expected dtype"),
        (cunorm.batch_norm_transform, (x, longer, row), {}, ValueError, "mean: expected shape"),
        (cunorm.batch_norm_transform, (x, row, None), {}, TypeError, "inv_std: .* got None"),
        (cunorm.batch_norm_transform, (x, row, number), {}, TypeError, "inv_std: expected dtype"),
        (cunorm.batch_norm_transform, (x, row, row), {"out": dy[:3]}, ValueError, "out: expected"),
        (cunorm.batch_norm_backward_reduce, (dy[:3], x, row), {}, ValueError, "dy: expected"),
        (cunorm.batch_norm_backward_reduce, (dy, x, longer), {}, ValueError, "mean: expected"),
        (gradient, (dy, x, row, row, row, longer, row, 30), {}, ValueError, "sum_dy: expected"),
        (gradient, (dy, x, row, row, row, row, longer, 30), {}, ValueError, "sum_dy_xmu: exp"),
        (gradient, (dy, x, row, row, longer, row, row, 30), {}, ValueError, "weight: expected"),
        (gradient, (dy, x, row, row, row, row, row, 0), {}, ValueError, "count: expected 1 to 2"),
        (gradient, (dy, x, row, row, row, row, row, 2.5), {}, TypeError, "count: .* integer"),
        (update, (row, row, longer, row, 3), {}, ValueError, r"var: expected shape \(5,\)"),
        (update, (longer, row, row, row, 3), {}, ValueError, "running_mean: expected shape"),
        (update, (row, row, None, row, 3), {}, ValueError, "mean: expected an array"),
        (update, (row, longest, row, row, -3), {}, ValueError, "count: expected 0 to 2"),
        (update, (row, longest, row, row, 1), {}, ValueError, "correction: expected less"),
        (update, (row, longest, row, row, 3), {"momentum": 2}, ValueError, "momentum: expected"),
        (cunorm.merge_moments, ([],), {}, ValueError, "moments: expected at least one part"),
        (cunorm.merge_moments, ([row],), {}, TypeError, r"moments\[0\]: expected \(count, mean"),
        (cunorm.merge_moments, (moments,), {}, TypeError, "moments: expected a sequence of Mom"),
        (update, (row, row, row, row, 3), {}, ValueError, "running_var: expected memory apart"),
        (cunorm.merge_moments, ([(-1, row, row)],), {}, ValueError, r"moments\[0\].count"),
        (cunorm.merge_moments, ([(1.5, row, row)],), {}, TypeError, r"moments\[0\].count"),
        (
            cunorm.merge_moments, ([moments, (3, longer, longer)],), {},
            ValueError, r"moments\[1\].mean: expected shape \(4,\)",
        ),
        (
            cunorm.merge_moments, ([moments, (3, row.astype(float), row.astype(float))],), {},
            TypeError, r"moments\[1\].mean: expected the dtype of moments\[0\]",
        ),
        (cunorm.set_num_threads, (0,), {}, ValueError, "number: expected 1 to 1024, got 0"),
        (cunorm.set_num_threads, (1025,), {}, ValueError, "number: expected 1 to 1024, got 1025"),
        (cunorm.set_num_threads, (1.5,), {}, TypeError, "number: expected an integer, got 1.5"),
        (cunorm.is_available, ("tpu",), {}, ValueError, "backend: expected"),
    ]  # fmt: skip


@pytest.mark.parametrize("case", range(31))
def test_verbs(state, case):
    function, arguments, options, error, message = verbs(state)[case]
    assert len(verbs(state)) == 31
    with pytest.raises(error, match=message):
        function(*arguments, **options)


def test_saved_that_was_tampered_with(state):
    """No memory is read that is not there."""
    saved = state.saved
    for changes, error, message in [
        ({"mean": None}, TypeError, "saved.mean: expected an array"),
        ({"mean": saved.mean[:2]}, ValueError, r"saved\.mean: expected shape \(4,\)"),
        ({"inv_std": saved.inv_std.astype(">f4")}, TypeError, r"saved\.inv_std: expected dtype"),
        ({"residual": saved.residual[:2]}, ValueError, r"saved\.residual: expected shape"),
        ({"bias_dtype": np.int32}, TypeError, r"saved\.bias_dtype: expected float16, bfloat16"),
    ]:
        with pytest.raises(error, match=message):
            state.backward(saved=saved._replace(**changes))
    expected = cunorm.batch_norm_backward(state.dy, state.x, saved)
    strided = saved._replace(inv_std=np.repeat(saved.inv_std, 2)[::2])
    for a, b in zip(expected, cunorm.batch_norm_backward(state.dy, state.x, strided), strict=True):
        np.testing.assert_array_equal(a, b)


def test_floating_point_errors_set_to_raise(rng):
    """What NumPy is told to raise is not raised half-way through a call."""
    x, dy = rng.standard_normal((2, 6, 4, 5)).astype(np.float16) * np.float16(1e-4)
    weight = np.full(4, 1e-4, np.float16)
    with np.errstate(all="raise"):
        _, saved = cunorm.batch_norm_forward(x, weight, None, np.zeros(4), np.ones(4))
        cunorm.batch_norm_backward(dy, x, saved, weight, out=dy)
        moments = cunorm.batch_norm_statistics(x)
        cunorm.merge_moments([moments, moments])


# --- the other norms ----------------------------------------------------------


class Norms:
    """Valid arguments for every norm, and copies to compare with afterwards."""

    def __init__(self):
        rng = np.random.default_rng(7)
        self.x, self.dy, self.out = rng.standard_normal((3, *SHAPE)).astype(np.float32)
        self.row, self.row_bias = rng.standard_normal((2, 5)).astype(np.float32)
        self.weight, self.bias, self.running_mean = rng.standard_normal((3, 4)).astype(np.float32)
        self.running_var = rng.uniform(1, 2, 4).astype(np.float32)
        self.each = rng.standard_normal((6, 4)).astype(np.float32)
        channels = {"weight": self.weight, "bias": self.bias}
        running = {"running_mean": self.running_mean, "running_var": self.running_var}
        self.forward = {
            "layer_norm": {"weight": self.row, "bias": self.row_bias},
            "rms_norm": {"weight": self.row},
            "group_norm": {"num_groups": 2, **channels},
            "instance_norm": {**channels, **running},
            "scale_shift": {"scale": self.each, "shift": self.each * 2},
        }

    def call_forward(self, norm, **changes):
        arguments = {"x": self.x, "out": self.out, **self.forward[norm]} | changes
        return getattr(cunorm, f"{norm}_forward")(**arguments)

    def call_backward(self, norm, **changes):
        arguments = {"dy": self.dy, "x": self.x, "out": self.out}
        if norm == "scale_shift":
            arguments["scale"] = self.each
        else:
            kept = {n: v for n, v in self.forward[norm].items() if not n.startswith("running")}
            _, arguments["saved"] = getattr(cunorm, f"{norm}_forward")(self.x, **kept)
            arguments["weight"] = self.forward[norm]["weight"]
        return getattr(cunorm, f"{norm}_backward")(**arguments | changes)


@pytest.fixture
def norms():
    """Fails the test if an array of it has changed."""
    norms = Norms()
    before = {n: v.copy() for n, v in vars(norms).items() if isinstance(v, np.ndarray)}
    yield norms
    for name, value in before.items():
        np.testing.assert_array_equal(getattr(norms, name), value, err_msg=name)


ALL = ["layer_norm", "rms_norm", "group_norm", "instance_norm", "scale_shift"]
ROWS = ["layer_norm", "rms_norm"]
CHANNELS = ["group_norm", "instance_norm"]

NORM_FORWARD = [
    (ALL, {"x": None}, TypeError, "^x: expected an array, got None"),
    (ALL, {"x": [[1.0, 2.0]]}, TypeError, "^x: expected an array .* got list"),
    (ALL, {"x": like(np.int64)}, TypeError, "^x: expected dtype float16, .* got int64"),
    (ALL, {"x": like(">f4")}, TypeError, "^x: .* native byte order, got >f4"),
    (ALL, {"out": like(np.float32, (6, 5, 4))}, ValueError, r"^out: expected shape \(6, 4, 5\)"),
    (ALL, {"out": like(np.float64)}, TypeError, "^out: expected dtype float32, got float64"),
    (ROWS, {"x": np.ones((), np.float32)}, ValueError, "^x: expected at least 1 dimension"),
    (ROWS, {"axis": 3}, ValueError, r"^axis: expected -3 to 2 .*\(6, 4, 5\), got 3"),
    (ROWS, {"axis": -4}, ValueError, "^axis: expected -3 to 2 .* got -4"),
    (ROWS, {"axis": 1.0}, TypeError, r"^axis: expected an integer, got 1\.0"),
    (ROWS, {"axis": True}, TypeError, "^axis: expected an integer, got True"),
    (ROWS, {"axis": (1, 2)}, TypeError, r"^axis: expected an integer, got \(1, 2\)"),
    (ROWS, {"weight": like(np.float32, 4)}, ValueError, r"^weight: expected shape \(5,\).*\(4,\)"),
    (ROWS, {"axis": 1}, ValueError, r"^weight: expected shape \(4, 5\), that of the axes"),
    (ROWS, {"weight": like(np.float16, 5)}, TypeError, "^weight: expected dtype float32"),
    (["layer_norm"], {"bias": like(int, 5)}, TypeError, "^bias: expected dtype float32"),
    (["layer_norm"], {"eps": None}, TypeError, "^eps: expected a number"),
    (ALL[:4], {"eps": -1}, ValueError, "^eps: expected a finite number of at least 0, got -1"),
    (["rms_norm"], {"weight_offset": np.inf}, ValueError, "^weight_offset: expected a finite"),
    (["rms_norm"], {"weight_offset": "1"}, TypeError, "^weight_offset: expected a number, got '1'"),
    (
        ["rms_norm"], {"weight_offset": 1.0, "weight": None}, ValueError,
        "^weight: expected an array to add weight_offset=1 to, got None",
    ),
    (
        [*CHANNELS, "scale_shift"], {"x": np.zeros(6, np.float32)}, ValueError,
        r"^x: expected at least 2 dimensions.*\(6,\)",
    ),
    (
        [*CHANNELS, "scale_shift"], {"channel_axis": 0}, ValueError,
        r"^channel_axis: expected another axis than 0, that of the samples, got 0",
    ),
    (
        [*CHANNELS, "scale_shift"], {"channel_axis": -3}, ValueError,
        r"^channel_axis: expected another axis than 0, that of the samples, got -3",
    ),
    ([*CHANNELS, "scale_shift"], {"channel_axis": 3}, ValueError, "^channel_axis: expected -3 to"),
    ([*CHANNELS, "scale_shift"], {"channel_axis": None}, TypeError, "^channel_axis: expected an i"),
    (CHANNELS, {"weight": like(np.float32, 5)}, ValueError, r"^weight: expected shape \(4,\), one"),
    (CHANNELS, {"bias": like(np.float16, 4)}, TypeError, "^bias: expected dtype float32"),
    *(
        (["group_norm"], {"num_groups": n}, ValueError, f"^num_groups: .*4 channels, got {n}")
        for n in (0, -2, 3, 8)
    ),
    (["group_norm"], {"num_groups": 2.0}, TypeError, r"^num_groups: expected an integer, got 2\.0"),
    (["instance_norm"], {"use_input_stats": 1}, TypeError, "^use_input_stats: expected True or"),
    (["instance_norm"], {"correction": 5}, ValueError, "^correction: expected less than the 5 val"),
    (
        ["instance_norm"], {"momentum": 0.9, "exponential_average_factor": 0.1}, ValueError,
        "^momentum and expon",
    ),
    *(
        case
        for name in ("running_mean", "running_var")
        for case in [
            (["instance_norm"], {name: like(int, 4)}, TypeError, f"^{name}: expected dtype"),
            (["instance_norm"], {name: like(np.float32, (6, 4))}, ValueError, f"^{name}: expected"),
            (
                ["instance_norm"], {name: None, "use_input_stats": False}, ValueError,
                f"^{name}: expected an array when use_input_stats is False",
            ),
        ]
    ),
    (["scale_shift"], {"scale": None}, TypeError, "^scale: expected an array, got None"),
    (["scale_shift"], {"scale": like(np.float32, 5)}, ValueError, r"^scale: expected shape \(4,\)"),
    (
        ["scale_shift"], {"scale": like(np.float32, (4, 6))}, ValueError,
        r"^scale: expected shape \(6, 4\), one value a channel of every sample, got \(4, 6\)",
    ),
    (["scale_shift"], {"scale": like(int, 4)}, TypeError, "^scale: expected dtype float32"),
    (
        ["scale_shift"], {"shift": like(np.float32, 4)}, ValueError,
        r"^shift: expected shape \(6, 4\), that of scale, got \(4,\)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("norm", "changes", "error", "message"),
    [(norm, *rest) for names, *rest in NORM_FORWARD for norm in names],
)
def test_norm_forward(norms, norm, changes, error, message):
    with pytest.raises(error, match=message):
        norms.call_forward(norm, **changes)


NORM_BACKWARD = [
    (ALL, {"dy": None}, TypeError, "^dy: expected an array"),
    (ALL, {"dy": like(np.float32, (6, 4, 6))}, ValueError, "^dy: expected the shape of x"),
    (ALL, {"dy": like(np.float64)}, TypeError, "^dy: expected the dtype of x"),
    (ALL, {"x": None}, TypeError, "^x: expected an array, got None"),
    (ALL, {"output_mask": (True,)}, ValueError, "^output_mask: expected t"),
    (ALL, {"output_mask": (1, 1, 1)}, ValueError, "^output_mask: expected t.* booleans, for dx"),
    (ALL, {"output_mask": (False, True, True)}, ValueError, "^out: expected None"),
    (ALL, {"out": like(np.float32, (6, 5, 4))}, ValueError, "^out: expected shape"),
    (ALL[:4], {"x": like(np.float32, (7, 4, 5))}, ValueError, "^x: expected the shape of the forw"),
    (ALL[:4], {"x": like(np.float64)}, TypeError, "^x: expected the dtype of the forward call"),
    (
        ALL[:4],
        {"saved": None},
        TypeError,
        "^saved: expected the .*NormSaved that [a-z]+_norm_forward returned",
    ),
    (ALL[:4], {"saved": (1, 2)}, TypeError, "^saved: expected the .* got tuple"),
    (ALL[:4], {"weight": like(np.float32, 7)}, ValueError, "^weight: expected shape"),
    (ALL[:4], {"weight": like(int, 7)}, ValueError, "^weight: expected shape"),
    (["scale_shift"], {"scale": like(np.float32, (6, 5))}, ValueError, "^scale: expected shape"),
]


@pytest.mark.parametrize(
    ("norm", "changes", "error", "message"),
    [(norm, *rest) for names, *rest in NORM_BACKWARD for norm in names],
)
def test_norm_backward(norms, norm, changes, error, message):
    with pytest.raises(error, match=message):
        norms.call_backward(norm, **changes)


def test_one_value_by_sample(norms):
    x = np.ones((6, 4), np.float32)
    with pytest.raises(ValueError, match=r"^x: expected more than 1 spatial value per channel"):
        norms.call_forward("instance_norm", x=x, out=None)
    assert norms.call_forward("instance_norm", x=x, out=None, use_input_stats=False)[0].any()
    with pytest.raises(ValueError, match=r"^x: expected more than 1 value per group of a sample"):
        norms.call_forward("group_norm", x=x, out=None, num_groups=4)
    y, _ = cunorm.layer_norm_forward(x[:, :1])
    np.testing.assert_array_equal(y, 0)


@pytest.mark.numpy
def test_read_only_by_sample(norms):
    for name in ("running_mean", "running_var"):
        getattr(norms, name).flags.writeable = False
        with pytest.raises(ValueError, match=f"^{name}: expected a writable array"):
            norms.call_forward("instance_norm")
        norms.call_forward("instance_norm", use_input_stats=False, out=None)
        getattr(norms, name).flags.writeable = True
    for norm in ALL:
        with pytest.raises(ValueError, match=r"^out: expected a writable"):
            norms.call_forward(norm, out=np.broadcast_to(np.float32(0), SHAPE))


def test_overlap_by_sample(norms):
    """Of `out` with a part of x or with a parameter, of running statistics with anything."""
    base = np.zeros((7, *SHAPE[1:]), np.float32)
    for norm in ALL:
        with pytest.raises(ValueError, match=r"^out: .* apart from x unless it is x itself"):
            norms.call_forward(norm, x=base[:6], out=base[1:])
        with pytest.raises(ValueError, match=r"^out: .* apart from dy unless it is dy itself"):
            norms.call_backward(norm, dy=base[:6], out=base[1:])
    line = np.zeros(120, np.float32)
    parameters = {"scale": line[:24].reshape(6, 4), "shift": None}
    with pytest.raises(ValueError, match=r"^out: expected memory apart from scale"):
        norms.call_forward("scale_shift", out=line.reshape(SHAPE), **parameters)
    with pytest.raises(ValueError, match=r"^out: expected memory apart from weight"):
        norms.call_forward("layer_norm", out=line.reshape(SHAPE), weight=line[:5])
    with pytest.raises(ValueError, match=r"^running_var: expected memory apart from bias"):
        norms.call_forward("instance_norm", bias=norms.running_var)


def test_saved_of_a_sample_that_was_tampered_with(norms):
    """No memory is read that is not there."""
    for norm in ALL[:4]:
        _, saved = norms.call_forward(norm, out=None, **(
            {"running_mean": None, "running_var": None} if norm == "instance_norm" else {}
        ))  # fmt: skip
        changes = [
            (
                {"inv_std": None},
                TypeError,
                r"^saved\.inv_std: expected an array of shape \(6, \d\)",
            ),
            ({"inv_std": saved.inv_std[:2]}, ValueError, r"^saved\.inv_std: expected shape"),
            ({"inv_std": saved.inv_std.astype(int)}, TypeError, r"^saved\.inv_std: expected dtype"),
        ]
        if norm != "rms_norm":
            changes += [
                ({"mean": None}, TypeError, r"^saved\.mean: expected an array"),
                ({"mean": saved.mean.ravel()}, ValueError, r"^saved\.mean: expected shape"),
                ({"residual": saved.residual[:1]}, ValueError, r"^saved\.residual: expected shape"),
                ({"bias_dtype": "x"}, TypeError, r"^saved\.bias_dtype: expected float16, .*'x'"),
                ({"bias_dtype": np.int16}, TypeError, r"^saved\.bias_dtype: expected float16"),
            ]
        else:
            changes += [
                ({name: saved.inv_std}, TypeError, rf"^saved\.{name}: expected None, as the for")
                for name in ("mean", "residual")
            ]
        for change, error, message in changes:
            with pytest.raises(error, match=message):
                norms.call_backward(norm, saved=saved._replace(**change))
        expected = norms.call_backward(norm, out=None)
        strided = saved._replace(inv_std=np.asfortranarray(saved.inv_std))
        for a, b in zip(expected, norms.call_backward(norm, saved=strided, out=None), strict=True):
            np.testing.assert_array_equal(a, b)


def test_floating_point_errors_set_to_raise_by_sample(rng):
    x, dy = (rng.standard_normal((2, 6, 4, 5)) * 1e-4).astype(np.float16)
    for case in (layer(), rms(), group(2), instance(), scale_shift(True)):
        weight = np.full(case.norm(x.shape).parameters_shape, 1e-4, np.float16)
        with np.errstate(all="raise"):
            _, saved = case.forward(x, weight, None)
            case.backward(dy, x, saved, weight)
    with np.errstate(all="raise"):
        cunorm.layer_norm_forward(x[:0], eps=0)
        cunorm.instance_norm_forward(x, None, None, np.zeros(4), np.zeros(4))


class OnGpu:
    """What an array in GPU memory looks like from outside."""

    def __dlpack__(self, **_):
        raise AssertionError("memory of a GPU must not be read")

    def __dlpack_device__(self):
        return 2, 0


def test_gpu_arrays_are_refused_with_the_reason(state, monkeypatch):
    monkeypatch.setattr(arrays, "cuda_missing", lambda: "none is to be had")
    with pytest.raises(TypeError, match=r"weight: .* \(none is to be had\), got one on a GPU"):
        state.forward(weight=OnGpu())


@pytest.mark.parametrize(
    "forward", [cunorm.batch_norm_forward, cunorm.instance_norm_forward], ids=lambda f: f.__name__
)
def test_running_statistics_within_x(rng, forward):
    """Updating them would change the data that backward wants."""
    x = rng.standard_normal((4, 6, 5)).astype(np.float32)
    before = x.copy()
    with pytest.raises(ValueError, match="running_mean: expected memory apart from x, got"):
        forward(x, None, None, x[0, :, 0], np.ones(6, np.float32))
    with pytest.raises(ValueError, match="running_var: expected memory apart from x, got"):
        forward(x, None, None, None, x[1, :, 2])
    np.testing.assert_array_equal(x, before)


def test_channels_of_layers_are_not_the_samples():
    message = "channel_axis: expected another than 0, that of the samples, got 0"
    with pytest.raises(ValueError, match=message):
        cunorm.GroupNorm(3, 6, channel_axis=0)
    with pytest.raises(ValueError, match=message):
        cunorm.InstanceNorm(6, channel_axis=0)
