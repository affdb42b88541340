// The C interface of libsamovar: what Python (ctypes) and tests see. No C++ type crosses it.
//
// A model step is a list of instructions over registers. Registers hold activations, float32, row-major, one row per
// token; weights are packed matrices; the K/V cache is the engine's own tensors. All sizes in elements unless a name says
// bytes. Every function that can fail returns 0 on success and writes one line into `error` otherwise.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SAMOVAR_ABI_VERSION 1
#define SAMOVAR_PANEL 16          // rows of a weight that are interleaved
#define SAMOVAR_GROUP 32          // activations that share a scale when they are quantized to int8

// How the numbers of a weight, an embedding or a cache are stored.
enum SamovarFormat {
    SAMOVAR_F32 = 0,
    SAMOVAR_F16 = 1,
    SAMOVAR_BF16 = 2,
    SAMOVAR_I8 = 3,       // per output channel: int8 codes, one float32 scale a row
    SAMOVAR_Q4_0 = 10,    // GGML block formats, named as there
    SAMOVAR_Q4_1 = 11,
    SAMOVAR_Q5_0 = 12,
    SAMOVAR_Q5_1 = 13,
    SAMOVAR_Q8_0 = 14,
    SAMOVAR_Q2_K = 15,
    SAMOVAR_Q3_K = 16,
    SAMOVAR_Q4_K = 17,
    SAMOVAR_Q5_K = 18,
    SAMOVAR_Q6_K = 19,
    SAMOVAR_IQ4_NL = 20,
    SAMOVAR_IQ4_XS = 21,
    SAMOVAR_KV_FP8_E4M3 = 30,  // caches only: torch.float8_e4m3fn
    SAMOVAR_KV_I8 = 31,        // caches only: head_dim int8 codes, then one float32 scale, for each token and head
};

// A packed weight of `rows` output features and `cols` input features; `data` is 64-byte aligned, as samovar_pack made it.
typedef struct SamovarMatrix {
    int32_t format;
    int32_t rows;
    int32_t cols;
    int32_t reserved;
    const void* data;
} SamovarMatrix;

// Operands by operation. x[n], y: registers; m: SamovarMatrix array; w: float32 vectors; rows: which count of the step.
enum SamovarOp {
    // y = embedding rows of the step's token ids, times f[0]. p[0] = one SamovarMatrix [vocab, width].
    SAMOVAR_EMBED = 0,
    // y = x0 / sqrt(mean(x0^2) + f[0]) * w. p[0] = w [width]; i[0] = width; i[1] = segments per row (norm each alone; w is shared
    // by the segments when i[2] is 1, else w is [segments * width]).
    SAMOVAR_RMS_NORM = 1,
    // y = x0 + x1. i[0] = width. y may be x0 or x1.
    SAMOVAR_ADD = 2,
    // y = x0 + x1, and out[1] = rms norm of y with w = p[0], eps = f[0]. i[0] = width. y may be x0 or x1.
    SAMOVAR_ADD_RMS_NORM = 3,
    // y = norm?(x0) W^T + b, written or added to y. i[0] = number of matrices, whose outputs stand side by side;
    // i[1] = 1: add to y; i[2] = columns of x0 (its stride is the register's); i[3] = 1: norm x0 first with w = p[2], eps = f[0].
    // p[0] = matrices, p[1] = bias [sum of rows] or null.
    SAMOVAR_LINEAR = 4,
    // y = act(g) * u, where g, u = norm?(x0) (Wg, Wu)^T + b. As LINEAR with exactly two matrices of equal rows;
    // i[4] = 0: silu, 1: gelu (tanh form), 2: gelu (erf form). y has the rows of one matrix as columns.
    SAMOVAR_GATED_LINEAR = 5,
    // y = act(first half of x0) * second half. i[0] = width of y; i[4] as above.
    SAMOVAR_GATED = 6,
    // x0 holds q, k, v heads side by side, [tokens, (i[0] + 2 i[1]) * i[2]]: i[0] query heads, i[1] K/V heads of i[2].
    // Norms of q and k heads first, if p[2], p[3] (float32 [i[2]]) are given, eps = f[0]; rope by halves (rotate_half) from
    // tables in registers x1 = cos, x2 = sin, [tokens, i[3] / 2] each for the first i[3] of each head (x1 < 0: no rope);
    // q in place, k and v into the cache (p[0] keys, p[1] values: [slots, i[1], i[2]] of format i[4]) at the step's slots.
    SAMOVAR_ROPE_WRITE = 7,
    // y [tokens, i[0] * i[2]] = causal attention of the q heads of x0 (row stride: the register's; first i[0] * i[2] columns)
    // over the cache (as above, i[1] K/V heads of i[2], format i[4]). f[0] = scale, f[1] = softcap or 0; i[5] = window or 0;
    // p[2] = sinks, float32 [i[0]], or null. i[6] = 1: only the last row of every sequence is computed, row n of y is
    // sequence n (the step's `attends` says which sequences).
    SAMOVAR_ATTENTION = 8,
    // y[n] = x0[row_ids[n]] for the step's row list. i[0] = width.
    SAMOVAR_GATHER_ROWS = 9,
    // y = x0 * f[0], then f[1] * tanh(y / f[1]) if f[1] > 0. i[0] = width. y may be x0.
    SAMOVAR_SCALE_CAP = 10,
    // token_ids[n] (int64, p of the step's `argmax_ids`) = index of the largest of x0's row, the first of equals; -1 if it
    // is not finite. i[0] = width.
    SAMOVAR_ARGMAX = 11,
    // cos and sin tables of the step's positions: y, out[1] [tokens, i[3] / 2] = cos, sin of position * p[0][j], times f[0].
    SAMOVAR_ROPE_TABLE = 12,
    SAMOVAR_NUM_OPS = 13,
};

