"""Convolutions by cuDNN, through a stand-in for its front end that computes on the CPU.

It has what `cunorm.CudnnConvolution` uses of nvidia-cudnn-frontend, with the names and
arguments of that package, and computes by the definition of `test_convolution`.
"""

import copy
import ctypes
import sys
import types
from enum import Enum

import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES, permuted
from test_convolution import SHAPES, check, convolve, convolve_backward, draw, options_of

import cunorm
from cunorm import convolution as module


class DeviceArray(np.ndarray):
    """An array with its address where CuPy has it."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.__array_interface__["data"][0])


class DataType(Enum):
    HALF = np.dtype(np.float16)
    BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
    FLOAT = np.dtype(np.float32)
    DOUBLE = np.dtype(np.float64)


class Tensor:
    def __init__(self, dim=None, stride=None, data_type=None):
        self.dim, self.stride, self.data_type, self.output = dim, stride, data_type, False

    def set_output(self, output):
        self.output = output
        return self

    def set_data_type(self, data_type):
        self.data_type = data_type
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def at(self, address):
        """The array that an address is of."""
        assert type(address) is int
        assert address % 16 == 0
        dtype = self.data_type.value
        reach = sum((n - 1) * s for n, s in zip(self.dim, self.stride, strict=True)) + 1
        memory = np.ctypeslib.as_array(
            (ctypes.c_uint8 * (reach * dtype.itemsize)).from_address(address)
        )
        return np.lib.stride_tricks.as_strided(
            memory.view(dtype), self.dim, [s * dtype.itemsize for s in self.stride]
        )


class Graph:
    """Like `cudnn.pygraph`, of one convolution."""

    steps = ("validate", "build_operation_graph", "create_execution_plans",
             "deselect_numeric_notes", "check_support", "build_plans")  # fmt: skip
    graphs = 0
    refused = ""

    def __init__(self, *, io_data_type, intermediate_data_type, compute_data_type, handle):
        double = io_data_type is DataType.DOUBLE
        assert compute_data_type is (DataType.DOUBLE if double else DataType.FLOAT)
        assert intermediate_data_type is compute_data_type
        self.io, self.handle, self.done, self.notes = io_data_type, handle, [], []
        Graph.graphs += 1

    def __getattr__(self, name):
        if name not in self.steps:
            raise AttributeError(name)

        def step(*arguments):
            if name == self.refused:
                raise RuntimeError("no engine")
            assert name == self.steps[len(self.done)], "in this order"
            self.done.append(name)
            if name == "deselect_numeric_notes":
                self.notes = arguments[0]

        return step

    def tensor(self, *, name, dim, stride, data_type):
        assert name in ("image", "weight", "loss", "filter")
        assert data_type is self.io
        return Tensor(dim, stride, data_type)

    def conv_fprop(self, *, image, weight, **options):
        def function(x, weight, _, **options):
            return convolve(x, weight, **options)

        return self._operation(function, (image, weight), (0, 1), options)

    def conv_dgrad(self, *, loss, filter, **options):  # noqa: A002
        def function(dy, weight, dx, **options):
            return convolve_backward(dy, np.zeros(dx.shape), weight, **options)[0]

        return self._operation(function, (loss, filter), (2, 1), options)

    def conv_wgrad(self, *, image, loss, **options):
        def function(x, dy, dweight, **options):
            return convolve_backward(dy, x, np.zeros(dweight.shape), **options)[1]

        return self._operation(function, (image, loss), (0, 2), options)

    def _operation(self, function, inputs, places, options):
        """`places` are those of the input and the weight among inputs and result."""
        assert set(options) == {"stride", "padding", "dilation"}
        assert all(type(value) is list for value in options.values())
        self.function, self.inputs, self.options = function, inputs, options
        self.places = places
        self.result = Tensor()
        return self.result

    def get_workspace_size(self):
        return 4096

    def execute(self, pack, workspace, *, handle):
        assert self.done == list(self.steps)
        assert handle is self.handle
        assert handle.stream == 17
        assert type(workspace) is int
        assert self.result.output
        assert set(pack) == {*self.inputs, self.result}
        arrays = [tensor.at(pack[tensor]) for tensor in (*self.inputs, self.result)]
        image, weight = (arrays[i] for i in self.places)
        groups = image.shape[1] // weight.shape[1]  # which cuDNN is not told
        arrays[-1][...] = self.function(*arrays, groups=groups, **self.options)


@pytest.fixture(autouse=True)
def cudnn(monkeypatch):
    fake = types.ModuleType("cudnn")
    fake.pygraph = Graph
    fake.data_type = DataType
    fake.numerical_note = Enum("numerical_note", "NONDETERMINISTIC TENSOR_CORE DOWN_CONVERT_INPUTS")
    fake.heur_mode = Enum("heur_mode", "A FALLBACK")
    fake.backend_version = lambda: 91000
    fake.create_handle = lambda: types.SimpleNamespace(stream=0)
    fake.set_stream = lambda handle, stream: setattr(handle, "stream", stream)
    cupy = types.ModuleType("cupy")
    cupy.empty = lambda shape, dtype: np.empty(shape, dtype).view(DeviceArray)
    cupy.cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(getDevice=lambda: 0),
        get_current_stream=lambda: types.SimpleNamespace(ptr=17),
    )
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(module, "_module", lambda _: cupy)
    monkeypatch.setattr(Graph, "graphs", 0)
    caches = module.cudnn_missing, module.default_convolution
    for function in caches:
        function.cache_clear()
    yield fake
    for function in caches:
        function.cache_clear()


def on_device(array):
    """A copy on a multiple of 16 bytes, in the same memory order."""
    order = np.argsort([-stride for stride in array.strides], kind="stable")
    lying = array.transpose(order)
    memory = np.empty(lying.nbytes + 64, np.uint8)
    start = -memory.__array_interface__["data"][0] % 64
    copied = memory[start : start + lying.nbytes].view(array.dtype).reshape(lying.shape)
    copied[...] = lying
    return copied.transpose(np.argsort(order)).view(DeviceArray)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)], ids=["first", "last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_definition(rng, shape, order, dtype):
    x, weight = (on_device(permuted(a, order)) for a in draw(rng, shape, dtype))
    convolution, options = cunorm.CudnnConvolution(), options_of(shape)
    y = convolution.forward(x, weight, **options)
    assert y.transpose(order).flags.c_contiguous
    sizes = convolve(abs(x), abs(weight), **options)
    check(y, convolve(x, weight, **options), sizes, weight[0].size, dtype, "y")
    dy = on_device(rng.standard_normal(y.shape).astype(dtype))
    expected = convolve_backward(dy, x, weight, **options)
    sizes = convolve_backward(abs(dy), abs(x), abs(weight), **options)
    dx = convolution.backward_input(dy, weight, x, **options)
    check(dx, expected[0], sizes[0], weight[:, 0].size, dtype, "dx")
    dweight = convolution.backward_weight(dy, x, weight, **options)
    check(dweight, expected[1], sizes[1], dy[:, 0].size, dtype, "dweight")
    assert (dx.dtype, dweight.dtype) == (dtype, dtype)

    assert Graph.graphs == 3
    convolution.forward(x, weight, **options)
    assert Graph.graphs == 3, "plans are kept"
    (_, plans) = convolution._own.__dict__[0]
    for graph, _ in plans.values():
        unwanted = {note.name for note in graph.notes}
        exact = {"TENSOR_CORE", "DOWN_CONVERT_INPUTS"} if dtype == np.float32 else set()
        assert unwanted == {"NONDETERMINISTIC"} | exact


def test_gaps_and_wider_weights(rng):
    shape = SHAPES[1]
    x, weight = (on_device(a) for a in draw(rng, shape, np.float16))
    convolution, options = cunorm.CudnnConvolution(), options_of(shape)
    expected = convolution.forward(x, weight, **options)
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype).view(DeviceArray)
    wide[..., ::2] = x
    memory = np.zeros(x.size + 1, x.dtype)
    odd = memory[1:].reshape(x.shape).view(DeviceArray)
    odd[...] = x
    for other in (wide[..., ::2], odd):
        actual = convolution.forward(other, weight.astype(np.float32), **options)
        np.testing.assert_array_equal(actual, expected)
    dweight = convolution.backward_weight(expected, x, weight.astype(np.float32), **options)
    assert dweight.dtype == np.float32


def test_what_cudnn_has_not(rng, monkeypatch):
    monkeypatch.setattr(Graph, "refused", "check_support")
    x, weight = (on_device(a) for a in draw(rng, SHAPES[0], np.float64))
    with pytest.raises(
        RuntimeError, match=r"cuDNN has no conv_fprop to float64 of shape .*: no eng"
    ):
        cunorm.CudnnConvolution().forward(x, weight, **options_of(SHAPES[0]))


def test_default():
    assert isinstance(module.default_convolution(True), cunorm.CudnnConvolution)
    assert isinstance(module.default_convolution(False), cunorm.MatmulConvolution)
    assert repr(copy.deepcopy(cunorm.CudnnConvolution())) == "CudnnConvolution()"


def test_without_the_library(monkeypatch, cudnn):
    """The front end is there, and finds that out when it is first asked something."""

    def backend_version():
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    monkeypatch.setattr(cudnn, "backend_version", backend_version)
    assert isinstance(module.default_convolution(True), cunorm.MatmulConvolution)
    with pytest.raises(RuntimeError, match="symbol cudnnGetVersion"):
        cunorm.CudnnConvolution()


@pytest.mark.parametrize("other", [None, types.ModuleType("cudnn")], ids=["none", "another"])
def test_without(monkeypatch, other):
    monkeypatch.setitem(sys.modules, "cudnn", other)
    assert isinstance(module.default_convolution(True), cunorm.MatmulConvolution)
    with pytest.raises(RuntimeError, match="cuDNN is missing here"):
        cunorm.CudnnConvolution()
