"""Compiled kernels on disk: kept, never stale, and no error whatever happens to the files."""

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cunorm
from cunorm.cpu.entry import Kernel

PACKAGE = Path(cunorm.__file__).parent

STATISTICS = """
import numpy as np, cunorm
from cunorm.cpu.cache import KernelCache
from cunorm.cpu.entry import Kernel
x = np.arange(12, dtype=np.{dtype}).reshape(4, 3)
assert cunorm.batch_norm_statistics(x).mean.tolist() == [4.5, 5.5, 6.5]
from cunorm.cpu import statistics
kernels = [f.compiled for f in vars(statistics).values() if type(f) is Kernel]
kernels = [f for f in kernels if type(f._cache) is KernelCache]
print(sum(sum(f.stats.cache_misses.values()) for f in kernels), "compiled")
"""


def compiled(folder, before="", dtype="float32"):
    """Run a call in a fresh process; the number of kernels compiled, and what it warned of."""
    done = subprocess.run(
        [sys.executable, "-c", before + STATISTICS.format(dtype=dtype)],
        env=os.environ | {"NUMBA_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[0]), done.stderr


def files(folder):
    """All but the two kernels that are always made (`cpu/everything.py`)."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in found if not path.name.startswith(("tasks.serve-", "tasks.ring-"))]


def test_kept_for_the_next_process(tmp_path):
    number, warned = compiled(tmp_path)
    assert number > 0
    assert not warned
    assert len(files(tmp_path)) == number
    assert compiled(tmp_path) == (0, "")
    assert compiled(tmp_path, dtype="float64")[0] == number  # beside the others
    assert compiled(tmp_path) == (0, "")


def test_damaged_files(tmp_path):
    """Empty, cut short, one bit turned, or something else: compiled anew, and kept again."""
    number, _ = compiled(tmp_path)
    (file,) = files(tmp_path)[:1]
    content = file.read_bytes()
    middle = len(content) // 2
    for damaged in (
        b"",
        content[:-1],
        content[:middle],
        content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        b"\x80\x05not what it was" * 100,
    ):
        file.write_bytes(damaged)
        assert compiled(tmp_path) == (1, "")
    assert compiled(tmp_path) == (0, "")
    assert len(files(tmp_path)) == number


def test_copies_under_each_others_names(tmp_path):
    """Files of two dtypes, exchanged, are nobody's."""
    compiled(tmp_path)
    (single,) = files(tmp_path)[:1]
    before = set(files(tmp_path))
    compiled(tmp_path, dtype="float64")
    (double,) = [path for path in set(files(tmp_path)) - before
                 if path.name.partition(".py")[0] == single.name.partition(".py")[0]]  # fmt: skip
    single.write_bytes(double.read_bytes())
    assert compiled(tmp_path) == (1, "")
    assert compiled(tmp_path) == (0, "")


def test_made_for_another_cache(tmp_path):
    """Processors of one name are told apart by the cache that kernels are made for."""
    number, _ = compiled(tmp_path)
    other = "import cunorm.cpu.memory as memory; memory.second_level_cache = lambda: 3 << 20\n"
    assert compiled(tmp_path, other) == (number, "")
    assert compiled(tmp_path, other) == (0, "")
    assert compiled(tmp_path) == (0, "")


def test_made_from_other_sources(tmp_path):
    """A change in what a kernel calls, in another file of the same name and age, is seen."""
    package = tmp_path / "cunorm"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    here = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    number, _ = compiled(tmp_path / "cache", here)
    assert compiled(tmp_path / "cache", here) == (0, "")
    (package / "cpu" / ".#pieces.py").symlink_to("nowhere")  # as an editor leaves it
    assert compiled(tmp_path / "cache", here) == (0, "")
    change = f"open({str(package / 'cpu' / 'pieces.py')!r}, 'a').write('\\n')\n"
    imported = "import cunorm.cpu.transform; "
    double = compiled(tmp_path / "cache", here + imported + change, "float64")[0]
    assert double == number  # and none of them is kept: they are of what was there before
    assert compiled(tmp_path / "cache", here, "float64") == (number, "")
    assert compiled(tmp_path / "cache", here) == (number, "")
    assert compiled(tmp_path / "cache", here) == (0, "")
    assert len(files(tmp_path / "cache")) == 2 * number  # in the place of the old ones


def test_sources_in_an_archive(tmp_path):
    """Nothing tells what a copy was made from, so none is kept."""
    archive = shutil.make_archive(str(tmp_path / "cunorm"), "zip", PACKAGE.parent, "cunorm")
    here = f"import sys; sys.path.insert(0, {archive!r})\n"
    number, warned = compiled(tmp_path / "cache", here)
    assert number == 0
    assert warned.count("sources of cunorm are no files") == 1
    assert not files(tmp_path)[1:]


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of file sizes")
def test_full_disk(tmp_path):
    """One warning, the right numbers, and nothing half written is left behind."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    number, warned = compiled(tmp_path, limit)
    assert number > 0
    assert warned.count("RuntimeWarning: compiled kernels cannot be kept on disk") == 1
    assert "File too large" in warned
    assert "NUMBA_CACHE_DIR" in warned
    assert not files(tmp_path)
    assert compiled(tmp_path) == (number, "")


def test_folder_that_is_taken_away(tmp_path):
    folder = tmp_path / "cache"
    before = f"import cunorm.cpu.transform, shutil; shutil.rmtree({str(folder)!r})\n"
    number, warned = compiled(folder, before)
    assert not warned
    assert len(files(folder)) == number


def test_nowhere_to_keep_them():
    """A warning says so, and everything works."""
    refuse = """
from numba.core import caching
def refuse(self, function):
    raise RuntimeError(f"cannot cache function {function.__qualname__!r}: no locator available")
caching.CacheImpl.__init__ = refuse
"""
    number, warned = compiled("", refuse)
    assert number == 0  # no copy was missed: none was looked for
    assert "NUMBA_CACHE_DIR" in warned
    assert warned.count("cannot be kept on disk") == 1


def work(fixed, axis):
    """All functions on arrays that `fixed` makes writable or not."""

    def array(*shape):
        made = np.random.default_rng(0).uniform(1.0, 2.0, shape).astype(np.float32)
        made.flags.writeable = not fixed
        return made

    x, dy, row = array(6, 4, 4), array(6, 4, 4), array(4)
    mean, inv_std, sums = array(4), array(4), array(2, 4)
    last = {"channel_axis": axis}
    saved = [
        cunorm.batch_norm_forward(x, row, row, **last)[1],
        cunorm.group_norm_forward(x, 2, row, row, **last)[1],
        cunorm.instance_norm_forward(x, row, row, **last)[1],
        cunorm.layer_norm_forward(x, row, row)[1],
        cunorm.rms_norm_forward(x, row)[1],
    ]
    for kept in saved:
        for value in kept:
            if isinstance(value, np.ndarray):
                value.flags.writeable = not fixed
    cunorm.batch_norm_forward(x, row, row, mean, inv_std, training=False, **last)
    for name, kept in zip(("batch", "group", "instance", "layer", "rms"), saved, strict=True):
        getattr(cunorm, f"{name}_norm_backward")(dy, x, kept, row)
    cunorm.batch_norm_double_backward(dy, row, row, dy, x, saved[0], row)
    cunorm.layer_norm_double_backward(dy, row, row, dy, x, saved[3], row)
    cunorm.batch_norm_statistics(x, **last)
    cunorm.batch_norm_transform(x, mean, inv_std, row, row, **last)
    cunorm.batch_norm_backward_reduce(dy, x, mean, **last)
    cunorm.batch_norm_backward_transform(dy, x, mean, inv_std, row, *sums, 5, **last)
    cunorm.update_running_statistics(np.zeros(4), np.ones(4), mean, inv_std, 5)
    cunorm.scale_shift_forward(x, row, row, **last)
    cunorm.scale_shift_backward(dy, x, row, **last)


@pytest.mark.parametrize("axis", [1, -1])
def test_read_only_arrays_compile_nothing(axis):
    """Numba would make kernels for them alone, in seconds each."""

    def entries():
        """Of all kernels but one of a few lines, for running statistics that are not usual."""
        found = [kernel for kernel in gc.get_objects() if type(kernel) is Kernel]
        names = {kernel.compiled.__name__: len(kernel._entries) for kernel in found}
        del names["_given_statistics"]
        return names

    work(False, axis)
    before = entries()
    assert sum(before.values()) > 10
    work(True, axis)
    assert entries() == before
