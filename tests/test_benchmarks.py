"""The benchmarks compare like with like, and say what they measured."""

import argparse
import json
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(FOLDER))

import contenders  # noqa: E402
import counters  # noqa: E402
import errors  # noqa: E402
import gpu  # noqa: E402
import plans  # noqa: E402
import predict  # noqa: E402
import report  # noqa: E402
import run  # noqa: E402
from shapes import FULL, HUGE, QUICK, Case  # noqa: E402

from cunorm.cuda import launch  # noqa: E402
from cunorm.geometry import batch_norm_geometry  # noqa: E402

try:
    import torch
except ImportError:
    torch = None

SMALL = [
    Case("batch_norm", (6, 4, 5, 3)),
    Case("batch_norm", (6, 5, 3, 4), channel_axis=-1),
    Case("batch_norm", (16, 7)),
    Case("group_norm", (3, 8, 5), groups=2),
    Case("group_norm", (3, 5, 8), channel_axis=-1, groups=2),
    Case("instance_norm", (3, 4, 5, 6)),
    Case("instance_norm", (3, 5, 6, 4), channel_axis=-1),
    Case("layer_norm", (7, 12)),
    Case("rms_norm", (7, 12)),
    Case("scale_shift", (3, 4, 5, 6)),
    Case("scale_shift", (3, 4, 5, 6), per_sample=True),
    Case("scale_shift", (3, 5, 6, 4), channel_axis=-1),
]


def arrays_of(case, result):
    """Arrays of a call's result: y, or the gradients, with channels where the case has them."""
    values = result if isinstance(result, tuple) else (result,)
    values = [v for v in values if isinstance(v, np.ndarray) or hasattr(v, "detach")]
    values = [v if isinstance(v, np.ndarray) else v.detach().numpy() for v in values]
    found = []
    for value in values:
        if value.ndim == len(case.shape) and value.shape != case.shape:
            value = np.moveaxis(value, 1, -1)  # PyTorch's
        found.append(value if value.shape == case.shape else value.reshape(case.parameters_shape))
    return found


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_contenders_agree(case):
    calls = contenders.calls_of(case, np, torch)
    assert contenders.COPY in calls
    for operation in reversed(case.operations):  # training changes running statistics
        named = {name: call for (o, name), call in calls.items() if o == operation}
        assert {contenders.OUT, contenders.FRESH, "NumPy"} <= set(named)
        assert torch is None or "PyTorch" in named
        results = {name: arrays_of(case, call()) for name, call in named.items()}
        ours = results[contenders.FRESH]
        for name, others in results.items():
            assert len(others) >= len(ours), name  # RMS norm has no dbias
            for a, b in zip(ours, others, strict=False):
                np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4, err_msg=f"{case}, {name}")


def test_cases():
    assert len(set(FULL)) == len(FULL)
    assert len(set(QUICK)) == len(QUICK)
    norms = {case.norm for case in FULL}
    assert norms == {case.norm for case in QUICK}
    for case in (Case("batch_norm", (64, 56, 56, 256), "float16", -1),
                 Case("group_norm", (256, 512, 56, 56), groups=32),
                 Case("scale_shift", (64, 256, 64, 64), per_sample=True),
                 Case("rms_norm", (131072, 128), "bfloat16")):  # fmt: skip
        assert case in FULL + HUGE
    grid = [c for c in FULL if c.norm == "batch_norm" and c.shape[:2] == (128, 1024)]
    assert {c.shape[2:] for c in grid if c.channel_axis == 1} >= {(16,), (256,)}


def result(case, copy, ours, rival, spread=0.05):
    def times(seconds):
        return {"low": seconds * (1 - spread), "median": seconds, "high": seconds * (1 + spread)}

    return {
        "case": case._asdict(),
        "bytes": 4 * case.elements,
        "copy": times(copy),
        "operations": {
            "forward": {
                contenders.OUT: times(ours),
                contenders.FRESH: times(2 * ours),
                "rival": times(rival),
            }
        },
    }


def test_report():
    first, second = SMALL[0], SMALL[1]
    found = report.rows([result(first, 1e-3, 2e-3, 8e-3), result(second, 1e-3, 4e-3, 4e-3)])
    assert [row.case for row in found] == [first, second]
    assert found[0].nbytes == 2 * 4 * first.elements
    assert found[0].to_copy == pytest.approx(2)
    assert found[0].percent == pytest.approx(50)
    assert found[0].worst == pytest.approx(2)
    assert found[1].worst == pytest.approx(0.5)
    lines = report.markdown(found).splitlines()
    assert str(second) in lines[2]  # it loses
    assert str(first) in lines[3]
    assert "1.00 times ours" in report.summary(found, 1 << 30)
    assert f"worst {second}, forward: 0.50" in report.summary(found, 1 << 30)
    assert "2.83 × the copy" in report.summary(found, 1)