typedef struct SamovarInstruction {
    int32_t op;
    int32_t rows;       // index into SamovarStep.counts
    int32_t in[4];      // registers, -1 for none
    int32_t out[2];
    int32_t i[10];
    float f[4];
    const void* p[6];
} SamovarInstruction;

typedef struct SamovarRegister {
    float* data;
    int64_t stride;     // elements from row to row
} SamovarRegister;

enum { SAMOVAR_COUNT_TOKENS = 0, SAMOVAR_COUNT_ROWS = 1, SAMOVAR_NUM_COUNTS = 2 };

// What varies from step to step.
typedef struct SamovarStep {
    const SamovarRegister* registers;
    int32_t num_registers;
    int32_t num_sequences;
    int64_t counts[SAMOVAR_NUM_COUNTS];
    const int64_t* token_ids;     // [tokens]
    const int64_t* positions;     // [tokens]
    const int64_t* slots;         // [tokens], where k and v are written; negative: nowhere
    const int64_t* row_ids;       // [rows]
    const int32_t* first_rows;    // [num_sequences + 1]
    const int32_t* totals;        // [num_sequences], keys visible to the last row
    const int32_t* tables;        // [num_sequences, table_width] block ids
    int32_t table_width;
    int32_t block_size;
    const int32_t* attends;       // [rows]: the sequence of each row, for attention of last rows
    int64_t* argmax_ids;
} SamovarStep;

typedef struct SamovarTeam SamovarTeam;

#pragma GCC visibility push(default)

// The widest instruction set that this machine and operating system offer: "generic", "avx2", "avx512", "avx512_vnni", "amx".
const char* samovar_best_isa(void);
// Names of every set this library was compiled with, separated by spaces.
const char* samovar_compiled_isas(void);
int32_t samovar_abi_version(void);

// A team of `num_threads` threads, the caller included. `cpus` (or null) pins thread n to cpus[n]. `isa` null: the best.
SamovarTeam* samovar_team_create(int32_t num_threads, const int32_t* cpus, const char* isa, char* error, size_t error_size);
void samovar_team_destroy(SamovarTeam* team);
const char* samovar_team_isa(const SamovarTeam* team);

// Run instructions in order. `instructions` must stay valid and unchanged until the team is destroyed or samovar_forget.
int32_t samovar_run(SamovarTeam* team, const SamovarInstruction* instructions, int32_t count, const SamovarStep* step,
                    char* error, size_t error_size);
// Returns once no thread can look at earlier instructions and steps any more.
void samovar_forget(SamovarTeam* team);
// Seconds that the calling thread waited for others at the end of its work, of `runs` runs, since the last call; and threads in use.
void samovar_team_report(SamovarTeam* team, double* waited, double* ran, int64_t* runs, int32_t* threads_in_use);

// Bytes of memory that the team holds for its runs: what the threads share, and each thread's own. It only grows.
int64_t samovar_team_bytes(const SamovarTeam* team);

// Bytes of a packed weight; 0 if the format cannot hold these sizes (`error` says why).
int64_t samovar_packed_bytes(int32_t format, int32_t rows, int32_t cols, char* error, size_t error_size);
// Bytes of one row of the source of samovar_pack: GGML blocks, or plain numbers. I8: `cols` codes, then the float32 scale.
int64_t samovar_source_row_bytes(int32_t format, int32_t cols);
// Pack `num_rows` source rows, [num_rows, source_row_bytes], to be rows first_row.. of a weight of `rows` x `cols` at `packed`.
// first_row must be a multiple of SAMOVAR_PANEL; num_rows too, unless they are the last. Any thread may pack any part.
int32_t samovar_pack(int32_t format, const void* source, int32_t first_row, int32_t num_rows, int32_t rows, int32_t cols,
                     void* packed, char* error, size_t error_size);
// The reverse, for tests and embeddings: float32 [num_rows, cols].
int32_t samovar_unpack(const SamovarMatrix* matrix, int32_t first_row, int32_t num_rows, float* values, char* error,
                       size_t error_size);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
