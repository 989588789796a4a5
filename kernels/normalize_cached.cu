// Statistics and transform in one launch, through the second-level cache (cached.cuh).
#include "cached.cuh"
#include "transform.cuh"

struct NormalizeCachedArguments {
    TransformArguments transform;
    Tickets tickets;
};

// A block takes one part of its channels for partials[channel, part] = (mean, m2, count), and one
// of others to transform it. Shared memory: one partial result of each warp and position, or the
// coefficients of every position; a word; the part that is transformed.
LEAN_KERNEL normalize_cached(const NormalizeCachedArguments a) {
    SHARED_MEMORY(shared);
    const TransformArguments& t = a.transform;
    const int tiles = static_cast<int>(t.cut.tiles);
    const Shelf shelf = shelf_of(shared);
    const Ticket ticket(a.tickets, shared);
    const Work second(t.geometry, t.cut, ticket.second);
    if (ticket.has_second) {
        Cursor ahead(t.geometry, t.cut, second);
        for (int n = 0; n < tiles; ++n) shelf.fetch(Tile(ahead), t.x, n, 0, 1);
    }
    if (ticket.has_first) {
        const Work first(t.geometry, t.cut, ticket.first);
        take_moments(t.x, t.geometry, t.cut, first, shared, t.partials);
        finish_channel<Coefficients, Moments>(
            a.tickets, ticket.first, t.partials, shared, first, t.cut,
            [&](const Moments& all, bool save) {
                return save_batch(t, first.channel, first.parameter, all, save);
            });
    }
    if (!ticket.has_second) return;

    Coefficients coefficients[STATISTICS];
    distribute(coefficients, shared, second, [&](Offset) {
        return wait_for_coefficients<Coefficients>(
            a.tickets, ticket.second, t.cut, second.channel);
    });
    end_group_of_copies();
    wait_for_copies<0>();
    Cursor cursor(t.geometry, t.cut, second);
    for (int n = 0; n < tiles; ++n) {
        const Tile tile(cursor);
        Vector x[TILE];
        shelf.get(n, 0, x, 1);
        transform_tile(t, tile, x, coefficients, {});
    }
}
