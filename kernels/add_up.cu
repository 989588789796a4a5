// What samples, or blocks of them, have of each parameter or channel, added up: of the macros in
// types.cuh only the element, WIDE and THREADS matter here.
//
// A block takes 32 columns of numbers, a warp every WARPS-th row of them, which it adds up in
// order; the first warp adds up the others' sums in order. Shared memory: these.
#include "memory.cuh"

struct ColumnSums {
    double first, second;
};

// Rows that a thread asks for before it waits for one (of float64 the compiler makes fewer of it).
constexpr int ROWS = 64 / sizeof(Accumulator);

// Two sums over rows of a column, which `read(row, &first, &second)` finds; true for the one thread
// that has them in the end.
template <class Read> __device__ inline bool sum_rows(
    unsigned char* shared, Offset rows, bool valid, ColumnSums& sum, Read read
) {
    auto* sums = reinterpret_cast<ColumnSums*>(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    sum = {};
    if (!valid) rows = 0;
    for (Offset begin = warp; begin < rows; begin += ROWS * WARPS) {
        Accumulator first[ROWS], second[ROWS];
        #pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const Offset row = begin + i * WARPS;
            read(row < rows ? row : begin, first[i], second[i]);
        }
        #pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (begin + i * WARPS < rows) {
                sum.first += first[i];
                sum.second += second[i];
            }
        }
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int other = 1; other < WARPS; ++other) {
        sum.first += sums[32 * other + lane].first;
        sum.second += sums[32 * other + lane].second;
    }
    return valid && warp == 0;
}

struct AddUpArguments {
    const Accumulator* gradients;  // dweight and, if there are two planes, dbias of every block
    Parameter dweight, dbias;
    long long blocks, planes, parameters;
};

// dweight and dbias from those of samples, or blocks of them.
KERNEL add_up(const AddUpArguments a) {
    SHARED_MEMORY(shared);
    const Offset parameters = static_cast<Offset>(a.parameters);
    const Offset planes = static_cast<Offset>(a.planes);
    const Offset parameter = static_cast<Offset>(blockIdx.x) * 32 + threadIdx.x % 32;
    const auto read_block = [&](Offset block, Accumulator& weight, Accumulator& bias) {
        const Accumulator* place = a.gradients + planes * block * parameters + parameter;
        weight = read(place);
        bias = read(place + (planes - 1) * parameters);  // of one plane weights, for no dbias
    };
    ColumnSums sum;
    if (!sum_rows(shared, static_cast<Offset>(a.blocks), parameter < parameters, sum, read_block))
        return;
    a.dweight.set(parameter, sum.first);
    a.dbias.set(parameter, sum.second);
}

struct UpdateRunningArguments {
    Parameter running_mean, running_var;
    const Accumulator *mean, *var;  // of every sample
    double scale, factor;
    long long channels, samples;
};

// running = running * (1 - factor) + batch * factor, where batch is the average of the samples'
// statistics.
KERNEL update_running(const UpdateRunningArguments a) {
    SHARED_MEMORY(shared);
    const Offset channels = static_cast<Offset>(a.channels);
    const Offset channel = static_cast<Offset>(blockIdx.x) * 32 + threadIdx.x % 32;
    const auto read_sample = [&](Offset sample, Accumulator& mean, Accumulator& var) {
        mean = read(a.mean + sample * channels + channel);
        var = read(a.var + sample * channels + channel);
    };
    ColumnSums sum;
    if (!sum_rows(shared, static_cast<Offset>(a.samples), channel < channels, sum, read_sample))
        return;
    const double samples = static_cast<double>(a.samples);
    a.running_mean.blend(
        channel, a.running_mean.ask(channel), sum.first / samples, a.factor);
    a.running_var.blend(
        channel, a.running_var.ask(channel), sum.second / samples * a.scale, a.factor);
}