def test_regressions():
    cases = [Case("batch_norm", (16, 4, number)) for number in (90, 100, 110, 120, 125)]

    def measured(*ours, spread=0.05):
        return report.rows(
            [result(case, 1e-3, time, 1e-3, spread) for case, time in zip(cases, ours, strict=True)]
        )

    before = measured(*[2e-3] * 5)
    assert report.regressions(before, before) == []
    assert report.regressions(measured(2.1e-3, 2e-3, 2e-3, 2e-3, 2e-3), before) == []
    assert report.regressions(measured(1e-3, 2e-3, 2e-3, 2e-3, 2e-3), before) == []
    noisy = measured(3e-3, 2e-3, 2e-3, 2e-3, 2e-3, spread=0.3)
    assert report.regressions(noisy, before) == []
    assert report.regressions(measured(*[6e-3] * 5), before) == []  # the machine's doing
    for rest in (2e-3, 6e-3):
        ((row, text),) = report.regressions(measured(1.5 * rest, *[rest] * 4), before)
        assert row.case == cases[0]
        assert text == f"{row}: 2.00 × the copy before, {1.5e3 * rest:.2f} now"
    other = report.rows([result(SMALL[1], 1e-3, 9e-3, 1e-3)])
    assert report.regressions(other, before) == []


@pytest.mark.parametrize(
    ("case", "cudnn"),
    [
        (Case("batch_norm", (64, 256, 56, 56), "float16"), True),
        (Case("batch_norm", (64, 256, 56, 56), "bfloat16"), False),
        (Case("batch_norm", (16, 1024)), False),
        (Case("batch_norm", (100_000, 3, 16)), True),
        (Case("batch_norm", (1_000_000, 3, 16)), False),
        (Case("instance_norm", (3, 4, 5, 6)), True),
        (Case("instance_norm", (3, 4, 5, 6), "float16"), False),
    ],
    ids=str,
)
def test_pytorch_by_cudnn_is_cudnn(case, cudnn):
    """Not PyTorch's own kernels under another name."""
    names = [name for name, _ in contenders._torch_paths(case, torch, on_gpu=True)]
    assert names == ["PyTorch, native", "PyTorch, cuDNN"][: 1 + cudnn]


class FakeGPU:
    """What gpu.py asks of CuPy, of a device on which one case fails and the host's times do."""

    def __init__(self):
        runtime = types.SimpleNamespace(getDeviceProperties=lambda _: {"name": b"NVIDIA Fake"})
        self.cuda = types.SimpleNamespace(runtime=runtime)
        self.get_default_memory_pool = lambda: types.SimpleNamespace(free_all_blocks=lambda: None)


@pytest.mark.parametrize(("only", "measured"), [("RMS norm", 3), ("nothing of that name", 0)])
def test_what_fails_on_a_gpu_is_put_down(tmp_path, monkeypatch, capsys, only, measured):
    """And the rest is measured and kept."""

    def result_of(case, *_):
        if case.shape[0] == 131072 and case.dtype == "bfloat16":
            raise RuntimeError("an illegal memory access")
        return result(case, 1e-3, 2e-3, 8e-3)

    def fail(*_):
        raise RuntimeError("lost")

    monkeypatch.setitem(sys.modules, "cupy", FakeGPU())
    monkeypatch.setattr(gpu.arrays, "cuda_missing", lambda: None)
    monkeypatch.setattr(gpu.measure, "machine", lambda _: {"cunorm": "0"})
    monkeypatch.setattr(gpu, "execute", lambda commands, *_: dict.fromkeys(commands, 1))
    monkeypatch.setattr(gpu, "compile_all", fail)
    monkeypatch.setattr(gpu, "host_times", fail)
    monkeypatch.setattr(gpu.run, "torch", None)
    monkeypatch.setattr(gpu.run, "gpu_timer", lambda _: None)
    monkeypatch.setattr(gpu.run, "result_of", result_of)
    monkeypatch.setattr(gpu, "CASES", [case for case in gpu.CASES if case.norm == "rms_norm"])
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", str(tmp_path), "--only", only])
    with pytest.raises(SystemExit) as stopped:
        gpu.main()
    assert stopped.value.code == 1
    (path,) = tmp_path.glob("*.json")
    assert path.name.startswith("gpu-nvidia-fake-20")
    record = json.loads(path.read_text())
    status = record["status"]
    assert status["tests"] == 1
    assert "lost" in status["compiling"]
    assert "lost" in status["host"]
    assert record["host"] == {}
    failed = [case for case, what in status.items() if "illegal" in str(what)]
    assert len(record["results"]) == measured
    assert len(failed) == (measured > 0)
    assert "status:" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are not to be seen")
