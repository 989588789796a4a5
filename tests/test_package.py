"""The package itself: what importing costs, what is public, wheel, README."""

import inspect
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest

import cunorm

CHECKOUT = Path(__file__).parent.parent

PUBLIC = {
    "BatchNorm",
    "BatchNormSaved",
    "Communicator",
    "ConvBatchNorm",
    "ConvBatchNormSaved",
    "Convolution",
    "CudnnConvolution",
    "GroupNorm",
    "GroupNormSaved",
    "InstanceNorm",
    "InstanceNormSaved",
    "LayerNorm",
    "LayerNormSaved",
    "MatmulConvolution",
    "Moments",
    "RMSNorm",
    "RMSNormSaved",
    "ScaleShift",
    "SyncBatchNorm",
    "__version__",
    "as_communicator",
    "batch_norm_backward",
    "batch_norm_backward_reduce",
    "batch_norm_backward_transform",
    "batch_norm_double_backward",
    "batch_norm_forward",
    "batch_norm_statistics",
    "batch_norm_transform",
    "conv_batch_norm_backward",
    "conv_batch_norm_forward",
    "fold_batch_norm",
    "get_num_threads",
    "group_norm_backward",
    "group_norm_forward",
    "instance_norm_backward",
    "instance_norm_forward",
    "is_available",
    "layer_norm_backward",
    "layer_norm_double_backward",
    "layer_norm_forward",
    "merge_moments",
    "rms_norm_backward",
    "rms_norm_forward",
    "scale_shift_backward",
    "scale_shift_forward",
    "set_num_threads",
    "show_config",
    "update_running_statistics",
}

SIGNATURES = {
    "batch_norm_forward": "(x, weight=None, bias=None, running_mean=None, running_var=None, *, "
    "training=True, momentum=None, exponential_average_factor=None, eps=1e-05, correction=1, "
    "channel_axis=1, out=None)",
    "batch_norm_backward": "(dy, x, saved, weight=None, *, output_mask=(True, True, True), "
    "out=None)",
    "batch_norm_double_backward": "(gdx, gdweight, gdbias, dy, x, saved, weight=None)",
    "layer_norm_double_backward": "(gdx, gdweight, gdbias, dy, x, saved, weight=None)",
    "batch_norm_statistics": "(x, *, channel_axis=1, dtype=None)",
    "merge_moments": "(moments)",
    "batch_norm_transform": "(x, mean, inv_std, weight=None, bias=None, *, channel_axis=1, "
    "out=None)",
    "batch_norm_backward_reduce": "(dy, x, mean, *, channel_axis=1)",
    "batch_norm_backward_transform": "(dy, x, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, "
    "*, channel_axis=1, out=None)",
    "layer_norm_forward": "(x, weight=None, bias=None, *, axis=-1, eps=1e-05, out=None)",
    "layer_norm_backward": "(dy, x, saved, weight=None, *, output_mask=(True, True, True), "
    "out=None)",
    "rms_norm_forward": "(x, weight=None, *, axis=-1, eps=None, weight_offset=0.0, out=None)",
    "rms_norm_backward": "(dy, x, saved, weight=None, *, output_mask=(True, True), out=None)",
    "group_norm_forward": "(x, num_groups, weight=None, bias=None, *, channel_axis=1, eps=1e-05, "
    "out=None)",
    "group_norm_backward": "(dy, x, saved, weight=None, *, output_mask=(True, True, True), "
    "out=None)",
    "instance_norm_forward": "(x, weight=None, bias=None, running_mean=None, running_var=None, *, "
    "use_input_stats=True, momentum=None, exponential_average_factor=None, eps=1e-05, "
    "correction=1, channel_axis=1, out=None)",
    "instance_norm_backward": "(dy, x, saved, weight=None, *, output_mask=(True, True, True), "
    "out=None)",
    "scale_shift_forward": "(x, scale, shift=None, *, channel_axis=1, out=None)",
    "scale_shift_backward": "(dy, x, scale, *, channel_axis=1, output_mask=(True, True, True), "
    "out=None)",
    "fold_batch_norm": "(conv_weight, conv_bias, weight, bias, running_mean, running_var, *, "
    "eps=1e-05, channel_axis=0, groups=1)",
    "conv_batch_norm_forward": "(x, conv_weight, weight=None, bias=None, running_mean=None, "
    "running_var=None, *, stride=1, padding=0, dilation=1, groups=1, convolution=None, "
    "training=True, momentum=None, exponential_average_factor=None, eps=1e-05, correction=1)",
    "conv_batch_norm_backward": "(dy, x, conv_weight, saved, weight=None, *, "
    "output_mask=(True, True, True, True))",
    "update_running_statistics": "(running_mean, running_var, mean, var, count, *, "
    "momentum=None, exponential_average_factor=None, correction=1)",
}


