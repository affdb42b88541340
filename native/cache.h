// The paged K/V cache: how its numbers are read into lanes, and written.
//
// A token's head is a row of head_dim numbers: float32, float16, bfloat16, float8 e4m3 (the conversions are those of torch:
// nearest, ties to even, saturating), or int8 codes followed by the float32 scale amax / 127 of that row. The heads of a
// token stand side by side, and tokens in the order of their slots.
#pragma once

#include "abi.h"
#include "lanes.h"

namespace samovar::SAMOVAR_ISA {

constexpr int MAX_HEAD_DIM = 256;

constexpr size_t cache_row_bytes(int format, int dim) {
    switch (format) {
        case SAMOVAR_F32: return 4 * size_t(dim);
        case SAMOVAR_F16:
        case SAMOVAR_BF16: return 2 * size_t(dim);
        case SAMOVAR_KV_FP8_E4M3: return size_t(dim);
        case SAMOVAR_KV_I8: return size_t(dim) + sizeof(float);
        default: return 0;
    }
}

// Null, or why a cache cannot be of this format and head size.
inline const char* refuse_cache(int format, int dim) {
    if (cache_row_bytes(format, 8) == 0) return "i[4], the cache's format, must be F32, F16, BF16, KV_FP8_E4M3 or KV_I8";
    if (dim < 8 || dim > MAX_HEAD_DIM || dim % 8 != 0) return "i[2], the head size, must be a multiple of 8 up to 256";
    return nullptr;
}

SAMOVAR_INLINE V from_bf16_lanes(const void* from) {
    V y;
    SAMOVAR_EACH_PART {
        HalfPart half;
        std::memcpy(&half, (const char*)from + p * sizeof half, sizeof half);
        y.part[p] = (Part)(__builtin_convertvector(half, BitPart) << 16);
    }
    return y;
}

SAMOVAR_INLINE V from_f16_lanes(const void* from) {
    V y;
    SAMOVAR_EACH_PART {
        const char* at = (const char*)from + p * sizeof(HalfPart);
#if defined(__AVX512F__)
        y.part[p] = (Part)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#elif defined(__F16C__)
        y.part[p] = (Part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
#else
        // Shifted into float32 and multiplied by 2^112: right for denormals too; infinities and NaN keep all exponent bits.
        HalfPart half;
        std::memcpy(&half, at, sizeof half);
        BitPart bits = __builtin_convertvector(half, BitPart), magnitude = (bits & 0x7fffu) << 13;
        BitPart special = (BitPart)(magnitude >= (0x7c00u << 13)), value = (BitPart)((Part)magnitude * 0x1p112f);
        BitPart result = (special & (magnitude | 0x7f800000u)) | (~special & value);
        y.part[p] = (Part)(result | ((bits & 0x8000u) << 16));
#endif
    }
    return y;
}

SAMOVAR_INLINE V from_fp8_lanes(const void* from) {
    V y;
    SAMOVAR_EACH_PART {
        const char* at = (const char*)from + p * sizeof(BytePart);
#if defined(__F16C__)
        // As float16 the same bits are 2^-8 of the value, and denormals stay denormals; code 127 is the only NaN.
#if defined(__AVX512F__)
        __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)at));
        __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi16(0x7f));
        __m256i nan = _mm256_srli_epi16(_mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f)), 1);
        __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(bits, magnitude), 8);
        __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(magnitude, 7), nan), sign);
        y.part[p] = (Part)_mm512_cvtph_ps(half) * 256.f;
#else
        __m128i bits = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)at));
        __m128i magnitude = _mm_and_si128(bits, _mm_set1_epi16(0x7f));
        __m128i nan = _mm_srli_epi16(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f)), 1);
        __m128i sign = _mm_slli_epi16(_mm_xor_si128(bits, magnitude), 8);
        __m128i half = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(magnitude, 7), nan), sign);
        y.part[p] = (Part)_mm256_cvtph_ps(half) * 256.f;
#endif
#else
        BytePart code;
        std::memcpy(&code, at, sizeof code);
        BitPart bits = __builtin_convertvector(code, BitPart), magnitude = bits & 0x7fu;
        BitPart normal = (magnitude << 20) + (120u << 23);
        BitPart small = (BitPart)(__builtin_convertvector((IntPart)magnitude, Part) * 0x1p-9f);
        BitPart is_small = (BitPart)(magnitude < 8u), is_nan = (BitPart)(magnitude == 127u);
        BitPart value = (is_small & small) | (~is_small & normal) | (is_nan & 0x7fffffffu);
        y.part[p] = (Part)(value | ((bits & 0x80u) << 24));
