"""What this installation can use."""

from __future__ import annotations

import sys
from typing import TextIO

from . import arrays
from ._version import __version__
from .cpu.threads import get_num_threads

__all__ = ["is_available", "show_config"]


def is_available(backend: str) -> bool:
    """Whether arrays of a backend, ``"cpu"`` or ``"cuda"``, can be computed with here.

    Raises
    ------
    ValueError
        For any other name.
    """
    if backend not in ("cpu", "cuda"):
        raise ValueError(f'backend: expected "cpu" or "cuda", got {backend!r}')
    return backend == "cpu" or arrays.cuda_missing() is None


def show_config(file: TextIO | None = None) -> None:
    """Print versions, processors, threads and backends; for a missing one, why.

    Parameters
    ----------
    file : text stream, optional
        Standard output if not given.
    """
    import platform  # these two take longer to import than the rest of cunorm

    lines = [
        ("cunorm", __version__),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *((name, _version(name)) for name in ("numpy", "numba", "ml_dtypes")),
        ("cupy", _cupy_version()),
        ("processor", _processor()),
        ("threads", f"{get_num_threads()} (cunorm.set_num_threads, CUNORM_NUM_THREADS)"),
        ("cpu backend", "available"),
        ("cuda backend", _cuda()),
    ]
    width = max(len(name) for name, _ in lines)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in lines), file=file or sys.stdout)


def _version(name: str) -> str:
    """Version of an installed distribution, without importing it."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cupy_version() -> str:
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        version = _version(name)
        if version != "not installed":
            return f"{version} ({name})"
    return "not installed"


def _cuda() -> str:
    missing = arrays.cuda_missing()
    if missing is not None:
        return f"missing: {missing}"
    import cupy

    runtime = cupy.cuda.runtime
    gpu = runtime.getDeviceProperties(runtime.getDevice())
    return (
        f"available: {gpu['name'].decode()}, compute capability {gpu['major']}.{gpu['minor']}, "
        f"CUDA {runtime.driverGetVersion() // 1000} driver"
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()
