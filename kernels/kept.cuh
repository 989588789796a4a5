// Gradients of the parameters of rows, which a block adds up in shared memory while it takes one
// row after another.
#pragma once

#include "reduce.cuh"

// What threads keep: PLANES numbers for each of their elements, in planes of one number a thread,
// so that neighbouring threads are neighbours in shared memory.
template <int PLANES> struct Kept {
    Accumulator* place;
    int slots;  // accesses of a thread

    __device__ Accumulator& at(int k, int slot, int lane, int thread) const {
        return place[((k * slots + slot) * WIDTH + lane) * THREADS + thread];
    }

    __device__ void clear() const {
        for (int i = 0; i < PLANES * slots * WIDTH; ++i) place[i * THREADS + threadIdx.x] = 0;
    }

    // Those of an element of the part, from all groups of the block, in order.
    __device__ Totals<PLANES> total(Offset element) const {
        const Offset access = element / WIDTH;
        const int lane = static_cast<int>(element % WIDTH);
        const int slot = static_cast<int>(access / GROUP);
        Totals<PLANES> totals = {};
        for (int thread = access % GROUP; thread < THREADS; thread += GROUP) {
            #pragma unroll
            for (int k = 0; k < PLANES; ++k) totals.of[k] += at(k, slot, lane, thread);
        }
        return totals;
    }

    // Writes the parameters' gradients of a block of samples, for a part of row `index` of each:
    // gradients[block][plane][parameter]. All threads of the block call it.
    __device__ void write_block(
        Accumulator* gradients, const Geometry& g, const Cut& cut, Offset part, Offset index,
        Offset block
    ) const {
        __syncthreads();
        // The elements of the part and the parameters that they have.
        const Offset span = static_cast<Offset>(g.span), inner = static_cast<Offset>(g.inner);
        const Offset first = part * static_cast<Offset>(cut.share) * WIDTH;
        if (first >= inner) return;
        const Offset rest = inner - first, most = static_cast<Offset>(cut.share) * WIDTH;
        const Offset elements = rest < most ? rest : most;
        const Offset of_sample = static_cast<Offset>(g.group) * (inner / span);
        Accumulator* const target =
            gradients + PLANES * block * of_sample + index * (inner / span) + first / span;
        if (span < 32) {  // a thread a parameter
            for (Offset p = threadIdx.x; p < elements / span; p += THREADS) {
                Totals<PLANES> totals = {};
                for (Offset i = p * span; i < (p + 1) * span; ++i) totals.merge(total(i));
                put(target + p, of_sample, totals);
            }
        } else {  // a warp a parameter
            for (Offset p = threadIdx.x / 32; p < elements / span; p += WARPS) {
                Totals<PLANES> totals = {};
                for (Offset i = p * span + threadIdx.x % 32; i < (p + 1) * span; i += 32)
                    totals.merge(total(i));
                reduce_lanes(totals);
                if (threadIdx.x % 32 == 0) put(target + p, of_sample, totals);
            }
        }
    }

  private:
    __device__ static void put(
        Accumulator* target, Offset pitch, const Totals<PLANES>& totals
    ) {
        #pragma unroll
        for (int k = 0; k < PLANES; ++k)
            write(target + k * pitch, static_cast<Accumulator>(totals.of[k]));
    }
};
