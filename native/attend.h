// What the kernels of attention share: the sizes of a call, the way to a key in the paged cache, and where results go.
#pragma once

#include <algorithm>

#include "cache.h"
#include "kernel.h"
#include "lanes.h"

namespace samovar::SAMOVAR_ISA {

constexpr float LOG2_E = 1.44269504f;
constexpr float NO_MAXIMUM = -1e30f;   // of no key yet
constexpr float HIDDEN = -3e38f;       // score of a key that a query does not see: 2^(HIDDEN - NO_MAXIMUM) is 0
constexpr int KEY_BLOCK = 64;          // keys that are scored, and then weighed, together

constexpr int FEW_PIECE = 256;         // keys after which sums start anew and are folded into the earlier ones: what may be
constexpr int TILE_PIECE = 1024;       // computed by several threads gives the same bits when one computes it

constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

// The numbers of an ATTENTION instruction.
struct Shape {
    int heads, kv_heads, group, dim, padded_dim, format, window;
    float scale, softcap;
    const float* sinks;
    const uint8_t *keys, *values;
    size_t row_bytes, token_bytes;

    explicit Shape(const Call& call) {
        const SamovarInstruction& it = *call.instruction;
        heads = it.i[0], kv_heads = it.i[1], dim = it.i[2], format = it.i[4], window = it.i[5];
        group = heads / kv_heads, padded_dim = round_up(dim, LANES);
        scale = it.f[0], softcap = it.f[1];
        keys = static_cast<const uint8_t*>(it.p[0]), values = static_cast<const uint8_t*>(it.p[1]);
        sinks = static_cast<const float*>(it.p[2]);
        row_bytes = cache_row_bytes(format, dim), token_bytes = row_bytes * size_t(kv_heads);
    }

    // What a query is multiplied with so that its dot products are exponents of 2 (or, capped, the argument of tanh).
    float query_factor() const { return softcap > 0 ? scale / softcap : scale * LOG2_E; }
    // The first key that the query at `position` sees.
    int first_key(int position) const { return window > 0 ? std::max(0, position - window + 1) : 0; }
};

// The queries of one sequence in a step, one row or more: query n stands at position `position + n`.
struct Queries {
    const float* rows;
    int64_t stride;
    float* out;
    int64_t out_stride;
    int count, position;
    const int32_t* table;
};

// Part of the work: queries first_row .. last_row of a sequence with the heads of first_head .. last_head of the cache,
// over keys first_key .. last_key.
struct Unit {
    Queries queries;
    int first_row, last_row, first_head, last_head, first_key, last_key;
    float* partial;  // null: the result is final and goes to queries.out; else it is one piece's, as `Partial` describes

    int flats(const Shape& shape) const { return (last_row - first_row) * (last_head - first_head) * shape.group; }
};

// The sums of a piece, to be folded: for each query of each head (`flat`), the unscaled sum of values [padded_dim], and
// behind all of those the maximum and the sum of weights.
struct Partial {
    float* data;
    int flats, padded_dim;

    float* values(int flat) const { return data + size_t(flat) * padded_dim; }
    float& maximum(int flat) const { return data[size_t(flats) * padded_dim + flat]; }
    float& total(int flat) const { return data[size_t(flats) * (padded_dim + 1) + flat]; }
    static size_t floats(int flats, int padded_dim) { return size_t(flats) * (padded_dim + 2); }
};

// Where the piece ends that `key` is in.
constexpr int piece_end(int key, int piece, int last_key) { return std::min(last_key, (key / piece + 1) * piece); }

// a * b + c as every lane of `fma` computes it.
SAMOVAR_INLINE float sum_of(float a, float b, float c) { return fma(fill(a), b, fill(c)).part[0][0]; }

SAMOVAR_INLINE float power_of_two(float x) { return exp2(fill(x)).part[0][0]; }

// The sums of a later piece into those of all before it.
SAMOVAR_INLINE void fold(float* values, float& maximum, float& total, const float* more, float its_maximum, float its_total,
                         int padded_dim) {
    const float most = std::max(maximum, its_maximum), shrink = power_of_two(maximum - most), weight = power_of_two(its_maximum - most);
    for (int n = 0; n < padded_dim; n += LANES) set(values + n, fma(get(more + n), weight, get(values + n) * shrink));
    total = sum_of(its_total, weight, total * shrink);
    maximum = most;
}

// Byte offsets of the tokens of keys first .. first + count in a cache: keys and values lie alike.
inline void find_keys(const int32_t* table, int block_size, size_t token_bytes, int first, int count, size_t* offsets) {
    int at = first % block_size;
    const int32_t* block = table + first / block_size;
    for (int n = 0; n < count;) {
        const int run = std::min(count - n, block_size - at);
        size_t offset = (size_t(*block++) * size_t(block_size) + size_t(at)) * token_bytes;
        for (int i = 0; i < run; i++, offset += token_bytes) offsets[n + i] = offset;
        n += run, at = 0;
    }
}

// The weight of a sink, which has no value, in units of 2^maximum; may raise the maximum, by which the rest is then scaled.
struct Sink {
    float rescale, weight;

    Sink(const Shape& shape, int head, float maximum) : rescale(1.f), weight(0.f) {
        if (shape.sinks == nullptr) return;
        const float score = shape.sinks[head] * LOG2_E, most = std::max(score, maximum);
        rescale = std::exp2(maximum - most), weight = std::exp2(score - most);
    }
};

// y[0 .. dim) = values / total, a sink counted in.
SAMOVAR_INLINE void write_result(const Shape& shape, int head, const float* values, float maximum, float total, float* y) {
    const Sink sink(shape, head, maximum);
    const float factor = sink.rescale / (total * sink.rescale + sink.weight);
    int n = 0;
    for (; n + LANES <= shape.dim; n += LANES) set(y + n, get(values + n) * factor);
    if (n < shape.dim) set(y + n, get(values + n, 8) * factor, 8);
}

// Calls work(constant of the format).
template <typename F>
SAMOVAR_INLINE void with_format(int format, F&& work) {
    switch (format) {
        case SAMOVAR_F32: return work(std::integral_constant<int, SAMOVAR_F32>());
        case SAMOVAR_F16: return work(std::integral_constant<int, SAMOVAR_F16>());
        case SAMOVAR_BF16: return work(std::integral_constant<int, SAMOVAR_BF16>());
        case SAMOVAR_KV_FP8_E4M3: return work(std::integral_constant<int, SAMOVAR_KV_FP8_E4M3>());
        default: return work(std::integral_constant<int, SAMOVAR_KV_I8>());
    }
}

}  // namespace samovar::SAMOVAR_ISA
