"""Compiled kernels on disk: Numba's format and folders, but never the wrong kernel, never an error.

Numba tells a fresh copy by the file of the function alone, not by what it calls, and keeps an
index that two processes may write at once. Here each specialization has a file of its own, named
by the function, its types, the processor and its cache, which begins with two digests: of all
sources and versions that it was made from, and of its key and what follows. A file that does not
begin so is written anew.

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
from .memory import second_level_cache

__all__ = ["KernelCache", "warn_not_kept"]

# Kernels fetch by the size of this cache (`plan`), which is not in Numba's key.
_SECOND_LEVEL_BYTES = second_level_cache()

_DIGEST = sha256().digest_size


def _digest_of_sources():
    """Of all that code is compiled from, but for the function and its types; None without files."""
    package = Path(__file__).resolve().parent.parent
    versions = __version__, numba.__version__, llvmlite.__version__, np.__version__
    found = sha256(repr(versions).encode())
    for files in ("*.py", "cpu/*.py"):
        paths = [path for path in sorted(package.glob(files)) if path.is_file()]
        if not paths:  # in an archive, say
            return None
        for path in paths:
            found.update(path.read_bytes())
    return found.digest()


_SOURCES = _digest_of_sources()  # as they are imported


@cache  # so, once
def warn_not_kept(why):
    warnings.warn(
        f"compiled kernels cannot be kept on disk: {why}; every process compiles them anew. The "
        "environment variable NUMBA_CACHE_DIR can name another folder",
        RuntimeWarning,
        stacklevel=2,
    )


class KernelCache(FunctionCache):  # type: ignore[misc]
    """The copies on disk of one function's specializations.

    Raises RuntimeError if there is no folder that can be written, or the sources are no files.
    """

    def __init__(self, function):
        if _SOURCES is None:
            raise RuntimeError("the sources of cunorm are no files")
        try:
            super().__init__(function)
        except RuntimeError as error:  # which names the function
            raise RuntimeError("no folder can be written") from error

    def _load_overload(self, sig, target_context):
        key = self._key(sig, target_context.codegen())
        try:
            content = self._file(key).read_bytes()
        except OSError:
            return None
        head, body = content[: 2 * _DIGEST], content[2 * _DIGEST :]
        if head != _head(key, body):
            return None
        return self._impl.rebuild(target_context, pickle.loads(body))

    def _save_overload(self, sig, data):
        if not self._impl.check_cachable(data):
            return
        key, body = self._key(sig, data.codegen), dumps(self._impl.reduce(data))
        try:
            if _digest_of_sources() != _SOURCES:  # edited since
                return
            self._impl.locator.ensure_cache_path()
            _replace(self._file(key), _head(key, body) + body)
        except OSError as error:
            warn_not_kept(f"{error.strerror}, {self.cache_path}")

    def _key(self, sig, codegen):
        made_for = self._index_key(sig, codegen), _SECOND_LEVEL_BYTES
        return repr((self._impl.filename_base, *made_for)).encode()

    def _file(self, key):
        name = f"{self._impl.filename_base}.{sha256(key).hexdigest()[:16]}.nbc"
        return Path(self.cache_path, name)


def _head(key, body):
    return _SOURCES + sha256(key + body).digest()


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
