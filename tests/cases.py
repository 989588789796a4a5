"""The norms as cases of one: how to call each, and its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import reference
import tolerances
from tolerances import assert_within

import cunorm
from cunorm.cuda import launch

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


class Case(NamedTuple):
    """``forward(x, weight, bias) -> y, saved``, ``backward(dy, x, saved, weight)``, reference."""

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    norm: Callable[[tuple[int, ...]], reference.Norm]
    has_bias: bool = True
    weight_offset: float = 0.0
    given: dict[str, float] = {}  # statistics that are not x's own  # noqa: RUF012

    def __repr__(self):
        return self.name


def layer(axis=-1, **options):
    return Case(
        f"layer norm {axis}",
        lambda x, w, b, **o: cunorm.layer_norm_forward(x, w, b, axis=axis, **options, **o),
        cunorm.layer_norm_backward,
        lambda shape: reference.rows(shape, axis),
    )


def rms(axis=-1, weight_offset=0.0, eps=1e-5):
    def forward(x, weight, _, **options):
        options = {"axis": axis, "eps": eps, "weight_offset": weight_offset} | options
        return cunorm.rms_norm_forward(x, weight, **options)

    def backward(dy, x, saved, weight, output_mask=(True, True, True), **options):
        mask = output_mask[:2]
        return *cunorm.rms_norm_backward(dy, x, saved, weight, output_mask=mask, **options), None

    return Case(
        f"RMS norm {axis}", forward, backward, lambda shape: reference.rows(shape, axis, False),
        has_bias=False, weight_offset=weight_offset,
    )  # fmt: skip


def group(number, axis=1, **options):
    return Case(
        f"group norm {number} {axis}",
        lambda x, w, b, **o: cunorm.group_norm_forward(
            x, number, w, b, channel_axis=axis, **options, **o
        ),
        cunorm.group_norm_backward,
        lambda shape: reference.groups(shape, number, axis),
    )


def instance(axis=1, **options):
    return Case(
        f"instance norm {axis}",
        lambda x, w, b, **o: cunorm.instance_norm_forward(
            x, w, b, channel_axis=axis, **options, **o
        ),
        cunorm.instance_norm_backward,
        lambda shape: reference.groups(shape, shape[axis], axis),
    )


def scale_shift(per_sample, axis=1):
    def forward(x, weight, bias, **options):
        return cunorm.scale_shift_forward(x, weight, bias, channel_axis=axis, **options), None

    def backward(dy, x, _, weight, **options):
        return cunorm.scale_shift_backward(dy, x, weight, channel_axis=axis, **options)

    return Case(
        f"scale-shift {'(N, C)' if per_sample else '(C,)'} {axis}", forward, backward,
        lambda shape: reference.scale_shift(shape, per_sample, axis),
        given={"mean": 0.0, "var": 1.0, "eps": 0.0},
    )  # fmt: skip


def accumulator(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def draw(rng, shape, dtype):
    return (rng.standard_normal(shape) * 1.5 + 0.7).astype(dtype)


def permuted(array, order):
    """The same values, laid out in memory with the axes in another order."""
    return array.transpose(order).copy(order="C").transpose(np.argsort(order))


def with_gaps(array):
    """The same values, every second element of a larger array."""
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def operands(rng, case, shape, dtype):
    """x, dy, weight and bias."""
    affine = case.norm(shape).parameters_shape
    x, dy = draw(rng, shape, dtype), rng.standard_normal(shape).astype(dtype)
    weight = rng.standard_normal(affine).astype(accumulator(dtype))
    bias = rng.standard_normal(affine).astype(accumulator(dtype)) if case.has_bias else None
    return x, dy, weight, bias


def check_forward(case, x, weight, bias, **options):
    """Forward, compared with the reference: y and saved."""
    bias = bias if case.has_bias else None
    y, saved = case.forward(x, weight, bias, **options)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    result, _ = _reference(case, x, x, weight, bias)
    norm, dtype = result.norm, x.dtype
    effective = None if weight is None else weight.astype(np.float64) + case.weight_offset
    count = 1 if case.given else norm.count
    assert_within(y, result.y, tolerances.y_bound(result, effective, bias, count, dtype), "y")
    if saved is None:
        return y, saved
    assert saved.inv_std.dtype == accumulator(dtype)
    assert saved.inv_std.shape == norm.statistics_shape
    bound = tolerances.inv_std_bound(result, count, dtype)
    assert_within(saved.inv_std, result.inv_std, bound, "inv_std")
    if norm.centered:
        assert saved.mean.dtype == accumulator(dtype)
        bound = tolerances.mean_bound(result, count, dtype)
        assert_within(saved.mean, result.mean, bound, "mean")
    else:
        assert saved.mean is None
    return y, saved


def check_backward(case, dy, x, saved, weight, **options):
    """Backward, compared with the reference: dx, dweight, dbias."""
    gradients = case.backward(dy, x, saved, weight, **options)
    result, expected = _reference(case, x, dy, weight, None)
    effective = None if weight is None else weight.astype(np.float64) + case.weight_offset
    count = 1 if case.given else result.norm.count
    bounds = tolerances.backward_bounds(expected, result, dy, effective, count, x.dtype)
    for name, actual in zip(expected._fields, gradients, strict=True):
        if actual is not None:
            assert_within(actual, getattr(expected, name), getattr(bounds, name), name)
    assert gradients[0] is None or gradients[0].dtype == x.dtype
    return gradients


def check(case, x, dy, weight, bias):
    """Forward and backward against the reference, and that the inputs are as they were."""
    kept = [a.copy() for a in (x, dy, weight, bias) if a is not None]
    y, saved = check_forward(case, x, weight, bias)
    gradients = check_backward(case, dy, x, saved, weight)
    for before, after in zip(
        kept, [a for a in (x, dy, weight, bias) if a is not None], strict=True
    ):
        np.testing.assert_array_equal(after, before)
    return y, saved, *gradients


def _reference(case, x, dy, weight, bias):
    norm, given = case.norm(x.shape), case.given
    if weight is not None:
        weight = weight.astype(np.float64) + case.weight_offset
    result = reference.forward(x, weight, bias, norm=norm, **given)
    return result, reference.backward(dy, x, weight, norm=norm, **given)


def forget_plans():
    """Before plans are made otherwise, and after."""
    for find in (launch.plan, launch.sweep, launch.elementwise):
        find.cache_clear()
