// A list of instructions as a team runs it: checked, and cut into phases.
#pragma once

#include <vector>

#include "kernel.h"

namespace samovar {

struct Phase {
    int instruction;
    int phase;
    int64_t chunks;
    bool is_stream;              // its operation has spans
    bool in_rows;                // chunks are taken in a row, whether it has spans or not
    int64_t next_stream = -1;    // the next phase that is one, the first one behind the last; -1: none
};

// One run: instructions, this step's numbers, and what they ask for.
struct Program {
    const Table* table = nullptr;
    const SamovarInstruction* instructions = nullptr;
    int count = 0;
    const SamovarStep* step = nullptr;
    int num_threads = 1;
    uint8_t* shared = nullptr;

    std::vector<Phase> phases;   // those that have chunks, in order
    size_t shared_bytes = 0;     // memory with which every instruction can do
    size_t thread_bytes = 0;

    Call call(int n) const { return {instructions + n, step, num_threads, shared}; }
    const Operation& operation(int n) const { return table->operations[instructions[n].op]; }
    void run(const Phase& phase, int64_t chunk, Worker& worker) const {
        operation(phase.instruction).run(call(phase.instruction), phase.phase, int(chunk), worker);
    }

    // What a thread reads in a phase that is a stream.
    int spans(const Phase& phase, int thread, Span* spans) const {
        return operation(phase.instruction).spans(call(phase.instruction), thread, spans);
    }

    // Fills `phases` and the sizes; false, and why in `error`, if an instruction cannot run.
    bool prepare(char* error, size_t error_size);
};

constexpr int64_t MOST_CHUNKS = int64_t(1) << 22;

// Writes one line as printf would, and returns false.
bool refuse(char* error, size_t error_size, const char* format, ...) __attribute__((format(printf, 3, 4)));

}  // namespace samovar
