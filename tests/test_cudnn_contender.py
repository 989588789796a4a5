"""CuDNN's norms as the benchmarks call them, through a stand-in for its front end.

It has what `benchmarks/frontend.py` uses of nvidia-cudnn-frontend, with the names and arguments
of that package, and computes in float64, by the definitions, from the addresses it is given.
"""

import sys
import types
from enum import Enum

import numpy as np
import pytest
from test_benchmarks import SMALL, arrays_of, contenders  # which knows where benchmarks are
from test_cudnn_convolution import DataType, DeviceArray, Tensor

frontend = contenders.frontend

CASES = [case for case in SMALL if case.norm not in ("group_norm", "scale_shift")]


def normalized(x, axes, eps, centered=True):
    mean = x.mean(axes, keepdims=True) if centered else np.zeros((1,) * 4)
    inv_std = 1 / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + eps)
    return (x - mean) * inv_std, mean, inv_std


def batchnorm(input, scale, bias, in_running_mean, in_running_var, epsilon, momentum):  # noqa: A002
    v, mean, inv_std = normalized(input, (0, 2, 3), epsilon)
    n = input.size // input.shape[1]
    var = (inv_std**-2 - epsilon) * n / (n - 1)
    return (
        v * scale + bias, mean, inv_std, (1 - momentum) * in_running_mean + momentum * mean,
        (1 - momentum) * in_running_var + momentum * var,
    )  # fmt: skip


def batchnorm_inference(input, mean, inv_variance, scale, bias):  # noqa: A002
    return (input - mean) * inv_variance * scale + bias


def of(axes, centered=True):
    """A forward operation that normalizes over these axes."""

    def forward(input, scale, epsilon, bias=0.0):  # noqa: A002
        v, mean, inv_std = normalized(input, axes, epsilon, centered)
        y = v * scale + bias
        return (y, mean, inv_std) if centered else (y, inv_std)

    return forward


def back(axes, summed, centered=True):
    """Its backward operation, with gradients of the parameters that are sums over others."""

    def backward(grad, input, scale, inv_variance, mean=0.0):  # noqa: A002
        v, weighted = (input - mean) * inv_variance, grad * scale
        dx = weighted - v * (weighted * v).mean(axes, keepdims=True)
        if centered:
            dx -= weighted.mean(axes, keepdims=True)
        dweight = (grad * v).sum(summed, keepdims=True)
        dbias = grad.sum(summed, keepdims=True)
        return (dx * inv_variance, dweight, dbias) if centered else (dx * inv_variance, dweight)

    return backward


OPERATIONS = {
    "batchnorm": batchnorm,
    "batchnorm_inference": batchnorm_inference,
    "batchnorm_backward": back((0, 2, 3), (0, 2, 3)),
    "instancenorm": of((2, 3)),
    "instancenorm_backward": back((2, 3), (0, 2, 3)),
    "layernorm": of((1, 2, 3)),
    "layernorm_backward": back((1, 2, 3), (0,)),
    "rmsnorm": of((1, 2, 3), centered=False),
    "rmsnorm_backward": back((1, 2, 3), (0,), centered=False),
}
PHASE = Enum("norm_forward_phase", "TRAINING INFERENCE")


