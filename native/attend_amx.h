// The two products of blocked attention on AMX tiles of bfloat16.
//
// Scores: A = keys as the cache has them, B = queries in pairs of numbers [head_dim / 2][queries][2]. Results: A = values
// transposed, B = weights in pairs of keys [keys / 2][queries][2], so that neither queries nor weights are shuffled across
// lanes. int8 caches: codes are exact in bfloat16; the scales are multiplied into scores and weights.
#pragma once

#include "attend_tiles.h"

#if defined(__AMX_BF16__)

namespace samovar::SAMOVAR_ISA {

// Sixteen numbers of a cache row as bfloat16.
template <int FORMAT>
SAMOVAR_INLINE __m256i read_bf16(const uint8_t* row, int n, int dim) {
    if constexpr (FORMAT == SAMOVAR_BF16) {
        if (n + LANES <= dim) return _mm256_loadu_si256((const __m256i*)(row + 2 * n));
        return _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(row + 2 * n)));
    } else {
        const V v = n + LANES <= dim ? read_lanes<FORMAT>(row, n) : read_last_eight<FORMAT>(row, n);
        return (__m256i)_mm512_cvtneps_pbh((__m512)v.part[0]);
    }
}

// 2^x with a relative error of 1e-4, a twentieth of what rounding the weight to bfloat16 costs.
SAMOVAR_INLINE __m512 coarse_exp2(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(x, n);
    __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(0.0550089f), f, _mm512_set1_ps(0.2422110f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.6932829f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.f));
    return _mm512_scalef_ps(y, n);
}

