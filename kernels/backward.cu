// Gradients where every channel has one weight: sums over channels, and dx from these.
#include "sums.cuh"

// dx = dy * scale.
__device__ inline void scale_tile(
    const BackwardArguments& a, const Tile& tile, const Vector (&dy)[TILE],
    const Coefficients (&coefficients)[STATISTICS]
) {
    #pragma unroll
    for (int i = 0; i < TILE; ++i) {
        Elements result;
        #pragma unroll
        for (int lane = 0; lane < WIDTH; ++lane)
            result.lane[lane] =
                narrow(widen(dy[i], lane) * coefficients[COLUMNS ? lane : 0].scale);
        tile.access[i].store(a.dx, result);
    }
}

// Both sums of every part of every channel; and, unless it is absent, dx for given statistics.
//
// A group of threads takes one part of its channels, reading dy and x once;
// partials[channel, part] = (sum_dy, sum_dy_xmu). Shared memory: one partial result of
// each warp and position; before, the coefficients of every position.
KERNEL reduce(const BackwardArguments a) {
    SHARED_MEMORY(shared);
    const Work work(a.geometry, a.cut, false);
    Coefficients coefficients[STATISTICS] = {};
    if (a.dx != nullptr) {
        distribute(coefficients, shared, work, [&](Offset p) {
            return combine(a, Known(a, work.channel + p, work.parameter + p), {0.0, 0.0});
        });
        if (GROUP == THREADS) __syncthreads();
    }
    take_sums(a, work, shared, [&](const Tile& tile, const Vector (&dy)[TILE]) {
        if (a.dx != nullptr) scale_tile(a, tile, dy, coefficients);
    });
}

