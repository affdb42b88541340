// Which instruction sets this library holds, and which of them the machine and its operating system can run.
#pragma once

#include "kernel.h"

namespace samovar {

struct InstructionSet {
    const char* name;
    const Table* (*table)();  // null: not compiled for this architecture, or by this compiler
    bool (*is_usable)();      // asks the processor and the system
};

constexpr int NUM_SETS = 5;

// From the least to the most capable.
extern const InstructionSet INSTRUCTION_SETS[NUM_SETS];

// The set of that name, null if there is none; a null name: the best that is compiled and usable.
const InstructionSet* find_set(const char* name);

}  // namespace samovar
