// Sixteen float32 lanes as native vectors side by side: one of 64 bytes, two of 32, or four of 16.
//
// GCC keeps a vector that is wider than the machine's in memory and copies it about in pieces; an array of native ones in a
// struct stays in registers. What the kernels of attention and of rows need, and no more.
#pragma once

#include "simd.h"

namespace samovar::SAMOVAR_ISA {

#if defined(__AVX512F__)
constexpr int PART_LANES = 16;
#elif defined(__AVX__)
constexpr int PART_LANES = 8;
#else
constexpr int PART_LANES = 4;
#endif
constexpr int PARTS = LANES / PART_LANES;

typedef float Part __attribute__((vector_size(4 * PART_LANES), aligned(4 * PART_LANES)));
typedef int32_t IntPart __attribute__((vector_size(4 * PART_LANES), aligned(4 * PART_LANES)));
typedef uint32_t BitPart __attribute__((vector_size(4 * PART_LANES), aligned(4 * PART_LANES)));
typedef uint16_t HalfPart __attribute__((vector_size(2 * PART_LANES), aligned(2 * PART_LANES)));
typedef uint8_t BytePart __attribute__((vector_size(PART_LANES), aligned(PART_LANES)));

SAMOVAR_INLINE Part fill_part(float x) { return x - Part{}; }

SAMOVAR_INLINE Part fma_part(Part a, Part b, Part c) {
#if defined(__AVX512F__)
    return (Part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (Part)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Before loops of a few rounds over arrays of vectors, which only stay in registers if every index is a constant.
#if defined(__clang__)
#define SAMOVAR_UNROLL _Pragma("unroll")
#else
#define SAMOVAR_UNROLL _Pragma("GCC unroll 64")
#endif

struct V {
    Part part[PARTS];
};

// All bits of a lane set, or none.
struct Mask {
    IntPart part[PARTS];
};

#define SAMOVAR_EACH_PART SAMOVAR_UNROLL for (int p = 0; p < PARTS; p++)
#define SAMOVAR_OPERATOR(op)                        \
    SAMOVAR_INLINE V operator op(V a, V b) {        \
        V y;                                        \
        SAMOVAR_EACH_PART y.part[p] = a.part[p] op b.part[p]; \
        return y;                                   \
    }                                               \
    SAMOVAR_INLINE V operator op(V a, float b) {    \
        V y;                                        \
        SAMOVAR_EACH_PART y.part[p] = a.part[p] op b; \
        return y;                                   \
    }                                               \
    SAMOVAR_INLINE V operator op(float a, V b) {    \
        V y;                                        \
        SAMOVAR_EACH_PART y.part[p] = a op b.part[p]; \
        return y;                                   \
    }
SAMOVAR_OPERATOR(+)
SAMOVAR_OPERATOR(-)
SAMOVAR_OPERATOR(*)
SAMOVAR_OPERATOR(/)
#undef SAMOVAR_OPERATOR

#define SAMOVAR_COMPARISON(op)                      \
    SAMOVAR_INLINE Mask operator op(V a, V b) {     \
        Mask y;                                     \
        SAMOVAR_EACH_PART y.part[p] = a.part[p] op b.part[p]; \
        return y;                                   \
    }
SAMOVAR_COMPARISON(<)
SAMOVAR_COMPARISON(>)
SAMOVAR_COMPARISON(>=)
#undef SAMOVAR_COMPARISON

SAMOVAR_INLINE V fill(float x) {
    V y;
    SAMOVAR_EACH_PART y.part[p] = fill_part(x);
    return y;
}

SAMOVAR_INLINE V get(const float* from) {
    V y;
    SAMOVAR_EACH_PART y.part[p] = load<Part>(from + p * PART_LANES);
    return y;
}

SAMOVAR_INLINE void set(float* to, V value) {
    SAMOVAR_EACH_PART store(to + p * PART_LANES, value.part[p]);
}

// The first `count` floats (0 to 16), zeros behind them.
SAMOVAR_INLINE V get(const float* from, int count) {
#if defined(__AVX512F__)
    return {(Part)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from)};
#else
    alignas(64) float copy[LANES] = {};
    for (int i = 0; i < count; i++) copy[i] = from[i];
    return get(copy);
#endif
}

SAMOVAR_INLINE void set(float* to, V value, int count) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)value.part[0]);
#else
    alignas(64) float copy[LANES];
    set(copy, value);
    for (int i = 0; i < count; i++) to[i] = copy[i];
#endif
}

SAMOVAR_INLINE V fma(V a, V b, V c) {
    V y;
    SAMOVAR_EACH_PART y.part[p] = fma_part(a.part[p], b.part[p], c.part[p]);
    return y;
}

SAMOVAR_INLINE V fma(V a, float b, V c) { return fma(a, fill(b), c); }

