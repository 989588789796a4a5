"""Convolution and batch norm as one: the two in turn, but with less memory."""

import copy
import gc
import pickle
import tracemalloc
import types
import warnings
import weakref

import numpy as np
import pytest
from cases import DTYPES, accumulator, permuted
from test_convolution import SHAPES, options_of
from test_gradients import TOLERANCE, differences

import cunorm

GRADIENTS = ("dx", "dconv_weight", "dweight", "dbias")


def draw(rng, shape, dtype):
    """x, conv_weight, weight, bias, running_mean, running_var."""
    *_, groups, window = shape
    x = (rng.standard_normal((3, 4, 7, 6)) + 0.5).astype(dtype)
    conv_weight = rng.standard_normal((6, 4 // groups, *window)).astype(dtype)
    weight, bias, mean = rng.standard_normal((3, 6)).astype(accumulator(dtype))
    return x, conv_weight, weight, bias, mean, rng.uniform(0.5, 2, 6).astype(accumulator(dtype))


def apart(x, conv_weight, weight, bias, mean, var, options, **norm):
    """The convolution and the batch norm one after the other: y, and a function of dy."""
    convolution = cunorm.MatmulConvolution()
    z = convolution.forward(x, conv_weight, **options)
    y, saved = cunorm.batch_norm_forward(z, weight, bias, mean, var, **norm)

    def backward(dy):
        dz, dweight, dbias = cunorm.batch_norm_backward(dy, z, saved, weight)
        dx = convolution.backward_input(dz, conv_weight, x, **options)
        return dx, convolution.backward_weight(dz, x, conv_weight, **options), dweight, dbias

    return y, backward


@pytest.mark.numpy
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_two_in_turn(rng, shape, dtype, affine, training):
    """The same bits: y, gradients, running statistics, which backward leaves alone."""
    x, conv_weight, weight, bias, mean, var = draw(rng, shape, dtype)
    if not affine:
        weight = bias = None
    options = options_of(shape)
    norm = {"training": training, "eps": 1e-3, "exponential_average_factor": 0.3, "correction": 0}
    running = mean.copy(), var.copy()
    expected, expected_backward = apart(x, conv_weight, weight, bias, mean, var, options, **norm)
    inputs = [a.copy() for a in (x, conv_weight)]
    y, saved = cunorm.conv_batch_norm_forward(
        x, conv_weight, weight, bias, *running, **options, **norm
    )
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, expected)
    for array, other in zip(running, (mean, var), strict=True):
        np.testing.assert_array_equal(array, other)
    dy = rng.standard_normal(y.shape).astype(dtype)
    gradients = cunorm.conv_batch_norm_backward(dy, x, conv_weight, saved, weight)
    for name, actual, other in zip(GRADIENTS, gradients, expected_backward(dy), strict=True):
        np.testing.assert_array_equal(actual, other, err_msg=name)
    for array, other in zip((*running, x, conv_weight), (mean, var, *inputs), strict=True):
        np.testing.assert_array_equal(array, other)
    assert saved[:2] == (saved.mean, saved.inv_std)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_finite_differences(rng, shape, training):
    x, conv_weight, weight, bias, mean, var = draw(rng, shape, np.float64)
    x = x[:2, :, :4, :4].copy()
    options = options_of(shape)

    def forward():
        return cunorm.conv_batch_norm_forward(
            x, conv_weight, weight, bias, mean, var, **options, training=training, eps=0.1,
            exponential_average_factor=0.0,
        )  # fmt: skip

    y, saved = forward()
    dy = rng.standard_normal(y.shape)
    gradients = cunorm.conv_batch_norm_backward(dy, x, conv_weight, saved, weight)
    arguments = (x, conv_weight, weight, bias)
    for name, argument, gradient in zip(GRADIENTS, arguments, gradients, strict=True):
        expected = differences(lambda: float((forward()[0] * dy).sum()), argument)
        np.testing.assert_allclose(
            gradient, expected, rtol=TOLERANCE, atol=10 * TOLERANCE, err_msg=name
        )


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_output_mask(rng, training):
    """Any subset of the gradients, each the same as in all of them."""
    shape = SHAPES[1]
    x, conv_weight, weight, bias, *running = draw(rng, shape, np.float32)
    y, saved = cunorm.conv_batch_norm_forward(
        x, conv_weight, weight, bias, *running, **options_of(shape), training=training
    )
    dy = rng.standard_normal(y.shape).astype(np.float32)
    whole = cunorm.conv_batch_norm_backward(dy, x, conv_weight, saved, weight)
    kept = dy.copy()
    for bits in range(16):
        mask = tuple(bool(bits >> i & 1) for i in range(4))
        gradients = cunorm.conv_batch_norm_backward(
            dy, x, conv_weight, saved, weight, output_mask=mask
        )
        for wanted, actual, expected in zip(mask, gradients, whole, strict=True):
            if wanted:
                np.testing.assert_array_equal(actual, expected)
            else:
                assert actual is None
    np.testing.assert_array_equal(dy, kept)


class Recording(cunorm.MatmulConvolution):
    """Notes what it is asked for, and where the results lie."""

    def __init__(self):
        super().__init__()
        self.calls, self.results = [], []

    def forward(self, *arguments, **options):
        return self._note("forward", super().forward(*arguments, **options))

    def backward_input(self, *arguments, **options):
        return self._note("backward_input", super().backward_input(*arguments, **options))

    def backward_weight(self, *arguments, **options):
        return self._note("backward_weight", super().backward_weight(*arguments, **options))

    def _note(self, name, result):
        self.calls.append(name)
        self.results.append(result)
        return result


@pytest.mark.numpy
def test_in_place(rng):
    """y lies in the convolution's result, and so does the gradient with respect to that."""
    shape = SHAPES[1]
    x, conv_weight, weight, bias, *running = draw(rng, shape, np.float32)
    convolution = Recording()
    y, saved = cunorm.conv_batch_norm_forward(
        x, conv_weight, weight, bias, *running, **options_of(shape), convolution=convolution
    )
    assert y is convolution.results[0]
    assert saved.convolution is convolution
    dy = rng.standard_normal(y.shape).astype(np.float32)
    cunorm.conv_batch_norm_backward(dy, x, conv_weight, saved, weight)
    assert convolution.calls == ["forward", "forward", "backward_weight", "backward_input"]
    z = cunorm.MatmulConvolution().forward(x, conv_weight, **options_of(shape))
    norm = cunorm.BatchNormSaved(*saved[:3], True, 1, z.shape, bias.dtype)
    dz, _, _ = cunorm.batch_norm_backward(dy, z, norm, weight)
    np.testing.assert_array_equal(convolution.results[1], dz)


@pytest.mark.numpy
def test_constants_need_no_second_convolution(rng):
    """Given statistics and no gradient of weight: dy alone makes the gradients."""
    shape = SHAPES[1]
    x, conv_weight, weight, bias, *running = draw(rng, shape, np.float32)
    convolution = Recording()
    y, saved = cunorm.conv_batch_norm_forward(
        x, conv_weight, weight, bias, *running, **options_of(shape), training=False,
        convolution=convolution,
    )  # fmt: skip
    convolution.calls.clear()
    mask = (True, False, False, False)
    cunorm.conv_batch_norm_backward(y, x, conv_weight, saved, weight, output_mask=mask)
    assert convolution.calls == ["backward_input"]


def memory_of(function):
    """(result, bytes left, bytes at most) of a call: the least of ten, the first compile."""
    found = []
    for _ in range(10):
        tracemalloc.start()
        try:
            result = function()
            found.append(tracemalloc.get_traced_memory())
        finally:
            tracemalloc.stop()
    return result, *np.min(found, axis=0)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)], ids=["first", "last"])
