"""Scale-shift against the float64 reference: per channel and per sample."""

import itertools

import numpy as np
import pytest
from cases import DTYPES, check, operands, permuted, scale_shift, with_gaps

import cunorm

SHAPES = [
    ((3, 5, 4, 7), 1),
    ((2, 32, 40), 1),
    ((3, 6, 6, 5), -1),
    ((2, 5, 4, 3), 2),
    ((6, 17), 1),
    ((1, 1), 1),
]


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_reference(rng, shape, axis, dtype, per_sample):
    case = scale_shift(per_sample, axis)
    x, dy, scale, shift = operands(rng, case, shape, dtype)
    check(case, x, dy, scale, shift)
    check(case, x, dy, scale, None)


@pytest.mark.parametrize("resident", [True, False])
def test_small_pieces(rng, small_pieces, resident):
    small_pieces(resident)
    for per_sample, (shape, axis) in itertools.product([False, True], SHAPES):
        case = scale_shift(per_sample, axis)
        x, dy, scale, shift = operands(rng, case, shape, np.float32)
        y, _, dx, *_ = check(case, x, dy, scale, shift)
        case.backward(dy, x, None, scale, out=dy)
        np.testing.assert_array_equal(dy, dx)
        case.forward(x, scale, shift, out=x)
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("per_sample", [False, True])
def test_output_mask(rng, per_sample):
    """What is left out is None; dx alone is computed from dy alone."""
    case = scale_shift(per_sample)
    x, dy, scale, shift = operands(rng, case, (4, 6, 10), np.float32)
    _, _, *everything = check(case, x, dy, scale, shift)
    for mask in itertools.product([True, False], repeat=3):
        masked = cunorm.scale_shift_backward(dy, x, scale, output_mask=mask)
        for wanted, whole, part in zip(mask, everything, masked, strict=True):
            if wanted:
                np.testing.assert_array_equal(part, whole)
            else:
                assert part is None
    poisoned = np.full_like(x, np.nan)
    dx = cunorm.scale_shift_backward(dy, poisoned, scale, output_mask=(True, False, False))[0]
    np.testing.assert_array_equal(dx, everything[0])


@pytest.mark.parametrize("per_sample", [False, True])
def test_any_strides(rng, per_sample):
    """Of x, of dy, of the parameters; results lie like x."""
    case = scale_shift(per_sample)
    base, gradient, scale, shift = operands(rng, case, (3, 4, 5, 6), np.float32)
    if per_sample:
        scale = permuted(scale, (1, 0))
    for order in itertools.permutations(range(4)):
        x = permuted(base, order)
        y, _, dx, dscale, _ = check(case, x, gradient, scale, with_gaps(shift))
        assert y.strides == dx.strides == x.strides
        assert dscale.shape == scale.shape
    check(case, with_gaps(base), permuted(gradient, (3, 0, 2, 1)), scale, shift)
    for order in [(0, 1, 2, 3), (1, 0, 3, 2)]:
        out = permuted(np.empty(base.shape, np.float32), order)
        assert cunorm.scale_shift_forward(base, scale, shift, out=out) is out
        np.testing.assert_allclose(out, y, rtol=1e-6, atol=1e-6)
        x = permuted(base, order)
        cunorm.scale_shift_forward(x, scale, shift, out=x)
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
        x = permuted(base, order)
        cunorm.scale_shift_backward(gradient, x, scale, out=x)
        np.testing.assert_allclose(x, dx, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_dtypes(rng, dtype):
    """Gradients of both parameters have the dtype of scale."""
    x = rng.standard_normal((3, 4, 5)).astype(dtype)
    for wide in {np.dtype(dtype), np.dtype(np.float32), np.dtype(np.float64)}:
        scale = rng.standard_normal(4).astype(wide)
        y = cunorm.scale_shift_forward(x, scale, np.zeros(4))
        assert y.dtype == x.dtype
        dx, dscale, dshift = cunorm.scale_shift_backward(x, x, scale)
        assert dx.dtype == x.dtype
        assert dscale.dtype == dshift.dtype == wide


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 4, 0), (3, 0, 5)], ids=str)
def test_empty(shape, per_sample):
    x = np.zeros(shape, np.float16)
    scale = np.ones(shape[:2] if per_sample else shape[1], np.float32)
    assert cunorm.scale_shift_forward(x, scale, scale).shape == shape
    dx, dscale, dshift = cunorm.scale_shift_backward(x, x, scale)
    assert dx.shape == shape
    np.testing.assert_array_equal([dscale, dshift], np.zeros((2, *scale.shape)))
