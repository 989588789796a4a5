// Gradients of the parameters of rows, which a block adds up in shared memory while it takes one
// row after another.
#pragma once

#include "reduce.cuh"

// N sums.
template <int N> struct Totals {
    double of[N];

    __device__ void merge(const Totals& other) {
        #pragma unroll
        for (int i = 0; i < N; ++i) of[i] += other.of[i];
    }

    __device__ Totals down(int offset, int width) const {
        Totals result;
        #pragma unroll
        for (int i = 0; i < N; ++i)
            result.of[i] = __shfl_down_sync(ALL_LANES, of[i], offset, width);
        return result;
    }
};

// Numbers that are kept of an access: one of each element, or of all if they share a parameter.
constexpr int KEPT = SPANS > 1 ? WIDTH : 1;

// As many of them as an access to shared memory moves.
constexpr int BUNDLE = KEPT * sizeof(Accumulator) < 16 ? KEPT : 16 / sizeof(Accumulator);

// What threads keep: PLANES times KEPT numbers of each of their accesses, one after another, in
// planes of one bundle a thread, so that neighbouring threads are neighbours in shared memory.
template <int PLANES> struct Kept {
    Accumulator* place;
    __device__ Accumulator& at(int k, int slot, int lane, int thread) const {
        const int kept = lane % KEPT;
        const int plane = (slot * PLANES + k) * (KEPT / BUNDLE) + kept / BUNDLE;
        return place[(plane * THREADS + thread) * BUNDLE + kept % BUNDLE];
    }

    // This thread's numbers of an access.
    __device__ void get(int slot, Accumulator (&numbers)[PLANES][KEPT]) const {
        #pragma unroll
        for (int i = 0; i < PLANES * KEPT; i += BUNDLE) {
            const Bundle mine = bundle(i / KEPT, slot, i % KEPT);
            #pragma unroll
            for (int j = 0; j < BUNDLE; ++j) numbers[i / KEPT][i % KEPT + j] = mine.number[j];
        }
    }

    __device__ void put(int slot, const Accumulator (&numbers)[PLANES][KEPT]) const {
        #pragma unroll
        for (int i = 0; i < PLANES * KEPT; i += BUNDLE) {
            Bundle mine;
            #pragma unroll
            for (int j = 0; j < BUNDLE; ++j) mine.number[j] = numbers[i / KEPT][i % KEPT + j];
            bundle(i / KEPT, slot, i % KEPT) = mine;
        }
    }

    // The address after a number of accesses of every thread.
    __device__ Accumulator* after(int slots) const { return &at(0, slots, 0, 0); }

    __device__ void clear(int slots) const {
        for (int slot = 0; slot < slots; ++slot)
            #pragma unroll
            for (int i = 0; i < PLANES * KEPT; ++i) at(i / KEPT, slot, i, threadIdx.x) = 0;
    }

    // Those of one of the part's numbers, from all groups of the block, in order.
    __device__ Totals<PLANES> total(Offset number) const {
        const Offset access = number / KEPT;
        const int lane = static_cast<int>(number % KEPT);
        const int slot = static_cast<int>(access / GROUP);
        Totals<PLANES> totals = {};
        for (int thread = access % GROUP; thread < THREADS; thread += GROUP) {
            #pragma unroll
            for (int k = 0; k < PLANES; ++k) totals.of[k] += at(k, slot, lane, thread);
        }
        return totals;
    }

    // Writes the parameters' gradients of a block of samples, for a part of a row of each:
    // gradients[block][plane][parameter]. All threads of the block call it.
    __device__ void write_block(
        Accumulator* gradients, const Geometry& g, const Cut& cut, const Turns& turns
    ) const {
        __syncthreads();
        // The elements of the part and the parameters that they have.
        const Offset span = static_cast<Offset>(g.span), inner = static_cast<Offset>(g.inner);
        const Offset first = turns.part * static_cast<Offset>(cut.share) * WIDTH;
        if (first >= inner) return;
        const Offset rest = inner - first, most = static_cast<Offset>(cut.share) * WIDTH;
        const Offset elements = rest < most ? rest : most;
        const Offset of_sample = static_cast<Offset>(g.group) * (inner / span);
        Accumulator* const target = gradients + PLANES * turns.block * of_sample
                                  + turns.index * (inner / span) + first / span;
        const Offset each = span * KEPT / WIDTH;  // numbers of a parameter
        if (each < 32) {  // a thread a parameter
            for (Offset p = threadIdx.x; p < elements / span; p += THREADS) {
                Totals<PLANES> totals = {};
                for (Offset i = p * each; i < (p + 1) * each; ++i) totals.merge(total(i));
                write_totals(target + p, of_sample, totals);
            }
        } else {  // a warp a parameter
            for (Offset p = threadIdx.x / 32; p < elements / span; p += WARPS) {
                Totals<PLANES> totals = {};
                for (Offset i = p * each + threadIdx.x % 32; i < (p + 1) * each; i += 32)
                    totals.merge(total(i));
                reduce_lanes<32>(totals);
                if (threadIdx.x % 32 == 0) write_totals(target + p, of_sample, totals);
            }
        }
    }

  private:
    struct alignas(sizeof(Accumulator) * BUNDLE) Bundle { Accumulator number[BUNDLE]; };

    __device__ Bundle& bundle(int k, int slot, int lane) const {
        return reinterpret_cast<Bundle&>(at(k, slot, lane, threadIdx.x));
    }

    __device__ static void write_totals(
        Accumulator* target, Offset pitch, const Totals<PLANES>& totals
    ) {
        #pragma unroll
        for (int k = 0; k < PLANES; ++k)
            write(target + k * pitch, static_cast<Accumulator>(totals.of[k]));
    }
};