def test_tensors_alive(rng, dtype, order):
    """Forward makes one tensor, y; backward two, the gradients with respect to z and x."""
    x = permuted(rng.standard_normal((16, 8, 32, 32)).astype(dtype), order)
    conv_weight = rng.standard_normal((12, 8, 3, 3)).astype(dtype)
    workspace = 1 << 17
    convolution = cunorm.MatmulConvolution(workspace)

    def forward():
        return cunorm.conv_batch_norm_forward(x, conv_weight, padding=1, convolution=convolution)

    (y, saved), left, peak = memory_of(forward)
    dy = y.copy(order="K")
    besides = workspace + 6 * conv_weight.size * 8 + 100_000  # kernels' own and objects
    assert besides < y.nbytes
    assert peak <= y.nbytes + besides
    assert left <= y.nbytes + 20_000
    gradients, left, peak = memory_of(
        lambda: cunorm.conv_batch_norm_backward(dy, x, conv_weight, saved)
    )
    assert peak <= y.nbytes + x.nbytes + besides
    assert left <= x.nbytes + sum(g.nbytes for g in gradients[1:]) + 20_000


def test_half_data_and_wider_weights(rng):
    shape = SHAPES[1]
    x, *_ = draw(rng, shape, np.float16)
    _, conv_weight, weight, bias, *_ = draw(rng, shape, np.float32)
    y, saved = cunorm.conv_batch_norm_forward(x, conv_weight, weight, bias, padding=1)
    assert y.dtype == np.float16
    gradients = cunorm.conv_batch_norm_backward(y, x, conv_weight, saved, weight)
    assert [g.dtype for g in gradients] == [np.float16, np.float32, np.float32, np.float32]