def run_python(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, **options
    )


def test_importing_imports_neither_cupy_nor_numba():
    code = """
import sys
import cunorm
cunorm.BatchNorm(3), cunorm.RMSNorm(3), cunorm.InstanceNorm(3)
heavy = {"cupy", "numba", "llvmlite", "torch", "jax", "ml_dtypes"} & set(sys.modules)
assert not heavy, heavy
"""
    run_python("-c", code)


def test_public_names_and_signatures():
    """A rename is a decision: change it here too."""
    assert set(cunorm.__all__) == PUBLIC
    for name, signature in SIGNATURES.items():
        function = getattr(cunorm, name)
        found = inspect.signature(function)
        bare = found.replace(
            parameters=[p.replace(annotation=p.empty) for p in found.parameters.values()],
            return_annotation=found.empty,
        )
        assert str(bare) == signature, name
    for norm in ("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"):
        assert getattr(cunorm, f"{norm}Saved")._fields[:2] == ("mean", "inv_std")
    assert cunorm.Moments._fields == ("count", "mean", "m2")


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_docstrings(name):
    """Every public function says what it takes, gives back and raises."""
    thing = getattr(cunorm, name)
    doc = inspect.getdoc(thing)
    assert doc
    if "_norm_" in name or name.startswith(("scale_shift", "merge", "update")):
        for section in ("Parameters\n---", "Raises\n---"):
            assert section in doc, section
        for parameter in inspect.signature(thing).parameters:
            assert re.search(rf"\b{parameter}\b", doc), parameter


def test_show_config(capsys):
    cunorm.show_config()
    text = capsys.readouterr().out
    for wanted in (cunorm.__version__, np.__version__, "threads", "cpu backend", "cuda backend"):
        assert wanted in text
    if not cunorm.is_available("cuda"):
        assert re.search(r"cuda backend +missing: .+", text)
    assert cunorm.is_available("cpu")


def test_readme(tmp_path, monkeypatch):
    """Its snippets run, one after another, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) >= 5
    namespace = {}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), namespace)
    whole, _ = cunorm.batch_norm_forward(namespace["x"])
    np.testing.assert_allclose(np.concatenate(namespace["y"]), whole, atol=1e-5)


def test_oldest_versions():
    """What `make test-package` tests with is what pyproject.toml promises."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    promised = dict(dependency.split(">=") for dependency in project["dependencies"])
    pins = re.findall(
        r"^(\w+)==([\d.]+);", (CHECKOUT / "tests/oldest.txt").read_text(), re.MULTILINE
    )
    assert {name: version.removesuffix(".0") for name, version in pins} == promised


def test_wheel(tmp_path):
    """Holds the package with its type marker, and nothing else at the top."""
    run_python("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path),
               str(CHECKOUT), cwd=tmp_path)  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "cunorm").rglob("*.py")}
    sources |= {f"cunorm/kernels/{path.name}" for path in (CHECKOUT / "kernels").iterdir()}
    assert sources <= names
    assert "cunorm/py.typed" in names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"cunorm", f"cunorm-{cunorm.__version__}.dist-info"}
