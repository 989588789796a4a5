"""Runs tests that are written for NumPy arrays on a GPU.

Every call's arrays are copied to the GPU with the memory they lie in, so that overlaps,
gaps and orders of axes are the same there, and are copied back when the call is over.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np

from cunorm import arrays, checks


def _owner(array):
    """The array whose memory another is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Uploaded:
    """The place of a call: CuPy, with copies of the caller's arrays."""

    def __init__(self, cupy, read_only):
        self.xp = self.memory = cupy
        self.backend = arrays.cuda_backend()
        self.read_only = read_only
        self._memory = {}  # by address: the host's bytes, the GPU's, whether to copy back

    def view(self, array):
        owner = _owner(array)
        first, end = np.lib.array_utils.byte_bounds(owner)
        if first not in self._memory:
            size = max(1, end - first)
            host = np.frombuffer((ctypes.c_uint8 * size).from_address(first), np.uint8)
            # At the same distance from a 16-byte boundary.
            gpu = self.xp.empty(size + 16, np.uint8)[first % 16 :][:size]
            gpu[...] = self.xp.asarray(host)
            self._memory[first] = host, gpu, owner.flags.writeable, owner
        _, gpu, _, _ = self._memory[first]
        offset = array.__array_interface__["data"][0] - first
        return self.xp.ndarray(array.shape, array.dtype, gpu.data + offset, array.strides)

    def export(self, *results, given=None):
        if given is not None:
            return given, *self.export(*results[1:])
        return tuple(None if array is None else self._download(array) for array in results)

    @staticmethod
    def _download(array):
        order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
        return array.transpose(order).get().transpose(np.argsort(order))

    def __enter__(self):
        return None

    def __exit__(self, *exception):
        for host, gpu, writable, _ in self._memory.values():
            if writable and exception[0] is None:
                host[...] = gpu.get()


def install(monkeypatch):
    """Make NumPy arrays compute on the current GPU."""
    import cupy

    if os.environ.get("CUNORM_TEST_WITHOUT_POOL"):
        cupy.cuda.set_allocator(None)
    original = arrays.adopt

    def adopt(names, *values):
        if any(v is not None and not isinstance(v, np.ndarray) for v in values):
            return original(names, *values)
        if any(isinstance(v, np.ma.MaskedArray) for v in values):
            return original(names, *values)
        if len(names) == 1 and names != ("x",):  # the state of a layer, seen and not computed
            return original(names, *values)
        read_only = tuple(
            name for name, v in zip(names, values, strict=True)
            if v is not None and not v.flags.writeable
        )  # fmt: skip
        if "out" in read_only:
            raise arrays.read_only_error("out")
        place = Uploaded(cupy, read_only)
        views = [None if v is None else _checked(place, v) for v in values]
        return views, place

    monkeypatch.setattr(arrays, "adopt", adopt)
    for name in ("are_usual", "are_usual_in_backward"):
        monkeypatch.setattr(checks, name, _if_on_gpu(getattr(checks, name)))


def _if_on_gpu(check):
    """The same of CuPy's arrays alone: NumPy's take the way that copies them."""
    return lambda array, *others, **options: (
        not isinstance(array, np.ndarray) and check(array, *others, **options)
    )


def _checked(place, array):
    """On the GPU, unless CuPy has no such dtype: then it is there to be refused."""
    known = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    if not array.flags.aligned:  # which nothing on a GPU is; in the tests inputs alone
        array = array.copy()
    return place.view(array) if known and array.dtype.isnative else array