#endif
    }
    return y;
}

SAMOVAR_INLINE V from_i8_lanes(const void* from) {
    V y;
    SAMOVAR_EACH_PART {
#if defined(__AVX512F__)
        __m128i codes = _mm_loadu_si128((const __m128i*)from);
        y.part[p] = (Part)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
#elif defined(__AVX2__)
        __m128i codes = _mm_loadl_epi64((const __m128i*)((const char*)from + 8 * p));
        y.part[p] = (Part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
#else
        BytePart codes;
        std::memcpy(&codes, (const char*)from + p * sizeof codes, sizeof codes);
        IntPart value = (IntPart)(__builtin_convertvector(codes, BitPart) << 24) >> 24;
        y.part[p] = __builtin_convertvector(value, Part);
#endif
    }
    return y;
}

// Sixteen numbers of a row from the n-th on (codes of int8 rows, without their scale).
template <int FORMAT>
SAMOVAR_INLINE V read_lanes(const uint8_t* row, int n) {
    if constexpr (FORMAT == SAMOVAR_F32) return get(reinterpret_cast<const float*>(row) + n);
    else if constexpr (FORMAT == SAMOVAR_F16) return from_f16_lanes(row + 2 * n);
    else if constexpr (FORMAT == SAMOVAR_BF16) return from_bf16_lanes(row + 2 * n);
    else if constexpr (FORMAT == SAMOVAR_KV_FP8_E4M3) return from_fp8_lanes(row + n);
    else return from_i8_lanes(row + n);
}

// The last eight of a row whose head size is no multiple of 16, and zeros: nothing behind the row is read.
template <int FORMAT>
SAMOVAR_INLINE V read_last_eight(const uint8_t* row, int n) {
    constexpr int size = FORMAT == SAMOVAR_F32 ? 4 : FORMAT == SAMOVAR_F16 || FORMAT == SAMOVAR_BF16 ? 2 : 1;
    alignas(64) uint8_t copy[LANES * size] = {};
    std::memcpy(copy, row + n * size, 8 * size);
    return read_lanes<FORMAT>(copy, 0);
}

// The scale of an int8 row; 1 for other formats.
template <int FORMAT>
SAMOVAR_INLINE float read_scale(const uint8_t* row, int dim) {
    if constexpr (FORMAT != SAMOVAR_KV_I8) return 1.f;
    float scale;
    std::memcpy(&scale, row + dim, sizeof scale);
    return scale;
}

// A whole row as float32, scale included; `to` has room for a multiple of 16.
template <int FORMAT>
SAMOVAR_INLINE void read_row(const uint8_t* row, int dim, float* to) {
    const float scale = read_scale<FORMAT>(row, dim);
    int n = 0;
    for (; n + LANES <= dim; n += LANES) {
        V v = read_lanes<FORMAT>(row, n);
        if constexpr (FORMAT == SAMOVAR_KV_I8) v = v * scale;
        set(to + n, v);
    }
    if (n < dim) {
        V v = read_last_eight<FORMAT>(row, n);
        if constexpr (FORMAT == SAMOVAR_KV_I8) v = v * scale;
        set(to + n, v);
    }
}

// Sixteen bfloat16 from lanes: nearest, ties to even.
SAMOVAR_INLINE void put_bf16_lanes(void* to, V x) {
    SAMOVAR_EACH_PART {
        HalfPart half;
#if defined(__AVX512BF16__)
        half = (HalfPart)_mm512_cvtneps_pbh((__m512)x.part[p]);
#else
        BitPart bits = (BitPart)x.part[p], rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        BitPart is_nan = (BitPart)(x.part[p] != x.part[p]);
        half = __builtin_convertvector((is_nan & ((bits >> 16) | 64u)) | (~is_nan & rounded), HalfPart);
#endif
        std::memcpy((char*)to + p * sizeof half, &half, sizeof half);
    }
}

SAMOVAR_INLINE uint16_t to_f16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        // Below the smallest normal number: adding 0.5 leaves multiples of 2^-24 in the mantissa, rounded.
        const float shifted = std::fabs(x) + 0.5f;
        std::memcpy(&bits, &shifted, sizeof bits);
        return uint16_t(sign | (bits - 0x3f000000u));
    }
    return uint16_t(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13));
}