SAMOVAR_INLINE V select(Mask where, V a, V b) {
    V y;
    SAMOVAR_EACH_PART y.part[p] = where.part[p] ? a.part[p] : b.part[p];
    return y;
}

SAMOVAR_INLINE V most(V a, V b) {
    V y;
    SAMOVAR_EACH_PART {
#if defined(__AVX512F__)
        y.part[p] = (Part)_mm512_max_ps((__m512)a.part[p], (__m512)b.part[p]);
#elif defined(__AVX__)
        y.part[p] = (Part)_mm256_max_ps((__m256)a.part[p], (__m256)b.part[p]);
#elif defined(__SSE__)
        y.part[p] = (Part)_mm_max_ps((__m128)a.part[p], (__m128)b.part[p]);
#else
        y.part[p] = a.part[p] > b.part[p] ? a.part[p] : b.part[p];
#endif
    }
    return y;
}

SAMOVAR_INLINE V least(V a, V b) { return 0.f - most(0.f - a, 0.f - b); }

SAMOVAR_INLINE bool any(Mask mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask.part[0], (__m512i)mask.part[0]) != 0;
#else
    IntPart all = mask.part[0];
    for (int p = 1; p < PARTS; p++) all |= mask.part[p];
    int32_t found = 0;
    for (int i = 0; i < PART_LANES; i++) found |= all[i];
    return found != 0;
#endif
}

SAMOVAR_INLINE float sum(V x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x.part[0]);
#else
    Part total = x.part[0];
    for (int p = 1; p < PARTS; p++) total += x.part[p];
    float y = 0;
    for (int i = 0; i < PART_LANES; i++) y += total[i];
    return y;
#endif
}

SAMOVAR_INLINE float highest(V x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x.part[0]);
#else
    float y = x.part[0][0];
    SAMOVAR_EACH_PART for (int i = 0; i < PART_LANES; i++) y = x.part[p][i] > y ? x.part[p][i] : y;
    return y;
#endif
}

SAMOVAR_INLINE Part nearest(Part x) {
#if defined(__AVX512F__)
    return (Part)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    return (x + 12582912.f) - 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
#endif
}

// y * 2^n for whole n of -252 to 128.
SAMOVAR_INLINE Part scale_part(Part y, Part n) {
#if defined(__AVX512F__)
    return (Part)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
    // In two factors, so that n = 128 does not leave the exponent's range too early.
    IntPart whole = __builtin_convertvector(n, IntPart), half = whole >> 1;
    return y * (Part)((half + 127) << 23) * (Part)((whole - half + 127) << 23);
#endif
}

// 2^x, relative error < 2e-7; 0 far below, infinity above. The polynomial is that of e^f for f = log(2) times the fraction.
SAMOVAR_INLINE V exp2(V x) {
    V y;
    SAMOVAR_EACH_PART {
        Part v = x.part[p];
#if !defined(__AVX512F__)
        v = v < -252.f ? fill_part(-252.f) : v;
        v = v > 129.f ? fill_part(129.f) : v;
#endif
        const Part n = nearest(v), f = (v - n) * 0.693147181f;
        Part e = fill_part(1.9875691500e-4f);
        e = fma_part(e, f, fill_part(1.3981999507e-3f));
        e = fma_part(e, f, fill_part(8.3334519073e-3f));
        e = fma_part(e, f, fill_part(4.1665795894e-2f));
        e = fma_part(e, f, fill_part(1.6666665459e-1f));
        e = fma_part(e, f, fill_part(5.0000001201e-1f));
        e = fma_part(e * f, f, f + 1.f);
        y.part[p] = scale_part(e, n);
    }
    return y;
}

SAMOVAR_INLINE V exp(V x) {
    // In two steps: the fraction of x / log(2) is not lost for large x.
    V y;
    SAMOVAR_EACH_PART {
        Part v = x.part[p];
        v = v < -170.f ? fill_part(-170.f) : v;
        v = v > 89.f ? fill_part(89.f) : v;
        const Part n = nearest(v * 1.44269504f);
        Part f = fma_part(n, fill_part(-0.693359375f), v);
        f = fma_part(n, fill_part(2.12194440e-4f), f);
        Part e = fill_part(1.9875691500e-4f);
        e = fma_part(e, f, fill_part(1.3981999507e-3f));
        e = fma_part(e, f, fill_part(8.3334519073e-3f));
        e = fma_part(e, f, fill_part(4.1665795894e-2f));
        e = fma_part(e, f, fill_part(1.6666665459e-1f));
        e = fma_part(e, f, fill_part(5.0000001201e-1f));
        e = fma_part(e * f, f, f + 1.f);
        y.part[p] = scale_part(e, n);
    }
    return y;
}

SAMOVAR_INLINE V tanh(V x) {
    V e = exp(most(least(x, fill(20.f)), fill(-20.f)) * 2.f);
    return (e - 1.f) / (e + 1.f);
}

}  // namespace samovar::SAMOVAR_ISA
