// What CUDA sources need to be compiled by the host's C++ compiler and executed by
// runtime.cpp. Included before a source, which is compiled as it is.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_types.h>

#undef __launch_bounds__
#undef __cluster_dims__
#undef __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __global__

namespace harness {

// Of the thread that runs.
unsigned thread();
unsigned block();
unsigned grid();
unsigned char* shared();

void barrier();
void sleep();
void cluster_arrive();
void cluster_wait();
void* map_shared(const void* place, unsigned rank);

// Copies into shared memory are made when they are waited for, no sooner.
void begin_copy(void* shared, const void* place, unsigned size);
void end_group_of_copies();
void wait_for_copies(unsigned pending);

// All lanes of the warp show a word; returns what the 32 of them have shown.
const uint64_t* show(const char* operation, unsigned mask, uint64_t word);

void count_read(const void* place, unsigned size);
void count_write(const void* place, unsigned size);

// Counters: bytes read from and written to watched arrays, then to other memory.
const char* launch(void (*kernel)(const void*), const void* arguments, unsigned blocks,
                   unsigned threads, unsigned cluster, size_t shared, uint64_t seed,
                   uint64_t* counters);

template <class T> uint64_t to_word(T value) {
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(T));
    return word;
}

template <class T> T from_word(uint64_t word) {
    T value;
    std::memcpy(&value, &word, sizeof(T));
    return value;
}

template <class T> T load(const T* place) {
    count_read(place, sizeof(T));
    return *place;
}

}  // namespace harness

static struct { struct { operator unsigned() const { return harness::thread(); } } x; } threadIdx;
static struct { struct { operator unsigned() const { return harness::block(); } } x; } blockIdx;
static struct { struct { operator unsigned() const { return harness::grid(); } } x; } gridDim;

#define SHARED_MEMORY(name) unsigned char* name = harness::shared()

template <class T> T __ldcg(const T* place) { return harness::load(place); }
template <class T> T __ldg(const T* place) { return harness::load(place); }
template <class T> void __stcg(T* place, T value) {
    harness::count_write(place, sizeof(T));
    *place = value;
}

inline double rsqrt(double value) { return 1.0 / std::sqrt(value); }

// Threads run one at a time.
inline unsigned arrive(unsigned* counter) {
    const unsigned before = harness::load(counter);
    harness::count_write(counter, sizeof(unsigned));
    ++*counter;
    return before;
}
inline void wait_for(const unsigned* counter, unsigned number) {
    while (*static_cast<const volatile unsigned*>(counter) < number) harness::sleep();
}

template <int BYTES> void begin_copy(void* shared, const void* place) {
    harness::begin_copy(shared, place, BYTES);
}
inline void prefetch(const void*) {}
inline void fence_cluster() {}
inline void end_group_of_copies() { harness::end_group_of_copies(); }
template <int PENDING> void wait_for_copies() { harness::wait_for_copies(PENDING); }

inline void __syncthreads() { harness::barrier(); }
inline void __cluster_barrier_arrive() { harness::cluster_arrive(); }
inline void __cluster_barrier_arrive_relaxed() { harness::cluster_arrive(); }
inline void __cluster_barrier_wait() { harness::cluster_wait(); }
inline void* __cluster_map_shared_rank(const void* place, unsigned rank) {
    return harness::map_shared(place, rank);
}

template <class T> T __shfl_down_sync(unsigned mask, T value, int offset, int width = 32) {
    const int lane = harness::thread() % 32;
    const uint64_t* shown = harness::show("shfl_down", mask, harness::to_word(value));
    return harness::from_word<T>(shown[lane % width + offset < width ? lane + offset : lane]);
}

template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const int lane = harness::thread() % 32;
    const uint64_t* shown = harness::show("shfl", mask, harness::to_word(value));
    return harness::from_word<T>(shown[lane / width * width + source % width]);
}

// A C function that launches a kernel of type void(A). Returns a message, empty if all is well.
#define HARNESS_KERNEL(name, A)                                                                 \
    extern "C" const char* launch_##name(const void* arguments, size_t size, unsigned blocks,   \
        unsigned threads, unsigned cluster, size_t shared, uint64_t seed, uint64_t* counters) { \
        if (size != sizeof(A)) return "the arguments' size is not that of " #A;                 \
        return harness::launch([](const void* a) { name(*static_cast<const A*>(a)); },          \
                               arguments, blocks, threads, cluster, shared, seed, counters);    \
    }
