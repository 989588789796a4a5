// Statistics and transform in one launch, through the second-level cache (cached.cuh).
#include "cached.cuh"
#include "transform.cuh"

struct NormalizeCachedArguments {
    TransformArguments transform;  // which reads the statistics that are saved
    Tickets tickets;
};

// A block takes one part of its channels: for partials[channel, part] = (mean, m2, count), or to
// transform it. Shared memory: one partial result of each warp and position, or the coefficients of
// every position; then a word.
CACHED_KERNEL(1024) normalize_cached(const NormalizeCachedArguments a) {
    SHARED_MEMORY(shared);
    const TransformArguments& t = a.transform;
    const Ticket ticket(a.tickets, shared);
    const Work work(t.geometry, t.cut, ticket.unit);
    const Offset step = ticket.unit / static_cast<Offset>(t.cut.parts);
    if (ticket.second) {
        transform_part(t, work, shared, [&](Offset p) {
            wait_for_step(a.tickets, step, t.cut);
            const Offset channel = work.channel + p;
            return combine(t, work.parameter + p, read(t.mean + channel),
                           read(t.residual + channel), read(t.inv_std + channel));
        });
    } else {
        take_moments(t.x, t.centered != 0, t.geometry, t.cut, work, shared,
                     t.partials);
        finish_step<Moments>(
            a.tickets, step, t.partials, shared, work, t.cut, [&](Offset p, const Moments& all) {
                save_batch(t, work.channel + p, work.parameter + p, all, true);
            });
    }
}
