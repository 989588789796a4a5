"""Folding: a convolution with the folded weight is convolution and batch norm."""

import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES
from test_convolution import convolve
from tolerances import SMALLEST, assert_within, roundoff

import cunorm


def draw(rng, shape, number, dtype=np.float64):
    """Weight, bias, and the four arrays of a batch norm."""
    conv_weight = rng.standard_normal(shape).astype(dtype)
    conv_bias, weight, bias, mean = rng.standard_normal((4, number)).astype(dtype)
    return conv_weight, conv_bias, weight, bias, mean, rng.uniform(0.5, 2, number).astype(dtype)


def transposed_convolve(x, weight, groups):
    """A transposed convolution of stride 1: weight is (C, O / groups, K, L)."""
    channels, each, *window = weight.shape
    y = np.zeros((len(x), each * groups, *(x.shape[2 + i] + window[i] - 1 for i in range(2))))
    for c, o, k, m in np.ndindex(weight.shape):
        place = c // (channels // groups) * each + o
        y[:, place, k : k + x.shape[2], m : m + x.shape[3]] += weight[c, o, k, m] * x[:, c]
    return y


def normalized(z, bias, weight, shift, mean, var, eps, axis=1):
    """Batch norm in inference, in float64."""
    along = [1] * z.ndim
    along[axis] = -1
    values = (
        np.asarray(v).astype(np.float64).reshape(along) for v in (bias, weight, shift, mean, var)
    )
    bias, weight, shift, mean, var = values
    return (z + bias - mean) / np.sqrt(var + eps) * weight + shift


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("groups", [1, 2])
def test_convolution(rng, groups, dtype):
    """Each number of weight and bias is rounded once, and so is the result of the sums."""
    x = rng.standard_normal((2, 4, 5, 6)).astype(dtype).astype(np.float64)
    given = draw(rng, (6, 4 // groups, 3, 3), 6, dtype)
    folded, bias = cunorm.fold_batch_norm(*given, eps=1e-3)
    assert (folded.shape, folded.dtype) == (given[0].shape, dtype)
    assert (bias.shape, bias.dtype) == ((6,), dtype)
    options = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": groups}
    expected = normalized(convolve(x, given[0], **options), *given[1:], eps=1e-3)
    actual = convolve(x, folded, **options) + bias.astype(np.float64)[:, None, None]
    sizes = convolve(abs(x), abs(folded), **options) + abs(bias.astype(np.float64))[:, None, None]
    # a few roundings in float64, whose parts are at most so much larger than their sum
    parts = 1e3 * roundoff(np.float64) + roundoff(dtype)
    assert_within(actual, expected, parts * sizes + 100 * SMALLEST[np.dtype(dtype).name], "y")


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_transposed(rng, groups):
    x = rng.standard_normal((2, 6, 4, 5))
    given = draw(rng, (6, 4, 3, 2), 4 * groups)
    folded, bias = cunorm.fold_batch_norm(*given, channel_axis=1, groups=groups, eps=1e-3)
    expected = normalized(transposed_convolve(x, given[0], groups), *given[1:], eps=1e-3)
    actual = transposed_convolve(x, folded, groups) + bias[:, None, None]
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("shape", "axis"), [((5, 7), 0), ((7, 5), -1), ((7, 5), 1)], ids=str)
def test_dense(rng, shape, axis):
    x = rng.standard_normal((3, 7))
    given = draw(rng, shape, 5)
    folded, bias = cunorm.fold_batch_norm(*given, channel_axis=axis)
    matrices = (given[0].T, folded.T) if axis == 0 else (given[0], folded)
    expected = normalized(x @ matrices[0], *given[1:], eps=1e-5)
    np.testing.assert_allclose(x @ matrices[1] + bias, expected, rtol=1e-12, atol=1e-12)


def test_other_layouts_and_ranks(rng):
    """Keras' (K, L, I, O) and a convolution in one dimension, from each other's arrays."""
    given = draw(rng, (6, 4, 3, 2), 6)
    expected, bias = cunorm.fold_batch_norm(*given)
    turned = given[0].transpose(2, 3, 1, 0)
    folded, same = cunorm.fold_batch_norm(turned, *given[1:], channel_axis=-1)
    np.testing.assert_array_equal(folded, expected.transpose(2, 3, 1, 0))
    np.testing.assert_array_equal(same, bias)
    line, same = cunorm.fold_batch_norm(given[0][..., 0], *given[1:])
    np.testing.assert_array_equal(line, expected[..., 0])
    np.testing.assert_array_equal(same, bias)


def test_what_is_missing(rng):
    """No biases count as 0, no weight as 1; their dtype is the weight's."""
    conv_weight, _, _, _, mean, var = draw(rng, (3, 2, 1, 1), 3)
    ones, zeros = np.ones(3), np.zeros(3)
    expected = cunorm.fold_batch_norm(conv_weight, zeros, ones, zeros, mean, var)
    actual = cunorm.fold_batch_norm(conv_weight, None, None, None, mean, var)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    half = conv_weight.astype(np.float16)
    assert cunorm.fold_batch_norm(half, None, None, None, mean, var)[1].dtype == np.float16
    bias = zeros.astype(np.float32)
    assert cunorm.fold_batch_norm(half, bias, None, None, mean, var)[1].dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=str)
