// Attention of one query row with few heads per K/V head on AMX tiles: decode over bfloat16 and int8 caches.
//
// Scores: A = sixteen keys as the cache has them, B = the queries of a K/V head, whose columns are heads; so a score needs no
// sum over lanes. Results: A = weights, whose rows are heads, B = values woven together in twos (bfloat16) or fours (int8) of
// keys. A tile has room for sixteen queries and there are four at most: each is there twice, as its rounded self and as what
// that leaves out, which makes queries and weights exact to 16 bits. A piece of the keys is scored, then weighed, as a whole:
// while its keys are multiplied the memory is asked for its values, and then for the keys of the next piece.
#pragma once

#include "attend_few.h"
#include "quantize.h"
#include "tiles.h"

#if defined(__AMX_TILE__)

namespace samovar::SAMOVAR_ISA {

constexpr int TILED_HEADS = 4;                        // most query heads of a K/V head: rest of each is four columns behind
constexpr int PIECE_GROUPS = FEW_PIECE / TILE_ROWS;   // groups of sixteen keys
constexpr float REST = 254.f;                         // of int8 queries: the rest is in units of scale / REST

// Numbers of a row of tile bytes: of a head in a tile of scores, of keys in a tile of results.
constexpr int tile_numbers(int format) { return format == SAMOVAR_BF16 ? 32 : 64; }

inline bool has_few_tiles(const Shape& shape, int block_size) {
    const bool is_known = shape.format == SAMOVAR_BF16 || shape.format == SAMOVAR_KV_I8;
    return is_known && shape.group <= TILED_HEADS && shape.dim % tile_numbers(shape.format) == 0 && block_size % TILE_ROWS == 0;
}

// A piece of the keys: groups of sixteen that lie one behind the other, from a multiple of sixteen on.
struct KeyGroups {
    int first = 0, last = 0;   // keys that are seen
    int begin = 0, count = 0;  // the first key of the first group; groups
    size_t offsets[PIECE_GROUPS];

    KeyGroups() = default;
    KeyGroups(const Shape& shape, const int32_t* table, int block_size, int first_key, int last_key)
        : first(first_key), last(last_key), begin(first_key / TILE_ROWS * TILE_ROWS),
          count((last_key - begin + TILE_ROWS - 1) / TILE_ROWS) {
        for (int n = 0; n < count; n++) {
            const int key = begin + n * TILE_ROWS;
            offsets[n] = (size_t(table[key / block_size]) * size_t(block_size) + size_t(key % block_size)) * shape.token_bytes;
        }
    }
    bool has(int n) const { return begin + n >= first && begin + n < last; }
    size_t offset(const Shape& shape, int n) const { return offsets[n / TILE_ROWS] + size_t(n % TILE_ROWS) * shape.token_bytes; }
};

// A thread's scratch.
struct FewTilesState {
    uint8_t* queries;    // [kv heads][dim / tile numbers] tiles
    float* factors;      // of int8 queries, [kv heads][TILED_HEADS]
    float* scores;       // [heads][FEW_PIECE], then weights
    uint8_t* weights;    // [TILE_ROWS][FEW_PIECE] bfloat16 or bytes: rows of A
    uint8_t* values;     // twice four tiles
    float* sums;         // [4][TILE_ROWS][LANES]
    FewSums piece, all;

    size_t num_bytes = 0;