// The sums of every channel, and what they make of the parameters' gradients, from the parts:
// one warp for each channel.
KERNEL finish_sums(const BackwardArguments a) {
    const Offset group = static_cast<Offset>(a.geometry.group);
    const Offset channel = static_cast<Offset>(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (channel >= static_cast<Offset>(a.geometry.batch) * group) return;
    const Offset parts = static_cast<Offset>(a.cut.parts);
    const Sums total = reduce_parts<Sums>(a.partials, channel * parts, parts);
    const Offset parameter = a.geometry.parameters > a.geometry.group ? channel : channel % group;
    if (threadIdx.x % 32 == 0)
        save(a, channel, parameter, Known(a, channel, parameter), total, true);
}

// The sums of weight times dy over every statistic (sum_dy, sum_dy_xmu) from those of its
// channels (given): one warp for each statistic.
KERNEL share_sums(const BackwardArguments a) {
    const Offset members = static_cast<Offset>(a.geometry.members);
    const Offset first = (static_cast<Offset>(blockIdx.x) * WARPS + threadIdx.x / 32) * members;
    if (first >= static_cast<Offset>(a.geometry.batch * a.geometry.group)) return;
    Sums all = {};
    for (Offset m = threadIdx.x % 32; m < members; m += 32) {
        const Sums sums = {read(a.given_dy + first + m), read(a.given_dy_xmu + first + m)};
        all.merge(sums.times(
            weight_of(a, (first + m) % static_cast<Offset>(a.geometry.group))));
    }
    reduce_lanes<32>(all);
    if (threadIdx.x % 32 != 0) return;
    write(a.sum_dy + first / members, static_cast<Accumulator>(all.dy));
    write(a.sum_dy_xmu + first / members, static_cast<Accumulator>(all.dy_xmu));
}

// dx from sums that are known.
//
// A group of threads takes one part of its channels, in reverse order of the groups: of what
// `reduce` read last, some is near. The first tile is under way while the coefficients are made.
// Shared memory: those of every position.
KERNEL input_gradient(const BackwardArguments a) {
    SHARED_MEMORY(shared);
    const Work work(a.geometry, a.cut, true);
    Cursor cursor(a.geometry, a.cut, work);
    Tile tile(cursor);
    Vector dy[TILE], x[TILE];
    tile.load(a.dy, dy);
    tile.load(a.x, x);

    Coefficients coefficients[STATISTICS];
    distribute(coefficients, shared, work, [&](Offset p) {
        const Offset channel = work.channel + p, parameter = work.parameter + p;
        const Offset statistic = statistic_of(a.geometry, channel);
        const Known known(a, channel, parameter);
        const Sums sums = {read(a.given_dy + statistic), read(a.given_dy_xmu + statistic)};
        const bool weighted = SPANS || a.geometry.members > 1;
        return combine(a, known, weighted ? sums : sums.times(known.weight(a)));
    });
    Accumulator weight[TILE][WIDTH];
    for (long long n = 1; n < a.cut.tiles; ++n) {
        read_weights(a, work, tile, weight);
        gradient_tile(a, tile, dy, x, coefficients, weight);
        tile = Tile(cursor);
        tile.load(a.dy, dy);
        tile.load(a.x, x);
    }
    read_weights(a, work, tile, weight);
    gradient_tile(a, tile, dy, x, coefficients, weight);
}

// Sums and, unless it is absent, dx in one sweep over dy and x.
//
// A group of threads, or the blocks of a cluster, hold whole statistics: the last tile of
// every thread in its registers, those before in shared memory. Every block of a cluster
// folds the totals of all, in the order of their ranks, so all have the same bits.
CLUSTER_KERNEL backward(const BackwardArguments a) {
    SHARED_MEMORY(shared);
    const Shelf shelf{reinterpret_cast<Vector*>(shared + HEADER)};
    const Work work(a.geometry, a.cut, false);
    const int last = static_cast<int>(a.cut.tiles) - 1;
    Known mine;
    if (COLUMNS) prefetch(a, work);
    else mine = Known(a, work.channel, work.parameter);
    const auto know = [&](Offset p) {
        return COLUMNS ? Known(a, work.channel + p, work.parameter + p) : mine;
    };

    Cursor ahead(a.geometry, a.cut, work), cursor(a.geometry, a.cut, work);
    const auto fetch = [&](int n) {
        const Tile next(ahead);
        shelf.fetch(next, a.dy, n, 0, 2);
        shelf.fetch(next, a.x, n, 1, 2);
    };
    fetch_first(last, fetch);
    Cursor end(a.geometry, a.cut, work, last);
    const Tile tile(end);
    Vector dy[TILE], x[TILE];
    tile.load(a.dy, dy);
    tile.load(a.x, x);

    Accumulator mean[STATISTICS];
    read_means(a, work, mean);
    Summation summation;
    for (int n = 0; n < last; ++n) {
        const Tile first(cursor);
        Vector first_dy[TILE], first_x[TILE];
        wait_for_copies<AHEAD - 1>();
        shelf.get(n, 0, first_dy, 2);
        shelf.get(n, 1, first_x, 2);
        summation.add(first, first_dy, first_x, mean);
        fetch_next(n, last, fetch);
    }
    summation.add(tile, dy, x, mean);
    Sums values[STATISTICS];
    summation.finish(values);

    Coefficients coefficients[STATISTICS];
    fold(
        values, coefficients, shared, work, a.geometry,
        [&](Offset p, Sums total) {
            const Known known = know(p);
            total.dy_xmu -= times_residual(known.residual, total.dy);
            return total.times(known.weight(a));
        },
        [&](Offset p, const Sums& total, const Sums& all, bool first) {
            const Known known = know(p);
            save(a, work.channel + p, work.parameter + p, known, total, first && work.part == 0);
            return combine(a, known, all);
        });

    Accumulator weight[TILE][WIDTH];
    read_weights(a, work, tile, weight);
    if (a.dx != nullptr)
        gradient_of_held(a, work, shelf, 0, last, tile, dy, x, coefficients, weight);
    cluster_wait();
}
