// Count, mean and centred sum of squares.
//
// A thread takes the sums of (x - center) and of its square in the accumulator type over chunks
// of CHUNK tiles, and adds these up in float64; the first sum corrects the second. (Chan, Golub
// and LeVeque, "Algorithms for computing the sample variance", 1983, equations 1.7 and 2.1.)
// The center is the mean of the first tile, taken about one of its own elements, and moves to
// the mean of all elements so far after the first chunk, and whenever these have doubled since.
// So a large common offset costs no digits, and nor does an outlier: of the first chunk the sum
// of squares about the center is at most 1 + CHUNK times that about the chunk's mean, and n
// elements that follow m others, at most 2 m of them, add at most three times as much as they
// add to the sum about the mean of all. A constant channel has exactly its value as mean and
// exactly zero as sum of squares.
#pragma once

#include "reduce.cuh"

struct Moments {
    double mean, m2;
    Accumulator count;

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

// Tiles of a chunk: 16 elements of a statistic at least, 256 at most.
constexpr int CHUNK = 8;

// Elements of a tile that belong to a thread's statistic `s`: all lanes of runs, lane `s`
// of columns.
constexpr int LANES = COLUMNS ? 1 : WIDTH;

// Moments of the elements that a thread has seen. All of its statistics have as many.
class Accumulation {
  public:
    // About zero if not `centered`: the mean is 0, and m2 the sum of squares.
    __device__ explicit Accumulation(bool centered) : centered(centered) {}

    __device__ void add(const Tile& tile, const Vector (&x)[TILE]) {
        if (tile.whole()) add<true>(tile, x);
        else add<false>(tile, x);
        if (++tiles == CHUNK) end_chunk();
    }

    // The moments, once all has been added.
    __device__ void finish(Moments (&moments)[STATISTICS]) {
        end_chunk();
        const double each = count == 0 ? 0.0 : static_cast<double>(1 / count);
        #pragma unroll
        for (int s = 0; s < STATISTICS; ++s) {
            const double correction = centered ? sum[s] * each : 0.0;
            const double rest = squares[s] - correction * sum[s];
            moments[s] = {center[s] + correction, rest < 0 ? 0.0 : rest, count};  // NaN stays NaN
        }
    }

  private:
    Accumulator center[STATISTICS] = {};
    double sum[STATISTICS] = {}, squares[STATISTICS] = {};  // of the chunks that have ended
    Accumulator chunk_sum[STATISTICS] = {}, chunk_squares[STATISTICS] = {};
    Accumulator count = 0;  // of all; exact up to 2^24 in float32
    Accumulator moving = 0;  // the count at which the center moves
    int tiles = 0;  // of the chunk
    bool centered;

    template <bool WHOLE> __device__ void add(const Tile& tile, const Vector (&x)[TILE]) {
        Accumulator number = TILE * LANES;
        if (!WHOLE) {
            number = 0;
            #pragma unroll
            for (int i = 0; i < TILE; ++i)
                #pragma unroll
                for (int l = 0; l < LANES; ++l) number += tile.access[i].has(l) ? 1 : 0;
            if (number == 0) return;
        }
        if (count == 0 && centered) {
            #pragma unroll
            for (int s = 0; s < STATISTICS; ++s) {
                Accumulator pivot = widen(x[0].lane[s]);
                if (!is_finite(pivot)) pivot = 0;
                const Accumulator mean = pivot + total<WHOLE>(tile, x, s, pivot) / number;
                center[s] = is_finite(mean) ? mean : 0;
            }
        }
        count += number;
        #pragma unroll
        for (int s = 0; s < STATISTICS; ++s) {
            #pragma unroll
            for (int i = 0; i < TILE; ++i) {
                Accumulator of_vector = 0, squares_of_vector = 0;
                #pragma unroll
                for (int l = 0; l < LANES; ++l) {
                    if (WHOLE || tile.access[i].has(l)) {
                        const Accumulator deviation = widen(x[i].lane[s + l]) - center[s];
                        of_vector += deviation;
                        squares_of_vector += deviation * deviation;
                    }
                }
                chunk_sum[s] += of_vector;
                chunk_squares[s] += squares_of_vector;
            }
        }
    }

    template <bool WHOLE> __device__ static Accumulator total(
        const Tile& tile, const Vector (&x)[TILE], int s, Accumulator pivot
    ) {
        Accumulator result = 0;
        #pragma unroll
        for (int i = 0; i < TILE; ++i) {
            Accumulator of_vector = 0;
            #pragma unroll
            for (int l = 0; l < LANES; ++l)
                if (WHOLE || tile.access[i].has(l)) of_vector += widen(x[i].lane[s + l]) - pivot;
            result += of_vector;
        }
        return result;
    }

    __device__ void end_chunk() {
        tiles = 0;
        #pragma unroll
        for (int s = 0; s < STATISTICS; ++s) {
            sum[s] += chunk_sum[s];
            squares[s] += chunk_squares[s];
            chunk_sum[s] = chunk_squares[s] = 0;
        }
        if (count < moving || !centered || count == 0) return;
        moving = 2 * count;
        const double each = static_cast<double>(1 / count);
        #pragma unroll
        for (int s = 0; s < STATISTICS; ++s) {
            const double before = center[s];
            const Accumulator moved = static_cast<Accumulator>(before + sum[s] * each);
            if (!is_finite(moved)) continue;
            const double step = moved - before, product = count * step;
            squares[s] += step * (product - 2.0 * sum[s]);
            sum[s] -= product;
            center[s] = moved;
        }
    }
};

// Takes the moments of a group's part of its channels, reading x once.
__device__ inline void take_moments(
    const Element* x, bool centered, const Geometry& g, const Cut& cut, const Work& work,
    unsigned char* shared, double* partials
) {
    Cursor cursor(g, cut, work);
    Accumulation accumulation(centered);
    for (long long n = 0; n < cut.tiles; ++n) {
        const Tile tile(cursor);
        Vector values[TILE];
        tile.load<false>(x, values);
        accumulation.add(tile, values);
    }
    Moments moments[STATISTICS];
    accumulation.finish(moments);
    write_parts(moments, shared, partials, work, cut);
}
