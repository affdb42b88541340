// Attention of one query row per sequence with few heads per K/V head: decode.
//
// The numbers of a head lie in the lanes. A key is widened once and multiplied with the queries of all heads that share it;
// the sums over the lanes of sixteen keys are taken together. Softmax is online (Milakov & Gimelshein, 2018), by blocks of
// keys; blocks are outer and heads inner, so that the cache is read once, front to back.
#pragma once

#include "attend.h"

namespace samovar::SAMOVAR_ISA {

constexpr int MAX_FEW_HEADS = 8;  // query heads of a K/V head
#if defined(__AVX512F__)
constexpr int KEYS_AT_ONCE = 4;
#else
constexpr int KEYS_AT_ONCE = 1;
#endif

// Numbers n .. n + 31 of a row in two vectors: bfloat16 as even and odd ones, which is all that widening takes; others in
// order. `order_of` says the same of float32 vectors: where number n of a row stands.
template <int FORMAT>
SAMOVAR_INLINE void read_two(const uint8_t* row, int n, V& a, V& b) {
    if constexpr (FORMAT == SAMOVAR_BF16) {
        SAMOVAR_EACH_PART {
            BitPart pairs;
            std::memcpy(&pairs, row + 2 * n + p * sizeof pairs, sizeof pairs);
            a.part[p] = (Part)(pairs << 16);
            b.part[p] = (Part)(pairs & 0xffff0000u);
        }
    } else {
        a = read_lanes<FORMAT>(row, n);
        b = read_lanes<FORMAT>(row, n + LANES);
    }
}

// Numbers of a cache line.
constexpr int line_numbers(int format) { return format == SAMOVAR_F32 ? 16 : format == SAMOVAR_F16 || format == SAMOVAR_BF16 ? 32 : 64; }

constexpr int order_of(int format, int n, int dim) {
    if (format != SAMOVAR_BF16 || n >= dim / 32 * 32) return n;
    return n / 32 * 32 + n % 32 / 2 + n % 2 * LANES;
}

// What is behind the last whole 32 numbers: 8, 16 or 24, as one or two vectors.
template <int FORMAT>
SAMOVAR_INLINE V read_tail(const uint8_t* row, int n, int dim) {
    return dim - n >= LANES ? read_lanes<FORMAT>(row, n) : read_last_eight<FORMAT>(row, n);
}

// The sums of the lanes of sixteen vectors.
SAMOVAR_INLINE V sums(const V* x) {
#if defined(__AVX512F__)
    __m512 quads[4];
    SAMOVAR_UNROLL for (int i = 0; i < 4; i++) {
        const __m512 a = (__m512)x[4 * i].part[0], b = (__m512)x[4 * i + 1].part[0];
        const __m512 c = (__m512)x[4 * i + 2].part[0], d = (__m512)x[4 * i + 3].part[0];
        const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
        quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    }
    __m512 halves[2];
    SAMOVAR_UNROLL for (int i = 0; i < 2; i++)
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0x44),
                                  _mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0xee));
    return {(Part)_mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88), _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd))};
#else
    alignas(64) float y[LANES];
    for (int i = 0; i < LANES; i++) y[i] = sum(x[i]);
    return get(y);
#endif
}

// One K/V head within a block of keys.
struct FewKeys {
    const uint8_t *keys, *values;  // of this head, of token 0
    const size_t *offsets, *next;  // of the block's tokens, and of those of the block after it
    int count;                     // of valid keys
    int dim, padded_dim;
};

// Asks for the line of the next block that corresponds to byte `at` of key k. Blocks of the cache lie anywhere, which the
// processor cannot guess.
SAMOVAR_INLINE void ask_ahead(const FewKeys& block, const uint8_t* rows, int k, size_t at) {
    __builtin_prefetch(rows + block.next[k] + at, 0, 2);
}