def test_empty_batch():
    x, conv_weight = np.zeros((0, 4, 7, 6), np.float32), np.ones((6, 4, 3, 3), np.float32)
    running = np.zeros(6, np.float32), np.ones(6, np.float32)
    y, saved = cunorm.conv_batch_norm_forward(x, conv_weight, None, None, *running)
    assert y.shape == (0, 6, 5, 4)
    dx, *gradients = cunorm.conv_batch_norm_backward(y, x, conv_weight, saved)
    assert dx.shape == x.shape
    assert [g.shape for g in gradients] == [(6, 4, 3, 3), (6,), (6,)]
    assert not any(g.any() for g in gradients)
    assert (running[0] == 0).all()
    assert (running[1] == 1).all()


# --- the layer ------------------------------------------------------------------------


def network(rng, seed=7, **options):
    layer = cunorm.ConvBatchNorm(
        4, 6, (3, 2), padding=1, stride=(2, 1), dtype=np.float64, rng=seed, **options
    )
    return layer, rng.standard_normal((3, 4, 7, 6)) + 1


@pytest.mark.numpy
def test_layer(rng):
    layer, x = network(rng)
    options = {"stride": (2, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    norm, convolution = cunorm.BatchNorm(6, dtype=np.float64), cunorm.MatmulConvolution()
    assert list(layer.parameters) == ["conv_weight", "weight", "bias"]
    for _ in range(2):
        y = layer(x)
        dy = rng.standard_normal(y.shape)
        dx = layer.backward(dy)
        np.testing.assert_array_equal(y, norm(convolution.forward(x, layer.conv_weight, **options)))
        dz = norm.backward(dy)
        np.testing.assert_array_equal(
            dx, convolution.backward_input(dz, layer.conv_weight, x, **options)
        )
        expected = {
            "conv_weight": convolution.backward_weight(dz, x, layer.conv_weight, **options),
            **norm.gradients,
        }
        assert layer.gradients.keys() == layer.parameters.keys() == expected.keys()
        for name, gradient in expected.items():
            np.testing.assert_array_equal(layer.gradients[name], gradient, err_msg=name)
            layer.parameters[name] -= 0.1 * gradient
            if name != "conv_weight":
                norm.parameters[name] -= 0.1 * gradient
        x = x * 0.9 + 0.1
    for name, array in norm.state_dict().items():
        np.testing.assert_array_equal(layer.state_dict()[name], array, err_msg=name)
    with pytest.raises(RuntimeError, match="backward: expected a call of forward"):
        layer.backward(dy)
    layer.eval()
    norm.eval()
    z = convolution.forward(x, layer.conv_weight, **options)
    np.testing.assert_array_equal(layer(x), norm(z))
    weight, bias = layer.fold_into()
    folded = convolution.forward(x, weight, **options) + bias[:, None, None]
    np.testing.assert_allclose(folded, layer(x), rtol=1e-12, atol=1e-12)


def test_recomputation_in_a_checkpoint(rng):
    layer, x = network(rng)
    y = layer(x)
    state = layer.state_dict()
    np.testing.assert_array_equal(layer(x, update_statistics=False), y)
    layer.backward(y)
    for name, array in layer.state_dict().items():
        np.testing.assert_array_equal(array, state[name], err_msg=name)


def test_frozen(rng):
    layer, x = network(rng)
    layer(x)
    layer.freeze()
    state = layer.state_dict()
    y = layer(x)
    convolution = layer.convolution = Recording()
    layer.backward(layer(x))
    assert convolution.calls == ["forward", "backward_input"]
    assert layer.parameters == layer.gradients == {}
    layer.unfreeze().eval()
    np.testing.assert_array_equal(layer(x), y)
    for name, array in layer.state_dict().items():
        np.testing.assert_array_equal(array, state[name], err_msg=name)


@pytest.mark.parametrize("affine", [True, False])
def test_state(rng, affine):
    layer, x = network(rng, affine=affine)
    layer(x)
    layer.backward(layer(x))
    assert layer.gradients.keys() == layer.parameters.keys()
    names = ["conv_weight", *(["weight", "bias"] if affine else [])]
    names += ["running_mean", "running_var", "num_batches_tracked"]
    assert list(layer.state_dict()) == names
    other, _ = network(rng, 8, affine=affine)
    assert not np.array_equal(other.conv_weight, layer.conv_weight)
    other.load_state_dict(layer.state_dict())
    np.testing.assert_array_equal(other.eval()(x), layer.eval()(x))
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(copied(x), layer(x))


def test_first_weights():
    """Uniform, from the seed, of PyTorch's size."""
    layer = cunorm.ConvBatchNorm(64, 128, 3, groups=2, rng=3)
    assert layer.conv_weight.shape == (128, 32, 3, 3)
    assert layer.conv_weight.dtype == np.float32
    bound = 1 / np.sqrt(32 * 9)
    assert 0.99 * bound < abs(layer.conv_weight).max() <= bound
    # a uniform variable's standard deviation, from 36,864 of them
    assert abs(layer.conv_weight.std() / (bound / np.sqrt(3)) - 1) < 0.02
    again = cunorm.ConvBatchNorm(64, 128, 3, groups=2, rng=np.random.default_rng(3))
    np.testing.assert_array_equal(again.conv_weight, layer.conv_weight)


def test_repr():
    layer = cunorm.ConvBatchNorm(4, 6, 3, stride=2, groups=2)
    assert repr(layer) == (
        "ConvBatchNorm(4, 6, (3, 3), stride=(2, 2), padding=(0, 0), dilation=(1, 1), groups=2, "
        "convolution=None, eps=1e-05, exponential_average_factor=0.1, correction=1, affine=True, "
        "track_running_statistics=True, dtype=float32, training=True, frozen=False)"
    )


# --- what is wrong --------------------------------------------------------------------

X = np.ones((2, 4, 7, 6), np.float32)
WEIGHT = np.ones((6, 4, 3, 3), np.float32)


class Odd(cunorm.MatmulConvolution):
    """Returns something else than it should."""

    def __init__(self, name, change):
        super().__init__()
        function = getattr(super(), name)
        setattr(self, name, lambda *arguments, **options: change(function(*arguments, **options)))


@pytest.mark.numpy
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"x": None}, TypeError, "x: expected an array, got None"),
        ({"x": X[0]}, ValueError, r"x: expected shape \(N, C, H, W\), got \(4, 7, 6\)"),
        ({"x": X.astype(int)}, TypeError, "x: expected dtype float16"),
        ({"conv_weight": None}, TypeError, "conv_weight: expected an array, got None"),
        ({"conv_weight": WEIGHT[:, :3]}, ValueError, r"conv_weight: expected shape \(O, 4, K, L\)"),
        ({"conv_weight": WEIGHT[..., 0]}, ValueError, r"conv_weight: expected shape \(O, 4, K, L"),
        ({"conv_weight": WEIGHT[..., :0]}, ValueError, r"conv_weight: expected shape \(O, 4, K, L"),
        (
            {"conv_weight": WEIGHT.astype(np.float16)}, TypeError,
            "conv_weight: expected dtype float32 or float64, got float16",
        ),
        ({"groups": 3}, ValueError, "groups: expected a divisor of the 4 channels of x, got 3"),
        ({"groups": 2}, ValueError, r"conv_weight: expected shape \(O, 2, K, L\) .* 2 groups"),
        (
            {"groups": 4, "conv_weight": WEIGHT[:, :1]}, ValueError,
            "groups: expected a divisor of the 6 output channels of conv_weight, got 4",
        ),
        ({"groups": 0}, ValueError, "groups: expected 1 to"),
        ({"stride": 0}, ValueError, "stride: expected 1 to"),
        ({"stride": (1, 2, 3)}, ValueError, "stride: expected an integer or two of them"),
        ({"stride": 1.0}, TypeError, "stride: expected an integer, got 1.0"),
        ({"padding": -1}, ValueError, "padding: expected 0 to"),
        ({"padding": "same"}, TypeError, "padding: expected an integer or two of them, got 'same'"),
        ({"dilation": (1, 0)}, ValueError, "dilation: expected 1 to"),
        ({"dilation": 4}, ValueError, r"x: expected an image that the window of conv_weight"),
        ({"x": X[:1, :, :3, :3]}, ValueError, "x: expected a convolution with more than 1 value"),
        ({"weight": np.ones(4, np.float32)}, ValueError, r"weight: expected shape \(6,\)"),
        ({"running_var": np.ones(4, np.float32)}, ValueError, r"running_var: expected shape \(6,"),
        ({"training": 1}, TypeError, "training: expected True or False"),
        ({"training": False}, ValueError, "running_mean: expected an array when training is False"),
        ({"eps": -1.0}, ValueError, "eps: expected a finite number of at least 0"),
        (
            {"momentum": 0.9, "exponential_average_factor": 0.1}, ValueError,
            "momentum and exponential_average_factor: expected one of them at most",
        ),
        ({"padding": 2**40}, ValueError, "padding: expected less than 2\\^31"),
        ({"running_mean": X.reshape(-1)[:6]}, ValueError, "running_mean: expected memory apart f"),
        (
            {"running_mean": WEIGHT.reshape(-1)[:6]}, ValueError,
            "running_mean: expected memory apart from conv_weight",
        ),
        (
            {"convolution": Odd("forward", lambda z: z.view(np.memmap))}, TypeError,
            "convolution.forward: expected a ndarray of shape .*, got memmap of shape",
        ),
        (
            {"convolution": types.SimpleNamespace(forward=1, backward_input=2, backward_weight=3)},
            TypeError, "convolution: expected None or an object",
        ),
        ({"convolution": "cudnn"}, TypeError, "convolution: expected None or an object"),
        ({"convolution": cunorm.MatmulConvolution}, TypeError, "convolution: expected None or an"),
        (
            {"convolution": Odd("forward", lambda z: z[:1])}, TypeError,
            r"convolution.forward: expected a ndarray of shape \(2, 6, 5, 4\)",
        ),
        (
            {"convolution": Odd("forward", list)}, TypeError,
            "convolution.forward: expected a ndarray of shape",
        ),
        (
            {"convolution": Odd("forward", lambda z: np.broadcast_to(z[:1], z.shape))}, ValueError,
            "convolution.forward: expected a writable array",
        ),
        (
            {
                "convolution": Odd("forward", lambda _: X),
                "conv_weight": WEIGHT[:4, :, :1, :1],
            }, ValueError, "convolution.forward: expected memory of its own",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_errors(bad, error, message):
    """Nothing is modified."""
    arguments = {"x": X, "conv_weight": WEIGHT} | bad
    running = {}
    if bad.get("training") is not False and not {"running_var", "running_mean"} & bad.keys():
        number = 4 if isinstance(bad.get("convolution"), Odd) and "conv_weight" in bad else 6
        running = {name: np.ones(number, np.float32) for name in ("running_mean", "running_var")}
    with pytest.raises(error, match=message):
        cunorm.conv_batch_norm_forward(**arguments, **running)
    assert all((array == 1).all() for array in (X, WEIGHT, *running.values()))


@pytest.mark.numpy
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"dy": None}, TypeError, "dy: expected an array, got None"),
        ({"dy": X}, ValueError, r"dy: expected the shape of the forward call's y, \(2, 6, 5, 4\)"),
        ({"dy": np.ones((2, 6, 5, 4))}, TypeError, "dy: expected the dtype of x, float32"),
        ({"x": X[:1]}, ValueError, "x: expected the shape of the forward call"),
        ({"conv_weight": WEIGHT[:3]}, ValueError, "conv_weight: expected the shape of the forward"),
        ({"conv_weight": WEIGHT[..., :2]}, ValueError, "conv_weight: expected the shape"),
        ({"saved": None}, TypeError, "saved: expected the ConvBatchNormSaved that conv_batch_norm"),
        ({"weight": np.ones(3, np.float32)}, ValueError, r"weight: expected shape \(6,\)"),
        ({"output_mask": (True, True, True)}, ValueError, "output_mask: expected four booleans"),
        (
            {"convolution": Odd("backward_input", lambda dx: dx[:1])}, TypeError,
            "convolution.backward_input: expected a ndarray of shape",
        ),
        (
            {"convolution": Odd("backward_weight", lambda d: d.astype(np.float64))}, TypeError,
            "convolution.backward_weight: expected a ndarray of .* dtype float64",
        ),
        (
            {"convolution": Odd("backward_input", lambda _: X)}, ValueError,
            "convolution.backward_input: expected memory of its own",
        ),
        (
            {"convolution": Odd("backward_weight", lambda _: WEIGHT)}, ValueError,
            "convolution.backward_weight: expected memory of its own",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_errors_in_backward(bad, error, message):
    bad = dict(bad)
    y, saved = cunorm.conv_batch_norm_forward(X, WEIGHT, convolution=bad.pop("convolution", None))
    arguments = {"dy": y, "x": X, "conv_weight": WEIGHT, "saved": saved} | bad
    with pytest.raises(error, match=message):
        cunorm.conv_batch_norm_backward(**arguments)
    assert (X == 1).all()


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"in_channels": -1}, ValueError, "in_channels: expected at least 0"),
        ({"out_channels": 1.5}, TypeError, "out_channels: expected an integer"),
        ({"kernel_size": 0}, ValueError, "kernel_size: expected 1 to"),
        ({"groups": 4}, ValueError, "groups: expected a divisor of out_channels, 6, got 4"),
        ({"groups": 3}, ValueError, "groups: expected a divisor of in_channels, 4, got 3"),
        ({"stride": 0}, ValueError, "stride: expected 1 to"),
        ({"convolution": 3}, TypeError, "convolution: expected None or an object"),
        ({"dtype": int}, TypeError, "dtype: expected float16"),
    ],
    ids=str,
)
def test_errors_of_the_layer(bad, error, message):
    arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": 3} | bad
    with pytest.raises(error, match=message):
        cunorm.ConvBatchNorm(**arguments)


