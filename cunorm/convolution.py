"""Two-dimensional convolutions for `cunorm.conv_batch_norm_forward` to build on.

Both are made of libraries: the array library's matrix product, and cuDNN.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from . import arrays, checks
from .arrays import Array
from .cpu import memory as cpu_memory

__all__ = ["Convolution", "CudnnConvolution", "MatmulConvolution"]

Pair = tuple[int, int]


@runtime_checkable
class Convolution(Protocol):
    """A two-dimensional cross-correlation and its gradients.

        y[n, o, i, j] = sum(x[n, c, i * stride + k * dilation - padding, ...] * weight[o, c, k, l])

    over the channels c of o's group and the kernel's taps (k, l), x being 0 outside.

    Arrays are NumPy's or, on a GPU, CuPy's, whatever the caller's own; x has shape
    (N, C, H, W), weight (O, C / groups, K, L). `stride`, `padding` and `dilation` are pairs,
    for H and W. Each result is a new array, which is overwritten later, in the dtype
    and, if y is to have it, memory order of x (`backward_weight`: in the dtype of weight). The
    same arguments give the same bits every time.
    """

    def forward(
        self, x: Array, weight: Array, *, stride: Pair, padding: Pair, dilation: Pair, groups: int
    ) -> Array:
        """Y of shape (N, O, ...)."""

    def backward_input(
        self, dy: Array, weight: Array, x: Array, *, stride: Pair, padding: Pair, dilation: Pair,
        groups: int,
    ) -> Array:  # fmt: skip
        """Gradient with respect to x, of which nothing but its shape and memory order is used."""

    def backward_weight(
        self, dy: Array, x: Array, weight: Array, *, stride: Pair, padding: Pair, dilation: Pair,
        groups: int,
    ) -> Array:  # fmt: skip
        """Gradient with respect to weight, of which nothing but shape and dtype is used."""


def output_shape(
    x: tuple[int, ...], weight: tuple[int, ...], stride: Pair, padding: Pair, dilation: Pair
) -> tuple[int, int, int, int]:
    """Shape of a convolution's result, from those of x and weight."""
    height, width = (
        (x[2 + i] + 2 * padding[i] - dilation[i] * (weight[2 + i] - 1) - 1) // stride[i] + 1
        for i in range(2)
    )
    return x[0], weight[0], height, width


