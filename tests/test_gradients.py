"""Gradients against central differences of the forward pass, in float64."""

import numpy as np
import pytest
from cases import group, instance, layer, rms, scale_shift

import cunorm

# Central differences with step h err by h^2 from the third derivative and by
# u / h from rounding; h = 1e-5 makes both about 1e-10, and 1e-7 leaves room for
# derivatives larger than 1.
STEP = 1e-5
TOLERANCE = 1e-7


def differences(function, argument):
    """Gradient of a scalar function of an array."""
    gradient = np.zeros_like(argument)
    for index in np.ndindex(argument.shape):
        kept = argument[index]
        argument[index] = kept + STEP
        above = function()
        argument[index] = kept - STEP
        below = function()
        argument[index] = kept
        gradient[index] = (above - below) / (2 * STEP)
    return gradient


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 4), 1), ((3, 2, 5), 1), ((2, 3, 2, 4), -1), ((2, 2, 40), 1)], ids=str
)
def test_every_input(rng, shape, axis, training):
    number = shape[axis]
    x = rng.standard_normal(shape)
    dy = rng.standard_normal(shape)
    weight, bias, mean = rng.standard_normal((3, number))
    var = rng.uniform(0.5, 2, number)

    def forward():
        return cunorm.batch_norm_forward(
            x, weight, bias, mean, var, training=training, eps=0.1, channel_axis=axis,
            exponential_average_factor=0.0,
        )  # fmt: skip

    def loss():
        return float((forward()[0] * dy).sum())

    gradients = cunorm.batch_norm_backward(dy, x, forward()[1], weight)
    for name, argument, gradient in zip(
        ("x", "weight", "bias"), (x, weight, bias), gradients, strict=True
    ):
        expected = differences(loss, argument)
        np.testing.assert_allclose(gradient, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        (layer(eps=0.1), (4, 7)),
        (layer(1, eps=0.1), (3, 2, 5)),
        (rms(eps=0.1), (4, 7)),
        (rms(1, weight_offset=1.0, eps=0.1), (3, 2, 5)),
        (group(2, eps=0.1), (2, 4, 5)),
        (group(2, -1, eps=0.1), (2, 5, 4)),
        (instance(eps=0.1), (2, 3, 5)),
        (instance(-1, eps=0.1), (2, 5, 3)),
        (scale_shift(False), (2, 3, 4)),
        (scale_shift(True), (2, 3, 4)),
        (scale_shift(True, -1), (2, 4, 3)),
    ],
    ids=str,
)
def test_every_input_of_every_norm(rng, case, shape):
    x, dy = rng.standard_normal((2, *shape))
    weight, bias = rng.standard_normal((2, *case.norm(shape).parameters_shape))

    def loss():
        return float((case.forward(x, weight, bias)[0] * dy).sum())

    gradients = case.backward(dy, x, case.forward(x, weight, bias)[1], weight)
    for name, argument, gradient in zip(
        ("x", "weight", "bias"), (x, weight, bias), gradients, strict=True
    ):
        if gradient is None:
            continue
        expected = differences(loss, argument)
        np.testing.assert_allclose(gradient, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def test_composed_from_the_verbs(rng):
    """Statistics of two halves, merged: the gradient of the whole batch's loss."""
    x, dy = rng.standard_normal((2, 6, 3, 4))
    weight = rng.standard_normal(3)
    halves = [slice(0, 2), slice(2, 6)]

    def forward():
        moments = cunorm.merge_moments([cunorm.batch_norm_statistics(x[part]) for part in halves])
        inv_std = 1 / np.sqrt(moments.m2 / moments.count + 0.1)
        parts = [cunorm.batch_norm_transform(x[p], moments.mean, inv_std, weight) for p in halves]
        return np.concatenate(parts), moments, inv_std

    _, moments, inv_std = forward()
    sums = [cunorm.batch_norm_backward_reduce(dy[p], x[p], moments.mean) for p in halves]
    sum_dy, sum_dy_xmu = np.sum(sums, axis=0)
    dx = np.concatenate(
        [
            cunorm.batch_norm_backward_transform(
                dy[p], x[p], moments.mean, inv_std, weight, sum_dy, sum_dy_xmu, moments.count
            )
            for p in halves
        ]
    )
    expected = differences(lambda: float((forward()[0] * dy).sum()), x)
    np.testing.assert_allclose(dx, expected, rtol=TOLERANCE, atol=TOLERANCE)