class Reusing(cunorm.MatmulConvolution):
    """Has one array for all its results."""

    result = None

    def forward(self, *arguments, **options):
        z = super().forward(*arguments, **options)
        if self.result is None:
            self.result = z
        self.result[...] = z
        return self.result


@pytest.mark.numpy
def test_result_that_is_dy():
    y, saved = cunorm.conv_batch_norm_forward(X, WEIGHT, convolution=Reusing())
    with pytest.raises(ValueError, match=r"convolution.forward: expected memory of its own"):
        cunorm.conv_batch_norm_backward(y, X, WEIGHT, saved)


@pytest.mark.parametrize("rng", ["x", -1, 1.5])
def test_bad_rng(rng):
    with pytest.raises((TypeError, ValueError), match=r"rng: expected a numpy\.random"):
        cunorm.ConvBatchNorm(3, 5, 3, rng=rng)


@pytest.mark.numpy
def test_floating_point_errors(rng):
    """Numbers that overflow or underflow are no exceptions, whatever NumPy is told."""
    tiny = (rng.standard_normal((4, 5, 6, 6)) * 1e-4).astype(np.float16)
    with np.errstate(all="raise"):
        layer = cunorm.ConvBatchNorm(3, 5, 3, rng=0)
        x = rng.standard_normal((4, 3, 8, 8)).astype(np.float16)
        y = layer(x)
        layer.backward(tiny)
        x[0, 0, 0, 0] = np.inf
        layer.backward(layer(x))
        wide = np.full((5, 3, 3, 3), 1e300)
        y, saved = cunorm.conv_batch_norm_forward(x.astype(np.float32), wide)
        cunorm.conv_batch_norm_backward(y, x.astype(np.float32), wide, saved)


