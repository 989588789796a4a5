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

from .cpu import memory as cpu_memory
from .cpu.undisturbed import undisturbed

__all__ = ["Array"]

#: An array of NumPy, CuPy or anything else that has ``__dlpack__``.
Array: TypeAlias = Any

_DLPACK_CPU = (1, 3)  # plain and pinned memory
_DLPACK_CUDA = (2, 13)  # device and managed memory

LEAST_CAPABILITY = 75  # 7.5

_ndarray = np.ndarray  # found sooner: this is asked of every argument of every call

Export: TypeAlias = Callable[[Any], Array]


@cache
def cuda_missing() -> str | None:
    """Why GPU arrays cannot be used here, or None if they can."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed (pip install cunorm[cuda13], or cuda12, as your driver is)"
    except Exception as error:
        return f"CuPy cannot be imported: {error}"
    if (old := _too_old(cupy)) is not None:
        return old
    runtime = cupy.cuda.runtime
    try:
        capability = int(cupy.cuda.Device().compute_capability)
    except runtime.CUDARuntimeError as error:
        driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
        if driver == 0:
            return "no NVIDIA driver is installed"
        if driver // 1000 < needed // 1000:
            older = ", or pip install cunorm[cuda12]" if driver // 1000 == 12 else ""
            return (
                f"the NVIDIA driver is for CUDA {_version(driver)}, CuPy for CUDA "
                f"{_version(needed)}: update the driver{older}"
            )
        return f"CuPy finds no GPU ({error})"
    if capability < LEAST_CAPABILITY:
        return f"compute capability 7.5 or newer is needed, the GPU has {capability / 10}"
    return None


def _too_old(cupy: Any) -> str | None:
    if int(cupy.__version__.partition(".")[0]) >= 14:
        return None
    return f"CuPy {cupy.__version__} is too old; 14 or newer is needed"


def _version(number: int) -> str:
    """A version of CUDA as people write it."""
    return f"{number // 1000}.{number % 1000 // 10}"


@cache
def cpu_backend() -> ModuleType:
    """The CPU backend; the first call imports Numba."""
    return undisturbed(_import_cpu_backend)


def _import_cpu_backend() -> ModuleType:
    import cunorm.cpu.everything

    return cunorm.cpu


@cache
def cuda_backend() -> ModuleType:
    """The CUDA backend; the first call imports CuPy."""
    import cunorm.cuda.backward
    import cunorm.cuda.double_backward
    import cunorm.cuda.statistics
    import cunorm.cuda.transform

    return cunorm.cuda


class Place:
    """Where the arrays of a call lie: what computes on them, and whose the results are.

    As a context it makes a GPU the current one for as long as the call lasts. `read_only` names
    arguments that must not be written, which CuPy's arrays, unlike NumPy's, do not say themselves.
    `memory` is where `empty` and `empty_like` are.
    """

    __slots__ = ("_device", "_export", "backend", "memory", "read_only", "xp")

    def __init__(
        self,
        xp: Any,
        backend: ModuleType,
        export: Export | None = None,
        device: Any = None,
        read_only: tuple[str, ...] = (),
    ) -> None:
        self.xp = xp
        self.memory = cpu_memory if xp is np else xp
        self.backend = backend
        self.read_only = read_only
        self._export = export
        self._device = device

    def export(self, *results: Any, given: Any = None) -> tuple[Any, ...]:
        """Results as arrays of the caller's framework; None stays None.

        An output that was `given`, not None, is the first of them, as it is. On a GPU its
        framework's stream waits for CuPy's, as it does when it takes a new array over.
        """
        if given is not None:
            if self._export is not None and self.xp is not np:
                self._export(results[0])
            return given, *self.export(*results[1:])
        if self._export is None:
            return results
        return tuple(None if array is None else self._export(array) for array in results)

    def __enter__(self) -> None:
        if self._device is not None:
            self._device.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self._device is not None:
            self._device.__exit__(*exception)


@cache
def _cpu() -> Place:
    return Place(np, cpu_backend())


def usual_backend(x: Any) -> ModuleType | None:
    """What computes on x if it is one of NumPy's own arrays, or of CuPy's on the current GPU.

    `adopt` has the last word about all others.
    """
    kind = type(x)
    if kind is _ndarray:
        return cpu_backend()
    cupy = sys.modules.get("cupy")
    if cupy is None or kind is not cupy.ndarray:
        return None
    here = x.data.device_id == cupy.cuda.runtime.getDevice()
    return _gpu().backend if here else None


def adopt(names: Sequence[str], *values: Any) -> tuple[Sequence[Any], Place]:
    """The arguments as arrays of NumPy or CuPy, and where they lie.

    ``None`` stays ``None``. The first array decides what the results are.
    """
    for value in values:
        if value is not None and type(value) is not _ndarray:
            break
    else:  # as a rule
        return values, _cpu()
    cupy = sys.modules.get("cupy")
    if cupy is not None and all(v is None or type(v) is cupy.ndarray for v in values):
        return values, _gpu_place(device_of_all(names, values), None)
    views = [None if v is None else _view(n, v) for n, v in zip(names, values, strict=True)]
    device = device_of_all(names, views)
    name, value, view = next(t for t in zip(names, values, views, strict=True) if t[1] is not None)
    own = isinstance(value, np.ndarray) or value is view
    export = None if own else _exporter(name, value)
    if device is None:
        return views, Place(np, cpu_backend(), export)
    read_only = tuple(n for n, v in zip(names, values, strict=True) if _is_of_jax(v))
    if "out" in read_only:
        raise read_only_error("out")
    return views, _gpu_place(device, export, read_only)


def read_only_error(name: str) -> ValueError:
    """What to raise if this argument is to be written and must not be."""
    return ValueError(
        f"{name}: expected a writable array, got a read-only one (JAX's are; NumPy's and CuPy's "
        "may go with them)"
    )


def _is_of_jax(value: Any) -> bool:
    """JAX's arrays are immutable, but do not say so through DLPack."""
    return type(value).__module__.partition(".")[0] in ("jax", "jaxlib")


