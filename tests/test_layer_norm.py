"""Layer norm and RMS norm against the float64 reference: axes, dtypes, strides, options."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from cases import (
    DTYPES,
    accumulator,
    check,
    check_backward,
    check_forward,
    group,
    layer,
    operands,
    permuted,
    rms,
    with_gaps,
)

import cunorm
from cunorm.cpu import backward, memory, rows, statistics, transform

#: (shape, axis): whole and odd lengths, rows of one value and long ones, few and many. Short rows
#: are of few lengths, of which each has kernels of its own; see `test_short_rows.py`.
SHAPES = [
    ((6, 32), -1),
    ((37, 7), -1),
    ((3, 4, 130), -1),
    ((2, 5, 4, 8), 2),
    ((3, 3001), -1),
    ((35, 3001), -1),
    ((40_000,), 0),
    ((9, 1), -1),
    ((2, 3, 5), -3),
]

NORMS = [layer, rms]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_reference(rng, shape, axis, dtype, norm):
    check(norm(axis), *operands(rng, norm(axis), shape, dtype))


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_small_pieces(rng, small_pieces, norm, resident):
    """Every way of cutting an array gives the right numbers, also in place."""
    small_pieces(resident)
    for dtype, (shape, axis) in itertools.product(DTYPES[:3], SHAPES):
        case = norm(axis)
        x, dy, weight, bias = operands(rng, case, shape, dtype)
        y, saved, dx, *_ = check(case, x, dy, weight, bias)
        case.backward(dy, x, saved, weight, out=dy)
        np.testing.assert_array_equal(dy, dx)
        case.forward(x, weight, bias, out=x)
        np.testing.assert_array_equal(x, y)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("norm", NORMS)
def test_copies_of_parameters_in_kept_memory(rng, monkeypatch, norm, dtype):
    """Those of many parameters lie there, and change nothing."""
    case = norm()
    x, dy, weight, bias = operands(rng, case, (5, 301), dtype)
    for w, b in itertools.product([weight.astype(dtype), None], [bias, None]):
        results = []
        for least in (1 << 40, 1):
            for module in (rows, statistics):
                monkeypatch.setattr(module, "PARAMETER_BYTES", least)
            for plans in (transform._fused, backward._fused):
                plans.cache_clear()
            memory._pool.clear()
            y, saved = case.forward(x, w, b)
            results.append([y, *case.backward(dy, x, saved, w)])
        assert memory._pool.recent or w is not None
        for usual, kept in zip(*results, strict=True):
            np.testing.assert_array_equal(kept, usual)
    for plans in (transform._fused, backward._fused):
        plans.cache_clear()


@pytest.mark.cpu
@pytest.mark.parametrize("weight_type", [np.float32, np.float64])
@pytest.mark.parametrize(("case", "shape"), [(layer(), (700, 301)), (group(3), (400, 6, 50))])
def test_gradients_added_up_apart(rng, monkeypatch, case, shape, weight_type):
    """In the kernel, or by one of their own, of which those of another type have need."""
    x, dy, weight, bias = operands(rng, case, shape, np.float32)
    _, saved = case.forward(x, weight, bias)
    results = []
    for most in (1 << 40, 0):
        monkeypatch.setattr(backward, "ADDED_APART_BYTES", most)
        backward._fused.cache_clear()
        results.append(case.backward(dy, x, saved, weight.astype(weight_type)))
    backward._fused.cache_clear()
    assert results[0][1].dtype == weight_type
    for within, apart in zip(*results, strict=True):
        np.testing.assert_array_equal(apart, within)


@pytest.mark.parametrize("norm", NORMS)
def test_optional_parameters(rng, norm):
    x, dy, weight, bias = operands(rng, norm(), (6, 5, 7), np.float32)
    for w, b in itertools.product([weight, None], [bias, None]):
        _, _, _, dweight, dbias = check(norm(), x, dy, w, b)
        assert dweight.dtype == np.float32
        assert (dbias is None) == (norm is rms)


@pytest.mark.parametrize("norm", NORMS)
def test_output_mask(rng, norm):
    """What is left out is None, what is not has the same bits."""
    x, dy, weight, bias = operands(rng, norm(), (12, 20), np.float32)
    _, saved = norm().forward(x, weight, bias)
    everything = norm().backward(dy, x, saved, weight)
    for mask in itertools.product([True, False], repeat=3):
        masked = norm().backward(dy, x, saved, weight, output_mask=mask)
        for wanted, whole, part in zip(mask, everything, masked, strict=True):
            if wanted and whole is not None:
                np.testing.assert_array_equal(part, whole)
            else:
                assert part is None


def test_three_flags_for_rms_norm(rng):
    """Other norms' third, for the bias, is ignored."""
    x = rng.standard_normal((4, 5))
    _, saved = cunorm.rms_norm_forward(x)
    for mask in [(True, False), (True, False, True), [True, False, False]]:
        gradients = cunorm.rms_norm_backward(x, x, saved, output_mask=mask)
        assert len(gradients) == 2
        assert gradients[0] is not None
        assert gradients[1] is None


