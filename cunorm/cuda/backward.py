"""Gradients of y = (x - mean) * inv_std * weight + bias.

`reduce` sums dy and dy * (x - mean) over every channel, `input_gradient` takes it from
there; between the two a synchronized norm adds up its ranks. `backward` does both: in one
sweep where the plan is resident, or where the statistics are given, else in two, which may
share a launch.
"""

from __future__ import annotations

import struct

from ..checks import statistics_dtype
from ..geometry import Geometry
from . import launch, source
from .statistics import (
    address,
    aligned,
    dense,
    kind_of,
    launch_cached,
    launch_channels,
    launch_cut,
    parameter,
    second_plan,
)

__all__ = ["backward", "input_gradient", "reduce"]

PARTIAL_SUMS = 2  # float64 numbers of a part
COEFFICIENTS = 4  # numbers of a channel in gradients.cuh

# BackwardArguments in gradients.cuh, up to the geometry.
_ARGUMENTS = struct.Struct("=6QQq6QQqQq2dq")
_ADD_UP = struct.Struct("=QQqQq3q")


def _arguments(
    dy, x, mean, *, dx=0, residual=None, inv_std=None, weight=None, partials=0,
    given=(0, 0), sums=(0, 0), gradients=0, dweight=None, dbias=None, count=1,
    weight_offset=0.0, samples=0,
) -> bytes:  # fmt: skip
    """`given` and `sums`: addresses of sums of dy and dy * (x - mean) to read and to write."""
    return _ARGUMENTS.pack(
        source.pointer(dy), source.pointer(x), dx,
        address(mean), address(residual), address(inv_std), *parameter(weight),
        partials, *given, *sums, gradients, *parameter(dweight), *parameter(dbias),
        1.0 / count, weight_offset, samples,
    )  # fmt: skip


