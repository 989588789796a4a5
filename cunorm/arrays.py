"""Arrays in, arrays out: whose they are, where they lie, how they lie.

NumPy arrays are taken as they are. Anything else with ``__dlpack__`` is seen
through a NumPy view of the same memory, and results go back as the caller's
own type, made by the caller's own framework, which cunorm never imports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Array"]

#: An array of NumPy, CuPy or anything else that has ``__dlpack__``.
Array: TypeAlias = Any

_DLPACK_CPU = 1
_DLPACK_CUDA = (2, 3, 13)  # device memory, pinned host memory, managed memory


def cuda_missing() -> str | None:
    """Why GPU arrays cannot be used here, or None if they can."""
    return "this version of cunorm has no CUDA backend yet"


@cache
def cpu_backend() -> ModuleType:
    """The CPU backend; the first call imports Numba."""
    import cunorm.cpu.backward
    import cunorm.cpu.statistics
    import cunorm.cpu.transform

    return cunorm.cpu


def _same(array: Array) -> Array:
    return array


Export: TypeAlias = Callable[[Any], Array]


def adopt(names: Sequence[str], *values: Any) -> tuple[Sequence[Any], Export]:
    """NumPy views of the arguments and the function that makes results the caller's.

    ``None`` stays ``None``. The first array decides what the results are.
    """
    for value in values:
        if type(value) is not np.ndarray and value is not None:
            break
    else:
        return values, _same
    views = [None if v is None else _view(n, v) for n, v in zip(names, values, strict=True)]
    name, first = next((n, v) for n, v in zip(names, values, strict=True) if v is not None)
    return views, _same if isinstance(first, np.ndarray) else _exporter(name, first)


def _view(name: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: expected a plain array, got a masked array, whose mask would be lost"
        )
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    if not hasattr(value, "__dlpack__") or not hasattr(value, "__dlpack_device__"):
        raise TypeError(
            f"{name}: expected an array (NumPy, CuPy or anything with __dlpack__), "
            f"got {type(value).__name__}"
        )
    device, _ = value.__dlpack_device__()
    if device in _DLPACK_CUDA:
        raise TypeError(f"{name}: expected an array on the CPU, got one on a GPU: {cuda_missing()}")
    if device != _DLPACK_CPU:
        raise TypeError(
            f"{name}: expected an array on a CPU or CUDA device, got DLPack device {device}"
        )
    if getattr(value, "requires_grad", False):
        raise TypeError(
            f"{name}: expected an array that records no gradients, got a {type(value).__name__} "
            "that requires them; pass its detach(), and give the gradients to your framework"
        )
    try:
        if _is_bfloat16(value):
            import ml_dtypes

            integers = value.view(_namespace(name, value).uint16)
            return np.from_dlpack(integers).view(ml_dtypes.bfloat16)
        return np.from_dlpack(value)
    except Exception as error:
        raise TypeError(
            f"{name}: {type(value).__name__} cannot be shared through DLPack: {error}"
        ) from error


def _is_bfloat16(value: Any) -> bool:
    return str(getattr(value, "dtype", "")).endswith("bfloat16")


def _namespace(name: str, value: Any) -> Any:
    """The module of an array's framework, which makes such arrays with its from_dlpack."""
    if hasattr(value, "__array_namespace__"):
        return value.__array_namespace__()
    for kind in type(value).__mro__:  # of a subclass' base, if need be
        module = sys.modules.get(kind.__module__.partition(".")[0])
        if hasattr(module, "from_dlpack"):
            return module
    raise TypeError(
        f"{name}: expected an array of a framework with from_dlpack, to make the results with, "
        f"got {type(value).__name__}"
    )


def _exporter(name: str, value: Any) -> Export:
    namespace = _namespace(name, value)

    def export(array: Any) -> Array:
        if array is None:
            return None
        if _is_bfloat16(array):
            return namespace.from_dlpack(array.view(np.uint16)).view(namespace.bfloat16)
        return namespace.from_dlpack(array)

    return export


# --- memory order -------------------------------------------------------------


@lru_cache(maxsize=1024)
def _dense_order(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[int, ...] | None:
    order = sorted(range(len(shape)), key=lambda axis: (-strides[axis], axis))
    expected = itemsize
    for axis in reversed(order):
        if shape[axis] == 1:
            continue
        if strides[axis] != expected:
            return None
        expected *= shape[axis]
    return tuple(order)


def memory_order(array: np.ndarray) -> tuple[int, ...] | None:
    """Axes from slowest to fastest, if that makes the array C-contiguous; else None."""
    if not array.flags.aligned:
        return None
    if array.flags.c_contiguous:
        return tuple(range(array.ndim))
    return _dense_order(array.shape, array.strides, array.itemsize)


def _is_plain(array: np.ndarray) -> bool:
    flags = array.flags
    return bool(flags.c_contiguous and flags.aligned)


def _lies_in(order: tuple[int, ...], array: np.ndarray) -> bool:
    return array.flags.aligned and array.transpose(order).flags.c_contiguous


class Operands:
    """An output and the inputs it is computed from, all in one memory order.

    The output has the memory order of `like` unless the caller gave one. An
    input in another order, or with gaps, is copied: into the output and
    computed from there, if no other input lies there; else anew.

    ``inputs`` and ``out`` are C-contiguous views whose axes are ``order``.
    """

    __slots__ = ("_result", "_target", "inputs", "order", "out")

    def __init__(
        self, like: np.ndarray, inputs: tuple[np.ndarray, ...], out: np.ndarray | None
    ) -> None:
        if all(map(_is_plain, inputs)) and _is_plain(like if out is None else out):
            self.order = tuple(range(like.ndim))  # the usual case, without detours
            self.inputs = inputs
            self.out = np.empty(like.shape, like.dtype) if out is None else out
            self._target = self._result = self.out
            return
        self._result = np.empty_like(like, subok=False) if out is None else out
        order = memory_order(self._result)
        if order is None:  # given by the caller and with gaps
            self._target = np.empty(like.shape, like.dtype)
            order = tuple(range(like.ndim))
        else:
            self._target = self._result
        self.order = order
        self.out = self._target.transpose(order)
        if all(_lies_in(order, array) for array in inputs):
            self.inputs = tuple(array.transpose(order) for array in inputs)
            return
        free = not any(np.may_share_memory(self._target, array) for array in inputs)
        views = []
        for array in inputs:
            if not _lies_in(order, array):
                copy = self._target if free else np.empty_like(self._target)
                free = False
                np.copyto(copy, array)
                array = copy
            views.append(array.transpose(order))
        self.inputs = tuple(views)

    def finish(self) -> np.ndarray:
        """The output as the caller asked for it."""
        if self._target is not self._result:
            np.copyto(self._result, self._target)
        return self._result


def dense(arrays: tuple[np.ndarray, ...]) -> tuple[tuple[int, ...], list[np.ndarray]]:
    """One memory order and the arrays in it, C-contiguous; those in another order are copied."""
    order = next((o for o in map(memory_order, arrays) if o is not None), None)
    if order is None:
        order = tuple(range(arrays[0].ndim))
    return order, [
        array.transpose(order)
        if _lies_in(order, array)
        else np.ascontiguousarray(array.transpose(order))
        for array in arrays
    ]
