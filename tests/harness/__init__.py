"""Executes the CUDA kernels on the CPU, driven by the Python of cunorm/cuda/.

Two things are exchanged: the array module (NumPy for CuPy) and the launch (a call of the
host's machine code for the driver's). See harness.hpp and runtime.cpp.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import math
import os
import re
import subprocess
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cunorm.cuda import source
from cunorm.cuda.launch import Device

HERE = Path(__file__).parent
CACHES = HERE.parent.parent / ".cache"

#: An H200 with 8 multiprocessors, so that little data is enough to keep it busy.
DEVICE = Device(
    compute_capability=90,
    multiprocessors=8,
    shared_per_block=227 << 10,
    shared_per_multiprocessor=228 << 10,
    cache=3 << 20,
)

#: Kernels that are launched in clusters.
CLUSTERED = (
    "normalize", "normalize_rows", "backward", "backward_rows", "double_backward",
    "double_backward_rows",
)  # fmt: skip

#: Kernels whose blocks wait for others: of a grid so many run at a time, if that divides it.
WAITING = ("normalize_cached", "backward_cached")
_AT_A_TIME = 4

SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
#: Not all checks of undefined behaviour, which take a quarter more time to compile: null pointers,
#: for one, the check of addresses finds too.
_SANITIZERS = [
    "-fsanitize=address,alignment,bounds,float-cast-overflow,integer-divide-by-zero,shift,"
    "signed-integer-overflow,unreachable",
    "-fno-sanitize-recover=all",
    "--param=asan-stack=0",
]
_ARGUMENTS = re.compile(r"\b(\w+)\(\s*const (\w+) a\s*\) \{")


def cuda_headers(distribution="nvidia-cuda-runtime"):
    """Folder of the CUDA headers in a wheel."""
    files = importlib.metadata.files(distribution)
    return next(Path(f.locate()).parent for f in files if f.name == "cuda_fp16.h")


def _compiled_from(*folders):
    """Where to keep what is compiled from these sources."""
    content = b"".join(
        path.read_bytes()
        for folder in folders
        for path in sorted(folder.iterdir())
        if path.suffix in (".cu", ".cuh", ".hpp", ".cpp", ".py")
    )
    digest = hashlib.sha256(content).hexdigest()[:16]
    return CACHES / "harness" / f"{digest}{'-sanitized' if SANITIZED else ''}"


class PoisonedNumPy:
    """NumPy, but fresh memory is full of NaNs."""

    def __getattr__(self, name):
        return getattr(np, name)

    @staticmethod
    def empty(shape, dtype=np.float64):
        array = np.empty(shape, dtype)
        array.view(np.uint8).reshape(-1)[...] = 0xFF
        return array

    ndarray = empty

    @staticmethod
    def empty_like(array):
        fresh = np.empty_like(array)
        order = np.argsort(fresh.strides)[::-1]
        fresh.transpose(order).reshape(-1).view(np.uint8)[...] = 0xFF
        return fresh


class Harness:
    """Stands for CuPy and the driver in `cunorm.cuda.source`."""

    def __init__(self, kernels=None, device=DEVICE):
        self.kernels = kernels or source.folder()
        self.properties = device
        self.seed = 0
        self.numpy = PoisonedNumPy()
        self.launched = Counter()  # names of kernels
        self.specializations = set()
        self.blocks = self.threads = 0  # launched
        # Bytes read from and written to watched arrays, then to other global memory.
        self.traffic = np.zeros(4, np.uint64)
        self.runtime_folder = _compiled_from(HERE)
        self.folder = _compiled_from(HERE, self.kernels)
        self._libraries = {}
        self._runtime = None

    def install(self, monkeypatch):
        """Make NumPy arrays compute on this instead of the CPU backend."""
        from cunorm import arrays

        backend = arrays.cuda_backend()
        place = arrays.Place(self.numpy, backend, lambda array: array)
        monkeypatch.setattr(arrays, "_cpu", lambda: place)
        monkeypatch.setattr(arrays, "cpu_backend", lambda: backend)
        monkeypatch.setattr(source, "array_module", lambda: self.numpy)
        monkeypatch.setattr(source, "pointer", lambda a: a.__array_interface__["data"][0])
        monkeypatch.setattr(source, "device", lambda: self.properties)
        monkeypatch.setattr(source, "clear", lambda place, size: ctypes.memset(place, 0, size))
        monkeypatch.setattr(source, "launch", self.launch)

    @contextmanager
    def watching(self, *arrays):
        """Count the traffic of these arrays apart from all other."""
        self._load_runtime()
        for array in arrays:
            first = array.__array_interface__["data"][0]
            self._runtime.watch(ctypes.c_size_t(first), ctypes.c_size_t(first + array.nbytes))
        self.traffic[:] = self.blocks = self.threads = 0
        yield
        self._runtime.unwatch()

    @contextmanager
    def only(self, *blocks):
        """Execute these blocks of every grid alone."""
        self._load_runtime()
        self._runtime.choose((ctypes.c_uint * len(blocks))(*blocks), len(blocks))
        yield
        self._runtime.choose(None, 0)

    def launch(self, file, name, options, blocks, threads, shared, arguments):
        function = self._library(file, options)[f"launch_{name}"]
        function.restype = ctypes.c_char_p
        self.seed += 1
        together = 1
        if name in CLUSTERED:
            together = int(dict(o[2:].split("=") for o in options)["CLUSTER"])
        elif name in WAITING:
            together = math.gcd(blocks, _AT_A_TIME)
        counters = np.zeros(4, np.uint64)
        message = function(
            arguments, ctypes.c_size_t(len(arguments)), blocks, threads, together,
            ctypes.c_size_t(shared), ctypes.c_uint64(self.seed),
            counters.ctypes.data_as(ctypes.c_void_p),
        )  # fmt: skip
        self.launched[name] += 1
        self.blocks += blocks
        self.threads += blocks * threads
        self.specializations.add((file, options))
        self.traffic += counters
        if message:
            raise RuntimeError(f"{name}{options}: {message.decode()}")

    def _compile(self, target, main, *options):
        """Compile a main file, unless that has been done, so that no half a file is left."""
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        written = target.with_name(f"{os.getpid()}-{target.name}")
        compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-fPIC", "-O1", "-g1", "-w"]
        compiler += _SANITIZERS if SANITIZED else []
        compiler += ["-isystem", str(cuda_headers())]
        # The compiled header is found before the header.
        compiler += [f"-I{folder}" for folder in (self.runtime_folder, HERE, self.kernels)]
        made = subprocess.run(
            [*compiler, *options, str(main), "-o", str(written)],
            capture_output=True, text=True, env={**os.environ, "LD_PRELOAD": ""},
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        written.rename(target)

    def _load_runtime(self):
        if self._runtime is None:
            runtime = self.runtime_folder / "runtime.so"
            self._compile(runtime, HERE / "runtime.cpp", "-shared")
            self._runtime = ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
            header = self.runtime_folder / "harness.hpp.gch"
            self._compile(header, HERE / "harness.hpp", "-x", "c++-header")

    def _library(self, file, options):
        found = self._libraries.get((file, options))
        if found is not None:
            return found
        self._load_runtime()
        key = hashlib.sha256(repr((file, options)).encode()).hexdigest()[:16]
        target = self.folder / f"{Path(file).stem}-{key}.so"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            main = target.with_suffix(".cpp")
            defines = [f"#define {o[2:].replace('=', ' ')}" for o in options]
            text = (self.kernels / file).read_text(encoding="utf-8")
            kernels = [f"HARNESS_KERNEL({n}, {a})" for n, a in _ARGUMENTS.findall(text)]
            assert kernels, f"no kernel found in {file}"
            lines = ['#include "harness.hpp"', *defines, f'#include "{file}"', *kernels]
            main.write_text("\n".join(lines) + "\n", encoding="utf-8")
            # What it needs of libraries the process has; to link them takes time.
            self._compile(target, main, "-shared", "-nostdlib")
        library = self._libraries[file, options] = ctypes.CDLL(str(target))
        return library
