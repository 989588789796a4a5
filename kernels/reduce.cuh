// Reductions over the threads that share a statistic, over the blocks of a cluster, and
// over partial results in global memory. All of them are trees whose shape depends on
// nothing but the specialization and the launch, so the same bits come out every time.
//
// A partial result P has `merge(const P&)`, `down(offset, width)` (that of the lane
// `offset` further on), and `read` and `write` of a few doubles in global memory.
// (Moments are reduced over lanes in a way of their own: see moments.cuh.)
#pragma once

#include "layout.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;

// Tiles of a chunk, whose sums are taken in the accumulator type: 16 elements of a statistic at
// least, 256 at most.
constexpr int CHUNK = 8;

struct ChunkedSum {
    double of_chunks = 0;  // that have ended
    Accumulator chunk = 0;

    __device__ void end_chunk() {
        of_chunks += chunk;
        chunk = 0;
    }
};

// Over lanes of a warp that are APART from each other, of each NUMBER of them, both powers of
// two: the first APART hold the results.
template <int NUMBER, int APART = 1, class P> __device__ inline void reduce_lanes(P& value) {
    #pragma unroll
    for (int offset = NUMBER / 2; offset >= APART; offset /= 2)
        value.merge(value.down(offset, NUMBER));
}

// Over the lanes of a warp that share a statistic: the first ACROSS of them hold the result.
template <class P> __device__ inline void reduce_warp(P (&values)[STATISTICS]) {
    #pragma unroll
    for (int s = 0; s < STATISTICS; ++s) reduce_lanes<GROUP_LANES, ACROSS>(values[s]);
}

// What a block folds its warps' results in.
template <class P> struct Folds {
    P partials[WARPS * POSITIONS];  // of every warp
    P totals[POSITIONS];            // of the block; other blocks of the cluster read it
};

// Shared memory of a block before the elements that it keeps.
template <class P, class C> struct Header {
    Folds<P> folds;
    C coefficients[POSITIONS];
};

// Over the threads of a block: afterwards `totals` holds the results, and all threads may
// read it. Warps are folded by as many neighbouring lanes.
template <class P> __device__ inline void reduce_block(P (&values)[STATISTICS], Folds<P>& folds) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    reduce_warp(values);
    if (lane < ACROSS) {
        #pragma unroll
        for (int s = 0; s < STATISTICS; ++s)
            folds.partials[warp * POSITIONS + lane * STATISTICS + s] = values[s];
    }
    __syncthreads();
    const int from = threadIdx.x % WARPS;
    for (int base = 0; base < POSITIONS; base += 32) {
        const int position = base + threadIdx.x / WARPS;
        if (base + warp * 32 / WARPS >= POSITIONS) break;  // the same for a whole warp
        P value = {};
        if (position < POSITIONS) value = folds.partials[from * POSITIONS + position];
        reduce_lanes<WARPS>(value);
        if (from == 0 && position < POSITIONS) folds.totals[position] = value;
    }
    __syncthreads();
}

// Clusters exist on compute capability 9.0 and newer. A barrier that orders what all threads have
// read and written costs each of them a wait for that. So what the block's first thread, or any
// before a barrier of the block, has written is published by that one.
__device__ inline void cluster_publish() {
#if CLUSTER > 1
    if (threadIdx.x == 0) fence_cluster();
    __cluster_barrier_arrive_relaxed();
#endif
}

// Says that this thread has read what others published. A relaxed arrival would not do: it may
// overtake the reads, and a block that has left has nothing to be read.
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

// Over `number` partial results from `first` on, by one warp: lane 0 holds the result.
template <class P> __device__ inline P reduce_parts(
    const double* partials, Offset first, Offset number
) {
    constexpr int at_once = 4;  // asked for before the first is waited for
    P value = {};
    for (Offset part = threadIdx.x % 32; part < number; part += at_once * 32) {
        P next[at_once];
        #pragma unroll
        for (int i = 0; i < at_once; ++i)
            next[i] = part + i * 32 < number ? P::read(partials, first + part + i * 32) : P{};
        #pragma unroll
        for (int i = 0; i < at_once; ++i) value.merge(next[i]);
    }
    reduce_lanes<32>(value);
    return value;
}

// Writes a group's part of the results of its channels, folded over its threads.
template <class P> __device__ inline void write_parts(
    P (&values)[STATISTICS], unsigned char* shared, double* partials, const Work& work,
    const Cut& cut
) {
    const Offset parts = static_cast<Offset>(cut.parts);
    if (GROUP < THREADS) {
        reduce_warp(values);
        if (threadIdx.x % GROUP == 0 && work.positions)
            values[0].write(partials, work.channel * parts + work.part);
        return;
    }
    auto& folds = *reinterpret_cast<Folds<P>*>(shared);
    reduce_block(values, folds);
    #pragma unroll 1
    for (Offset p = threadIdx.x; p < work.positions; p += THREADS)
        folds.totals[p].write(partials, (work.channel + p) * parts + work.part);
}

