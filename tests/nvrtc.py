"""NVRTC and the disassembler, without a GPU or CuPy: what the compiler makes of the kernels.

Run as a program it prints a table of registers, spills and memory accesses.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from functools import cache
from typing import NamedTuple

import ml_dtypes
import numpy as np
from harness import cuda_headers

from cunorm.cuda import launch, source
from cunorm.cuda.launch import Alignment, Device
from cunorm.geometry import Geometry

#: Distributions of NVRTC and of the headers that go with it.
RELEASES = {
    12: ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12"),
    13: ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime"),
}
ARCHITECTURES = (75, 80, 90, 100, 120)
DTYPES = [np.dtype(d) for d in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]

_PLAIN = Alignment(16, 0)
_LARGE = Device(90, 132, 227 << 10, 228 << 10)  # H200
_SMALL = Device(75, 40, 64 << 10, 64 << 10)  # T4

#: What is compiled: a name, a geometry, how the arrays lie.
LAYOUTS = {
    "runs, warp": (Geometry(1, 8, 16, 16), _PLAIN),
    "runs, block": (Geometry(1, 64, 256, 200), _PLAIN),
    "runs, cluster": (Geometry(1, 64, 512, 784), _PLAIN),
    "runs, stream": (Geometry(1, 8, 2, 1 << 20), _PLAIN),
    "runs, narrow": (Geometry(1, 64, 512, 49), _PLAIN),
    "runs, unaligned": (Geometry(1, 64, 128, 12321), _PLAIN),
    "runs, 64-bit": (Geometry(1, 8, 2, 1 << 28), _PLAIN),
    "columns, block": (Geometry(1, 128, 1024, 1), _PLAIN),
    "columns, cluster": (Geometry(1, 12544, 1024, 1), _PLAIN),
    "columns, stream": (Geometry(1, 200704, 256, 1), _PLAIN),
    "columns, narrow": (Geometry(1, 5000, 1001, 1), _PLAIN),
}


class Kernel(NamedTuple):
    """What the compiler says of a kernel."""

    registers: int
    stack: int  # bytes
    spills: int  # bytes stored and loaded


class Compiled(NamedTuple):
    cubin: bytes
    log: str
    kernels: dict[str, Kernel]


def specialization(layout, dtype, operands, architecture):
    """Macros of the plan for a layout, on a device with or without clusters."""
    geometry, lie = LAYOUTS[layout]
    device = _LARGE if architecture >= 90 else _SMALL
    return launch.plan(geometry, dtype, operands, lie, device).options


@cache
def _library(release):
    files = importlib.metadata.files(RELEASES[release][0])
    path = next(f.locate() for f in files if re.fullmatch(r"libnvrtc\.so\.\d+", f.name))
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def compile_kernels(file, options, architecture, release=13):
    """Machine code of a file of kernels; raises with the compiler's words if there is none."""
    library = _library(release)

    def check(status):
        if status:
            raise RuntimeError(library.nvrtcGetErrorString(status).decode())

    def text(size, get):
        length = ctypes.c_size_t()
        check(size(program, ctypes.byref(length)))
        buffer = ctypes.create_string_buffer(length.value)
        check(get(program, buffer))
        return buffer.raw

    program = ctypes.c_void_p()
    code = (source.folder() / file).read_bytes()
    check(library.nvrtcCreateProgram(ctypes.byref(program), code, file.encode(), 0, None, None))
    every = [
        *source.compile_options(options),
        f"-arch=sm_{architecture}",
        f"-I{cuda_headers(RELEASES[release][1])}",
        f"-I{cuda_headers()}",  # nv/target, which the older release's wheels lack
        "-ftz=true",  # as CuPy has it, and the next
        "--device-as-default-execution-space",
        "--ptxas-options=-v",
    ]
    arguments = (ctypes.c_char_p * len(every))(*(o.encode() for o in every))
    status = library.nvrtcCompileProgram(program, len(every), arguments)
    log = text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog)
    log = log.rstrip(b"\0").decode()
    if status:
        raise RuntimeError(log)
    cubin = text(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN)
    check(library.nvrtcDestroyProgram(ctypes.byref(program)))
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    kernels = {
        name: Kernel(int(registers), int(stack), int(stores) + int(loads))
        for name, stack, stores, loads, registers in found
    }
    return Compiled(cubin, log, kernels)


def listing(cubin):
    """All that the disassembler says of a program."""
    files = importlib.metadata.files("nvidia-cuda-nvdisasm")
    program = next(f.locate() for f in files if f.name == "nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [str(program), file.name], capture_output=True, text=True, check=True
        ).stdout


def disassemble(cubin):
    """Machine instructions of every kernel, by its name."""
    text = listing(cubin)
    sections = re.split(r"^\s*\.section\s+\.text\.(\w+)", text, flags=re.MULTILINE)
    return dict(zip(sections[1::2], sections[2::2], strict=True))


def accesses(code):
    """How often the instructions of a kernel access memory, by kind and width in bits."""
    counts = {}
    for kind, modifiers in re.findall(r"\b(LDG|STG|LDL|STL)((?:\.\w+)*)", code):
        width = re.search(r"\.(64|128|U16|U8)\b", modifiers)
        bits = {"U16": "16", "U8": "8"}.get(width[1], width[1]) if width else "32"
        key = kind if kind in ("LDL", "STL") else f"{kind}.{bits}"
        counts[key] = counts.get(key, 0) + 1
    return counts


FILES = {1: ("statistics.cu", "transform.cu"), 2: ("backward.cu",)}  # by number of operands


def main():
    """Markdown: registers of every kernel for an architecture (90 if none is given)."""
    architecture = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    names = ("moments", "transform", "normalize", "reduce", "input_gradient", "backward")
    print(f"sm_{architecture}, NVRTC 13: registers for float16, bfloat16, float32, float64\n")
    print(f"| layout, plan | {' | '.join(names)} |\n{'|---' * 7}|")
    spills = 0
    for layout in LAYOUTS:
        registers = {name: [] for name in names}
        for dtype in DTYPES:
            for operands, files in FILES.items():
                options = specialization(layout, dtype, operands, architecture)
                for file in files:
                    made = compile_kernels(file, options, architecture).kernels
                    spills += sum(kernel.spills for kernel in made.values())
                    for name in set(names) & set(made):
                        registers[name].append(str(made[name].registers))
        cells = [" ".join(registers[name]) for name in names]
        print(f"| {layout} | {' | '.join(cells)} |", flush=True)
    print(f"\nbytes spilled: {spills}")


if __name__ == "__main__":
    main()
