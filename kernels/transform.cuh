// y = (x - mean) * inv_std * weight + bias, as far as all kernels share it.
#pragma once

#include "moments.cuh"

// Of one channel; where parameters change within runs (SPANS), without them.
struct Coefficients {
    Accumulator mean, scale, shift;

    __device__ Coefficients from_lane_0() const {
        return {__shfl_sync(ALL_LANES, mean, 0, GROUP_LANES),
                __shfl_sync(ALL_LANES, scale, 0, GROUP_LANES),
                __shfl_sync(ALL_LANES, shift, 0, GROUP_LANES)};
    }
};

struct TransformArguments {
    const Element* x;
    Element* y;
    // Given ones, each of which may be absent, unless running ones are used.
    const Accumulator *mean, *residual, *inv_std;
    double* partials;        // moments of `parts` parts
    // What was used, if it was not given: rows mean, inv_std, residual (what rounding took
    // from the mean) and variance.
    Accumulator* statistics;
    Parameter weight, bias, running_mean, running_var;
    double eps, scale, factor;  // scale: of the batch's biased variance when it is blended
    double weight_offset;
    double each;                // 1 / n
    long long samples;          // of a block (normalize_rows)
    Geometry geometry;
    Cut cut;
};

// Begins to bring here what will be asked for once the statistics are known.
__device__ inline void prefetch(const TransformArguments& a, const Work& work) {
    const Offset position = threadIdx.x % GROUP;
    if (SPANS || position >= work.positions) return;
    const Offset parameter = work.parameter + position;
    a.weight.prefetch(parameter);
    a.bias.prefetch(parameter);
    a.running_mean.prefetch(parameter);
    a.running_var.prefetch(parameter);
}

// What memory has of a channel, all of which is asked for before any is used; of rows nothing.
struct Given {
    Parameter::Asked weight = {}, bias = {}, running_mean = {}, running_var = {};

    __device__ Given(const TransformArguments& a, Offset parameter) {
        if (SPANS) return;
        weight = a.weight.ask(parameter);
        bias = a.bias.ask(parameter);
        running_mean = a.running_mean.ask(parameter);
        running_var = a.running_var.ask(parameter);
    }
};

// The shift makes up for the residual: what rounding took from the mean.
__device__ inline Coefficients combine(
    const TransformArguments& a, const Given& given, Accumulator mean, double residual,
    double inv_std
) {
    const double scale =
        SPANS ? inv_std : inv_std * a.weight.number(given.weight, 1.0, a.weight_offset);
    const double bias = SPANS ? 0.0 : a.bias.number(given.bias, 0.0);
    const double shift = bias - times_residual(residual, scale);
    return {mean, static_cast<Accumulator>(scale), static_cast<Accumulator>(shift)};
}

// Coefficients from a mean and variance in float64, which are saved if `first`: if this is
// the one thread that does so.
__device__ inline Coefficients save(
    const TransformArguments& a, Offset statistic, const Given& given, double mean, double var,
    bool first
) {
    const Accumulator rounded = static_cast<Accumulator>(mean);
    const Accumulator inv_std = static_cast<Accumulator>(rsqrt(var + a.eps));
    const Accumulator residual =
        is_finite(rounded) ? static_cast<Accumulator>(mean - static_cast<double>(rounded)) : 0;
    if (first) {
        const Offset row = statistic_of(a.geometry, static_cast<Offset>(
            a.geometry.batch * a.geometry.group));
        write(a.statistics + statistic, rounded);
        write(a.statistics + row + statistic, inv_std);
        write(a.statistics + 2 * row + statistic, residual);
        write(a.statistics + 3 * row + statistic, static_cast<Accumulator>(var));
    }
    return combine(a, given, rounded, residual, inv_std);
}

// The same from the moments of a whole statistic, which go into the running statistics.
__device__ inline Coefficients save_batch(
    const TransformArguments& a, Offset channel, Offset parameter, const Moments& all, bool first
) {
    const Geometry& g = a.geometry;
    const Given given(a, parameter);
    const double var = all.m2 * a.each;
    if (first && !SPANS) {
        a.running_mean.blend(parameter, given.running_mean, all.mean, a.factor);
        a.running_var.blend(parameter, given.running_var, var * a.scale, a.factor);
    }
    const Offset statistic = statistic_of(g, channel);
    first = first && statistic * static_cast<Offset>(g.members) == channel;
    return save(a, statistic, given, all.mean, var, first);
}

// Parameters of a tile, where they change within runs.
struct Spread {
    Accumulator weight[TILE][WIDTH], bias[TILE][WIDTH];

    __device__ void read(const TransformArguments& a, const Work& work, const Tile& tile) {
        if (!SPANS) return;
        spread(a.weight, a.geometry, work, tile, 1.0, a.weight_offset, weight);
        if (BIASED) spread(a.bias, a.geometry, work, tile, 0.0, 0.0, bias);
    }
};

__device__ inline void transform_tile(
    const TransformArguments& a, const Tile& tile, const Vector (&x)[TILE],
    const Coefficients (&coefficients)[STATISTICS], const Spread& parameters
) {
    #pragma unroll
    for (int i = 0; i < TILE; ++i) {
        Elements result;
        #pragma unroll
        for (int lane = 0; lane < WIDTH; ++lane) {
            const Coefficients& c = coefficients[COLUMNS ? lane : 0];
            Accumulator value = deviation(widen(x[i], lane), c.mean) * c.scale;
            if (BIASED) value += c.shift;
            if (SPANS) value *= parameters.weight[i][lane];
            if (SPANS && BIASED) value += parameters.bias[i][lane];
            result.lane[lane] = narrow(value);
        }
        tile.access[i].store(a.y, result);
    }
}
