// Gradients of what backward.cu and rows.cu compute, with respect to dy, x and weight, as far as
// all kernels share them.
//
// With upstream gradients g of dx, gw of dweight and gb of dbias, mean and inv_std = r computed
// from n values of x, v = (x - mean) * r, h = weight * dy, k = gw * dy, and means <.> over these
// values,
//   u   = r * (g - <g> - v * <g * v>)
//   ddy = weight * u + gw * v + gb
//   ddx = - r^2 * <h * v> * (g - <g>) - r^2 * <g * v> * (h - <h>) + r * (k - <k>)
//         - v * (r^2 * (<g * h> - <g> * <h> - 3 * <g * v> * <h * v>) + r * <k * v>)
//   ddweight = sum(dy * u)
// and with given statistics u = r * g, ddx = r * k (docs/numerics.md has the derivation).
#pragma once

#include "gradients.cuh"

// Sums over a channel of g, g * xmu, dy, dy * xmu and g * dy, with xmu = x - mean, about the
// rounded mean; over a row, whose elements have weights of their own, of g, g * xmu, h, h * xmu,
// g * h, k and k * xmu.
constexpr int SUMS = SPANS ? 7 : 5;
enum { OF_G, OF_GX, OF_H, OF_HX, OF_GH, OF_K, OF_KX };

using DoubleSums = Totals<SUMS>;

// Of a channel: ddy = g * e + (xmu * f + s), ddx = g * a + (dy * f + (xmu * r * c + d)). Of a row:
// u = g * e + (xmu * f + s), with e = r, and weights and gw multiply what they belong to.
struct DoubleCoefficients {
    Accumulator mean, e, f, s, a, c, d;
    Accumulator more;  // of a channel r, of a row what rounding took from the mean, times r

    __device__ DoubleCoefficients from_lane_0() const {
        return {lane_0(mean), lane_0(e), lane_0(f), lane_0(s),
                lane_0(a), lane_0(c), lane_0(d), lane_0(more)};
    }

  private:
    __device__ static Accumulator lane_0(Accumulator value) {
        return __shfl_sync(ALL_LANES, value, 0, GROUP_LANES);
    }
};

struct DoubleArguments {
    const Element *g, *dy, *x;                    // g may be absent: 0
    Element *ddy, *ddx;
    const Accumulator *mean, *residual, *inv_std; // residual may be absent: 0
    Parameter weight, gweight, gbias;             // each may be absent: 1, 0 and 0
    Parameter ddweight;                           // may be absent
    Accumulator* gradients;                       // or ddweight of every sample, or block of them
    double* partials;                             // sums of `parts` parts of every channel, or row
    double* sums;                                 // of every channel, or row
    double count;                                 // n
    long long training;                           // 0: statistics are given
    long long block;                              // samples of a block, of rows
    Geometry geometry;
    Cut cut;
};

// What the elements of a statistic share: u = g * r + xmu * q + t, and of ddx the factors a of g
// and c of xmu * r, and d.
struct Shares {
    double q, t, a, c, d;
};

// From sums of which h and k are weighted.
__device__ inline Shares shares(
    double r, double low, double n, double g, double gx, double h, double hx, double gh, double k,
    double kx
) {
    gx -= times_residual(low, g);  // from here on about the mean before it was rounded
    hx -= times_residual(low, h);
    kx -= times_residual(low, k);
    const double mean_g = g / n, mean_h = h / n;
    const double mean_gv = gx * r / n, mean_hv = hx * r / n, mean_kv = kx * r / n;
    Shares s;
    s.q = -(r * r) * mean_gv;
    s.a = -(r * r) * mean_hv;
    const double together = gh / n - mean_g * mean_h - 3.0 * mean_gv * mean_hv;
    s.c = -(r * r * together + r * mean_kv);  // times r it might overflow
    s.t = -r * mean_g - times_residual(low, s.q);
    s.d = -s.a * mean_g - s.q * mean_h - r * (k / n) - times_residual(low, r * s.c);
    return s;
}

// Coefficients of a channel, or row, from its sums.
__device__ inline DoubleCoefficients combine(
    const DoubleArguments& a, Offset channel, Offset parameter, const DoubleSums& sums
) {
    const double r = inv_std_of(a, channel), low = residual_of(a, channel);
    const double (&of)[SUMS] = sums.of;
    Shares s = {};
    double e = r, f = 0.0, shift = 0.0;
#if SPANS
    if (a.training)
        s = shares(r, low, a.count, of[OF_G], of[OF_GX], of[OF_H], of[OF_HX], of[OF_GH],
                   of[OF_K], of[OF_KX]);
    f = s.q;
    shift = s.t;
#else
    const double w = a.weight.get(parameter, 1.0), gw = a.gweight.get(parameter, 0.0);
    if (a.training)
        s = shares(r, low, a.count, of[OF_G], of[OF_GX], w * of[OF_H], w * of[OF_HX],
                   w * of[OF_GH], gw * of[OF_H], gw * of[OF_HX]);
    e = w * r;
    f = w * s.q + gw * r;
    shift = w * s.t + a.gbias.get(parameter, 0.0) - times_residual(low, r * gw);
#endif
    return {mean_of(a, channel), static_cast<Accumulator>(e), static_cast<Accumulator>(f),
            static_cast<Accumulator>(shift), static_cast<Accumulator>(s.a),
            static_cast<Accumulator>(s.c), static_cast<Accumulator>(s.d),
            static_cast<Accumulator>(SPANS ? times_residual(low, r) : r)};
}

