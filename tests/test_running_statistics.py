"""Running statistics: both conventions, correction, strides, what leaves them alone."""

import warnings

import ml_dtypes
import numpy as np
import pytest

import cunorm

# Keras' and cuDNN's shared example: channels last, eps 1e-3, factor 0.5.
X0 = np.array(
    [
        [[[0.16513085, 0.9014813, 0.6309742], [0.4345461, 0.29193902, 0.64250207]]],
        [[[0.9757855, 0.43509948, 0.6601019], [0.60489583, 0.6366315, 0.6144488]]],
    ],
    np.float32,
)


@pytest.mark.parametrize(
    ("correction", "expected_var"),
    [(0, [0.543208, 0.5262226, 0.50013864]), (1, [0.5576107, 0.5349634, 0.50018483])],
)
def test_worked_numbers(correction, expected_var):
    """Seven digits as printed: one unit of the last is the bound."""
    running_mean, running_var = np.ones(3, np.float32), np.ones(3, np.float32)
    y, saved = cunorm.batch_norm_forward(
        X0, np.ones(3, np.float32), np.zeros(3, np.float32), running_mean, running_var,
        exponential_average_factor=0.5, eps=1e-3, correction=correction, channel_axis=-1,
    )  # fmt: skip
    np.testing.assert_allclose(saved.mean, [0.5450896, 0.5662878, 0.63700676], atol=1e-7)
    np.testing.assert_allclose(saved.inv_std, [3.3822396, 4.325596, 27.981367], rtol=2e-7)
    var = 1 / saved.inv_std.astype(np.float64) ** 2 - 1e-3
    np.testing.assert_allclose(var, [0.08641606, 0.05244513, 0.00027721], atol=2e-8)
    np.testing.assert_allclose(running_mean, [0.7725448, 0.7831439, 0.8185034], atol=1e-7)
    np.testing.assert_allclose(running_var, expected_var, atol=1e-7)
    np.testing.assert_allclose(y[0, 0, 0], [-1.2851115, 1.4499114, -0.16879845], atol=2e-6)


def test_two_names_of_one_number(rng):
    """A momentum of 0.7 is a factor of 0.3; neither means 0.1."""
    x = rng.standard_normal((8, 3, 4)).astype(np.float32)

    def after(**options):
        mean, var = np.full(3, 2.0), np.full(3, 5.0)
        cunorm.batch_norm_forward(x, None, None, mean, var, **options)
        return np.concatenate([mean, var])

    np.testing.assert_array_equal(after(momentum=0.75), after(exponential_average_factor=0.25))
    np.testing.assert_array_equal(after(), after(exponential_average_factor=0.1))
    batch = np.concatenate([x.mean((0, 2)), x.var((0, 2), ddof=1)])
    np.testing.assert_allclose(after(exponential_average_factor=1), batch, rtol=1e-5)
    start = np.repeat([2.0, 5.0], 3)
    np.testing.assert_array_equal(after(exponential_average_factor=0), start)
    np.testing.assert_array_equal(after(momentum=1), start)
    np.testing.assert_allclose(after(momentum=0.9), 0.9 * start + 0.1 * batch, rtol=1e-5)


def test_small_momentum_warns(rng):
    x = rng.standard_normal((8, 3)).astype(np.float32)
    with pytest.warns(UserWarning, match=r"exponential_average_factor=0\.1") as record:
        cunorm.batch_norm_forward(x, momentum=0.1)
    assert record[0].filename == __file__
    with pytest.warns(UserWarning, match="PyTorch") as record:
        cunorm.BatchNorm(3, momentum=0.1)
    assert record[0].filename == __file__
    with pytest.warns(UserWarning, match="PyTorch") as record:
        cunorm.update_running_statistics(None, None, np.zeros(3), np.ones(3), 5, momentum=0.1)
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cunorm.batch_norm_forward(x, momentum=0.5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_update(rng, dtype):
    """In every dtype and with any strides, from a biased variance."""
    mean, var = rng.standard_normal(5), rng.uniform(1, 2, 5)
    table = np.ones((5, 2, 2), dtype)
    for running_mean, running_var in (
        (np.ones(5, dtype), np.ones(5, dtype)),
        (table[:, 0, 0], table[::-1, 1, 1]),
    ):
        cunorm.update_running_statistics(
            running_mean, running_var, mean, var, 10, exponential_average_factor=0.25, correction=2
        )
        bound = 2.0 * np.finfo(np.float32).eps if dtype == np.float32 else 0
        bound = bound or float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(running_mean.astype(float), 0.75 + 0.25 * mean, atol=bound)
        expected = 0.75 + 0.25 * var * 10 / 8
        np.testing.assert_allclose(running_var.astype(float), expected, atol=bound)
    np.testing.assert_array_equal(table[:, 0, 1], np.ones(5))


def test_forward_updates_strided_running_statistics(rng):
    x = rng.standard_normal((8, 3, 4)).astype(np.float32)
    table = np.zeros((3, 2), np.float32)
    dense = np.zeros((2, 3), np.float32)
    cunorm.batch_norm_forward(x, None, None, table[:, 0], table[:, 1])
    cunorm.batch_norm_forward(x, None, None, dense[0], dense[1])
    np.testing.assert_array_equal(table.T, dense)
    y = cunorm.batch_norm_forward(x, None, None, table[:, 0], table[:, 1], training=False)[0]
    z = cunorm.batch_norm_forward(x, None, None, dense[0], dense[1], training=False)[0]
    np.testing.assert_array_equal(y, z)


def test_nan_in_running_statistics_passes_through(rng):
    x = rng.standard_normal((8, 3)).astype(np.float32)
    mean, var = np.array([np.nan, 0, 0], np.float32), np.array([1, np.nan, 1], np.float32)
    cunorm.batch_norm_forward(x, None, None, mean, var)
    assert np.isnan(mean).tolist() == [True, False, False]
    assert np.isnan(var).tolist() == [False, True, False]
    y = cunorm.batch_norm_forward(x, None, None, mean, var, training=False)[0]
    assert np.isnan(y).all(0).tolist() == [True, True, False]


def test_left_alone(rng):
    """By inference, by an empty batch, by a count of 0."""
    mean, var = rng.standard_normal(3), rng.uniform(1, 2, 3)
    kept = mean.copy(), var.copy()
    x = rng.standard_normal((8, 3))
    cunorm.batch_norm_forward(x, None, None, mean, var, training=False)
    cunorm.batch_norm_forward(x[:0], None, None, mean, var)
    cunorm.update_running_statistics(mean, var, np.ones(3), np.ones(3), 0)
    np.testing.assert_array_equal(mean, kept[0])
    np.testing.assert_array_equal(var, kept[1])


def test_update_without_channels():
    nothing = np.zeros(0, np.float32)
    cunorm.update_running_statistics(nothing.copy(), nothing.copy(), nothing, nothing, 5)
