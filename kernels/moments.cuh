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

// 1 / number, to float64's last digits but a few.
__device__ inline double reciprocal(Accumulator number) {
    const double rough = static_cast<double>(1 / number);
    return rough * (2.0 - rough * static_cast<double>(number));
}

struct Moments {
    double mean, m2;
    Accumulator count;

    __device__ void merge(const Moments& other) {
        const Accumulator both = count + other.count;
        const Accumulator share = both == 0 ? 0 : other.count / both;
        const double delta = other.mean - mean;
        m2 += other.m2 + delta * (delta * static_cast<double>(count * share));  // 0 where one is empty
        // Infinity stays infinity; infinities of both signs make NaN.
        mean = is_finite(delta) ? mean + delta * static_cast<double>(share) : mean + other.mean;
        count = both;
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

// Over lanes (reduce.cuh): about the mean that the first of them has these are plain sums. It has
// as many elements as any other, but for unaligned ends of runs as many accesses: so the sum of
// squares is at most 1 + NUMBER / APART times that about the mean of all, or four times as much,
// which costs seven of float64's bits at worst.
template <int NUMBER, int APART = 1> __device__ inline void reduce_lanes(Moments& moments) {
    if (!CENTERED) {
        #pragma unroll
        for (int offset = NUMBER / 2; offset >= APART; offset /= 2)
            moments.m2 += __shfl_down_sync(ALL_LANES, moments.m2, offset, NUMBER);
        return;  // nobody asks how many there are
    }
    double center = __shfl_sync(ALL_LANES, moments.mean, threadIdx.x % APART, NUMBER);
    if (!is_finite(center)) center = 0;  // infinity stays infinity
    const double step = moments.mean - center;
    double sum = static_cast<double>(moments.count) * step;
    double squares = moments.m2 + sum * step;
    #pragma unroll
    for (int offset = NUMBER / 2; offset >= APART; offset /= 2) {
        sum += __shfl_down_sync(ALL_LANES, sum, offset, NUMBER);
        squares += __shfl_down_sync(ALL_LANES, squares, offset, NUMBER);
        moments.count += __shfl_down_sync(ALL_LANES, moments.count, offset, NUMBER);
    }
    const double correction = moments.count == 0 ? 0.0 : sum * reciprocal(moments.count);
    const double rest = squares - correction * sum;
    moments.mean = center + correction;
    moments.m2 = rest < 0 ? 0.0 : rest;  // NaN stays NaN
}

// Moments of the elements that a thread has seen. All of its statistics have as many. Not CENTERED,
// they are about zero: the mean is 0, and m2 the sum of squares.
class Accumulation {
  public:
    __device__ void add(const Tile& tile, const Vector (&x)[TILE]) {
        if (tile.whole()) add<true>(tile, x);
        else add<false>(tile, x);
        if (++tiles == CHUNK) {
            end_chunk();
            move_center();
        }
    }

    // The moments, once all has been added.
    __device__ void finish(Moments (&moments)[STATISTICS]) {
        end_chunk();
        const double each = count == 0 ? 0.0 : reciprocal(count);
        #pragma unroll
        for (int s = 0; s < STATISTICS; ++s) {
            const double correction = sum[s].of_chunks * each;
            const double rest = squares[s].of_chunks - correction * sum[s].of_chunks;
            moments[s] = {center[s] + correction, rest < 0 ? 0.0 : rest, count};  // NaN stays NaN
        }
    }

  private:
    Accumulator center[STATISTICS] = {};
    ChunkedSum sum[STATISTICS], squares[STATISTICS];  // of deviations; 0 unless CENTERED, of squares
    Accumulator count = 0;  // of all; exact up to 2^24 in float32
    Accumulator moving = 0;  // the count at which the center moves
    int tiles = 0;  // of the chunk

    template <bool WHOLE> __device__ void add(const Tile& tile, const Vector (&x)[TILE]) {
        Accumulator number = TILE * LANES;
        if (!WHOLE) {
            number = static_cast<Accumulator>(tile.number());
            if (number == 0) return;
        }
        if (CENTERED && count == 0) {
            #pragma unroll
            for (int s = 0; s < STATISTICS; ++s) {
                Accumulator pivot = widen(x[0], s);
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
                if (!WHOLE && !tile.access[i].valid) continue;
                Accumulator of_vector = 0, squares_of_vector = 0;
                #pragma unroll
                for (int l = 0; l < LANES; ++l) {
                    if (WHOLE || ALIGNED || tile.access[i].has(l)) {
                        const Accumulator d = deviation(widen(x[i], s + l), center[s]);
                        of_vector = l == 0 ? d : of_vector + d;
                        squares_of_vector = l == 0 ? d * d : squares_of_vector + d * d;
                    }
                }
                if (CENTERED) sum[s].chunk += of_vector;
                squares[s].chunk += squares_of_vector;
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
            for (int l = 0; l < LANES; ++l) {
                if (WHOLE || tile.access[i].has(l)) {
                    const Accumulator d = widen(x[i], s + l) - pivot;
                    of_vector = l == 0 ? d : of_vector + d;
                }
            }
            result += of_vector;
        }
        return result;
    }

    __device__ void end_chunk() {
        tiles = 0;
        #pragma unroll
        for (int s = 0; s < STATISTICS; ++s) {
            sum[s].end_chunk();
            squares[s].end_chunk();
        }
    }

    __device__ void move_center() {
        if (!CENTERED || count < moving || count == 0) return;
        moving = 2 * count;
        const double each = reciprocal(count);
        #pragma unroll
        for (int s = 0; s < STATISTICS; ++s) {
            const double before = center[s];
            double& total = sum[s].of_chunks;
            const Accumulator moved = static_cast<Accumulator>(before + total * each);
            if (!is_finite(moved)) continue;
            const double step = moved - before, product = count * step;
            squares[s].of_chunks += step * (product - 2.0 * total);
            total -= product;
            center[s] = moved;
        }
    }
};

// Takes the moments of a group's part of its channels, reading x once.
__device__ inline void take_moments(
    const Element* x, const Geometry& g, const Cut& cut, const Work& work,
    unsigned char* shared, double* partials
) {
    Cursor cursor(g, cut, work);
    Accumulation accumulation;
    for (long long n = 0; n < cut.tiles; ++n) {
        const Tile tile(cursor);
        Vector values[TILE];
        tile.load(x, values);
        accumulation.add(tile, values);
    }
    Moments moments[STATISTICS];
    accumulation.finish(moments);
    write_parts(moments, shared, partials, work, cut);
}
