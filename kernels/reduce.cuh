// Reductions over the threads that share a statistic, over the blocks of a cluster, and
// over partial results in global memory. All of them are trees whose shape depends on
// nothing but the specialization and the launch, so the same bits come out every time.
//
// A partial result P has `merge(const P&)`, `down(offset, width)` (that of the lane
// `offset` further on), and is a few doubles in global memory, `P::NUMBERS` of them.
#pragma once

#include "layout.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;

// Over the lanes of a warp that share a statistic: the first ACROSS lanes hold the result.
template <class P> __device__ inline void reduce_warp(P (&values)[STATISTICS]) {
    #pragma unroll
    for (int offset = 16; offset >= ACROSS; offset /= 2) {
        #pragma unroll
        for (int s = 0; s < STATISTICS; ++s) values[s].merge(values[s].down(offset, 32));
    }
}

// Over all lanes of a warp: lane 0 holds the result.
template <class P> __device__ inline void reduce_lanes(P& value) {
    #pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value.merge(value.down(offset, 32));
}

// Shared memory of a block before the elements that it keeps.
template <class P, class Coefficients> struct Header {
    P partials[WARPS * POSITIONS];  // of every warp
    P totals[POSITIONS];            // of the block; other blocks of the cluster read it
    Coefficients coefficients[POSITIONS];
};

// Over the threads of a block: afterwards `totals` holds the results, and all threads may
// read it. Warps are folded by as many neighbouring lanes.
template <class P> __device__ inline void reduce_block(
    P (&values)[STATISTICS], P* partials, P* totals
) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    reduce_warp(values);
    if (lane < ACROSS) {
        #pragma unroll
        for (int s = 0; s < STATISTICS; ++s)
            partials[warp * POSITIONS + lane * STATISTICS + s] = values[s];
    }
    __syncthreads();
    const int from = threadIdx.x % WARPS;
    for (int base = 0; base < POSITIONS; base += 32) {
        const int position = base + threadIdx.x / WARPS;
        if (base + warp * 32 / WARPS >= POSITIONS) break;  // the same for a whole warp
        P value = {};
        if (position < POSITIONS) value = partials[from * POSITIONS + position];
        #pragma unroll
        for (int offset = WARPS / 2; offset > 0; offset /= 2)
            value.merge(value.down(offset, WARPS));
        if (from == 0 && position < POSITIONS) totals[position] = value;
    }
    __syncthreads();
}

// Clusters exist on compute capability 9.0 and newer.
__device__ inline void cluster_arrive() {
#if CLUSTER > 1
    __cluster_barrier_arrive();
#endif
}

__device__ inline void cluster_wait() {
#if CLUSTER > 1
    __cluster_barrier_wait();
#endif
}

// The total of one position over the blocks of the cluster, in the order of their ranks.
template <class P> __device__ inline P cluster_total(P* totals, int position) {
#if CLUSTER > 1
    P value = {};
    for (unsigned rank = 0; rank < CLUSTER; ++rank)
        value.merge(*static_cast<P*>(__cluster_map_shared_rank(totals + position, rank)));
    return value;
#else
    return totals[position];
#endif
}

// Over the parts of a statistic, by one warp: lane 0 holds the result.
template <class P> __device__ inline P reduce_parts(
    const double* partials, Offset statistic, Offset parts
) {
    P value = {};
    for (Offset part = threadIdx.x % 32; part < parts; part += 32)
        value.merge(P::read(partials, statistic * parts + part));
    reduce_lanes(value);
    return value;
}
