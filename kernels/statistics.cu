// Statistics of every channel, and what is done with them channel by channel.
#include "moments.cuh"

struct MomentsArguments {
    const Element* x;
    double* partials;
    Geometry geometry;
    Cut cut;
};

// Moments of every part of every channel.
//
// A group of threads takes one part of its channels, reading x once; partials[channel,
// part] = (mean, m2, count). Shared memory: one partial result of each warp and position.
LEAN_KERNEL moments(const MomentsArguments a) {
    SHARED_MEMORY(shared);
    const Work work(a.geometry, a.cut, false);
    take_moments(a.x, a.geometry, a.cut, work, shared, a.partials);
}

struct FinishMomentsArguments {
    const double* partials;
    void* mean;
    void* m2;
    long long statistics, parts;
    long long wide;  // whether mean and m2 are float64 whatever the accumulator type
};

// Mean and m2 of every statistic from its parts: one warp for each.
KERNEL finish_moments(const FinishMomentsArguments a) {
    const Offset statistic = static_cast<Offset>(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (statistic >= static_cast<Offset>(a.statistics)) return;
    const Offset parts = static_cast<Offset>(a.parts);
    const Moments total =
        reduce_parts<Moments>(a.partials, statistic * parts, parts);
    if (threadIdx.x % 32 != 0) return;
    if (a.wide) {
        write(static_cast<double*>(a.mean) + statistic, total.mean);
        write(static_cast<double*>(a.m2) + statistic, total.m2);
    } else {
        write(static_cast<Accumulator*>(a.mean) + statistic, static_cast<Accumulator>(total.mean));
        write(static_cast<Accumulator*>(a.m2) + statistic, static_cast<Accumulator>(total.m2));
    }
}
