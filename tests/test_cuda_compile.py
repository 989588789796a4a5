"""Specializations of the kernels through the compilers that users have, without a GPU.

A dtype or two of each architecture; with `--thorough` all, which lasts long.
"""

import nvrtc
import pytest

from cunorm.checks import statistics_dtype
from cunorm.cuda import launch

#: Where clusters are missing, their plans are others' again.
WITHOUT_CLUSTERS = [
    name for name in nvrtc.LAYOUTS if not name.endswith("cluster") and name != "rows, alone"
]

#: For all architectures; all of them for the oldest and for the first with clusters.
MAIN = [
    "runs, warp",
    "runs, block",
    "runs, unaligned",
    "columns, block",
    "cached",
    "rows, part of a warp",
    "rows, block",
    "rows, about zero",
    "rows, stream",
]


def compile_all(architecture, layouts, dtypes, release=13):
    """(layout, dtype, file, options, what was made) of every specialization.

    One after another, since NVRTC compiles for one thread of a process at a time.
    """
    for layout in layouts:
        for dtype in dtypes:
            for operands in nvrtc.FILES:
                options = nvrtc.specialization(layout, dtype, operands, architecture)
                for file in nvrtc.files_of(layout, operands):
                    made = nvrtc.compile_kernels(file, options, architecture, release)
                    yield layout, dtype, file, options, made


def compile_sums(architecture, dtype, release=13):
    """What adds up over samples, which takes no layout."""
    how = launch.adding(4096, statistics_dtype(dtype), 1 << 20)
    return nvrtc.compile_kernels("add_up.cu", how.options, architecture, release)


def check(made, layout, dtype, file):
    assert made.kernels, made.log
    assert "warning" not in made.log.lower(), made.log
    for name, kernel in made.kernels.items():
        what = f"{name} of {file}: {layout}, {dtype}"
        assert kernel.spills == 0, f"{what}: {kernel}"
        assert kernel.stack == 0, f"{what}: {kernel}"
        assert kernel.registers <= 128, f"{what}: {kernel}"


def each(architectures, dtypes, always):
    """Parameters of a test: architectures with dtypes, those not in `always` if `--thorough`."""
    return pytest.mark.parametrize(
        ("architecture", "dtype"),
        [
            pytest.param(a, d, marks=[] if (a, str(d)) in always else pytest.mark.thorough)
            for a in architectures
            for d in dtypes
        ],
        ids=str,
    )


@each(
    nvrtc.ARCHITECTURES,
    nvrtc.DTYPES,
    {(75, "bfloat16"), (80, "float64"), (90, "float16"), (100, "bfloat16"), (120, "float16")},
)
def test_no_warnings_and_no_spills(architecture, dtype):
    layouts = {75: WITHOUT_CLUSTERS, 90: nvrtc.LAYOUTS}.get(architecture, MAIN)
    names = set()
    for layout, _, file, _, made in compile_all(architecture, layouts, [dtype]):
        check(made, layout, dtype, file)
        names |= set(made.kernels)
    made = compile_sums(architecture, dtype)
    check(made, "sums", dtype, "add_up.cu")
    assert len(names | set(made.kernels)) == 21


@pytest.mark.parametrize("architecture", [75, 90])
@pytest.mark.parametrize("kernel", ["add_up", "update_running"])
def test_sums_over_samples_ask_for_many_at_once(kernel, architecture):
    """Before the first of them is waited for, which the first addition does."""
    code = nvrtc.disassemble(compile_sums(architecture, nvrtc.DTYPES[2]).cubin)[kernel]
    before = code[: code.index("DADD")]
    assert sum(nvrtc.accesses(before).values()) == 32


@each([75, 90, 120], nvrtc.DTYPES[:3], {(75, "float16"), (90, "float32"), (120, "bfloat16")})
def test_older_compiler(architecture, dtype):
    """NVRTC of CUDA 12, for the main layouts: it compiles what that of CUDA 13 does."""
    layouts = ["runs, warp", "runs, block", "runs, unaligned", "columns, block", "rows, block"]
    layouts += ["runs, cluster"] if architecture >= 90 else []
    for layout, _, file, _, made in compile_all(architecture, layouts, [dtype], release=12):
        assert made.kernels
        assert "warning" not in made.log.lower(), made.log
        for name, kernel in made.kernels.items():
            assert kernel.spills == 0, f"{name} of {file}: {layout}, {dtype}, {kernel}"
    check(compile_sums(architecture, dtype, release=12), "sums", dtype, "add_up.cu")


@each([80, 90], nvrtc.DTYPES[:3], {(80, "bfloat16"), (90, "float16"), (90, "float32")})
@pytest.mark.parametrize(
    "layout",
    ["runs, block", "runs, stream", "columns, block", "runs, unaligned", "cached", "rows, block",
     "rows, spans"],
)  # fmt: skip
def test_machine_code(layout, architecture, dtype):
    """Elements move 16 bytes at a time, several loads are in flight, nothing is in local memory."""
    for _, _, file, options, made in compile_all(architecture, [layout], [dtype]):
        o = dict(option[2:].split("=") for option in options)
        tile = int(o["TILE"])
        double = file.startswith("double")
        narrow = double and layout.startswith("columns") and dtype.itemsize == 2  # for registers
        bits = 64 if narrow else 128
        assert int(o["WIDTH"]) * dtype.itemsize * 8 == bits
        for name, code in nvrtc.disassemble(made.cubin).items():
            counts = nvrtc.accesses(code)
            what = f"{name}, {dtype}: {counts}"
            assert not {"LDL", "STL"} & set(counts), what
            if name.startswith("finish") or name == "share_sums":
                continue
            of_gradients = ("backward.cu", "backward_cached.cu", "rows.cu")
            inputs = 3 if double else 2 if file in of_gradients else 1
            read = counts.get(f"LDG.{bits}", 0) + counts.get(f"LDGSTS.{bits}", 0)
            assert read >= tile * inputs, what
            if name != "moments":
                assert counts.get(f"STG.{bits}", 0) >= tile * (2 if double else 1), what


def test_clusters():
    """The attribute that a plain launch needs is there, and barriers of the whole cluster."""
    for file, name, operands, layout in (
        ("transform.cu", "normalize", 1, "runs, cluster"),
        ("backward.cu", "backward", 2, "runs, cluster"),
        ("normalize_rows.cu", "normalize_rows", 1, "rows, cluster"),
        ("rows.cu", "backward_rows", 2, "rows, cluster"),
        ("double_backward.cu", "double_backward", 3, "runs, cluster"),
        ("double_rows.cu", "double_backward_rows", 3, "rows, cluster"),
    ):
        options = nvrtc.specialization(layout, nvrtc.DTYPES[2], operands, 90)
        made = nvrtc.compile_kernels(file, options, 90)
        text = nvrtc.listing(made.cubin)
        assert text.count("EIATTR_CTA_PER_CLUSTER") == 1  # of one kernel alone
        code = nvrtc.disassemble(made.cubin)[name]
        assert code.count("UCGABAR_ARV") == 2
        assert code.count("UCGABAR_WAIT") >= 2
        # What is written is there, and what is read has come, before others are told.
        for before in code.split("UCGABAR_ARV")[:-1]:
            assert "MEMBAR" in before.rpartition("UCGABAR")[2], f"{name}: a relaxed arrival"