@cache
def _gpu() -> Place:
    """Of CuPy arrays on the current GPU."""
    cupy = sys.modules["cupy"]
    if (old := _too_old(cupy)) is not None:
        raise RuntimeError(old)
    return Place(cupy, cuda_backend())


def _gpu_place(device: int, export: Export | None, read_only: tuple[str, ...] = ()) -> Place:
    here = _gpu()
    if here.xp.cuda.runtime.getDevice() != device:
        return Place(here.xp, here.backend, export, here.xp.cuda.Device(device), read_only)
    if export is None and not read_only:
        return here
    return Place(here.xp, here.backend, export, None, read_only)


def device_of_all(names: Sequence[str], arrays: Sequence[Any]) -> Any:
    """Number of the GPU that all of the arrays lie on; None for the CPU."""
    first = None
    for name, array in zip(names, arrays, strict=True):
        if array is None:
            continue
        device = _device_of(array)
        if device is not None and array.data.ptr % array.itemsize:  # would be fatal to CUDA
            raise TypeError(
                f"{name}: expected an aligned array, got one of {array.itemsize}-byte elements "
                f"at address {array.data.ptr:#x}"
            )
        if first is None:
            first, expected = name, device
        elif device != expected:
            raise TypeError(
                f"{name}: expected an array on the device of {first}, {_named(expected)}, "
                f"got one on {_named(device)} (a layer's arrays move with its `to`)"
            )
    return expected


def _device_of(array: Any) -> int | None:
    """Number of the GPU that an array lies on; None for the CPU."""
    return None if isinstance(array, np.ndarray) else array.data.device_id


def _named(device: int | None) -> str:
    return "the CPU" if device is None else f"GPU {device}"


