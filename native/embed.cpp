// EMBED: rows of a packed matrix of any format, chosen by the step's token ids, as float32 times a factor.
#include <algorithm>

#include "kernel.h"
#include "layout.h"
#include "pack.h"
#include "simd.h"

namespace samovar::SAMOVAR_ISA {

namespace {

constexpr int64_t CHUNK_VALUES = 4096;

const SamovarMatrix& matrix_of(const Call& call) { return *static_cast<const SamovarMatrix*>(call.instruction->p[0]); }

int64_t rows_of_a_chunk(const Call& call) { return std::max<int64_t>(1, CHUNK_VALUES / matrix_of(call).cols); }

int count_chunks(const Call& call, int phase) {
    return phase == 0 ? int((call.rows() + rows_of_a_chunk(call) - 1) / rows_of_a_chunk(call)) : 0;
}

void run(const Call& call, int, int chunk, Worker&) {
    const SamovarMatrix& m = matrix_of(call);
    const float factor = call.instruction->f[0];
    const int64_t first = chunk * rows_of_a_chunk(call), end = std::min(first + rows_of_a_chunk(call), call.rows());
    for (int64_t row = first; row < end; row++) {
        float* y = call.out(0).data + row * call.out(0).stride;
        const int64_t token = call.step->token_ids[row];
        if (token < 0 || token >= m.rows) {  // places of tokens that are not there, such as another rank's
            std::fill(y, y + m.cols, 0.f);
            continue;
        }
        unpack_row(m, int(token), y);
        if (factor != 1.f)
            for (int k = 0; k < m.cols; k++) y[k] *= factor;
    }
}

const char* refuse(const Call& call) {
    const auto* m = static_cast<const SamovarMatrix*>(call.instruction->p[0]);
    if (!m || !m->data) return "p[0] must give a matrix";
    const Layout layout = layout_of(m->format);
    if (!layout.block) return "the matrix has a format that is not one of weights";
    if (m->rows < 1 || m->cols < 1 || m->cols % layout.block) return "the matrix has sizes that its format cannot have";
    return call.rows() && !call.step->token_ids ? "the step has no token_ids" : nullptr;
}

}  // namespace

extern const Operation embed_operation;
const Operation embed_operation = {count_chunks, run, nullptr, nullptr, refuse};

}  // namespace samovar::SAMOVAR_ISA
