// Packed panels back to bfloat16, as tiles of 32 columns x 16 rows for AMX: [16 pairs of columns][16 rows][2].
//
// A code becomes a float without a conversion: put into the upper bits of the mantissa of 1 it is 1 + code / 2^n, and one
// multiply-add takes it to scale * code + bias. Two columns are then rounded and woven into one vector. bfloat16 is rounded to
// the nearest, halves away from zero (one addition), not to even.
#pragma once

#include "codes.h"
#include "plain.h"

#if defined(__AMX_TILE__)

namespace samovar::SAMOVAR_ISA {

// What a group's codes are multiplied with and what is added, of columns 0 to 15 and 16 to 31.
struct Affine {
    F32 scale[2], bias[2];
};

// Sixteen values of two neighbouring columns, rounded.
SAMOVAR_INLINE void store_columns(uint8_t* to, F32 even, F32 odd) {
    const U32 low = ((U32)even + 0x8000u) >> 16, high = (U32)odd + 0x8000u;
    _mm512_storeu_si512(to, _mm512_mask_blend_epi16(0xaaaaaaaau, (__m512i)low, (__m512i)high));
}

// 1 + code / 256 of the codes in byte I of every lane; or 1 + code / 128, for codes below 128, which needs a shift less.
template <int I, bool IS_BYTE>
SAMOVAR_INLINE F32 near_one(CodePart quad) {
    constexpr int shift = (IS_BYTE ? 15 : 16) - 8 * I;
    __m512i x = (__m512i)quad;
    if constexpr (shift > 0) x = _mm512_slli_epi32(x, shift);
    if constexpr (shift < 0) x = _mm512_srli_epi32(x, -shift);
    const __m512i mask = _mm512_set1_epi32(IS_BYTE ? 0x7f8000 : 0x7f0000), one = _mm512_set1_epi32(0x3f800000);
    return (F32)_mm512_ternarylogic_epi32(x, mask, one, 0xea);  // (x & mask) | one
}

template <int FORMAT>
SAMOVAR_INLINE Affine read_affine(const uint8_t* sub, const uint8_t* half) {
    constexpr Layout layout = layout_of(FORMAT);
    Affine affine;
    const F32 d = from_f16(half), second = layout.half == 2 ? from_f16(half + 32) : F32{};
    if constexpr (FORMAT == SAMOVAR_Q2_K) {
        for (int i = 0; i < 2; i++) {
            const BytePart both = load<BytePart>(sub + 16 * i);
            affine.scale[i] = d * from_bytes(both & 15);
            affine.bias[i] = -(second * from_bytes(both >> 4));
        }
    } else if constexpr (layout.sub == 2 && layout.half == 2) {
        affine.scale[0] = d * from_bytes(load<BytePart>(sub));
        affine.bias[0] = -(second * from_bytes(load<BytePart>(sub + 16)));
    } else {
        affine.scale[0] = layout.sub ? d * from_signed(load<BytePart>(sub)) : d;
        affine.bias[0] = layout.half == 2 ? second : F32{};
        if constexpr (layout.sub == 2) {
            affine.scale[1] = d * from_signed(load<BytePart>(sub + 16));
            affine.bias[1] = F32{};
        }
    }
    constexpr bool in_halves = FORMAT == SAMOVAR_Q2_K || FORMAT == SAMOVAR_Q3_K || FORMAT == SAMOVAR_Q6_K;
    constexpr float steps = value_bits(FORMAT) == 8 ? 256 : 128;
    for (int i = 0; i < (in_halves ? 2 : 1); i++) {
        affine.bias[i] = fma(affine.scale[i], splat(-(steps + code_offset(FORMAT))), affine.bias[i]);
        affine.scale[i] *= steps;
    }
    if constexpr (!in_halves) {
        affine.scale[1] = affine.scale[0];
        affine.bias[1] = affine.bias[0];
    }
    return affine;
}

// Groups [first, end) of a panel: one tile each.
template <int FORMAT>
void dequantize(const uint8_t* panel, const Planes& planes, int first, int end, uint8_t* tiles) {
    constexpr Layout layout = layout_of(FORMAT);
    constexpr bool is_byte = value_bits(FORMAT) == 8;
    for (int g = first; g < end; g++, tiles += 1024) {
        const uint8_t *low = panel + g * (64 * layout.low_bits), *high = panel + planes.high + g * (64 * layout.high_bits);
        prefetch(low + PREFETCH);
        if constexpr (layout.low_bits > 1) prefetch(low + PREFETCH + 64);
        if constexpr (layout.low_bits > 2) prefetch(low + PREFETCH + 128), prefetch(low + PREFETCH + 192);
        if constexpr (layout.high_bits > 0) prefetch(high + PREFETCH);
        const uint8_t* half = panel + planes.half + g / (layout.half_columns / SAMOVAR_GROUP) * (32 * layout.half);
        const Affine affine = read_affine<FORMAT>(panel + planes.sub + g * (16 * layout.sub), half);
        CodePart quads[8];
        take_codes<FORMAT>(low, high, quads);
        for (int j = 0; j < 8; j++) {
            const F32 scale = affine.scale[j / 4], bias = affine.bias[j / 4];
            store_columns(tiles + 128 * j, fma(near_one<0, is_byte>(quads[j]), scale, bias),
                          fma(near_one<1, is_byte>(quads[j]), scale, bias));
            store_columns(tiles + 128 * j + 64, fma(near_one<2, is_byte>(quads[j]), scale, bias),
                          fma(near_one<3, is_byte>(quads[j]), scale, bias));
        }
    }
}

inline void round_f16(const uint8_t* panel, const Planes&, int first, int end, uint8_t* tiles) {
    for (const uint8_t* from = panel + first * 1024; from < panel + end * 1024; from += 64, tiles += 64) {
        prefetch(from + PREFETCH);
        const Columns w = load_columns<SAMOVAR_F16>(from);
        store_columns(tiles, (F32)w.even.part[0], (F32)w.odd.part[0]);
    }
}

typedef void (*Dequantizer)(const uint8_t* panel, const Planes& planes, int first, int end, uint8_t* tiles);

// Null for formats whose panels are tiles already.
inline Dequantizer choose_dequantizer(int format) {
    switch (format) {
        case SAMOVAR_F16: return round_f16;
        case SAMOVAR_Q4_0: return dequantize<SAMOVAR_Q4_0>;
        case SAMOVAR_Q4_1: return dequantize<SAMOVAR_Q4_1>;
        case SAMOVAR_Q5_0: return dequantize<SAMOVAR_Q5_0>;
        case SAMOVAR_Q5_1: return dequantize<SAMOVAR_Q5_1>;
        case SAMOVAR_Q8_0: return dequantize<SAMOVAR_Q8_0>;
        case SAMOVAR_Q2_K: return dequantize<SAMOVAR_Q2_K>;
        case SAMOVAR_Q3_K: return dequantize<SAMOVAR_Q3_K>;
        case SAMOVAR_Q4_K: return dequantize<SAMOVAR_Q4_K>;
        case SAMOVAR_Q5_K: return dequantize<SAMOVAR_Q5_K>;
        case SAMOVAR_Q6_K: return dequantize<SAMOVAR_Q6_K>;
        case SAMOVAR_IQ4_NL: return dequantize<SAMOVAR_IQ4_NL>;
        case SAMOVAR_IQ4_XS: return dequantize<SAMOVAR_IQ4_XS>;
        default: return nullptr;
    }
}

}  // namespace samovar::SAMOVAR_ISA

#endif
