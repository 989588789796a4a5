// Gradients of what backward.cu and rows.cu compute, with respect to dy, x and weight, as far as
// all kernels share them.
//
// With upstream gradients g of dx, gw of dweight and gb of dbias, mean and inv_std = r computed
// from n values of x, v = (x - mean) * r, h = weight * dy, k = gw * dy, and means <.> over these
// values,
//   u   = r * (g - <g> - v * <g * v>)
//   ddy = weight * u + gw * v + gb
//   ddx = - r^2 * <h * v> * (g - <g>) - r^2 * <g * v> * (h - <h>) + r * (k - <k>)
//         - v * (r^2 * (<(g - <g>) * (h - <h>)> - 3 * <g * v> * <h * v>) + r * <k * v>)
//   ddweight = sum(dy * u)
// and with given statistics u = r * g, ddx = r * k (docs/numerics.md has the derivation).
#pragma once

#include "gradients.cuh"

// Of the elements of a statistic, or of some of them: the means of g and h, the sum of
// (g - mean) * (h - mean) about these, and the sums of g * xmu and h * xmu, with xmu = x - mean of
// x, rounded. A channel, whose elements have one weight, has dy for h; a row has the sums of k and
// k * xmu besides. With given statistics the means count as 0. (Sums of products about means are
// merged as variances are: see moments.cuh.)
struct DoubleSums {
    enum { MEAN_G, MEAN_H, GH, GX, HX, K, KX };
    static constexpr int SIZE = SPANS ? 7 : 5;

    double of[SIZE];
    Accumulator count;

    __device__ void merge(const DoubleSums& other) {
        if (other.count == 0) return;
        const Accumulator share = other.count / (count + other.count);
        add(other.of, static_cast<double>(share), static_cast<double>(count * share));
        count += other.count;
    }

    // Takes the sums of others but for their count, which makes `share` of all.
    __device__ void add(const double (&other)[SIZE], double share, double weight) {
        const double delta_g = other[MEAN_G] - of[MEAN_G];
        const double delta_h = other[MEAN_H] - of[MEAN_H];
        of[MEAN_G] += delta_g * share;
        of[MEAN_H] += delta_h * share;
        of[GH] += delta_g * delta_h * weight;
        #pragma unroll
        for (int i = GH; i < SIZE; ++i) of[i] += other[i];
    }

    __device__ DoubleSums down(int offset, int width) const {
        DoubleSums result;
        #pragma unroll
        for (int i = 0; i < SIZE; ++i)
            result.of[i] = __shfl_down_sync(ALL_LANES, of[i], offset, width);
        result.count = __shfl_down_sync(ALL_LANES, count, offset, width);
        return result;
    }

    __device__ static DoubleSums read(const double* partials, Offset i) {
        const double* const place = partials + (SIZE + 1) * i;
        DoubleSums result;
        #pragma unroll
        for (int j = 0; j < SIZE; ++j) result.of[j] = ::read(place + j);
        result.count = static_cast<Accumulator>(::read(place + SIZE));
        return result;
    }

    __device__ void write(double* partials, Offset i) const {
        double* const place = partials + (SIZE + 1) * i;
        #pragma unroll
        for (int j = 0; j < SIZE; ++j) ::write(place + j, of[j]);
        ::write(place + SIZE, static_cast<double>(count));
    }
};

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
    long long samples;                            // that a block takes, of rows
    Geometry geometry;
    Cut cut;
};

// What the elements of a statistic share: u = g * r + xmu * q + t, and of ddx the factors a of g
// and c of xmu * r, and d.
struct Shares {
    double q, t, a, c, d;
};

// From sums whose h counts `weight` times; `k` and `kx` are those of k, of n elements.
__device__ inline Shares shares(
    double r, double low, double n, const DoubleSums& sums, double weight, double k, double kx
) {
    const double (&of)[DoubleSums::SIZE] = sums.of;
    const double mean_g = of[DoubleSums::MEAN_G], mean_h = weight * of[DoubleSums::MEAN_H];
    const double mean_k = k / n;
    // About the mean of x before it was rounded.
    const double mean_gv = (of[DoubleSums::GX] / n - times_residual(low, mean_g)) * r;
    const double mean_hv = (weight * (of[DoubleSums::HX] / n) - times_residual(low, mean_h)) * r;
    const double mean_kv = (kx / n - times_residual(low, mean_k)) * r;
    Shares s;
    s.q = -(r * r) * mean_gv;
    s.a = -(r * r) * mean_hv;
    const double together = weight * (of[DoubleSums::GH] / n) - 3.0 * mean_gv * mean_hv;
    s.c = -(r * r * together + r * mean_kv);  // times r it might overflow
    s.t = -r * mean_g - times_residual(low, s.q);
    s.d = -s.a * mean_g - s.q * mean_h - r * mean_k - times_residual(low, r * s.c);
    return s;
}

// Coefficients of a channel, or row, from its sums.
__device__ inline DoubleCoefficients combine(
    const DoubleArguments& a, Offset channel, Offset parameter, const DoubleSums& sums
) {
    const double r = inv_std_of(a, channel), low = residual_of(a, channel);
    Shares s = {};
    double e = r, f = 0.0, shift = 0.0;
#if SPANS
    if (a.training)
        s = shares(r, low, a.count, sums, 1.0, sums.of[DoubleSums::K], sums.of[DoubleSums::KX]);
    f = s.q;
    shift = s.t;
#else
    const double w = a.weight.get(parameter, 1.0), gw = a.gweight.get(parameter, 0.0);
    if (a.training)
        s = shares(r, low, a.count, sums, w, gw * (a.count * sums.of[DoubleSums::MEAN_H]),
                   gw * sums.of[DoubleSums::HX]);
    e = w * r;
    f = gw * r;
    shift = a.gbias.get(parameter, 0.0) - times_residual(low, r * gw);
    if (a.training) {
        f += w * s.q;
        shift += w * s.t;
    }
#endif
    return {mean_of(a, channel), static_cast<Accumulator>(e), static_cast<Accumulator>(f),
            static_cast<Accumulator>(shift), static_cast<Accumulator>(s.a),
            static_cast<Accumulator>(s.c), static_cast<Accumulator>(s.d),
            static_cast<Accumulator>(SPANS ? times_residual(low, r) : r)};
}

