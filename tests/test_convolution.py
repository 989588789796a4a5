"""Convolutions, against their definition in float64."""

import copy
import pickle
import tracemalloc

import numpy as np
import pytest
from cases import DTYPES, permuted
from tolerances import SMALLEST, assert_within, roundoff

import cunorm

# (stride, padding, dilation, groups, window) of 4 channels of 7 x 6 to 6
SHAPES = [
    ((1, 1), (0, 0), (1, 1), 1, (1, 1)),
    ((1, 1), (1, 1), (1, 1), 1, (3, 3)),
    ((2, 3), (1, 2), (1, 1), 2, (3, 2)),
    ((3, 1), (0, 4), (2, 1), 1, (2, 3)),
    ((1, 2), (2, 0), (3, 2), 2, (3, 3)),
    ((5, 4), (6, 5), (1, 3), 1, (2, 1)),  # windows that see nothing but zeros
]


def options_of(shape):
    return dict(zip(("stride", "padding", "dilation", "groups"), shape, strict=False))


def terms(x, weight, stride, padding, dilation, groups):
    """The parts of every tap: (place in the weight, slice of padded x, product)."""
    padded = np.pad(x, ((0, 0), (0, 0), *((p, p) for p in padding)))
    number, channels, *window = weight.shape
    extents = [
        (padded.shape[2 + i] - dilation[i] * (window[i] - 1) - 1) // stride[i] + 1 for i in range(2)
    ]
    for o, c, *tap in np.ndindex(weight.shape):
        part = (
            slice(None), o // (number // groups) * channels + c,
            *(
                slice(t * d, t * d + (extent - 1) * s + 1, s)
                for t, d, s, extent in zip(tap, dilation, stride, extents, strict=True)
            ),
        )  # fmt: skip
        yield (o, c, *tap), part, padded


