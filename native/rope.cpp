// ROPE_WRITE: what stands between the joint projection and attention, for one layer: norms of the heads of queries and keys,
// the rotary embedding (Su et al., 2021; halves of a head paired), and the step's keys and values into the paged cache.
#include <algorithm>

#include "cache.h"
#include "kernel.h"
#include "lanes.h"

namespace samovar::SAMOVAR_ISA {

namespace {

constexpr int64_t CHUNK_ELEMENTS = 8192;

int64_t tokens_of_a_chunk(const Call& call) {
    const SamovarInstruction& it = *call.instruction;
    return std::max<int64_t>(1, CHUNK_ELEMENTS / std::max<int64_t>(1, (int64_t(it.i[0]) + 2 * it.i[1]) * it.i[2]));
}

int count_chunks(const Call& call, int phase) {
    const int64_t step = tokens_of_a_chunk(call);
    return phase == 0 ? int((call.rows() + step - 1) / step) : 0;
}

SAMOVAR_INLINE V take(const float* from, int lanes) { return lanes == LANES ? get(from) : get(from, lanes); }

SAMOVAR_INLINE void put(float* to, V value, int lanes) {
    if (lanes == LANES) set(to, value);
    else set(to, value, lanes);
}

SAMOVAR_INLINE void norm_head(const float* x, const float* w, float* y, int dim, float eps) {
    V total = fill(0.f);
    for (int n = 0; n < dim; n += LANES) {
        const V v = take(x + n, std::min(LANES, dim - n));
        total = fma(v, v, total);
    }
    const float scale = 1.f / std::sqrt(sum(total) / float(dim) + eps);
    for (int n = 0; n < dim; n += LANES) {
        const int lanes = std::min(LANES, dim - n);
        put(y + n, take(x + n, lanes) * scale * take(w + n, lanes), lanes);
    }
}

// In place. `half` is half of the rotary width; null tables: no rope.
SAMOVAR_INLINE void turn_head(float* x, const float* cosines, const float* sines, int half) {
    for (int n = 0; n < half; n += LANES) {
        const int lanes = std::min(LANES, half - n);
        const V a = take(x + n, lanes), b = take(x + half + n, lanes);
        const V c = take(cosines + n, lanes), s = take(sines + n, lanes);
        put(x + n, a * c - b * s, lanes);
        put(x + half + n, b * c + a * s, lanes);
    }
}

struct Head {
    int dim, half;
    const float *cosines, *sines;
    float eps;

    void norm_and_turn(const float* x, const float* w, float* y) const {
        if (w != nullptr) norm_head(x, w, y, dim, eps);
        else if (x != y) std::memcpy(y, x, sizeof(float) * size_t(dim));
        if (cosines != nullptr) turn_head(y, cosines, sines, half);
    }
};

void run_token(const Call& call, int64_t row) {
    const SamovarInstruction& it = *call.instruction;
    const int heads = it.i[0], kv_heads = it.i[1], dim = it.i[2], format = it.i[4];
    const bool has_rope = it.in[1] >= 0;
    const Head head = {dim, it.i[3] / 2, has_rope ? call.in(1).data + row * call.in(1).stride : nullptr,
                       has_rope ? call.in(2).data + row * call.in(2).stride : nullptr, it.f[0]};
    float* q = call.in(0).data + row * call.in(0).stride;
    for (int n = 0; n < heads; n++) head.norm_and_turn(q + n * dim, static_cast<const float*>(it.p[2]), q + n * dim);
    const int64_t slot = call.step->slots[row];
    if (slot < 0) return;
    const size_t bytes = cache_row_bytes(format, dim);
    const size_t at = size_t(slot) * size_t(kv_heads) * bytes;
    uint8_t* keys = static_cast<uint8_t*>(const_cast<void*>(it.p[0])) + at;
    uint8_t* values = static_cast<uint8_t*>(const_cast<void*>(it.p[1])) + at;
    const float *k = q + heads * dim, *v = k + kv_heads * dim;
    alignas(64) float turned[MAX_HEAD_DIM];
    for (int n = 0; n < kv_heads; n++) {
        head.norm_and_turn(k + n * dim, static_cast<const float*>(it.p[3]), turned);
        write_row(format, turned, dim, keys + n * bytes);
        write_row(format, v + n * dim, dim, values + n * bytes);
    }
}

void run(const Call& call, int, int chunk, Worker&) {
    const int64_t step = tokens_of_a_chunk(call), first = chunk * step, last = std::min(first + step, call.rows());
    for (int64_t row = first; row < last; row++) run_token(call, row);
}

const char* refuse(const Call& call) {
    const SamovarInstruction& it = *call.instruction;
    if (it.i[0] < 0 || it.i[1] < 1) return "i[0] and i[1], the numbers of heads, must be positive";
    if (const char* why = refuse_cache(it.i[4], it.i[2])) return why;
    if (it.p[0] == nullptr || it.p[1] == nullptr) return "p[0] and p[1], the caches, must be given";
    if (it.in[1] >= 0 && (it.in[2] < 0 || it.i[3] < 2 || it.i[3] % 2 || it.i[3] > it.i[2]))
        return "rope needs cos, sin and an even rotary width i[3] of at most the head size";
    return nullptr;
}

}  // namespace

extern const Operation rope_write_operation = {count_chunks, run, nullptr, nullptr, refuse};

}  // namespace samovar::SAMOVAR_ISA
