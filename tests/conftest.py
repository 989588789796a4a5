"""Settings shared by all tests."""

import hashlib
import os
from pathlib import Path

import pytest

_CHECKOUT = Path(__file__).parent.parent

# Numba looks only at the file of a function itself, not at what it calls, to
# tell whether a compiled copy is still good. So the copies of each state of the
# sources live in a folder of their own.
_sources = b"".join(path.read_bytes() for path in sorted(_CHECKOUT.glob("cunorm/**/*.py")))
os.environ["NUMBA_CACHE_DIR"] = str(
    _CHECKOUT / ".cache" / f"numba-{hashlib.sha256(_sources).hexdigest()[:16]}"
)

import numpy as np  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

import cunorm  # noqa: E402

# A first example may compile kernels, which takes seconds.
settings.register_profile(
    "cunorm", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("cunorm")


@pytest.fixture
def rng():
    return np.random.default_rng(20260101)


@pytest.fixture
def threads():
    """Restore the number of threads after a test that sets it."""
    before = cunorm.get_num_threads()
    yield cunorm.set_num_threads
    cunorm.set_num_threads(before)


@pytest.fixture
def small_pieces(monkeypatch):
    """Cut arrays into pieces so small that little ones take every path of large ones.

    Called with what to change: `resident` whether channels stay near the cache.
    """
    from cunorm.cpu import backward, plan, threads, transform

    def cut(resident: bool) -> None:
        size = 1 << 40 if resident else 0
        for name, value in {
            "_SEGMENT_CHUNK": 96,
            "_COLUMN_CHUNK_BYTES": 2048,
            "_COLUMN_CHUNK_ROWS": 6,
            "_MOST_BLOCK_POSITIONS": 64,
            "_FOLDED_POSITIONS": 48,
            "_PART_BYTES": 512,
            "_MOST_PARTS": 5,
            "_TASK_BYTES": 256,
            "_RESIDENT_RUNS_BYTES": size,
            "_RESIDENT_COLUMNS_BYTES": size,
        }.items():
            assert hasattr(plan, name), name
            monkeypatch.setattr(plan, name, value)
        monkeypatch.setattr(threads, "_BYTES_PER_THREAD", 64)
        for module in (transform, backward):
            monkeypatch.setattr(module, "STREAMING_BYTES", 0)
        plan.plan.cache_clear()

    yield cut
    plan.plan.cache_clear()