// c [rows / 16 tiles][PAIR] (+)= a b: `a` rows of `a_bytes`, `b` [depth / 2][PAIR][2]; one or two tiles of rows.
template <int TILES, bool ADDS>
SAMOVAR_INLINE void multiply_with_tiles(const uint16_t* a, size_t a_bytes, const uint16_t* b, int depth, float* c) {
    constexpr int C_BYTES = PAIR * 4, B_BYTES = PAIR * 4;
    const uint8_t* a_rows = reinterpret_cast<const uint8_t*>(a);
    asm volatile("" ::: "memory");  // GCC 12 does not know that tile loads read memory
    if constexpr (ADDS) {
        _tile_loadd(0, c, C_BYTES);
        _tile_loadd(1, c + LANES, C_BYTES);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    if constexpr (ADDS && TILES == 2) {
        _tile_loadd(2, c + 16 * PAIR, C_BYTES);
        _tile_loadd(3, c + 16 * PAIR + LANES, C_BYTES);
    } else if constexpr (TILES == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < depth; k += 32) {
        _tile_loadd(6, b + k * PAIR, B_BYTES);
        _tile_loadd(7, b + k * PAIR + PAIR, B_BYTES);
        _tile_loadd(4, a_rows + 2 * k, a_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (TILES == 2) {
            _tile_loadd(5, a_rows + 2 * k + 16 * a_bytes, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, C_BYTES);
    _tile_stored(1, c + LANES, C_BYTES);
    if constexpr (TILES == 2) {
        _tile_stored(2, c + 16 * PAIR, C_BYTES);
        _tile_stored(3, c + 16 * PAIR + LANES, C_BYTES);
    }
}

template <bool ADDS>
SAMOVAR_INLINE void multiply_with_tiles(const uint16_t* a, size_t a_bytes, const uint16_t* b, int rows, int depth, float* c) {
    const size_t step = a_bytes / 2;
    int r = 0;
    for (; r + 32 <= rows; r += 32) multiply_with_tiles<2, ADDS>(a + r * step, a_bytes, b, depth, c + r * PAIR);
    if (r < rows) {
        if (rows - r > 16) multiply_with_tiles<2, ADDS>(a + r * step, a_bytes, b, depth, c + r * PAIR);
        else multiply_with_tiles<1, ADDS>(a + r * step, a_bytes, b, depth, c + r * PAIR);
    }
}

struct AmxKernel {
    static constexpr bool HAS_SCALES = true;

    static void pack_queries(const Shape& shape, const Flats& flats, int pair, float* to) {
        __m512i rows[LANES];
        for (int half = 0; half < 2; half++)
            for (int n = 0; n < shape.dim; n += 32) {
                const int low = std::min(LANES, shape.dim - n), high = std::max(0, std::min(LANES, shape.dim - n - LANES));
                for (int i = 0; i < LANES; i++) {
                    const float* q = flats.query(pair * PAIR + half * LANES + i) + n;
                    const V a = get(q, low) * shape.query_factor();
                    const V b = (high > 0 ? get(q + LANES, high) : fill(0.f)) * shape.query_factor();
                    rows[i] = (__m512i)_mm512_cvtne2ps_pbh((__m512)b.part[0], (__m512)a.part[0]);
                }
                transpose(rows);
                for (int i = 0; i < LANES; i++) _mm512_storeu_si512(to + (n / 2 + i) * PAIR + half * LANES, rows[i]);
            }
    }

    template <int FORMAT>
    static void pack_block(const Shape& shape, const uint8_t* keys, const uint8_t* values, int count, const TileState& state) {
        const int wide = int(TileState::wide_dim(shape));
        uint16_t* to = reinterpret_cast<uint16_t*>(state.keys);
        for (int k = 0; k < round_up(count, LANES); k++, to += wide)
            for (int n = 0; n < wide; n += LANES) {
                const bool is_there = k < count && n < shape.dim;
                const __m256i v = is_there ? read_bf16<FORMAT>(keys + state.offsets[k], n, shape.dim) : _mm256_setzero_si256();
                _mm256_storeu_si256((__m256i*)(to + n), v);
            }
        pack_values<FORMAT>(shape, values, count, state);
        if constexpr (FORMAT == SAMOVAR_KV_I8)
            for (int k = 0; k < count; k++) {
                state.key_scales[k] = read_scale<FORMAT>(keys + state.offsets[k], shape.dim);
                state.value_scales[k] = read_scale<FORMAT>(values + state.offsets[k], shape.dim);
            }
    }

    // Values [head_dim][KEY_BLOCK] of bfloat16: two keys are joined in 32 bits, and those transposed.
    template <int FORMAT>
    static void pack_values(const Shape& shape, const uint8_t* values, int count, const TileState& state) {
        uint16_t* to = reinterpret_cast<uint16_t*>(state.values);
        for (int k = 0; k < count; k += 32)
            for (int n = 0; n < shape.padded_dim; n += LANES) {
                __m512i rows[LANES];
                for (int i = 0; i < LANES; i++) {
                    const int key = k + 2 * i;
                    const __m256i even = key < count ? read_bf16<FORMAT>(values + state.offsets[key], n, shape.dim) : _mm256_setzero_si256();
                    const __m256i odd =
                        key + 1 < count ? read_bf16<FORMAT>(values + state.offsets[key + 1], n, shape.dim) : _mm256_setzero_si256();
                    rows[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
                }
                transpose(rows);
                for (int i = 0; i < LANES; i++) _mm512_storeu_si512(to + (n + i) * KEY_BLOCK + k, rows[i]);
            }
    }

    static void score(const Shape& shape, const TileState& state, const float* queries, int count) {
        const int wide = int(TileState::wide_dim(shape));
        multiply_with_tiles<false>(reinterpret_cast<const uint16_t*>(state.keys), size_t(2 * wide), reinterpret_cast<const uint16_t*>(queries),
                              count, wide, state.scores);
    }

    // Weights of half a pair, two keys to a 32-bit lane, up to the end of 32 keys; returns their sum before rounding.
    static V weigh_half(const TileState& state, int half, int count, V maxima, const float* scales) {
        const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                                    5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        const float* scores = state.scores + half * LANES;
        float* to = state.weights + half * LANES;
        const __m512 most_yet = (__m512)maxima.part[0];
        __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int k = 0; k < count; k += 2) {
            __m512 even = coarse_exp2(_mm512_sub_ps(_mm512_load_ps(scores + k * PAIR), most_yet)), odd = _mm512_setzero_ps();
            if (k + 1 < count) odd = coarse_exp2(_mm512_sub_ps(_mm512_load_ps(scores + (k + 1) * PAIR), most_yet));
            total[0] = _mm512_add_ps(total[0], even), total[1] = _mm512_add_ps(total[1], odd);
            if (scales != nullptr) even = _mm512_mul_ps(even, _mm512_set1_ps(scales[k]));
            if (scales != nullptr && k + 1 < count) odd = _mm512_mul_ps(odd, _mm512_set1_ps(scales[k + 1]));
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
            _mm512_store_si512(to + k / 2 * PAIR, _mm512_permutexvar_epi16(interleave, both));
        }
        for (int k = round_up(count, 2); k < round_up(count, 32); k += 2) _mm512_store_si512(to + k / 2 * PAIR, _mm512_setzero_si512());
        return {(Part)_mm512_add_ps(total[0], total[1])};
    }

    static void add_values(const Shape& shape, const TileState& state, int count, float* totals) {
        multiply_with_tiles<true>(reinterpret_cast<const uint16_t*>(state.values), 2 * KEY_BLOCK,
                             reinterpret_cast<const uint16_t*>(state.weights), shape.padded_dim, count, totals);
    }
};

}  // namespace samovar::SAMOVAR_ISA

#endif
