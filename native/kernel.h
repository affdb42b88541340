// What an operation is to the team that runs it: phases of chunks. Compiled once; the operations once per instruction set.
//
// Threads run a list of instructions together. A phase is a number of chunks that may run in any order on any thread; it
// is over when all its chunks are done, and only then does the next phase begin. A thread that the system has put aside
// holds up nobody unless it is inside a chunk.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi.h"

namespace samovar {

// One instruction within one step, as every thread sees it.
struct Call {
    const SamovarInstruction* instruction;
    const SamovarStep* step;
    int num_threads;
    uint8_t* shared;        // shared_bytes of this instruction, 64-byte aligned, nobody else's until the instruction is over

    int64_t rows() const { return step->counts[instruction->rows]; }
    const SamovarRegister& in(int n) const { return step->registers[instruction->in[n]]; }
    const SamovarRegister& out(int n) const { return step->registers[instruction->out[n]]; }
};

// A thread while it runs chunks.
struct Worker {
    int thread;
    bool is_first;          // its first chunk of this phase: what it prepares in `scratch` is still there for its next ones
    uint8_t* scratch;       // thread_bytes of this instruction, 64-byte aligned
    void* own;              // what the instruction set needs per thread (tile configuration); set up by Table.enter
};

constexpr int MAX_PHASES = 4;

struct Span {
    const uint8_t* from;
    int64_t bytes;
};
constexpr int MOST_SPANS = 4;

struct Operation {
    // Chunks of a phase, a function of the call alone; 0: there is no such phase, nor a later one. Phases: 0 .. MAX_PHASES - 1.
    int (*chunks)(const Call&, int phase);
    void (*run)(const Call&, int phase, int chunk, Worker&);
    // Memory for a call; null: none. `shared` is not yet set.
    size_t (*shared_bytes)(const Call&);
    size_t (*thread_bytes)(const Call&);
    // Null, or why the call cannot be run (a constant text). Checked before anything runs.
    const char* (*refuse)(const Call&);
    // Not null: chunks read memory one behind the other, so a thread takes them in a row, and only at the end from the rows of
    // others. What thread `thread` will read, MOST_SPANS at most, so that it can be asked for while the thread waits.
    int (*spans)(const Call&, int thread, Span* spans) = nullptr;
    bool in_rows = false;   // without spans, chunks are taken in a row all the same
};

// What one compiled instruction set offers.
struct Table {
    const char* isa;
    Operation operations[SAMOVAR_NUM_OPS];
    void (*enter)();        // once on every thread of a team, before its first chunk; null: nothing to do
};

// Tables by set; null where the set was not compiled for this architecture.
const Table* table_generic();
const Table* table_avx2();
const Table* table_avx512();
const Table* table_avx512_vnni();
const Table* table_amx();

}  // namespace samovar
