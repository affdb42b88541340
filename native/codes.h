// Codes of a group taken out of their planes (layout.h), and dot products of four bytes a lane, at the machine's own width.
//
// A panel is worked through in parts of PART_LANES rows. Where four-byte dot products are missing, sums of pairs in 16 bits
// serve: they hold for codes below 128, and for signed bytes once the sign has moved to the activations.
#pragma once

#include "lanes.h"
#include "layout.h"
#include "quantize.h"

namespace samovar::SAMOVAR_ISA {

constexpr int PART_BYTES = 4 * PART_LANES;
typedef uint8_t CodePart __attribute__((vector_size(PART_BYTES), aligned(PART_BYTES)));

#if !defined(__AVX512VNNI__) && defined(__AVX2__)
constexpr bool SIGNED_BYTES = true;   // dot products of 8-bit codes come without their offset of 128
#else
constexpr bool SIGNED_BYTES = false;
#endif

constexpr int code_bits(int format) { return layout_of(format).low_bits + layout_of(format).high_bits; }
constexpr bool is_iq4(int format) { return format == SAMOVAR_IQ4_NL || format == SAMOVAR_IQ4_XS; }

// Bits of the numbers in the dot products.
constexpr int value_bits(int format) { return is_iq4(format) ? 8 : code_bits(format); }

// What codes stand for is this much less (a power of two; 0: no offset).
constexpr int code_offset(int format) {
    switch (format) {
        case SAMOVAR_Q4_1:
        case SAMOVAR_Q5_1:
        case SAMOVAR_Q2_K:
        case SAMOVAR_Q4_K:
        case SAMOVAR_Q5_K: return 0;
        default: return 1 << (value_bits(format) - 1);
    }
}

// ---------------------------------------------------------------------------------------------- codes

SAMOVAR_INLINE CodePart right(CodePart x, int bits) { return (CodePart)((BitPart)x >> bits); }
SAMOVAR_INLINE CodePart left(CodePart x, int bits) { return (CodePart)((BitPart)x << bits); }

// The values of IQ4_NL and IQ4_XS plus 128, by their places 0 to 15.
struct Iq4Codes {
    alignas(16) uint8_t codes[16];
    constexpr Iq4Codes() : codes() {
        for (int i = 0; i < 16; i++) codes[i] = uint8_t(IQ4_VALUES[i] + 128);
    }
};
constexpr Iq4Codes IQ4_CODES;

SAMOVAR_INLINE CodePart look_up(CodePart places) {
#if defined(__AVX512BW__)
    const __m512i values = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)IQ4_CODES.codes));
    return (CodePart)_mm512_shuffle_epi8(values, (__m512i)places);
#elif defined(__AVX2__)
    const __m256i values = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)IQ4_CODES.codes));
    return (CodePart)_mm256_shuffle_epi8(values, (__m256i)places);
#elif defined(__aarch64__)
    return (CodePart)vqtbl1q_u8(vld1q_u8(IQ4_CODES.codes), (uint8x16_t)places);
#else
    uint8_t bytes[PART_BYTES];  // an element of a vector costs more than a byte of memory
    store(bytes, places);
    for (uint8_t& byte : bytes) byte = IQ4_CODES.codes[byte];
    return load<CodePart>(bytes);
#endif
}

// The eight quads of a group, one code to a byte, of the rows whose part of every 64 bytes `low` and `high` point at.
template <int FORMAT>
SAMOVAR_INLINE void take_codes(const uint8_t* low, const uint8_t* high, CodePart (&quads)[8]) {
    constexpr Layout layout = layout_of(FORMAT);
    if constexpr (layout.low_bits == 8)
        for (int j = 0; j < 8; j++) quads[j] = load<CodePart>(low + 64 * j);
    if constexpr (layout.low_bits == 4)
        for (int v = 0; v < 4; v++) {
            const CodePart pair = load<CodePart>(low + 64 * v);
            quads[v] = pair & 15;
            quads[v + 4] = right(pair, 4) & 15;
            if constexpr (is_iq4(FORMAT))
                for (int j = v; j < 8; j += 4) quads[j] = look_up(quads[j]);
        }
    if constexpr (layout.low_bits == 2)
        for (int u = 0; u < 2; u++) {
            const CodePart fields = load<CodePart>(low + 64 * u);
            for (int f = 0; f < 4; f++) quads[2 * f + u] = right(fields, 2 * f) & 3;
        }
    if constexpr (layout.high_bits == 2)
        for (int u = 0; u < 2; u++) {
            const CodePart fields = load<CodePart>(high + 64 * u);
            for (int f = 0; f < 4; f++)
                quads[2 * f + u] |= (f < 2 ? left(fields, 4 - 2 * f) : right(fields, 2 * f - 4)) & 48;
        }
    if constexpr (layout.high_bits == 1) {
        const CodePart bits = load<CodePart>(high);
        constexpr int at = layout.low_bits;
        for (int j = 0; j < 8; j++) quads[j] |= (j < at ? left(bits, at - j) : right(bits, j - at)) & uint8_t(1 << at);
    }
}