SAMOVAR_INLINE void put_f16_lanes(void* to, V x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x.part[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    SAMOVAR_EACH_PART _mm_storeu_si128((__m128i*)to + p, _mm256_cvtps_ph((__m256)x.part[p], _MM_FROUND_TO_NEAREST_INT));
#else
    alignas(64) float values[LANES];
    set(values, x);
    for (int i = 0; i < LANES; i++) {
        const uint16_t half = to_f16(values[i]);
        std::memcpy((char*)to + 2 * i, &half, sizeof half);
    }
#endif
}

SAMOVAR_INLINE void put_fp8_lanes(void* to, V x) {
    SAMOVAR_EACH_PART {
        const BitPart bits = (BitPart)x.part[p], magnitude = bits & 0x7fffffffu, sign = (bits >> 24) & 0x80u;
        // Below 2^-6: adding 2^14 leaves multiples of 2^-9 in the mantissa, rounded.
        const BitPart small = (BitPart)((Part)magnitude + 16384.f) - 0x46800000u;
        const BitPart normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
        const BitPart is_small = (BitPart)(magnitude < 0x3c800000u);
        const BitPart is_out = (BitPart)(magnitude > 0x43e00000u), is_nan = (BitPart)(magnitude > 0x7f800000u);
        const BitPart code = (is_small & small) | (~is_small & ((is_out & (0x7eu | (is_nan & 1u))) | (~is_out & normal)));
        const BytePart bytes = __builtin_convertvector(code | sign, BytePart);
        std::memcpy((char*)to + p * sizeof bytes, &bytes, sizeof bytes);
    }
}

inline void write_i8_row(const float* x, int dim, uint8_t* to) {
    float amax = 0;
    bool is_nan = false;
    for (int n = 0; n < dim; n++) {
        is_nan |= x[n] != x[n];
        amax = std::fabs(x[n]) > amax ? std::fabs(x[n]) : amax;
    }
    const float scale = is_nan ? NAN : amax / 127.f, inverse = amax > 0 && amax < INFINITY && !is_nan ? 127.f / amax : 0.f;
    for (int n = 0; n < dim; n++) to[n] = uint8_t(int8_t(x[n] * inverse + 12582912.f - 12582912.f));
    std::memcpy(to + dim, &scale, sizeof scale);
}

template <int FORMAT>
SAMOVAR_INLINE void put_lanes(void* to, V x) {
    if constexpr (FORMAT == SAMOVAR_F32) set(static_cast<float*>(to), x);
    else if constexpr (FORMAT == SAMOVAR_F16) put_f16_lanes(to, x);
    else if constexpr (FORMAT == SAMOVAR_BF16) put_bf16_lanes(to, x);
    else put_fp8_lanes(to, x);
}

template <int FORMAT>
SAMOVAR_INLINE void write_row_as(const float* x, int dim, uint8_t* to) {
    constexpr int size = FORMAT == SAMOVAR_F32 ? 4 : FORMAT == SAMOVAR_F16 || FORMAT == SAMOVAR_BF16 ? 2 : 1;
    int n = 0;
    for (; n + LANES <= dim; n += LANES) put_lanes<FORMAT>(to + n * size, get(x + n));
    if (n < dim) {
        alignas(64) uint8_t last[LANES * size];
        put_lanes<FORMAT>(last, get(x + n, 8));
        std::memcpy(to + n * size, last, 8 * size);
    }
}

// One head of one token; `dim` a multiple of 8.
inline void write_row(int format, const float* x, int dim, uint8_t* to) {
    switch (format) {
        case SAMOVAR_F32: return write_row_as<SAMOVAR_F32>(x, dim, to);
        case SAMOVAR_F16: return write_row_as<SAMOVAR_F16>(x, dim, to);
        case SAMOVAR_BF16: return write_row_as<SAMOVAR_BF16>(x, dim, to);
        case SAMOVAR_KV_FP8_E4M3: return write_row_as<SAMOVAR_KV_FP8_E4M3>(x, dim, to);
        default: return write_i8_row(x, dim, to);
    }
}

}  // namespace samovar::SAMOVAR_ISA
