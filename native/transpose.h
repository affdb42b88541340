// Sixteen rows of sixteen 32-bit numbers, transposed.
#pragma once

#include "lanes.h"

namespace samovar::SAMOVAR_ISA {

#if defined(__AVX512F__)

// In registers: pairs, then quads, then halves of the vectors change places.
SAMOVAR_INLINE void transpose(__m512i* rows) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        rows[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        rows[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        rows[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

SAMOVAR_INLINE void transpose(const float* from, size_t from_stride, float* to, size_t to_stride) {
    __m512i rows[16];
    for (int i = 0; i < 16; i++) rows[i] = _mm512_loadu_si512(from + i * from_stride);
    transpose(rows);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * to_stride, rows[i]);
}

#else

SAMOVAR_INLINE void transpose(const float* from, size_t from_stride, float* to, size_t to_stride) {
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) to[j * to_stride + i] = from[i * from_stride + j];
}

#endif

}  // namespace samovar::SAMOVAR_ISA