    // `at` null: only `num_bytes` is of use.
    FewTilesState(const Shape& shape, uint8_t* at) {
        const auto take = [&](size_t bytes) {
            uint8_t* taken = at ? at + num_bytes : nullptr;
            num_bytes += (bytes + 63) / 64 * 64;
            return taken;
        };
        const auto floats = [&take](size_t count) { return reinterpret_cast<float*>(take(4 * count)); };
        const size_t heads = size_t(shape.heads), kv_heads = size_t(shape.kv_heads);
        queries = take(kv_heads * size_t((shape.dim + 31) / 32) * TILE_BYTES), factors = floats(kv_heads * TILED_HEADS);
        scores = floats(heads * FEW_PIECE), weights = take(2 * TILE_ROWS * FEW_PIECE), values = take(2 * 4 * TILE_BYTES);
        sums = floats(4 * TILE_ROWS * LANES);
        for (FewSums* each : {&piece, &all})
            each->values = floats(heads * shape.padded_dim), each->maxima = floats(heads), each->totals = floats(heads);
    }
    static size_t bytes(const Shape& shape) { return FewTilesState(shape, nullptr).num_bytes; }
};

// The queries of a K/V head as tiles: [pairs or quads of numbers][heads, then their rests][2 or 4].
template <int FORMAT>
void pack_few_queries(const Shape& shape, const float* q, uint8_t* to, float* factors) {
    std::memset(to, 0, size_t(shape.dim / tile_numbers(FORMAT)) * TILE_BYTES);
    for (int g = 0; g < shape.group; g++, q += shape.dim) {
        float inverse = 0;
        if constexpr (FORMAT == SAMOVAR_KV_I8) {
            uint32_t bits = 0;
            for (int n = 0; n < shape.dim; n += 2 * LANES) bits = std::max(bits, largest_bits(get(q + n), get(q + n + LANES)));
            float most;
            std::memcpy(&most, &bits, 4);
            const float scale = most * shape.query_factor() / 127.f;
            inverse = scale > 1e-30f ? 1.f / scale : 0.f;
            factors[g] = scale > 1e-30f || !(scale == scale) ? scale : 0.f;
        }
        for (int n = 0; n < shape.dim; n += LANES) {
            const V x = get(q + n) * shape.query_factor();
            alignas(64) uint32_t words[2][8];
            if constexpr (FORMAT == SAMOVAR_BF16) {
                put_bf16_lanes(words[0], x);
                put_bf16_lanes(words[1], x - from_bf16_lanes(words[0]));
            } else {
                const V y = x * inverse;
                const V whole = {(Part)_mm512_roundscale_ps((__m512)y.part[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
                store_codes(reinterpret_cast<int8_t*>(words[0]), whole);
                store_codes(reinterpret_cast<int8_t*>(words[1]), (y - whole) * REST);
            }
            constexpr int WORDS = LANES * tile_numbers(SAMOVAR_BF16) / tile_numbers(FORMAT) / 2;
            uint8_t* row = to + n * (64 * WORDS / LANES) + 4 * g;
            for (int rest = 0; rest < 2; rest++)
                for (int i = 0; i < WORDS; i++) std::memcpy(row + 64 * i + 4 * TILED_HEADS * rest, words[rest] + i, 4);
        }
    }
}

// Asks for the rows of a piece, front to back as they lie in memory, which the processor's own prefetching then joins.
struct Asker {
    const KeyGroups& keys;
    const uint8_t* rows;
    size_t bytes, step;     // of a stretch, and from one to the next: a group, or (of some heads only) a token
    int per_group, group, stretch = 0;
    size_t at = 0;

    Asker(const Shape& shape, const Unit& unit, const uint8_t* from, const KeyGroups& of, int first_group = 0)
        : keys(of), rows(from), bytes(TILE_ROWS * shape.token_bytes), step(bytes), per_group(1), group(first_group) {
        const int heads = unit.last_head - unit.first_head;
        if (heads == shape.kv_heads) return;
        rows += size_t(unit.first_head) * shape.row_bytes;
        bytes = size_t(heads) * shape.row_bytes, step = shape.token_bytes, per_group = TILE_ROWS;
    }

    size_t total() const { return size_t(keys.count) * size_t(per_group) * bytes; }

    // For the next `count` bytes.
    template <int LEVEL>
    SAMOVAR_INLINE void ask(size_t count) {
        while (group < keys.count && count > 0) {
            const size_t now = std::min(count, bytes - at);
            const uint8_t* from = rows + keys.offsets[group] + size_t(stretch) * step + at;
            for (size_t i = 0; i < now; i += 64) __builtin_prefetch(from + i, 0, LEVEL);
            count -= now, at += now;
            if (at == bytes) at = 0, stretch++;
            if (stretch == per_group) stretch = 0, group++;
        }
    }
};

// The float32 numbers of sixteen tokens, `bytes` apart, of those that `mask` names.
SAMOVAR_INLINE __m512 gather_scales(const uint8_t* from, size_t bytes, __mmask16 mask) {
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i at = _mm512_mullo_epi32(steps, _mm512_set1_epi32(int(bytes)));
    return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, at, from, 1);
}

SAMOVAR_INLINE __mmask16 seen_of(const KeyGroups& keys, int group) {
    const int at = keys.begin + group * TILE_ROWS, low = std::max(0, keys.first - at), high = std::min(TILE_ROWS, keys.last - at);
    return __mmask16((1u << high) - (1u << low));
}

// Column n % 4 of rows 4 L + i of sixteen rows, and its rest, in lane 4 L + n of the result.
template <int FORMAT>
SAMOVAR_INLINE __m512 joined(const float* rows, int i, __m512 factors) {
    const auto take = [rows, i](int rest) {
        const float* at = rows + i * LANES + TILED_HEADS * rest;
        __m512 x = _mm512_castps128_ps512(_mm_load_ps(at));
        x = _mm512_insertf32x4(x, _mm_load_ps(at + 4 * LANES), 1);
        x = _mm512_insertf32x4(x, _mm_load_ps(at + 8 * LANES), 2);
        return _mm512_insertf32x4(x, _mm_load_ps(at + 12 * LANES), 3);
    };
    if constexpr (FORMAT == SAMOVAR_BF16) return _mm512_add_ps(take(0), take(1));
    const __m512 first = _mm512_cvtepi32_ps(_mm512_castps_si512(take(0)));
    const __m512 rest = _mm512_cvtepi32_ps(_mm512_castps_si512(take(1)));
    return _mm512_mul_ps(_mm512_fmadd_ps(rest, _mm512_set1_ps(1 / REST), first), factors);
}

// scores [group][FEW_PIECE] of one K/V head with sixteen keys, whose products are `rows`; `keys` the first key's row.
template <int FORMAT>
SAMOVAR_INLINE void take_scores(const Shape& shape, const float* rows, const float* factors, const uint8_t* keys, __mmask16 seen,
                                float* scores) {
    const __m512 all_factors = _mm512_broadcast_f32x4(_mm_loadu_ps(factors));
    __m512 x[4], heads[4];
    SAMOVAR_UNROLL for (int i = 0; i < 4; i++) x[i] = joined<FORMAT>(rows, i, all_factors);
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1])), b = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3]));
    const __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1])), d = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
    heads[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), heads[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    heads[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), heads[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
    __m512 scales = _mm512_set1_ps(1.f);
    if constexpr (FORMAT == SAMOVAR_KV_I8) scales = gather_scales(keys + shape.dim, shape.token_bytes, seen);
    for (int g = 0; g < shape.group; g++)
        _mm512_storeu_ps(scores + g * FEW_PIECE, _mm512_mask_mul_ps(_mm512_set1_ps(HIDDEN), seen, heads[g], scales));
}

#define SAMOVAR_FEW_SCORE(sum, a, b)                                       \
    do {                                                                   \
        if constexpr (FORMAT == SAMOVAR_BF16) _tile_dpbf16ps(sum, a, b);   \
        else _tile_dpbssd(sum, a, b);                                      \
    } while (false)

// Products of two groups of keys, the first rows of which are given, with the queries of their head.
template <int FORMAT>
SAMOVAR_INLINE void multiply_groups(const Shape& shape, const uint8_t* first, const uint8_t* second, const uint8_t* q, float* rows) {
    SAMOVAR_MEMORY_BARRIER;
    _tile_zero(0);
    _tile_zero(1);
    for (int t = 0; t < shape.dim / tile_numbers(FORMAT); t++) {
        _tile_loadd(6, q + t * TILE_BYTES, 64);
        _tile_loadd(4, first + t * 64, shape.token_bytes);
        SAMOVAR_FEW_SCORE(0, 4, 6);
        _tile_loadd(5, second + t * 64, shape.token_bytes);
        SAMOVAR_FEW_SCORE(1, 5, 6);
    }
    _tile_stored(0, rows, 64);
    _tile_stored(1, rows + TILE_ROWS * LANES, 64);
    SAMOVAR_MEMORY_BARRIER;
}

// Scores of a unit's heads with every group of a piece; meanwhile the memory is asked for the values.
template <int FORMAT>
void score_groups(const Shape& shape, const Unit& unit, const KeyGroups& keys, const FewTilesState& state) {
    constexpr int SIZE = TILE_ROWS * LANES;
    const int heads = unit.last_head - unit.first_head, steps = (keys.count + 1) / 2 * heads;
    const size_t query_bytes = size_t(shape.dim / tile_numbers(FORMAT)) * TILE_BYTES;
    Asker values(shape, unit, shape.values, keys), near(shape, unit, shape.keys, keys, 2);
    const size_t values_each = values.total() / size_t(steps) + 1;
    const size_t near_each = 2 * near.bytes * size_t(near.per_group) / size_t(heads) + 1;
    // Two groups at a time; while they are multiplied, the scores of those before are taken apart.
    for (int step = 0; step <= steps; step++) {
        const auto row = [&](int s, int n) {
            const int group = std::min(s / heads * 2 + n, keys.count - 1);
            return shape.keys + keys.offsets[group] + size_t(unit.first_head + s % heads) * shape.row_bytes;
        };
        if (step < steps) {
            const uint8_t* q = state.queries + size_t(unit.first_head + step % heads) * query_bytes;
            multiply_groups<FORMAT>(shape, row(step, 0), row(step, 1), q, state.sums + step % 2 * 2 * SIZE);
            near.ask<3>(near_each);
            values.ask<2>(values_each);
        }
        if (step == 0) continue;
        const int s = step - 1, head = unit.first_head + s % heads;
        for (int n = 0; n < 2; n++) {
            const int group = s / heads * 2 + n;
            if (group < keys.count)
                take_scores<FORMAT>(shape, state.sums + (s % 2 * 2 + n) * SIZE, state.factors + head * TILED_HEADS, row(s, n),
                                    seen_of(keys, group), state.scores + size_t(head * shape.group) * FEW_PIECE + group * TILE_ROWS);
        }
    }
}

#undef SAMOVAR_FEW_SCORE

// The weights of one head as row g of A and their rests as row g + TILED_HEADS; returns what results are to be multiplied by.
template <int FORMAT>
float pack_weights(const Shape& shape, const KeyGroups& keys, size_t head_at, float* weights, int g, uint8_t* to) {
    uint8_t* row = to + size_t(g) * FEW_PIECE * 2;
    uint8_t* rest = row + size_t(TILED_HEADS) * FEW_PIECE * 2;
    constexpr int groups_of_tile = tile_numbers(FORMAT) / TILE_ROWS;
    const int padded = round_up(keys.count, groups_of_tile);
    if constexpr (FORMAT == SAMOVAR_BF16) {
        for (int n = 0; n < padded; n++) {
            const V w = n < keys.count ? get(weights + n * LANES) : fill(0.f);
            put_bf16_lanes(row + n * 32, w);
            put_bf16_lanes(rest + n * 32, w - from_bf16_lanes(row + n * 32));
        }
        return 1.f;
    } else {
        __m512 most_of_all = _mm512_setzero_ps();
        for (int n = 0; n < keys.count; n++) {
            const uint8_t* scale = shape.values + keys.offsets[n] + head_at + shape.dim;
            const __m512 scales = gather_scales(scale, shape.token_bytes, seen_of(keys, n));
            const __m512 w = _mm512_mul_ps(_mm512_loadu_ps(weights + n * LANES), scales);
            _mm512_storeu_ps(weights + n * LANES, w);
            most_of_all = _mm512_max_ps(w, most_of_all);
            // A NaN is lost in a maximum, and must not be.
            most_of_all = _mm512_mask_mov_ps(most_of_all, _mm512_cmp_ps_mask(w, w, _CMP_UNORD_Q), _mm512_set1_ps(INFINITY));
        }
        float highest_weight = _mm512_reduce_max_ps(most_of_all);
        if (highest_weight == INFINITY) highest_weight = NAN;
        const float inverse = highest_weight > 1e-30f ? 65535.f / highest_weight : 0.f;
        for (int n = 0; n < padded; n++) {
            const __m512 w = n < keys.count ? _mm512_loadu_ps(weights + n * LANES) : _mm512_setzero_ps();
            const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(w, _mm512_set1_ps(inverse)));
            _mm_storeu_si128((__m128i*)(row + n * 16), _mm512_cvtepi32_epi8(_mm512_srli_epi32(code, 8)));
            _mm_storeu_si128((__m128i*)(rest + n * 16), _mm512_cvtepi32_epi8(code));
        }
        return highest_weight > 1e-30f || highest_weight != highest_weight ? highest_weight / 65535.f : 0.f;
    }
}

