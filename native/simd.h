// Vectors of sixteen 32-bit lanes for the instruction set this file is compiled for.
//
// Every kernel source is compiled once per set, in the namespace SAMOVAR_ISA, with that set's compiler flags; the vector
// extensions of GCC and Clang turn one source into AVX2, AVX-512, NEON or scalar code. Only what they do badly is written
// with intrinsics here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef SAMOVAR_ISA
#error "compile with -DSAMOVAR_ISA=<name of the instruction set>"
#endif

namespace samovar::SAMOVAR_ISA {

constexpr int LANES = 16;

typedef float F32 __attribute__((vector_size(64), aligned(64)));
typedef int32_t I32 __attribute__((vector_size(64), aligned(64)));
typedef uint32_t U32 __attribute__((vector_size(64), aligned(64)));
typedef uint8_t U8 __attribute__((vector_size(64), aligned(64)));
typedef int8_t I8 __attribute__((vector_size(64), aligned(64)));
typedef uint16_t U16x16 __attribute__((vector_size(32), aligned(32)));
typedef uint8_t U8x16 __attribute__((vector_size(16), aligned(16)));
typedef int8_t I8x16 __attribute__((vector_size(16), aligned(16)));

#define SAMOVAR_INLINE inline __attribute__((always_inline))

template <typename V>
SAMOVAR_INLINE V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <typename V>
SAMOVAR_INLINE void store(void* to, V value) {
    std::memcpy(to, &value, sizeof value);
}

SAMOVAR_INLINE F32 splat(float x) { return x - F32{}; }
SAMOVAR_INLINE I32 splat(int32_t x) { return x - I32{}; }

SAMOVAR_INLINE F32 to_float(I32 x) {
#if defined(__AVX512F__)
    return (F32)_mm512_cvtepi32_ps((__m512i)x);
#else
    return __builtin_convertvector(x, F32);
#endif
}

SAMOVAR_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
    return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;  // contracted by the compiler where the set has it (-ffp-contract=fast)
#endif
}

SAMOVAR_INLINE F32 max(F32 a, F32 b) { return a > b ? a : b; }
SAMOVAR_INLINE F32 min(F32 a, F32 b) { return a < b ? a : b; }

// The first `count` floats at `from` (0 to 16), zeros behind them.
SAMOVAR_INLINE F32 load_some(const float* from, int count) {
#if defined(__AVX512F__)
    return (F32)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#else
    F32 value = {};
    std::memcpy(&value, from, sizeof(float) * count);
    return value;
#endif
}

SAMOVAR_INLINE void store_some(float* to, F32 value, int count) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)value);
#else
    std::memcpy(to, &value, sizeof(float) * count);
#endif
}

SAMOVAR_INLINE float sum(F32 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
#endif
}

SAMOVAR_INLINE float highest(F32 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

// Sixteen float16 values.
SAMOVAR_INLINE F32 from_f16(const void* from) {
#if defined(__AVX512F__)
    return (F32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    F32 value;
    __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
    __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from + 1));
    std::memcpy(&value, &low, 32);
    std::memcpy((char*)&value + 32, &high, 32);
    return value;
#else
    // Shifted into float32 and multiplied by 2^112: right for denormals too; infinities and NaN keep all exponent bits.
    U32 bits = __builtin_convertvector(load<U16x16>(from), U32);
    U32 magnitude = (bits & 0x7fffu) << 13;
    F32 value = (F32)magnitude * 0x1p112f;
    U32 special = (U32)(magnitude >= (0x7c00u << 13));
    U32 result = (special & (magnitude | 0x7f800000u)) | (~special & (U32)value);
    return (F32)(result | ((bits & 0x8000u) << 16));
#endif
}

// Sixteen bfloat16 values.
SAMOVAR_INLINE F32 from_bf16(const void* from) {
    return (F32)(__builtin_convertvector(load<U16x16>(from), U32) << 16);
}

// Nearest bfloat16, ties to even; NaN stays NaN.
SAMOVAR_INLINE U16x16 to_bf16(F32 x) {
#if defined(__AVX512BF16__)
    return (U16x16)_mm512_cvtneps_pbh((__m512)x);
#else
    U32 bits = (U32)x;
    U32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    U32 is_nan = (U32)(x != x);
    return __builtin_convertvector((is_nan & ((bits >> 16) | 64u)) | (~is_nan & rounded), U16x16);
#endif
}

// In every lane, four products of unsigned by signed bytes added to `total`. `codes` up to 255, `values` -127 to 127.
SAMOVAR_INLINE I32 dot4(I32 total, U8 codes, I8 values) {
#if defined(__AVX512VNNI__)
    return (I32)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, (__m512i)values);
