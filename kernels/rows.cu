// Gradients of rows: of statistics that are one run each, in which parameters change.
//
// The sums of a row decide its dx; sums over rows are the parameters' gradients. So a group of
// threads takes one row after another, in a block of samples, and adds to the gradients that it
// keeps in shared memory: each thread to those of its own elements, which are at the same places
// of every row. What a row becomes does not depend on the others.
#include "gradients.cuh"
#include "kept.cuh"

// The sums of a tile, of weight times dy; adds to the parameters' gradients.
__device__ inline void add_tile(
    const BackwardArguments& a, const Work& work, Sums (&sums)[STATISTICS], const Kept<2>& kept,
    int first_slot, const Tile& tile, const Vector (&dy)[TILE], const Vector (&x)[TILE],
    Accumulator mean, Accumulator inv_std, Accumulator shift
) {
    Accumulator sum_dy = 0, sum_dy_xmu = 0;
    #pragma unroll
    for (int i = 0; i < TILE; ++i) {
        Accumulator weight[WIDTH];
        spread(a.weight, a.geometry, first_parameter(work, a.geometry), tile.access[i],
               1.0, a.weight_offset, weight);
        if (!tile.access[i].valid) continue;
        Accumulator of_dy = 0, of_dy_xmu = 0;
        #pragma unroll
        for (int lane = 0; lane < WIDTH; ++lane) {
            const Accumulator gradient = widen(dy[i].lane[lane]);
            const Accumulator deviation = widen(x[i].lane[lane]) - mean;
            of_dy += gradient * weight[lane];
            of_dy_xmu += gradient * weight[lane] * deviation;
            kept.at(0, first_slot + i, lane, threadIdx.x) +=
                gradient * (deviation * inv_std + shift);
            kept.at(1, first_slot + i, lane, threadIdx.x) += gradient;
        }
        sum_dy += of_dy;
        sum_dy_xmu += of_dy_xmu;
    }
    sums[0].merge({static_cast<double>(sum_dy), static_cast<double>(sum_dy_xmu)});
}

// dx, unless it is absent, and the parameters' gradients of a block of samples; or, if there are
// partials, the sums of a part of every row instead of dx.
//
// Blocks are numbered by part, then row of a sample, then block of samples. A group of threads,
// or the blocks of a cluster, hold a row: the last tile of every thread in its registers, those
// before in shared memory, behind the gradients. gradients[block] = dweight, dbias.
CLUSTER_KERNEL backward_rows(const BackwardArguments a) {
    SHARED_MEMORY(shared);
    const Geometry& g = a.geometry;
    const int last = static_cast<int>(a.cut.tiles) - 1;
    const Kept<2> kept{reinterpret_cast<Accumulator*>(shared + HEADER), (last + 1) * TILE};
    Shelf shelf{reinterpret_cast<Vector*>(kept.place + 2 * kept.slots * WIDTH * THREADS)};
    kept.clear();

    const Offset parts = static_cast<Offset>(a.cut.parts), number = static_cast<Offset>(g.group);
    const Offset part = blockIdx.x % parts;
    const Offset index = blockIdx.x / parts % number;
    const Offset block = blockIdx.x / parts / number;
    const Offset batch = static_cast<Offset>(g.batch), size = static_cast<Offset>(a.block);
    const Offset end = (block + 1) * size < batch ? (block + 1) * size : batch;

    // All groups of a block take as many turns: barriers and shuffles are for all of them.
    for (Offset turn = block * size; turn < end; turn += THREADS / GROUP) {
        const Offset sample = turn + threadIdx.x / GROUP;
        const Work work(g, sample, index, part, sample < end);
        const Accumulator mean = mean_of(a, work.channel);
        const Accumulator inv_std = static_cast<Accumulator>(inv_std_of(a, work.channel));
        const Accumulator shift =
            static_cast<Accumulator>(-times_residual(residual_of(a, work.channel), inv_std));
        Cursor cursor(g, a.cut, work);
        Sums values[STATISTICS] = {};
        Vector dy[TILE], x[TILE];
        for (int n = 0; n < last; ++n) {
            const Tile tile(cursor);
            tile.load<true>(a.dy, dy);
            tile.load<true>(a.x, x);
            add_tile(a, work, values, kept, n * TILE, tile, dy, x, mean, inv_std, shift);
            if (a.partials == nullptr) {
                shelf.put(n, 0, dy, 2);
                shelf.put(n, 1, x, 2);
            }
        }
        const Tile tile(cursor);
        tile.load<true>(a.dy, dy);
        tile.load<true>(a.x, x);
        add_tile(a, work, values, kept, last * TILE, tile, dy, x, mean, inv_std, shift);
        if (a.partials != nullptr) {
            write_parts(values, shared, a.partials, work, a.cut);
            continue;
        }
        if (a.dx == nullptr) continue;

        Coefficients coefficients[STATISTICS];
        fold(
            values, coefficients, shared, work, g,
            [&](Offset, Sums total) {
                total.dy_xmu -= times_residual(residual_of(a, work.channel), total.dy);
                return total;
            },
            [&](Offset, const Sums&, const Sums& all) {
                return combine(a, work.channel, work.parameter, all);
            });

        gradient_of_held(a, work, shelf, last, tile, dy, x, coefficients);
        cluster_wait();
    }

    if (a.gradients != nullptr) kept.write_block(a.gradients, g, a.cut, part, index, block);
}
