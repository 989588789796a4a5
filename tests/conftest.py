"""Settings shared by all tests.

The tests of the public functions run on any backend: ``pytest --backend cuda-on-cpu``
executes the CUDA kernels on the CPU, ``--backend gpu`` on a GPU.
"""

import os
from pathlib import Path

import pytest

# Kernels that tests compile stay out of the package.
os.environ["NUMBA_CACHE_DIR"] = str(Path(__file__).parent.parent / ".cache" / "numba")

import numpy as np
from hypothesis import HealthCheck, settings

import cunorm

# A first example may compile kernels, which takes seconds.
settings.register_profile(
    "cunorm", deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
settings.load_profile("cunorm")

#: Files whose tests run on every backend, and those for CUDA backends alone.
EVERYWHERE = {
    "test_batch_norm.py",
    "test_conv_batch_norm.py",
    "test_double_backward.py",
    "test_errors.py",
    "test_fold_batch_norm.py",
    "test_gradients.py",
    "test_group_norm.py",
    "test_layer_norm.py",
    "test_layers.py",
    "test_numerics.py",
    "test_properties.py",
    "test_running_statistics.py",
    "test_scale_shift.py",
}
CUDA_ONLY = {"test_cuda_kernels.py", "test_cuda_mutants.py", "test_cuda_traffic.py"}


def pytest_addoption(parser):
    parser.addoption("--backend", choices=["cpu", "cuda-on-cpu", "gpu"], default="cpu")
    parser.addoption("--thorough", action="store_true", help="compile for every architecture")
    parser.addoption("--kernels", type=Path, help="folder of other CUDA sources to execute")


def pytest_configure(config):
    config.addinivalue_line("markers", "cpu: of the CPU backend alone")
    config.addinivalue_line("markers", "gpu: needs a GPU")
    config.addinivalue_line("markers", "thorough: lasts long, left out unless --thorough is given")
    config.addinivalue_line("markers", "numpy: of what CuPy's arrays do not have, not on a GPU")


def pytest_ignore_collect(collection_path, config):
    """Whether a file has no test for the backend: it is not imported then."""
    backend, name = config.getoption("--backend"), collection_path.name
    if backend == "cpu" or not name.startswith("test_"):
        return None
    known = EVERYWHERE | CUDA_ONLY | ({"test_gpu.py"} if backend == "gpu" else set())
    return None if name in known else True


def pytest_collection_modifyitems(config, items):
    backend = config.getoption("--backend")
    kept, left = [], []
    for item in items:
        if backend == "cpu":
            right = item.path.name not in CUDA_ONLY
        else:
            right = item.path.name in EVERYWHERE | CUDA_ONLY and "cpu" not in item.keywords
        if backend == "gpu":
            right = (right or item.path.name == "test_gpu.py") and "numpy" not in item.keywords
        right = right and ("thorough" not in item.keywords or config.getoption("--thorough"))
        (kept if right else left).append(item)
        if backend != "gpu" and "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: pytest --backend gpu"))
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@pytest.fixture(scope="session")
def backend(request):
    return request.config.getoption("--backend")


@pytest.fixture(scope="session", autouse=True)
def on_backend(backend, request):
    """Make NumPy arrays compute on the backend that is tested."""
    monkeypatch = pytest.MonkeyPatch()
    stands_in = None
    if backend == "cuda-on-cpu":
        from harness import Harness

        stands_in = Harness(request.config.getoption("--kernels"))
        stands_in.install(monkeypatch)
    elif backend == "gpu":
        import on_gpu

        on_gpu.install(monkeypatch)
    yield stands_in
    monkeypatch.undo()


@pytest.fixture(autouse=True)
def _end_with_the_gpu(backend):
    """After a kernel that failed no other runs in this process: let that test be the last."""
    yield
    if backend != "gpu":
        return
    import cupy

    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:  # which is named then, and replaced
            os._exit(1)
        pytest.exit(f"the GPU is lost to this process: {error}", 1)


@pytest.fixture
def rng():
    return np.random.default_rng(20260101)


@pytest.fixture
def threads():
    """Restore the number of threads after a test that sets it."""
    before = cunorm.get_num_threads()
    yield cunorm.set_num_threads
    cunorm.set_num_threads(before)


def _cut_for_cpu(monkeypatch, resident, streaming):
    from cunorm.cpu import backward, double_backward, plan, pool, rows, transform

    size = 1 << 40 if resident else 0
    for name, value in {
        "_SEGMENT_CHUNK": 96,
        "_COLUMN_CHUNK_BYTES": (2048,) * 4,
        "_COLUMN_CHUNK_ROWS": 6,
        "_MOST_BLOCK_POSITIONS": 64,
        "_FOLDED_POSITIONS": 48,
        "_PART_BYTES": 512,
        "_MOST_PARTS": 5,
        "_TASK_BYTES": 256,
        "_SWEEP_BYTES": 256,
        "_RESIDENT_CHANNEL_BYTES": size,
        "_RESIDENT_RUNS_BYTES": size,
        "_BLOCK_BYTES": size,
        "_RESIDENT_COLUMNS_BYTES": size,
        "_TWICE_PIECES": 1 << 40,
    }.items():
        assert hasattr(plan, name), name
        monkeypatch.setattr(plan, name, value)
    for name in ("_BYTES_PER_LISTENER", "_BYTES_PER_SLEEPER"):
        assert hasattr(pool, name), name
        monkeypatch.setattr(pool, name, 64)
    assert hasattr(rows, "_ADDED_ELEMENTS")
    monkeypatch.setattr(rows, "_ADDED_ELEMENTS", 8)
    for module in (transform, backward, double_backward):
        monkeypatch.setattr(module, "STREAMING_BYTES", 0 if streaming else 1 << 40)


def _cut_for_cuda(monkeypatch, resident, _streaming):
    from cunorm.cuda import launch

    if not resident:
        monkeypatch.setattr(launch, "CANDIDATES", (launch._stream,))
        monkeypatch.setattr(launch, "ROW_CANDIDATES", (launch._stream,))
        monkeypatch.setattr(launch, "SWEEPS", (launch._stream,))
        monkeypatch.setattr(launch, "ELEMENTWISE", (launch._scattered,))


@pytest.fixture
def forget_plans():
    """Forgets what has been planned, when called and at the end."""
    from cunorm.cpu import backward, double_backward, plan, transform
    from cunorm.cuda import launch

    caches = [launch.plan, launch.sweep, launch.elementwise]
    for module in (plan, transform, backward, double_backward):
        caches += [f for f in vars(module).values() if hasattr(f, "cache_clear")]

    def forget() -> None:
        for function in caches:
            function.cache_clear()

    yield forget
    forget()


@pytest.fixture
def small_pieces(monkeypatch, backend, forget_plans):
    """Cut arrays into pieces so small that little ones take every path of large ones.

    Called with what to change: `resident`, whether channels stay near the cache; `streaming`,
    whether outputs pass the caches of a CPU.
    """

    def cut(resident: bool, streaming: bool = True) -> None:
        (_cut_for_cpu if backend == "cpu" else _cut_for_cuda)(monkeypatch, resident, streaming)
        forget_plans()

    return cut
