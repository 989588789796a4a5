// Gradients of rows.cu's: of statistics that are one run each, in which parameters change.
#include "double_gradients.cuh"
#include "kept.cuh"

// Both outputs and, unless they are absent, the parameters' gradients of a block of samples;
// from sums that are known, or all in one sweep.
//
// Blocks are numbered by part, then row of a sample, then block of samples. A group of threads,
// or the blocks of a cluster, hold a row: the last tile of every thread in its registers, those
// before in shared memory, behind the gradients. gradients[block] = ddweight.
CLUSTER_KERNEL double_backward_rows(const DoubleArguments a) {
    SHARED_MEMORY(shared);
    const Geometry& g = a.geometry;
    const int last = static_cast<int>(a.cut.tiles) - 1;
    const Kept<1> kept{reinterpret_cast<Accumulator*>(shared + HEADER), (last + 1) * TILE};
    Shelf shelf{reinterpret_cast<Vector*>(kept.place + kept.slots * WIDTH * THREADS)};
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
        DoubleCoefficients coefficients[STATISTICS];
        Cursor cursor(g, a.cut, work);
        Inputs in;
        const auto put_out = [&](const Tile& tile, int n) {
            outputs_of_tile(a, work, tile, in, coefficients,
                            [&](int i, int lane, Accumulator product) {
                                kept.at(0, n * TILE + i, lane, threadIdx.x) += product;
                            });
        };
        if (a.sums != nullptr) {
            distribute(coefficients, shared, work, [&](Offset) {
                return combine(a, work.channel, 0, DoubleSums::read(a.sums, work.channel));
            });
            if (GROUP == THREADS) __syncthreads();  // before the next turn's
            for (int n = 0; n <= last; ++n) {
                const Tile tile(cursor);
                in.load<true>(a, tile);
                put_out(tile, n);
            }
            continue;
        }
        Accumulator mean[STATISTICS];
        mean[0] = mean_of(a, work.channel);
        DoubleSums values[STATISTICS] = {};
        for (int n = 0; n < last; ++n) {
            const Tile tile(cursor);
            in.load<true>(a, tile);
            add_tile(a, work, values, tile, in, mean);
            in.put(shelf, n);
        }
        const Tile tile(cursor);
        in.load<true>(a, tile);
        add_tile(a, work, values, tile, in, mean);
        fold(
            values, coefficients, shared, work, g,
            [&](Offset, const DoubleSums& total) { return total; },
            [&](Offset, const DoubleSums& total, const DoubleSums&) {
                return combine(a, work.channel, 0, total);
            });
        put_out(tile, last);
        Cursor again(g, a.cut, work);
        for (int n = 0; n < last; ++n) {
            const Tile held(again);
            in.get(shelf, n);
            put_out(held, n);
        }
        cluster_wait();
    }
    if (a.gradients != nullptr) kept.write_block(a.gradients, g, a.cut, part, index, block);
}
