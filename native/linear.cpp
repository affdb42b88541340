// LINEAR and GATED_LINEAR: what surrounds the products. The input's norm and its int8 or bfloat16 form, chunks of panels, and
// what follows a finished product: bias, the sum with y, the gate.
//
// Each matrix of a call goes one of three ways: int8 dot products of few rows (small.h), plain numbers of few rows (plain.h),
// or the blocked products of many rows (wide.h). A short input is prepared by every thread for itself at its first chunk,
// which is cheaper than waiting for each other; a long one by all together in a phase before.
#include <algorithm>
#include <new>

#include "activations.h"
#include "kernel.h"
#include "plain.h"
#include "small.h"
#include "wide.h"

namespace samovar::SAMOVAR_ISA {

namespace {

constexpr int64_t OWN_VALUES = 8192;        // longest input that every thread prepares for itself
constexpr int64_t PREPARED_VALUES = 8192;   // input of one chunk of the phase that prepares it
constexpr int64_t CHUNK_BYTES = 24576;      // least weight of one chunk, at one row
constexpr int CHUNKS_PER_THREAD = 12;       // so that a thread that is late leaves little undone
constexpr int CHUNKS_PER_SHARE = 8;         // the same where they become smaller
constexpr int64_t ROW_BLOCK = 64;           // rows of a chunk that are multiplied without wide.h

enum class Way { INT8, PLAIN, WIDE };

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// What the functions of an operation derive from a call.
struct Plan {
    const SamovarInstruction& it;
    const SamovarMatrix* matrices;
    int count, cols, panels_per_row_block = 0;
    bool gated;
    int64_t rows;
    const float* norm;
    bool has[3] = {};       // by way
    int64_t weight = 0;     // bytes of all matrices

    explicit Plan(const Call& call)
        : it(*call.instruction), matrices(static_cast<const SamovarMatrix*>(it.p[0])), count(it.i[0]), cols(it.i[2]),
          gated(it.op == SAMOVAR_GATED_LINEAR), rows(call.rows()), norm(it.i[3] ? static_cast<const float*>(it.p[2]) : nullptr) {
        for (int n = 0; n < count; n++) {
            has[int(way(n))] = true;
            weight += num_panels(matrices[n].rows) * planes_of(matrices[n].format, cols).bytes;
        }
    }

    Way way(int n) const {
        const SamovarMatrix& m = matrices[n];
        const bool wide = gated ? wide_pays(matrices[0], matrices[1], rows) : wide_pays(m, rows);
        return wide ? Way::WIDE : is_plain(m.format) ? Way::PLAIN : Way::INT8;
    }

    bool has_way(Way way) const { return has[int(way)]; }

    // Matrices whose chunks are counted: a gated pair is one.
    int products() const { return gated ? 1 : count; }

    bool in_shares() const { return !has_way(Way::WIDE) && rows <= ROW_BLOCK; }

    // Every thread prepares the input for itself; then there is one phase only.
    bool is_own() const { return !has_way(Way::WIDE) && rows * cols <= OWN_VALUES; }