def test_layer(rng, dtype):
    layer = cunorm.BatchNorm(4, eps=1e-2)
    layer(rng.standard_normal((8, 4, 3)).astype(np.float32) * 2 + 1)
    layer.weight[...] = rng.standard_normal(4)
    layer.bias[...] = rng.standard_normal(4)
    before = layer.state_dict()
    weight = rng.standard_normal((4, 3)).astype(dtype)
    folded, bias = layer.fold_into(weight)
    state = [before[name] for name in ("weight", "bias", "running_mean", "running_var")]
    expected = cunorm.fold_batch_norm(weight, None, *state, eps=1e-2)
    np.testing.assert_array_equal(folded, expected[0])
    np.testing.assert_array_equal(bias, expected[1])
    for name, array in layer.state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    conv_bias = rng.standard_normal(4).astype(np.float32)
    folded, bias = layer.fold_into(weight.T, conv_bias, channel_axis=-1)
    expected = cunorm.fold_batch_norm(weight, conv_bias, *state, eps=1e-2)
    np.testing.assert_array_equal(folded.T, expected[0])
    np.testing.assert_array_equal(bias, expected[1])


def test_layer_without_running_statistics():
    layer = cunorm.BatchNorm(4, track_running_statistics=False)
    with pytest.raises(ValueError, match="fold_into: expected a layer with running statistics"):
        layer.fold_into(np.ones((4, 3)))


def test_names_in_the_layers_messages():
    layer = cunorm.BatchNorm(4)
    with pytest.raises(ValueError, match="weight: expected 4 output channels, got 3, those at axi"):
        layer.fold_into(np.ones((3, 5)))
    with pytest.raises(ValueError, match=r"bias: expected shape \(4,\), one value a channel, got"):
        layer.fold_into(np.ones((4, 5)), np.ones(3))


GOOD = {
    "conv_weight": np.ones((6, 4, 3, 3)),
    "conv_bias": np.ones(6),
    "weight": np.ones(6),
    "bias": np.ones(6),
    "running_mean": np.ones(6),
    "running_var": np.ones(6),
}


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"conv_weight": None}, TypeError, "conv_weight: expected an array, got None"),
        ({"conv_weight": np.ones(6)}, ValueError, "conv_weight: expected at least 2 dimensions"),
        ({"conv_weight": np.ones((6, 4), int)}, TypeError, "conv_weight: expected dtype float16"),
        ({"running_mean": None}, ValueError, "running_mean: expected running statistics to fold"),
        ({"running_var": None}, ValueError, "running_var: expected running statistics to fold"),
        ({"running_var": np.ones(5)}, ValueError, r"running_var: expected shape \(6,\), one value"),
        ({"conv_bias": np.ones(4)}, ValueError, r"conv_bias: expected shape \(6,\)"),
        ({"weight": np.ones((6, 1))}, ValueError, r"weight: expected shape \(6,\)"),
        ({"bias": np.ones(6, int)}, TypeError, "bias: expected dtype float16"),
        ({"channel_axis": 4}, ValueError, "channel_axis: expected -4 to 3 for conv_weight of"),
        ({"channel_axis": 1}, ValueError, r"running_mean: expected shape \(4,\)"),
        ({"channel_axis": 1, "groups": 2}, ValueError, r"running_mean: expected shape \(8,\)"),
        (
            {"channel_axis": -1, "groups": 2},
            ValueError,
            "groups: expected 1 for a conv_weight with",
        ),
        ({"groups": 4}, ValueError, "groups: expected a divisor of the first axis of conv_weight"),
        ({"groups": 0}, ValueError, "groups: expected 1 to"),
        ({"groups": 1.0}, TypeError, "groups: expected an integer"),
        ({"eps": -1}, ValueError, "eps: expected a finite number of at least 0"),
        ({"conv_weight": [[1.0]]}, TypeError, "conv_weight: expected an array"),
    ],
    ids=str,
)
def test_errors(bad, error, message):
    arguments = GOOD | bad
    with pytest.raises(error, match=message):
        cunorm.fold_batch_norm(**arguments)