def convolve(x, weight, **options):
    """y in float64."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    total = None
    for place, part, padded in terms(x, weight, **options):
        if total is None:
            total = np.zeros((len(x), len(weight), *padded[part].shape[1:]))
        total[:, place[0]] += weight[place] * padded[part]
    return total


def convolve_backward(dy, x, weight, **options):
    """(dx, dweight) in float64."""
    dy, x, weight = (a.astype(np.float64) for a in (dy, x, weight))
    dweight, dpadded = np.zeros(weight.shape), None
    for place, part, padded in terms(x, weight, **options):
        if dpadded is None:
            dpadded = np.zeros(padded.shape)
        dweight[place] = (dy[:, place[0]] * padded[part]).sum()
        dpadded[part] += weight[place] * dy[:, place[0]]
    rows, columns = options["padding"]
    height, width = x.shape[2:]
    return dpadded[:, :, rows : rows + height, columns : columns + width], dweight


def draw(rng, shape, dtype):
    *_, groups, window = shape
    x = rng.standard_normal((3, 4, 7, 6)).astype(dtype)
    weight = rng.standard_normal((6, 4 // groups, *window)).astype(dtype)
    return x, weight


def check(actual, expected, sizes, count, dtype, what):
    """A sum of `count` products, `sizes` being that of their absolute values, in one go."""
    wide = np.float64 if dtype == np.float64 else np.float32
    bound = 4 * (np.sqrt(count) + 2) * roundoff(wide) * sizes + roundoff(dtype) * np.abs(expected)
    assert_within(actual, expected, bound + SMALLEST[np.dtype(dtype).name], what)


@pytest.mark.parametrize("limit", [64 << 20, 4000, 1], ids=["whole", "tiles", "pixels"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_definition(rng, shape, dtype, limit):
    convolution = cunorm.MatmulConvolution(limit)
    x, weight = draw(rng, shape, dtype)
    options = options_of(shape)
    expected = convolve(x, weight, **options)
    y = convolution.forward(x, weight, **options)
    assert y.dtype == dtype
    sizes = convolve(abs(x), abs(weight), **options)
    check(y, expected, sizes, weight[0].size, dtype, "y")

    dy = rng.standard_normal(y.shape).astype(dtype)
    dx, dweight = convolve_backward(dy, x, weight, **options)
    dx_sizes, dweight_sizes = convolve_backward(abs(dy), abs(x), abs(weight), **options)
    actual = convolution.backward_input(dy, weight, x, **options)
    assert actual.dtype == dtype
    check(actual, dx, dx_sizes, weight[:, 0].size, dtype, "dx")
    actual = convolution.backward_weight(dy, x, weight, **options)
    assert actual.dtype == dtype
    check(actual, dweight, dweight_sizes, dy[:, 0].size, dtype, "dweight")


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)], ids=str)
def test_memory_order_of_x(rng, order):
    """Results lie in memory as x does."""
    shape = SHAPES[1]
    x, weight = draw(rng, shape, np.float32)
    turned = permuted(x, order)
    convolution, options = cunorm.MatmulConvolution(), options_of(shape)
    y = convolution.forward(turned, weight, **options)
    np.testing.assert_array_equal(y, convolution.forward(x, weight, **options))
    dx = convolution.backward_input(y, weight, turned, **options)
    for result in (y, dx):
        assert result.transpose(order).flags.c_contiguous


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_wider_weight(rng, shape):
    """A float32 weight of half data is not rounded, nor is its gradient."""
    x, weight = draw(rng, shape, np.float16)
    weight = rng.standard_normal(weight.shape).astype(np.float32)
    convolution, options = cunorm.MatmulConvolution(), options_of(shape)
    y = convolution.forward(x, weight, **options)
    assert y.dtype == np.float16
    wide = convolution.forward(x.astype(np.float32), weight, **options)
    np.testing.assert_array_equal(y, wide.astype(np.float16))
    dweight = convolution.backward_weight(y, x, weight, **options)
    assert dweight.dtype == np.float32


@pytest.mark.parametrize("empty", [0, 1], ids=["samples", "channels"])
def test_nothing(rng, empty):
    shape = [3, 4, 7, 6]
    shape[empty] = 0
    x, weight = np.zeros(shape), rng.standard_normal((6, shape[1], 3, 3))
    convolution, options = cunorm.MatmulConvolution(), options_of(SHAPES[1])
    y = convolution.forward(x, weight, **options)
    assert y.shape == (shape[0], 6, 7, 6)
    assert (y == 0).all()
    assert convolution.backward_input(y, weight, x, **options).shape == x.shape
    dweight = convolution.backward_weight(y, x, weight, **options)
    assert dweight.shape == weight.shape
    assert (dweight == 0).all()


@pytest.mark.parametrize("limit", [1 << 16, 1 << 18, 1 << 20])
@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=["float16", "float32"])
@pytest.mark.parametrize(("window", "padding"), [(3, 1), (7, 0), (7, 3)])
def test_workspace_limit(rng, limit, dtype, window, padding):
    """No method takes more than its limit, besides results and what is like the weight."""
    convolution = cunorm.MatmulConvolution(limit)
    x = rng.standard_normal((8, 4, 32, 32)).astype(dtype)
    weight = rng.standard_normal((6, 4, window, window)).astype(dtype)
    options = options_of(((1, 1), (padding, padding), (1, 1), 1))
    y = convolution.forward(x, weight, **options)
    calls = {
        convolution.forward: (x, weight),
        convolution.backward_input: (y, weight, x),
        convolution.backward_weight: (y, x, weight),
    }
    for function, arguments in calls.items():
        tracemalloc.start()
        result = function(*arguments, **options)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        besides = result.nbytes + 6 * weight.size * 8 + 20_000  # objects
        assert peak <= limit + besides, function.__name__
        assert limit > 1 << 16 or peak < x.size * 4 * 9, function.__name__  # the whole's windows


def test_tiles_make_no_difference_but_rounding(rng):
    """The same bits with the same limit, whatever ran before."""
    shape = SHAPES[2]
    x, weight = draw(rng, shape, np.float32)
    for limit in (64 << 20, 4000):
        convolution, options = cunorm.MatmulConvolution(limit), options_of(shape)
        first = convolution.forward(x, weight, **options)
        convolution.forward(x[:1], weight, **options)
        np.testing.assert_array_equal(convolution.forward(x, weight, **options), first)


def test_copies():
    convolution = cunorm.MatmulConvolution(1 << 20)
    for other in (copy.deepcopy(convolution), pickle.loads(pickle.dumps(convolution))):
        assert repr(other) == "MatmulConvolution(workspace_limit=1048576)"
    assert isinstance(convolution, cunorm.Convolution)
    assert not isinstance(object(), cunorm.Convolution)


@pytest.mark.parametrize(
    ("limit", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("1", TypeError)]
)
def test_bad_limit(limit, error):
    with pytest.raises(error, match="workspace_limit: expected"):
        cunorm.MatmulConvolution(limit)
