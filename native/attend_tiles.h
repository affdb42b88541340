// Attention of many query rows: prefill, chunks with history, drafts; and of one row with many heads per K/V head.
//
// Blocked with online softmax (FlashAttention: Dao et al., 2022), everything transposed: the lanes are queries. A query of one
// head is a `flat`, and 32 of them that share keys are a pair of vectors, so that maxima, sums, masks and rescaling need no
// work across lanes. Scores of a block are [keys][32], results [head_dim][32]; totals are rescaled only when a maximum grows by
// more than MAXIMUM_SLACK (FlashAttention 4), for a weight up to 2^8 is as good as one up to 1.
#pragma once

#include "attend.h"
#include "transpose.h"

namespace samovar::SAMOVAR_ISA {

constexpr int PAIR = 2 * LANES;
constexpr int FLATS_AT_ONCE = 192;  // queries of a unit: how often a packed block of keys is used
constexpr float MAXIMUM_SLACK = 8.f;

// Query rows of a unit, so that the queries of `group` heads fill it.
inline int rows_at_once(int group) { return std::max(1, FLATS_AT_ONCE / group); }

// Sums of the pairs: of one piece of the keys, or of those before it.
struct TileSums {
    float *values, *maxima, *totals;  // [pairs][padded_dim][PAIR], [pairs][PAIR] twice

    void clear(int pairs, int padded_dim) const {
        std::memset(values, 0, sizeof(float) * size_t(pairs) * size_t(padded_dim) * PAIR);
        for (int i = 0; i < pairs * PAIR; i++) maxima[i] = NO_MAXIMUM, totals[i] = 0;
    }
    // As `fold`, in lanes.
    void add(const TileSums& piece, int pairs, int padded_dim) const {
        for (int i = 0; i < pairs * PAIR; i += LANES) {
            const V before = get(maxima + i), its = get(piece.maxima + i), now = most(before, its);
            const V shrink = exp2(before - now), weight = exp2(its - now);
            const size_t at = size_t(i / PAIR) * size_t(padded_dim) * PAIR + size_t(i % PAIR);
            for (size_t n = at; n < at + size_t(padded_dim) * PAIR; n += PAIR)
                set(values + n, fma(get(piece.values + n), weight, get(values + n) * shrink));
            set(totals + i, fma(get(piece.totals + i), weight, get(totals + i) * shrink));
            set(maxima + i, now);
        }
    }
};

// The memory of a thread while it works on a unit.
struct TileState {
    int padded_dim;
    TileSums piece, all;
    float* positions;                           // [pairs][PAIR]
    float* queries;                             // [pairs][round_up(dim, 32) * PAIR], as the kernel likes them
    float *scores, *weights, *keys, *values;    // [KEY_BLOCK][PAIR] twice; packed blocks [KEY_BLOCK][round_up(dim, 32)]
    float *key_scales, *value_scales;           // [KEY_BLOCK]
    size_t* offsets;

    static size_t pairs_of(const Shape& shape) { return size_t(std::max(FLATS_AT_ONCE, shape.group) + PAIR - 1) / PAIR; }
    static size_t wide_dim(const Shape& shape) { return size_t(round_up(shape.dim, 32)); }

    TileState(const Shape& shape, uint8_t* scratch) : padded_dim(shape.padded_dim) {
        const size_t pairs = pairs_of(shape), wide = wide_dim(shape);
        float* at = reinterpret_cast<float*>(scratch);
        const auto take = [&at](size_t floats) { return (at += floats) - floats; };
        for (TileSums* sums : {&piece, &all}) {
            sums->values = take(pairs * size_t(padded_dim) * PAIR);
            sums->maxima = take(pairs * PAIR), sums->totals = take(pairs * PAIR);
        }
        positions = take(pairs * PAIR);
        queries = take(pairs * wide * PAIR);
        scores = take(KEY_BLOCK * PAIR), weights = take(KEY_BLOCK * PAIR);
        keys = take(KEY_BLOCK * wide), values = take(KEY_BLOCK * wide);
        key_scales = take(KEY_BLOCK), value_scales = take(KEY_BLOCK);
        offsets = reinterpret_cast<size_t*>(at);
    }
    static size_t bytes(const Shape& shape) {
        const size_t pairs = pairs_of(shape), wide = wide_dim(shape);
        return 4 * (pairs * PAIR * (2 * size_t(shape.padded_dim) + 5 + wide) + KEY_BLOCK * (2 * PAIR + 2 * wide + 2)) + 8 * KEY_BLOCK;
    }
};

// Which query and head each flat is.
struct Flats {
    const Unit& unit;
    const Shape& shape;
    int count;

