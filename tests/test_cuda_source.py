"""Compiling and launching through CuPy: with a stand-in for its driver, and with itself."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import cunorm
from cunorm import arrays
from cunorm.cuda import source

CHECKOUT = Path(__file__).parent.parent


class CompileError(Exception):
    pass


class CudaRuntimeError(RuntimeError):
    """As CuPy's errors of the CUDA runtime are."""


class Driver(types.ModuleType):
    """As much of CuPy as `cunorm.cuda.source` touches; notes what it is asked for."""

    def __init__(self):
        super().__init__("cupy")
        self.__version__ = "14.0.0"
        self.current = 0
        self.compiled, self.launched = [], []
        self.error = None
        runtime = types.ModuleType("cupy.cuda.runtime")
        runtime.getDevice = lambda: self.current
        runtime.getDeviceProperties = lambda number: {
            "major": 9 + number,
            "minor": 0,
            "multiProcessorCount": 132,
            "sharedMemPerBlockOptin": 232448,
            "sharedMemPerMultiprocessor": 233472,
            "l2CacheSize": 60 << 20,
        }
        runtime.CUDARuntimeError = CudaRuntimeError
        self.cuda = types.ModuleType("cupy.cuda")
        self.cuda.runtime = runtime
        self.cuda.compiler = types.SimpleNamespace(CompileException=CompileError)
        self.cuda.function = types.SimpleNamespace(CPointer=lambda address: address)
        self.RawModule = self.make_module

    def make_module(self, *, code, options):
        self.compiled.append((self.current, code, options))
        return types.SimpleNamespace(get_function=self.get_function)

    def get_function(self, name):
        if self.error is not None:
            raise self.error

        def function(grid, block, addresses, shared):
            arguments = [ctypes.string_at(address, 8) for address in addresses]
            self.launched.append((name, grid, block, arguments, shared))

        return types.SimpleNamespace(kernel=function)


@pytest.fixture
def driver(monkeypatch):
    cupy = Driver()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(source, "_functions", {})
    monkeypatch.setattr(source, "_devices", {})
    caches = (source.array_module, arrays._gpu, arrays.cuda_missing)
    for function in caches:
        function.cache_clear()
    yield cupy
    for function in caches:
        function.cache_clear()


OPTIONS = ("-DWIDTH=4", "-DTILE=4")


def test_compiled_once_for_each_device_and_specialization(driver):
    for device in (0, 0, 1, 1):
        driver.current = device
        for options in (OPTIONS, OPTIONS[:1]):
            source.launch("transform.cu", "normalize", options, 7, 128, 4096, b"12345678")
    assert [device for device, _, _ in driver.compiled] == [0, 0, 1, 1]
    _, code, options = driver.compiled[0]
    assert code == (source.folder() / "transform.cu").read_text(encoding="utf-8")
    assert set(OPTIONS) <= set(options)
    assert f"-I{source.folder()}" in options
    assert any(source.digest() in option for option in options)  # for CuPy's cache on disk
    assert len(driver.launched) == 8
    assert driver.launched[0] == ("normalize", (7,), (128,), [b"12345678"], 4096)


def test_zeros_on_the_current_stream(driver):
    cleared = []
    driver.cuda.runtime.memsetAsync = lambda *arguments: cleared.append(arguments)
    driver.cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=17)
    source.clear(4096, 12)
    assert cleared == [(4096, 0, 12, 17)]


def test_device_properties(driver):
    assert source.device() == (90, 132, 232448, 233472, 60 << 20)
    driver.current = 1
    assert source.device().compute_capability == 100


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (CompileError("cannot open cuda_fp16.h"), r"transform\.cu cannot be .*cuda13.*cuda_fp16"),
        (RuntimeError("CuPy failed to load libnvrtc.so.13"), r"cannot be .*\[cuda13\].*libnvrtc"),
        (PermissionError(13, "Permission denied", "/k"), "cannot keep that.*'/k'.*CUPY_CACHE_DIR"),
        (OSError(28, "No space left on device"), "No space left on device.*CUPY_CACHE_IN_MEMORY=1"),
    ],
)  # fmt: skip
def test_compiler_that_fails(driver, error, message):
    driver.error = error
    with pytest.raises(RuntimeError, match=message) as raised:
        source.launch("transform.cu", "normalize", OPTIONS, 1, 128, 0, b"")
    assert raised.value.__cause__ is error
    assert not source._functions
    driver.error = None
    source.launch(
        "transform.cu", "normalize", OPTIONS, 1, 128, 0, b"12345678"
    )  # the next try works


