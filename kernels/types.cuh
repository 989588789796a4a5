// What a kernel is specialized for, and the types that follow from it.
//
// The host defines (see cunorm/cuda/launch.py):
//   ELEMENT_FLOAT16, ELEMENT_BFLOAT16, ELEMENT_FLOAT32 or ELEMENT_FLOAT64
//   WIDE         1: offsets need 64 bits
//   COLUMNS      0: a statistic's elements are runs along memory (`inner` > 1)
//                1: statistics lie side by side along memory (`inner` == 1)
//   WIDTH        elements of one memory access
//   ALIGNED      1: every run begins and ends with a whole access
//   TILE         accesses that a thread has in flight for each input
//   THREADS      threads of a block
//   GROUP        threads that share a statistic: 8, 16 or 32, or all of the block
//   ACROSS       threads side by side along a row of columns; 1 for runs
//   CLUSTER      blocks of a cluster, which share statistics; 1: no cluster
//   AT_ONCE      blocks that the registers of a multiprocessor are to hold
//   HEADER       bytes of shared memory before the elements that are kept there
//   MERGED       1: neighbouring channels, `members` of them, share a statistic
//   SPANS        parameters of runs: 0: one a run, of its channel; 1: they change between
//                accesses; 2: within them; 3: with every element
//   PARAMETERS   type of those that change: 0: float, 1: double, 2: __half, 3: __nv_bfloat16
//   CENTERED     0: statistics are about zero
//   SHELVES      2: a group that takes rows in turns has room for the next; 1: it has not
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if defined(ELEMENT_FLOAT16)
using Element = __half;
using Accumulator = float;
#elif defined(ELEMENT_BFLOAT16)
using Element = __nv_bfloat16;
using Accumulator = float;
#elif defined(ELEMENT_FLOAT32)
using Element = float;
using Accumulator = float;
#elif defined(ELEMENT_FLOAT64)
using Element = double;
using Accumulator = double;
#endif

#if PARAMETERS == 0
using Number = float;
#elif PARAMETERS == 1
using Number = double;
#elif PARAMETERS == 2
using Number = __half;
#else
using Number = __nv_bfloat16;
#endif

#if WIDE
using Offset = unsigned long long;
using Signed = long long;
#else
using Offset = unsigned;
using Signed = int;
#endif

constexpr int STATISTICS = COLUMNS ? WIDTH : 1;   // of a thread
constexpr int POSITIONS = ACROSS * STATISTICS;    // statistics of a group of threads
constexpr int DEEP = GROUP / ACROSS;              // threads that share each of them
constexpr int WARPS = THREADS / 32;
constexpr bool BIASED = CENTERED || !SPANS;  // rows whose statistics are about zero have no bias
constexpr int GROUP_LANES = GROUP < 32 ? GROUP : 32;  // of a warp that share a statistic

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
// Of kernels that sum what they do not hold it holds twice as many: where a block waits for memory, or
// for other blocks, the next does not. Layouts and types that would spill so have as many registers as others.
constexpr bool MANY_REGISTERS = COLUMNS || !ALIGNED || WIDE || sizeof(Element) * WIDTH == 2
                             || sizeof(Element) == 8;
#define LEAN_KERNEL \
    extern "C" __global__ void __launch_bounds__(THREADS, (MANY_REGISTERS ? 1 : 2) * AT_ONCE)
#if CLUSTER > 1
#define CLUSTER_KERNEL KERNEL __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_KERNEL KERNEL
#endif

static_assert(THREADS % 32 == 0 && (WARPS & (WARPS - 1)) == 0 && THREADS <= 512, "whole warps");
static_assert(GROUP == THREADS || GROUP == 32 || GROUP == 16 || GROUP == 8,
              "a group is a block, a warp or a part of a warp");
static_assert(ACROSS <= 32 && (ACROSS & (ACROSS - 1)) == 0, "a warp holds whole rows");
static_assert(COLUMNS || ACROSS == 1, "runs lie along memory");
static_assert(!COLUMNS || (ALIGNED && GROUP == THREADS), "columns are taken by blocks, aligned");
static_assert(!MERGED || COLUMNS, "merged runs are one run");
static_assert(!SPANS || (!COLUMNS && ALIGNED), "rows are runs, taken alike");

__device__ inline Accumulator widen(Element value) {
#if defined(ELEMENT_FLOAT16)
    return __half2float(value);
#elif defined(ELEMENT_BFLOAT16)
    return __bfloat162float(value);
#else
    return value;
#endif
}

__device__ inline Element narrow(Accumulator value) {
#if defined(ELEMENT_FLOAT16)
    return __float2half_rn(value);
#elif defined(ELEMENT_BFLOAT16)
    return __float2bfloat16_rn(value);
#else
    return value;
#endif
}

// From the mean that statistics are about.
__device__ inline Accumulator deviation(Accumulator value, Accumulator mean) {
    return CENTERED ? value - mean : value;
}

__device__ inline bool is_finite(double value) {
    return value - value == 0.0;
}

__device__ inline bool is_finite(float value) {
    return value - value == 0.0f;
}

// What rounding took from a mean, times a factor; 0 if that is not finite.
__device__ inline double times_residual(double residual, double factor) {
    const double product = residual * factor;
    return is_finite(product) ? product : 0.0;
}

// The two structures below stand on the host side in the same order.
struct Geometry {
    long long batch, outer, group, inner;
    long long members;     // neighbouring channels that share a statistic
    long long parameters;  // weights: `group`, or every sample has its own
    long long span;        // elements of a run that share a parameter; unused without SPANS
    // element / span == element * span_factor >> span_shift, unless WIDE
    long long span_factor, span_shift;
};

// How a geometry is cut into the work of blocks.
struct Cut {
    long long windows;  // accesses that cover a run; 0 for columns
    long long share;    // accesses (columns: rows) of a part
    long long parts;    // parts of a statistic: blocks that work on it
    long long pieces;   // parts that consecutive blocks have, before those of other statistics
    long long tiles;    // tiles of a part
    long long shift;    // elements from the 16-byte boundary before the arrays to their start
    long long taken;    // of the POSITIONS of a group of threads, those it works on
};
