"""Gradients of what `backward` computes.

In one sweep where the plan is resident, or where the statistics are given, else in two:
`double_reduce` and `finish_double_sums` make the sums, `double_transform` the outputs.
"""

from __future__ import annotations

import struct

from ..checks import statistics_dtype
from ..geometry import Geometry
from . import launch, source
from .backward import add_up
from .statistics import address, aligned, kind_of, launch_channels, launch_cut, parameter

__all__ = ["double_backward"]

SUMS, ROW_SUMS = 6, 8  # float64 numbers of a part of a channel, of a row

# DoubleArguments in double_gradients.cuh, up to the geometry.
_ARGUMENTS = struct.Struct("=8QQqQqQqQq3Qd2q")


def double_backward(
    gdx, gdweight, gdbias, dy, x, mean, residual, inv_std, weight, training, geometry: Geometry,
    ddy, ddx, ddweight,
):  # fmt: skip
    """Gradients of `backward` with respect to dy, x and weight into `ddy`, `ddx`, `ddweight`.

    Each of gdx, gdweight, gdbias, residual, weight and ddweight may be None; absent gradients are
    0, an absent weight is 1. In training mean and inv_std are those of x. Statistics are of single
    groups, or of rows in which every element is one.
    """
    given = [address(gdx), *map(source.pointer, (dy, x, ddy, ddx))]
    lie = launch.alignment(*given)
    kind = kind_of(x.dtype, weight, gdweight, gdbias)
    if training:
        plan = launch.plan(geometry, x.dtype, 3, lie, source.device(), kind=kind)
    else:
        plan = launch.sweep(geometry, x.dtype, 3, lie, source.device())
    parameters = [aligned(array, plan, kind) for array in (weight, gdweight, gdbias)]
    empty, dtype = source.array_module().empty, statistics_dtype(x.dtype)

    gradients = None
    one_each = not plan.rows and geometry.parameters == geometry.batch * geometry.group
    if ddweight is not None and not one_each:
        blocks = plan.sample_blocks if plan.rows else geometry.batch
        gradients = empty((blocks, 1, geometry.parameters), dtype)

    def arguments(partials=None, sums=None) -> bytes:
        return _ARGUMENTS.pack(
            *given, source.pointer(mean), address(residual), source.pointer(inv_std),
            *(number for array in parameters for number in parameter(array)),
            *parameter(ddweight if gradients is None else None), address(gradients),
            address(partials), address(sums), geometry.count, training, plan.samples,
        )  # fmt: skip

    if plan.rows:
        whole = "double_rows.cu", "double_backward_rows"
    else:
        whole = "double_backward.cu", "double_backward" if plan.resident else "double_transform"
    if training and plan.resident:
        launch_cut(*whole, plan, arguments())
    else:
        channels = geometry.statistics
        number = ROW_SUMS if plan.rows else SUMS
        partials = empty((channels, plan.parts, number), "float64")
        sums = empty((channels, number), "float64") if training else None
        # a block a part of a row, not of all rows in turn
        reduce = plan._replace(blocks=channels * plan.parts) if plan.rows else plan
        launch_cut("double_backward.cu", "double_reduce", reduce, arguments(partials, sums))
        launch_channels(
            "double_backward.cu", "finish_double_sums", plan, plan.threads // 32, channels,
            arguments(partials, sums) + plan.packed,
        )  # fmt: skip
        if training:
            launch_cut(*whole, plan, arguments(sums=sums))
    if gradients is not None:
        add_up(gradients, ddweight, None)
