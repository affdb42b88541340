// ATTENTION over the paged cache: cuts a step into units, lets a kernel compute each, and merges what was cut by keys.
//
// One query row with few heads per K/V head is decode (attend_few.h); everything else is blocked (attend_tiles.h, on tiles of
// bfloat16 in attend_amx.h unless the cache is float32). Where there are too few units for the threads, the pieces in which a
// kernel takes the keys become units too (FlashDecoding: Dao et al., 2023), and are then folded in their order, just as one
// thread does it: a result depends neither on which thread was faster, nor on how many there are, nor on the batch.
#include <algorithm>

#include "attend_amx.h"
#include "attend_few.h"
#include "attend_few_tiles.h"
#include "attend_tiles.h"

namespace samovar::SAMOVAR_ISA {

namespace {

constexpr int UNITS_PER_THREAD = 4;
constexpr size_t SMALL_BYTES = 32 << 10;   // of keys and values: not worth a second thread

// Which part of the keys a unit with few heads may have, or of the query rows.
#if defined(__AMX_BF16__)
constexpr int FEW_HEADS = 4;
#else
constexpr int FEW_HEADS = MAX_FEW_HEADS;
#endif

// The sequences that a call attends for, whether all their rows or the last ones.
struct Sequences {
    const Call& call;
    const SamovarStep& step;
    bool last_only;
    int count;

    explicit Sequences(const Call& c) : call(c), step(*c.step) {
        last_only = c.instruction->i[6] == 1;
        count = last_only ? int(c.rows()) : step.num_sequences;
    }

    Queries operator[](int n) const {
        const int sequence = last_only ? step.attends[n] : n;
        const int first = last_only ? step.first_rows[sequence + 1] - 1 : step.first_rows[sequence];
        const int rows = last_only ? 1 : step.first_rows[sequence + 1] - first;
        const SamovarRegister &q = call.in(0), &y = call.out(0);
        return {q.data + first * q.stride, q.stride, y.data + (last_only ? n : first) * y.stride, y.stride, rows,
                step.totals[sequence] - rows, step.tables + size_t(sequence) * size_t(step.table_width)};
    }
};

// How every sequence is cut, and what that makes.
struct Cut {
    Shape shape;
    int few_splits;     // units that the K/V heads of a decoding sequence are cut into
    int64_t few_most;   // keys that one unit of those may have before its pieces become units
    int tile_rows;      // query rows of a blocked unit
    int64_t tile_most;
    int64_t units = 0, split_units = 0;  // pieces; and units that have several

    explicit Cut(const Call& call) : shape(call) {
        const Sequences sequences(call);
        const int64_t wanted = call.num_threads == 1 ? 1 : int64_t(call.num_threads) * UNITS_PER_THREAD;
        choose(sequences, wanted);
        for (int n = 0; n < sequences.count; n++) {
            const Queries queries = sequences[n];
            for (int part = 0; part < parts(queries); part++) {
                const int pieces = pieces_of(queries, part);
                units += pieces, split_units += pieces > 1;
            }
        }
    }

    bool is_few(const Queries& queries) const { return queries.count == 1 && shape.group <= FEW_HEADS; }
    int blocks(const Queries& queries) const { return (queries.count + tile_rows - 1) / tile_rows; }
    // Units before keys are cut.
    int parts(const Queries& queries) const { return is_few(queries) ? few_splits : shape.kv_heads * blocks(queries); }

    // Rows, heads and keys of a part. Later rows see more keys: they come first.
    Unit unit(const Queries& queries, int part) const {
        Unit unit = {queries, 0, 1, 0, shape.kv_heads, 0, 0, nullptr};
        if (is_few(queries)) {
            unit.first_head = part * shape.kv_heads / few_splits, unit.last_head = (part + 1) * shape.kv_heads / few_splits;
        } else {
            const int block = blocks(queries) - 1 - part / shape.kv_heads;
            unit.first_row = block * tile_rows, unit.last_row = std::min(unit.first_row + tile_rows, queries.count);
            unit.first_head = part % shape.kv_heads, unit.last_head = unit.first_head + 1;
        }
        unit.first_key = shape.first_key(queries.position + unit.first_row);
        unit.last_key = queries.position + unit.last_row;
        return unit;
    }