// scores[g][key] = q[g] . key for HEADS heads; q [HEADS][padded_dim] in the format's order, scores [HEADS][KEY_BLOCK].
template <int FORMAT, int HEADS>
SAMOVAR_INLINE void score_keys(const FewKeys& block, const float* q, float* scores) {
    constexpr int LINE = line_numbers(FORMAT);
    const int dim = block.dim, whole = dim / 32 * 32;
    for (int first = 0; first < block.count; first += LANES) {
        V products[HEADS][LANES];
        for (int k = 0; k < LANES; k += KEYS_AT_ONCE) {
            const uint8_t* rows[KEYS_AT_ONCE];
            SAMOVAR_UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++) rows[i] = block.keys + block.offsets[first + k + i];
            V total[KEYS_AT_ONCE][HEADS];
            SAMOVAR_UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++)
                SAMOVAR_UNROLL for (int g = 0; g < HEADS; g++) total[i][g] = fill(0.f);
            for (int n = 0; n < whole; n += 32)
                SAMOVAR_UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++) {
                    V a, b;
                    read_two<FORMAT>(rows[i], n, a, b);
                    if (n % LINE == 0) ask_ahead(block, block.keys, first + k + i, size_t(n) * 64 / LINE);
                    SAMOVAR_UNROLL for (int g = 0; g < HEADS; g++) {
                        total[i][g] = fma(a, get(q + g * block.padded_dim + n), total[i][g]);
                        total[i][g] = fma(b, get(q + g * block.padded_dim + n + LANES), total[i][g]);
                    }
                }
            for (int n = whole; n < dim; n += LANES)
                SAMOVAR_UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++) {
                    const V a = read_tail<FORMAT>(rows[i], n, dim);
                    SAMOVAR_UNROLL for (int g = 0; g < HEADS; g++) total[i][g] = fma(a, get(q + g * block.padded_dim + n), total[i][g]);
                }
            SAMOVAR_UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++)
                SAMOVAR_UNROLL for (int g = 0; g < HEADS; g++) products[g][k + i] = total[i][g];
        }
        SAMOVAR_UNROLL for (int g = 0; g < HEADS; g++) set(scores + g * KEY_BLOCK + first, sums(products[g]));
    }
    if constexpr (FORMAT == SAMOVAR_KV_I8)
        for (int k = 0; k < block.count; k++) {
            const float scale = read_scale<FORMAT>(block.keys + block.offsets[k], dim);
            SAMOVAR_UNROLL for (int g = 0; g < HEADS; g++) scores[g * KEY_BLOCK + k] *= scale;
        }
}

// sums[g] += weights[g][key] * value, TWOS * 32 numbers from `n` on.
template <int FORMAT, int HEADS, int TWOS>
SAMOVAR_INLINE void weigh_twos(const FewKeys& block, const float* weights, float* totals, int n) {
    constexpr int LINE = line_numbers(FORMAT);
    V total[HEADS][2 * TWOS];
    SAMOVAR_UNROLL for (int g = 0; g < HEADS; g++)
        SAMOVAR_UNROLL for (int i = 0; i < 2 * TWOS; i++) total[g][i] = get(totals + g * block.padded_dim + n + i * LANES);
    for (int k = 0; k < block.count; k++) {
        const uint8_t* row = block.values + block.offsets[k];
        SAMOVAR_UNROLL for (int i = 0; i < 32 * TWOS; i += std::min(LINE, 32 * TWOS)) {
            if ((n + i) % LINE == 0) ask_ahead(block, block.values, k, size_t(n + i) * 64 / LINE);
        }
        V v[2 * TWOS];
        SAMOVAR_UNROLL for (int i = 0; i < TWOS; i++) read_two<FORMAT>(row, n + 32 * i, v[2 * i], v[2 * i + 1]);
        SAMOVAR_UNROLL for (int g = 0; g < HEADS; g++) {
            const V weight = fill(weights[g * KEY_BLOCK + k]);
            SAMOVAR_UNROLL for (int i = 0; i < 2 * TWOS; i++) total[g][i] = fma(v[i], weight, total[g][i]);
        }
    }
    SAMOVAR_UNROLL for (int g = 0; g < HEADS; g++)
        SAMOVAR_UNROLL for (int i = 0; i < 2 * TWOS; i++) set(totals + g * block.padded_dim + n + i * LANES, total[g][i]);
}

template <int FORMAT, int HEADS>
SAMOVAR_INLINE void weigh_tail(const FewKeys& block, const float* weights, float* totals, int n) {
    V total[HEADS];
    SAMOVAR_UNROLL for (int g = 0; g < HEADS; g++) total[g] = get(totals + g * block.padded_dim + n);
    for (int k = 0; k < block.count; k++) {
        const V v = read_tail<FORMAT>(block.values + block.offsets[k], n, block.dim);
        SAMOVAR_UNROLL for (int g = 0; g < HEADS; g++) total[g] = fma(v, fill(weights[g * KEY_BLOCK + k]), total[g]);
    }
    SAMOVAR_UNROLL for (int g = 0; g < HEADS; g++) set(totals + g * block.padded_dim + n, total[g]);
}