// ---------------------------------------------------------------------------------------------- dot products

// The same number in every lane.
SAMOVAR_INLINE IntPart fill_int(int32_t x) { return x - IntPart{}; }

// The same four activations in every lane.
SAMOVAR_INLINE IntPart four(const int8_t* from) {
    int32_t bytes;
    std::memcpy(&bytes, from, 4);
    return fill_int(bytes);
}

#if defined(__AVX512VNNI__)

template <int BITS>
SAMOVAR_INLINE IntPart dot_half(IntPart total, const CodePart* quads, const int8_t* values) {
    for (int j = 0; j < 4; j++)
        total = (IntPart)_mm512_dpbusd_epi32((__m512i)total, (__m512i)quads[j], (__m512i)four(values + 4 * j));
    return total;
}

#elif defined(__AVX2__)

#if defined(__AVX512BW__)
typedef __m512i Wide;
SAMOVAR_INLINE Wide pairs_of(Wide codes, Wide values) { return _mm512_maddubs_epi16(codes, values); }
SAMOVAR_INLINE Wide plus16(Wide a, Wide b) { return _mm512_add_epi16(a, b); }
SAMOVAR_INLINE Wide plus32(Wide a, Wide pairs) {
    return _mm512_add_epi32(a, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
SAMOVAR_INLINE Wide signed_pairs(Wide codes, Wide values) {
    const Wide weights = _mm512_xor_si512(codes, _mm512_set1_epi8(-128));
    const Wide turned = _mm512_mask_sub_epi8(values, _mm512_movepi8_mask(weights), _mm512_setzero_si512(), values);
    return _mm512_maddubs_epi16(_mm512_abs_epi8(weights), turned);
}
#else
typedef __m256i Wide;
SAMOVAR_INLINE Wide pairs_of(Wide codes, Wide values) { return _mm256_maddubs_epi16(codes, values); }
SAMOVAR_INLINE Wide plus16(Wide a, Wide b) { return _mm256_add_epi16(a, b); }
SAMOVAR_INLINE Wide plus32(Wide a, Wide pairs) {
    return _mm256_add_epi32(a, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
SAMOVAR_INLINE Wide signed_pairs(Wide codes, Wide values) {
    const Wide weights = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(values, weights));
}
#endif

template <int BITS>
SAMOVAR_INLINE IntPart dot_half(IntPart total, const CodePart* quads, const int8_t* values) {
    constexpr int together = BITS < 6 ? 4 : BITS < 8 ? 2 : 1;  // as many sums of pairs stay below 2^15
    Wide sums = (Wide)total;
    for (int j = 0; j < 4; j += together) {
        auto pairs = [&](int i) {
            const Wide codes = (Wide)quads[i], four_values = (Wide)four(values + 4 * i);
            return BITS == 8 ? signed_pairs(codes, four_values) : pairs_of(codes, four_values);
        };
        Wide all = pairs(j);
        for (int i = j + 1; i < j + together; i++) all = plus16(all, pairs(i));
        sums = plus32(sums, all);
    }
    return (IntPart)sums;
}

#elif defined(__SSE2__)

// Even and odd bytes apart, as 16-bit numbers: the first sets have no product of unsigned by signed bytes.
template <int BITS>
SAMOVAR_INLINE IntPart dot_half(IntPart total, const CodePart* quads, const int8_t* values) {
    __m128i sums = (__m128i)total;
    for (int j = 0; j < 4; j++) {
        const __m128i codes = (__m128i)quads[j], v = (__m128i)four(values + 4 * j);
        const __m128i even = _mm_madd_epi16(_mm_and_si128(codes, _mm_set1_epi16(255)), _mm_srai_epi16(_mm_slli_epi16(v, 8), 8));
        const __m128i odd = _mm_madd_epi16(_mm_srli_epi16(codes, 8), _mm_srai_epi16(v, 8));
        sums = _mm_add_epi32(sums, _mm_add_epi32(even, odd));
    }
    return (IntPart)sums;
}

#elif defined(__aarch64__)

template <int BITS>
SAMOVAR_INLINE IntPart dot_half(IntPart total, const CodePart* quads, const int8_t* values) {
    int32x4_t sums = (int32x4_t)total;
    for (int j = 0; j < 4; j++) {
        const uint8x16_t codes = (uint8x16_t)quads[j];
        const int16x8_t v = vmovl_s8(vget_low_s8((int8x16_t)four(values + 4 * j)));
        const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(codes)));
        const int16x8_t high = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(codes)));
        const int32x4_t a = vmull_s16(vget_low_s16(low), vget_low_s16(v)), b = vmull_s16(vget_high_s16(low), vget_low_s16(v));
        const int32x4_t c = vmull_s16(vget_low_s16(high), vget_low_s16(v)), d = vmull_s16(vget_high_s16(high), vget_low_s16(v));
        sums = vaddq_s32(sums, vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d)));
    }
    return (IntPart)sums;
}