def _view(name: str, value: Any) -> Any:
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: expected a plain array, got a masked array, whose mask would be lost"
        )
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(value, cupy.ndarray):
        return value
    if not hasattr(value, "__dlpack__") or not hasattr(value, "__dlpack_device__"):
        traced = _is_of_jax(value) and type(value).__name__.endswith("Tracer")
        hint = ", which has no elements yet: call through jax.pure_callback" if traced else ""
        raise TypeError(
            f"{name}: expected an array (NumPy, CuPy or anything with __dlpack__), "
            f"got {type(value).__name__}{hint}"
        )
    try:
        device, _ = value.__dlpack_device__()
    except Exception as error:
        raise _not_shared(name, value, error) from error
    if device in _DLPACK_CUDA:
        missing = cuda_missing()
        if missing is not None:
            raise TypeError(
                f"{name}: expected an array on the CPU, since the CUDA backend is missing here "
                f"({missing}), got one on a GPU"
            )
        import cupy as module
    elif device in _DLPACK_CPU:
        module = np
    else:
        raise TypeError(
            f"{name}: expected an array on a CPU or CUDA device, got DLPack device {device}"
        )
    if getattr(value, "requires_grad", False):
        raise TypeError(
            f"{name}: expected an array that records no gradients, got a {type(value).__name__} "
            "that requires them; pass its detach(), and give the gradients to your framework"
        )
    if getattr(value, "is_neg", bool)():  # PyTorch's DLPack forgets about the sign
        raise TypeError(
            f"{name}: expected an array whose memory holds its values, got a "
            f"{type(value).__name__} that negates them; pass its resolve_neg()"
        )
    try:
        if _is_bfloat16(value):
            import ml_dtypes

            if module is np and _is_of_jax(value):  # whose `view` copies
                return np.asarray(value)
            integers = value.view(_namespace(name, value).uint16)
            return module.from_dlpack(integers).view(ml_dtypes.bfloat16)
        return module.from_dlpack(value)
    except Exception as error:
        raise _not_shared(name, value, error) from error


def _not_shared(name: str, value: Any, error: Exception) -> TypeError:
    return TypeError(f"{name}: {type(value).__name__} cannot be shared through DLPack: {error}")


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
        if _is_bfloat16(array):
            return namespace.from_dlpack(array.view("uint16")).view(namespace.bfloat16)
        return namespace.from_dlpack(array)

    return export


def view(name: str, array: Any) -> Any:
    """An array of any library as one of NumPy or CuPy, of the same memory."""
    if array is None:
        raise TypeError(f"{name}: expected an array, got None")
    (seen,), _ = adopt((name,), array)
    return seen


def own(name: str, array: Any) -> Any:
    """An array of any library as one of NumPy or CuPy that may be written."""
    seen = view(name, array)
    return seen.copy() if isinstance(seen, _ndarray) and not seen.flags.writeable else seen


def move(array: Any, device: str) -> Any:
    """A NumPy or CuPy array as one of NumPy ("cpu") or CuPy ("cuda"); itself if it is one."""
    if device == "cpu":
        return array if isinstance(array, np.ndarray) else array.get()
    import cupy

    return cupy.asarray(array)


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


def memory_order(array: Any, leading: int = 0) -> tuple[int, ...] | None:
    """Axes from slowest to fastest, if that makes the array C-contiguous and aligned; else None.

    The first `leading` axes are the slowest, in any order, or the answer is None.
    """
    return _order(array, leading) if _is_aligned(array) else None


def _order(array: Any, leading: int) -> tuple[int, ...] | None:
    """`memory_order` of an array that need not be aligned."""
    if array.flags.c_contiguous:
        return tuple(range(array.ndim))
    order = _dense_order(array.shape, array.strides, array.itemsize)
    if order is None or leading == 0:
        return order
    order = tuple(sorted(order, key=lambda axis: axis >= leading))
    # An axis of length 1 may be anywhere; another that has moved has left the memory order.
    return order if array.transpose(order).flags.c_contiguous else None


def _is_aligned(array: Any) -> bool:
    return getattr(array.flags, "aligned", True)  # CuPy's are: see device_of_all


def is_plain(array: Any) -> bool:
    """Whether an array is C-contiguous and aligned, as kernels need it."""
    if isinstance(array, _ndarray):
        flags = array.flags
        return flags.c_contiguous and flags.aligned
    plain: bool = array._c_contiguous  # all that CuPy's `flags`, an object of Python's, would say
    return plain


def all_plain(inputs: tuple[Any, ...], model: Any) -> bool:
    """Whether the inputs and the array that an output is like are all C-contiguous and aligned."""
    return all(map(is_plain, inputs if inputs and inputs[0] is model else (*inputs, model)))


