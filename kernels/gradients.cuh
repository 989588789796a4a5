// Gradients of y = (x - mean) * inv_std * weight + bias, as far as all kernels share them.
//
// With mean and inv_std computed from n values of x, and sums over these,
//   dx = inv_std * (weight * dy - sum(weight * dy) / n
//                   - (x - mean) * inv_std^2 * sum(weight * dy * (x - mean)) / n)
// (Ioffe and Szegedy, "Batch Normalization", 2015, section 3, where weight is the same for all
// of them); the second term is absent for statistics about zero, both for given ones.
#pragma once

#include "reduce.cuh"

// Sums of dy and dy * (x - mean), about the rounded mean.
struct Sums {
    double dy, dy_xmu;

    __device__ void merge(const Sums& other) {
        dy += other.dy;
        dy_xmu += other.dy_xmu;
    }

    __device__ Sums times(double factor) const { return {dy * factor, dy_xmu * factor}; }

    __device__ Sums down(int offset, int width) const {
        return {__shfl_down_sync(ALL_LANES, dy, offset, width),
                __shfl_down_sync(ALL_LANES, dy_xmu, offset, width)};
    }

    __device__ static Sums read(const double* partials, Offset i) {
        return {::read(partials + 2 * i), ::read(partials + 2 * i + 1)};
    }

    __device__ void write(double* partials, Offset i) const {
        ::write(partials + 2 * i, dy);
        ::write(partials + 2 * i + 1, dy_xmu);
    }
};

// Of one channel: dx = dy * scale + ((x - mean) * slope + offset); where parameters change
// within runs (SPANS), dy counts `weight` times.
struct Coefficients {
    Accumulator mean, scale, slope, offset;

    __device__ Coefficients from_lane_0() const {
        return {__shfl_sync(ALL_LANES, mean, 0, GROUP_LANES),
                __shfl_sync(ALL_LANES, scale, 0, GROUP_LANES),
                __shfl_sync(ALL_LANES, slope, 0, GROUP_LANES),
                __shfl_sync(ALL_LANES, offset, 0, GROUP_LANES)};
    }
};

struct BackwardArguments {
    const Element *dy, *x;
    Element* dx;                                  // may be absent
    const Accumulator *mean, *residual, *inv_std; // absent: 0 and 1
    Parameter weight;
    double* partials;                             // sums of `parts` parts of every channel
    // Sums that are known: of every channel; where it shares statistics or parameters change
    // within it, of weight times dy over every statistic.
    const Accumulator *given_dy, *given_dy_xmu;
    // What is made of the sums; each may be absent.
    Accumulator *sum_dy, *sum_dy_xmu;
    Accumulator* gradients;                       // of every sample or block of them: dweight, dbias
    Parameter dweight, dbias;
    double each;                                  // 1 / n, n on all ranks
    double weight_offset;
    long long samples;                            // that a block takes, of rows
    Geometry geometry;
    Cut cut;
};

template <class Arguments>
__device__ inline Accumulator mean_of(const Arguments& a, Offset channel) {
    if (!CENTERED || a.mean == nullptr) return 0;
    return read(a.mean + statistic_of(a.geometry, channel));
}

template <class Arguments>
__device__ inline Accumulator residual_of(const Arguments& a, Offset channel) {
    return a.residual == nullptr ? Accumulator(0) : read(a.residual + statistic_of(a.geometry, channel));
}

template <class Arguments>
__device__ inline Accumulator inv_std_of(const Arguments& a, Offset channel) {
    return a.inv_std == nullptr ? Accumulator(1) : read(a.inv_std + statistic_of(a.geometry, channel));
}

// The means of a thread's channels; 0 where there are none.
template <class Arguments> __device__ inline void read_means(
    const Arguments& a, const Work& work, Accumulator (&mean)[STATISTICS]
) {
    #pragma unroll
    for (int s = 0; s < STATISTICS; ++s) {
        const Offset position = threadIdx.x % ACROSS * STATISTICS + s;
        mean[s] = position < work.positions ? mean_of(a, work.channel + position) : Accumulator(0);
    }
}