// 64 numbers (bfloat16: 32 or 64, `tiles` of sixteen) from the n-th on of as many values as a tile has, woven together.
// Column 4 L + i of tile j is number 16 L + 4 j + i; of bfloat16 number 32 (j / 2) + 8 L + 4 (j % 2) + i.
template <int FORMAT, typename Load>
SAMOVAR_INLINE void weave_rows(int n, int tiles, uint8_t* to, Load&& load) {
    if constexpr (FORMAT == SAMOVAR_BF16) {
        for (int k = 0; k < 32; k += 2)
            for (int j = 0; j < tiles; j += 2) {
                const __m512i a = load(k, 2 * n + 32 * j), b = load(k + 1, 2 * n + 32 * j);
                _mm512_storeu_si512(to + j * TILE_BYTES + 32 * k, _mm512_unpacklo_epi16(a, b));
                _mm512_storeu_si512(to + (j + 1) * TILE_BYTES + 32 * k, _mm512_unpackhi_epi16(a, b));
            }
    } else {
        for (int k = 0; k < 64; k += 4) {
            const __m512i a = load(k, n), b = load(k + 1, n), c = load(k + 2, n), d = load(k + 3, n);
            const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
            const __m512i ab_high = _mm512_unpackhi_epi8(a, b), cd_high = _mm512_unpackhi_epi8(c, d);
            _mm512_storeu_si512(to + 16 * k, _mm512_unpacklo_epi16(ab, cd));
            _mm512_storeu_si512(to + TILE_BYTES + 16 * k, _mm512_unpackhi_epi16(ab, cd));
            _mm512_storeu_si512(to + 2 * TILE_BYTES + 16 * k, _mm512_unpacklo_epi16(ab_high, cd_high));
            _mm512_storeu_si512(to + 3 * TILE_BYTES + 16 * k, _mm512_unpackhi_epi16(ab_high, cd_high));
        }
    }
}

