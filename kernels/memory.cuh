// Global memory: every access of the kernels to it is made by a function of this file.
#pragma once

#include "types.cuh"

// A test that executes these sources without a GPU has shared memory of its own.
#ifndef SHARED_MEMORY
#define SHARED_MEMORY(name) extern __shared__ __align__(16) unsigned char name[]
#endif

template <int BYTES> struct Word;
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

// What one access moves.
struct alignas(sizeof(Element) * WIDTH) Vector {
    Element lane[WIDTH];
};

template <class To, class From> __device__ inline To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

// Reads data that will be read again: it may stay in the second-level cache.
template <class T> __device__ inline T read(const T* place) {
    using W = typename Word<sizeof(T)>::type;
    return bits<T>(__ldcg(reinterpret_cast<const W*>(place)));
}

// Reads data for the last time.
template <class T> __device__ inline T read_last(const T* place) {
    using W = typename Word<sizeof(T)>::type;
    return bits<T>(__ldcs(reinterpret_cast<const W*>(place)));
}

// Writes data that this kernel will not read.
template <class T> __device__ inline void write(T* place, const T& value) {
    using W = typename Word<sizeof(T)>::type;
    __stcs(reinterpret_cast<W*>(place), bits<W>(value));
}

// A parameter or running statistic: one number a channel, or none, of any type.
struct Parameter {
    void* data;
    long long kind;  // 0: float, 1: double, 2: __half, 3: __nv_bfloat16

    template <class T> __device__ T* as() const { return static_cast<T*>(data); }

    __device__ double get(Offset i, double absent) const {
        if (data == nullptr) return absent;
        if (kind == 0) return read(as<float>() + i);
        if (kind == 1) return read(as<double>() + i);
        if (kind == 2) return __half2float(read(as<__half>() + i));
        return __bfloat162float(read(as<__nv_bfloat16>() + i));
    }

    __device__ void set(Offset i, double value) const {
        if (data == nullptr) return;
        const float single = static_cast<float>(value);
        if (kind == 0) write(as<float>() + i, single);
        else if (kind == 1) write(as<double>() + i, value);
        else if (kind == 2) write(as<__half>() + i, __float2half_rn(single));
        else write(as<__nv_bfloat16>() + i, __float2bfloat16_rn(single));
    }

    // Takes a batch into a running statistic (cunorm/running.py).
    __device__ void blend(Offset i, double batch, double factor) const {
        if (data != nullptr) set(i, get(i, 0.0) * (1.0 - factor) + batch * factor);
    }
};