    // The prepared input: lines of int8, then normed rows for plain numbers, then what wide.h makes of it.
    size_t lines_bytes() const { return has_way(Way::INT8) ? rows * num_lines(cols) * sizeof(Line) : 0; }
    size_t normed_bytes() const { return has_way(Way::PLAIN) && norm ? aligned(rows * cols * sizeof(float)) : 0; }
    size_t prepared_bytes() const {
        const size_t bytes = lines_bytes() + normed_bytes();
        return has_way(Way::WIDE) ? bytes + wide_input(matrices, count, rows).bytes() : bytes;
    }
};

// ---------------------------------------------------------------------------------------------- the input

void prepare_row(const Call& call, const Plan& plan, int64_t row, uint8_t* prepared, float* normed_row) {
    const SamovarRegister& x = call.in(0);
    const float* values = x.data + row * x.stride;
    const float scale = plan.norm ? rms_scale(values, plan.cols, plan.it.f[0]) : 1.f;
    if (plan.has_way(Way::INT8)) {
        Line* lines = reinterpret_cast<Line*>(prepared) + row * num_lines(plan.cols);
        quantize_row(values, plan.norm, scale, plan.cols, lines);
    }
    if (plan.norm && plan.has_way(Way::PLAIN))
        norm_row(values, plan.norm, scale, plan.cols, reinterpret_cast<float*>(prepared + plan.lines_bytes()) + row * plan.cols);
    if (!plan.has_way(Way::WIDE)) return;
    if (plan.norm) {
        norm_row(values, plan.norm, scale, plan.cols, normed_row);
        values = normed_row;
    }
    wide_prepare(wide_input(plan.matrices, plan.count, plan.rows), row, values,
                 prepared + plan.lines_bytes() + plan.normed_bytes());
}

int64_t prepared_rows(const Plan& plan) { return std::max<int64_t>(1, PREPARED_VALUES / plan.cols); }

// ---------------------------------------------------------------------------------------------- chunks of the product

// How a matrix (of a gated pair: both) is cut: `panels` x `rows`, `across` x `down` chunks.
struct Cut {
    int panels, across;
    int64_t rows, down;
    int chunks() const { return int(across * down); }
};

// Work grows with the bytes to read and, beyond two rows, with the products.
int64_t wanted_chunks(const Plan& plan, int64_t most) {
    return std::clamp<int64_t>(plan.weight * std::max<int64_t>(1, plan.rows / 2) / CHUNK_BYTES, 1, most);
}

Cut cut_of(const Plan& plan, int n, int num_threads) {
    const SamovarMatrix& m = plan.matrices[n];
    const int panels = num_panels(m.rows);
    Cut cut;
    if (plan.way(n) == Way::WIDE) {
        const WideSplit split = wide_split(m, plan.rows, num_threads, plan.gated);
        cut.panels = split.panels;
        cut.rows = split.rows;
    } else {
        const int64_t wanted = wanted_chunks(plan, int64_t(num_threads) * CHUNKS_PER_THREAD);
        const int64_t panel_bytes = planes_of(m.format, plan.cols).bytes * (plan.gated ? 2 : 1);
        cut.panels = int(std::clamp<int64_t>(plan.weight / (wanted * panel_bytes), 1, panels));
        cut.rows = ROW_BLOCK;
    }
    cut.across = (panels + cut.panels - 1) / cut.panels;
    cut.down = (plan.rows + cut.rows - 1) / cut.rows;
    return cut;
}

// Few rows: the panels of all matrices stand in a row, of which every thread has a share. Chunks become smaller towards the end
// of a share, so that threads have little left when the first of them is done.
struct Shares {
    int64_t panels = 0, shares, each;

    Shares(const Plan& plan, int num_threads) {
        for (int n = 0; n < plan.products(); n++) panels += num_panels(plan.matrices[n].rows);
        const int64_t wanted = wanted_chunks(plan, int64_t(num_threads) * CHUNKS_PER_SHARE);
        shares = std::min<int64_t>({num_threads, wanted, panels});
        each = std::min(wanted, panels) / shares;
    }

    int64_t chunks() const { return shares * each; }
    // The first panel of a chunk; of the one behind the last, the number of panels.
    int begin(int64_t chunk) const {
        const int64_t share = chunk / each, n = chunk % each, first = panels * share / shares, end = panels * (share + 1) / shares;
        return int(first + (end - first) * n * (2 * each + 1 - n) / (each * (each + 1)));
    }
};

// ---------------------------------------------------------------------------------------------- what follows a product

struct Epilogue {
    float* y;
    int64_t stride;
    const float* bias;
    const float* up_bias;
    int width;              // outputs of the matrix
    int activation;
    bool adds;

    Epilogue(const Call& call, const Plan& plan, int n) {
        int64_t before = 0;
        for (int i = 0; i < n; i++) before += plan.matrices[i].rows;
        const auto* all = static_cast<const float*>(plan.it.p[1]);
        y = call.out(0).data + before;
        stride = call.out(0).stride;
        width = plan.matrices[n].rows;
        bias = all ? all + before : nullptr;
        up_bias = all ? all + width : nullptr;
        activation = plan.it.i[4];
        adds = plan.it.i[1] != 0;
    }

    SAMOVAR_INLINE static V plus(V c, const float* from, int count) {
        return c + (count == LANES ? get(from) : get(from, count));
    }

    SAMOVAR_INLINE void write(int64_t row, int at, int count, V c) const {
        float* to = y + row * stride + at;
        if (adds) c = plus(c, to, count);
        if (count == LANES) set(to, c);
        else set(to, c, count);
    }

    SAMOVAR_INLINE void put(int panel, int64_t row, V c) const {
        const int at = panel * SAMOVAR_PANEL, count = std::min(width - at, SAMOVAR_PANEL);
        write(row, at, count, bias ? plus(c, bias + at, count) : c);
    }