template <int FORMAT, int HEADS>
SAMOVAR_INLINE void weigh_values(const FewKeys& block, float* weights, float* totals) {
    if constexpr (FORMAT == SAMOVAR_KV_I8)
        for (int k = 0; k < block.count; k++) {
            const float scale = read_scale<FORMAT>(block.values + block.offsets[k], block.dim);
            SAMOVAR_UNROLL for (int g = 0; g < HEADS; g++) weights[g * KEY_BLOCK + k] *= scale;
        }
    constexpr int TWOS = PART_LANES == LANES ? 2 : 1;
    int n = 0;
    for (; n + 32 * TWOS <= block.dim; n += 32 * TWOS) weigh_twos<FORMAT, HEADS, TWOS>(block, weights, totals, n);
    for (; n + 32 <= block.dim; n += 32) weigh_twos<FORMAT, HEADS, 1>(block, weights, totals, n);
    for (; n < block.dim; n += LANES) weigh_tail<FORMAT, HEADS>(block, weights, totals, n);
}

// Scores of one head to weights, in place; keys behind the last weigh nothing. Returns by how much earlier sums shrink.
SAMOVAR_INLINE float weigh_scores(const Shape& shape, float* scores, int count, float& maximum, float& total) {
    const int vectors = (count + LANES - 1) / LANES;
    for (int k = count; k < vectors * LANES; k++) scores[k] = HIDDEN;
    V most_of_all = fill(maximum);
    for (int i = 0; i < vectors; i++) {
        V s = get(scores + i * LANES);
        if (shape.softcap > 0) {
            s = select(s > fill(HIDDEN), tanh(s) * (shape.softcap * LOG2_E), s);
            set(scores + i * LANES, s);
        }
        most_of_all = most(s, most_of_all);
    }
    const float highest_now = highest(most_of_all), shrink = std::exp2(maximum - highest_now);
    V sum_of_weights = fill(0.f);
    for (int i = 0; i < vectors; i++) {
        const V weight = exp2(get(scores + i * LANES) - highest_now);
        sum_of_weights = sum_of_weights + weight;
        set(scores + i * LANES, weight);
    }
    maximum = highest_now;
    total = total * shrink + sum(sum_of_weights);
    return shrink;
}

// Sums of the heads so far: of one piece, or of those before it.
struct FewSums {
    float* values;            // [heads][padded_dim], in the order of the format
    float *maxima, *totals;   // [heads]

    void clear(int first, int last, int padded_dim) const {
        std::memset(values + size_t(first) * padded_dim, 0, sizeof(float) * size_t(last - first) * size_t(padded_dim));
        for (int head = first; head < last; head++) maxima[head] = NO_MAXIMUM, totals[head] = 0;
    }
    void add(const FewSums& piece, int first, int last, int padded_dim) const {
        for (int head = first; head < last; head++) {
            const size_t at = size_t(head) * padded_dim;
            fold(values + at, maxima[head], totals[head], piece.values + at, piece.maxima[head], piece.totals[head], padded_dim);
        }
    }
};

// A thread's scratch.
struct FewState {
    float* q;            // [heads][padded_dim], in the order of the format
    FewSums piece, all;
    float* scores;       // [MAX_FEW_HEADS][KEY_BLOCK]
    size_t* offsets;     // [KEY_BLOCK] twice: of a block and the next

    FewState(const Shape& shape, uint8_t* scratch) {
        float* at = reinterpret_cast<float*>(scratch);
        const auto take = [&at](size_t floats) { return (at += floats) - floats; };
        const size_t values = size_t(shape.heads) * shape.padded_dim, heads = size_t(round_up(shape.heads, LANES));
        q = take(values);
        for (FewSums* sums : {&piece, &all}) sums->values = take(values), sums->maxima = take(heads), sums->totals = take(heads);
        scores = take(MAX_FEW_HEADS * KEY_BLOCK), offsets = reinterpret_cast<size_t*>(at);
    }
    static size_t bytes(const Shape& shape) {
        const size_t heads = size_t(round_up(shape.heads, LANES));
        return 4 * (3 * size_t(shape.heads) * shape.padded_dim + 4 * heads + MAX_FEW_HEADS * KEY_BLOCK) + 8 * 2 * KEY_BLOCK;
    }
};

template <int FORMAT, int HEADS>
void attend_few_heads(const Shape& shape, const FewKeys& block, const FewState& state, int head) {
    const int dim = shape.padded_dim;
    float* totals = state.piece.values + size_t(head) * dim;
    score_keys<FORMAT, HEADS>(block, state.q + size_t(head) * dim, state.scores);
    SAMOVAR_UNROLL for (int g = 0; g < HEADS; g++) {
        const float shrink =
            weigh_scores(shape, state.scores + g * KEY_BLOCK, block.count, state.piece.maxima[head + g], state.piece.totals[head + g]);
        if (shrink < 1.f)
            for (int n = 0; n < dim; n += LANES) set(totals + g * dim + n, get(totals + g * dim + n) * shrink);
    }
    weigh_values<FORMAT, HEADS>(block, state.scores, totals);
}