def test_error_of_earlier_work(driver):
    """What a kernel before left behind is not blamed on the compiler."""
    driver.error = CudaRuntimeError("cudaErrorIllegalAddress")
    with pytest.raises(CudaRuntimeError, match=r"^cudaErrorIllegalAddress$"):
        source.launch("transform.cu", "normalize", OPTIONS, 1, 128, 0, b"")


def test_unsupported_gpu(driver):
    driver.current = -2
    with pytest.raises(RuntimeError, match=r"7\.5 or newer is needed, GPU -2 has 7\.0"):
        source.device()
    assert not source._devices


def test_digest_covers_every_source(monkeypatch, tmp_path):
    before = source.digest()
    for path in sorted(source.folder().glob("*.cu*")):
        folder = tmp_path / path.name
        shutil.copytree(source.folder(), folder)
        with (folder / path.name).open("a") as file:
            file.write("\n")
        monkeypatch.setattr(source, "folder", lambda folder=folder: folder)
        source.digest.cache_clear()
        assert source.digest() != before, path.name
    monkeypatch.undo()
    source.digest.cache_clear()
    assert source.digest() == before


def test_sources_in_a_wheel(tmp_path):
    """They are found in an installed package, without the checkout."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path),
         str(CHECKOUT)], check=True, cwd=tmp_path,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "installed", "zip")
    code = "from cunorm.cuda import source; print(source.folder()); print(source.digest())"
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
    ).stdout.split()  # fmt: skip
    assert printed == [str(tmp_path / "installed" / "cunorm" / "kernels"), source.digest()]


def test_missing_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(source, "__file__", str(tmp_path / "cunorm" / "cuda" / "source.py"))
    source.folder.cache_clear()
    with pytest.raises(RuntimeError, match="the CUDA sources of cunorm are missing"):
        source.folder()
    monkeypatch.undo()
    source.folder.cache_clear()


def test_arrays_on_different_devices(driver):
    """Named in the error, whatever else is wrong."""

    class NdArray:
        itemsize = 4

        def __init__(self, device, ptr=256):
            self.data = types.SimpleNamespace(device_id=device, ptr=ptr)

    driver.ndarray = NdArray
    with pytest.raises(TypeError, match="b: expected an array on the device of a, GPU 0, got one "
                       "on GPU 1"):  # fmt: skip
        arrays.adopt(("a", "b"), NdArray(0), NdArray(1))
    with pytest.raises(TypeError, match=r"weight: .* of x, GPU 0, got one on the CPU"):
        arrays.adopt(("x", "none", "weight"), NdArray(0), None, np.ones(3))
    with pytest.raises(TypeError, match=r"weight: .* of x, the CPU, got one on GPU 2"):
        arrays.adopt(("x", "weight"), np.ones(3), NdArray(2))
    with pytest.raises(TypeError, match=r"b: expected an aligned array, .* address 0x102"):
        arrays.adopt(("a", "b"), NdArray(0), NdArray(0, 258))
    entered = []

    class Device:
        def __init__(self, number):
            self.number = number

        def __enter__(self):
            entered.append(self.number)

        def __exit__(self, *_):
            entered.append(None)

    driver.cuda.Device = Device
    for number in (0, 3):  # the current one, another
        _, place = arrays.adopt(("x", "y"), NdArray(number), NdArray(number))
        assert place.xp is driver
        with place:
            pass
    assert entered == [3, None]


class Remote:
    """A CuPy array's description, of memory that must not be touched."""

    def __init__(self, array):
        self.data = types.SimpleNamespace(ptr=array.__array_interface__["data"][0] + (1 << 60))
        self.shape, self.strides, self.itemsize = array.shape, array.strides, array.itemsize
        self.nbytes, self._c_contiguous = array.nbytes, array.flags.c_contiguous


