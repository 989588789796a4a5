"""cuDNN's norms through its own front end, the package nvidia-cudnn-frontend, on CuPy's arrays.

A graph of one operation is built once and executed again and again, into a fresh y or dx as with
the other rivals. cuDNN has neither group norm nor scale-shift.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from shapes import Case

__all__ = ["NAME", "calls_of"]

NAME = "cuDNN's front end"

_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}
_OPERATIONS = {
    "batch_norm": "batchnorm",
    "instance_norm": "instancenorm",
    "layer_norm": "layernorm",
    "rms_norm": "rmsnorm",
}


def calls_of(
    case: Case, xp: Any, x: Any, dy: Any, weight: Any, bias: Any
) -> dict[tuple[str, str], Callable[[], Any]]:
    """The calls of a case that cuDNN has; of the others a warning says why not."""
    if case.norm not in _OPERATIONS:
        return {}
    import cudnn

    name = _OPERATIONS[case.norm]
    x, dy = _in_four_axes(case, x), _in_four_axes(case, dy)
    number, channels = x.shape[:2]
    if case.of_rows:  # whose parameters are of the data's dtype, as with PyTorch
        weight, bias = weight.astype(x.dtype), bias.astype(x.dtype)
    weight, bias = (array.reshape(1, channels, 1, 1) for array in (weight, bias))
    shape = (1 if case.norm == "batch_norm" else number, 1 if case.of_rows else channels, 1, 1)
    mean, inv_std = xp.zeros(shape, xp.float32), xp.ones(shape, xp.float32)
    y, dx, dweight, dbias = (_like(xp, array) for array in (x, x, weight, bias))
    affine = {"scale": weight, "bias": bias}
    saved = {"mean": mean, "inv_variance": inv_std}
    results, gradients = [y, mean, inv_std], [dx, dweight, dbias]
    training: dict[str, Any] = {"epsilon": 1e-5}
    forward_options, backward_options = {}, {}
    if case.norm == "batch_norm":
        running = {"in_running_mean": xp.zeros_like(mean), "in_running_var": xp.ones_like(mean)}
        training |= {**running, "momentum": 0.1}
        results += running.values()  # updated in place
    else:
        forward_options = {"norm_forward_phase": cudnn.norm_forward_phase.TRAINING}
    if case.norm == "rms_norm":
        del affine["bias"], saved["mean"], results[1], gradients[2]
        backward_options = {"has_dbias": False}
    graph_of = {
        "forward": (name, {"input": x, **affine, **training}, results, forward_options),
        "inference": (f"{name}_inference", {"input": x, **saved, **affine}, [y], {}),
        "backward": (
            f"{name}_backward", {"grad": dy, "input": x, "scale": weight, **saved}, gradients,
            backward_options,
        ),
    }  # fmt: skip
    calls = {}
    for operation in case.operations:
        try:
            call = _built(xp, *graph_of[operation])
        except Exception as error:  # whatever it is, the others can still be measured
            text = f"cuDNN has no {operation} of {case}: {type(error).__name__}: {error}"
            warnings.warn(text, stacklevel=2)
            continue
        calls[operation, NAME] = call
        if operation == "forward":
            call()  # for the statistics that the others take
    return calls


def _in_four_axes(case: Case, array: Any) -> Any:
    """An array as cuDNN sees it, with channels, or the elements of a row, in the second axis."""
    if case.of_rows:
        return array.reshape(*array.shape, 1, 1)
    if case.channel_axis == -1:
        samples, *spatial, channels = array.shape
        turned = array.reshape(samples, math.prod(spatial), 1, channels)
        return turned.transpose(0, 3, 1, 2)
    return array.reshape(*array.shape[:2], -1, 1)


def _like(xp: Any, array: Any) -> Any:
    """A new array in the memory order of one of four axes."""
    order = sorted(range(4), key=lambda axis: -array.strides[axis])
    lying = xp.empty([array.shape[axis] for axis in order], array.dtype)
    return lying.transpose([order.index(axis) for axis in range(4)])


@cache
def _handle() -> Any:
    import cudnn

    return cudnn.create_handle()


def _built(
    xp: Any, operation: str, inputs: dict[str, Any], outputs: list[Any], options: dict[str, Any]
) -> Callable[[], tuple[Any, ...]]:
    """A call that executes an operation on these arrays; inputs may be numbers.

    The first of the outputs is made anew by every call.
    """
    import cudnn

    def type_of(array: Any) -> Any:
        return getattr(cudnn.data_type, _TYPES[array.dtype.name])

    handle, single = _handle(), cudnn.data_type.FLOAT
    cudnn.set_stream(handle=handle, stream=xp.cuda.get_current_stream().ptr)
    graph = cudnn.pygraph(
        io_data_type=type_of(outputs[0]), intermediate_data_type=single,
        compute_data_type=single, handle=handle,
    )  # fmt: skip
    tensors, pointers, numbers = {}, {}, []
    for name, value in inputs.items():
        by_value = isinstance(value, float)
        if by_value:
            value = np.full((1, 1, 1, 1), value, np.float32)
            numbers.append(value)
        tensors[name] = graph.tensor(
            name=name, dim=list(value.shape), stride=_steps(value), data_type=type_of(value),
            is_pass_by_value=by_value,
        )  # fmt: skip
        pointers[tensors[name]] = value.ctypes.data if by_value else value.data.ptr
    results = getattr(graph, operation)(name=operation, **tensors, **options)
    results = results if isinstance(results, (tuple, list)) else [results]
    tensors_of_outputs = [tensor for tensor in results if tensor is not None]
    for tensor, array in zip(tensors_of_outputs, outputs, strict=True):
        tensor.set_output(True).set_data_type(type_of(array))
        tensor.set_dim(list(array.shape)).set_stride(_steps(array))
        pointers[tensor] = array.data.ptr
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = xp.empty(max(graph.get_workspace_size(), 1), np.uint8)

    first = tensors_of_outputs[0]

    def call() -> tuple[Any, ...]:
        _ = inputs, numbers  # whose memory the graph reads
        fresh = _like(xp, outputs[0])
        pointers[first] = fresh.data.ptr
        graph.execute(pointers, workspace.data.ptr, handle=handle)
        return (fresh, *outputs[1:])

    return call


def _steps(array: Any) -> list[int]:
    """Strides in elements."""
    return [step // array.itemsize for step in array.strides]