def _finish(name: str, plan: launch.LaunchPlan, number: int, arguments: bytes) -> None:
    """Launch a kernel that has a warp for each of a number of results."""
    launch_channels("backward.cu", name, plan, plan.threads // 32, number, arguments + plan.packed)


def add_up(gradients, dweight, dbias) -> None:
    """The parameters' gradients from those of samples, or blocks of them.

    ``gradients[block]`` are dweight and, if there are two planes, dbias.
    """
    arguments = _ADD_UP.pack(
        source.pointer(gradients), *parameter(dweight), *parameter(dbias), *gradients.shape
    )
    how = launch.adding(gradients.shape[2], gradients.dtype, gradients.size)
    source.launch("add_up.cu", "add_up", *how, arguments)


def reduce(dy, x, mean, residual, geometry: Geometry):
    """Sums of dy and dy * (x - (mean + residual)) over every channel, in the accumulator type."""
    lie = launch.alignment(source.pointer(dy), source.pointer(x))
    plan = launch.sweep(geometry, x.dtype, 2, lie, source.device())
    xp, number = source.array_module(), geometry.statistics
    partials = xp.empty((number, plan.parts, PARTIAL_SUMS), "float64")
    sum_dy, sum_dy_xmu = xp.empty((2, number), mean.dtype)
    arguments = _arguments(
        dy, x, mean, residual=residual, partials=source.pointer(partials),
        sums=(source.pointer(sum_dy), source.pointer(sum_dy_xmu)),
    )  # fmt: skip
    launch_cut("backward.cu", "reduce", plan, arguments)
    _finish("finish_sums", plan, number, arguments)
    return sum_dy, sum_dy_xmu


def input_gradient(
    dy, x, mean, residual, inv_std, weight, sum_dy, sum_dy_xmu, count, geometry: Geometry, out
):
    """`out` = dx from the sums over `count` values a channel, which may be on other ranks too."""
    weight = dense(weight)
    target = source.pointer(out)
    lie = launch.alignment(source.pointer(dy), source.pointer(x), target)
    plan = launch.elementwise(geometry.apart(), x.dtype, 2, lie, source.device())
    arguments = _arguments(
        dy, x, mean, dx=target, residual=residual, inv_std=inv_std, weight=weight,
        given=(source.pointer(sum_dy), source.pointer(sum_dy_xmu)), count=count,
    )  # fmt: skip
    launch_cut("backward.cu", "input_gradient", plan, arguments)


def backward(
    dy, x, mean, residual, inv_std, weight, training, geometry: Geometry, out, dweight, dbias,
    weight_offset=0.0,
):  # fmt: skip
    """Gradients with respect to x into `out`, to weight into `dweight`, to bias into `dbias`.

    Each of them may be None. In training mean and inv_std are those of x, or, if mean is None,
    those about zero, and there is no bias; otherwise they are given numbers, and None means 0 and
    1. Weights count `weight_offset` more.
    """
    target = address(out)
    # A missing output counts as 16-byte aligned, as fresh ones are.
    lie = launch.alignment(source.pointer(dy), source.pointer(x), target)
    centered, kind = mean is not None, kind_of(x.dtype, weight)
    assert centered or dbias is None or not training
    if training:
        plan = launch.plan(geometry, x.dtype, 2, lie, source.device(), centered, kind)
    else:
        plan = launch.sweep(geometry, x.dtype, 2, lie, source.device(), centered)
    options = {
        "residual": residual, "inv_std": inv_std, "weight": aligned(weight, plan, kind),
        "count": geometry.count, "weight_offset": weight_offset, "samples": plan.samples,
    }  # fmt: skip
    gradients = None
    wanted = dweight is not None or dbias is not None
    if wanted and (plan.rows or geometry.parameters < geometry.batch * geometry.group):
        blocks = plan.sample_blocks if plan.rows else geometry.batch
        planes = 1 if plan.rows and not centered else 2  # those rows have no bias
        dtype = statistics_dtype(x.dtype)
        gradients = source.array_module().ndarray((blocks, planes, geometry.parameters), dtype)
        options["gradients"] = source.pointer(gradients)
    else:
        options["dweight"], options["dbias"] = dweight, dbias
    if training and plan.resident:
        kernel = ("rows.cu", "backward_rows") if plan.rows else ("backward.cu", "backward")
        launch_cut(*kernel, plan, _arguments(dy, x, mean, dx=target, **options))
    elif plan.ahead:
        _stream_cached(dy, x, mean, target, geometry, plan, options)
    else:
        _stream(dy, x, mean, target, training, lie, geometry, plan, options)
    if gradients is not None:
        add_up(gradients, dweight, dbias)


def _stream_cached(
    dy, x, mean, target: int, geometry: Geometry, plan: launch.LaunchPlan, options
) -> None:
    """Sums and, if there is a target, dx, through the second-level cache."""
    channels, each = geometry.statistics, statistics_dtype(x.dtype).itemsize
    partial_bytes = PARTIAL_SUMS * plan.parts * channels * 8
    # Counters, at most one more than channels, and coefficients follow.
    space = source.array_module().empty(
        partial_bytes + (2 + COEFFICIENTS) * channels * each, "uint8"
    )
    partials = source.pointer(space)
    launch_cached(
        "backward_cached.cu", "backward_cached", plan,
        _arguments(dy, x, mean, dx=target, partials=partials, **options),
        partials + partial_bytes + 2 * channels * each, bool(target),
    )  # fmt: skip


def _stream(
    dy, x, mean, target: int, training, lie: launch.Alignment, geometry: Geometry,
    plan: launch.LaunchPlan, options,
) -> None:  # fmt: skip
    """Sums and, if there is a target, dx: for given statistics in the same sweep."""
    dtype = statistics_dtype(x.dtype)
    channels = geometry.statistics if plan.rows else geometry.batch * geometry.group
    number, each = geometry.statistics, dtype.itemsize
    partial_bytes = PARTIAL_SUMS * plan.parts * channels * 8
    space = source.array_module().ndarray(partial_bytes + 2 * (channels + number) * each, "uint8")
    partials = source.pointer(space)
    place = partials + partial_bytes
    sums = place, place + channels * each  # of every channel, or row
    sweep = _arguments(
        dy, x, mean, dx=0 if training else target, partials=partials, sums=sums, **options
    )
    launch_cut(*(("rows.cu", "backward_rows") if plan.rows else ("backward.cu", "reduce")),
               plan, sweep)  # fmt: skip
    if plan.rows:
        options = {**options, "gradients": 0}  # which that sweep has written
        sweep = _arguments(dy, x, mean, partials=partials, sums=sums, **options)
    _finish("finish_sums", plan, channels, sweep)
    if not training or not target:
        return
    if channels > number:
        given = sums
        place += 2 * channels * each
        sums = place, place + number * each
        share = _arguments(dy, x, mean, given=given, sums=sums, **options)
        _finish("share_sums", plan, number, share)
    if plan.rows:  # a block a part of a row, not of all rows in turn
        plan = plan._replace(blocks=channels * plan.parts)
    else:
        plan = second_plan(plan, geometry, x.dtype, 2, lie, source.device(), mean is not None)
    launch_cut(
        "backward.cu", "input_gradient", plan,
        _arguments(dy, x, mean, dx=target, given=sums, **options),
    )  # fmt: skip