    Flats(const Unit& u, const Shape& s) : unit(u), shape(s), count(u.flats(s)) {}
    int pairs() const { return (count + PAIR - 1) / PAIR; }
    int valid(int flat) const { return std::min(flat, count - 1); }  // the lanes behind the last repeat it
    int row(int flat) const { return unit.first_row + valid(flat) / shape.group; }
    int head(int flat) const { return unit.first_head * shape.group + valid(flat) % shape.group; }
    int position(int flat) const { return unit.queries.position + row(flat); }
    const float* query(int flat) const { return unit.queries.rows + row(flat) * unit.queries.stride + head(flat) * shape.dim; }
};

// A block of keys as one pair sees it.
struct Sight {
    int first_key, count;  // keys that at least one query of the pair may see
    bool is_masked;        // but not all of them

    Sight(const Shape& shape, const Flats& flats, int pair, int key, int in_block) {
        const int earliest = flats.position(pair * PAIR), latest = flats.position(pair * PAIR + PAIR - 1);
        first_key = key, count = std::min(in_block, latest + 1 - key);
        if (key + in_block <= shape.first_key(earliest)) count = 0;
        is_masked = key + count - 1 > earliest || key < shape.first_key(latest);
    }
};

// First pass over scores [count][PAIR] of half a pair: caps, scales and hides them, in place; returns the maxima.
SAMOVAR_INLINE V bound_scores(const Shape& shape, float* scores, const Sight& sight, const float* scales, V positions) {
    V highest_yet = fill(HIDDEN);
    if (!sight.is_masked && shape.softcap <= 0 && scales == nullptr) {
        V other = highest_yet;
        int k = 0;
        for (; k + 2 <= sight.count; k += 2) {
            highest_yet = most(get(scores + k * PAIR), highest_yet);
            other = most(get(scores + (k + 1) * PAIR), other);
        }
        if (k < sight.count) other = most(get(scores + k * PAIR), other);
        return most(highest_yet, other);
    }
    const V oldest = shape.window > 0 ? positions - float(shape.window - 1) : fill(0.f);
    for (int k = 0; k < sight.count; k++) {
        V s = get(scores + k * PAIR);
        if (scales != nullptr) s = s * scales[k];
        if (shape.softcap > 0) s = tanh(s) * (shape.softcap * LOG2_E);
        if (sight.is_masked) {
            const V key = fill(float(sight.first_key + k));
            s = select(positions >= key, s, fill(HIDDEN));
            s = select(key >= oldest, s, fill(HIDDEN));
        }
        set(scores + k * PAIR, s);
        highest_yet = most(s, highest_yet);
    }
    return highest_yet;
}

// Rescales what half a pair has so far where a maximum grew much; returns the maxima to use.
SAMOVAR_INLINE V raise_maxima(V highest_now, float* maxima, float* totals, float* values, int padded_dim) {
    const V before = get(maxima);
    const Mask grew = highest_now > before + MAXIMUM_SLACK;
    if (!any(grew)) return before;
    const V now = select(grew, highest_now, before), shrink = exp2(before - now);
    set(maxima, now);
    set(totals, get(totals) * shrink);
    for (int n = 0; n < padded_dim; n++) set(values + n * PAIR, get(values + n * PAIR) * shrink);
    return now;
}

// c [rows][PAIR] (+)= a b with a(row, k) = a[row * row_step + k * k_step] and b [depth][PAIR].
template <int ROWS>
SAMOVAR_INLINE void multiply_rows(const float* a, size_t row_step, size_t k_step, const float* b, int depth, float* c, bool adds) {
    V total[ROWS][2];
    SAMOVAR_UNROLL for (int r = 0; r < ROWS; r++)
        SAMOVAR_UNROLL for (int i = 0; i < 2; i++) total[r][i] = adds ? get(c + r * PAIR + i * LANES) : fill(0.f);
    for (int k = 0; k < depth; k++) {
        const V b0 = get(b + k * PAIR), b1 = get(b + k * PAIR + LANES);
        SAMOVAR_UNROLL for (int r = 0; r < ROWS; r++) {
            const V x = fill(a[r * row_step + k * k_step]);
            total[r][0] = fma(x, b0, total[r][0]);
            total[r][1] = fma(x, b1, total[r][1]);
        }
    }
    SAMOVAR_UNROLL for (int r = 0; r < ROWS; r++)
        SAMOVAR_UNROLL for (int i = 0; i < 2; i++) set(c + r * PAIR + i * LANES, total[r][i]);
}

inline void multiply(const float* a, size_t row_step, size_t k_step, const float* b, int rows, int depth, float* c, bool adds) {
    constexpr int ROWS = PART_LANES == 16 ? 8 : PART_LANES == 8 ? 2 : 1;  // 16 or 8 accumulators of 16 or 32 registers
    int r = 0;
    for (; r + ROWS <= rows; r += ROWS) multiply_rows<ROWS>(a + r * row_step, row_step, k_step, b, depth, c + r * PAIR, adds);
    for (; r < rows; r++) multiply_rows<1>(a + r * row_step, row_step, k_step, b, depth, c + r * PAIR, adds);
}

// float32 throughout: exact mode, and every set without tiles.
struct FloatKernel {
    static constexpr bool HAS_SCALES = false;  // int8 scales are in the packed numbers

