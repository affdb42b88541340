// Products with plain weights, float32, float16 and bfloat16: float32 activations, float32 sums, fused multiply-add.
//
// A loaded vector of sixteen rows of a weight is used for up to eight rows of activations, whose numbers are repeated in all
// lanes. Sums are cut every 256 columns, which keeps their rounding error small, and every output is summed in the same order
// however many rows there are: with float32 weights a row's result is the same, bit for bit, alone or in a batch.
#pragma once

#include "lanes.h"
#include "layout.h"

namespace samovar::SAMOVAR_ISA {

constexpr int PLAIN_ROWS = 8;     // most rows of one plain_multiply_few
constexpr int SUM_COLS = 256;     // columns that are summed before they are added to the total
constexpr int PREFETCH = 2048;    // bytes ahead of the weights in use; the next panel follows in memory

// Rows and panels whose sums fit into the registers of the set.
#if defined(__AVX512F__)
constexpr int KERNEL_ROWS = 8, KERNEL_PANELS = 2;
#elif defined(__AVX__) || defined(__aarch64__)
constexpr int KERNEL_ROWS = 4, KERNEL_PANELS = 1;
#else
constexpr int KERNEL_ROWS = 2, KERNEL_PANELS = 1;
#endif

SAMOVAR_INLINE void prefetch(const void* from) { __builtin_prefetch(from, 0, 3); }

// Sixteen rows' weights of two neighbouring columns.
struct Columns {
    V even, odd;
};

#if !defined(__AVX512F__)
// float16 in the low half of every lane: shifted into float32's place and multiplied by 2^112, which is right for denormal
// numbers too; infinities and NaN keep all bits of their exponent.
SAMOVAR_INLINE Part half_part(BitPart bits) {
    const BitPart magnitude = (bits & 0x7fffu) << 13;
    const Part value = (Part)magnitude * 0x1p112f;
    const BitPart special = (BitPart)(magnitude >= (0x7c00u << 13));
    return (Part)((special & (magnitude | 0x7f800000u)) | (~special & (BitPart)value) | ((bits & 0x8000u) << 16));
}
#endif

template <int FORMAT>
SAMOVAR_INLINE Columns load_columns(const uint8_t* from) {
    Columns w;
#if defined(__AVX512F__)
    if constexpr (FORMAT == SAMOVAR_F16) {
        const __m512 first = (__m512)from_f16(from), second = (__m512)from_f16(from + 32);
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        w.even.part[0] = (Part)_mm512_permutex2var_ps(first, even, second);
        w.odd.part[0] = (Part)_mm512_permutex2var_ps(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), second);
        return w;
    }
#endif
    BitPart bits[PARTS];
    std::memcpy(bits, from, sizeof bits);
    SAMOVAR_EACH_PART {
#if !defined(__AVX512F__)
        if constexpr (FORMAT == SAMOVAR_F16) {
            w.even.part[p] = half_part(bits[p] & 0xffffu);
            w.odd.part[p] = half_part(bits[p] >> 16);
            continue;
        }
#endif
        w.even.part[p] = (Part)(bits[p] << 16);
        w.odd.part[p] = (Part)(bits[p] & 0xffff0000u);
    }
    return w;
}

// Sums of columns [first, end) of one or two panels; `first` is even.
template <int FORMAT, int ROWS, int PANELS>
SAMOVAR_INLINE void sum_columns(const uint8_t* panel, int64_t panel_bytes, const float* x, int64_t stride, int first, int end,
                                V (&sums)[PANELS][ROWS]) {
    if constexpr (FORMAT == SAMOVAR_F32) {
        for (int k = first; k < end; k++) {
            const uint8_t* from = panel + int64_t(k) * 64;
            for (int n = 0; n < PANELS; n++) {
                prefetch(from + n * panel_bytes + PREFETCH);
                const V w = get(reinterpret_cast<const float*>(from + n * panel_bytes));
                for (int r = 0; r < ROWS; r++) sums[n][r] = fma(w, x[r * stride + k], sums[n][r]);
            }
        }
    } else {
        // Few sums are kept apart by the columns' parity: one chain of additions would be slower than the memory.
        constexpr bool apart = ROWS * PANELS <= 4;
        V odds[PANELS][ROWS] = {};
        int k = first;
        for (; k + 2 <= end; k += 2) {
            const uint8_t* from = panel + int64_t(k) * 32;
            for (int n = 0; n < PANELS; n++) {
                prefetch(from + n * panel_bytes + PREFETCH);
                const Columns w = load_columns<FORMAT>(from + n * panel_bytes);
                for (int r = 0; r < ROWS; r++) {
                    sums[n][r] = fma(w.even, x[r * stride + k], sums[n][r]);
                    V& odd = apart ? odds[n][r] : sums[n][r];
                    odd = fma(w.odd, x[r * stride + k + 1], odd);
                }
            }
        }
        if (k < end)
            for (int n = 0; n < PANELS; n++) {
                const Columns w = load_columns<FORMAT>(panel + n * panel_bytes + int64_t(k) * 32);
                for (int r = 0; r < ROWS; r++) sums[n][r] = fma(w.even, x[r * stride + k], sums[n][r]);
            }
        if constexpr (apart)
            for (int n = 0; n < PANELS; n++)
                for (int r = 0; r < ROWS; r++) sums[n][r] = sums[n][r] + odds[n][r];
    }
}

