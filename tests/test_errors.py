"""Bad input: a clear error that names the argument, and nothing is modified."""

import ml_dtypes
import numpy as np
import pytest

import cunorm
from cunorm import arrays

SHAPE = (6, 4, 5)


class State:
    """Valid arguments of every function, and copies to compare with afterwards."""

    def __init__(self):
        rng = np.random.default_rng(7)
        self.x, self.dy, self.out = rng.standard_normal((3, *SHAPE)).astype(np.float32)
        self.weight, self.bias, self.running_mean = rng.standard_normal((3, 4)).astype(np.float32)
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
    with pytest.raises(error, match=message):
        state.forward(**changes)


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
    ({"saved": None}, TypeError, "saved: expected what batch_norm_forward returned, got NoneType"),
    ({"saved": (1, 2)}, TypeError, "saved: expected what batch_norm_forward returned, got tuple"),
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
        with pytest.raises(ValueError, match=f"{running}: expected memory apart from {other}"):
            state.forward(**{running: shared})
        if other != "running_mean":  # inference only reads
            state.forward(**{running: shared}, training=False, out=None)


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
        (cunorm.set_num_threads, (0,), {}, ValueError, "number: expected at least 1, got 0"),
        (cunorm.set_num_threads, (1.5,), {}, TypeError, "number: expected an integer, got 1.5"),
        (cunorm.is_available, ("tpu",), {}, ValueError, "backend: expected"),
    ]  # fmt: skip


@pytest.mark.parametrize("case", range(30))
def test_verbs(state, case):
    function, arguments, options, error, message = verbs(state)[case]
    assert len(verbs(state)) == 30
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