def test_overlap_of_gpu_arrays():
    """Judged by addresses alone, for gaps and orders of axes too."""
    memory = np.zeros((6, 8), np.float32)
    views = [
        memory, memory[:3], memory[3:], memory[:, ::2], memory[:, 1::2], memory[:, :4],
        memory.T, memory[2:4, 2:6], memory.reshape(-1)[40:], memory[4:1:-1, 3:0:-2],
    ]  # fmt: skip
    for a in views:
        for b in views:
            gpu = arrays.overlap(Remote(a), Remote(b))
            assert gpu == np.shares_memory(a, b)
            assert arrays.may_overlap(Remote(a), Remote(b)) == np.may_share_memory(a, b)


class Unavailable:
    """A device that there is not."""

    @property
    def compute_capability(self):
        raise CudaRuntimeError("cudaErrorNoDevice")


def test_why_cuda_is_missing(driver, monkeypatch):
    """Too old a CuPy, driver or GPU, none, or a broken CuPy; and then none of these."""

    def missing():
        arrays.cuda_missing.cache_clear()
        return arrays.cuda_missing()

    driver.__version__ = "13.6.0"
    assert missing() == "CuPy 13.6.0 is too old; 14 or newer is needed"
    with pytest.raises(RuntimeError, match=r"^CuPy 13\.6\.0 is too old"):
        arrays._gpu()
    driver.__version__ = "14.2.0"
    driver.cuda.Device = Unavailable
    runtime = driver.cuda.runtime
    runtime.runtimeGetVersion = lambda: 13020
    for version, reason in (
        (0, "no NVIDIA driver is installed"),
        (11080, "the NVIDIA driver is for CUDA 11.8, CuPy for CUDA 13.2: update the driver"),
        (
            12040,
            "the NVIDIA driver is for CUDA 12.4, CuPy for CUDA 13.2: update the driver, or "
            "pip install cunorm[cuda12]",
        ),
        (13000, "CuPy finds no GPU (cudaErrorNoDevice)"),
    ):
        runtime.driverGetVersion = lambda version=version: version
        assert missing() == reason
    driver.cuda.Device = lambda: types.SimpleNamespace(compute_capability="70")
    assert missing() == "compute capability 7.5 or newer is needed, the GPU has 7.0"
    driver.cuda.Device = lambda: types.SimpleNamespace(compute_capability="90")
    assert missing() is None
    assert cunorm.is_available("cuda")
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert missing().startswith("CuPy is not installed")
    monkeypatch.delitem(sys.modules, "cupy")

    def broken(name, *_):
        if name == "cupy":
            raise RuntimeError("libcuda went missing")

    finder = types.SimpleNamespace(find_spec=broken)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert missing() == "CuPy cannot be imported: libcuda went missing"
    arrays.cuda_missing.cache_clear()


def test_moments_on_different_devices(driver):
    class NdArray:
        itemsize, dtype, shape, ndim = 4, np.dtype(np.float32), (3,), 1

        def __init__(self, device):
            self.data = types.SimpleNamespace(device_id=device, ptr=256)

    driver.ndarray = NdArray
    driver.cuda.Device = lambda number: number
    parts = [cunorm.Moments(2, NdArray(n), NdArray(n)) for n in (0, 1)]
    with pytest.raises(TypeError, match=r"moments\[1\].mean: expected an array on the device of"):
        cunorm.merge_moments(parts)


def test_real_cupy():
    """Has what the stand-in has; without a GPU it says so."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    for argument in ("code", "options"):
        assert argument in cupy.RawModule.__doc__
    for name in ("kernel", "max_dynamic_shared_size_bytes"):
        assert hasattr(cupy.RawKernel, name)
    assert cupy.cuda.compiler.CompileException
    assert cupy.cuda.runtime.memsetAsync
    assert cupy.cuda.function.CPointer(4096).ptr == 4096  # where arguments are
    assert hasattr(cupy.ndarray, "_c_contiguous")
    if not cupy.is_available():
        assert not cunorm.is_available("cuda")
        assert re.search("no GPU|no NVIDIA driver", arrays.cuda_missing())
