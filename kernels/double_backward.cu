// Gradients of backward.cu's where every channel has one weight; sums, of rows too.
#include "double_gradients.cuh"

// Writes the sum of dy * u over a channel.
__device__ inline void save(
    const DoubleArguments& a, Offset channel, Offset parameter, const DoubleSums& sums
) {
    const double r = inv_std_of(a, channel);
    double total = r * sums.of[DoubleSums::GH];
    if (a.training) {
        const double low = residual_of(a, channel);
        const Shares s = shares(r, low, a.count, sums, 1.0, 0.0, 0.0);
        total += s.q * (sums.of[DoubleSums::HX]
                        - a.count * times_residual(low, sums.of[DoubleSums::MEAN_H]));
    }
    a.ddweight.set(parameter, total);
    if (a.gradients != nullptr) write(a.gradients + channel, static_cast<Accumulator>(total));
}

struct Nothing {
    __device__ void operator()(int, int, Accumulator) const {}
};

// The sums of every part of every channel, or row; and both outputs if the statistics are given.
//
// A group of threads takes one part of its channels, reading everything once;
// partials[channel, part] = sums. Shared memory: one partial result of each warp and position;
// before, the coefficients of every position.
KERNEL double_reduce(const DoubleArguments a) {
    SHARED_MEMORY(shared);
    const Work work(a.geometry, a.cut, false);
    Cursor cursor(a.geometry, a.cut, work);
    DoubleCoefficients coefficients[STATISTICS] = {};
    if (!a.training) {
        distribute(coefficients, shared, work, [&](Offset p) {
            return combine(a, work.channel + p, work.parameter + p, DoubleSums{});
        });
        if (GROUP == THREADS) __syncthreads();
    }
    Accumulator mean[STATISTICS];
    read_means(a, work, mean);
    DoubleSums values[STATISTICS] = {};
    for (long long n = 0; n < a.cut.tiles; ++n) {
        const Tile tile(cursor);
        Inputs in;
        in.load(a, tile);
        add_tile(a, work, values, tile, in, mean);
        if (!a.training) outputs_of_tile(a, work, tile, in, coefficients, Nothing{});
    }
    write_parts(values, shared, a.partials, work, a.cut);
}

// Both outputs from sums that are known.
//
// A group of threads takes one part of its channels, as in `double_reduce`, but in reverse order
// of the groups: what that sweep read last is nearest. Shared memory: the coefficients.
KERNEL double_transform(const DoubleArguments a) {
    SHARED_MEMORY(shared);
    const Work work(a.geometry, a.cut, true);
    Cursor cursor(a.geometry, a.cut, work);
    DoubleCoefficients coefficients[STATISTICS];
    distribute(coefficients, shared, work, [&](Offset p) {
        return combine(a, work.channel + p, work.parameter + p,
                       DoubleSums::read(a.sums, work.channel + p));
    });
    for (long long n = 0; n < a.cut.tiles; ++n) {
        const Tile tile(cursor);
        Inputs in;
        in.load(a, tile);
        outputs_of_tile(a, work, tile, in, coefficients, Nothing{});
    }
}

// All in one sweep.
//
// A group of threads, or the blocks of a cluster, hold whole channels: the last tile of every
// thread in its registers, those before in shared memory.
CLUSTER_KERNEL double_backward(const DoubleArguments a) {
    SHARED_MEMORY(shared);
    const Shelf shelf{reinterpret_cast<Vector*>(shared + HEADER)};
    const Work work(a.geometry, a.cut, false);
    const int last = static_cast<int>(a.cut.tiles) - 1;

    Cursor cursor(a.geometry, a.cut, work);
    Accumulator mean[STATISTICS];
    read_means(a, work, mean);
    DoubleSums values[STATISTICS] = {};
    Inputs in;
    for (int n = 0; n < last; ++n) {
        const Tile tile(cursor);
        in.load(a, tile);
        add_tile(a, work, values, tile, in, mean);
        in.put(shelf, n);
    }
    const Tile tile(cursor);
    in.load(a, tile);
    add_tile(a, work, values, tile, in, mean);

    DoubleCoefficients coefficients[STATISTICS];
    fold(
        values, coefficients, shared, work, a.geometry,
        [&](Offset, const DoubleSums& total) { return total; },
        [&](Offset p, const DoubleSums& total, const DoubleSums&, bool first) {
            const Offset channel = work.channel + p, parameter = work.parameter + p;
            if (first && work.part == 0) save(a, channel, parameter, total);
            return combine(a, channel, parameter, total);
        });

    outputs_of_tile(a, work, tile, in, coefficients, Nothing{});
    Cursor again(a.geometry, a.cut, work);
    for (int n = 0; n < last; ++n) {
        const Tile held(again);
        in.get(shelf, n);
        outputs_of_tile(a, work, held, in, coefficients, Nothing{});
    }
    cluster_wait();
}

// The sums of every channel, or row, from those of its parts, and, of channels, ddweight: one
// warp for each.
KERNEL finish_double_sums(const DoubleArguments a) {
    const Offset group = static_cast<Offset>(a.geometry.group);
    const Offset channel = static_cast<Offset>(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (channel >= static_cast<Offset>(a.geometry.batch) * group) return;
    const Offset parts = static_cast<Offset>(a.cut.parts);
    const DoubleSums total = reduce_parts<DoubleSums>(a.partials, channel * parts, parts);
    if (threadIdx.x % 32 != 0) return;
    if (a.sums != nullptr) total.write(a.sums, channel);
    if (!SPANS) save(a, channel, channel % group, total);
}