// The elements of a tile of all three inputs.
struct Inputs {
    Vector g[TILE], dy[TILE], x[TILE];

    template <bool LAST> __device__ void load(const DoubleArguments& a, const Tile& tile) {
        #pragma unroll
        for (int i = 0; i < TILE; ++i) g[i] = Vector{};
        if (a.g != nullptr) tile.load<LAST>(a.g, g);
        tile.load<LAST>(a.dy, dy);
        tile.load<LAST>(a.x, x);
    }

    __device__ void put(Shelf& shelf, int n) const {
        shelf.put(n, 0, g, 3);
        shelf.put(n, 1, dy, 3);
        shelf.put(n, 2, x, 3);
    }

    __device__ void get(const Shelf& shelf, int n) {
        shelf.get(n, 0, g, 3);
        shelf.get(n, 1, dy, 3);
        shelf.get(n, 2, x, 3);
    }
};

// Parameters of the elements of an access to a row.
struct Weights {
    Accumulator weight[WIDTH], gweight[WIDTH];

    __device__ Weights(const DoubleArguments& a, const Work& work, const Access& access) {
        const Offset first = first_parameter(work, a.geometry);
        spread(a.weight, a.geometry, first, access, 1.0, 0.0, weight);
        spread(a.gweight, a.geometry, first, access, 0.0, 0.0, gweight);
    }
};

__device__ inline void add_tile(
    const DoubleArguments& a, const Work& work, DoubleSums (&sums)[STATISTICS], const Tile& tile,
    const Inputs& in, const Accumulator (&mean)[STATISTICS]
) {
    constexpr int lanes = COLUMNS ? 1 : WIDTH;
    #pragma unroll
    for (int s = 0; s < STATISTICS; ++s) {
        Accumulator of[SUMS] = {};
        #pragma unroll
        for (int i = 0; i < TILE; ++i) {
#if SPANS
            const Weights weights(a, work, tile.access[i]);
#endif
            #pragma unroll
            for (int l = 0; l < lanes; ++l) {
                if (!tile.access[i].has(s + l)) continue;
                const Accumulator g = widen(in.g[i].lane[s + l]);
                const Accumulator xmu = widen(in.x[i].lane[s + l]) - mean[s];
                const Accumulator dy = widen(in.dy[i].lane[s + l]);
                of[OF_G] += g;
                of[OF_GX] += g * xmu;
#if SPANS
                const Accumulator h = dy * weights.weight[l], k = dy * weights.gweight[l];
                of[OF_K] += k;
                of[OF_KX] += k * xmu;
#else
                const Accumulator h = dy;
#endif
                of[OF_H] += h;
                of[OF_HX] += h * xmu;
                of[OF_GH] += g * h;
            }
        }
        #pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[s].of[i] += static_cast<double>(of[i]);
    }
}

// Both outputs of a tile. Of rows, `keep(i, lane, dy * u)` gets what ddweight is the sum of.
template <class Keep> __device__ inline void outputs_of_tile(
    const DoubleArguments& a, const Work& work, const Tile& tile, const Inputs& in,
    const DoubleCoefficients (&coefficients)[STATISTICS], Keep keep
) {
    #pragma unroll
    for (int i = 0; i < TILE; ++i) {
#if SPANS
        const Weights weights(a, work, tile.access[i]);
        Accumulator gbias[WIDTH];
        spread(a.gbias, a.geometry, first_parameter(work, a.geometry), tile.access[i], 0.0, 0.0,
               gbias);
#endif
        Vector ddy, ddx;
        #pragma unroll
        for (int lane = 0; lane < WIDTH; ++lane) {
            const DoubleCoefficients& c = coefficients[COLUMNS ? lane : 0];
            const Accumulator g = widen(in.g[i].lane[lane]), dy = widen(in.dy[i].lane[lane]);
            const Accumulator xmu = widen(in.x[i].lane[lane]) - c.mean;
            const Accumulator u = g * c.e + (xmu * c.f + c.s);
#if SPANS
            const Accumulator w = weights.weight[lane], gw = weights.gweight[lane];
            ddy.lane[lane] = narrow(w * u + (gw * (xmu * c.e - c.more) + gbias[lane]));
            const Accumulator of_dy = w * c.f + gw * c.e;
            if (tile.access[i].valid) keep(i, lane, dy * u);
            const Accumulator r = c.e;
#else
            ddy.lane[lane] = narrow(u);
            const Accumulator of_dy = c.f, r = c.more;
#endif
            ddx.lane[lane] = narrow(g * c.a + (dy * of_dy + (xmu * r * c.c + c.d)));
        }
        tile.access[i].store(a.ddy, ddy);
        tile.access[i].store(a.ddx, ddx);
    }
}