// The same of keys `first` and on of a piece, of which those that are not seen count as zeros: what lies there may be anything.
template <int FORMAT>
SAMOVAR_INLINE void weave_values(const Shape& shape, const KeyGroups& keys, int first, const uint8_t* head, int n, int tiles,
                                 uint8_t* to) {
    constexpr int KEYS = tile_numbers(FORMAT);
    if (keys.has(first) && keys.has(first + KEYS - 1)) {
        const uint8_t* groups[KEYS / TILE_ROWS];
        for (int i = 0; i < KEYS / TILE_ROWS; i++) groups[i] = head + keys.offsets[first / TILE_ROWS + i];
        const size_t token = shape.token_bytes;
        return weave_rows<FORMAT>(n, tiles, to, [&](int k, int at) {
            return _mm512_loadu_si512(groups[k / TILE_ROWS] + size_t(k % TILE_ROWS) * token + at);
        });
    }
    weave_rows<FORMAT>(n, tiles, to, [&](int k, int at) {
        return keys.has(first + k) ? _mm512_loadu_si512(head + keys.offset(shape, first + k) + at) : _mm512_setzero_si512();
    });
}

#define SAMOVAR_FEW_RESULT(sum)                                              \
    do {                                                                     \
        _tile_loadd(6, values + (sum) * TILE_BYTES, 64);                     \
        if constexpr (FORMAT == SAMOVAR_BF16) _tile_dpbf16ps(sum, 4, 6);     \
        else _tile_dpbusd(sum, 4, 6);                                        \
    } while (false)