#elif defined(__AVX512BW__)
    // 16-bit products of even and odd bytes: vpmaddubsw would saturate on codes above 128.
    __m512i c = (__m512i)codes, v = (__m512i)values, low = _mm512_set1_epi16(0xff);
    __m512i even = _mm512_madd_epi16(_mm512_and_si512(c, low), _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8));
    __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(c, 8), _mm512_srai_epi16(v, 8));
    return (I32)_mm512_add_epi32((__m512i)total, _mm512_add_epi32(even, odd));
#elif defined(__AVX2__)
    I32 result;
    for (int half = 0; half < 2; half++) {
        __m256i c, v, t, low = _mm256_set1_epi16(0xff);
        std::memcpy(&c, (const char*)&codes + 32 * half, 32);
        std::memcpy(&v, (const char*)&values + 32 * half, 32);
        std::memcpy(&t, (const char*)&total + 32 * half, 32);
        __m256i even = _mm256_madd_epi16(_mm256_and_si256(c, low), _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8));
        __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(c, 8), _mm256_srai_epi16(v, 8));
        t = _mm256_add_epi32(t, _mm256_add_epi32(even, odd));
        std::memcpy((char*)&result + 32 * half, &t, 32);
    }
    return result;
#else
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++) total[lane] += (int32_t)codes[4 * lane + i] * (int32_t)values[4 * lane + i];
    return total;
#endif
}

// The same four signed bytes in every lane.
SAMOVAR_INLINE I8 repeat4(const void* from) {
    int32_t four;
    std::memcpy(&four, from, 4);
    return (I8)splat(four);
}

// e^x, |relative error| < 2e-7 for -87 <= x <= 88; below that 0, above it infinity. By 2^n * 2^f with a polynomial for 2^f.
SAMOVAR_INLINE F32 exp(F32 x) {
    F32 clamped = min(max(x, splat(-87.33654f)), splat(88.72283f));
    F32 n = clamped * 1.44269504f;
#if defined(__AVX512F__)
    n = (F32)_mm512_roundscale_ps((__m512)n, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    n = (n + 12582912.f) - 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
#endif
    F32 f = fma(n, splat(-0.693359375f), clamped);
    f = fma(n, splat(2.12194440e-4f), f);
    F32 y = splat(1.9875691500e-4f);
    y = fma(y, f, splat(1.3981999507e-3f));
    y = fma(y, f, splat(8.3334519073e-3f));
    y = fma(y, f, splat(4.1665795894e-2f));
    y = fma(y, f, splat(1.6666665459e-1f));
    y = fma(y, f, splat(5.0000001201e-1f));
    y = fma(y * f, f, f + 1.f);
    // In two factors, so that n = 128 does not leave the exponent's range too early.
    I32 whole = __builtin_convertvector(n, I32), half = whole >> 1;
    y = y * (F32)((half + 127) << 23) * (F32)((whole - half + 127) << 23);
    y = x < -87.33654f ? F32{} : y;
    y = x > 88.72283f ? splat(INFINITY) : y;
    return x != x ? x : y;
}

SAMOVAR_INLINE F32 tanh(F32 x) {
    F32 e = exp(max(min(x, splat(20.f)), splat(-20.f)) * 2.f);
    return (e - 1.f) / (e + 1.f);
}

// x / (1 + e^-x), |relative error| < 7e-7.
SAMOVAR_INLINE F32 silu(F32 x) {
#if defined(__AVX512F__)
    // By e^-|x|, which cannot overflow; and division is slow: an estimate of the inverse and a step of Newton's method.
    const __m512 v = (__m512)x, size = _mm512_min_ps(_mm512_set1_ps(104.f), _mm512_abs_ps(v));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(size, _mm512_set1_ps(-1.44269504f)),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_fnmsub_ps(n, _mm512_set1_ps(0.693359375f), size);
    f = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), f);
    __m512 e = _mm512_set1_ps(1.3981999507e-3f);
    e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(8.3334519073e-3f));
    e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(4.1665795894e-2f));
    e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(1.6666665459e-1f));
    e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(5.0000001201e-1f));
    e = _mm512_scalef_ps(_mm512_fmadd_ps(_mm512_mul_ps(e, f), f, _mm512_add_ps(f, _mm512_set1_ps(1.f))), n);
    const __m512 under = _mm512_add_ps(e, _mm512_set1_ps(1.f)), guess = _mm512_rcp14_ps(under);
    const __m512 inverse = _mm512_mul_ps(guess, _mm512_fnmadd_ps(under, guess, _mm512_set1_ps(2.f)));
    const __mmask16 is_negative = _mm512_movepi32_mask((__m512i)v);
    return (F32)_mm512_mul_ps(_mm512_mask_mul_ps(v, is_negative, v, e), inverse);
#else
    return x / (1.f + exp(-x));
#endif
}

SAMOVAR_INLINE F32 gelu_tanh(F32 x) {
    return 0.5f * x * (1.f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}

}  // namespace samovar::SAMOVAR_ISA
