// Sums of dy and dy * (x - mean) over channels that have one weight each.
#pragma once

#include "gradients.cuh"

// Writes the sums of a channel, the second about the mean before it was rounded, and what
// they make of the parameters' gradients; returns the sums.
__device__ inline Sums save(
    const BackwardArguments& a, Offset channel, Offset parameter, const Known& known, Sums total,
    bool first
) {
    total.dy_xmu -= times_residual(known.residual, total.dy);
    if (!first) return total;
    const double dweight = total.dy_xmu * known.inv_std;
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

// Sums of the elements that a thread has seen: in the accumulator type over chunks of tiles, which
// are added up in float64.
class Summation {
  public:
    __device__ void add(
        const Tile& tile, const Vector (&dy)[TILE], const Vector (&x)[TILE],
        const Accumulator (&mean)[STATISTICS]
    ) {
        #pragma unroll
        for (int s = 0; s < STATISTICS; ++s) {
            #pragma unroll
            for (int i = 0; i < TILE; ++i) {
                if (!tile.access[i].valid) continue;
                Accumulator of_dy = 0, of_dy_xmu = 0;
                #pragma unroll
                for (int l = 0; l < LANES; ++l) {
                    if (ALIGNED || tile.access[i].has(s + l)) {
                        const Accumulator gradient = widen(dy[i], s + l);
                        const Accumulator product =
                            gradient * deviation(widen(x[i], s + l), mean[s]);
                        of_dy = l == 0 ? gradient : of_dy + gradient;
                        of_dy_xmu = l == 0 ? product : of_dy_xmu + product;
                    }
                }
                sum_dy[s].chunk += of_dy;
                sum_dy_xmu[s].chunk += of_dy_xmu;
            }
        }
        if (++tiles == CHUNK) end_chunk();
    }

    // The sums, once all has been added.
    __device__ void finish(Sums (&all)[STATISTICS]) {
        end_chunk();
        #pragma unroll
        for (int s = 0; s < STATISTICS; ++s)
            all[s] = {sum_dy[s].of_chunks, sum_dy_xmu[s].of_chunks};
    }

  private:
    ChunkedSum sum_dy[STATISTICS], sum_dy_xmu[STATISTICS];
    int tiles = 0;  // of the chunk

    __device__ void end_chunk() {
        tiles = 0;
        #pragma unroll
        for (int s = 0; s < STATISTICS; ++s) {
            sum_dy[s].end_chunk();
            sum_dy_xmu[s].end_chunk();
        }
    }
};

// Takes the sums of a group's part of its channels, reading dy and x once; `use(tile, dy)` does
// what else there is to do with a tile.
template <class Use> __device__ inline void take_sums(
    const BackwardArguments& a, const Work& work, unsigned char* shared, Use use
) {
    Cursor cursor(a.geometry, a.cut, work);
    Accumulator mean[STATISTICS];
    read_means(a, work, mean);
    Summation summation;
    for (long long n = 0; n < a.cut.tiles; ++n) {
        const Tile tile(cursor);
        Vector dy[TILE], x[TILE];
        tile.load(a.dy, dy);
        tile.load(a.x, x);
        summation.add(tile, dy, x, mean);
        use(tile, dy);
    }
    Sums values[STATISTICS];
    summation.finish(values);
    write_parts(values, shared, a.partials, work, a.cut);
}