    SAMOVAR_INLINE void put_gated(int panel, int64_t row, V gate, V up) const {
        const int at = panel * SAMOVAR_PANEL, count = std::min(width - at, SAMOVAR_PANEL);
        if (bias) {
            gate = plus(gate, bias + at, count);
            up = plus(up, up_bias + at, count);
        }
        F32 wide_gate;
        std::memcpy(&wide_gate, &gate, sizeof gate);
        wide_gate = activate(activation, wide_gate);
        std::memcpy(&gate, &wide_gate, sizeof gate);
        write(row, at, count, gate * up);
    }
};

// ---------------------------------------------------------------------------------------------- the product

struct Block {
    int first_panel, end_panel;
    int64_t first_row, end_row;
};

void multiply_wide(const Call& call, const Plan& plan, int n, const Block& block, const uint8_t* prepared, uint8_t* scratch) {
    const Epilogue epilogue(call, plan, n);
    wide_multiply(wide_input(plan.matrices, plan.count, plan.rows), plan.matrices[n], plan.gated ? plan.matrices + 1 : nullptr,
                  block.first_panel, block.end_panel, block.first_row, block.end_row,
                  prepared + plan.lines_bytes() + plan.normed_bytes(), scratch,
                  [&](int panel, int64_t row, int count, const float* c, const float* up) {
                      for (int r = 0; r < count; r++) {
                          const V value = get(c + r * LANES);
                          if (up) epilogue.put_gated(panel, row + r, value, get(up + r * LANES));
                          else epilogue.put(panel, row + r, value);
                      }
                  });
}

// emit(panel, row within `rows`, V c) for at most PLAIN_ROWS rows of int8 or plain numbers.
template <typename Emit>
void multiply_rows(const Call& call, const Plan& plan, int n, int first_panel, int end_panel, int64_t row, int rows,
                   const uint8_t* prepared, Emit&& emit) {
    const SamovarMatrix& m = plan.matrices[n];
    if (plan.way(n) == Way::INT8) {
        const Line* lines = reinterpret_cast<const Line*>(prepared) + row * num_lines(plan.cols);
        return multiply_few(m, first_panel, end_panel, lines, rows, emit);
    }
    const SamovarRegister& x = call.in(0);
    const float* normed = reinterpret_cast<const float*>(prepared + plan.lines_bytes());
    const float* values = plan.norm ? normed + row * plan.cols : x.data + row * x.stride;
    plain_multiply_few(m, first_panel, end_panel, values, plan.norm ? plan.cols : x.stride, rows, emit);
}

void multiply_small(const Call& call, const Plan& plan, int n, const Block& block, const uint8_t* prepared) {
    const Epilogue epilogue(call, plan, n);
    // Panel by panel, so that its weights come from the cache for all rows but the first.
    for (int panel = block.first_panel; panel < block.end_panel; panel++)
        for (int64_t row = block.first_row; row < block.end_row; row += PLAIN_ROWS) {
            const int rows = int(std::min<int64_t>(PLAIN_ROWS, block.end_row - row));
            if (plan.gated) {
                V gates[PLAIN_ROWS];
                multiply_rows(call, plan, 0, panel, panel + 1, row, rows, prepared, [&](int, int r, V c) { gates[r] = c; });
                multiply_rows(call, plan, 1, panel, panel + 1, row, rows, prepared,
                              [&](int p, int r, V c) { epilogue.put_gated(p, row + r, gates[r], c); });
            } else {
                multiply_rows(call, plan, n, panel, panel + 1, row, rows, prepared,
                              [&](int p, int r, V c) { epilogue.put(p, row + r, c); });
            }
        }
}

// What a thread works out at its first chunk of a phase and keeps in its scratch.
struct Own {
    Plan plan;
    Shares shares;