@pytest.mark.cpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "shape", [(7, 7), (7, 32), (20, 300), (7, 2048), (7, 2049), (7, 20_000), (48, 9000)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=lambda d: np.dtype(d).name)
def test_a_row_stands_alone(rng, norm, shape, dtype):
    """What becomes of a row does not depend on the others, nor on how many there are."""
    case = norm(1)
    x, dy, weight, bias = operands(rng, case, shape, dtype)
    y, saved = case.forward(x, weight, bias)
    dx = case.backward(dy, x, saved, weight)[0]
    for i in range(len(x)):
        row, gradient = x[i : i + 1], dy[i : i + 1]
        alone, own = case.forward(row, weight, bias)
        np.testing.assert_array_equal(alone[0], y[i])
        np.testing.assert_array_equal(own.inv_std[0], saved.inv_std[i])
        np.testing.assert_array_equal(case.backward(gradient, row, own, weight)[0][0], dx[i])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("axis", [1, 2, 3])
def test_permuted_memory(rng, norm, axis):
    """Results lie like x, and statistics and parameters keep their axes."""
    shape = (2, 3, 4, 6)
    case = norm(axis)
    base, gradient, weight, bias = operands(rng, case, shape, np.float32)
    expected = check(case, base, gradient, weight, bias)
    for order in itertools.permutations(range(4)):
        x, dy = permuted(base, order), permuted(gradient, order)
        y, saved, dx, dweight, dbias = check(case, x, dy, weight, bias)
        assert y.strides == dx.strides == x.strides
        assert saved.inv_std.shape == shape[:axis]
        assert dweight.shape == shape[axis:]
        assert dbias is None or dbias.shape == shape[axis:]
        if list(order[axis:]) == list(range(axis, 4)):  # the same rows
            np.testing.assert_array_equal(y, expected[0])
            np.testing.assert_array_equal(saved.inv_std, expected[1].inv_std)
            np.testing.assert_array_equal(dx, expected[2])


@pytest.mark.parametrize("norm", NORMS)
def test_any_strides(rng, norm):
    """Gaps, reversed and broadcast axes, operands and parameters in different orders."""
    shape = (4, 6, 10)
    case = norm(1)
    base, gradient, weight, bias = operands(rng, case, shape, np.float32)
    variants = {
        "plain": base,
        "gaps": with_gaps(base),
        "reversed": base[::-1].copy()[::-1],
        "permuted": permuted(base, (2, 0, 1)),
        "rows permuted": permuted(base, (0, 2, 1)),
        "part": np.pad(base, ((1, 2), (3, 1), (2, 2)))[1:-2, 3:-1, 2:-2],
        "unaligned": np.frombuffer(b"\0" + base.tobytes(), np.float32, base.size, 1).reshape(shape),
    }
    turned = permuted(weight, (1, 0)), bias if bias is None else with_gaps(bias)
    for x, dy in itertools.product(
        variants.values(), [gradient, with_gaps(gradient), permuted(gradient, (2, 1, 0))]
    ):
        _, saved, *gradients = check(case, x, dy, *turned)
        mask = (False, True, True)
        sums = case.backward(dy, x, saved, turned[0], output_mask=mask)
        for whole, part in zip(gradients[1:], sums[1:], strict=True):
            if whole is not None:
                np.testing.assert_allclose(part, whole, rtol=1e-5, atol=1e-5)
    constant = np.broadcast_to(np.float32(3), shape)
    y, _ = (
        case.forward(constant, None, None, eps=0)
        if norm is rms
        else layer(1).forward(constant, None, None)
    )
    np.testing.assert_array_equal(y, np.full(shape, 1.0 if norm is rms else 0.0))


