// Products of a few rows of int8 activations with the panels of a quantized weight.
//
// A group's codes are loaded and taken apart once, for up to MAX_ROWS rows at a time; every row then has eight dot
// products of four bytes a lane, exact in int32, and the scales of both sides are applied in float32. Codes are unsigned:
// an offset is a multiple of the activations' sum, with which the int32 totals begin; a minimum is multiplied by it aside.
#pragma once

#include "codes.h"

namespace samovar::SAMOVAR_ISA {

constexpr int MAX_ROWS = 4;

// What a panel is multiplied with: `lines` of row 0, `stride` lines from row to row.
struct Panel {
    const uint8_t* data;
    Planes planes;
    int groups;
    const Line* lines;
    int64_t stride;
};

// Four-bit codes of one row: high nibbles stay where they are, sixteen times too large, and the low ones' total is shifted
// instead of all codes; the result is sixteen times too large, exactly.
template <int FORMAT, int ROWS>
constexpr bool is_sixteenfold() {
#if defined(__AVX512VNNI__)
    return ROWS == 1 && value_bits(FORMAT) == 4;
#else
    return false;
#endif
}

template <int FORMAT>
SAMOVAR_INLINE IntPart sixteenfold_total(const uint8_t* low, const Line& line) {
    CodePart lows[4], highs[4];
    for (int v = 0; v < 4; v++) {
        const CodePart pair = load<CodePart>(low + 64 * v);
        lows[v] = pair & 15;
        highs[v] = pair & 240;
    }
    const IntPart from_low = dot_half<4>(IntPart{}, lows, line.codes), from = start<code_offset(FORMAT) ? 128 : 0>(line.minus128);
    return (from_low << 4) + dot_half<8>(from, highs, line.codes + 16);
}

// The int32 total of a group and a row.
template <int FORMAT, int ROWS>
SAMOVAR_INLINE IntPart total_of(const CodePart* quads, const uint8_t* low, const Line& line) {
    if constexpr (is_sixteenfold<FORMAT, ROWS>()) return sixteenfold_total<FORMAT>(low, line);
    constexpr int bits = value_bits(FORMAT);
    const IntPart first = dot_half<bits>(start<code_offset(FORMAT)>(line.minus128), quads, line.codes);
    return dot_half<bits>(first, quads + 4, line.codes + 16);
}

// How far ahead memory is asked for codes: into the second-level cache, then into the first. The processor does so by itself
// only within a page of 4 KB, and never across the end of a plane.
constexpr int64_t CODES_FAR = 16384, CODES_NEAR = 1024;

// Bytes of a group of a panel, all its planes.
template <int FORMAT>
constexpr int group_bytes() {
    constexpr Layout layout = layout_of(FORMAT);
    const int halves = layout.half ? 32 * layout.half / (layout.half_columns / SAMOVAR_GROUP) : 0;
    return 64 * (layout.low_bits + layout.high_bits) + 16 * layout.sub + halves;
}

// Asks for as many bytes as a group has, from `next` on and on behind it; the first part of a panel does so for the others.
template <int FORMAT>
SAMOVAR_INLINE void ask_ahead(const uint8_t*& next, int at) {
    if (at > 0) return;
    for (int i = 0; i < group_bytes<FORMAT>(); i += 64) {
        __builtin_prefetch(next + CODES_FAR + i, 0, 2);
        __builtin_prefetch(next + CODES_NEAR + i, 0, 3);
    }
    next += group_bytes<FORMAT>();
}

// Formats whose scales are float16 numbers of 32 columns, and I8. `at`: the first row of the part within the panel.
template <int FORMAT, int ROWS>
SAMOVAR_INLINE void multiply_flat(const Panel& panel, int at, float* out) {
    constexpr Layout layout = layout_of(FORMAT);
    constexpr bool sixteenfold = is_sixteenfold<FORMAT, ROWS>();
    const uint8_t *low = panel.data + 4 * at, *high = low + panel.planes.high, *next = panel.data;
    const uint8_t* half = panel.data + panel.planes.half + 2 * at;
    Part totals[ROWS] = {}, minima[ROWS] = {};
    for (int g = 0; g < panel.groups; g++) {
        ask_ahead<FORMAT>(next, at);
        CodePart quads[8];
        if constexpr (!sixteenfold) take_codes<FORMAT>(low, high, quads);
        Part scale = {}, minimum = {};
        if constexpr (layout.half > 0) scale = from_halves(half);
        if constexpr (layout.half > 1) minimum = from_halves(half + 32);
        for (int r = 0; r < ROWS; r++) {
            const Line& line = panel.lines[r * panel.stride + g];
            const Part total = floats(total_of<FORMAT, ROWS>(quads, low, line));
            totals[r] = fma_part(total, layout.half ? scale * line.scale : fill_part(line.scale), totals[r]);
            if constexpr (layout.half > 1) minima[r] = fma_part(minimum, fill_part(line.sum), minima[r]);
        }
        low += 64 * layout.low_bits;
        high += 64 * layout.high_bits;
        half += 32 * layout.half;
    }
    for (int r = 0; r < ROWS; r++) {
        if constexpr (sixteenfold) totals[r] *= 0x1p-4f;
        if constexpr (layout.half > 1) totals[r] += minima[r];
        if constexpr (layout.half == 0) totals[r] *= load<Part>(panel.data + panel.planes.half + 4 * at);
        store(out + 16 * r + at, totals[r]);
    }
}

// Byte scales and minima of a group: one of each for 32 columns, or (`in_halves`) one for each 16.
struct ByteScales {
    Part scales[2], minima[2];
};

template <int FORMAT>
constexpr bool in_halves = FORMAT == SAMOVAR_Q2_K || FORMAT == SAMOVAR_Q3_K || FORMAT == SAMOVAR_Q6_K;

template <int FORMAT>
SAMOVAR_INLINE ByteScales scales_of(const uint8_t* sub) {
    ByteScales s = {};
    const BytePart first = load<BytePart>(sub);
    BytePart second = {};
    if constexpr (layout_of(FORMAT).sub == 2) second = load<BytePart>(sub + 16);
    if constexpr (FORMAT == SAMOVAR_Q2_K) {
        s = {{from_bytes(first & 15), from_bytes(second & 15)}, {from_bytes(first >> 4), from_bytes(second >> 4)}};
    } else if constexpr (FORMAT == SAMOVAR_Q4_K || FORMAT == SAMOVAR_Q5_K) {
        s.scales[0] = from_bytes(first);
        s.minima[0] = from_bytes(second);
    } else {
        s.scales[0] = from_signed(first);
        if constexpr (in_halves<FORMAT>) s.scales[1] = from_signed(second);
    }
    return s;
}

// Formats with byte scales of 32 or 16 columns below the float16 ones of a super-block.
template <int FORMAT, int ROWS>
SAMOVAR_INLINE void multiply_super(const Panel& panel, int at, float* out) {
    constexpr Layout layout = layout_of(FORMAT);
    constexpr int offset = code_offset(FORMAT), bits = value_bits(FORMAT), groups = SUPER_BLOCK / SAMOVAR_GROUP;
    constexpr bool sixteenfold = is_sixteenfold<FORMAT, ROWS>(), has_minimum = layout.half == 2;
    const uint8_t *low = panel.data + 4 * at, *high = low + panel.planes.high, *next = panel.data;
    const uint8_t *sub = panel.data + panel.planes.sub + at, *half = panel.data + panel.planes.half + 2 * at;
    Part totals[ROWS] = {}, minima[ROWS] = {};
    for (int first = 0; first < panel.groups; first += groups) {
        Part block[ROWS] = {}, block_minima[ROWS] = {};
        for (int g = first; g < first + groups; g++) {
            ask_ahead<FORMAT>(next, at);
            CodePart quads[8];
            if constexpr (!sixteenfold) take_codes<FORMAT>(low, high, quads);
            const ByteScales s = scales_of<FORMAT>(sub);
            for (int r = 0; r < ROWS; r++) {
                const Line& line = panel.lines[r * panel.stride + g];
                if constexpr (in_halves<FORMAT>) {
                    const Part a = floats(dot_half<bits>(start<offset>(line.minus128_half[0]), quads, line.codes));
                    const Part b = floats(dot_half<bits>(start<offset>(line.minus128_half[1]), quads + 4, line.codes + 16));
                    block[r] = fma_part(fma_part(a, s.scales[0], b * s.scales[1]), fill_part(line.scale), block[r]);
                    if constexpr (has_minimum)
                        for (int i = 0; i < 2; i++)
                            block_minima[r] = fma_part(s.minima[i], fill_part(line.sum_half[i]), block_minima[r]);
                } else {
                    const Part total = floats(total_of<FORMAT, ROWS>(quads, low, line));
                    block[r] = fma_part(total * s.scales[0], fill_part(line.scale), block[r]);
                    if constexpr (has_minimum) block_minima[r] = fma_part(s.minima[0], fill_part(line.sum), block_minima[r]);
                }
            }
            low += 64 * layout.low_bits;
            high += 64 * layout.high_bits;
            sub += 16 * layout.sub;
        }
        const Part scale = from_halves(half);
        for (int r = 0; r < ROWS; r++) {
            totals[r] = fma_part(scale, block[r], totals[r]);
            if constexpr (has_minimum) minima[r] = fma_part(from_halves(half + 32), block_minima[r], minima[r]);
        }
        half += 32 * layout.half;
    }
    for (int r = 0; r < ROWS; r++) {
        if constexpr (sixteenfold) totals[r] *= 0x1p-4f;
        store(out + 16 * r + at, has_minimum ? totals[r] - minima[r] : totals[r]);
    }
}

// out [ROWS, 16]. Parts of a panel one after the other: the second finds it in the cache.
template <int FORMAT, int ROWS>
void multiply_panel(const Panel& panel, float* out) {
    for (int at = 0; at < SAMOVAR_PANEL; at += PART_LANES)
        if constexpr (layout_of(FORMAT).half_columns == SUPER_BLOCK) multiply_super<FORMAT, ROWS>(panel, at, out);
        else multiply_flat<FORMAT, ROWS>(panel, at, out);
}

// ---------------------------------------------------------------------------------------------- choice of the kernel

typedef void (*PanelKernel)(const Panel&, float* out);

template <int FORMAT>
SAMOVAR_INLINE PanelKernel kernel_of(int rows) {
    constexpr PanelKernel kernels[MAX_ROWS] = {multiply_panel<FORMAT, 1>, multiply_panel<FORMAT, 2>,
                                               multiply_panel<FORMAT, 3>, multiply_panel<FORMAT, 4>};
    return kernels[rows - 1];
}

// The kernel of a format (not a plain one) for 1 to MAX_ROWS rows.
inline PanelKernel choose_kernel(int format, int rows) {
    switch (format) {
        case SAMOVAR_I8: return kernel_of<SAMOVAR_I8>(rows);
        case SAMOVAR_Q4_0: return kernel_of<SAMOVAR_Q4_0>(rows);
        case SAMOVAR_Q4_1: return kernel_of<SAMOVAR_Q4_1>(rows);
        case SAMOVAR_Q5_0: return kernel_of<SAMOVAR_Q5_0>(rows);
        case SAMOVAR_Q5_1: return kernel_of<SAMOVAR_Q5_1>(rows);
        case SAMOVAR_Q8_0: return kernel_of<SAMOVAR_Q8_0>(rows);
        case SAMOVAR_Q2_K: return kernel_of<SAMOVAR_Q2_K>(rows);
        case SAMOVAR_Q3_K: return kernel_of<SAMOVAR_Q3_K>(rows);
        case SAMOVAR_Q4_K: return kernel_of<SAMOVAR_Q4_K>(rows);
        case SAMOVAR_Q5_K: return kernel_of<SAMOVAR_Q5_K>(rows);
        case SAMOVAR_Q6_K: return kernel_of<SAMOVAR_Q6_K>(rows);
        case SAMOVAR_IQ4_NL: return kernel_of<SAMOVAR_IQ4_NL>(rows);
        default: return kernel_of<SAMOVAR_IQ4_XS>(rows);
    }
}

// Panels [first, end) of a matrix with `rows` rows of lines. emit(panel, row, V c): 16 outputs of a row, each once.
template <typename Emit>
SAMOVAR_INLINE void multiply_few(const SamovarMatrix& m, int first, int end, const Line* lines, int rows, Emit&& emit) {
    const int groups = num_lines(m.cols);
    Panel panel = {nullptr, planes_of(m.format, m.cols), groups, lines, groups};
    for (int p = first; p < end; p++) {
        panel.data = static_cast<const uint8_t*>(m.data) + p * panel.planes.bytes;
        for (int row = 0; row < rows; row += MAX_ROWS) {
            const int count = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
            panel.lines = lines + int64_t(row) * groups;
            alignas(64) float out[MAX_ROWS * LANES];
            choose_kernel(m.format, count)(panel, out);
            for (int r = 0; r < count; r++) emit(p, row + r, get(out + LANES * r));
        }
    }
}

}  // namespace samovar::SAMOVAR_ISA