// out[panel][row]: the products of `ROWS` rows of x with one or two panels.
template <int FORMAT, int ROWS, int PANELS>
void multiply_plain(const uint8_t* panel, int64_t panel_bytes, const float* x, int64_t stride, int cols, float* out) {
    for (int first = 0; first < cols; first += SUM_COLS) {
        const int end = cols < first + SUM_COLS ? cols : first + SUM_COLS;
        V sums[PANELS][ROWS] = {};
        sum_columns<FORMAT, ROWS, PANELS>(panel, panel_bytes, x, stride, first, end, sums);
        for (int n = 0; n < PANELS; n++)
            for (int r = 0; r < ROWS; r++) {
                float* total = out + (n * ROWS + r) * LANES;
                set(total, first == 0 ? sums[n][r] : get(total) + sums[n][r]);
            }
    }
}

typedef void (*PlainKernel)(const uint8_t* panel, int64_t panel_bytes, const float* x, int64_t stride, int cols, float* out);

template <int FORMAT, int PANELS>
SAMOVAR_INLINE PlainKernel plain_kernel(int rows) {
    if constexpr (KERNEL_ROWS == 8) {
        constexpr PlainKernel more[4] = {multiply_plain<FORMAT, 5, PANELS>, multiply_plain<FORMAT, 6, PANELS>,
                                         multiply_plain<FORMAT, 7, PANELS>, multiply_plain<FORMAT, 8, PANELS>};
        if (rows > 4) return more[rows - 5];
    }
    if constexpr (KERNEL_ROWS >= 4) {
        if (rows > 2) return rows == 3 ? multiply_plain<FORMAT, 3, PANELS> : multiply_plain<FORMAT, 4, PANELS>;
    }
    return rows == 1 ? multiply_plain<FORMAT, 1, PANELS> : multiply_plain<FORMAT, 2, PANELS>;
}

// The kernel for 1 to KERNEL_ROWS rows and 1 to KERNEL_PANELS panels.
inline PlainKernel choose_plain(int format, int rows, int panels) {
    const bool one = panels == 1;
    switch (format) {
        case SAMOVAR_F32: return one ? plain_kernel<SAMOVAR_F32, 1>(rows) : plain_kernel<SAMOVAR_F32, KERNEL_PANELS>(rows);
        case SAMOVAR_F16: return one ? plain_kernel<SAMOVAR_F16, 1>(rows) : plain_kernel<SAMOVAR_F16, KERNEL_PANELS>(rows);
        default: return one ? plain_kernel<SAMOVAR_BF16, 1>(rows) : plain_kernel<SAMOVAR_BF16, KERNEL_PANELS>(rows);
    }
}

// Panels [first, end) of a matrix with up to PLAIN_ROWS rows of x, `stride` elements apart. emit(panel, row, V c): sixteen
// outputs of a row, each once.
template <typename Emit>
SAMOVAR_INLINE void plain_multiply_few(const SamovarMatrix& m, int first, int end, const float* x, int64_t stride, int rows,
                                       Emit&& emit) {
    const int64_t panel_bytes = planes_of(m.format, m.cols).bytes;
    alignas(64) float out[KERNEL_PANELS * KERNEL_ROWS * LANES];
    for (int p = first; p < end; p += KERNEL_PANELS) {
        const int panels = end - p < KERNEL_PANELS ? end - p : KERNEL_PANELS;
        const uint8_t* panel = static_cast<const uint8_t*>(m.data) + p * panel_bytes;
        for (int row = 0; row < rows; row += KERNEL_ROWS) {
            const int count = rows - row < KERNEL_ROWS ? rows - row : KERNEL_ROWS;
            choose_plain(m.format, count, panels)(panel, panel_bytes, x + row * stride, stride, m.cols, out);
            for (int n = 0; n < panels; n++)
                for (int r = 0; r < count; r++) emit(p + n, row + r, get(out + (n * count + r) * LANES));
        }
    }
}

}  // namespace samovar::SAMOVAR_ISA
