"""How functions that are inlined into kernels are compiled: as far as their callers need.

Numba optimizes every function and makes machine code of it before it is inlined into a caller,
for which all of that is done again. Nobody runs the machine code of a function that is inlined by
force, and its caller optimizes it knowing with what it is called: LLVM's code of it, as it was
lowered, is enough.
"""

from __future__ import annotations

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

__all__ = ["InlinedCompiler"]


class _Code(JITCodeLibrary):  # type: ignore[misc]
    """LLVM's code, to be linked into that of callers."""

    def _optimize_final_module(self):
        pass

    def _finalize_final_module(self):
        self._finalized = True

    def get_pointer_to_function(self, *_):
        return 0

    @property
    def codegen(self):
        return self  # Numba asks it for the next alone

    def set_env(self, *_):
        """Nothing: environments are of what Python calls."""


class InlinedCompiler(Compiler):  # type: ignore[misc]
    """For ``njit(forceinline=True, pipeline_class=InlinedCompiler)``."""

    def __init__(self, typingctx, targetctx, _library, *rest):
        super().__init__(typingctx, targetctx, _Code(targetctx.codegen(), "inlined"), *rest)
