// ARGMAX: the index of the largest of a row, the first of equals; -1 for rows whose largest is not a finite number.
//
// A vocabulary is long and rows are few, so a row is cut into parts that threads search alone; a second phase compares the
// parts in their order, so that the result does not depend on who was faster.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernel.h"
#include "simd.h"

namespace samovar::SAMOVAR_ISA {

namespace {

constexpr int MIN_PART = 4096;
constexpr int CHUNKS_PER_THREAD = 4;

struct Found {
    float value;  // NaN if the part holds one
    int32_t index;
};

// Parts of one row.
int count_parts(const Call& call) {
    const int64_t rows = std::max<int64_t>(call.rows(), 1), wanted = int64_t(call.num_threads) * CHUNKS_PER_THREAD;
    if (call.num_threads == 1) return 1;
    const int64_t width = call.instruction->i[0];
    return int(std::max<int64_t>(1, std::min((wanted + rows - 1) / rows, width / MIN_PART)));
}

Found search(const float* x, int first, int last) {
    I32 lane = {};
    for (int i = 0; i < LANES; i++) lane[i] = i;
    F32 most = splat(-std::numeric_limits<float>::infinity()), sick = {};
    I32 where = lane * 0 + first, at = lane + first;
    int i = first;
    for (; i + LANES <= last; i += LANES) {
        const F32 v = load<F32>(x + i);
        const I32 better = v > most;
        most = better ? v : most;
        where = better ? at : where;
        sick = fma(v, splat(0.f), sick);  // NaN from the first NaN or infinity on
        at = at + LANES;
    }
    Found best = {most[0], where[0]};
    for (int k = 1; k < LANES; k++)
        if (most[k] > best.value || (most[k] == best.value && where[k] < best.index)) best = {most[k], where[k]};
    bool has_nan = false;
    if (std::isnan(sum(sick)))
        for (int k = first; k < i; k++) has_nan |= std::isnan(x[k]);
    for (; i < last; i++) {
        has_nan |= std::isnan(x[i]);
        if (x[i] > best.value) best = {x[i], i};
    }
    return has_nan ? Found{std::numeric_limits<float>::quiet_NaN(), first} : best;
}

int count_chunks(const Call& call, int phase) {
    const int parts = count_parts(call);
    if (phase == 0) return int(call.rows()) * parts;
    return phase == 1 && parts > 1 && call.rows() > 0 ? 1 : 0;
}

void conclude(const Call& call, int64_t row, Found best) { call.step->argmax_ids[row] = std::isfinite(best.value) ? best.index : -1; }

void compare_parts(const Call& call, int parts) {
    const Found* found = reinterpret_cast<const Found*>(call.shared);
    for (int64_t row = 0; row < call.rows(); row++) {
        Found best = found[row * parts];
        for (int part = 1; part < parts; part++) {
            const Found& other = found[row * parts + part];
            if (std::isnan(other.value) || other.value > best.value) best = other;
            if (std::isnan(best.value)) break;
        }
        conclude(call, row, best);
    }
}

void run(const Call& call, int phase, int chunk, Worker&) {
    const int parts = count_parts(call), width = call.instruction->i[0];
    if (phase == 1) return compare_parts(call, parts);
    const int64_t row = chunk / parts, part = chunk % parts;
    const SamovarRegister& x = call.in(0);
    const Found best = search(x.data + row * x.stride, int(part * width / parts), int((part + 1) * width / parts));
    if (parts == 1) conclude(call, row, best);
    else reinterpret_cast<Found*>(call.shared)[chunk] = best;
}

size_t shared_bytes(const Call& call) { return sizeof(Found) * size_t(call.rows()) * size_t(count_parts(call)); }

const char* refuse(const Call& call) {
    if (call.instruction->i[0] < 1) return "i[0], the width, must be positive";
    return call.step->argmax_ids == nullptr && call.rows() > 0 ? "argmax_ids of the step is null" : nullptr;
}

}  // namespace

extern const Operation argmax_operation = {count_chunks, run, shared_bytes, nullptr, refuse};

}  // namespace samovar::SAMOVAR_ISA
