// The operations of one instruction set, side by side. Compiled once per set, like the sources of the operations.
#include "kernel.h"

#ifndef SAMOVAR_ISA
#error "compile with -DSAMOVAR_ISA=<name of the instruction set>"
#endif

#define SAMOVAR_JOIN(a, b) a##b
#define SAMOVAR_TABLE(isa) SAMOVAR_JOIN(table_, isa)
#define SAMOVAR_TEXT(name) #name
#define SAMOVAR_NAME(isa) SAMOVAR_TEXT(isa)

namespace samovar {

namespace SAMOVAR_ISA {

#if defined(SAMOVAR_HAS_linear)
extern const Operation linear_operation, gated_linear_operation;
__attribute__((weak)) void enter_thread();  // defined where a thread needs a preparation, such as of tile registers
#endif
#if defined(SAMOVAR_HAS_embed)
extern const Operation embed_operation;
#endif
#if defined(SAMOVAR_HAS_rows)
extern const Operation rms_norm_operation, add_operation, add_rms_norm_operation, gated_operation, gather_rows_operation,
    scale_cap_operation;
#endif
#if defined(SAMOVAR_HAS_rope)
extern const Operation rope_write_operation, rope_table_operation;
#endif
#if defined(SAMOVAR_HAS_attention)
extern const Operation attention_operation;
#endif
#if defined(SAMOVAR_HAS_argmax)
extern const Operation argmax_operation;
#endif

namespace {

Table fill() {
    Table table = {SAMOVAR_NAME(SAMOVAR_ISA), {}, nullptr};
    [[maybe_unused]] Operation* operations = table.operations;
#if defined(SAMOVAR_HAS_linear)
    operations[SAMOVAR_LINEAR] = linear_operation;
    operations[SAMOVAR_GATED_LINEAR] = gated_linear_operation;
    table.enter = enter_thread;
#endif
#if defined(SAMOVAR_HAS_embed)
    operations[SAMOVAR_EMBED] = embed_operation;
#endif
#if defined(SAMOVAR_HAS_rows)
    operations[SAMOVAR_RMS_NORM] = rms_norm_operation;
    operations[SAMOVAR_ADD] = add_operation;
    operations[SAMOVAR_ADD_RMS_NORM] = add_rms_norm_operation;
    operations[SAMOVAR_GATED] = gated_operation;
    operations[SAMOVAR_GATHER_ROWS] = gather_rows_operation;
    operations[SAMOVAR_SCALE_CAP] = scale_cap_operation;
#endif
#if defined(SAMOVAR_HAS_rope)
    operations[SAMOVAR_ROPE_WRITE] = rope_write_operation;
    operations[SAMOVAR_ROPE_TABLE] = rope_table_operation;
#endif
#if defined(SAMOVAR_HAS_attention)
    operations[SAMOVAR_ATTENTION] = attention_operation;
#endif
#if defined(SAMOVAR_HAS_argmax)
    operations[SAMOVAR_ARGMAX] = argmax_operation;
#endif
    return table;
}

}  // namespace

}  // namespace SAMOVAR_ISA

const Table* SAMOVAR_TABLE(SAMOVAR_ISA)() {
    static const Table table = SAMOVAR_ISA::fill();
    return &table;
}

}  // namespace samovar
