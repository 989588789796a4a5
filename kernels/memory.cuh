// Global memory: every access of the kernels to it is made by a function of this file.
#pragma once

#include "types.cuh"

// A test that executes these sources without a GPU has shared memory, and copies into it that go
// on while the thread does other things, of its own.
#ifndef SHARED_MEMORY
#define SHARED_MEMORY(name) extern __shared__ __align__(16) unsigned char name[]

// Begins to copy 4, 8 or 16 bytes, as a part of the thread's current group of copies.
template <int BYTES> __device__ inline void begin_copy(void* shared, const void* place) {
#if __CUDA_ARCH__ >= 800
    const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    if (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(place)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(place),
                     "n"(BYTES)
                     : "memory");
    }
#else
    struct alignas(BYTES) Bytes { unsigned word[BYTES / 4]; };
    *static_cast<Bytes*>(shared) = *static_cast<const Bytes*>(place);
#endif
}

// Ends the current group of copies, which may be empty.
__device__ inline void end_group_of_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Begins to bring a number, if there is one, to the second-level cache.
__device__ inline void prefetch(const void* place) {
    if (place != nullptr) asm volatile("prefetch.global.L2 [%0];" ::"l"(place));
}

// Lets the blocks of a cluster see what this thread knows to be written.
__device__ inline void fence_cluster() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }

// Waits for all groups of copies but the last `PENDING`.
template <int PENDING> __device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Adds one to a counter that blocks share; what it was before. Who has counted later, or waited for
// that, reads what all who counted before had written; and so do the threads that meet this one at
// a barrier before, for what they have written, and after, for what they read.
__device__ inline unsigned arrive(unsigned* counter) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Waits until a counter has a number.
__device__ inline void wait_for(const unsigned* counter, unsigned number) {
    for (;;) {
        unsigned now;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
        if (now >= number) return;
        __nanosleep(20);
    }
}
#endif

template <int BYTES> struct Word;
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

// What one access moves: elements, and as they are kept in registers.
struct alignas(sizeof(Element) * WIDTH) Elements {
    Element lane[WIDTH];
};
using Vector = typename Word<sizeof(Elements)>::type;

template <class To, class From> __device__ inline To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

__device__ inline Accumulator widen(const Vector& vector, int lane) {
#if defined(ELEMENT_BFLOAT16) && WIDTH > 1  // what a bfloat16 has of a float are its upper bits
    struct Words { unsigned word[WIDTH / 2]; };
    const unsigned word = bits<Words>(vector).word[lane / 2];
    return bits<float>(lane % 2 ? word & 0xffff0000u : word << 16);
#else
    return widen(bits<Elements>(vector).lane[lane]);
#endif
}

// Reads data past the first-level cache.
template <class T> __device__ inline T read(const T* place) {
    using W = typename Word<sizeof(T)>::type;
    return bits<T>(__ldcg(reinterpret_cast<const W*>(place)));
}

// The same to shared memory, where it is found after `wait_for_copies`.
template <class T> __device__ inline void read_ahead(T* shared, const T* place) {
    if constexpr (sizeof(T) < 4) *shared = read(place);
    else begin_copy<sizeof(T)>(shared, place);
}

// Reads data that no kernel running at the time writes, and neighbouring threads will read too.
template <class T> __device__ inline T read_common(const T* place) {
    using W = typename Word<sizeof(T)>::type;
    return bits<T>(__ldg(reinterpret_cast<const W*>(place)));
}

// Writes data that this kernel will not read.
template <class T> __device__ inline void write(T* place, const T& value) {
    using W = typename Word<sizeof(T)>::type;
    __stcg(reinterpret_cast<W*>(place), bits<W>(value));
}

__device__ inline double to_number(double value) { return value; }
__device__ inline float to_number(float value) { return value; }
__device__ inline float to_number(__half value) { return __half2float(value); }
__device__ inline float to_number(__nv_bfloat16 value) { return __bfloat162float(value); }

// A number plus an offset, rounded as their sum: what the accumulator type takes from the offset is
// made up for.
__device__ inline Accumulator shifted(Number number, double offset) {
    if (offset == 0.0) return static_cast<Accumulator>(to_number(number));  // as a rule
    if constexpr (sizeof(Number) > sizeof(Accumulator))
        return static_cast<Accumulator>(to_number(number) + offset);
    const Accumulator high = static_cast<Accumulator>(offset);
    return (static_cast<Accumulator>(to_number(number)) + high)
         + static_cast<Accumulator>(offset - static_cast<double>(high));
}

// WIDTH of them, from an address that is aligned to as many, or to 16 bytes.
__device__ inline void read_numbers(
    const Number* place, double offset, Accumulator (&numbers)[WIDTH]
) {
    constexpr int each = sizeof(Number) * WIDTH < 16 ? WIDTH : 16 / sizeof(Number);
    struct alignas(sizeof(Number) * each) Part { Number number[each]; };
    #pragma unroll
    for (int i = 0; i < WIDTH; i += each) {
        const Part part = read_common(reinterpret_cast<const Part*>(place + i));
        #pragma unroll
        for (int j = 0; j < each; ++j) numbers[i + j] = shifted(part.number[j], offset);
    }
}

// A parameter or running statistic: one number a channel, or none, of any type; where parameters
// change within runs, of the type that these are known to have (`spread`).
struct Parameter {
    void* data;
    long long kind;  // 0: float, 1: double, 2: __half, 3: __nv_bfloat16

    template <class T> __device__ T* as() const { return static_cast<T*>(data); }

    // What memory has of one: nothing waits for it until it is made a number.
    struct Asked { unsigned low, high; };

    __device__ Asked ask(Offset i) const {
        if (data == nullptr) return {};
        if (kind == 0) return {read(as<unsigned>() + i), 0};
        if (kind != 1) return {read(as<unsigned short>() + i), 0};
        const uint2 both = read(as<uint2>() + i);
        return {both.x, both.y};
    }

    __device__ double number(const Asked& asked, double absent, double offset = 0.0) const {
        if (data == nullptr) return absent;
        if (kind == 0) return bits<float>(asked.low) + offset;
        if (kind == 1) return bits<double>(asked) + offset;
        const unsigned short half = static_cast<unsigned short>(asked.low);
        return (kind == 2 ? to_number(bits<__half>(half)) : to_number(bits<__nv_bfloat16>(half)))
             + offset;
    }

    __device__ double get(Offset i, double absent, double offset = 0.0) const {
        return number(ask(i), absent, offset);
    }

    __device__ void prefetch(Offset i) const {
        if (data != nullptr) ::prefetch(as<char>() + i * (kind == 0 ? 4 : kind == 1 ? 8 : 2));
    }

    __device__ void set(Offset i, double value) const {
        if (data == nullptr) return;
        const float single = static_cast<float>(value);
        if (kind == 0) write(as<float>() + i, single);
        else if (kind == 1) write(as<double>() + i, value);
        else if (kind == 2) write(as<__half>() + i, __float2half_rn(single));
        else write(as<__nv_bfloat16>() + i, __float2bfloat16_rn(single));
    }

    // Takes a batch into a running statistic, of which memory has this (cunorm/running.py).
    __device__ void blend(Offset i, const Asked& asked, double batch, double factor) const {
        if (data != nullptr) set(i, number(asked, 0.0) * (1.0 - factor) + batch * factor);
    }
};