@pytest.mark.numpy
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("lie", ["fortran", "last", "broadcast", "gaps"])
def test_order_of_dy(rng, lie, training):
    """However dy lies, and whatever is asked for, the same bits."""
    x, conv_weight, weight, bias, *running = draw(rng, SHAPES[1], np.float32)
    y, saved = cunorm.conv_batch_norm_forward(
        x, conv_weight, weight, bias, *running, **options_of(SHAPES[1]), training=training
    )
    dy = rng.standard_normal(y.shape).astype(np.float32)
    if lie == "broadcast":
        dy = np.broadcast_to(dy[:1, :, :1], dy.shape)
    plain = np.ascontiguousarray(dy)
    if lie == "fortran":
        dy = np.asfortranarray(dy)
    elif lie == "last":
        dy = permuted(dy, (0, 2, 3, 1))
    elif lie == "gaps":
        dy = np.repeat(dy, 2, axis=3)[..., ::2]
    expected = cunorm.conv_batch_norm_backward(plain, x, conv_weight, saved, weight)
    for mask in [(True,) * 4, (True, True, False, True), (False, False, False, True)]:
        found = cunorm.conv_batch_norm_backward(dy, x, conv_weight, saved, weight, output_mask=mask)
        for wanted, actual, other in zip(mask, found, expected, strict=True):
            if wanted:
                np.testing.assert_array_equal(actual, other)


