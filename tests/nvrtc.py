"""NVRTC and the disassembler, without a GPU or CuPy: what the compiler makes of the kernels.

Run as a program it prints a table of registers, spills and memory accesses.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import pickle
import re
import subprocess
import sys
import tempfile
from functools import cache
from typing import NamedTuple

import ml_dtypes
import numpy as np
from harness import CACHES, cuda_headers

from cunorm.cuda import launch, source
from cunorm.cuda.launch import Alignment, Device
from cunorm.geometry import batch_norm_geometry, group_norm_geometry, row_norm_geometry

#: Distributions of NVRTC and of the headers that go with it.
RELEASES = {
    12: ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12"),
    13: ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime"),
}
ARCHITECTURES = (75, 80, 90, 100, 120)
DTYPES = [np.dtype(d) for d in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]

_PLAIN = Alignment(16, 0)
_LARGE = Device(90, 132, 227 << 10, 228 << 10, 60 << 20)  # H200
_SMALL = Device(75, 40, 64 << 10, 64 << 10, 4 << 20)  # T4


def channels(outer, group, inner):
    """Geometry of batch norm over (outer, group, inner)."""
    return batch_norm_geometry((outer, group, inner), 1)


#: What is compiled: a name, a geometry, how the arrays lie.
LAYOUTS = {
    "runs, warp": (channels(8, 16, 16), _PLAIN),
    "runs, block": (channels(64, 256, 200), _PLAIN),
    "runs, cluster": (channels(64, 512, 784), _PLAIN),
    "runs, stream": (channels(8, 2, 1 << 20), _PLAIN),
    "runs, narrow": (channels(64, 512, 49), _PLAIN),
    "runs, unaligned": (channels(64, 128, 12321), _PLAIN),
    "runs, 64-bit": (channels(8, 2, 1 << 28), _PLAIN),
    "columns, block": (channels(128, 1024, 1), _PLAIN),
    "columns, cluster": (channels(12544, 1024, 1), _PLAIN),
    "columns, stream": (channels(200704, 256, 1), _PLAIN),
    "columns, scattered": (channels(200704, 256, 1), _PLAIN),
    "columns, narrow": (channels(5000, 1001, 1), _PLAIN),
    "columns, merged": (group_norm_geometry((64, 784, 256), 2, 32), _PLAIN),
    "cached": (channels(4, 128, 1 << 20), _PLAIN),
    "cached, narrow": (channels(24576, 64, 49), _PLAIN),
    "cached, unaligned": (channels(128, 128, 12321), _PLAIN),
    "cached, 64-bit": (channels(16, 512, 1 << 18), _PLAIN),
    "rows, part of a warp": (row_norm_geometry((131072, 128), 1), _PLAIN),
    "rows, part of a warp about zero": (row_norm_geometry((131072, 128), 1), _PLAIN),
    "rows, block": (row_norm_geometry((16384, 4096), 1), _PLAIN),
    "rows, about zero": (row_norm_geometry((16384, 4096), 1), _PLAIN),
    "rows, weights as x": (row_norm_geometry((16384, 4096), 1), _PLAIN),
    "rows, cluster": (row_norm_geometry((64, 81920), 1), _PLAIN),
    "rows, alone": (row_norm_geometry((64, 163840), 1), _PLAIN),
    "rows, stream": (row_norm_geometry((2, 1 << 22), 1), _PLAIN),
    "rows, odd": (row_norm_geometry((1024, 12321), 1), _PLAIN),
    "rows, spans within": (group_norm_geometry((256, 512, 49), 1, 32), _PLAIN),
    "rows, spans": (group_norm_geometry((128, 256, 784), 1, 32), _PLAIN),
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
    centered = not layout.endswith("about zero")
    # Parameters are of the accumulator type, unless they are of x's.
    kinds = (2, 3, 0, 1) if layout.endswith("weights as x") else (0, 0, 0, 1)
    kind = kinds[DTYPES.index(dtype)]
    if layout.endswith("scattered"):
        return launch.elementwise(geometry, dtype, operands, lie, device).options
    return launch.plan(geometry, dtype, operands, lie, device, centered, kind).options


@cache
def _library(release):
    files = importlib.metadata.files(RELEASES[release][0])
    path = next(f.locate() for f in files if re.fullmatch(r"libnvrtc\.so\.\d+", f.name))
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def compile_kernels(file, options, architecture, release=13):
    """Machine code of a file of kernels; raises with the compiler's words if there is none."""
    every = [
        *source.compile_options(options),
        f"-arch=sm_{architecture}",
        f"-I{cuda_headers(RELEASES[release][1])}",
        f"-I{cuda_headers()}",  # nv/target, which the older release's wheels lack
        "-ftz=true",  # as CuPy has it, and the next
        "--device-as-default-execution-space",
        "--ptxas-options=-v",
    ]
    versions = [importlib.metadata.version(name) for name in RELEASES[release]]
    digest = hashlib.sha256(repr((file, every, versions)).encode()).hexdigest()[:32]
    kept = CACHES / "nvrtc" / digest  # several tests look at the same code
    if kept.exists():
        cubin, log = pickle.loads(kept.read_bytes())
    else:
        cubin, log = _compile(file, every, _library(release))
        kept.parent.mkdir(parents=True, exist_ok=True)
        written = kept.with_suffix(f".{os.getpid()}")
        written.write_bytes(pickle.dumps((cubin, log)))
        written.rename(kept)
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


