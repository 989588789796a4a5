// y = (x - mean) * inv_std * weight + bias.
#include "moments.cuh"

// Of one statistic.
struct Coefficients {
    Accumulator mean, scale, shift;

    __device__ Coefficients from_lane_0() const {
        return {__shfl_sync(ALL_LANES, mean, 0), __shfl_sync(ALL_LANES, scale, 0),
                __shfl_sync(ALL_LANES, shift, 0)};
    }
};

struct TransformArguments {
    const Element* x;
    Element* y;
    const Accumulator *mean, *residual, *inv_std;  // given ones, unless running ones are used
    const double* partials;                        // moments of `parts` parts
    // What was used, if it was not given: rows mean, inv_std, residual (what rounding took
    // from the mean).
    Accumulator* statistics;
    Parameter weight, bias, running_mean, running_var;
    double eps, scale, factor;  // scale: of the batch's biased variance when it is blended
    Geometry geometry;
    Cut cut;
};

// The shift makes up for the residual: what rounding took from the mean.
__device__ inline Coefficients combine(
    const TransformArguments& a, Offset channel, Accumulator mean, double residual, double inv_std
) {
    const double scale = inv_std * a.weight.get(channel, 1.0);
    const double shift = a.bias.get(channel, 0.0) - times_residual(residual, scale);
    return {mean, static_cast<Accumulator>(scale), static_cast<Accumulator>(shift)};
}

// Coefficients from a mean and variance in float64, which are saved if `first`: if this is
// the one group of threads that does so.
__device__ inline Coefficients save(
    const TransformArguments& a, Offset statistic, Offset channel, double mean, double var,
    bool first
) {
    const Accumulator rounded = static_cast<Accumulator>(mean);
    const Accumulator inv_std = static_cast<Accumulator>(1.0 / sqrt(var + a.eps));
    const Accumulator residual =
        is_finite(rounded) ? static_cast<Accumulator>(mean - static_cast<double>(rounded)) : 0;
    if (first) {
        const Offset row = static_cast<Offset>(a.geometry.batch * a.geometry.group);
        write(a.statistics + statistic, rounded);
        write(a.statistics + row + statistic, inv_std);
        write(a.statistics + 2 * row + statistic, residual);
    }
    return combine(a, channel, rounded, residual, inv_std);
}

// The same from the moments of a whole statistic, which go into the running statistics.
__device__ inline Coefficients save_batch(
    const TransformArguments& a, Offset statistic, Offset channel, const Moments& total, bool first
) {
    const double count = static_cast<double>(a.geometry.outer * a.geometry.inner);
    const double var = total.m2 / count;
    if (first) {
        a.running_mean.blend(channel, total.mean, a.factor);
        a.running_var.blend(channel, var * a.scale, a.factor);
    }
    return save(a, statistic, channel, total.mean, var, first);
}

// Coefficients of a statistic that is known.
__device__ inline Coefficients find(
    const TransformArguments& a, Offset statistic, Offset channel, bool first
) {
    if (a.running_var.data != nullptr)
        return save(a, statistic, channel, a.running_mean.get(channel, 0.0),
                    a.running_var.get(channel, 0.0), first);
    return combine(a, channel, a.mean == nullptr ? Accumulator(0) : read(a.mean + statistic),
                   a.residual == nullptr ? 0.0 : read(a.residual + statistic),
                   read(a.inv_std + statistic));
}

// Statistics from the moments of their parts: one warp for each. Saves them and takes them
// into the running statistics.
KERNEL finish_statistics(const TransformArguments a) {
    const Offset statistic = static_cast<Offset>(blockIdx.x) * WARPS + threadIdx.x / 32;
    const Offset group = static_cast<Offset>(a.geometry.group);
    if (statistic >= static_cast<Offset>(a.geometry.batch) * group) return;
    const Moments total =
        reduce_parts<Moments>(a.partials, statistic, static_cast<Offset>(a.cut.parts));
    if (threadIdx.x % 32 == 0) save_batch(a, statistic, statistic % group, total, true);
}

__device__ inline void transform_tile(
    Element* y, const Tile& tile, const Vector (&x)[TILE],
    const Coefficients (&coefficients)[STATISTICS]
) {
    #pragma unroll
    for (int i = 0; i < TILE; ++i) {
        Vector result;
        #pragma unroll
        for (int lane = 0; lane < WIDTH; ++lane) {
            const Coefficients& c = coefficients[COLUMNS ? lane : 0];
            result.lane[lane] = narrow((widen(x[i].lane[lane]) - c.mean) * c.scale + c.shift);
        }
        tile.access[i].store(y, result);
    }
}

// Transform with statistics that are known.
//
// A group of threads takes one part of its statistics, as in `moments`, but in reverse
// order of the groups: what the sweep for the statistics read last is nearest. The first
// tile is under way while the coefficients are made. Shared memory: those of every position.
KERNEL transform(const TransformArguments a) {
    SHARED_MEMORY(shared);
    const Work work(a.geometry, a.cut, true);
    Cursor cursor(a.geometry, a.cut, work);
    Tile tile(cursor);
    Vector x[TILE];
    tile.load<true>(a.x, x);

    Coefficients coefficients[STATISTICS];
    distribute(coefficients, shared, work, a.geometry, [&](int p) {
        return find(a, work.statistic + p, work.channel + p, work.part == 0 && work.any);
    });
    for (long long n = 1; n < a.cut.tiles; ++n) {
        transform_tile(a.y, tile, x, coefficients);
        tile = Tile(cursor);
        tile.load<true>(a.x, x);
    }
    transform_tile(a.y, tile, x, coefficients);
}

// Statistics and transform in one sweep over x.
//
// A group of threads, or the blocks of a cluster, hold a whole statistic: the last tile of
// every thread in its registers, those before in shared memory. Every block of a cluster
// folds the totals of all, in the order of their ranks, so all have the same bits.
CLUSTER_KERNEL normalize(const TransformArguments a) {
    SHARED_MEMORY(shared);
    Shelf shelf{reinterpret_cast<Vector*>(shared + HEADER)};
    const Work work(a.geometry, a.cut, false);
    const int last = static_cast<int>(a.cut.tiles) - 1;

    Cursor cursor(a.geometry, a.cut, work);
    Accumulation accumulation;
    Vector x[TILE];
    for (int n = 0; n < last; ++n) {
        const Tile tile(cursor);
        tile.load<true>(a.x, x);
        accumulation.add(tile, x);
        shelf.put(n, 0, x, 1);
    }
    const Tile tile(cursor);
    tile.load<true>(a.x, x);
    accumulation.add(tile, x);
    Moments values[STATISTICS];
    accumulation.finish(values);

    Coefficients coefficients[STATISTICS];
    fold(values, coefficients, shared, work, a.geometry, [&](int p, const Moments& total) {
        return save_batch(a, work.statistic + p, work.channel + p, total, work.part == 0);
    });

    transform_tile(a.y, tile, x, coefficients);
    Cursor again(a.geometry, a.cut, work);
    for (int n = 0; n < last; ++n) {
        const Tile kept(again);
        shelf.get(n, 0, x, 1);
        transform_tile(a.y, kept, x, coefficients);
    }
    cluster_wait();
}