@pytest.mark.parametrize("norm", NORMS)
def test_out(rng, norm):
    """Any `out` of the right shape receives the result and is what comes back."""
    shape = (4, 3, 10)
    case = norm()
    x, dy, weight, bias = operands(rng, case, shape, np.float32)
    y, saved, dx, *_ = check(case, x, dy, weight, bias)
    for out in (
        np.empty(shape, np.float32),
        permuted(np.empty(shape, np.float32), (1, 0, 2)),
        permuted(np.empty(shape, np.float32), (2, 0, 1)),
        with_gaps(np.empty(shape, np.float32)),
    ):
        out[...] = np.nan
        assert case.forward(x, weight, bias, out=out)[0] is out
        np.testing.assert_array_equal(out, y)
        out[...] = np.nan
        assert case.backward(dy, x, saved, weight, out=out)[0] is out
        np.testing.assert_array_equal(out, dx)
    for order in [(0, 1, 2), (1, 0, 2), (2, 1, 0)]:
        own, gradient = permuted(x, order), permuted(dy, order)
        assert case.backward(gradient, x, saved, weight, out=gradient)[0] is gradient
        np.testing.assert_array_equal(gradient, dx)
        kept = own.copy()
        np.testing.assert_array_equal(case.backward(dy, own, saved, weight, out=own)[0], dx)
        own[...] = kept
        assert case.forward(own, weight, bias, out=own)[0] is own
        np.testing.assert_array_equal(own, y)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_parameters_of_another_dtype(rng, dtype, norm):
    """Parameters' gradients have the parameters' dtype."""
    x, dy, weight, bias = operands(rng, norm(), (6, 5, 9), dtype)
    for wide in {np.dtype(dtype), np.dtype(np.float32), np.dtype(np.float64)}:
        w, b = weight.astype(wide), None if bias is None else bias.astype(wide)
        _, saved = check_forward(norm(), x, w, b)
        dx, dweight, dbias = norm().backward(dy, x, saved, w)
        assert dweight.dtype == wide
        assert dbias is None or dbias.dtype == wide
        assert dx.dtype == x.dtype
    _, saved = cunorm.layer_norm_forward(x, weight, weight.astype(np.float64))
    _, dweight, dbias = cunorm.layer_norm_backward(dy, x, saved, weight)
    assert dweight.dtype == accumulator(dtype)
    assert dbias.dtype == np.float64


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("offset", [1.0, -0.25])
def test_weight_offset(rng, dtype, offset):
    """Gemma's weights, which are added to 1 in the accumulator type."""
    case = rms(weight_offset=offset)
    x, dy, weight, _ = operands(rng, case, (6, 5, 20), dtype)
    for w in (weight, (weight * 1e-3).astype(dtype)):
        check(case, x, dy, w, None) if w.dtype == accumulator(dtype) else check_forward(
            case, x, w, None
        )


@pytest.mark.parametrize("length", [32, 700, 40_000])  # in registers, near and in pieces
def test_signs_of_zeros_in_rms_norm(length):
    x = np.ones((3, length), np.float32)
    x[:, ::2] = -0.0
    weight = np.full(length, 2.0, np.float32)
    y, _ = cunorm.rms_norm_forward(x, weight)
    np.testing.assert_array_equal(np.signbit(y), np.signbit(x))
    assert not y[:, ::2].any()


def test_default_eps_of_rms_norm():
    """The machine epsilon of the accumulator type."""
    for dtype, eps in [(np.float16, 2.0**-23), (np.float32, 2.0**-23), (np.float64, 2.0**-52)]:
        _, saved = cunorm.rms_norm_forward(np.zeros((2, 5), dtype))
        np.testing.assert_allclose(saved.inv_std, 1 / np.sqrt(eps), rtol=1e-6)


def test_one_value_a_row_is_bias(rng):
    x = rng.standard_normal((7, 1)).astype(np.float32)
    y, _ = cunorm.layer_norm_forward(x, np.full(1, 3, np.float32), np.full(1, 0.3, np.float32))
    np.testing.assert_array_equal(y, np.full((7, 1), 0.3, np.float32))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("shape", "axis"), [((0, 5), 1), ((3, 0), 1), ((2, 0, 4), 2), ((0,), 0)])
def test_empty(shape, axis, norm):
    x = np.zeros(shape, ml_dtypes.bfloat16)
    weight = np.ones(shape[axis:], np.float32)
    case = norm(axis)
    y, saved = case.forward(x, weight, weight)
    assert (y.shape, y.dtype) == (shape, x.dtype)
    assert saved.inv_std.shape == shape[:axis]
    np.testing.assert_array_equal(saved.inv_std, np.float32(1 / np.sqrt(1e-5)))
    dx, dweight, dbias = case.backward(x, x, saved, weight)
    assert dx.shape == shape
    np.testing.assert_array_equal(dweight, np.zeros(shape[axis:]))
    assert dbias is None or not dbias.any()
    assert case.backward(x, x, saved, weight, output_mask=(False, True, True))[0] is None


def test_saved_says_what_it_is(rng):
    x = rng.standard_normal((2, 3, 4))
    _, saved = cunorm.layer_norm_forward(x, axis=-2)
    assert saved._fields[:3] == ("mean", "inv_std", "residual")
    assert (saved.axis, saved.shape, saved.bias_dtype) == (1, (2, 3, 4), None)
    _, saved = cunorm.rms_norm_forward(x, np.zeros(4), weight_offset=1)
    assert saved.mean is None
    assert saved.weight_offset == 1
    assert check_backward(rms(weight_offset=1), x, x, cunorm.rms_norm_forward(
        x, np.zeros(4), eps=1e-5, weight_offset=1)[1], np.zeros(4)) is not None  # fmt: skip