// Begins to bring here what will be asked for once the sums are known.
__device__ inline void prefetch(const BackwardArguments& a, const Work& work) {
    const Offset position = threadIdx.x % GROUP;
    if (SPANS || position >= work.positions) return;
    const Offset statistic = statistic_of(a.geometry, work.channel + position);
    a.weight.prefetch(work.parameter + position);
    if (a.inv_std != nullptr) prefetch(a.inv_std + statistic);
    if (a.residual != nullptr) prefetch(a.residual + statistic);
}

__device__ inline double weight_of(const BackwardArguments& a, Offset parameter) {
    return a.weight.get(parameter, 1.0, a.weight_offset);
}

// Coefficients from the sums of weight times dy over a statistic: mean + residual, and inv_std.
__device__ inline Coefficients combine(
    const BackwardArguments& a, Accumulator mean, double residual, double inv_std, double weight,
    const Sums& weighted
) {
    const double slope =
        -(inv_std * inv_std) * (weighted.dy_xmu * inv_std * a.each);  // nothing overflows
    double offset = 0.0;
    if (CENTERED)
        offset = -inv_std * (weighted.dy * a.each) - times_residual(residual, slope);
    return {mean, static_cast<Accumulator>(inv_std * weight), static_cast<Accumulator>(slope),
            static_cast<Accumulator>(offset)};
}

// What memory has of a channel, all of which is asked for before any is used.
struct Known {
    Accumulator mean, residual, inv_std;
    Parameter::Asked asked;

    Known() = default;
    __device__ Known(const BackwardArguments& a, Offset channel, Offset parameter)
        : mean(mean_of(a, channel)), residual(residual_of(a, channel)),
          inv_std(inv_std_of(a, channel)) {
        if (!SPANS) asked = a.weight.ask(parameter);
    }

    __device__ double weight(const BackwardArguments& a) const {
        return SPANS ? 1.0 : a.weight.number(asked, 1.0, a.weight_offset);
    }
};

__device__ inline Coefficients combine(
    const BackwardArguments& a, const Known& known, const Sums& weighted
) {
    return combine(a, known.mean, known.residual, known.inv_std, known.weight(a), weighted);
}

__device__ inline void gradient_tile(
    const BackwardArguments& a, const Tile& tile, const Vector (&dy)[TILE],
    const Vector (&x)[TILE], const Coefficients (&coefficients)[STATISTICS],
    const Accumulator (&weight)[TILE][WIDTH]
) {
    #pragma unroll
    for (int i = 0; i < TILE; ++i) {
        Elements result;
        #pragma unroll
        for (int lane = 0; lane < WIDTH; ++lane) {
            const Coefficients& c = coefficients[COLUMNS ? lane : 0];
            const Accumulator scale = SPANS ? c.scale * weight[i][lane] : c.scale;
            const Accumulator rest = deviation(widen(x[i], lane), c.mean) * c.slope + c.offset;
            result.lane[lane] = narrow(widen(dy[i], lane) * scale + rest);
        }
        tile.access[i].store(a.dx, result);
    }
}

// Weights of a tile, where parameters change within runs.
__device__ inline void read_weights(
    const BackwardArguments& a, const Work& work, const Tile& tile,
    Accumulator (&weight)[TILE][WIDTH]
) {
    if (SPANS) spread(a.weight, a.geometry, work, tile, 1.0, a.weight_offset, weight);
}

// dx of all that a group of threads holds: of the last tile, which is in registers, and of those
// before, which are on the shelf from `first` on.
__device__ inline void gradient_of_held(
    const BackwardArguments& a, const Work& work, const Shelf& shelf, int first, int last,
    const Tile& tile, Vector (&dy)[TILE], Vector (&x)[TILE],
    const Coefficients (&coefficients)[STATISTICS], const Accumulator (&weight)[TILE][WIDTH]
) {
    gradient_tile(a, tile, dy, x, coefficients, weight);
    Cursor cursor(a.geometry, a.cut, work);
    for (int n = 0; n < last; ++n) {
        const Tile held(cursor);
        Accumulator weights[TILE][WIDTH];
        shelf.get(first + n, 0, dy, 2);
        shelf.get(first + n, 1, x, 2);
        read_weights(a, work, held, weights);
        gradient_tile(a, held, dy, x, coefficients, weights);
    }
}
