"""The only module that touches CuPy's driver: devices, compiled kernels, launches."""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from ..arrays import LEAST_CAPABILITY
from .launch import Device

__all__ = ["array_module", "clear", "device", "launch", "pointer"]


@cache
def array_module() -> Any:
    """CuPy."""
    import cupy

    return cupy


def pointer(array: Any) -> int:
    """Address of an array's first element."""
    address: int = array.data.ptr
    return address


@cache
def folder() -> Path:
    """Where the CUDA sources are: in the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for place in (package / "kernels", package.parent / "kernels"):
        if (place / "types.cuh").is_file():
            return place
    raise RuntimeError(f"the CUDA sources of cunorm are missing: no kernels/ in {package}")


@cache
def digest() -> str:
    """Changes with any of the sources; compiled kernels on disk are kept by it."""
    content = b"".join(path.read_bytes() for path in sorted(folder().glob("*.cu*")))
    return hashlib.sha256(content).hexdigest()[:16]


def compile_options(options: tuple[str, ...]) -> tuple[str, ...]:
    """All options that a kernel with these macros is compiled with."""
    return ("-std=c++17", f"-I{folder()}", f"-DCUNORM_SOURCES=0x{digest()}", *options)


_devices: dict[int, Device] = {}
_functions: dict[tuple[int, str, tuple[str, ...]], Any] = {}


def device() -> Device:
    """The current device."""
    runtime = array_module().cuda.runtime
    number = runtime.getDevice()
    found = _devices.get(number)
    if found is None:
        properties = runtime.getDeviceProperties(number)
        capability = 10 * properties["major"] + properties["minor"]
        if capability < LEAST_CAPABILITY:
            raise RuntimeError(
                f"compute capability 7.5 or newer is needed, GPU {number} has {capability / 10}"
            )
        found = _devices[number] = Device(
            compute_capability=capability,
            multiprocessors=properties["multiProcessorCount"],
            shared_per_block=properties["sharedMemPerBlockOptin"],
            shared_per_multiprocessor=properties["sharedMemPerMultiprocessor"],
            cache=properties["l2CacheSize"],
        )
    return found


def clear(place: int, size: int) -> None:
    """Fill bytes at an address with zeros, on the current stream."""
    cuda = array_module().cuda
    cuda.runtime.memsetAsync(place, 0, size, cuda.get_current_stream().ptr)


def launch(
    file: str, name: str, options: tuple[str, ...], blocks: int, threads: int, shared: int,
    arguments: bytes,
) -> None:  # fmt: skip
    """Launch a kernel of a file on the current device and stream.

    ``arguments`` is the structure that the kernel takes, by value.
    """
    cupy = array_module()
    key = cupy.cuda.runtime.getDevice(), name, options
    function = _functions.get(key)
    if function is None:
        function = _functions[key] = _function(file, name, options)
    structure = ctypes.create_string_buffer(arguments)  # of which the driver makes a copy
    address = cupy.cuda.function.CPointer(ctypes.addressof(structure))  # quicker than an array
    function((blocks,), (threads,), (address,), shared)


def _function(file: str, name: str, options: tuple[str, ...]) -> Any:
    cupy = array_module()
    module = cupy.RawModule(
        code=(folder() / file).read_text(encoding="utf-8"), options=compile_options(options)
    )
    try:
        kernel = module.get_function(name)
    except OSError as error:
        raise RuntimeError(
            f"{file} is compiled, but CuPy cannot keep that on disk: {error}. The environment "
            "variable CUPY_CACHE_DIR can name another folder; CUPY_CACHE_IN_MEMORY=1 does without"
        ) from error
    except Exception as error:
        compiling = isinstance(error, cupy.cuda.compiler.CompileException)
        if not compiling and type(error) is not RuntimeError:  # CuPy's when NVRTC cannot be loaded
            raise
        raise RuntimeError(
            f"{file} cannot be compiled for this GPU; are NVRTC and the CUDA headers of CuPy's "
            f"CUDA version installed (pip install cunorm[cuda13], or cuda12)? {error}"
        ) from error
    kernel.max_dynamic_shared_size_bytes = device().shared_per_block
    return kernel.kernel