    static void pack_queries(const Shape& shape, const Flats& flats, int pair, float* to) {
        alignas(64) float rows[LANES][LANES];
        for (int half = 0; half < 2; half++)
            for (int n = 0; n < shape.dim; n += LANES) {
                const int lanes = std::min(LANES, shape.dim - n);
                for (int i = 0; i < LANES; i++) {
                    const float* q = flats.query(pair * PAIR + half * LANES + i) + n;
                    set(rows[i], (lanes == LANES ? get(q) : get(q, lanes)) * shape.query_factor());
                }
                transpose(&rows[0][0], LANES, to + n * PAIR + half * LANES, PAIR);
            }
    }

    template <int FORMAT>
    static void pack_block(const Shape& shape, const uint8_t* keys, const uint8_t* values, int count, const TileState& state) {
        for (int k = 0; k < count; k++) {
            read_row<FORMAT>(keys + state.offsets[k], shape.dim, state.keys + k * shape.padded_dim);
            read_row<FORMAT>(values + state.offsets[k], shape.dim, state.values + k * shape.padded_dim);
        }
    }

    static void score(const Shape& shape, const TileState& state, const float* queries, int count) {
        multiply(state.keys, size_t(shape.padded_dim), 1, queries, count, shape.dim, state.scores, false);
    }

    // Weights of half a pair from its scores, in place; returns their sum.
    static V weigh_half(const TileState& state, int half, int count, V maxima, const float*) {
        float* scores = state.scores + half * LANES;
        V total = fill(0.f);
        for (int k = 0; k < count; k++) {
            const V weight = exp2(get(scores + k * PAIR) - maxima);
            total = total + weight;
            set(scores + k * PAIR, weight);
        }
        return total;
    }