// The elements of a tile of all three inputs.
struct Inputs {
    Vector g[TILE], dy[TILE], x[TILE];

    __device__ void load(const DoubleArguments& a, const Tile& tile) {
        #pragma unroll
        for (int i = 0; i < TILE; ++i) g[i] = Vector{};
        if (a.g != nullptr) tile.load(a.g, g);
        tile.load(a.dy, dy);
        tile.load(a.x, x);
    }

    __device__ void put(const Shelf& shelf, int n) const {
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

// Takes a tile into the sums: about the means of its own elements, which are in registers.
__device__ inline void add_tile(
    const DoubleArguments& a, const Work& work, DoubleSums (&sums)[STATISTICS], const Tile& tile,
    const Inputs& in, const Accumulator (&mean)[STATISTICS]
) {
    const Accumulator number = static_cast<Accumulator>(tile.number());
    if (number == 0) return;
    const Accumulator reciprocal = 1 / number;
    const Accumulator before = sums[0].count, after = before + number;  // of all statistics
    const double share = number / after, weight = before * (number / after);

    #pragma unroll
    for (int s = 0; s < STATISTICS; ++s) {
        Accumulator h[TILE][LANES], center_g = 0, center_h = 0;
#if SPANS
        Accumulator k = 0, kx = 0;
#endif
        #pragma unroll
        for (int i = 0; i < TILE; ++i) {
#if SPANS
            const Weights weights(a, work, tile.access[i]);
#endif
            #pragma unroll
            for (int l = 0; l < LANES; ++l) {
                h[i][l] = 0;
                if (!tile.access[i].has(l)) continue;
                h[i][l] = widen(in.dy[i], s + l);
#if SPANS
                const Accumulator of_weight = h[i][l] * weights.gweight[l];
                h[i][l] *= weights.weight[l];
                k += of_weight;
                kx += of_weight * (widen(in.x[i], s + l) - mean[s]);
#endif
                center_g += widen(in.g[i], s + l);
                center_h += h[i][l];
            }
        }
        center_g = a.training ? center_g * reciprocal : 0;
        center_h = a.training ? center_h * reciprocal : 0;

        Accumulator sum_g = 0, sum_h = 0, gh = 0, gx = 0, hx = 0;
        #pragma unroll
        for (int i = 0; i < TILE; ++i) {
            #pragma unroll
            for (int l = 0; l < LANES; ++l) {
                if (!tile.access[i].has(l)) continue;
                const Accumulator g = widen(in.g[i], s + l);
                const Accumulator xmu = widen(in.x[i], s + l) - mean[s];
                gx += g * xmu;
                hx += h[i][l] * xmu;
                sum_g += g - center_g;
                sum_h += h[i][l] - center_h;
                gh += (g - center_g) * (h[i][l] - center_h);
            }
        }
        const Accumulator rest_g = a.training ? sum_g * reciprocal : 0;
        const Accumulator rest_h = a.training ? sum_h * reciprocal : 0;
        if (a.training) gh -= sum_g * rest_h;  // else 0 * infinity
        const double of_tile[DoubleSums::SIZE] = {
            static_cast<double>(center_g) + static_cast<double>(rest_g),
            static_cast<double>(center_h) + static_cast<double>(rest_h),
            static_cast<double>(gh), static_cast<double>(gx), static_cast<double>(hx),
#if SPANS
            static_cast<double>(k), static_cast<double>(kx),
#endif
        };
        sums[s].add(of_tile, share, weight);
        sums[s].count = after;
    }
}

// Both outputs of a tile. Of rows, `keep(i, lane, dy * u)` gets what ddweight is the sum of.
template <class Keep> __device__ inline void outputs_of_tile(
    const DoubleArguments& a, const Work& work, const Tile& tile, const Inputs& in,
    const DoubleCoefficients (&coefficients)[STATISTICS], Keep keep
) {
    // With given statistics there is but what is upstream of dweight that needs dy and x.
    const bool needs_all = a.training || a.gweight.data != nullptr;
    #pragma unroll
    for (int i = 0; i < TILE; ++i) {
#if SPANS
        const Weights weights(a, work, tile.access[i]);
        Accumulator gbias[WIDTH];
        spread(a.gbias, a.geometry, first_parameter(work, a.geometry), tile.access[i], 0.0, 0.0,
               gbias);
#endif
        Elements ddy, ddx;
        #pragma unroll
        for (int lane = 0; lane < WIDTH; ++lane) {
            const DoubleCoefficients& c = coefficients[COLUMNS ? lane : 0];
            const Accumulator g = widen(in.g[i], lane);
            const Accumulator dy = needs_all ? widen(in.dy[i], lane) : Accumulator(0);
            const Accumulator xmu =
                needs_all ? widen(in.x[i], lane) - c.mean : Accumulator(0);
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
            const Accumulator rest = dy * of_dy;
            ddx.lane[lane] = narrow(
                a.training ? g * c.a + (rest + (xmu * r * c.c + c.d)) : rest);
        }
        tile.access[i].store(a.ddy, ddy);
        tile.access[i].store(a.ddx, ddx);
    }
}
