"""y = (x - mean) * inv_std * weight + bias.

`transform` applies given statistics, `infer` running ones. `normalize` takes them from
the data: in one sweep where the plan is resident, else in two, which may share a launch.
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
    aligned,
    dense,
    kind_of,
    launch_cached,
    launch_channels,
    launch_cut,
    parameter,
    partial_moments,
    put_back,
    second_plan,
)

__all__ = ["infer", "normalize", "transform"]

COEFFICIENTS = 3  # numbers of a channel in transform.cuh

# TransformArguments in transform.cuh, up to the geometry.
_ARGUMENTS = struct.Struct("=7QQqQqQqQq5dq")


def transform(x, mean, residual, inv_std, weight, bias, geometry: Geometry, out):
    """`out` = (x - (mean + residual)) * inv_std * weight + bias.

    Each of mean, residual, inv_std, weight and bias may be None.
    """
    weight, bias = dense(weight), dense(bias)
    source_place, target = source.pointer(x), source.pointer(out)
    lie = launch.alignment(source_place, target)
    plan = launch.elementwise(geometry.apart(), x.dtype, 1, lie, source.device(), mean is not None)
    arguments = _ARGUMENTS.pack(
        source_place, target, address(mean), address(residual), address(inv_std), 0, 0,
        *parameter(weight), *parameter(bias), *ABSENT, *ABSENT, 0.0, 0.0, 0.0, 0.0, 0.0, 0,
    )  # fmt: skip
    launch_cut("transform.cu", "transform", plan, arguments)


def infer(x, running_mean, running_var, weight, bias, eps, geometry: Geometry, out):
    """Transform of x with running statistics into `out`.

    Returns mean, inv_std and residual (what rounding took from the mean) as the first rows of
    one array, in the accumulator type.
    """
    weight, bias = dense(weight), dense(bias)
    source_place, target = source.pointer(x), source.pointer(out)
    lie = launch.alignment(source_place, target)
    plan = launch.elementwise(geometry.apart(), x.dtype, 1, lie, source.device())
    xp = source.array_module()
    statistics = xp.ndarray((4, geometry.statistics), statistics_dtype(x.dtype))
    running_mean, running_var = dense(running_mean), dense(running_var)
    arguments = _ARGUMENTS.pack(
        source_place, target, 0, 0, 0, 0, source.pointer(statistics),
        *parameter(weight), *parameter(bias), *parameter(running_mean), *parameter(running_var),
        eps, 0.0, 0.0, 0.0, 0.0, 0,
    )  # fmt: skip
    launch_cut("transform.cu", "transform", plan, arguments)
    return statistics


def normalize(
    x, weight, bias, running_mean, running_var, eps, scale, factor, geometry: Geometry, out,
    centered=True, weight_offset=0.0,
):  # fmt: skip
    """Statistics of x, then its transform with them into `out`.

    The running statistics take in mean and var * scale. Not `centered`, statistics are taken
    about zero, and there is no bias: the mean is 0, and the variance the mean square. Weights
    count `weight_offset` more. Returns mean, inv_std, residual (what rounding took from the mean)
    and variance as the first rows of one array, in the accumulator type.
    """
    assert centered or bias is None
    source_place, target = source.pointer(x), source.pointer(out)
    lie = launch.alignment(source_place, target)
    kind = kind_of(x.dtype, weight, bias)
    plan = launch.plan(geometry, x.dtype, 1, lie, source.device(), centered, kind)
    weight, bias = aligned(weight, plan, kind), aligned(bias, plan, kind)
    dtype = statistics_dtype(x.dtype)
    number = geometry.statistics
    mean, var = dense(running_mean), dense(running_var)
    rows = 4
    if not plan.resident:  # partial results follow, of every channel, or of every row
        channels = 1 if plan.rows else geometry.members
        rows += PARTIAL_MOMENTS * plan.parts * channels * (8 // dtype.itemsize)
    if plan.ahead:  # then counters, at most one more than channels, and coefficients
        rows += 2 + COEFFICIENTS
    statistics = source.array_module().ndarray((rows, number), dtype)
    place, row = source.pointer(statistics), number * dtype.itemsize
    arguments = _ARGUMENTS.pack(
        source_place, target, 0, 0, 0, place + 4 * row, place,
        *parameter(weight), *parameter(bias), *parameter(mean), *parameter(var),
        eps, scale, factor, weight_offset, 1.0 / geometry.count, plan.samples,
    )  # fmt: skip
    if plan.resident:
        in_turns = "normalize_rows.cu", "normalize_rows"
        launch_cut(*(in_turns if plan.samples else ("transform.cu", "normalize")), plan, arguments)
    elif plan.ahead:
        coefficients = place + (rows - COEFFICIENTS) * row
        launch_cached("normalize_cached.cu", "normalize_cached", plan, arguments, coefficients)
    else:
        partial_moments(x, place + 4 * row, plan)
        launch_channels(
            "transform.cu", "finish_statistics", plan, plan.threads // 32, number,
            arguments + plan.packed,
        )  # fmt: skip
        arguments = _ARGUMENTS.pack(
            source_place, target, place, place + 2 * row, place + row, 0, 0,
            *parameter(weight), *parameter(bias), *ABSENT, *ABSENT,
            0.0, 0.0, 0.0, weight_offset, 0.0, 0,
        )  # fmt: skip
        plan = second_plan(plan, geometry, x.dtype, 1, lie, source.device(), centered)
        launch_cut("transform.cu", "transform", plan, arguments)
    put_back(running_mean, mean)
    put_back(running_var, var)
    return statistics