def test_what_lasts_too_long_ends_with_its_children(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent("""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
        child.wait()
    """)]  # fmt: skip
    short = [sys.executable, "-c", "print('short'); raise SystemExit(3)"]
    statuses = gpu.execute({"long": command, "short": short}, tmp_path, 8)
    assert statuses == {"long": "stopped after 8 s", "short": 3}
    assert (tmp_path / "short.log").read_text() == "short\n"
    process = Path("/proc", (tmp_path / "long.log").read_text().split()[0], "stat")
    for _ in range(100):
        try:
            if process.read_text().split()[2] in "ZX":
                return
        except OSError:
            return
        time.sleep(0.1)
    pytest.fail("the child is still there")


def test_plots(tmp_path):
    found = report.rows([result(case, 1e-3, 2e-3, 8e-3) for case in SMALL])
    for path in report.plot(found, "title", tmp_path / "cpu"):
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("case", "operation", "passes", "launches"),
    [
        (Case("batch_norm", (64, 512, 28, 28), "float16"), "forward", 2, 1),
        (Case("batch_norm", (64, 512, 28, 28), "float16"), "backward", 3, 1),
        (Case("batch_norm", (64, 2, 1024, 1024)), "forward", 3, 3),
        (Case("batch_norm", (64, 2, 1024, 1024)), "inference", 2, 1),
        (Case("batch_norm", (64, 2, 1024, 1024)), "backward", 5, 3),
        (Case("layer_norm", (1024, 12288)), "forward", 2, 1),
        (Case("layer_norm", (1024, 12288)), "backward", 3, 2),
        (Case("layer_norm", (2, 1 << 22)), "forward", 3, 3),
        (Case("layer_norm", (2, 1 << 22)), "backward", 5, 4),
        (Case("scale_shift", (64, 256, 64, 64)), "forward", 2, 1),
        (Case("scale_shift", (64, 256, 64, 64)), "backward", 3, 2),
    ],
    ids=str,
)
def test_predictions(case, operation, passes, launches):
    gpu = next(gpu for gpu in predict.GPUS if gpu.name == "H200")
    predicted = predict.predicted(case, operation, gpu)
    assert predicted[:2] == (passes, launches)
    size = predict.dtype_of(case).itemsize * case.elements
    assert predicted.seconds == pytest.approx(passes * size / 4.8e12 + launches * 3e-6)


def test_other_plans():
    """They are timed beside those as they are, which stay."""
    geometry, lie = batch_norm_geometry((64, 28, 28, 256), 3), launch.Alignment(16, 0)
    device = launch.Device(90, 132, 227 << 10, 228 << 10, 60 << 20)

    def blocks():
        return launch.plan(geometry, np.dtype("float16"), 1, lie, device).blocks

    def timer(calls):
        return {name: {"median": float(call() or blocks_of[-1])} for name, call in calls.items()}

    before, blocks_of = blocks(), []
    values = plans.values_of("_COLUMN_BLOCKS=4")
    found = plans.ratios({"forward": lambda: blocks_of.append(blocks())}, {"four": values}, timer)
    assert blocks_of[0] == blocks() == before
    assert blocks_of[1] > 1.5 * before
    assert found == {"forward": [before, before / blocks_of[1]]}


def test_variants_are_compiled_with_their_plans(monkeypatch):
    found = []
    monkeypatch.setattr(gpu, "compile_kernels", lambda case: found.append((case, launch._SHARING)))
    plans.compile_variant((SMALL[0], {"_SHARING": 3}))
    assert found == [(SMALL[0], 3)]
    assert launch._SHARING == 2


@pytest.mark.skipif(sys.platform == "win32", reason="ncu's stand-in is a script")
@pytest.mark.parametrize("status", [0, 5])
def test_counters_are_read_of_calls(tmp_path, monkeypatch, status):
    """By what stands for ncu: a script that prints its arguments."""
    ncu = tmp_path / "ncu"
    ncu.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@"\nexit {status}\n')
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sys, "argv", ["counters.py", "--only", "RMS", "--output", str(tmp_path)])
    if status:
        with pytest.raises(SystemExit, match="--profile-from-start"):
            counters.main()
        return
    counters.main()
    called = (tmp_path / "counters-calls.txt").read_text().split("\n")
    assert called[called.index("-o") + 1] == str(tmp_path / "counters")
    assert called[-6:-1] == [sys.executable, counters.__file__, "--only", "RMS", "--call"]
    for name in "counters.txt", "counters-source.csv":
        assert str(tmp_path / "counters.ncu-rep") in (tmp_path / name).read_text().split("\n")


