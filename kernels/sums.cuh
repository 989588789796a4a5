// Sums of dy and dy * (x - mean) over channels that have one weight each.
#pragma once

#include "gradients.cuh"

// Writes the sums of a channel, the second about the mean before it was rounded, and what
// they make of the parameters' gradients; returns the sums.
__device__ inline Sums save(
    const BackwardArguments& a, Offset channel, Offset parameter, Sums total, bool first
) {
    total.dy_xmu -= times_residual(residual_of(a, channel), total.dy);
    if (!first) return total;
    const double dweight = total.dy_xmu * inv_std_of(a, channel);
    if (a.sum_dy != nullptr) write(a.sum_dy + channel, static_cast<Accumulator>(total.dy));
    if (a.sum_dy_xmu != nullptr)
        write(a.sum_dy_xmu + channel, static_cast<Accumulator>(total.dy_xmu));
    a.dweight.set(parameter, dweight);
    a.dbias.set(parameter, total.dy);
    if (a.gradients != nullptr) {
        const Offset group = static_cast<Offset>(a.geometry.group);
        const Offset place = channel / group * group + channel;
        write(a.gradients + place, static_cast<Accumulator>(dweight));
        write(a.gradients + place + group, static_cast<Accumulator>(total.dy));
    }
    return total;
}

__device__ inline void add_tile(
    Sums (&sums)[STATISTICS], const Tile& tile, const Vector (&dy)[TILE], const Vector (&x)[TILE],
    const Accumulator (&mean)[STATISTICS]
) {
    constexpr int lanes = COLUMNS ? 1 : WIDTH;
    #pragma unroll
    for (int s = 0; s < STATISTICS; ++s) {
        Accumulator sum_dy = 0, sum_dy_xmu = 0;
        #pragma unroll
        for (int i = 0; i < TILE; ++i) {
            Accumulator of_dy = 0, of_dy_xmu = 0;
            #pragma unroll
            for (int l = 0; l < lanes; ++l) {
                if (tile.access[i].has(s + l)) {
                    const Accumulator gradient = widen(dy[i].lane[s + l]);
                    of_dy += gradient;
                    of_dy_xmu += gradient * (widen(x[i].lane[s + l]) - mean[s]);
                }
            }
            sum_dy += of_dy;
            sum_dy_xmu += of_dy_xmu;
        }
        sums[s].merge({static_cast<double>(sum_dy), static_cast<double>(sum_dy_xmu)});
    }
}

// Takes the sums of a group's part of its channels, reading dy and x once; `use(tile, dy)` does
// what else there is to do with a tile.
template <class Use> __device__ inline void take_sums(
    const BackwardArguments& a, const Work& work, unsigned char* shared, Use use
) {
    Cursor cursor(a.geometry, a.cut, work);
    Accumulator mean[STATISTICS];
    read_means(a, work, mean);
    Sums values[STATISTICS] = {};
    for (long long n = 0; n < a.cut.tiles; ++n) {
        const Tile tile(cursor);
        Vector dy[TILE], x[TILE];
        tile.load<false>(a.dy, dy);
        tile.load<false>(a.x, x);
        add_tile(values, tile, dy, x, mean);
        use(tile, dy);
    }
    write_parts(values, shared, a.partials, work, a.cut);
}
