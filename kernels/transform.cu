// y = (x - mean) * inv_std * weight + bias.
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
    const double* partials;  // moments of `parts` parts
    // What was used, if it was not given: rows mean, inv_std, residual (what rounding took
    // from the mean) and variance.
    Accumulator* statistics;
    Parameter weight, bias, running_mean, running_var;
    double eps, scale, factor;  // scale: of the batch's biased variance when it is blended
    double weight_offset;
    long long centered;         // 0: statistics about zero
    Geometry geometry;
    Cut cut;
};

// The shift makes up for the residual: what rounding took from the mean.
__device__ inline Coefficients combine(
    const TransformArguments& a, Offset parameter, Accumulator mean, double residual, double inv_std
) {
    const double scale =
        SPANS ? inv_std : inv_std * a.weight.get(parameter, 1.0, a.weight_offset);
    const double bias = SPANS ? 0.0 : a.bias.get(parameter, 0.0);
    const double shift = bias - times_residual(residual, scale);
    return {mean, static_cast<Accumulator>(scale), static_cast<Accumulator>(shift)};
}

// Coefficients from a mean and variance in float64, which are saved if `first`: if this is
// the one thread that does so.
__device__ inline Coefficients save(
    const TransformArguments& a, Offset statistic, Offset parameter, double mean, double var,
    bool first
) {
    const Accumulator rounded = static_cast<Accumulator>(mean);
    const Accumulator inv_std = static_cast<Accumulator>(1.0 / sqrt(var + a.eps));
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
    return combine(a, parameter, rounded, residual, inv_std);
}

// The same from the moments of a whole statistic, which go into the running statistics.
__device__ inline Coefficients save_batch(
    const TransformArguments& a, Offset channel, Offset parameter, const Moments& all, bool first
) {
    const Geometry& g = a.geometry;
    const double var = all.m2 / static_cast<double>(g.outer * g.inner * g.members);
    if (first) {
        a.running_mean.blend(parameter, all.mean, a.factor);
        a.running_var.blend(parameter, var * a.scale, a.factor);
    }
    const Offset statistic = statistic_of(g, channel);
    first = first && statistic * static_cast<Offset>(g.members) == channel;
    return save(a, statistic, parameter, all.mean, var, first);
}

// Coefficients of a channel whose statistics are known.
__device__ inline Coefficients find(
    const TransformArguments& a, Offset channel, Offset parameter, bool first
) {
    const Offset statistic = statistic_of(a.geometry, channel);
    if (a.running_var.data != nullptr)
        return save(a, statistic, parameter, a.running_mean.get(parameter, 0.0),
                    a.running_var.get(parameter, 0.0), first);
    return combine(a, parameter, a.mean == nullptr ? Accumulator(0) : read(a.mean + statistic),
                   a.residual == nullptr ? 0.0 : read(a.residual + statistic),
                   a.inv_std == nullptr ? 1.0 : read(a.inv_std + statistic));
}

// Statistics from the moments of their channels' parts: one warp for each. Saves them and
// takes them into the running statistics.
KERNEL finish_statistics(const TransformArguments a) {
    const Offset members = static_cast<Offset>(a.geometry.members);
    const Offset channel =
        (static_cast<Offset>(blockIdx.x) * WARPS + threadIdx.x / 32) * members;
    if (channel >= static_cast<Offset>(a.geometry.batch * a.geometry.group)) return;
    const Offset parts = static_cast<Offset>(a.cut.parts);
    const Moments all = reduce_parts<Moments>(a.partials, channel * parts, members * parts);
    if (threadIdx.x % 32 == 0)
        save_batch(a, channel, channel % static_cast<Offset>(a.geometry.group), all, true);
}

__device__ inline void transform_tile(
    const TransformArguments& a, const Work& work, const Tile& tile, const Vector (&x)[TILE],
    const Coefficients (&coefficients)[STATISTICS]
) {
    #pragma unroll
    for (int i = 0; i < TILE; ++i) {
        Accumulator weight[WIDTH], bias[WIDTH];
        if (SPANS) {
            const Access& access = tile.access[i];
            const Offset first = first_parameter(work, a.geometry);
            spread(a.weight, a.geometry, first, access, 1.0, a.weight_offset, weight);
            spread(a.bias, a.geometry, first, access, 0.0, 0.0, bias);
        }
        Vector result;
        #pragma unroll
        for (int lane = 0; lane < WIDTH; ++lane) {
            const Coefficients& c = coefficients[COLUMNS ? lane : 0];
            Accumulator value = (widen(x[i].lane[lane]) - c.mean) * c.scale + c.shift;
            if (SPANS) value = value * weight[lane] + bias[lane];
            result.lane[lane] = narrow(value);
        }
        tile.access[i].store(a.y, result);
    }
}

// Transform with statistics that are known.
//
// A group of threads takes one part of its channels, as in `moments`, but in reverse
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
    distribute(coefficients, shared, work, [&](Offset p) {
        return find(a, work.channel + p, work.parameter + p, work.part == 0);
    });
    for (long long n = 1; n < a.cut.tiles; ++n) {
        transform_tile(a, work, tile, x, coefficients);
        tile = Tile(cursor);
        tile.load<true>(a.x, x);
    }
    transform_tile(a, work, tile, x, coefficients);
}

// Statistics and transform in one sweep over x.
//
// A group of threads, or the blocks of a cluster, hold whole statistics: the last tile of
// every thread in its registers, those before in shared memory. Every block of a cluster
// folds the totals of all, in the order of their ranks, so all have the same bits.
CLUSTER_KERNEL normalize(const TransformArguments a) {
    SHARED_MEMORY(shared);
    Shelf shelf{reinterpret_cast<Vector*>(shared + HEADER)};
    const Work work(a.geometry, a.cut, false);
    const int last = static_cast<int>(a.cut.tiles) - 1;

    Cursor ahead(a.geometry, a.cut, work), cursor(a.geometry, a.cut, work);
    fetch_first(last, [&](int n) { shelf.fetch(Tile(ahead), a.x, n, 0, 1); });
    Cursor end(a.geometry, a.cut, work, last);
    const Tile tile(end);
    Vector x[TILE], kept[TILE];
    tile.load<true>(a.x, x);

    Accumulation accumulation(a.centered != 0);
    for (int n = 0; n < last; ++n) {
        const Tile first(cursor);
        wait_for_copies<AHEAD - 1>();
        shelf.get(n, 0, kept, 1);
        accumulation.add(first, kept);
        fetch_next(n, last, [&](int next) { shelf.fetch(Tile(ahead), a.x, next, 0, 1); });
    }
    accumulation.add(tile, x);
    Moments values[STATISTICS];
    accumulation.finish(values);

    Coefficients coefficients[STATISTICS];
    fold(
        values, coefficients, shared, work, a.geometry,
        [&](Offset, const Moments& total) { return total; },
        [&](Offset p, const Moments&, const Moments& all) {
            return save_batch(a, work.channel + p, work.parameter + p, all, work.part == 0);
        });

    transform_tile(a, work, tile, x, coefficients);
    Cursor again(a.geometry, a.cut, work);
    for (int n = 0; n < last; ++n) {
        const Tile first(again);
        shelf.get(n, 0, kept, 1);
        transform_tile(a, work, first, kept, coefficients);
    }
    cluster_wait();
}