def test_batches_that_are_counted():
    """Those whose y has values."""
    empty = cunorm.ConvBatchNorm(4, 6, 3)
    empty(np.zeros((0, 4, 5, 5), np.float32))
    assert empty.num_batches_tracked == 0
    no_rows = cunorm.ConvBatchNorm(4, 6, 3, padding=2)
    no_rows(np.zeros((2, 4, 0, 5), np.float32))
    assert no_rows.num_batches_tracked == 1
    assert (no_rows.running_var != 1).all()
    no_outputs = cunorm.ConvBatchNorm(4, 0, 3)
    assert no_outputs(np.zeros((1, 4, 3, 3), np.float32)).shape == (1, 0, 1, 1)
    assert no_outputs.num_batches_tracked == 0


def test_what_is_let_go():
    """A layer that is dropped between the passes takes x with it at once."""
    layer, x = cunorm.ConvBatchNorm(3, 4, 3), np.ones((4, 3, 5, 5), np.float32)
    layer(x)
    reference = weakref.ref(x)
    gc.disable()
    try:
        del layer, x
        assert reference() is None
    finally:
        gc.enable()


def test_wrong_number_of_channels():
    layer = cunorm.ConvBatchNorm(4, 6, 3)
    with pytest.raises(ValueError, match=r"x: expected 4 channels at axis 1, got shape \(2, 6"):
        layer(np.ones((2, 6, 7, 7), np.float32))
    with pytest.raises(ValueError, match=r"x: expected shape \(N, C, H, W\), got \(6, 7, 7\)"):
        layer(np.ones((6, 7, 7), np.float32))
    with pytest.raises(ValueError, match=r"weight: expected shape \(6, 4, 3, 3\), got \(6, 4, 1"):
        layer.fold_into(np.ones((6, 4, 1, 1)))
    weight, bias = layer.fold_into(layer.conv_weight, np.ones(6, np.float32))
    expected = cunorm.fold_batch_norm(
        layer.conv_weight, np.ones(6, np.float32), layer.weight, layer.bias, layer.running_mean,
        layer.running_var,
    )  # fmt: skip
    np.testing.assert_array_equal(weight, expected[0])
    np.testing.assert_array_equal(bias, expected[1])


def test_momentum_warning_points_here():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cunorm.conv_batch_norm_forward(X, WEIGHT, momentum=0.1)
        cunorm.ConvBatchNorm(4, 6, 3, momentum=0.1)
        cunorm.ConvBatchNorm(4, 6, 3).momentum = 0.1
    assert [warning.filename for warning in caught] == [__file__] * 3
