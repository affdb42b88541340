// Checks lists of instructions, so that nothing is refused halfway through a step, and finds their phases.
#include "program.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

namespace samovar {

namespace {

constexpr const char* NAMES[SAMOVAR_NUM_OPS] = {
    "EMBED", "RMS_NORM", "ADD", "ADD_RMS_NORM", "LINEAR", "GATED_LINEAR", "GATED", "ROPE_WRITE", "ATTENTION", "GATHER_ROWS",
    "SCALE_CAP", "ARGMAX", "ROPE_TABLE",
};

// Null, or what is wrong with the numbers that every operation has.
const char* complaint(const SamovarInstruction& instruction, const SamovarStep& step) {
    if (instruction.rows < 0 || instruction.rows >= SAMOVAR_NUM_COUNTS) return "its rows name no count of the step";
    if (step.counts[instruction.rows] < 0) return "its count of rows is negative";
    for (int in : instruction.in)
        if (in < -1 || in >= step.num_registers) return "an input is not a register of the step";
    for (int out : instruction.out)
        if (out < -1 || out >= step.num_registers) return "an output is not a register of the step";
    return nullptr;
}

}  // namespace

bool refuse(char* error, size_t error_size, const char* format, ...) {
    if (error == nullptr || error_size == 0) return false;
    va_list values;
    va_start(values, format);
    std::vsnprintf(error, error_size, format, values);
    va_end(values);
    return false;
}

bool Program::prepare(char* error, size_t error_size) {
    phases.clear();
    shared_bytes = thread_bytes = 0;
    for (int n = 0; n < count; n++) {
        const int op = instructions[n].op;
        if (op < 0 || op >= SAMOVAR_NUM_OPS)
            return refuse(error, error_size, "instruction %d: there is no operation %d", n, op);
        const Operation& operation = table->operations[op];
        if (operation.run == nullptr || operation.chunks == nullptr)
            return refuse(error, error_size, "instruction %d: %s is not built for %s", n, NAMES[op], table->isa);
        if (const char* why = complaint(instructions[n], *step))
            return refuse(error, error_size, "instruction %d (%s): %s", n, NAMES[op], why);
        const Call call = this->call(n);
        if (call.rows() == 0) continue;
        if (const char* why = operation.refuse ? operation.refuse(call) : nullptr)
            return refuse(error, error_size, "instruction %d (%s): %s", n, NAMES[op], why);
        if (operation.shared_bytes) shared_bytes = std::max(shared_bytes, operation.shared_bytes(call));
        if (operation.thread_bytes) thread_bytes = std::max(thread_bytes, operation.thread_bytes(call));
        for (int phase = 0; phase < MAX_PHASES; phase++) {
            const int64_t chunks = operation.chunks(call, phase);
            if (chunks <= 0) break;
            if (chunks > MOST_CHUNKS)
                return refuse(error, error_size, "instruction %d (%s): %lld chunks of work, at most %lld are possible", n,
                              NAMES[op], (long long)chunks, (long long)MOST_CHUNKS);
            phases.push_back({n, phase, chunks, operation.spans != nullptr, operation.spans != nullptr || operation.in_rows});
        }
    }
    int64_t next = -1;
    for (int round = 0; round < 2; round++)
        for (int64_t n = int64_t(phases.size()) - 1; n >= 0; n--) {
            phases[n].next_stream = next;
            if (phases[n].is_stream) next = n;
        }
    return true;
}

}  // namespace samovar