class MatmulConvolution:
    """Convolution by the array library's own matrix product, over sliding windows.

    The windows of a tile of the result, some samples and a part of the image, become the
    columns of a matrix, which the weight multiplies. Half types are multiplied and added
    in float32. Results have the memory order of x.

    Parameters
    ----------
    workspace_limit : int
        Bytes that a tile's windows and product may take, 64 MiB by default; a tile is at
        least one pixel. Weight and gradient in the accumulator type come on top.

    Raises
    ------
    ValueError, TypeError
        For a limit that is no positive integer.
    """

    def __init__(self, workspace_limit: int = 64 << 20) -> None:
        self.workspace_limit = checks.number_of_values("workspace_limit", workspace_limit, 1)

    def __repr__(self) -> str:
        return f"MatmulConvolution(workspace_limit={self.workspace_limit})"

    def forward(
        self, x: Array, weight: Array, *, stride: Pair, padding: Pair, dilation: Pair, groups: int
    ) -> Array:
        """See `Convolution.forward`."""
        windows = _Windows(x, weight, stride, padding, dilation, groups)
        y = empty_like(x, output_shape(x.shape, weight.shape, stride, padding, dilation))
        for tile in self._tiles(y, windows.bytes_of):
            with np.errstate(all="ignore"):
                _view(y, tile)[...] = _image(windows.matrix @ windows.columns(x, tile), tile)
        return y

    def backward_input(
        self, dy: Array, weight: Array, x: Array, *, stride: Pair, padding: Pair, dilation: Pair,
        groups: int,
    ) -> Array:  # fmt: skip
        """See `Convolution.backward_input`."""
        windows = _Windows(x, weight, stride, padding, dilation, groups)
        matrix = windows.matrix.swapaxes(1, 2)
        dx = empty_like(x, x.shape)
        for tile in self._tiles(x, lambda tile: windows.bytes_to(tile, dy.shape)):
            outputs = windows.reaching(tile, dy.shape)
            with np.errstate(all="ignore"):
                _view(dx, tile)[...] = windows.added_up(
                    matrix @ windows.rows(dy, outputs), outputs, tile
                )
        return dx

    def backward_weight(
        self, dy: Array, x: Array, weight: Array, *, stride: Pair, padding: Pair, dilation: Pair,
        groups: int,
    ) -> Array:  # fmt: skip
        """See `Convolution.backward_weight`."""
        windows = _Windows(x, weight, stride, padding, dilation, groups)
        total = windows.xp.zeros(windows.matrix.shape, np.float64)
        for tile in self._tiles(dy, windows.bytes_of):
            with np.errstate(all="ignore"):
                total += windows.rows(dy, tile) @ windows.columns(x, tile).swapaxes(1, 2)
        with np.errstate(all="ignore"):
            return total.reshape(weight.shape).astype(weight.dtype)

    def _tiles(self, images: Array, bytes_of: Callable[[_Tile], int]) -> Iterator[_Tile]:
        """Images (N, C, H, W) in tiles of so many bytes that the workspace holds them."""
        whole = extents = [images.shape[0], *images.shape[2:]]
        while bytes_of(_Tile(*map(range, extents))) > self.workspace_limit and max(extents) > 1:
            # samples apart first, then rows, then the parts of a row
            axis = next(i for i, extent in enumerate(extents) if extent > 1)
            extents = [*extents[:axis], -(-extents[axis] // 2), *extents[axis + 1 :]]
        ranges = [
            [range(start, min(start + extent, length)) for start in range(0, length, extent or 1)]
            for length, extent in zip(whole, extents, strict=True)
        ]
        return (_Tile(*tile) for tile in product(*ranges))


class _Tile(NamedTuple):
    """A part of images (N, C, H, W), all channels of it."""

    samples: range
    rows: range
    columns: range

    @property
    def lengths(self) -> tuple[int, int, int]:
        return len(self.samples), len(self.rows), len(self.columns)


class _Axis(NamedTuple):
    """A spatial axis: output i meets input i * stride + tap * dilation - padding."""

    size: int  # of the input
    taps: int
    stride: int
    padding: int
    dilation: int

    def overlap(self, tap: int, outputs: range, inputs: range) -> tuple[slice, slice]:
        """Where `outputs` meet `inputs` under a tap: slices of the one and of the other."""
        shift = tap * self.dilation - self.padding
        first = max(outputs.start, -((shift - inputs.start) // self.stride))
        last = min(outputs.stop - 1, (inputs.stop - 1 - shift) // self.stride)
        if last < first:
            return slice(0, 0), slice(0, 0)
        place = first * self.stride + shift - inputs.start
        length = (last - first) * self.stride + 1
        return (
            slice(first - outputs.start, last + 1 - outputs.start),
            slice(place, place + length, self.stride),
        )

    def most_reaching(self, length: int) -> int:
        """How many outputs may meet so many inputs in a row."""
        return (length - 1 + (self.taps - 1) * self.dilation) // self.stride + 1

    def reaching(self, inputs: range, number: int) -> range:
        """Those of a number of outputs that meet `inputs` under any tap."""
        reach = (self.taps - 1) * self.dilation - self.padding
        first = max(0, -((reach - inputs.start) // self.stride))
        last = min(number - 1, (inputs.stop - 1 + self.padding) // self.stride)
        return range(first, max(first, last + 1))


class _Windows:
    """The windows of a convolution's input, and its weight, as matrices of every group.

    ``matrix`` is (groups, O / groups, window), of the accumulator type; a window has an element
    for every channel of the group and tap.
    """

    def __init__(
        self, x: Any, weight: Any, stride: Pair, padding: Pair, dilation: Pair, groups: int
    ) -> None:
        self.xp = _module(x)
        self.dtype = checks.statistics_dtype(x.dtype)
        number, *window = weight.shape
        self.shape: tuple[int, ...] = (groups, *window)
        with np.errstate(all="ignore"):
            matrix = weight.astype(self.dtype)
        self.matrix = matrix.reshape(groups, number // groups, prod(window))
        self.axes = [
            _Axis(*axis)
            for axis in zip(x.shape[2:], window[1:], stride, padding, dilation, strict=True)
        ]

    def bytes_of(self, outputs: _Tile) -> int:
        """Of the columns, and of the rows, of a tile of the output."""
        groups, length, window = self.matrix.shape
        return prod(outputs.lengths) * int(groups * (length + window)) * self.dtype.itemsize

    def bytes_to(self, inputs: _Tile, dy_shape: tuple[int, ...]) -> int:
        """Of what makes a tile of the input's gradient."""
        channels = self.shape[0] * self.shape[1]
        image = prod(inputs.lengths) * channels * self.dtype.itemsize
        # of a tile in the middle, which more of the output may reach than the first one
        extents = zip(self.axes, inputs.lengths[1:], dy_shape[2:], strict=True)
        reached = [min(number, axis.most_reaching(length)) for axis, length, number in extents]
        return image + self.bytes_of(_Tile(inputs.samples, *map(range, reached)))

    def reaching(self, inputs: _Tile, dy_shape: tuple[int, ...]) -> _Tile:
        """The tile of the output that a tile of the input is connected with."""
        rows, columns = self.axes
        return _Tile(
            inputs.samples,
            rows.reaching(inputs.rows, dy_shape[2]),
            columns.reaching(inputs.columns, dy_shape[3]),
        )

    def _taps(self, outputs: _Tile, inputs: _Tile) -> Iterator[tuple[Any, Any]]:
        """For every tap where windows (..., K, L, N, rows, columns) and images (..., H, W) meet."""
        for k in range(self.axes[0].taps):
            rows, image_rows = self.axes[0].overlap(k, outputs.rows, inputs.rows)
            for m in range(self.axes[1].taps):
                columns, image_columns = self.axes[1].overlap(m, outputs.columns, inputs.columns)
                yield (
                    (..., k, m, slice(None), rows, columns),
                    (..., image_rows, image_columns),
                )

    def columns(self, x: Any, outputs: _Tile) -> Any:
        """The windows of a tile of the output: (groups, window, pixels)."""
        windows = self.xp.zeros((*self.shape, *outputs.lengths), self.dtype)
        inputs = _Tile(outputs.samples, *(range(axis.size) for axis in self.axes))
        images = self._grouped(_view(x, inputs))
        for of_windows, of_images in self._taps(outputs, inputs):
            windows[of_windows] = images[of_images]
        return windows.reshape(self.shape[0], self.matrix.shape[2], prod(outputs.lengths))

    def rows(self, dy: Any, outputs: _Tile) -> Any:
        """A tile of the output's gradient: (groups, O / groups, pixels)."""
        groups, length, _ = self.matrix.shape
        images = self._grouped(_view(dy, outputs))
        return images.astype(self.dtype, order="C").reshape(groups, length, prod(outputs.lengths))

    def added_up(self, columns: Any, outputs: _Tile, inputs: _Tile) -> Any:
        """A tile of the input's gradient from those of the windows of all `outputs` it is in."""
        windows = columns.reshape(*self.shape, *outputs.lengths)
        images = self.xp.zeros((*self.shape[:2], *inputs.lengths), self.dtype)
        for of_windows, of_images in self._taps(outputs, inputs):
            images[of_images] += windows[of_windows]
        return _image(images, inputs)

    def _grouped(self, images: Any) -> Any:
        """Images (N, C, H, W) as (groups, C / groups, N, H, W)."""
        number, channels, *area = images.shape
        groups = self.shape[0]
        return images.reshape(number, groups, channels // groups, *area).transpose(1, 2, 0, 3, 4)


def _view(images: Any, tile: _Tile) -> Any:
    samples, rows, columns = (slice(part.start, part.stop) for part in tile)
    return images[samples, :, rows, columns]


def _image(grouped: Any, tile: _Tile) -> Any:
    """What is (groups, C / groups, ...) as a tile of images, (N, C, rows, columns)."""
    channels = grouped.shape[0] * grouped.shape[1]
    return grouped.reshape(channels, *tile.lengths).swapaxes(0, 1)


def empty_like(x: Any, shape: tuple[int, ...]) -> Any:
    """A new array of another shape, of the memory order, if it has one, and dtype of x."""
    module = _module(x)
    memory = cpu_memory if module is np else module
    order = arrays.memory_order(x) or arrays.axes(x.ndim)
    lying = memory.empty(tuple(shape[axis] for axis in order), x.dtype)
    return lying.transpose(sorted(arrays.axes(x.ndim), key=order.__getitem__))


def _module(array: Any) -> Any:
    """NumPy or CuPy, as the array is."""
    return np if isinstance(array, np.ndarray) else sys.modules["cupy"]


class CudnnConvolution:
    """Convolution by NVIDIA's cuDNN, for arrays on a GPU.

    It needs the extra ``cudnn12`` or ``cudnn13``: the package nvidia-cudnn-frontend, and cuDNN.
    Float32 is not rounded to TF32, and only such algorithms are used that give the same bits
    every time. The weight takes part in the dtype of x.

    Raises
    ------
    RuntimeError
        If the package is missing here; says why. When called, if cuDNN has no algorithm.
    """

    def __init__(self) -> None:
        missing = cudnn_missing()
        if missing is not None:
            raise RuntimeError(f"CudnnConvolution: cuDNN is missing here: {missing}")
        self._own = threading.local()  # cuDNN's handles belong to a thread, plans to a handle

    def __repr__(self) -> str:
        return "CudnnConvolution()"

    def __reduce__(self) -> tuple[Any, ...]:  # to copy and pickle it: a new one is as good
        return CudnnConvolution, ()

    def forward(
        self, x: Array, weight: Array, *, stride: Pair, padding: Pair, dilation: Pair, groups: int
    ) -> Array:
        """See `Convolution.forward`."""
        del groups  # which the shapes say
        y = empty_like(x, output_shape(x.shape, weight.shape, stride, padding, dilation))
        self._run("conv_fprop", {"image": x, "weight": weight}, y, stride, padding, dilation)
        return y

    def backward_input(
        self, dy: Array, weight: Array, x: Array, *, stride: Pair, padding: Pair, dilation: Pair,
        groups: int,
    ) -> Array:  # fmt: skip
        """See `Convolution.backward_input`."""
        del groups
        dx = empty_like(x, x.shape)
        self._run("conv_dgrad", {"loss": dy, "filter": weight}, dx, stride, padding, dilation)
        return dx

    def backward_weight(
        self, dy: Array, x: Array, weight: Array, *, stride: Pair, padding: Pair, dilation: Pair,
        groups: int,
    ) -> Array:  # fmt: skip
        """See `Convolution.backward_weight`."""
        del groups
        dweight = _module(x).empty(weight.shape, x.dtype)
        self._run("conv_wgrad", {"image": x, "loss": dy}, dweight, stride, padding, dilation)
        return dweight.astype(weight.dtype, copy=False)

    def _run(
        self, operation: str, inputs: dict[str, Any], result: Any,
        stride: Pair, padding: Pair, dilation: Pair,
    ) -> None:  # fmt: skip
        import cudnn
        import cupy

        inputs = {name: _packed(array, result.dtype) for name, array in inputs.items()}
        headers = tuple((name, array.shape, array.strides) for name, array in inputs.items())
        handles = self._own.__dict__
        device = cupy.cuda.runtime.getDevice()
        if device not in handles:
            handles[device] = cudnn.create_handle(), {}
        handle, plans = handles[device]
        key = (
            operation,
            headers,
            result.shape,
            result.strides,
            result.dtype,
            stride,
            padding,
            dilation,
        )
        if key not in plans:
            plans[key] = _plan(handle, *key)
        graph, tensors = plans[key]
        cudnn.set_stream(handle=handle, stream=cupy.cuda.get_current_stream().ptr)
        workspace = cupy.empty(max(graph.get_workspace_size(), 1), np.uint8)
        pointers = [array.data.ptr for array in (*inputs.values(), result)]
        graph.execute(dict(zip(tensors, pointers, strict=True)), workspace.data.ptr, handle=handle)


_CUDNN_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT", "float64": "DOUBLE"}


def _plan(
    handle: Any, operation: str, headers: Any, shape: Any, strides: Any, dtype: np.dtype,
    stride: Pair, padding: Pair, dilation: Pair,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """A graph of one convolution that can be executed, its inputs and its output."""
    import cudnn

    kind = getattr(cudnn.data_type, _CUDNN_TYPES[dtype.name])
    compute = cudnn.data_type.DOUBLE if dtype == np.float64 else cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=kind, intermediate_data_type=compute, compute_data_type=compute, handle=handle
    )

    def in_elements(strides: tuple[int, ...]) -> list[int]:
        return [step // dtype.itemsize for step in strides]

    inputs = {
        name: graph.tensor(name=name, dim=list(extents), stride=in_elements(steps), data_type=kind)
        for name, extents, steps in headers
    }
    result = getattr(graph, operation)(
        **inputs, stride=list(stride), padding=list(padding), dilation=list(dilation)
    )
    result.set_output(True).set_data_type(kind).set_dim(list(shape)).set_stride(
        in_elements(strides)
    )
    unwanted = [cudnn.numerical_note.NONDETERMINISTIC]
    if dtype == np.float32:
        unwanted += [cudnn.numerical_note.TENSOR_CORE, cudnn.numerical_note.DOWN_CONVERT_INPUTS]
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.deselect_numeric_notes(unwanted)
        graph.check_support()
        graph.build_plans()
    except Exception as error:
        raise RuntimeError(
            f"CudnnConvolution: cuDNN has no {operation} to {dtype} of shape {shape} with stride "
            f"{stride}, padding {padding}, dilation {dilation}, from {dict(h[:2] for h in headers)}"
            f": {error}; MatmulConvolution has"
        ) from error
    return graph, [*inputs.values(), result]


def _packed(array: Any, dtype: np.dtype) -> Any:
    """An array as cuDNN takes it: of this dtype, dense, and on a multiple of 16 bytes."""
    if array.dtype != dtype:
        array = array.astype(dtype)
    if arrays.memory_order(array) is None or array.data.ptr % 16:
        array = array.copy()
    return array


@cache
def cudnn_missing() -> str | None:
    """Why cuDNN cannot be used here, or None if it can."""
    try:
        import cudnn

        if not hasattr(cudnn, "pygraph"):
            return "the module cudnn is not that of nvidia-cudnn-frontend"
        cudnn.backend_version()
    except ImportError as error:
        return f"{error} (pip install cunorm[cudnn13], or cudnn12, as your driver is)"
    except Exception as error:  # it looks for cuDNN itself, here or there
        return f"nvidia-cudnn-frontend cannot be used: {error}"
    return None


@cache
def default_convolution(on_gpu: bool) -> Convolution:
    """What convolves where the caller does not say: cuDNN on a GPU, if it is installed."""
    return CudnnConvolution() if on_gpu and cudnn_missing() is None else MatmulConvolution()