def _compile(file, options, library):
    """(machine code, what the compiler said)."""

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
    arguments = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    status = library.nvrtcCompileProgram(program, len(options), arguments)
    log = text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog)
    log = log.rstrip(b"\0").decode()
    if status:
        raise RuntimeError(log)
    cubin = text(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN)
    check(library.nvrtcDestroyProgram(ctypes.byref(program)))
    return cubin, log


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
    for kind, modifiers in re.findall(r"\b(LDGSTS|LDG|STG|LDL|STL)((?:\.\w+)*)", code):
        width = re.search(r"\.(64|128|U16|U8)\b", modifiers)
        bits = {"U16": "16", "U8": "8"}.get(width[1], width[1]) if width else "32"
        key = kind if kind in ("LDL", "STL") else f"{kind}.{bits}"
        counts[key] = counts.get(key, 0) + 1
    return counts


#: By operands.
FILES = {
    1: ("statistics.cu", "transform.cu", "normalize_cached.cu", "normalize_rows.cu"),
    2: ("backward.cu", "backward_cached.cu", "rows.cu"),
    3: ("double_backward.cu", "double_rows.cu"),
}

#: For double backward passes, which take long to compile; groups of channels have none.
DOUBLE = [
    "runs, warp", "runs, block", "runs, cluster", "runs, unaligned", "columns, block",
    "columns, narrow", "rows, part of a warp", "rows, block", "rows, cluster", "rows, stream",
]  # fmt: skip


def files_of(layout, operands):
    """The files of kernels that a layout has a use for of its own."""
    if operands == 3 and layout not in DOUBLE:
        return []
    if layout in ("rows, stream", "rows, alone"):
        return [file for file in FILES[operands] if not file.endswith("_cached.cu")]
    kind = layout.partition(",")[0]
    if kind in ("rows", "cached"):
        return [file for file in FILES[operands] if file.endswith(f"{kind}.cu")]
    return [file for file in FILES[operands] if not file.endswith(("rows.cu", "cached.cu"))]


def main():
    """Markdown: registers of every kernel for an architecture (90 if none is given)."""
    architecture = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    names = ("moments", "transform", "normalize", "normalize_cached", "normalize_rows", "reduce",
             "input_gradient", "backward", "backward_cached", "backward_rows", "double_reduce",
             "double_transform", "double_backward", "double_backward_rows")  # fmt: skip
    print(f"sm_{architecture}, NVRTC 13: registers for float16, bfloat16, float32, float64\n")
    print(f"| layout, plan | {' | '.join(names)} |\n{'|---' * (1 + len(names))}|")
    spills = 0
    for layout in LAYOUTS:
        registers = {name: [] for name in names}
        for dtype in DTYPES:
            for operands in FILES:
                options = specialization(layout, dtype, operands, architecture)
                for file in files_of(layout, operands):
                    made = compile_kernels(file, options, architecture).kernels
                    spills += sum(kernel.spills for kernel in made.values())
                    for name in set(names) & set(made):
                        registers[name].append(str(made[name].registers))
        cells = [" ".join(registers[name]) for name in names]
        print(f"| {layout} | {' | '.join(cells)} |", flush=True)
    print(f"\nbytes spilled: {spills}")


if __name__ == "__main__":
    main()
