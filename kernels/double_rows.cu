// Gradients of rows.cu's: of statistics that are one run each, in which parameters change.
#include "double_gradients.cuh"
#include "kept.cuh"

// Both outputs and, unless they are absent, the parameters' gradients of a block of samples;
// from sums that are known, or all in one sweep.
//
// A group of threads, or the blocks of a cluster, hold a row: the last tile of every thread in its
// registers, those before in shared memory, behind the gradients. gradients[block] = ddweight.
CLUSTER_KERNEL double_backward_rows(const DoubleArguments a) {
    SHARED_MEMORY(shared);
    const Geometry& g = a.geometry;
    const int last = static_cast<int>(a.cut.tiles) - 1;
    const int slots = (last + 1) * TILE;
    const Kept<1> kept{reinterpret_cast<Accumulator*>(shared + HEADER)};
    const Shelf shelf{reinterpret_cast<Vector*>(kept.after(slots))};
    kept.clear(slots);

    const Turns turns(g, a.cut, a.samples);
    for (Offset turn = turns.first; turn < turns.end; turn += turns.step) {
        const Work work = turns.work(g, turn);
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
                in.load(a, tile);
                put_out(tile, n);
            }
            continue;
        }
        Accumulator mean[STATISTICS];
        mean[0] = mean_of(a, work.channel);
        DoubleSums values[STATISTICS] = {};
        for (int n = 0; n < last; ++n) {
            const Tile tile(cursor);
            in.load(a, tile);
            add_tile(a, work, values, tile, in, mean);
            in.put(shelf, n);
        }
        const Tile tile(cursor);
        in.load(a, tile);
        add_tile(a, work, values, tile, in, mean);
        fold(
            values, coefficients, shared, work, g,
            [&](Offset, const DoubleSums& total) { return total; },
            [&](Offset, const DoubleSums& total, const DoubleSums&, bool) {
                return combine(a, work.channel, 0, total);
            });
        put_out(tile, last);
        Cursor again(g, a.cut, work);
        for (int n = 0; n < last; ++n) {
            const Tile held(again);
            in.get(shelf, n);
            put_out(held, n);
        }
        meet();
    }
    if (a.gradients != nullptr) kept.write_block(a.gradients, g, a.cut, turns);
}
