// Gradients of y = (x - mean) * inv_std * weight + bias.
//
// With mean and inv_std computed from the n values of x,
//   dx = weight * inv_std * (dy - sum_dy / n - (x - mean) * inv_std^2 * sum_dy_xmu / n)
// (Ioffe and Szegedy, "Batch Normalization", 2015, section 3); with given statistics the
// last two terms are absent.
#include "reduce.cuh"

// Sums of dy and dy * (x - mean), about the rounded mean.
struct Sums {
    double dy, dy_xmu;

    __device__ void merge(const Sums& other) {
        dy += other.dy;
        dy_xmu += other.dy_xmu;
    }

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

// Of one statistic: dx = dy * scale + ((x - mean) * slope + offset).
struct Coefficients {
    Accumulator mean, scale, slope, offset;

    __device__ Coefficients from_lane_0() const {
        return {__shfl_sync(ALL_LANES, mean, 0), __shfl_sync(ALL_LANES, scale, 0),
                __shfl_sync(ALL_LANES, slope, 0), __shfl_sync(ALL_LANES, offset, 0)};
    }
};

struct BackwardArguments {
    const Element *dy, *x;
    Element* dx;  // may be absent
    const Accumulator *mean, *residual, *inv_std;
    Parameter weight;
    double* partials;                            // sums of `parts` parts
    const Accumulator *given_dy, *given_dy_xmu;  // sums that are known
    // What is made of the sums; each may be absent.
    Accumulator *sum_dy, *sum_dy_xmu;
    Parameter dweight, dbias;
    double count;        // n, on all ranks
    long long training;  // 0: mean and inv_std are given numbers
    Geometry geometry;
    Cut cut;
};

__device__ inline Accumulator mean_of(const BackwardArguments& a, Offset statistic) {
    return read(a.mean + statistic);
}

__device__ inline double residual_of(const BackwardArguments& a, Offset statistic) {
    return a.residual == nullptr ? 0.0 : read(a.residual + statistic);
}

// Writes the sums of a statistic, the second about the mean before it was rounded, and the
// parameters' gradients; returns the sums.
__device__ inline Sums save(
    const BackwardArguments& a, Offset statistic, Offset channel, Sums total, bool first
) {
    total.dy_xmu -= times_residual(residual_of(a, statistic), total.dy);
    if (first) {
        if (a.sum_dy != nullptr) write(a.sum_dy + statistic, static_cast<Accumulator>(total.dy));
        if (a.sum_dy_xmu != nullptr)
            write(a.sum_dy_xmu + statistic, static_cast<Accumulator>(total.dy_xmu));
        a.dbias.set(channel, total.dy);
        if (a.dweight.data != nullptr)
            a.dweight.set(channel, total.dy_xmu * read(a.inv_std + statistic));
    }
    return total;
}

__device__ inline Coefficients combine(
    const BackwardArguments& a, Offset statistic, Offset channel, const Sums& sums
) {
    const double r = read(a.inv_std + statistic);
    const double scale = r * a.weight.get(channel, 1.0);
    double slope = 0.0, offset = 0.0;
    if (a.training) {
        slope = -(scale * r) * (sums.dy_xmu * r / a.count);  // in this order nothing overflows
        offset = -scale * (sums.dy / a.count) - times_residual(residual_of(a, statistic), slope);
    }
    return {mean_of(a, statistic), static_cast<Accumulator>(scale),
            static_cast<Accumulator>(slope), static_cast<Accumulator>(offset)};
}

__device__ inline void add_tile(
    Sums (&sums)[STATISTICS], const Tile& tile, const Vector (&dy)[TILE], const Vector (&x)[TILE],
    const Accumulator (&mean)[STATISTICS]
) {
    constexpr int lanes = COLUMNS ? 1 : WIDTH;
    #pragma unroll
    for (int s = 0; s < STATISTICS; ++s) {
        Accumulator sum_dy = 0, sum_dy_xmu = 0;
        #pragma unroll
        for (int i = 0; i < TILE; ++i) {
            Accumulator of_dy = 0, of_dy_xmu = 0;
            #pragma unroll
            for (int l = 0; l < lanes; ++l) {
                if (tile.access[i].has(s + l)) {
                    const Accumulator gradient = widen(dy[i].lane[s + l]);
                    of_dy += gradient;
                    of_dy_xmu += gradient * (widen(x[i].lane[s + l]) - mean[s]);
                }
            }
            sum_dy += of_dy;
            sum_dy_xmu += of_dy_xmu;
        }
        sums[s].merge({static_cast<double>(sum_dy), static_cast<double>(sum_dy_xmu)});
    }
}

__device__ inline void gradient_tile(
    const BackwardArguments& a, const Tile& tile, const Vector (&dy)[TILE],
    const Vector (&x)[TILE], const Coefficients (&coefficients)[STATISTICS]
) {
    #pragma unroll
    for (int i = 0; i < TILE; ++i) {
        Vector result;
        #pragma unroll
        for (int lane = 0; lane < WIDTH; ++lane) {
            const Coefficients& c = coefficients[COLUMNS ? lane : 0];
            Accumulator value = widen(dy[i].lane[lane]) * c.scale;
            if (a.training) value += (widen(x[i].lane[lane]) - c.mean) * c.slope + c.offset;
            result.lane[lane] = narrow(value);
        }
        tile.access[i].store(a.dx, result);
    }
}

// The means of a thread's statistics; 0 where there are none.
__device__ inline void read_means(
    const BackwardArguments& a, const Work& work, Accumulator (&mean)[STATISTICS]
) {
    #pragma unroll
    for (int s = 0; s < STATISTICS; ++s) {
        const Offset position = threadIdx.x % ACROSS * STATISTICS + s;
        const bool any = work.channel + position < static_cast<Offset>(a.geometry.group);
        mean[s] = any ? mean_of(a, work.statistic + position) : Accumulator(0);
    }
}

// Both sums of every part of every statistic.
//
// A group of threads takes one part of its statistics, reading dy and x once;
// partials[statistic, part] = (sum_dy, sum_dy_xmu). Shared memory: one partial result of
// each warp and position.
KERNEL reduce(const BackwardArguments a) {
    SHARED_MEMORY(shared);
    const Work work(a.geometry, a.cut, false);
    Cursor cursor(a.geometry, a.cut, work);
    Accumulator mean[STATISTICS];
    read_means(a, work, mean);
    Sums values[STATISTICS] = {};
    for (long long n = 0; n < a.cut.tiles; ++n) {
        const Tile tile(cursor);
        Vector dy[TILE], x[TILE];
        tile.load<false>(a.dy, dy);
        tile.load<false>(a.x, x);
        add_tile(values, tile, dy, x, mean);
    }
    write_parts(values, shared, a.partials, work, a.geometry, a.cut);
}

// The sums of every statistic, and the parameters' gradients, from the parts: one warp for
// each statistic.
KERNEL finish_sums(const BackwardArguments a) {
    const Offset statistic = static_cast<Offset>(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (statistic >= static_cast<Offset>(a.geometry.batch * a.geometry.group)) return;
    const Sums total =
        reduce_parts<Sums>(a.partials, statistic, static_cast<Offset>(a.cut.parts));
    if (threadIdx.x % 32 == 0)
        save(a, statistic, statistic % static_cast<Offset>(a.geometry.group), total, true);
}

// dx from sums that are known.
//
// A group of threads takes one part of its statistics, as in `reduce`, but in reverse
// order of the groups: what that sweep read last is nearest. The first tile is under way
// while the coefficients are made. Shared memory: those of every position.
KERNEL input_gradient(const BackwardArguments a) {
    SHARED_MEMORY(shared);
    const Work work(a.geometry, a.cut, true);
    Cursor cursor(a.geometry, a.cut, work);
    Tile tile(cursor);
    Vector dy[TILE], x[TILE];
    tile.load<true>(a.dy, dy);
    tile.load<true>(a.x, x);

    Coefficients coefficients[STATISTICS];
    distribute(coefficients, shared, work, a.geometry, [&](int p) {
        const Offset statistic = work.statistic + p;
        return combine(a, statistic, work.channel + p,
                       {read(a.given_dy + statistic), read(a.given_dy_xmu + statistic)});
    });
    for (long long n = 1; n < a.cut.tiles; ++n) {
        gradient_tile(a, tile, dy, x, coefficients);
        tile = Tile(cursor);
        tile.load<true>(a.dy, dy);
        tile.load<true>(a.x, x);
    }
    gradient_tile(a, tile, dy, x, coefficients);
}

// Sums and, unless it is absent, dx in one sweep over dy and x.
//
// A group of threads, or the blocks of a cluster, hold a whole statistic: the last tile of
// every thread in its registers, those before in shared memory. Every block of a cluster
// folds the totals of all, in the order of their ranks, so all have the same bits.
CLUSTER_KERNEL backward(const BackwardArguments a) {
    SHARED_MEMORY(shared);
    Shelf shelf{reinterpret_cast<Vector*>(shared + HEADER)};
    const Work work(a.geometry, a.cut, false);
    const int last = static_cast<int>(a.cut.tiles) - 1;

    Cursor cursor(a.geometry, a.cut, work);
    Accumulator mean[STATISTICS];
    read_means(a, work, mean);
    Sums values[STATISTICS] = {};
    Vector dy[TILE], x[TILE];
    for (int n = 0; n < last; ++n) {
        const Tile tile(cursor);
        tile.load<true>(a.dy, dy);
        tile.load<true>(a.x, x);
        add_tile(values, tile, dy, x, mean);
        shelf.put(n, 0, dy, 2);
        shelf.put(n, 1, x, 2);
    }
    const Tile tile(cursor);
    tile.load<true>(a.dy, dy);
    tile.load<true>(a.x, x);
    add_tile(values, tile, dy, x, mean);

    Coefficients coefficients[STATISTICS];
    fold(values, coefficients, shared, work, a.geometry, [&](int p, const Sums& total) {
        const Offset statistic = work.statistic + p, channel = work.channel + p;
        return combine(a, statistic, channel, save(a, statistic, channel, total, work.part == 0));
    });

    if (a.dx != nullptr) {
        gradient_tile(a, tile, dy, x, coefficients);
        Cursor again(a.geometry, a.cut, work);
        for (int n = 0; n < last; ++n) {
            const Tile kept(again);
            shelf.get(n, 0, dy, 2);
            shelf.get(n, 1, x, 2);
            gradient_tile(a, kept, dy, x, coefficients);
        }
    }
    cluster_wait();
}
