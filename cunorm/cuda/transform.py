"""y = (x - mean) * inv_std * weight + bias.

`transform` applies given statistics, `infer` running ones. `normalize` takes them from
the data: in one sweep where the plan is resident, else in two.
"""

from __future__ import annotations

import struct

from ..checks import statistics_dtype
from ..geometry import Geometry
from . import launch, source
from .statistics import (
    ABSENT,
    PARTIAL_MOMENTS,
    address,
    dense,
    launch_channels,
    launch_cut,
    parameter,
    partial_moments,
    put_back,
)

__all__ = ["infer", "normalize", "transform"]

# TransformArguments in transform.cu, up to the geometry.
_ARGUMENTS = struct.Struct("=7QQqQqQqQq3d")


def transform(x, mean, residual, inv_std, weight, bias, geometry: Geometry, out):
    """`out` = (x - (mean + residual)) * inv_std * weight + bias.

    mean, residual, weight and bias may be None.
    """
    weight, bias = dense(weight), dense(bias)
    source_place, target = source.pointer(x), source.pointer(out)
    lie = launch.alignment(source_place, target)
    plan = launch.sweep(geometry, x.dtype, 1, lie, source.device())
    arguments = _ARGUMENTS.pack(
        source_place, target, address(mean), address(residual), address(inv_std), 0, 0,
        *parameter(weight), *parameter(bias), *ABSENT, *ABSENT, 0.0, 0.0, 0.0,
    )  # fmt: skip
    launch_cut("transform.cu", "transform", plan, arguments)


def infer(x, running_mean, running_var, weight, bias, eps, geometry: Geometry, out):
    """Transform of x with running statistics into `out`.

    Returns mean, inv_std and residual (what rounding took from the mean) as the rows of
    one array, in the accumulator type.
    """
    weight, bias = dense(weight), dense(bias)
    source_place, target = source.pointer(x), source.pointer(out)
    lie = launch.alignment(source_place, target)
    plan = launch.sweep(geometry, x.dtype, 1, lie, source.device())
    xp = source.array_module()
    statistics = xp.empty((3, geometry.statistics), statistics_dtype(x.dtype))
    running_mean, running_var = dense(running_mean), dense(running_var)
    arguments = _ARGUMENTS.pack(
        source_place, target, 0, 0, 0, 0, source.pointer(statistics),
        *parameter(weight), *parameter(bias), *parameter(running_mean), *parameter(running_var),
        eps, 0.0, 0.0,
    )  # fmt: skip
    launch_cut("transform.cu", "transform", plan, arguments)
    return statistics


def normalize(
    x, weight, bias, running_mean, running_var, eps, scale, factor, geometry: Geometry, out
):
    """Statistics of x, then its transform with them into `out`.

    The running statistics take in mean and var * scale. Returns mean, inv_std and residual
    (what rounding took from the mean) as the first rows of one array, in the accumulator
    type.
    """
    weight, bias = dense(weight), dense(bias)
    source_place, target = source.pointer(x), source.pointer(out)
    lie = launch.alignment(source_place, target)
    plan = launch.plan(geometry, x.dtype, 1, lie, source.device())
    dtype = statistics_dtype(x.dtype)
    number = geometry.statistics
    mean, var = dense(running_mean), dense(running_var)
    # Mean, inv_std and residual; partial results follow, a multiple of 8 bytes on.
    rows = 3 if plan.resident else 4 + PARTIAL_MOMENTS * plan.parts * (8 // dtype.itemsize)
    statistics = source.array_module().empty((rows, number), dtype)
    place, row = source.pointer(statistics), number * dtype.itemsize
    arguments = _ARGUMENTS.pack(
        source_place, target, 0, 0, 0, place + 4 * row, place,
        *parameter(weight), *parameter(bias), *parameter(mean), *parameter(var),
        eps, scale, factor,
    )  # fmt: skip
    if plan.resident:
        launch_cut("transform.cu", "normalize", plan, arguments)
    else:
        partial_moments(x, place + 4 * row, plan)
        launch_channels(
            "transform.cu", "finish_statistics", plan, plan.threads // 32, number,
            arguments + plan.packed,
        )  # fmt: skip
        arguments = _ARGUMENTS.pack(
            source_place, target, place, place + 2 * row, place + row, 0, 0,
            *parameter(weight), *parameter(bias), *ABSENT, *ABSENT, 0.0, 0.0, 0.0,
        )  # fmt: skip
        launch_cut("transform.cu", "transform", plan, arguments)
    put_back(running_mean, mean)
    put_back(running_var, var)
    return statistics