// totals [group][padded_dim] of one K/V head from the weights in state.weights, times factors[g]. Meanwhile the memory is asked
// for the rows of this head in the groups of `next`.
template <int FORMAT>
void weigh_groups(const Shape& shape, const KeyGroups& keys, int kv_head, const FewTilesState& state, const float* factors,
                  float* totals, Asker& asker, size_t bytes) {
    constexpr int KEYS = tile_numbers(FORMAT), ROW_BYTES = FORMAT == SAMOVAR_BF16 ? 2 : 1;
    const size_t head_at = size_t(kv_head) * shape.row_bytes;
    for (int n = 0; n < shape.dim; n += 64) {
        const int tiles = std::min(64, shape.dim - n) / LANES;
        SAMOVAR_MEMORY_BARRIER;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        // While some keys are multiplied, the next are woven.
        uint8_t *values = state.values, *other = values + 4 * TILE_BYTES;
        weave_values<FORMAT>(shape, keys, 0, shape.values + head_at, n, tiles, values);
        for (int k = 0; k < keys.count * TILE_ROWS; k += KEYS, std::swap(values, other)) {
            asker.ask<2>(bytes);
            if (k + KEYS < keys.count * TILE_ROWS)
                weave_values<FORMAT>(shape, keys, k + KEYS, shape.values + head_at, n, tiles, other);
            SAMOVAR_MEMORY_BARRIER;
            _tile_loadd(4, state.weights + k * ROW_BYTES, FEW_PIECE * 2);
            SAMOVAR_FEW_RESULT(0);
            SAMOVAR_FEW_RESULT(1);
            if (tiles > 2) {
                SAMOVAR_FEW_RESULT(2);
                SAMOVAR_FEW_RESULT(3);
            }
            SAMOVAR_MEMORY_BARRIER;
        }
        _tile_stored(0, state.sums, 64);
        _tile_stored(1, state.sums + TILE_ROWS * LANES, 64);
        _tile_stored(2, state.sums + 2 * TILE_ROWS * LANES, 64);
        _tile_stored(3, state.sums + 3 * TILE_ROWS * LANES, 64);
        SAMOVAR_MEMORY_BARRIER;
        for (int g = 0; g < shape.group; g++)
            for (int j = 0; j < tiles; j++) {
                const float* sums = state.sums + (j * TILE_ROWS + g) * LANES;
                alignas(64) float values[LANES];
                if constexpr (FORMAT == SAMOVAR_BF16) {
                    set(values, get(sums) + get(sums + TILED_HEADS * LANES));
                } else {
                    const __m512 high = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums));
                    const __m512 low = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + TILED_HEADS * LANES));
                    const __m512 both = _mm512_fmadd_ps(high, _mm512_set1_ps(256.f), low);
                    _mm512_store_ps(values, _mm512_mul_ps(both, _mm512_set1_ps(factors[g])));
                }
                for (int lane = 0; lane < 4; lane++) {
                    const int at = FORMAT == SAMOVAR_BF16 ? 32 * (j / 2) + 8 * lane + 4 * (j % 2) : 16 * lane + 4 * j;
                    std::memcpy(totals + size_t(g) * shape.padded_dim + n + at, values + 4 * lane, 16);
                }
            }
    }
}

