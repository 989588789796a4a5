// Gradients of rows: of statistics that are one run each, in which parameters change.
//
// The sums of a row decide its dx; sums over rows are the parameters' gradients. So a group of
// threads takes one row after another, in a block of samples, while the next, if there is room
// for two, is on its way to shared memory, and adds to the gradients that it keeps: each thread to
// those of its own elements, which are at the same places of every row. What a row becomes does
// not depend on the others.
#include "gradients.cuh"
#include "kept.cuh"

using OfAccess = Accumulator[KEPT];

// What is known of a row.
struct Row {
    Accumulator mean, residual, inv_std;

    __device__ Row(const BackwardArguments& a, const Work& work) {
        mean = mean_of(a, work.channel);
        residual = static_cast<Accumulator>(residual_of(a, work.channel));
        inv_std = static_cast<Accumulator>(inv_std_of(a, work.channel));
    }
};

// Adds the sums of a tile, of weight times dy; `keep(access, of weight, of bias)` takes what the
// elements of an access, or all together, add to the parameters' gradients.
template <class Keep> __device__ inline void add_tile(
    Sums& sums, const Row& row, const Tile& tile, const Vector (&dy)[TILE],
    const Vector (&x)[TILE], const Accumulator (&weight)[TILE][WIDTH], Keep keep
) {
    Accumulator sum_dy = 0, sum_dy_xmu = 0;
    const Accumulator shift =
        static_cast<Accumulator>(-times_residual(row.residual, row.inv_std));
    #pragma unroll
    for (int i = 0; i < TILE; ++i) {
        if (!tile.access[i].valid) continue;
        Accumulator of_dy = 0, of_dy_xmu = 0, of_weight[KEPT] = {}, of_bias[KEPT] = {};
        #pragma unroll
        for (int lane = 0; lane < WIDTH; ++lane) {
            const Accumulator gradient = widen(dy[i], lane);
            const Accumulator deviation = widen(x[i], lane) - row.mean;
            of_dy += gradient * weight[i][lane];
            of_dy_xmu += gradient * weight[i][lane] * deviation;
            of_weight[lane % KEPT] += gradient * (deviation * row.inv_std + shift);
            of_bias[lane % KEPT] += gradient;
        }
        keep(i, of_weight, of_bias);
        sum_dy += of_dy;
        sum_dy_xmu += of_dy_xmu;
    }
    sums.merge({static_cast<double>(sum_dy), static_cast<double>(sum_dy_xmu)});
}

// dx, unless it is absent, and the parameters' gradients of a block of samples; or, if there are
// partials, the sums of a part of every row instead of dx.
//
// A group of threads, or the blocks of a cluster, hold a row. Weights and gradients of every
// thread's last tile are in its registers, gradients of those before in shared memory, before the
// rows; in the end all are there, where rows were. gradients[block] = dweight, dbias.
CLUSTER_KERNEL backward_rows(const BackwardArguments a) {
    SHARED_MEMORY(shared);
    const Geometry& g = a.geometry;
    const int tiles = static_cast<int>(a.cut.tiles), last = tiles - 1;
    const Turns turns(g, a.cut, a.samples);
    const Kept<2> kept{reinterpret_cast<Accumulator*>(shared + HEADER)};
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

    Accumulator weight[TILE][WIDTH], dweight[TILE][KEPT] = {}, dbias[TILE][KEPT] = {};
    const Work first = turns.work(g, turns.first);
    Cursor end(g, a.cut, first, last);
    read_weights(a, first, Tile(end), weight);

    for (Offset turn = turns.first; turn < turns.end; turn += turns.step) {
        const Row row = next;
        if (SHELVES == 2) next = fetch(turn + turns.step, tiles - on);
        wait_for_copies<SHELVES - 1>();
        const Work work = turns.work(g, turn);
        Cursor cursor(g, a.cut, work);
        Sums values[STATISTICS] = {};
        Vector dy[TILE], x[TILE];
        #pragma unroll 1
        for (int n = 0; n < last; ++n) {
            const Tile tile(cursor);
            Accumulator weights[TILE][WIDTH];
            shelf.get(on + n, 0, dy, 2);
            shelf.get(on + n, 1, x, 2);
            read_weights(a, work, tile, weights);
            add_tile(values[0], row, tile, dy, x, weights,
                     [&](int i, const OfAccess& of_weight, const OfAccess& of_bias) {
                         kept.add(0, n * TILE + i, of_weight);
                         kept.add(1, n * TILE + i, of_bias);
                     });
        }
        const Tile tile(cursor);
        shelf.get(on + last, 0, dy, 2);
        shelf.get(on + last, 1, x, 2);
        add_tile(values[0], row, tile, dy, x, weight,
                 [&](int i, const OfAccess& of_weight, const OfAccess& of_bias) {
                     #pragma unroll
                     for (int lane = 0; lane < KEPT; ++lane) {
                         dweight[i][lane] += of_weight[lane];
                         dbias[i][lane] += of_bias[lane];
                     }
                 });
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
    for (int i = 0; i < TILE; ++i) {
        #pragma unroll
        for (int lane = 0; lane < KEPT; ++lane) {
            kept.at(0, last * TILE + i, lane, threadIdx.x) = dweight[i][lane];
            kept.at(1, last * TILE + i, lane, threadIdx.x) = dbias[i][lane];
        }
    }
    kept.write_block(a.gradients, g, a.cut, turns);
}