class Graph:
    """Like `cudnn.pygraph`, of one norm."""

    steps = ("validate", "build_operation_graph", "create_execution_plans", "check_support",
             "build_plans")  # fmt: skip
    refused = ""

    def __init__(self, *, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert intermediate_data_type is compute_data_type is DataType.FLOAT
        self.io, self.handle, self.done, self.by_value = io_data_type, handle, [], set()

    def tensor(self, *, name, dim, stride, data_type, is_pass_by_value):
        assert is_pass_by_value == (name in ("epsilon", "momentum"))
        assert len(dim) == len(stride) == 4
        return Tensor(dim, stride, data_type)

    def __getattr__(self, name):
        if name in OPERATIONS:
            return lambda **arguments: self.norm(**arguments)
        if name not in self.steps:
            raise AttributeError(name)

        def step(*_):
            assert name == self.steps[len(self.done)], "in this order"
            self.done.append(name)
            if self.operation == self.refused:
                raise RuntimeError("no engine")

        return step

    def norm(self, *, name, norm_forward_phase=None, has_dbias=True, **inputs):
        tracks_nothing = name in ("instancenorm", "layernorm", "rmsnorm")
        assert norm_forward_phase is (PHASE.TRAINING if tracks_nothing else None)
        assert has_dbias == (name != "rmsnorm_backward")
        self.operation, self.inputs = name, inputs
        data = inputs["input"]
        assert data.data_type is self.io
        assert all(t.dim == data.dim for n, t in inputs.items() if n == "grad")
        if name == "batchnorm_inference":
            self.results = [Tensor()]
            return self.results[0]
        number = {"batchnorm": 5, "rmsnorm": 2, "rmsnorm_backward": 2}.get(name, 3)
        self.results = [Tensor() for _ in range(number)]
        return [*self.results, None] if name == "rmsnorm_backward" else self.results

    def get_workspace_size(self):
        return 0

    def execute(self, pack, workspace, *, handle):
        assert self.done == list(self.steps)
        assert handle is self.handle
        assert handle.stream == 17
        assert type(workspace) is int
        assert set(pack) == {*self.inputs.values(), *self.results}
        inputs = {n: t.at(pack[t]).astype(np.float64) for n, t in self.inputs.items()}
        for name in ("epsilon", "momentum"):
            if name in inputs:
                inputs[name] = inputs[name].item()
        values = OPERATIONS[self.operation](**inputs)
        values = values if isinstance(values, tuple) else (values,)
        for tensor, value in zip(self.results, values, strict=True):
            assert tensor.output
            assert tuple(tensor.dim) == value.shape
            tensor.at(pack[tensor])[...] = value


@pytest.fixture
def xp(monkeypatch):
    cudnn = types.ModuleType("cudnn")
    cudnn.pygraph, cudnn.data_type, cudnn.norm_forward_phase = Graph, DataType, PHASE
    cudnn.heur_mode = Enum("heur_mode", "A FALLBACK")
    cudnn.create_handle = lambda: types.SimpleNamespace(stream=0)
    cudnn.set_stream = lambda handle, stream: setattr(handle, "stream", stream)
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)

    def on_device(make):
        return lambda *arguments: make(*arguments).view(DeviceArray)

    frontend._handle.cache_clear()
    yield types.SimpleNamespace(
        float32=np.float32,
        **{name: on_device(getattr(np, name)) for name in
           ("asarray", "empty", "zeros", "ones", "zeros_like", "ones_like")},
        cuda=types.SimpleNamespace(get_current_stream=lambda: types.SimpleNamespace(ptr=17)),
    )  # fmt: skip
    frontend._handle.cache_clear()


def arguments_of(case, xp):
    """X, dy, weight and bias as `contenders.calls_of` draws them."""
    x, dy = (
        contenders._numbers(case.elements, seed, np).reshape(case.shape).astype(
            contenders.dtype_of(case)
        )
        for seed in (0, 1)
    )  # fmt: skip
    vectors = np.random.default_rng(2).standard_normal((2, *case.parameters_shape), np.float32)
    return [xp.asarray(array.copy()) for array in (x, dy, *vectors)]


def in_their_shape(case, outputs):
    """What cuDNN has computed, of four axes, with those of x and its parameters."""
    first, *parameters = map(np.asarray, outputs)
    if case.channel_axis == -1:
        first = first.transpose(0, 2, 3, 1)
    return [first.reshape(case.shape), *(p.reshape(case.parameters_shape) for p in parameters)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_ours(xp, case, dtype):
    case = case._replace(dtype=dtype)
    calls = frontend.calls_of(case, xp, *arguments_of(case, xp))
    assert set(calls) == {(operation, frontend.NAME) for operation in case.operations}
    ours = contenders.calls_of(case, np, None)
    tolerance = {"float32": 2e-4, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    for operation in ("forward", "backward"):
        outputs = calls[operation, frontend.NAME]()
        again = calls[operation, frontend.NAME]()
        assert not np.may_share_memory(outputs[0], again[0])
        number = {"forward": 1, "backward": 3 - (case.norm == "rms_norm")}[operation]
        found = in_their_shape(case, outputs[:number])
        expected = arrays_of(case, ours[operation, contenders.FRESH]())[:number]
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(
                a.astype(np.float32), b.astype(np.float32), rtol=tolerance, atol=tolerance
            )
    if case.norm == "batch_norm":  # in inference with the statistics that training left
        y, trained = (calls[o, frontend.NAME]()[0] for o in ("inference", "forward"))
        np.testing.assert_allclose(
            y.astype(np.float32), trained.astype(np.float32), rtol=tolerance, atol=tolerance
        )


def test_what_cudnn_has_not(xp, monkeypatch):
    monkeypatch.setattr(Graph, "refused", "batchnorm_backward")
    case = CASES[0]
    warning = "cuDNN has no backward of batch norm 6×4×5×3 float32: RuntimeError: no engine"
    with pytest.warns(UserWarning, match=warning):
        calls = frontend.calls_of(case, xp, *arguments_of(case, xp))
    assert [operation for operation, _ in calls] == ["forward", "inference"]
    others = [case for case in SMALL if case not in CASES]
    assert {case.norm for case in others} == {"group_norm", "scale_shift"}
    for case in others:
        assert frontend.calls_of(case, xp, *arguments_of(case, xp)) == {}