def _lies_in(order: tuple[int, ...], array: Any) -> bool:
    return is_plain(array.transpose(order))


@cache
def axes(ndim: int) -> tuple[int, ...]:
    """All axes of an array, in their order."""
    return tuple(range(ndim))


class _Header:
    """What NumPy needs to know of an array to compare its place with another's."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (array.data.ptr, True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
        }


def header(array: Any) -> np.ndarray:
    """A NumPy array of the same addresses; of a GPU's memory, to compare but not to read."""
    return array if isinstance(array, np.ndarray) else np.asarray(_Header(array))


def may_overlap(a: Any, b: Any) -> bool:
    """Whether the bounds of two arrays in memory overlap."""
    if isinstance(a, _ndarray):
        return np.may_share_memory(a, b)
    (first, end), (other_first, other_end) = _bounds(a), _bounds(b)
    return first < other_end and other_first < end


def _bounds(array: Any) -> tuple[int, int]:
    """Where a CuPy array begins in memory, and where it ends."""
    place = array.data.ptr
    if array._c_contiguous:
        return place, place + array.nbytes
    before, after = _reach(array.shape, array.strides, array.itemsize)
    return place - before, place + after


@lru_cache(maxsize=1024)
def _reach(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Bytes of an array before its first element, and from there on."""
    if 0 in shape:
        return 0, 0
    steps = [stride * (size - 1) for stride, size in zip(strides, shape, strict=True)]
    return -sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + itemsize


def overlap(a: Any, b: Any) -> bool:
    """Whether two arrays share an element."""
    return may_overlap(a, b) and np.shares_memory(header(a), header(b))


class Operands:
    """An output and the inputs it is computed from, all in one memory order.

    The output has the memory order of `like` unless the caller gave one. An
    input in another order, or with gaps, is copied: into the output and
    computed from there, if no other input lies there; else anew.

    ``inputs`` and ``out`` are C-contiguous views whose axes are ``order``. It begins
    with the first `leading` axes, in any order: an output in whose memory they are not
    the slowest is computed elsewhere and copied.
    """

    __slots__ = ("_result", "_target", "_xp", "inputs", "order", "out")

    def __init__(
        self, place: Place, like: Any, inputs: tuple[Any, ...], out: Any | None, leading: int = 0
    ) -> None:
        memory = place.memory
        self.inputs = inputs
        if all_plain(inputs, like if out is None else out):  # as a rule
            self.order = axes(like.ndim)
            if out is None:
                out = memory.empty_like(like)
            self.out = out
            self._result = None
            return
        self._xp = place.xp
        self._result = memory.empty_like(like) if out is None else out
        order = memory_order(self._result, leading)
        if order is None:  # given by the caller and with gaps, or other axes are the slowest
            self._target = memory.empty(like.shape, like.dtype)
            order = tuple(range(like.ndim))
        else:
            self._target = self._result
        self.order = order
        self.out = self._target.transpose(order)
        if all(_lies_in(order, array) for array in inputs):
            self.inputs = tuple(array.transpose(order) for array in inputs)
            return
        free = not any(may_overlap(self._target, array) for array in inputs)
        views = []
        for array in inputs:
            if not _lies_in(order, array):
                copy = self._target if free else memory.empty_like(self._target)
                free = False
                place.xp.copyto(copy, array)
                array = copy
            views.append(array.transpose(order))
        self.inputs = tuple(views)

    def finish(self) -> Any:
        """The output as the caller asked for it."""
        if self._result is None:
            return self.out
        if self._target is not self._result:
            self._xp.copyto(self._result, self._target)
        return self._result


def dense(arrays: tuple[Any, ...], leading: int = 0) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """One memory order and the arrays in it, C-contiguous; others, or unaligned ones, are copied.

    It begins with the first `leading` axes, in any order.
    """
    orders = (_order(array, leading) for array in arrays)
    order = next((o for o in orders if o is not None), None)
    if order is None:
        order = tuple(range(arrays[0].ndim))
    turned = [array.transpose(order) for array in arrays]
    return order, tuple(array if is_plain(array) else array.copy() for array in turned)