    // Units that a part is cut into.
    int pieces_of(const Queries& queries, int part) const {
        const Unit whole = unit(queries, part);
        const bool few = is_few(queries);
        if (whole.last_key - whole.first_key <= (few ? few_most : tile_most)) return 1;
        const int piece = few ? FEW_PIECE : TILE_PIECE;
        return (whole.last_key - 1) / piece - whole.first_key / piece + 1;
    }

    size_t partial_floats() const {
        return Partial::floats(std::max(shape.heads, std::max(tile_rows, 1) * shape.group), shape.padded_dim);
    }

private:
    void choose(const Sequences& sequences, int64_t wanted) {
        int64_t few = 0, few_keys = 0, rows = 0, tile_keys = 0;
        for (int n = 0; n < sequences.count; n++) {
            const Queries queries = sequences[n];
            const int64_t keys = queries.position + queries.count - shape.first_key(queries.position);
            if (is_few(queries)) few++, few_keys += keys;
            else rows += queries.count, tile_keys += keys;
        }
        const bool is_small = size_t(few_keys) * 2 * shape.token_bytes < SMALL_BYTES;
        few_splits = wanted == 1 || is_small || few + rows >= wanted ? 1 : shape.kv_heads;
        few_most = wanted == 1 ? INT32_MAX : std::max<int64_t>(FEW_PIECE, few_keys * few_splits / wanted);
        tile_rows = rows_at_once(shape.group);
        while (tile_rows * shape.group > 2 * PAIR && rows * shape.kv_heads < wanted * tile_rows) tile_rows = (tile_rows + 1) / 2;
        const bool has_enough = wanted == 1 || rows * shape.kv_heads >= wanted * tile_rows;
        tile_most = has_enough ? INT32_MAX : std::max<int64_t>(TILE_PIECE, tile_keys * shape.kv_heads / wanted);
    }
};

// Where a thread stands in the list of units; kept in its scratch from chunk to chunk, for those only increase.
struct Cursor {
    int sequence, part;
    int64_t first_unit, split;  // the number of the part's first piece; split parts before it
};

// The part of the `wanted`-th piece, or (by_split) the `wanted`-th part that is cut into pieces; its pieces.
int find(const Cut& cut, const Sequences& sequences, int64_t wanted, bool by_split, Cursor& at) {
    for (; at.sequence < sequences.count; at.sequence++, at.part = 0) {
        const Queries queries = sequences[at.sequence];
        for (const int parts = cut.parts(queries); at.part < parts; at.part++) {
            const int pieces = cut.pieces_of(queries, at.part);
            if (by_split ? pieces > 1 && at.split == wanted : wanted < at.first_unit + pieces) return pieces;
            at.first_unit += pieces, at.split += pieces > 1;
        }
    }
    return 0;
}

float* partial_of(const Call& call, const Cut& cut, int64_t unit) {
    return reinterpret_cast<float*>(call.shared) + size_t(unit) * cut.partial_floats();
}

void run_unit(const Call& call, const Cut& cut, const Unit& unit, [[maybe_unused]] const Unit* next, uint8_t* scratch) {
    const Shape& shape = cut.shape;
#if defined(__AMX_TILE__)
    if (cut.is_few(unit.queries) && has_few_tiles(shape, call.step->block_size))
        return attend_few_tiles(shape, *call.step, unit, next, scratch);
#endif
    if (cut.is_few(unit.queries)) return attend_few(shape, *call.step, unit, scratch);
#if defined(__AMX_BF16__)
    if (shape.format != SAMOVAR_F32) return attend_tiles<AmxKernel>(shape, *call.step, unit, scratch);
#endif
    attend_tiles<FloatKernel>(shape, *call.step, unit, scratch);
}

// One query of one head from its pieces, in their order.
void merge_flat(const Call& call, const Cut& cut, const Unit& unit, int64_t first, int pieces, int flat) {
    const Shape& shape = cut.shape;
    const int flats = unit.flats(shape), heads = (unit.last_head - unit.first_head) * shape.group;
    const int head = unit.first_head * shape.group + flat % heads, row = unit.first_row + flat / heads;
    float maximum = NO_MAXIMUM, total = 0;
    alignas(64) float values[MAX_HEAD_DIM] = {};
    for (int n = 0; n < pieces; n++) {
        const Partial piece = {partial_of(call, cut, first + n), flats, shape.padded_dim};
        fold(values, maximum, total, piece.values(flat), piece.maximum(flat), piece.total(flat), shape.padded_dim);
    }
    float* y = unit.queries.out + row * unit.queries.out_stride + head * shape.dim;
    write_result(shape, head, values, maximum, total, y);
}

// Piece `n` of a unit.
Unit piece_of(const Cut& cut, Unit unit, int n) {
    const int size = cut.is_few(unit.queries) ? FEW_PIECE : TILE_PIECE, start = (unit.first_key / size + n) * size;
    unit.last_key = std::min(unit.last_key, start + size), unit.first_key = std::max(unit.first_key, start);
    return unit;
}

// A thread's scratch: the cut and the cursor, then the kernel's.
struct Own {
    Cut cut;
    Cursor cursor;
};
constexpr size_t OWN_BYTES = (sizeof(Own) + 63) / 64 * 64;

void run(const Call& call, int phase, int chunk, Worker& worker) {
    Own& own = *reinterpret_cast<Own*>(worker.scratch);
    if (worker.is_first) new (&own) Own{Cut(call), {0, 0, 0, 0}};
    const Sequences sequences(call);
    const Cut& cut = own.cut;
    // Units may be asked for in any order, though they hardly are.
    if (chunk < (phase == 0 ? own.cursor.first_unit : own.cursor.split)) own.cursor = {0, 0, 0, 0};
    const int pieces = find(cut, sequences, chunk, phase == 1, own.cursor);
    Unit unit = cut.unit(sequences[own.cursor.sequence], own.cursor.part);
    if (phase == 1) {
        const int flats = unit.flats(cut.shape);
        for (int flat = 0; flat < flats; flat++) merge_flat(call, cut, unit, own.cursor.first_unit, pieces, flat);
        return;
    }
    if (pieces > 1) {
        unit = piece_of(cut, unit, int(chunk - own.cursor.first_unit));
        unit.partial = partial_of(call, cut, chunk);
    }
    // Chunks are taken in a row: the next one is likely to be this thread's, too.
    Unit next;
    bool has_next = false;
    if (Cursor after = own.cursor; chunk + 1 < cut.units) {
        const int next_pieces = find(cut, sequences, chunk + 1, false, after);
        next = cut.unit(sequences[after.sequence], after.part);
        if (next_pieces > 1) next = piece_of(cut, next, int(chunk + 1 - after.first_unit));
        has_next = cut.is_few(next.queries);
    }
    run_unit(call, cut, unit, has_next ? &next : nullptr, worker.scratch + OWN_BYTES);
}

int count_chunks(const Call& call, int phase) {
    if (phase > 1) return 0;
    const Cut cut(call);
    return int(phase == 0 ? cut.units : cut.split_units);
}

size_t shared_bytes(const Call& call) {
    const Cut cut(call);
    return cut.split_units > 0 ? sizeof(float) * size_t(cut.units) * cut.partial_floats() : 0;
}

size_t thread_bytes(const Call& call) {
    const Shape shape(call);
    size_t bytes = std::max(FewState::bytes(shape), TileState::bytes(shape));
#if defined(__AMX_TILE__)
    bytes = std::max(bytes, FewTilesState::bytes(shape));
#endif
    return OWN_BYTES + bytes;
}

const char* refuse(const Call& call) {
    const SamovarInstruction& it = *call.instruction;
    const SamovarStep& step = *call.step;
    if (it.i[0] < 1 || it.i[1] < 1 || it.i[0] % it.i[1]) return "i[0], the query heads, must be a multiple of i[1], the K/V heads";
    if (const char* why = refuse_cache(it.i[4], it.i[2])) return why;
    if (it.p[0] == nullptr || it.p[1] == nullptr) return "p[0] and p[1], the caches, must be given";
    if (step.first_rows == nullptr || step.totals == nullptr || step.tables == nullptr || step.block_size < 1)
        return "the step has no first_rows, totals, tables or block_size";
    if (it.i[6] == 1 && step.attends == nullptr) return "i[6] is 1, but attends of the step is null";
    return nullptr;
}

}  // namespace

extern const Operation attention_operation = {count_chunks, run, shared_bytes, thread_bytes, refuse, nullptr, true};

}  // namespace samovar::SAMOVAR_ISA
