"""docs/migration.md: both sides of its tables do the same, and its snippets run."""

import copy
import importlib.util
import json
import os
import re

import numpy as np
import pytest
from test_package import CHECKOUT, run_python

import cunorm

DOCUMENT = (CHECKOUT / "docs" / "migration.md").read_text(encoding="utf-8")
SECTIONS = {
    part.partition("\n")[0]: part for part in re.split(r"^## ", DOCUMENT, flags=re.MULTILINE)[1:]
}
#: What the code of a section needs.
NEEDED = {"PyTorch": "torch", "Keras and TensorFlow": "keras", "Flax": "flax"}


def rows(section):
    """Code on the left and on the right of its table."""
    return re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", SECTIONS[section], re.MULTILINE)


def needed(section):
    name = NEEDED.get(section)
    if name is not None and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed (the extra interop)")


@pytest.mark.parametrize("section", [name for name in SECTIONS if "```python" in SECTIONS[name]])
def test_snippets(section, tmp_path):
    """In a process of its own: a backend of Keras is chosen once."""
    needed(section)
    code = "\n".join(re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL))
    run_python(
        "-c", f"import cunorm\nimport numpy as np\n{code}", cwd=tmp_path,
        env=os.environ | {"KERAS_BACKEND": "jax"},
    )  # fmt: skip


def assert_close(actual, expected, what, tolerance=2e-5):
    np.testing.assert_allclose(
        np.asarray(actual), np.asarray(expected), rtol=tolerance, atol=tolerance, err_msg=str(what)
    )


@pytest.mark.parametrize(("theirs", "ours"), rows("PyTorch"), ids=str)
def test_pytorch(theirs, ours):
    needed("PyTorch")
    import torch
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(0)
    names = {"torch": torch, "nn": nn, "F": functional, "cunorm": cunorm}
    x = 3 * torch.randn(7, 8, 5, 6) + 1
    if not theirs.startswith("nn."):
        values = {name: torch.rand(8) + 0.5 for name in ("mean", "var", "weight", "bias")}
        found = []
        for code in (ours, theirs):
            own = copy.deepcopy(values)
            found.append((eval(code, names | own | {"x": x}), own))
        assert_close(found[0][0], found[1][0], "result")
        for name in values:
            assert_close(found[0][1][name], found[1][1][name], name)
        return
    their_layer, our_layer = eval(theirs, names), eval(ours, names)
    with torch.no_grad():
        for parameter in their_layer.parameters():
            parameter.uniform_(0.5, 1.5)
    our_layer.load_state_dict(their_layer.state_dict())
    for batch in (x, 2 * x - 3):
        batch = batch.clone().requires_grad_()
        expected = their_layer(batch)
        dy = torch.randn_like(expected)
        expected.backward(dy)
        assert_close(our_layer(batch.detach()), expected.detach(), "y")
        assert_close(our_layer.backward(dy), batch.grad, "dx")
        for name, parameter in their_layer.named_parameters():
            assert_close(our_layer.gradients[name], parameter.grad, name, 1e-4)
            parameter.grad = None
        state = their_layer.state_dict()
        if isinstance(their_layer, nn.InstanceNorm2d):  # it does not count its batches
            state.pop("num_batches_tracked", None)
        for name, value in state.items():
            assert_close(our_layer.state_dict()[name], value, name)
    their_layer.eval(), our_layer.eval()
    assert_close(our_layer(x), their_layer(x).detach(), "y of inference")


KERAS = """
import json, sys
import keras, numpy as np
import cunorm

theirs, ours = (eval(code) for code in json.loads(sys.argv[1]))
rng = np.random.default_rng(0)
x = rng.normal(1, 3, (7, 5, 6, 8)).astype(np.float32)
theirs.build(x.shape)
weights = [rng.uniform(0.5, 1.5, w.shape).astype(np.float32) for w in theirs.get_weights()]
theirs.set_weights(weights)
names = list(ours.state_dict())
names = [name for name in names if name != "num_batches_tracked"]
ours.load_state_dict(dict(zip(names, weights, strict=True)))
for batch in (x, 2 * x - 3):
    y = theirs(batch, training=True)
    np.testing.assert_allclose(ours(batch), y, rtol=2e-5, atol=2e-5)
    for name, value in zip(names, theirs.get_weights(), strict=True):
        np.testing.assert_allclose(ours.state_dict()[name], value, rtol=2e-5, err_msg=name)
ours.eval()
np.testing.assert_allclose(ours(x), theirs(x, training=False), rtol=2e-5, atol=2e-5)
"""


@pytest.mark.parametrize("row", rows("Keras and TensorFlow")[:-1], ids=str)
def test_keras(row):
    needed("Keras and TensorFlow")
    run_python("-c", KERAS, json.dumps(row), env=os.environ | {"KERAS_BACKEND": "jax"})


TENSORFLOW = """
import json, sys
import numpy as np
import tensorflow as tf
import cunorm

theirs, ours = json.loads(sys.argv[1])
rng = np.random.default_rng(0)
x = rng.normal(1, 3, (7, 5, 6, 8)).astype(np.float32)
mean, var, weight, bias = rng.uniform(0.5, 1.5, (4, 8)).astype(np.float32)
expected = eval(theirs)
found = eval(ours)[0], mean, var
for ours, theirs in zip(found, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
"""


@pytest.mark.parametrize("row", rows("Keras and TensorFlow")[-1:], ids=str)
def test_tensorflow(row):
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed (too large for the extra interop)")
    run_python("-c", TENSORFLOW, json.dumps(row))


@pytest.mark.parametrize(("theirs", "ours"), rows("Flax"), ids=str)
def test_flax(rng, theirs, ours):
    needed("Flax")
    import jax
    from flax import linen

    theirs, ours = eval(theirs, {"linen": linen}), eval(ours, {"cunorm": cunorm})
    x = rng.normal(1, 3, (7, 5, 6, 8)).astype(np.float32)
    variables = theirs.init(jax.random.key(0), x)
    variables["params"] = jax.tree.map(lambda w: w + 0.5, variables["params"])
    names = {"weight": "scale", "bias": "bias"}
    params = {o: variables["params"].get(t) for o, t in names.items()}
    ours.load_state_dict(ours.state_dict() | {o: v for o, v in params.items() if v is not None})
    for batch in (x, 2 * x - 3):
        y, updated = theirs.apply(variables, batch, mutable=["batch_stats"])
        variables |= updated
        assert_close(ours(batch), y, "y", 1e-4)
        for name, value in variables.get("batch_stats", {}).items():
            assert_close(ours.state_dict()[f"running_{name}"], value, name, 1e-4)


def test_every_row_is_run():
    """A table whose code the tests do not find would prove nothing."""
    found = [len(rows(section)) for section in NEEDED]
    assert found == [20, 8, 6]
