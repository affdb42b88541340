// A row of activations as int8: symmetric, one scale for 32 of them, rounded to the nearest, ties to even; and its norm.
//
// Each group of 32 is one line of 64 bytes, so that every operand of its dot products is at a fixed distance from one
// pointer. It carries the sums that formats with an offset or a minimum need. A group that holds an infinity or a NaN
// gets the scale NaN, so that what is wrong in the input is seen in the output.
#pragma once

#include <initializer_list>

#include "abi.h"
#include "lanes.h"

namespace samovar::SAMOVAR_ISA {

struct alignas(64) Line {
    int8_t codes[SAMOVAR_GROUP];
    float scale;
    float sum;                   // scale * (sum of codes)
    int32_t minus128;            // -128 * (sum of codes): takes off an offset of 128, or shifted right one of 64, 32 ...
    int32_t minus128_half[2];    // the same of columns 0 to 15 and 16 to 31
    float sum_half[2];
    int32_t unused;
};
static_assert(sizeof(Line) == 64);

SAMOVAR_INLINE int num_lines(int cols) { return (cols + SAMOVAR_GROUP - 1) / SAMOVAR_GROUP; }

// The bits of the largest magnitude of 32 numbers; a NaN is larger than any.
SAMOVAR_INLINE uint32_t largest_bits(V low, V high) {
    IntPart most = {};
    SAMOVAR_EACH_PART for (V x : {low, high}) {
        const IntPart bits = (IntPart)x.part[p] & 0x7fffffff;
#if defined(__AVX512F__)
        most = (IntPart)_mm512_max_epi32((__m512i)most, (__m512i)bits);
#elif defined(__AVX2__)
        most = (IntPart)_mm256_max_epi32((__m256i)most, (__m256i)bits);
#else
        most = most > bits ? most : bits;
#endif
    }
#if defined(__AVX512F__)
    return uint32_t(_mm512_reduce_max_epi32((__m512i)most));
#elif defined(__AVX2__)
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)most), _mm256_extracti128_si256((__m256i)most, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return uint32_t(_mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1))));
#else
    int32_t largest = most[0];
    for (int i = 1; i < PART_LANES; i++) largest = most[i] > largest ? most[i] : largest;
    return uint32_t(largest);
#endif
}

// 16 numbers of at most 127, rounded, as bytes.
SAMOVAR_INLINE void store_codes(int8_t* to, V x) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)x.part[0])));
#elif defined(__SSE2__) && !defined(__AVX__)
    __m128i parts[PARTS];
    SAMOVAR_EACH_PART parts[p] = _mm_cvtps_epi32((__m128)x.part[p]);
    const __m128i words[2] = {_mm_packs_epi32(parts[0], parts[1]), _mm_packs_epi32(parts[2], parts[3])};
    _mm_storeu_si128((__m128i*)to, _mm_packs_epi16(words[0], words[1]));
#else
    SAMOVAR_EACH_PART for (int i = 0; i < PART_LANES; i++) to[p * PART_LANES + i] = int8_t(std::nearbyint(x.part[p][i]));
#endif
}

struct HalfSums {
    int32_t first, second;
};

// 32 such numbers at a time, and the sums of each 16.
SAMOVAR_INLINE HalfSums store_group(int8_t* to, V low, V high) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    const __m128i first = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)low.part[0]));
    const __m128i second = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)high.part[0]));
    const __m256i codes = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
#else
    const __m256i a = _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)low.part[0]), _mm256_cvtps_epi32((__m256)low.part[1]));
    const __m256i b = _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)high.part[0]), _mm256_cvtps_epi32((__m256)high.part[1]));
    // Packing works within 128 bits: the fours now stand as 0 2 4 6 1 3 5 7.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i codes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order);
#endif
    _mm256_store_si256((__m256i*)to, codes);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
    __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    fours = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4e));
    fours = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0xb1));
    return {_mm256_cvtsi256_si32(fours), _mm_cvtsi128_si32(_mm256_extracti128_si256(fours, 1))};
#else
    const V halves[2] = {low, high};
    int32_t sums[2] = {0, 0};
    for (int half = 0; half < 2; half++) {
        store_codes(to + LANES * half, halves[half]);
        for (int i = 0; i < LANES; i++) sums[half] += to[LANES * half + i];
    }
    return {sums[0], sums[1]};
#endif
}

SAMOVAR_INLINE void quantize_group(V low, V high, Line* line) {
    const uint32_t bits = largest_bits(low, high);
    float most;
    std::memcpy(&most, &bits, 4);
    // Below 2^-120 the inverse would overflow; such a group is nothing beside any other.
    if (bits >= 0x7f800000u || most < 0x1p-120f) {
        *line = {};
        if (bits >= 0x7f800000u) line->scale = line->sum = line->sum_half[0] = line->sum_half[1] = NAN;
        return;
    }
    const float scale = most / 127.f, inverse = 127.f / most;
    const HalfSums sums = store_group(line->codes, low * inverse, high * inverse);
    line->scale = scale;
    line->sum = scale * float(sums.first + sums.second);
    line->minus128 = -128 * (sums.first + sums.second);
    line->minus128_half[0] = -128 * sums.first;
    line->minus128_half[1] = -128 * sums.second;
    line->sum_half[0] = scale * float(sums.first);
    line->sum_half[1] = scale * float(sums.second);
}

SAMOVAR_INLINE V get_some(const float* from, int k, int cols) {
    if (k + LANES <= cols) return get(from + k);
    return k < cols ? get(from + k, cols - k) : fill(0);
}

// 1 / sqrt(mean of squares + epsilon).
SAMOVAR_INLINE float rms_scale(const float* x, int cols, float epsilon) {
    V totals[4] = {};
    int k = 0;
    for (; k + 64 <= cols; k += 64)
        for (int i = 0; i < 4; i++) {
            const V value = get(x + k + 16 * i);
            totals[i] = fma(value, value, totals[i]);
        }
    for (; k < cols; k += 16) {
        const V value = get_some(x, k, cols);
        totals[0] = fma(value, value, totals[0]);
    }
    return 1.f / std::sqrt(sum((totals[0] + totals[1]) + (totals[2] + totals[3])) / float(cols) + epsilon);
}

// y = x * scale * w. y may be x.
inline void norm_row(const float* x, const float* w, float scale, int cols, float* y) {
    for (int k = 0; k < cols; k += LANES) {
        const V value = get_some(x, k, cols) * scale * get_some(w, k, cols);
        if (k + LANES <= cols) set(y + k, value);
        else set(y + k, value, cols - k);
    }
}

// Lines of x, or of x * scale * w if `w` is given; columns behind the last are zeros.
inline void quantize_row(const float* x, const float* w, float scale, int cols, Line* lines) {
    auto at = [=](int k) { return w ? get_some(x, k, cols) * scale * get_some(w, k, cols) : get_some(x, k, cols); };
    for (int g = 0; g < num_lines(cols); g++) quantize_group(at(SAMOVAR_GROUP * g), at(SAMOVAR_GROUP * g + LANES), lines + g);
}

}  // namespace samovar::SAMOVAR_ISA
