// y of rows: of statistics that are one run each, in which parameters change.
#include "transform.cuh"

// Statistics and transform.
//
// A group of threads, or the blocks of a cluster, take one row after another, in a block of
// samples; while they work on one, the next is on its way to shared memory. The parameters of
// every thread's last tile stay in its registers. What a row becomes does not depend on the
// others. (`normalize` takes rows of which no two fit.)
CLUSTER_KERNEL normalize_rows(const TransformArguments a) {
    SHARED_MEMORY(shared);
    const Geometry& g = a.geometry;
    const int tiles = static_cast<int>(a.cut.tiles), last = tiles - 1;
    const Turns turns(g, a.cut, a.samples);
    const Shelf shelf{reinterpret_cast<Vector*>(shared + HEADER)};  // two rows
    const auto fetch = [&](Offset turn, int to) {
        if (turn < turns.end) {
            Cursor cursor(g, a.cut, turns.work(g, turn));
            for (int n = 0; n < tiles; ++n) shelf.fetch(Tile(cursor), a.x, to + n, 0, 1);
        }
        end_group_of_copies();
    };
    int row = 0;  // on the shelf, its first tile
    fetch(turns.first, row);

    Spread parameters, of_held;
    const Work first = turns.work(g, turns.first);
    Cursor end(g, a.cut, first, last);
    parameters.read(a, first, Tile(end));

    for (Offset turn = turns.first; turn < turns.end; turn += turns.step) {
        fetch(turn + turns.step, tiles - row);
        wait_for_copies<1>();
        const Work work = turns.work(g, turn);
        Cursor cursor(g, a.cut, work);
        Accumulation accumulation;
        Vector x[TILE];
        for (int n = 0; n < last; ++n) {
            const Tile tile(cursor);
            shelf.get(row + n, 0, x, 1);
            accumulation.add(tile, x);
        }
        const Tile tile(cursor);
        shelf.get(row + last, 0, x, 1);
        accumulation.add(tile, x);
        Moments values[STATISTICS];
        accumulation.finish(values);

        Coefficients coefficients[STATISTICS];
        fold(
            values, coefficients, shared, work, g,
            [&](Offset, const Moments& total) { return total; },
            [&](Offset, const Moments&, const Moments& all, bool one) {
                return save_batch(a, work.channel, work.parameter, all, one && work.part == 0);
            });

        transform_tile(a, tile, x, coefficients, parameters);
        Cursor again(g, a.cut, work);
        for (int n = 0; n < last; ++n) {
            const Tile held(again);
            shelf.get(row + n, 0, x, 1);
            of_held.read(a, work, held);
            transform_tile(a, held, x, coefficients, of_held);
        }
        row = tiles - row;
        meet();
    }
}
