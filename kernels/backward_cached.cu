// Sums and dx in one launch, through the second-level cache (cached.cuh).
#include "cached.cuh"
#include "sums.cuh"

struct BackwardCachedArguments {
    BackwardArguments backward;
    Tickets tickets;
};

// A block takes one part of its channels for partials[channel, part] = (sum_dy, sum_dy_xmu), and
// one of others for its dx. Shared memory: one partial result of each warp and position, or the
// coefficients of every position; a word; dy and x of the latter part.
LEAN_KERNEL backward_cached(const BackwardCachedArguments a) {
    SHARED_MEMORY(shared);
    const BackwardArguments& b = a.backward;
    const int tiles = static_cast<int>(b.cut.tiles);
    const Shelf shelf = shelf_of(shared);
    const Ticket ticket(a.tickets, shared);
    const Work second(b.geometry, b.cut, ticket.second);
    if (ticket.has_second) {
        Cursor ahead(b.geometry, b.cut, second);
        for (int n = 0; n < tiles; ++n) {
            const Tile tile(ahead);
            shelf.fetch(tile, b.dy, n, 0, 2);
            shelf.fetch(tile, b.x, n, 1, 2);
        }
    }
    if (ticket.has_first) {
        const Work first(b.geometry, b.cut, ticket.first);
        take_sums(b, first, shared, [](const Tile&, const Vector (&)[TILE]) {});
        finish_channel<Coefficients, Sums>(
            a.tickets, ticket.first, b.partials, shared, first, b.cut,
            [&](const Sums& sums, bool first_time) {
                const Known known(b, first.channel, first.parameter);
                const Sums total =
                    save(b, first.channel, first.parameter, known, sums, first_time);
                return combine(b, known, total.times(known.weight(b)));
            });
    }
    if (!ticket.has_second) return;

    Coefficients coefficients[STATISTICS];
    distribute(coefficients, shared, second, [&](Offset) {
        return wait_for_coefficients<Coefficients>(
            a.tickets, ticket.second, b.cut, second.channel);
    });
    end_group_of_copies();
    wait_for_copies<0>();
    Cursor cursor(b.geometry, b.cut, second);
    for (int n = 0; n < tiles; ++n) {
        const Tile tile(cursor);
        Vector dy[TILE], x[TILE];
        shelf.get(n, 0, dy, 2);
        shelf.get(n, 1, x, 2);
        gradient_tile(b, tile, dy, x, coefficients, {});
    }
}