#undef SAMOVAR_FEW_RESULT

// One piece of the keys into state.piece.
template <int FORMAT>
void attend_few_groups(const Shape& shape, const Unit& unit, const KeyGroups& keys, const KeyGroups& next,
                       const FewTilesState& state) {
    const size_t heads = size_t(unit.last_head - unit.first_head), columns = size_t((shape.dim + 63) / 64);
    const size_t tiles = size_t((keys.count * TILE_ROWS + tile_numbers(FORMAT) - 1) / tile_numbers(FORMAT));
    score_groups<FORMAT>(shape, unit, keys, state);
    Asker next_keys(shape, unit, shape.keys, next);
    const size_t bytes = next_keys.total() / (heads * columns * tiles) + 1;
    for (int h = unit.first_head; h < unit.last_head; h++) {
        float factors[TILED_HEADS];
        for (int g = 0; g < shape.group; g++) {
            const int head = h * shape.group + g;
            float* scores = state.scores + size_t(head) * FEW_PIECE;
            state.piece.maxima[head] = NO_MAXIMUM, state.piece.totals[head] = 0;
            weigh_scores(shape, scores, keys.count * TILE_ROWS, state.piece.maxima[head], state.piece.totals[head]);
            factors[g] = pack_weights<FORMAT>(shape, keys, size_t(h) * shape.row_bytes, scores, g, state.weights);
        }
        weigh_groups<FORMAT>(shape, keys, h, state, factors, state.piece.values + size_t(h) * shape.group * shape.padded_dim,
                             next_keys, bytes);
    }
}

// A unit of one query row; `next`: the unit that this thread is likely to have after it, or null.
inline void attend_few_tiles(const Shape& shape, const SamovarStep& step, const Unit& unit, const Unit* next, uint8_t* scratch) {
    const FewTilesState state(shape, scratch);
    const float* q = unit.queries.rows + unit.first_row * unit.queries.stride;
    const auto groups = [&](const Unit& of, int key) {
        return KeyGroups(shape, of.queries.table, step.block_size, key, piece_end(key, FEW_PIECE, of.last_key));
    };
    std::memset(state.weights, 0, 2 * TILE_ROWS * FEW_PIECE);
    with_format(shape.format, [&](auto format) {
        constexpr int FORMAT = decltype(format)::value;
        if constexpr (FORMAT == SAMOVAR_BF16 || FORMAT == SAMOVAR_KV_I8) {
            const size_t tiles = size_t(shape.dim / tile_numbers(FORMAT));
            for (int h = unit.first_head; h < unit.last_head; h++)
                pack_few_queries<FORMAT>(shape, q + size_t(h) * shape.group * shape.dim, state.queries + h * tiles * TILE_BYTES,
                                         state.factors + h * TILED_HEADS);
            attend_pieces(shape, unit, state.piece, state.all, [&](int key, int end) {
                const KeyGroups after = end < unit.last_key ? groups(unit, end) : next ? groups(*next, next->first_key) : KeyGroups();
                attend_few_groups<FORMAT>(shape, unit, groups(unit, key), after, state);
            }, [](int n) { return n; });
        }
    });
}

}  // namespace samovar::SAMOVAR_ISA

#endif
