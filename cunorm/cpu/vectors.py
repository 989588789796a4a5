"""Vectors in LLVM's code, for what a compiler makes slow code of: loops over short runs.

What is left of a run after its whole vectors is one more vector, which ends where the run does; its
first lanes, which the others have had already, count for nothing.
"""

from __future__ import annotations

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils

__all__ = ["REGISTER_BYTES", "WORD", "Vectors"]

#: Bytes of a vector register.
REGISTER_BYTES = 64 if get_host_cpu_features().get("avx512f", False) else 32

WORD = ir.IntType(64)


class Vectors:
    """Writes what is done with vectors of so many numbers."""

    def __init__(self, builder, number, lanes):
        self.builder, self.number, self.lanes = builder, number, lanes
        self.vector = ir.VectorType(number, lanes)

    def splat(self, value):
        """A vector of lanes that are all the same."""
        kind, lane = ir.VectorType(value.type, self.lanes), ir.IntType(32)
        undefined = ir.Constant(kind, ir.Undefined)
        single = self.builder.insert_element(undefined, value, lane(0))
        order = ir.Constant(ir.VectorType(lane, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(single, undefined, order)

    def without_first(self, vectors, lanes):
        """Vectors whose first lanes, so many, are 0."""
        order = ir.Constant(ir.VectorType(WORD, self.lanes), list(range(self.lanes)))
        rest = self.builder.icmp_signed(">=", order, self.splat(lanes))
        nothing = ir.Constant(self.vector, [0.0] * self.lanes)
        return [self.builder.select(rest, vector, nothing) for vector in vectors]

    def over_lanes(self, vector):
        """Sum of a vector's lanes."""
        bits = 32 if self.number == ir.FloatType() else 64
        name = f"llvm.vector.reduce.fadd.v{self.lanes}f{bits}"
        kind = ir.FunctionType(self.number, [self.number, self.vector])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, [self.number(-0.0), vector], fastmath=("reassoc",))
