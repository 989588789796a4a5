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
    dy, x, mean, *, dx=0, residual=None, inv_std=None, weight=None, partials=0, given_dy=None,
    given_dy_xmu=None, sum_dy=None, sum_dy_xmu=None, dweight=None, dbias=None, count=0,
    training=True,
) -> bytes:  # fmt: skip
    return _ARGUMENTS.pack(
        source.pointer(dy), source.pointer(x), dx,
        address(mean), address(residual), address(inv_std), *parameter(weight),
        partials, address(given_dy), address(given_dy_xmu), address(sum_dy), address(sum_dy_xmu),
        *parameter(dweight), *parameter(dbias), count, training,
    )  # fmt: skip


def _finish(plan: launch.LaunchPlan, geometry: Geometry, arguments: bytes) -> None:
    launch_channels(
        "backward.cu", "finish_sums", plan, plan.threads // 32, geometry.statistics,
        arguments + plan.packed,
    )  # fmt: skip


def _partials(plan: launch.LaunchPlan, geometry: Geometry):
    xp = source.array_module()
    return xp.empty((geometry.statistics, plan.parts, PARTIAL_SUMS), "float64")


def reduce(dy, x, mean, residual, geometry: Geometry):
    """Sums of dy and dy * (x - (mean + residual)) over every channel, in the accumulator type."""
    lie = launch.alignment(source.pointer(dy), source.pointer(x))
    plan = launch.sweep(geometry, x.dtype, 2, lie, source.device())
    partials = _partials(plan, geometry)
    sum_dy, sum_dy_xmu = source.array_module().empty((2, geometry.statistics), mean.dtype)
    arguments = _arguments(
        dy, x, mean, residual=residual, partials=source.pointer(partials),
        sum_dy=sum_dy, sum_dy_xmu=sum_dy_xmu,
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
        given_dy=sum_dy, given_dy_xmu=sum_dy_xmu, count=count,
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
    partials = None if plan.resident else _partials(plan, geometry)
    arguments = _arguments(
        dy, x, mean, dx=target, residual=residual, inv_std=inv_std, weight=weight,
        partials=address(partials), dweight=dweight, dbias=dbias, count=geometry.count,
        training=training,
    )  # fmt: skip
    if plan.resident:
        launch_cut("backward.cu", "backward", plan, arguments)
        return
    launch_cut("backward.cu", "reduce", plan, arguments)
    if out is not None and training:
        launch_cut("backward.cu", "input_gradient", plan, arguments)
        return
    _finish(plan, geometry, arguments)
    if out is not None:
        transform(dy, None, None, inv_std, weight, None, geometry, out)