#else

template <int BITS>
SAMOVAR_INLINE IntPart dot_half(IntPart total, const CodePart* quads, const int8_t* values) {
    for (int j = 0; j < 4; j++)
        for (int n = 0; n < PART_LANES; n++)
            for (int i = 0; i < 4; i++) total[n] += int(quads[j][4 * n + i]) * values[4 * j + i];
    return total;
}

#endif

// What totals of codes with this offset begin with: minus offset times the sum of the activations.
template <int OFFSET>
SAMOVAR_INLINE IntPart start(int32_t minus128) {
    if constexpr (OFFSET == 0 || (OFFSET == 128 && SIGNED_BYTES)) return IntPart{};
    constexpr int shift = OFFSET == 4 ? 5 : OFFSET == 8 ? 4 : OFFSET == 16 ? 3 : OFFSET == 32 ? 2 : 0;
    return fill_int(minus128) >> shift;
}

// ---------------------------------------------------------------------------------------------- scales

SAMOVAR_INLINE Part floats(IntPart x) {
#if defined(__AVX512F__)
    return (Part)_mm512_cvtepi32_ps((__m512i)x);
#else
    return __builtin_convertvector(x, Part);
#endif
}

SAMOVAR_INLINE Part from_bytes(BytePart bytes) {
#if defined(__AVX512F__)
    return (Part)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
    return (Part)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes)));
#else
    uint8_t each[4];
    store(each, bytes);
    return Part{float(each[0]), float(each[1]), float(each[2]), float(each[3])};
#endif
}

// Of signed bytes.
SAMOVAR_INLINE Part from_signed(BytePart bytes) {
#if defined(__AVX512F__)
    return (Part)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#else
    return from_bytes(bytes ^ 128) - 128.f;
#endif
}

SAMOVAR_INLINE Part from_halves(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Part)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    return (Part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(__aarch64__)
    return (Part)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
#else
    // Shifted into float32 and multiplied by 2^112: right for denormals too; infinities and NaN keep all exponent bits.
#if defined(__SSE2__)
    const BitPart bits = (BitPart)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i*)from), _mm_setzero_si128());
#else
    const BitPart bits = __builtin_convertvector(load<HalfPart>(from), BitPart);
#endif
    const BitPart magnitude = (bits & 0x7fffu) << 13;
    const BitPart special = (BitPart)((IntPart)magnitude > ((0x7c00 << 13) - 1));
    const BitPart value = (BitPart)((Part)magnitude * 0x1p112f);
    return (Part)((special & (magnitude | 0x7f800000u)) | (~special & value) | ((bits & 0x8000u) << 16));
#endif
}

}  // namespace samovar::SAMOVAR_ISA
