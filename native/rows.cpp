// Operations on rows of float32: norms (RMS norm: Zhang & Sennrich, 2019), sums, gates, gathering, scaling, rope tables.
//
// Every row stands for itself, so a chunk is a few rows; chunks are of about CHUNK_ELEMENTS so that short steps stay on one
// thread, for which waking others would cost more than the work.
#include <algorithm>

#include "activations.h"
#include "kernel.h"
#include "simd.h"

namespace samovar::SAMOVAR_ISA {

namespace {

constexpr int64_t CHUNK_ELEMENTS = 8192;

// Columns of a row that an operation touches.
int64_t row_elements(const Call& call) {
    const SamovarInstruction& it = *call.instruction;
    switch (it.op) {
        case SAMOVAR_RMS_NORM: return int64_t(it.i[0]) * std::max(it.i[1], 1);
        case SAMOVAR_ROPE_TABLE: return 8 * int64_t(it.i[3]);  // a sine costs as much as many sums
        case SAMOVAR_GATED: return 2 * int64_t(it.i[0]);
        default: return it.i[0];
    }
}

int64_t rows_of_a_chunk(const Call& call) { return std::max<int64_t>(1, CHUNK_ELEMENTS / std::max<int64_t>(1, row_elements(call))); }

int count_chunks(const Call& call, int phase) {
    const int64_t step = rows_of_a_chunk(call);
    return phase == 0 ? int((call.rows() + step - 1) / step) : 0;
}

template <typename F>
SAMOVAR_INLINE void each_row(const Call& call, int chunk, F&& work) {
    const int64_t step = rows_of_a_chunk(call), first = chunk * step, last = std::min(first + step, call.rows());
    for (int64_t row = first; row < last; row++) work(row);
}

SAMOVAR_INLINE float* row_of(const SamovarRegister& r, int64_t row) { return r.data + row * r.stride; }

// work(offset, lanes) for a row of `width`: full vectors, then what is left.
template <typename F>
SAMOVAR_INLINE void each_vector(int width, F&& work) {
    int at = 0;
    for (; at + LANES <= width; at += LANES) work(at, LANES);
    if (at < width) work(at, width - at);
}

SAMOVAR_INLINE F32 take(const float* from, int lanes) { return lanes == LANES ? load<F32>(from) : load_some(from, lanes); }

SAMOVAR_INLINE void put(float* to, F32 value, int lanes) {
    if (lanes == LANES) store(to, value);
    else store_some(to, value, lanes);
}

// 1 / sqrt(mean of squares + eps), summed in four vectors.
SAMOVAR_INLINE float inverse_rms(const float* x, int width, float eps) {
    F32 total[4] = {};
    int at = 0;
    for (; at + 4 * LANES <= width; at += 4 * LANES)
        for (int k = 0; k < 4; k++) {
            F32 v = load<F32>(x + at + k * LANES);
            total[k] = fma(v, v, total[k]);
        }
    each_vector(width - at, [&](int offset, int lanes) {
        F32 v = take(x + at + offset, lanes);
        total[0] = fma(v, v, total[0]);
    });
    return 1.f / std::sqrt(sum((total[0] + total[1]) + (total[2] + total[3])) / float(width) + eps);
}

SAMOVAR_INLINE void normalize(const float* x, const float* w, float* y, int width, float eps) {
    const F32 scale = splat(inverse_rms(x, width, eps));
    each_vector(width, [&](int at, int lanes) { put(y + at, take(x + at, lanes) * scale * take(w + at, lanes), lanes); });
}

void run_rms_norm(const Call& call, int, int chunk, Worker&) {
    const SamovarInstruction& it = *call.instruction;
    const int width = it.i[0], segments = std::max(it.i[1], 1), weight_step = it.i[2] == 1 ? 0 : width;
    const float* w = static_cast<const float*>(it.p[0]);
    each_row(call, chunk, [&](int64_t row) {
        const float* x = row_of(call.in(0), row);
        float* y = row_of(call.out(0), row);
        for (int s = 0; s < segments; s++) normalize(x + s * width, w + s * weight_step, y + s * width, width, it.f[0]);
    });
}

SAMOVAR_INLINE void add_rows(const float* a, const float* b, float* y, int width) {
    each_vector(width, [&](int at, int lanes) { put(y + at, take(a + at, lanes) + take(b + at, lanes), lanes); });
}

void run_add(const Call& call, int, int chunk, Worker&) {
    each_row(call, chunk, [&](int64_t row) {
        add_rows(row_of(call.in(0), row), row_of(call.in(1), row), row_of(call.out(0), row), call.instruction->i[0]);
    });
}

void run_add_rms_norm(const Call& call, int, int chunk, Worker&) {
    const SamovarInstruction& it = *call.instruction;
    const float* w = static_cast<const float*>(it.p[0]);
    each_row(call, chunk, [&](int64_t row) {
        float* total = row_of(call.out(0), row);
        add_rows(row_of(call.in(0), row), row_of(call.in(1), row), total, it.i[0]);
        normalize(total, w, row_of(call.out(1), row), it.i[0], it.f[0]);
    });
}

template <int KIND>
void gate_rows(const Call& call, int chunk) {
    const int width = call.instruction->i[0];
    each_row(call, chunk, [&](int64_t row) {
        const float* gate = row_of(call.in(0), row);
        float* y = row_of(call.out(0), row);
        each_vector(width, [&](int at, int lanes) {
            put(y + at, activate(KIND, take(gate + at, lanes)) * take(gate + width + at, lanes), lanes);
        });
    });
}

void run_gated(const Call& call, int, int chunk, Worker&) {
    switch (call.instruction->i[4]) {
        case SILU: return gate_rows<SILU>(call, chunk);
        case GELU_TANH: return gate_rows<GELU_TANH>(call, chunk);
        default: return gate_rows<GELU_ERF>(call, chunk);
    }
}

void run_gather_rows(const Call& call, int, int chunk, Worker&) {
    each_row(call, chunk, [&](int64_t row) {
        const float* from = row_of(call.in(0), call.step->row_ids[row]);
        std::memcpy(row_of(call.out(0), row), from, sizeof(float) * size_t(call.instruction->i[0]));
    });
}

void run_scale_cap(const Call& call, int, int chunk, Worker&) {
    const SamovarInstruction& it = *call.instruction;
    const float scale = it.f[0], cap = it.f[1];
    each_row(call, chunk, [&](int64_t row) {
        const float* x = row_of(call.in(0), row);
        float* y = row_of(call.out(0), row);
        each_vector(it.i[0], [&](int at, int lanes) {
            F32 v = take(x + at, lanes) * scale;
            put(y + at, cap > 0.f ? cap * tanh(v / cap) : v, lanes);
        });
    });
}

// The angle is a float32 product, as the models were trained with; the library's sine is exact for however many turns.
void run_rope_table(const Call& call, int, int chunk, Worker&) {
    const SamovarInstruction& it = *call.instruction;
    const float* per_position = static_cast<const float*>(it.p[0]);
    each_row(call, chunk, [&](int64_t row) {
        const float position = float(call.step->positions[row]);
        float *cosines = row_of(call.out(0), row), *sines = row_of(call.out(1), row);
        for (int j = 0; j < it.i[3] / 2; j++) {
            const float angle = position * per_position[j];
            cosines[j] = std::cos(angle) * it.f[0];
            sines[j] = std::sin(angle) * it.f[0];
        }
    });
}

const char* refuse_rows(const Call& call) { return call.instruction->i[0] < 1 ? "i[0], the width, must be positive" : nullptr; }

const char* refuse_norm(const Call& call) {
    return call.instruction->p[0] == nullptr ? "p[0], the weight of the norm, is null" : refuse_rows(call);
}

const char* refuse_gated(const Call& call) {
    const int kind = call.instruction->i[4];
    return kind < SILU || kind > GELU_ERF ? "i[4], the activation, must be 0, 1 or 2" : refuse_rows(call);
}

const char* refuse_table(const Call& call) {
    const SamovarInstruction& it = *call.instruction;
    if (it.p[0] == nullptr) return "p[0], the angles per position, is null";
    return it.i[3] < 2 || it.i[3] % 2 ? "i[3], the rotary width, must be even and positive" : nullptr;
}

}  // namespace

extern const Operation rms_norm_operation = {count_chunks, run_rms_norm, nullptr, nullptr, refuse_norm};
extern const Operation add_operation = {count_chunks, run_add, nullptr, nullptr, refuse_rows};
extern const Operation add_rms_norm_operation = {count_chunks, run_add_rms_norm, nullptr, nullptr, refuse_norm};
extern const Operation gated_operation = {count_chunks, run_gated, nullptr, nullptr, refuse_gated};
extern const Operation gather_rows_operation = {count_chunks, run_gather_rows, nullptr, nullptr, refuse_rows};
extern const Operation scale_cap_operation = {count_chunks, run_scale_cap, nullptr, nullptr, refuse_rows};
extern const Operation rope_table_operation = {count_chunks, run_rope_table, nullptr, nullptr, refuse_table};

}  // namespace samovar::SAMOVAR_ISA