def test_calls_whose_counters_are_read(monkeypatch, capsys):
    """Are ours alone, once each."""
    log = []
    profiler = types.SimpleNamespace(
        start=lambda: log.append("start"), stop=lambda: log.append("stop")
    )
    fake = FakeGPU()
    fake.cuda.runtime.deviceSynchronize = lambda: None
    fake.cuda.profiler = profiler
    monkeypatch.setitem(sys.modules, "cupy", fake)

    def calls_of(*_):
        names = contenders.OUT, contenders.FRESH, "PyTorch"
        return {("forward", name): lambda name=name: log.append(name) for name in names}

    monkeypatch.setattr(contenders, "calls_of", calls_of)
    counters.call_all("RMS norm 16384")
    chosen = [str(case) for case in dict.fromkeys(gpu.CASES) if "RMS norm 16384" in str(case)]
    assert log == [contenders.OUT, "start", contenders.OUT, "stop"] * len(chosen)
    assert capsys.readouterr().out == "".join(f"{name}, forward\n" for name in chosen)


@pytest.mark.parametrize("text", ["_COLUMN_BLOCKS", "_COLUMN_BLOCKS=many", "_NOTHING=1", "plan=1"])
def test_no_other_plans(text):
    with pytest.raises(argparse.ArgumentTypeError, match=text.partition("=")[0]):
        plans.values_of(text)


def test_run(tmp_path):
    command = [sys.executable, FOLDER / "run.py", "--only", "8×16×4×4", "--seconds", "0.01"]
    done = subprocess.run(
        [*command, "--output", tmp_path], capture_output=True, text=True, check=True, timeout=300
    )
    assert "batch norm 8×16×4×4 float32" in done.stdout
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    (measured,) = record["results"]
    assert set(measured["operations"]) == {"forward", "inference", "backward"}
    assert all(
        t["low"] <= t["median"] <= t["high"]
        for times in measured["operations"].values()
        for t in times.values()
    )
    assert record["machine"]["processor"]
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}
    failed = subprocess.run([*command[:-3], "nothing"], capture_output=True, text=True, timeout=60)
    assert failed.returncode == 2
    assert "--only" in failed.stderr


def test_interrupted_run(tmp_path, monkeypatch, capsys):
    """What has been measured is kept."""

    def measured(case, *_):
        if case != QUICK[0]:
            raise KeyboardInterrupt
        return result(case, 1e-3, 2e-3, 8e-3)

    monkeypatch.setattr(run, "result_of", measured)
    monkeypatch.setattr(run, "compile_all", lambda cases: None)  # noqa: ARG005
    monkeypatch.setattr(sys, "argv", ["run.py", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"interrupted after 1 of {len(QUICK)} cases"):
        run.main()
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("*-unfinished.json"))
    assert [tuple(one["case"]["shape"]) for one in record["results"]] == [QUICK[0].shape]
    assert str(QUICK[0]) in capsys.readouterr().out
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}


@pytest.mark.parametrize("sweep", errors.SWEEPS, ids=lambda sweep: sweep.title)
def test_errors(sweep):
    """Errors of all are measured, and ours do not grow with the mean of x, jumps and lengths."""
    shorter = sweep._replace(numbers=tuple(n for n in sweep.numbers if n < 2e6)[::3])
    found = list(errors.measured(shorter, 2048))
    assert len(found) == len(shorter.numbers)
    assert all(one.keys() == errors.contenders().keys() for one in found)
    assert all(np.isfinite(list(one.values())).all() for one in found)
    if "mean of dy" not in sweep.title:
        assert max(one["cunorm"] for one in found) < 10


def test_errors_are_drawn(tmp_path):
    drawn = {s.title: [dict.fromkeys(errors.contenders(), 2.0)] * len(s.numbers)
             for s in errors.SWEEPS}  # fmt: skip
    errors.plot(drawn, tmp_path / "errors.png")
    assert (tmp_path / "errors.png").stat().st_size > 10_000
    exact = np.array([1.0, -2.0])
    assert errors.error(np.array([1, -2], np.float32), exact) == 0
    assert errors.error(np.nextafter(exact.astype(np.float32), -3), exact) == 2.0
    assert errors.error(np.array([1, np.nan], np.float32), exact) == np.inf
