"""Compiled kernels on disk: Numba's format and folders, but never the wrong kernel, never an error.

Numba tells a fresh copy by the file of the function alone, not by what it calls, and keeps an
index that two processes may write at once. Here each specialization has a file of its own, named
by the function, its types and the processor, which begins with two digests: of all sources and
versions that it was made from, and of what follows. A file that does not begin so is written anew.

Where nothing can be kept, on a full disk say, a warning says so once, and kernels are compiled
by every process.
"""

from __future__ import annotations

import contextlib
import pickle
import uuid
import warnings
from functools import cache
from hashlib import sha256
from pathlib import Path

import llvmlite
import numba
import numpy as np
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps

from .._version import __version__

__all__ = ["KernelCache", "warn_not_kept"]

_DIGEST = sha256().digest_size


@cache
def _sources():
    """Digest of all that compiled code is made from, but for the function and its types."""
    package = Path(__file__).resolve().parent.parent
    found = sha256()
    for path in sorted(package.glob("*.py")) + sorted(package.glob("cpu/*.py")):
        found.update(path.read_bytes())
    versions = __version__, numba.__version__, llvmlite.__version__, np.__version__
    found.update(repr(versions).encode())
    return found.digest()


@cache
def warn_not_kept(why):
    warnings.warn(
        f"compiled kernels cannot be kept on disk: {why}; every process compiles them anew. The "
        "environment variable NUMBA_CACHE_DIR can name another folder",
        RuntimeWarning,
        stacklevel=2,
    )


class KernelCache(FunctionCache):  # type: ignore[misc]
    """The copies on disk of one function's specializations."""

    def _load_overload(self, sig, target_context):
        try:
            content = self._file(sig, target_context.codegen()).read_bytes()
        except OSError:
            return None
        head, body = content[: 2 * _DIGEST], content[2 * _DIGEST :]
        if head != _head(body):
            return None
        return self._impl.rebuild(target_context, pickle.loads(body))

    def _save_overload(self, sig, data):
        if not self._impl.check_cachable(data):
            return
        body = dumps(self._impl.reduce(data))
        try:
            self._impl.locator.ensure_cache_path()
            _replace(self._file(sig, data.codegen), _head(body) + body)
        except OSError as error:
            warn_not_kept(str(error))

    def _file(self, sig, codegen):
        key = repr(self._index_key(sig, codegen)).encode()
        return Path(
            self.cache_path, f"{self._impl.filename_base}.{sha256(key).hexdigest()[:16]}.nbc"
        )


def _head(body):
    return _sources() + sha256(body).digest()


def _replace(path, content):
    """Write a file, for whoever reads it all at once."""
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex}")  # readable as the umask has it
    try:
        new.write_bytes(content)
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
