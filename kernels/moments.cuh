// Count, mean and centred sum of squares.
//
// A tile is taken in registers, twice: for its mean, about a pivot from its own data so
// that a large common offset costs no digits, and for the sums of (x - mean) and of its
// square, the first of which corrects what the rounding of the mean left over. Tiles are
// merged in float64. (Chan, Golub and LeVeque, "Algorithms for computing the sample
// variance", 1983, equations 1.7 and 2.1.) A constant channel has exactly its value as
// mean and exactly zero as sum of squares.
#pragma once

#include "reduce.cuh"

struct Moments {
    double mean, m2;
    Accumulator count;  // a weight; exact up to 2^24 in float32

    static constexpr int NUMBERS = 3;

    __device__ void merge(const Moments& other) {
        if (other.count == 0) return;
        if (count == 0) {
            *this = other;
            return;
        }
        const Accumulator share = other.count / (count + other.count);
        const double delta = other.mean - mean;
        m2 += other.m2 + delta * delta * static_cast<double>(count * share);
        // Infinity stays infinity; infinities of both signs make NaN.
        mean = is_finite(delta) ? mean + delta * static_cast<double>(share) : mean + other.mean;
        count += other.count;
    }

    __device__ Moments down(int offset, int width) const {
        return {__shfl_down_sync(ALL_LANES, mean, offset, width),
                __shfl_down_sync(ALL_LANES, m2, offset, width),
                __shfl_down_sync(ALL_LANES, count, offset, width)};
    }

    __device__ static Moments read(const double* partials, Offset i) {
        return {::read(partials + 3 * i), ::read(partials + 3 * i + 1),
                static_cast<Accumulator>(::read(partials + 3 * i + 2))};
    }

    __device__ void write(double* partials, Offset i) const {
        ::write(partials + 3 * i, mean);
        ::write(partials + 3 * i + 1, m2);
        ::write(partials + 3 * i + 2, static_cast<double>(count));
    }
};

// Elements of a tile that belong to a thread's statistic `s`: all lanes of runs, lane `s`
// of columns.
constexpr int LANES = COLUMNS ? 1 : WIDTH;

template <bool WHOLE> __device__ inline void add_tile(
    Moments& moments, int s, const Tile& tile, const Vector (&x)[TILE]
) {
    Accumulator count = TILE * LANES;
    if (!WHOLE) {
        count = 0;
        #pragma unroll
        for (int i = 0; i < TILE; ++i)
            #pragma unroll
            for (int l = 0; l < LANES; ++l) count += tile.access[i].has(s + l) ? 1 : 0;
        if (count == 0) return;
    }
    Accumulator pivot = widen(x[0].lane[s]);
    if (!is_finite(pivot)) pivot = 0;
    Accumulator total = 0;
    #pragma unroll
    for (int i = 0; i < TILE; ++i) {
        Accumulator sum = 0;
        #pragma unroll
        for (int l = 0; l < LANES; ++l)
            if (WHOLE || tile.access[i].has(s + l)) sum += widen(x[i].lane[s + l]) - pivot;
        total += sum;
    }
    const Accumulator center = pivot + total / count;
    Accumulator rest = 0, squares = 0;
    #pragma unroll
    for (int i = 0; i < TILE; ++i) {
        Accumulator sum = 0, square = 0;
        #pragma unroll
        for (int l = 0; l < LANES; ++l) {
            if (WHOLE || tile.access[i].has(s + l)) {
                const Accumulator deviation = widen(x[i].lane[s + l]) - center;
                sum += deviation;
                square += deviation * deviation;
            }
        }
        rest += sum;
        squares += square;
    }
    const Accumulator correction = rest / count;
    const Accumulator m2 = squares - rest * correction;
    const double middle = center;
    moments.merge({is_finite(middle) ? middle + static_cast<double>(correction) : middle,
                   static_cast<double>(m2 < 0 ? 0 : m2), count});  // NaN stays NaN
}

__device__ inline void add_tile(
    Moments (&moments)[STATISTICS], const Tile& tile, const Vector (&x)[TILE]
) {
    if (tile.whole()) {
        #pragma unroll
        for (int s = 0; s < STATISTICS; ++s) add_tile<true>(moments[s], s, tile, x);
    } else {
        #pragma unroll
        for (int s = 0; s < STATISTICS; ++s) add_tile<false>(moments[s], s, tile, x);
    }
}
