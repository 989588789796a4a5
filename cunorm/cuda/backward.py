"""Gradients of y = (x - mean) * inv_std * weight + bias.

`reduce` sums dy and dy * (x - mean) over every channel, `input_gradient` takes it from
there; between the two a synchronized norm adds up its ranks. `backward` does both: in one
sweep where the plan is resident, else in two.
"""

from __future__ import annotations

import struct

from ..geometry import Geometry
from . import launch, source
from .statistics import address, dense, launch_channels, launch_cut, parameter
from .transform import transform

__all__ = ["backward", "input_gradient", "reduce"]

PARTIAL_SUMS = 2  # float64 numbers of a part

# BackwardArguments in backward.cu, up to the geometry.
_ARGUMENTS = struct.Struct("=6QQq5QQqQqdq")


def _arguments(
    dy, x, mean, *, dx=0, residual=None, inv_std=None, weight=None, partials=0,
    given=(0, 0), sums=(0, 0), dweight=None, dbias=None, count=0, training=True,
) -> bytes:  # fmt: skip
    """`given` and `sums`: addresses of sum_dy and sum_dy_xmu to read and to write."""
    return _ARGUMENTS.pack(
        source.pointer(dy), source.pointer(x), dx,
        address(mean), address(residual), address(inv_std), *parameter(weight),
        partials, *given, *sums, *parameter(dweight), *parameter(dbias), count, training,
    )  # fmt: skip


def _finish(plan: launch.LaunchPlan, geometry: Geometry, arguments: bytes) -> None:
    launch_channels(
        "backward.cu", "finish_sums", plan, plan.threads // 32, geometry.statistics,
        arguments + plan.packed,
    )  # fmt: skip


def _workspace(plan: launch.LaunchPlan, geometry: Geometry):
    """Memory for partial sums and, behind them, for both sums; with the addresses of all three."""
    number = geometry.statistics
    space = source.array_module().empty((PARTIAL_SUMS * plan.parts + 2, number), "float64")
    place = source.pointer(space)
    sums = place + PARTIAL_SUMS * plan.parts * number * 8
    return space, place, (sums, sums + number * 8)


def reduce(dy, x, mean, residual, geometry: Geometry):
    """Sums of dy and dy * (x - (mean + residual)) over every channel, in the accumulator type."""
    lie = launch.alignment(source.pointer(dy), source.pointer(x))
    plan = launch.sweep(geometry, x.dtype, 2, lie, source.device())
    _space, partials, _ = _workspace(plan, geometry)
    sum_dy, sum_dy_xmu = source.array_module().empty((2, geometry.statistics), mean.dtype)
    arguments = _arguments(
        dy, x, mean, residual=residual, partials=partials,
        sums=(source.pointer(sum_dy), source.pointer(sum_dy_xmu)),
    )  # fmt: skip
    launch_cut("backward.cu", "reduce", plan, arguments)
    _finish(plan, geometry, arguments)
    return sum_dy, sum_dy_xmu


def input_gradient(
    dy, x, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, count, geometry: Geometry, out
):
    """`out` = dx from the sums over `count` values a channel, which may be on other ranks too."""
    weight = dense(weight)
    target = source.pointer(out)
    lie = launch.alignment(source.pointer(dy), source.pointer(x), target)
    plan = launch.sweep(geometry, x.dtype, 2, lie, source.device())
    arguments = _arguments(
        dy, x, mean, dx=target, residual=residual, inv_std=inv_std, weight=weight,
        given=(source.pointer(sum_dy), source.pointer(sum_dy_xmu)), count=count,
    )  # fmt: skip
    launch_cut("backward.cu", "input_gradient", plan, arguments)


def backward(
    dy, x, mean, residual, inv_std, weight, training, geometry: Geometry, out, dweight, dbias
):
    """Gradients with respect to x into `out`, to weight into `dweight`, to bias into `dbias`.

    Each of them may be None. In training mean and inv_std are those of x; otherwise they
    are given numbers.
    """
    weight = dense(weight)
    target = address(out)
    # A missing output counts as 16-byte aligned, as fresh ones are.
    lie = launch.alignment(source.pointer(dy), source.pointer(x), target)
    plan = launch.plan(geometry, x.dtype, 2, lie, source.device())
    _space, partials, sums = (None, 0, (0, 0)) if plan.resident else _workspace(plan, geometry)
    arguments = _arguments(
        dy, x, mean, dx=target, residual=residual, inv_std=inv_std, weight=weight,
        partials=partials, given=sums, sums=sums, dweight=dweight, dbias=dbias,
        count=geometry.count, training=training,
    )  # fmt: skip
    if plan.resident:
        launch_cut("backward.cu", "backward", plan, arguments)
        return
    launch_cut("backward.cu", "reduce", plan, arguments)
    _finish(plan, geometry, arguments)
    if out is None:
        return
    if training:
        launch_cut("backward.cu", "input_gradient", plan, arguments)
    else:
        transform(dy, None, None, inv_std, weight, None, geometry, out)
