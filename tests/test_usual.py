"""Usual arguments take a short way on the CPU: the results are those of the long one."""

import itertools
import sys

import numpy as np
import pytest
from cases import DTYPES, accumulator, draw, group, instance, layer, rms

import cunorm
from cunorm.cpu import transform

pytestmark = pytest.mark.cpu

BATCH = "batch norm"
NORMS = [BATCH, group(2), instance(), layer(), layer(1), rms(), rms(1, weight_offset=1.0)]


def read_only(array):
    """The same, but not usual."""
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def same(found, expected):
    assert (found is None) == (expected is None)
    if isinstance(found, np.ndarray):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected


def check(forward, backward, x, dy, weight, bias):
    y, saved = forward(x, weight, bias)
    other_y, other_saved = forward(read_only(x), weight, bias)
    same(y, other_y)
    for value, other in zip(saved, other_saved, strict=True):
        same(value, other)
    masks = itertools.product((True, False), repeat=3)
    for mask, out in itertools.product(masks, (None, np.empty_like(x))):
        if out is not None and not mask[0]:
            continue
        gradients = backward(dy, x, saved, weight, output_mask=mask, out=out)
        assert out is None or gradients[0] is out
        others = backward(read_only(dy), read_only(x), saved, weight, output_mask=mask)
        for gradient, other in zip(gradients, others, strict=True):
            same(gradient, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_same_bits(rng, norm, dtype):
    for shape in ((5, 4, 6), (1, 4, 60)):
        x, dy = draw(rng, shape, dtype), rng.standard_normal(shape).astype(dtype)
        affine = (4,) if norm is BATCH else norm.norm(shape).parameters_shape
        weight, bias = rng.standard_normal((2, *affine)).astype(accumulator(dtype))
        for w, b in ((weight, bias), (weight.astype(np.float64), None), (None, bias)):
            if norm is BATCH:
                check(cunorm.batch_norm_forward, cunorm.batch_norm_backward, x, dy, w, b)
            elif w is not None or not norm.weight_offset:
                check(norm.forward, norm.backward, x, dy, w, b if norm.has_bias else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_same_bits_of_given_statistics(rng, dtype):
    x, dy = draw(rng, (5, 4, 6), dtype), rng.standard_normal((5, 4, 6)).astype(dtype)
    weight, bias, mean, var = rng.uniform(0.5, 2.0, (4, 4)).astype(accumulator(dtype))

    def forward(x, weight, bias):
        return cunorm.batch_norm_forward(x, weight, bias, mean, var, training=False)

    check(forward, cunorm.batch_norm_backward, x, dy, weight, bias)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("shape", [(5, 4, 6), (5, 4, 40), (5, 4, 64), (40, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_same_bits_of_converted_parameters(rng, dtype, shape, training):
    """What comes in other types, or apart in memory, right after usual calls."""
    x = draw(rng, shape, dtype)
    weight, bias, mean, var = rng.uniform(0.5, 2.0, (4, 4)).astype(accumulator(dtype))
    calls = []
    for change in (np.copy, apart, lambda one: one.astype(np.float64), np.copy):
        for w, b in ((weight, bias), (None, bias), (weight, None), (None, None)):
            parameters = [None if one is None else change(one) for one in (w, b, mean, var)]
            y, saved = cunorm.batch_norm_forward(x, *parameters, training=training)
            calls.append((y, *saved[:3], *parameters[2:]))
    usual, strided, double, usual_again = (calls[i : i + 4] for i in range(0, 16, 4))
    for results, *others in zip(usual, strided, usual_again, strict=True):
        for other in others:
            for one, two in zip(results, other, strict=True):
                same(one, two)
    for results, others in zip(usual, double, strict=True):
        for one, two in zip(results[:4], others[:4], strict=True):
            same(one, two)
        for one, two in zip(results[4:], others[4:], strict=True):  # rounded after every step
            assert two.dtype == np.float64
            np.testing.assert_allclose(one, two, rtol=np.finfo(one.dtype).eps)
    assert (calls[0][4].tobytes() == mean.tobytes()) == (not training)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_usual_calls_go_to_the_entry(rng, monkeypatch, threads, dtype, training):
    """Large ones with helpers; what has to be converted does not."""
    threads(2)
    x, large = draw(rng, (5, 4, 64), dtype), draw(rng, (256, 4, 1024), dtype)
    parameters = rng.uniform(0.5, 2.0, (4, 4)).astype(accumulator(dtype))
    monkeypatch.setattr(transform, "stays_near", lambda *_: True)
    monkeypatch.setattr(transform, "_fused", transform._fused.__wrapped__)

    def forward(x, parameters):
        return cunorm.batch_norm_forward(x, *map(np.copy, parameters), training=training)

    def strided(x, parameters):
        return cunorm.batch_norm_forward(x, *map(apart, parameters), training=training)

    results = [forward(one, parameters) for one in (x, large)]  # which compiles
    strided(x, parameters)
    ran, ended = [], []
    run, dismiss = transform.run, transform.dismiss
    monkeypatch.setattr(transform, "run", lambda *arguments: ran.append(run(*arguments)))
    monkeypatch.setattr(transform, "dismiss", lambda: ended.append(dismiss()))
    for one, (y, saved) in zip((x, large), results, strict=True):
        assert not ended
        again, saved_again = forward(one, parameters)
        assert not ran
        same(again, y)
        for array, other in zip(saved, saved_again, strict=True):
            same(array, other)
    assert len(ended) == 1
    strided(x, parameters)
    assert len(ran) == 1


def apart(array):
    """The same values, each with one between it and the next."""
    return np.repeat(array, 2)[::2]


@pytest.mark.parametrize("change", [np.copy, apart], ids=["dense", "apart"])
@pytest.mark.parametrize("shape", [(5, 40, 6), (60, 40), (40000, 40)], ids=str)
def test_running_statistics_are_rounded_after_every_step(rng, shape, change):
    """To the bits of the formula, in whatever kernel they are: with 40000 rows in one apart."""
    x, f = rng.standard_normal(shape), 0.1
    batch, old = np.zeros((2, shape[1])), rng.uniform(0.5, 2.0, (2, shape[1]))
    running = [change(one) for one in old]
    cunorm.batch_norm_forward(x, None, None, *batch, exponential_average_factor=1)
    cunorm.batch_norm_forward(x, None, None, *running, exponential_average_factor=f)
    np.testing.assert_array_equal(running, old * (1 - f) + batch * f)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_byte_order_by_its_own_letter(rng, norm, dtype):
    """NumPy's own recipe for foreign data leaves arrays whose dtype says "<" and not "="."""

    def named(array):  # as a view: ml_dtypes 0.5 swaps the bytes of bfloat16 wrongly
        found = array.view(array.dtype.newbyteorder("<" if sys.byteorder == "little" else ">"))
        assert found.dtype.isnative
        assert found.dtype.byteorder != array.dtype.byteorder
        return found

    shape = (5, 4, 6)
    x, dy = draw(rng, shape, dtype), rng.standard_normal(shape).astype(dtype)
    batch = norm is BATCH
    affine = (4,) if batch else norm.norm(shape).parameters_shape
    numbers = rng.uniform(0.5, 2.0, (4, *affine)).astype(accumulator(dtype))

    def results(name):
        of_x, of_dy = name(x.copy()), name(dy.copy())
        weight, bias, *running = (name(row.copy()) for row in numbers)
        out = name(np.empty_like(x))
        if batch:
            cunorm.batch_norm_forward(of_x, weight, bias, *running, out=out)
            given, _ = cunorm.batch_norm_forward(of_x, weight, bias, *running, training=False)
            _, saved = cunorm.batch_norm_forward(of_x, weight, bias)
            gradients = cunorm.batch_norm_backward(of_dy, of_x, saved, weight)
            return out, given, *running, *gradients
        y, saved = norm.forward(of_x, weight, bias if norm.has_bias else None)
        return y, *norm.backward(of_dy, of_x, saved, weight)

    for found, expected in zip(results(named), results(np.asarray), strict=True):
        same(found, expected)
