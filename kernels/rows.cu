// Gradients of rows: of statistics that are one run each, in which parameters change.
//
// The sums of a row decide its dx; sums over rows are the parameters' gradients. So a group of
// threads takes one row after another, in a block of samples, while the next, if there is room
// for two, is on its way to shared memory, and adds to the gradients that it keeps: each thread to
// those of its own elements, which are at the same places of every row. What a row becomes does
// not depend on the others.
#include "gradients.cuh"
#include "kept.cuh"

// Of weights, and of biases where there are any.
constexpr int PLANES = BIASED ? 2 : 1;

// What an access has of the parameters' gradients.
using Gradients = Accumulator[PLANES][KEPT];

// What is known of a row.
struct Row {
    Accumulator mean, residual, inv_std;

    __device__ Row(const BackwardArguments& a, const Work& work) {
        mean = mean_of(a, work.channel);
        residual = static_cast<Accumulator>(residual_of(a, work.channel));
        inv_std = static_cast<Accumulator>(inv_std_of(a, work.channel));
    }
};

// Sums of weight times dy over a row, of accesses that are added in chunks.
struct RowSums {
    ChunkedSum dy, dy_xmu;

    __device__ void add(
        const Row& row, const Vector& dy, const Vector& x, const Accumulator (&weight)[WIDTH],
        Gradients& gradients
    ) {
        const Accumulator shift =
            CENTERED ? static_cast<Accumulator>(-times_residual(row.residual, row.inv_std)) : 0;
        Accumulator of_dy = 0, of_dy_xmu = 0;
        #pragma unroll
        for (int lane = 0; lane < WIDTH; ++lane) {
            const Accumulator gradient = widen(dy, lane);
            const Accumulator d = deviation(widen(x, lane), row.mean);
            const Accumulator weighted = SPANS > 1 ? gradient * weight[lane] : gradient;
            of_dy = lane == 0 ? weighted : of_dy + weighted;
            of_dy_xmu = lane == 0 ? weighted * d : of_dy_xmu + weighted * d;
            if (SPANS > 1) {
                gradients[0][lane % KEPT] += gradient * (BIASED ? d * row.inv_std + shift
                                                                : d * row.inv_std);
                if (BIASED) gradients[PLANES - 1][lane % KEPT] += gradient;
            }
        }
        if (SPANS == 1) {  // one parameter has all of them
            gradients[0][0] += of_dy_xmu * row.inv_std
                             + (shift != 0 ? of_dy * shift : 0);  // 0 also for inf
            if (BIASED) gradients[PLANES - 1][0] += of_dy;
            of_dy *= weight[0];
            of_dy_xmu *= weight[0];
        }
        if (CENTERED) this->dy.chunk += of_dy;
        dy_xmu.chunk += of_dy_xmu;
    }

    __device__ void end_chunk() {
        dy.end_chunk();
        dy_xmu.end_chunk();
    }
};

// dx, unless it is absent, and the parameters' gradients of a block of samples; or, if there are
// partials, the sums of a part of every row instead of dx.
//
// A group of threads, or the blocks of a cluster, hold a row. Weights and gradients of every
// thread's last tile are in its registers, gradients of those before in shared memory, before the
// rows; in the end all are there, where rows were. gradients[block] = dweight and, if there are two
// planes, dbias.
CLUSTER_KERNEL backward_rows(const BackwardArguments a) {
    SHARED_MEMORY(shared);
    const Geometry& g = a.geometry;
    const int tiles = static_cast<int>(a.cut.tiles), last = tiles - 1;
    const Turns turns(g, a.cut, a.samples);
    const Kept<PLANES> kept{reinterpret_cast<Accumulator*>(shared + HEADER)};
    kept.clear(last * TILE);
    const Shelf shelf{reinterpret_cast<Vector*>(kept.after(last * TILE))};  // SHELVES rows
    const auto fetch = [&](Offset turn, int to) {
        const Work work = turns.work(g, turn);
        if (turn < turns.end) {
            Cursor cursor(g, a.cut, work);
            #pragma unroll 1
            for (int n = 0; n < tiles; ++n) {
                const Tile tile(cursor);
                shelf.fetch(tile, a.dy, to + n, 0, 2);
                shelf.fetch(tile, a.x, to + n, 1, 2);
            }
        }
        end_group_of_copies();
        return Row(a, work);
    };
    int on = 0;  // the shelf, its first tile
    Row next = fetch(turns.first, on);

    Accumulator weight[TILE][WIDTH];
    Gradients gradients[TILE] = {};  // of the last tile
    const Work first = turns.work(g, turns.first);
    Cursor end(g, a.cut, first, last);
    read_weights(a, first, Tile(end), weight);

    for (Offset turn = turns.first; turn < turns.end; turn += turns.step) {
        const Row row = next;
        if (SHELVES == 2) next = fetch(turn + turns.step, tiles - on);
        wait_for_copies<SHELVES - 1>();
        const Work work = turns.work(g, turn);
        Cursor cursor(g, a.cut, work);
        RowSums sums;
        Vector dy[TILE], x[TILE];
        #pragma unroll 1
        for (int n = 0; n < last; ++n) {
            const Tile tile(cursor);
            Accumulator weights[TILE][WIDTH];
            shelf.get(on + n, 0, dy, 2);
            shelf.get(on + n, 1, x, 2);
            read_weights(a, work, tile, weights);
            #pragma unroll
            for (int i = 0; i < TILE; ++i) {
                if (!tile.access[i].valid) continue;
                Gradients mine;
                kept.get(n * TILE + i, mine);
                sums.add(row, dy[i], x[i], weights[i], mine);
                kept.put(n * TILE + i, mine);
            }
            if ((n + 1) % CHUNK == 0) sums.end_chunk();
        }
        const Tile tile(cursor);
        shelf.get(on + last, 0, dy, 2);
        shelf.get(on + last, 1, x, 2);
        #pragma unroll
        for (int i = 0; i < TILE; ++i)
            if (tile.access[i].valid) sums.add(row, dy[i], x[i], weight[i], gradients[i]);
        sums.end_chunk();
        Sums values[STATISTICS] = {{sums.dy.of_chunks, sums.dy_xmu.of_chunks}};
        if (a.partials != nullptr) {
            write_parts(values, shared, a.partials, work, a.cut);
            __syncthreads();  // before the next turn's
        } else if (a.dx != nullptr) {
            Coefficients coefficients[STATISTICS];
            fold(
                values, coefficients, shared, work, g,
                [&](Offset, Sums total) {
                    total.dy_xmu -= times_residual(row.residual, total.dy);
                    return total;
                },
                [&](Offset, const Sums&, const Sums& all, bool) {
                    return combine(a, row.mean, row.residual, row.inv_std, 1.0, all);
                });
            shelf.get(on + last, 0, dy, 2);  // again: so registers are free for `fold`
            shelf.get(on + last, 1, x, 2);
            gradient_of_held(a, work, shelf, on, last, tile, dy, x, coefficients, weight);
            meet();
        }
        if (SHELVES == 2) on = tiles - on;
        else next = fetch(turn + turns.step, on);
    }

    if (a.gradients == nullptr) return;
    __syncthreads();  // the rows that were where gradients will be are done with
    #pragma unroll
    for (int i = 0; i < TILE; ++i) kept.put(last * TILE + i, gradients[i]);
    kept.write_block(a.gradients, g, a.cut, turns);
}
