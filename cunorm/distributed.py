"""Moments of a part of the data, and their exact merging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from . import arrays, checks
from .arrays import Array

__all__ = ["Moments", "merge_moments"]


class Moments(NamedTuple):
    """Count, mean and centred sum of squares of every channel.

    Attributes
    ----------
    count : int
        Values a channel.
    mean : array, shape (C,)
        Their mean; 0 where there are none.
    m2 : array, shape (C,)
        Sum of (x - mean)^2, so that the biased variance is ``m2 / count``.
    """

    count: int  # type: ignore[assignment]
    mean: Array
    m2: Array


def merge_moments(moments: Sequence[Moments]) -> Moments:
    """Moments of all the data together from the moments of its parts.

    With n the sum of all counts n_i,

        mean = sum_i n_i mean_i / n
        m2   = sum_i m2_i + sum_i n_i (mean_i - mean)^2

    computed in float64 in the order given, whatever the dtype (Chan, Golub and
    LeVeque, "Algorithms for computing the sample variance", 1983, eq. 2.1 for
    any number of parts). Empty parts (count 0) change nothing.

    Parameters
    ----------
    moments : sequence of Moments
        At least one; means and m2 of shape (C,) and of one dtype.

    Returns
    -------
    Moments
        In the dtype of the parts.

    Raises
    ------
    TypeError
        For a part that is no (count, mean, m2), or parts of several dtypes.
    ValueError
        For no parts, a negative count, or parts of several numbers of channels.
    """
    if isinstance(moments, Moments):
        raise TypeError("moments: expected a sequence of Moments, got one that is in none")
    parts = list(moments)
    if not parts:
        raise ValueError("moments: expected at least one part, got none")
    counts: list[int] = []
    means: list[np.ndarray] = []
    squares: list[np.ndarray] = []
    place: arrays.Place | None = None
    for i, part in enumerate(parts):
        if not isinstance(part, tuple) or len(part) != 3:
            raise TypeError(
                f"moments[{i}]: expected (count, mean, m2), as batch_norm_statistics returns, "
                f"got {type(part).__name__}"
            )
        count = checks.number_of_values(f"moments[{i}].count", part[0], 0)
        names = (f"moments[{i}].mean", f"moments[{i}].m2")
        (mean, m2), its_place = arrays.adopt(names, part[1], part[2])
        place = place or its_place
        shape = means[0].shape if means else np.shape(mean)
        if len(shape) != 1:
            raise ValueError(f"{names[0]}: expected shape (C,), got {shape}")
        for name, array in zip(names, (mean, m2), strict=True):
            checks.statistic(name, array, shape)
            if array.dtype != (means[0] if means else mean).dtype:
                raise TypeError(
                    f"{name}: expected the dtype of moments[0].mean, "
                    f"{(means[0] if means else mean).dtype}, got {array.dtype}"
                )
        counts.append(count)
        means.append(mean)
        squares.append(m2)
    labels = [f"moments[{i}].{name}" for name in ("mean", "m2") for i in range(len(parts))]
    arrays.device_of_all(labels, means + squares)
    assert place is not None
    total = sum(counts)
    dtype = means[0].dtype
    filled = [i for i, count in enumerate(counts) if count > 0]
    with place, np.errstate(all="ignore"):
        mean = place.xp.zeros(means[0].shape)
        m2 = place.xp.zeros(means[0].shape)
        if filled:
            pivot = means[filled[0]].astype(np.float64)
            pivot[~place.xp.isfinite(pivot)] = 0.0
            for i in filled:
                mean += (counts[i] / total) * (means[i] - pivot)
            mean += pivot
            for i in filled:
                m2 += squares[i] + counts[i] * place.xp.square(means[i] - mean)
        mean, m2 = mean.astype(dtype), m2.astype(dtype)
        return Moments(total, *place.export(mean, m2))
