"""Mean and centred sum of squares of every channel; running statistics."""

from __future__ import annotations

import struct

import numpy as np

from ..arrays import is_plain
from ..checks import statistics_dtype
from ..geometry import Geometry
from . import source
from .launch import LaunchPlan, adding, alignment, elementwise, sweep

__all__ = ["moments", "update_running"]

PARTIAL_MOMENTS = 3  # float64 numbers of a part

_MOMENTS = struct.Struct("=2Q")
_TICKETS = struct.Struct("=2Q2q")
_FINISH = struct.Struct("=3Q3q")
_UPDATE = struct.Struct("=QqQq2Q2d2q")

_KINDS = {np.dtype(np.float32): 0, np.dtype(np.float64): 1, np.dtype(np.float16): 2}
_BFLOAT16 = 3  # by elimination, so that ml_dtypes need not be imported
ABSENT = (0, 0)  # of a parameter


def _kind(array) -> int:
    return _KINDS.get(array.dtype, _BFLOAT16)


def parameter(array):
    """Address and kind of a dense array of one value a channel (Parameter in memory.cuh)."""
    return ABSENT if array is None else (source.pointer(array), _kind(array))


def dense(values):
    """The array, or a contiguous copy of it; kernels take no strides of one value a channel."""
    if values is None or is_plain(values):
        return values
    return values.copy()


def kind_of(dtype: np.dtype, *parameters) -> int:
    """Kind that rows of this dtype read their parameters as: theirs, if all of them have one."""
    kinds = {_kind(values) for values in parameters if values is not None}
    return kinds.pop() if len(kinds) == 1 else _KINDS[statistics_dtype(dtype)]


def aligned(values, plan: LaunchPlan, kind: int):
    """`dense` for a parameter, which rows want to be of a kind.

    They want it to begin on a 16-byte boundary, too, as fresh ones do.
    """
    values = dense(values)
    if values is None or not plan.rows:
        return values
    if _kind(values) != kind:  # then this is the accumulator's
        return values.astype("float64" if kind == _KINDS[np.dtype(np.float64)] else "float32")
    return values.copy() if source.pointer(values) % 16 else values


def put_back(values, copy):
    """What a kernel wrote to the copy that `dense` made of an array, if it made one."""
    if copy is not values:
        values[...] = copy


def address(array):
    """Of the first element; 0 for None."""
    return 0 if array is None else source.pointer(array)


def launch_cut(file: str, name: str, plan: LaunchPlan, arguments: bytes) -> None:
    """Launch a kernel that takes a geometry and a cut after its other arguments."""
    source.launch(
        file, name, plan.options, plan.blocks, plan.threads, plan.shared, arguments + plan.packed
    )


def launch_cached(
    file: str, name: str, plan: LaunchPlan, arguments: bytes, coefficients: int, second=True
) -> None:
    """Launch a kernel that takes tickets, for both sweeps or for the first alone.

    At the address there is room for the coefficients of every channel, and before it for a counter,
    and one of each group of threads whose parts arrive.
    """
    counter_bytes = 4 * (1 + plan.blocks // plan.parts)
    counters = coefficients - counter_bytes
    source.clear(counters, counter_bytes)
    ahead = plan.ahead if second else 0
    tickets = _TICKETS.pack(counters, coefficients, plan.blocks, ahead or plan.blocks)
    source.launch(
        file, name, plan.options, plan.blocks + ahead, plan.threads, plan.shared,
        arguments + plan.packed + tickets,
    )  # fmt: skip


def second_plan(plan: LaunchPlan, geometry: Geometry, *how) -> LaunchPlan:
    """Plan for the second of two sweeps, the first of which streams by another.

    Columns have few large blocks in the first, whose parts are quickly folded, and in the second
    small ones, which keep memory busier. `how`: what `elementwise` takes after the geometry.
    """
    columns = geometry.inner == 1 < geometry.group and not plan.rows
    return elementwise(geometry, *how) if columns else plan


def launch_channels(file: str, name: str, plan: LaunchPlan, each: int, number: int, arguments):
    """Launch a kernel whose blocks take `each` of a number of channels."""
    blocks = -(-number // each)
    source.launch(file, name, plan.options, blocks, plan.threads, 0, arguments)


def partial_moments(x, partials: int, plan: LaunchPlan) -> None:
    """(mean, m2, count) of every part of every channel, at the address `partials`."""
    arguments = _MOMENTS.pack(source.pointer(x), partials)
    launch_cut("statistics.cu", "moments", plan, arguments)


def moments(x, geometry: Geometry, dtype):
    """Mean and centred sum of squares (m2) of every channel, in the accumulator type or float64."""
    plan = sweep(geometry, x.dtype, 1, alignment(source.pointer(x)), source.device())
    xp = source.array_module()
    number = geometry.statistics
    partials = xp.empty((number, plan.parts, PARTIAL_MOMENTS), "float64")
    partial_moments(x, source.pointer(partials), plan)
    mean, m2 = xp.empty((2, number), dtype)
    launch_channels(
        "statistics.cu", "finish_moments", plan, plan.threads // 32, number,
        _FINISH.pack(
            source.pointer(partials), source.pointer(mean), source.pointer(m2), number, plan.parts,
            dtype == np.float64,
        ),
    )  # fmt: skip
    return mean, m2


def update_running(running_mean, running_var, mean, var, scale, factor):
    """Take mean and var * scale into running statistics, in place.

    The running statistics may have any strides, or be None and are left out then;
    mean and var are contiguous, in an accumulator type. Of several rows of them, one for
    each sample, the average is taken in.
    """
    dense_mean, dense_var = dense(running_mean), dense(running_var)
    number, var = mean.shape[-1], var.astype(mean.dtype, copy=False)
    arguments = _UPDATE.pack(
        *parameter(dense_mean), *parameter(dense_var), source.pointer(mean), source.pointer(var),
        scale, factor, number, mean.size // number,
    )  # fmt: skip
    source.launch("add_up.cu", "update_running", *adding(number, mean.dtype, mean.size), arguments)
    put_back(running_mean, dense_mean)
    put_back(running_var, dense_var)