template <int FORMAT>
void attend_few_block(const Shape& shape, const FewKeys& block, const FewState& state, int kv_head) {
    for (int g = 0; g < shape.group;) {
        const int head = kv_head * shape.group + g, left = shape.group - g;
        if (left >= 4) attend_few_heads<FORMAT, 4>(shape, block, state, head), g += 4;
        else if (left == 3) attend_few_heads<FORMAT, 3>(shape, block, state, head), g += 3;
        else if (left == 2) attend_few_heads<FORMAT, 2>(shape, block, state, head), g += 2;
        else attend_few_heads<FORMAT, 1>(shape, block, state, head), g += 1;
    }
}

// One piece of the keys.
inline void attend_few_piece(const Shape& shape, const SamovarStep& step, const Unit& unit, const FewState& state, int first, int last) {
    const auto find_block = [&](int key, size_t* offsets) {
        const int count = std::min(KEY_BLOCK, last - key);
        find_keys(unit.queries.table, step.block_size, shape.token_bytes, key, count, offsets);
        for (int k = count; k < KEY_BLOCK; k++) offsets[k] = offsets[count - 1];
    };
    size_t *offsets = state.offsets, *next = state.offsets + KEY_BLOCK;
    find_block(first, next);
    with_format(shape.format, [&](auto format) {
        for (int key = first; key < last; key += KEY_BLOCK) {
            std::swap(offsets, next);
            if (key + KEY_BLOCK < last) find_block(key + KEY_BLOCK, next);
            else std::copy(offsets, offsets + KEY_BLOCK, next);
            for (int h = unit.first_head; h < unit.last_head; h++) {
                const size_t at = size_t(h) * shape.row_bytes;
                const FewKeys block = {shape.keys + at, shape.values + at, offsets, next, std::min(KEY_BLOCK, last - key), shape.dim,
                                       shape.padded_dim};
                attend_few_block<decltype(format)::value>(shape, block, state, h);
            }
        }
    });
}

// Every piece of a unit of one query row, by compute(first key, last key), which leaves its sums in `piece`; the result to where
// the unit wants it. place(n): where number n of a head stands in the sums.
template <typename Compute, typename Place>
SAMOVAR_INLINE void attend_pieces(const Shape& shape, const Unit& unit, const FewSums& piece, const FewSums& all, Compute&& compute,
                                  Place&& place) {
    const int first = unit.first_head * shape.group, last = unit.last_head * shape.group, dim = shape.padded_dim;
    const FewSums* sums = &piece;
    for (int key = unit.first_key; key < unit.last_key;) {
        const int end = piece_end(key, FEW_PIECE, unit.last_key);
        compute(key, end);
        if (key > unit.first_key || end < unit.last_key) {
            if (key == unit.first_key) all.clear(first, last, dim);
            all.add(piece, first, last, dim);
            sums = &all;
        }
        key = end;
    }
    float* y = unit.queries.out + unit.first_row * unit.queries.out_stride;
    for (int head = first; head < last; head++) {
        alignas(64) float values[MAX_HEAD_DIM];
        const float* own = sums->values + size_t(head) * dim;
        for (int n = 0; n < dim; n++) values[n] = own[place(n)];
        if (unit.partial == nullptr) {
            write_result(shape, head, values, sums->maxima[head], sums->totals[head], y + head * shape.dim);
            continue;
        }
        const Partial partial = {unit.partial, last - first, dim};
        std::memcpy(partial.values(head - first), values, sizeof(float) * size_t(dim));
        partial.maximum(head - first) = sums->maxima[head], partial.total(head - first) = sums->totals[head];
    }
}

// A unit of one query row.
inline void attend_few(const Shape& shape, const SamovarStep& step, const Unit& unit, uint8_t* scratch) {
    const FewState state(shape, scratch);
    const int first = unit.first_head * shape.group, last = unit.last_head * shape.group, dim = shape.padded_dim;
    const float* q = unit.queries.rows + unit.first_row * unit.queries.stride;
    const auto place = [&](int n) { return order_of(shape.format, n, shape.dim); };
    for (int head = first; head < last; head++) {
        float* own = state.q + size_t(head) * dim;
        for (int n = shape.dim; n < dim; n++) own[n] = 0;
        for (int n = 0; n < shape.dim; n++) own[place(n)] = q[head * shape.dim + n] * shape.query_factor();
    }
    attend_pieces(shape, unit, state.piece, state.all, [&](int key, int end) {
        state.piece.clear(first, last, dim);
        attend_few_piece(shape, step, unit, state, key, end);
    }, place);
}

}  // namespace samovar::SAMOVAR_ISA
