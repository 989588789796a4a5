"""Running statistics: the only place where their formula stands."""

from __future__ import annotations

__all__ = ["bessel", "blend"]


def blend(running, batch, factor):  # type: ignore[no-untyped-def]
    """A running value after a batch: ``running * (1 - factor) + batch * factor``."""
    return running * (1.0 - factor) + batch * factor


def bessel(count: int, correction: float) -> float:
    """What makes a biased variance of ``count`` values one with divisor ``count - correction``."""
    return count / (count - correction)