// A thread's own of the coefficients of a block.
template <class C> __device__ inline void take(C (&mine)[STATISTICS], const C* all) {
    #pragma unroll
    for (int s = 0; s < STATISTICS; ++s) mine[s] = all[threadIdx.x % ACROSS * STATISTICS + s];
}

// Gives every thread the coefficients of its statistics; `find` makes those of a position,
// called by one thread of each group.
template <class C, class Find> __device__ inline void distribute(
    C (&mine)[STATISTICS], unsigned char* shared, const Work& work, Find find
) {
    if (GROUP < THREADS) {
        mine[0] = (threadIdx.x % GROUP == 0 && work.positions ? find(0) : C{}).from_lane_0();
        return;
    }
    auto* all = reinterpret_cast<C*>(shared);
    #pragma unroll 1
    for (Offset p = threadIdx.x; p < work.positions; p += THREADS) all[p] = find(p);
    __syncthreads();
    take(mine, all);
}

// Where a block's threads, or those of a cluster, meet before they fold again.
__device__ inline void meet() {
    if (CLUSTER > 1) cluster_wait();
    else if (GROUP == THREADS) __syncthreads();
}

// `fold` for a block that has one statistic. Every warp folds the totals of all for itself, so one
// barrier is enough, and one of the cluster.
template <class P, class C, class Weigh, class Finish> __device__ inline void fold_run(
    P (&values)[STATISTICS], C (&mine)[STATISTICS], unsigned char* shared, Weigh weigh,
    Finish finish
) {
    auto& folds = *reinterpret_cast<Folds<P>*>(shared);
    static_assert(sizeof(folds) <= HEADER || GROUP < THREADS, "room for the warps' results");
    const int lane = threadIdx.x % 32;
    reduce_warp(values);
    if (lane == 0) folds.partials[threadIdx.x / 32] = values[0];
    __syncthreads();
    P total = {};
    if (lane < WARPS) total = folds.partials[lane];
    reduce_lanes<WARPS>(total);
#if CLUSTER > 1
    if (threadIdx.x == 0) folds.totals[0] = total;
    cluster_publish();
    cluster_wait();
    total = {};
    if (lane < CLUSTER)
        total = *static_cast<P*>(
            __cluster_map_shared_rank(folds.totals, static_cast<unsigned>(lane)));
    reduce_lanes<CLUSTER>(total);
    cluster_arrive();
#endif
    C found = {};
    if (lane == 0) found = finish(0, total, weigh(0, total), threadIdx.x == 0);
    mine[0] = found.from_lane_0();
}

// Makes of the threads' values the coefficients that each of them needs. `weigh(position,
// total)` is what the total of a channel adds to its statistic; `finish(position, total, all,
// first)` turns that total, and that of the statistic, into coefficients, and `first` is true for
// one of the threads of a block that call it. The blocks of a cluster read each other's totals,
// so each waits at its end (`cluster_wait`) until all have read. Before a block folds again, all
// of its threads have met.
template <class P, class C, class Weigh, class Finish> __device__ inline void fold(
    P (&values)[STATISTICS], C (&mine)[STATISTICS], unsigned char* shared, const Work& work,
    const Geometry& g, Weigh weigh, Finish finish
) {
    if (GROUP < THREADS) {
        reduce_warp(values);
        C found = {};
        if (threadIdx.x % GROUP == 0 && work.positions)
            found = finish(0, values[0], weigh(0, values[0]), true);
        mine[0] = found.from_lane_0();
        return;
    }
    if (!COLUMNS) {
        fold_run(values, mine, shared, weigh, finish);
        return;
    }
    auto& header = *reinterpret_cast<Header<P, C>*>(shared);
    static_assert(GROUP < THREADS || sizeof(header) <= HEADER, "room for the header");
    reduce_block(values, header.folds);
    cluster_publish();
    cluster_wait();
    P* const weighted = header.folds.partials;  // nobody needs these any more
    if (MERGED) {
        for (Offset p = threadIdx.x; p < work.positions; p += THREADS)
            weighted[p] = weigh(p, cluster_total(header.folds.totals, p));
        __syncthreads();
    }
    #pragma unroll 1
    for (Offset p = threadIdx.x; p < work.positions; p += THREADS) {
        const P total = cluster_total(header.folds.totals, p);
        P all = {};
        if (MERGED) {
            const Offset members = static_cast<Offset>(g.members);
            const Offset first = p / members * members;
            for (Offset m = first; m < first + members; ++m) all.merge(weighted[m]);
        } else {
            all = weigh(p, total);
        }
        header.coefficients[p] = finish(p, total, all, true);
    }
    cluster_arrive();
    __syncthreads();
    take(mine, header.coefficients);
}
