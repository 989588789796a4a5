"""The examples: each runs, without a warning, and what it prints is right."""

import importlib.util
import os
import re
import sys

import numpy as np
import pytest
from test_package import CHECKOUT, run_python

EXAMPLES = CHECKOUT / "examples"


def run_example(name, *arguments):
    """What it prints."""
    return run_python(
        str(EXAMPLES / f"{name}.py"), *arguments, env=os.environ | {"PYTHONWARNINGS": "error"}
    ).stdout


def numbers(printed):
    return [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", printed)]


def test_example_trains(tmp_path):
    """The demo, shortened: it learns, and draws its curves."""
    path = tmp_path / "digits.png"
    result = run_python(
        str(CHECKOUT / "examples" / "train_digits.py"), "--epochs", "4", "--plot", str(path),
        env=os.environ | {"PYTHONWARNINGS": "error"},
    )  # fmt: skip
    accuracy = float(re.search(r"test accuracy with batch norm +([0-9.]+)%", result.stdout)[1])
    assert accuracy >= 97
    assert path.read_bytes().startswith(b"\x89PNG")


def test_example_of_memory():
    """One result of a convolution less for each pair of layers, and the same losses."""
    script = CHECKOUT / "examples" / "conv_memory.py"
    printed = run_python(str(script), "--steps", "3").stdout
    less = re.search(r"less +([0-9.]+) MB +([0-9.]+) MB", printed)
    results = 128 * (32 + 64) * 8 * 8 * 4 / 1e6
    assert abs(float(less[1]) - results) < 0.05 * results, printed
    assert float(less[2]) > 0, printed
    assert float(re.search(r"difference of losses: (\S+)", printed)[1]) < 1e-6


def test_example_of_a_gradient_penalty():
    """Its gradients are right, and training holds the critic's near 1."""
    script = CHECKOUT / "examples" / "gradient_penalty.py"
    printed = run_python(str(script), "--steps", "200").stdout
    assert float(re.search(r"differences of the loss: (\S+)", printed)[1]) < 1e-7
    step, loss, length = printed.split("\n")[-2].split()
    assert step == "200"
    assert float(loss) < -1, printed
    assert 0.8 < float(length) < 1.3, printed


def test_torch_function():
    pytest.importorskip("torch", reason="torch is not installed (the extra interop)")
    printed = run_example("torch_function")
    assert numbers(printed)[0] < 1e-14
    assert "\ngradcheck passed\ngradgradcheck passed\n" in printed
    with_graph = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import torch
from torch_function import BatchNorm
x = torch.randn(6, 3, requires_grad=True)
y = BatchNorm.apply(x, torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3), True)
(gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
gradient.pow(2).sum().backward(create_graph=True)
assert x.grad.any()
"""
    run_python("-c", with_graph)


def test_jax_custom_vjp():
    pytest.importorskip("jax", reason="jax is not installed (the extra interop)")
    errors = numbers(run_example("jax_custom_vjp"))
    assert len(errors) == 3
    assert max(errors) < 1e-6


def test_thinc_layer():
    pytest.importorskip("thinc", reason="thinc is not installed (the extra interop)")
    losses = numbers(run_example("thinc_layer"))[1::2]
    assert losses[-1] < 0.05 < losses[0]
    resumed = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import numpy as np
from thinc_layer import BatchNorm
x = np.ones((4, 3), np.float32)
BatchNorm(3).from_bytes(BatchNorm(3).to_bytes()).begin_update(x)
"""
    run_python("-c", resumed)


def test_chainer_layer():
    printed = run_example("chainer_layer")
    assert "standard deviation [1. 1. 1. 1.]" in printed
    assert numbers(printed.partition("of x at most")[2])[0] < 1e-5


def test_cuda_graph(monkeypatch):
    """Its step, on NumPy arrays: the same mathematics. `test_gpu.py` captures it."""
    monkeypatch.setitem(sys.modules, "cupy", np)
    spec = importlib.util.spec_from_file_location("cuda_graph", EXAMPLES / "cuda_graph.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = np.random.default_rng(0).standard_normal((400, 8), dtype=np.float32)
    step = module.Step(x, 3 * x + 2)
    losses = []
    for _ in range(101):
        step()
        losses.append(float(step.loss))
    assert losses[-1] < 0.02 < 5 < losses[0]
