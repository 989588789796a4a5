"""The shape of a normalization, whatever its name.

A contiguous array is viewed as ``(batch, outer, group, inner)``. There is a mean and
a variance for every sample of ``batch`` and every ``members`` neighbouring groups,
taken over these, ``outer`` and ``inner``, and a weight and a bias for every group.
Everything below the functional layer speaks of a `Geometry` and none of it knows
which norm it serves.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

__all__ = [
    "Geometry",
    "batch_norm_geometry",
    "group_norm_geometry",
    "row_norm_geometry",
    "scale_shift_geometry",
]


class Geometry(NamedTuple):
    """Extents of an array seen as ``(batch, outer, group, inner)``, and who shares what.

    Statistic ``b * (group / members) + g // members`` and parameter ``g``, or, where every
    sample has parameters of its own, ``b * group + g``, belong to the elements
    ``[b, :, g, :]``.
    """

    batch: int
    outer: int
    group: int
    inner: int
    members: int  # neighbouring groups that share a statistic
    parameters: int  # weights, and biases: group, or batch * group

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return self.batch * self.outer * self.group * self.inner

    @property
    def count(self) -> int:  # type: ignore[override]
        """Number of elements that one mean and one variance are taken over."""
        return self.outer * self.members * self.inner

    @property
    def statistics(self) -> int:
        """Number of (mean, variance) pairs."""
        batch, _, group, _, members, _ = self
        return batch * group // members

    def merged(self) -> Geometry:
        """The same with the members of a statistic as one group: of statistics alone."""
        batch, outer, group, inner, members, _ = self
        number = group // members
        return Geometry(batch, outer, number, inner * members, 1, number)

    def apart(self) -> Geometry:
        """The same with statistics of its own for every group."""
        return self._replace(members=1)


def _runs(shape: tuple[int, ...], first: int, channel_axis: int) -> tuple[int, int]:
    """(outer, inner) of an array's axes from the first on; a single channel is one run."""
    outer, inner = prod(shape[first:channel_axis]), prod(shape[channel_axis + 1 :])
    return (1, outer * inner) if shape[channel_axis] == 1 else (outer, inner)


@lru_cache(maxsize=1024)
def batch_norm_geometry(shape: tuple[int, ...], channel_axis: int) -> Geometry:
    """Geometry of batch norm over a C-contiguous array of this shape.

    ``channel_axis`` is not negative. One channel is one group.
    """
    channels = shape[channel_axis]
    outer, inner = _runs(shape, 0, channel_axis)
    return Geometry(
        batch=1,
        outer=outer,
        group=channels,
        inner=inner,
        members=1,
        parameters=channels,
    )


@lru_cache(maxsize=1024)
def group_norm_geometry(shape: tuple[int, ...], channel_axis: int, num_groups: int) -> Geometry:
    """Geometry of group norm over a C-contiguous array of this shape, samples first.

    ``channel_axis`` is positive. One channel is one group of the geometry. Instance norm
    has as many groups as channels.
    """
    channels = shape[channel_axis]
    outer, inner = _runs(shape, 1, channel_axis)
    return Geometry(
        batch=shape[0],
        outer=outer,
        group=channels,
        inner=inner,
        members=channels // num_groups,
        parameters=channels,
    )


@lru_cache(maxsize=1024)
def row_norm_geometry(shape: tuple[int, ...], axis: int) -> Geometry:
    """Geometry of layer and RMS norm over the axes from ``axis`` on of a C-contiguous array.

    Every element of a row is a group.
    """
    length = prod(shape[axis:])
    return Geometry(prod(shape[:axis]), 1, length, 1, members=length, parameters=length)


@lru_cache(maxsize=1024)
def scale_shift_geometry(shape: tuple[int, ...], channel_axis: int, per_sample: bool) -> Geometry:
    """Geometry of scale-shift over a C-contiguous array of this shape.

    ``channel_axis`` is not negative. With parameters of their own (``per_sample``) samples
    come first.
    """
    if not per_sample:
        return batch_norm_geometry(shape, channel_axis)
    geometry = group_norm_geometry(shape, channel_axis, shape[channel_axis])
    batch, outer, group, inner = geometry[:4]
    if outer == 1:  # every channel of every sample a channel
        return Geometry(1, 1, batch * group, inner, 1, batch * group)
    return geometry._replace(parameters=batch * group)
