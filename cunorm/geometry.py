"""The shape of a normalization, whatever its name.

A contiguous array is viewed as ``(batch, outer, group, inner)``. Statistics
reduce ``outer`` and ``inner``; there is one of each per ``(batch, group)``.
Everything below the functional layer speaks of a `Geometry` and none of it
knows which norm it serves.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

__all__ = ["Geometry", "batch_norm_geometry"]


class Geometry(NamedTuple):
    """Extents of an array seen as ``(batch, outer, group, inner)``."""

    batch: int
    outer: int
    group: int
    inner: int

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return self.batch * self.outer * self.group * self.inner

    @property
    def count(self) -> int:  # type: ignore[override]
        """Number of elements that one mean and one variance are taken over."""
        return self.outer * self.inner

    @property
    def statistics(self) -> int:
        """Number of (mean, variance) pairs."""
        return self.batch * self.group


@lru_cache(maxsize=1024)
def batch_norm_geometry(shape: tuple[int, ...], channel_axis: int) -> Geometry:
    """Geometry of batch norm over a C-contiguous array of this shape.

    ``channel_axis`` is not negative. One channel is one group.
    """
    return Geometry(
        batch=1,
        outer=prod(shape[:channel_axis]),
        group=shape[channel_axis],
        inner=prod(shape[channel_axis + 1 :]),
    )
