// Sums and dx in one launch, through the second-level cache (cached.cuh).
#include "cached.cuh"
#include "sums.cuh"

struct BackwardCachedArguments {
    BackwardArguments backward;  // in which the sums to read are those that are written
    Tickets tickets;
};

// A block takes one part of its channels: for partials[channel, part] = (sum_dy, sum_dy_xmu), or
// for its dx. Shared memory: one partial result of each warp and position, or the coefficients of
// every position; then a word.
CACHED_KERNEL(768) backward_cached(const BackwardCachedArguments a) {
    SHARED_MEMORY(shared);
    const BackwardArguments& b = a.backward;
    const Ticket ticket(a.tickets, shared);
    const Work work(b.geometry, b.cut, ticket.unit);
    const Offset step = ticket.unit / static_cast<Offset>(b.cut.parts);
    if (ticket.second) {
        gradient_part(b, work, shared, [&](Offset p) {
            wait_for_step(a.tickets, step, b.cut);
            const Offset channel = work.channel + p, parameter = work.parameter + p;
            const Sums sums = {read(b.given_dy + channel), read(b.given_dy_xmu + channel)};
            return combine(b, channel, parameter, sums.times(weight_of(b, parameter)));
        });
    } else {
        take_sums(b, work, shared, [](const Tile&, const Vector (&)[TILE]) {});
        finish_step<Sums>(
            a.tickets, step, b.partials, shared, work, b.cut, [&](Offset p, const Sums& total) {
                save(b, work.channel + p, work.parameter + p, total, true);
            });
    }
}
