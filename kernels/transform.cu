// y = (x - mean) * inv_std * weight + bias.
#include "transform.cuh"

// Coefficients of a channel whose statistics are known.
__device__ inline Coefficients find(
    const TransformArguments& a, Offset channel, Offset parameter, bool first
) {
    const Offset statistic = statistic_of(a.geometry, channel);
    const Given given(a, parameter);
    if (a.running_var.data != nullptr)
        return save(a, statistic, given, a.running_mean.number(given.running_mean, 0.0),
                    a.running_var.number(given.running_var, 0.0), first);
    return combine(a, given, a.mean == nullptr ? Accumulator(0) : read(a.mean + statistic),
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

// Transform with statistics that are known.
//
// A group of threads takes one part of its channels, in reverse order of the groups: of what the
// sweep for the statistics read last, some is near. The first tile is under way while the
// coefficients are made. Shared memory: those of every position.
KERNEL transform(const TransformArguments a) {
    SHARED_MEMORY(shared);
    const Work work(a.geometry, a.cut, true);
    Cursor cursor(a.geometry, a.cut, work);
    Tile tile(cursor);
    Vector x[TILE];
    tile.load(a.x, x);

    Coefficients coefficients[STATISTICS];
    distribute(coefficients, shared, work, [&](Offset p) {
        return find(a, work.channel + p, work.parameter + p, work.part == 0);
    });
    Spread parameters;
    for (long long n = 1; n < a.cut.tiles; ++n) {
        parameters.read(a, work, tile);
        transform_tile(a, tile, x, coefficients, parameters);
        tile = Tile(cursor);
        tile.load(a.x, x);
    }
    parameters.read(a, work, tile);
    transform_tile(a, tile, x, coefficients, parameters);
}

// Statistics and transform in one sweep over x.
//
// A group of threads, or the blocks of a cluster, hold whole statistics: the last tile of
// every thread in its registers, those before in shared memory. Every block of a cluster
// folds the totals of all, in the order of their ranks, so all have the same bits.
CLUSTER_KERNEL normalize(const TransformArguments a) {
    SHARED_MEMORY(shared);
    const Shelf shelf{reinterpret_cast<Vector*>(shared + HEADER)};
    const Work work(a.geometry, a.cut, false);
    const int last = static_cast<int>(a.cut.tiles) - 1;
    prefetch(a, work);

    Cursor ahead(a.geometry, a.cut, work), cursor(a.geometry, a.cut, work);
    fetch_first(last, [&](int n) { shelf.fetch(Tile(ahead), a.x, n, 0, 1); });
    Cursor end(a.geometry, a.cut, work, last);
    const Tile tile(end);
    Vector x[TILE], kept[TILE];
    tile.load(a.x, x);

    Accumulation accumulation;
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
        [&](Offset p, const Moments&, const Moments& all, bool first) {
            return save_batch(a, work.channel + p, work.parameter + p, all,
                              first && work.part == 0);
        });

    Spread parameters;
    parameters.read(a, work, tile);
    transform_tile(a, tile, x, coefficients, parameters);
    Cursor again(a.geometry, a.cut, work);
    for (int n = 0; n < last; ++n) {
        const Tile first(again);
        shelf.get(n, 0, kept, 1);
        parameters.read(a, work, first);
        transform_tile(a, first, kept, coefficients, parameters);
    }
    cluster_wait();
}