    explicit Own(const Call& call) : plan(call), shares(plan, call.num_threads) {}
};
constexpr size_t OWN_BYTES = (sizeof(Own) + 63) / 64 * 64;

void multiply_share(const Call& call, const Own& own, int chunk, const uint8_t* prepared) {
    int first = own.shares.begin(chunk), end = own.shares.begin(chunk + 1);
    for (int n = 0; n < own.plan.products() && end > 0; n++) {
        const int panels = num_panels(own.plan.matrices[n].rows);
        if (first < panels) multiply_small(call, own.plan, n, {std::max(first, 0), std::min(end, panels), 0, own.plan.rows}, prepared);
        first -= panels;
        end -= panels;
    }
}

void multiply_chunk(const Call& call, const Own& own, int chunk, const uint8_t* prepared, uint8_t* scratch) {
    const Plan& plan = own.plan;
    if (plan.in_shares()) return multiply_share(call, own, chunk, prepared);
    int n = 0;
    Cut cut = cut_of(plan, n, call.num_threads);
    while (chunk >= cut.chunks()) {
        chunk -= cut.chunks();
        cut = cut_of(plan, ++n, call.num_threads);
    }
    // Chunks of the same panels follow each other.
    const int across = int(chunk / cut.down);
    const int64_t down = chunk % cut.down;
    const Block block = {across * cut.panels, std::min((across + 1) * cut.panels, num_panels(plan.matrices[n].rows)),
                         down * cut.rows, std::min((down + 1) * cut.rows, plan.rows)};
    if (plan.way(n) == Way::WIDE) multiply_wide(call, plan, n, block, prepared, scratch);
    else multiply_small(call, plan, n, block, prepared);
}

// ---------------------------------------------------------------------------------------------- the operation

int count_chunks(const Call& call, int phase) {
    if (call.rows() == 0) return 0;
    const Plan plan(call);
    const bool prepares = phase == 0 && !plan.is_own();
    if (prepares) return int((plan.rows + prepared_rows(plan) - 1) / prepared_rows(plan));
    if (phase > (plan.is_own() ? 0 : 1)) return 0;
    if (plan.in_shares()) return int(Shares(plan, call.num_threads).chunks());
    int chunks = 0;
    for (int n = 0; n < plan.products(); n++) chunks += cut_of(plan, n, call.num_threads).chunks();
    return chunks;
}

void run(const Call& call, int phase, int chunk, Worker& worker) {
    if (worker.is_first) new (worker.scratch) Own(call);
    const Own& own = *reinterpret_cast<const Own*>(worker.scratch);
    const Plan& plan = own.plan;
    uint8_t* scratch = worker.scratch + OWN_BYTES;
    if (plan.is_own()) {
        if (worker.is_first)
            for (int64_t row = 0; row < plan.rows; row++) prepare_row(call, plan, row, scratch, nullptr);
        return multiply_chunk(call, own, chunk, scratch, nullptr);
    }
    if (phase == 1) return multiply_chunk(call, own, chunk, call.shared, scratch);
    const int64_t first = chunk * prepared_rows(plan), end = std::min(first + prepared_rows(plan), plan.rows);
    for (int64_t row = first; row < end; row++) prepare_row(call, plan, row, call.shared, reinterpret_cast<float*>(scratch));
}

size_t shared_bytes(const Call& call) {
    const Plan plan(call);
    return plan.is_own() ? 0 : plan.prepared_bytes();
}

size_t thread_bytes(const Call& call) {
    const Plan plan(call);
    if (plan.is_own()) return OWN_BYTES + plan.prepared_bytes();
    size_t bytes = plan.norm ? plan.cols * sizeof(float) : 0;
    for (int n = 0; n < plan.count; n++)
        if (plan.way(n) == Way::WIDE) bytes = std::max(bytes, wide_thread_bytes(plan.matrices[n], plan.gated));
    return OWN_BYTES + bytes;
}

// The share of a thread in the weights.
int find_spans(const Call& call, int thread, Span* spans) {
    const Plan plan(call);
    if (!plan.in_shares()) return 0;
    const Shares shares(plan, call.num_threads);
    if (thread >= shares.shares) return 0;
    int first = shares.begin(thread * shares.each), end = shares.begin((thread + 1) * shares.each), count = 0;
    for (int n = 0; n < plan.products(); n++) {
        const int panels = num_panels(plan.matrices[n].rows), from = std::max(first, 0), until = std::min(end, panels);
        for (int i = n; i < (plan.gated ? 2 : n + 1) && from < until && count < MOST_SPANS; i++) {
            const int64_t bytes = planes_of(plan.matrices[i].format, plan.cols).bytes;
            spans[count++] = {static_cast<const uint8_t*>(plan.matrices[i].data) + from * bytes, (until - from) * bytes};
        }
        first -= panels;
        end -= panels;
    }
    return count;
}

const char* refuse(const Call& call) {
    const SamovarInstruction& it = *call.instruction;
    const auto* matrices = static_cast<const SamovarMatrix*>(it.p[0]);
    if (!matrices || it.i[0] < 1) return "p[0] and i[0] must give at least one matrix";
    for (int n = 0; n < it.i[0]; n++) {
        const Layout layout = layout_of(matrices[n].format);
        if (!layout.block) return "a matrix has a format that is not one of weights";
        if (matrices[n].cols != it.i[2]) return "a matrix does not have i[2] columns";
        if (matrices[n].cols < 1 || matrices[n].cols % layout.block) return "the columns of a matrix do not fill its blocks";
        if (matrices[n].rows < 1 || !matrices[n].data) return "a matrix has no rows or no data";
    }
    if (it.i[3] && !it.p[2]) return "i[3] asks for a norm of the input, but p[2] is null";
    if (it.op != SAMOVAR_GATED_LINEAR) return nullptr;
    if (it.i[0] != 2 || matrices[0].rows != matrices[1].rows) return "a gated product needs two matrices of equal rows";
    return it.i[4] < SILU || it.i[4] > GELU_ERF ? "i[4] is not an activation" : nullptr;
}

}  // namespace

extern const Operation linear_operation, gated_linear_operation;
const Operation linear_operation = {count_chunks, run, shared_bytes, thread_bytes, refuse, find_spans};
const Operation gated_linear_operation = linear_operation;

void enter_thread();
void enter_thread() { wide_enter(); }

}  // namespace samovar::SAMOVAR_ISA