    static void add_values(const Shape& shape, const TileState& state, int count, float* totals) {
        multiply(state.values, 1, size_t(shape.padded_dim), state.scores, shape.padded_dim, count, totals, true);
    }
};

// One block of keys, packed in `state`, for all pairs.
template <class Kernel>
void attend_block(const Shape& shape, const Flats& flats, const TileState& state, int key, int in_block) {
    const size_t queries_floats = TileState::wide_dim(shape) * PAIR;
    const bool has_scales = Kernel::HAS_SCALES && shape.format == SAMOVAR_KV_I8;
    for (int pair = 0; pair < flats.pairs(); pair++) {
        const Sight sight(shape, flats, pair, key, in_block);
        if (sight.count <= 0) continue;
        float* values = state.piece.values + size_t(pair) * size_t(shape.padded_dim) * PAIR;
        Kernel::score(shape, state, state.queries + pair * queries_floats, sight.count);
        for (int half = 0; half < 2; half++) {
            const int at = pair * PAIR + half * LANES;
            const V highest_now = bound_scores(shape, state.scores + half * LANES, sight, has_scales ? state.key_scales : nullptr,
                                               get(state.positions + at));
            const V maxima = raise_maxima(highest_now, state.piece.maxima + at, state.piece.totals + at, values + half * LANES, shape.padded_dim);
            const V more = Kernel::weigh_half(state, half, sight.count, maxima, has_scales ? state.value_scales : nullptr);
            set(state.piece.totals + at, get(state.piece.totals + at) + more);
        }
        Kernel::add_values(shape, state, sight.count, values);
    }
}

// Totals [padded_dim][PAIR] of a pair to rows of the output, or of a partial result.
inline void write_pair(const Shape& shape, const Flats& flats, const TileSums& sums, int pair) {
    const Unit& unit = flats.unit;
    const float* totals = sums.values + size_t(pair) * size_t(shape.padded_dim) * PAIR;
    alignas(64) float values[LANES][MAX_HEAD_DIM];
    for (int half = 0; half < 2; half++) {
        const int first = pair * PAIR + half * LANES, lanes = std::min(LANES, flats.count - first);
        if (lanes <= 0) return;
        for (int n = 0; n < shape.padded_dim; n += LANES)
            transpose(totals + n * PAIR + half * LANES, PAIR, &values[0][n], MAX_HEAD_DIM);
        for (int i = 0; i < lanes; i++) {
            const int flat = first + i, head = flats.head(flat);
            const float maximum = sums.maxima[flat], total = sums.totals[flat];
            if (unit.partial == nullptr) {
                float* y = unit.queries.out + flats.row(flat) * unit.queries.out_stride + head * shape.dim;
                write_result(shape, head, values[i], maximum, total, y);
                continue;
            }
            const Partial partial = {unit.partial, flats.count, shape.padded_dim};
            std::memcpy(partial.values(flat), values[i], sizeof(float) * size_t(shape.padded_dim));
            partial.maximum(flat) = maximum, partial.total(flat) = total;
        }
    }
}

// One piece of the keys.
template <class Kernel>
void attend_tiles_piece(const Shape& shape, const SamovarStep& step, const Flats& flats, const TileState& state, int first, int last) {
    const size_t at = size_t(flats.unit.first_head) * shape.row_bytes;
    with_format(shape.format, [&](auto format) {
        for (int key = first; key < last; key += KEY_BLOCK) {
            const int count = std::min(KEY_BLOCK, last - key);
            find_keys(flats.unit.queries.table, step.block_size, shape.token_bytes, key, count, state.offsets);
            Kernel::template pack_block<decltype(format)::value>(shape, shape.keys + at, shape.values + at, count, state);
            attend_block<Kernel>(shape, flats, state, key, count);
        }
    });
}

// A unit of one K/V head.
template <class Kernel>
void attend_tiles(const Shape& shape, const SamovarStep& step, const Unit& unit, uint8_t* scratch) {
    const TileState state(shape, scratch);
    const Flats flats(unit, shape);
    const int pairs = flats.pairs();
    for (int i = 0; i < pairs * PAIR; i++) state.positions[i] = float(flats.position(i));
    for (int pair = 0; pair < pairs; pair++)
        Kernel::pack_queries(shape, flats, pair, state.queries + pair * TileState::wide_dim(shape) * PAIR);
    const TileSums* sums = &state.piece;
    for (int key = unit.first_key; key < unit.last_key;) {
        const int end = piece_end(key, TILE_PIECE, unit.last_key);
        state.piece.clear(pairs, shape.padded_dim);
        attend_tiles_piece<Kernel>(shape, step, flats, state, key, end);
        if (key > unit.first_key || end < unit.last_key) {
            if (key == unit.first_key) state.all.clear(pairs, shape.padded_dim);
            state.all.add(state.piece, pairs, shape.padded_dim);
            sums = &state.all;
        }
        key = end;
    }
    for (int pair = 0; pair < pairs; pair++) write_pair(shape, flats, *sums, pair);
}

}  // namespace samovar::SAMOVAR_ISA
