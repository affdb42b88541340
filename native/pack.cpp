// GGML blocks and plain numbers into panels (layout.h) and back.
//
// The block formats are those of the GGUF files; samovar/weights/dequantize.py says the same in Python. Codes travel as
// quads: 32-bit words of four codes, so that packing a group is a handful of word operations a row (little-endian).
#include "pack.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <vector>

#include "layout.h"

// Values must equal the reference bit for bit: no multiplication may melt with the addition behind it.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace samovar {

namespace {

constexpr int QUADS = SAMOVAR_GROUP / 4;
constexpr uint32_t NIBBLES = 0x0f0f0f0fu, PAIRS = 0x03030303u, BITS = 0x01010101u, SIGNS = 0x80808080u;

uint32_t word(const uint8_t* from) {
    uint32_t value;
    std::memcpy(&value, from, 4);
    return value;
}

void put(uint8_t* to, uint32_t value) { std::memcpy(to, &value, 4); }

// The low four bits, one to a byte.
uint32_t spread(uint32_t bits) { return (bits & 15) * 0x00204081u & BITS; }

// One row of a group, as the source has it: codes, sub-scales, and the float16 numbers of its block.
struct Group {
    uint32_t quads[QUADS];
    uint8_t sub[2];
    const uint8_t* half[2];
};

void read_nibbles(const uint8_t* from, uint32_t* quads) {
    for (int v = 0; v < 4; v++) {
        quads[v] = word(from + 4 * v) & NIBBLES;
        quads[v + 4] = word(from + 4 * v) >> 4 & NIBBLES;
    }
}

void add_fifth_bits(uint32_t bits, uint32_t* quads) {
    for (int j = 0; j < QUADS; j++) quads[j] |= spread(bits >> (4 * j)) << 4;
}

// Q4_K and Q5_K: six bits each of eight scales and eight minima in twelve bytes.
void read_scale_and_minimum(const uint8_t* from, int g, uint8_t* sub) {
    const uint8_t *first = from, *second = from + 4, *third = from + 8;
    sub[0] = g < 4 ? first[g] & 63 : (third[g - 4] & 15) | (first[g - 4] >> 2 & 48);
    sub[1] = g < 4 ? second[g] & 63 : third[g - 4] >> 4 | (second[g - 4] >> 2 & 48);
}

uint8_t q3_scale(const uint8_t* scales, int i) {
    int low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
    int high = scales[8 + i % 4] >> (2 * (i / 4)) & 3;
    return uint8_t((low | high << 4) - 32);
}

uint8_t iq4_scale(const uint8_t* block, int g) {
    int low = block[4 + g / 2] >> (4 * (g % 2)) & 15, high = block[2 + g / 4] >> (2 * (g % 4)) & 3;
    return uint8_t((low | high << 4) - 32);
}

void read_k_group(int format, const uint8_t* block, int g, Group& group) {
    const int part = g / 4, shift = 2 * (g % 4);  // 128 weights share bytes of two-bit fields
    auto& quads = group.quads;
    for (int j = 0; j < QUADS; j++) {
        const int at = 4 * j;
        switch (format) {
            case SAMOVAR_Q2_K: quads[j] = word(block + 16 + 32 * part + at) >> shift & PAIRS; break;
            case SAMOVAR_Q3_K:
                quads[j] = (word(block + 32 + 32 * part + at) >> shift & PAIRS) | (word(block + at) >> g & BITS) << 2;
                break;
            case SAMOVAR_Q4_K: quads[j] = word(block + 16 + 32 * (g / 2) + at) >> (4 * (g % 2)) & NIBBLES; break;
            case SAMOVAR_Q5_K:
                quads[j] = (word(block + 48 + 32 * (g / 2) + at) >> (4 * (g % 2)) & NIBBLES) |
                           (word(block + 16 + at) >> g & BITS) << 4;
                break;
            default:
                quads[j] = (word(block + 64 * part + 32 * (g % 2) + at) >> (4 * (g % 4 / 2)) & NIBBLES) |
                           (word(block + 128 + 32 * part + at) >> shift & PAIRS) << 4;
        }
    }
    for (int h = 0; h < 2; h++) {
        const int i = 2 * g + h;
        if (format == SAMOVAR_Q2_K) group.sub[h] = block[i];
        if (format == SAMOVAR_Q3_K) group.sub[h] = q3_scale(block + 96, i);
        if (format == SAMOVAR_Q6_K) group.sub[h] = block[192 + i];
    }
    if (format == SAMOVAR_Q4_K || format == SAMOVAR_Q5_K) read_scale_and_minimum(block + 4, g, group.sub);
    const int at = format == SAMOVAR_Q2_K ? 80 : format == SAMOVAR_Q3_K ? 108 : format == SAMOVAR_Q6_K ? 208 : 0;
    group.half[0] = block + at;
    group.half[1] = block + at + 2;
}

void read_group(int format, const Layout& layout, const uint8_t* row, int g, Group& group) {
    const int per_block = layout.block / SAMOVAR_GROUP;
    const uint8_t* block = row + int64_t(g / per_block) * layout.block_bytes;
    group.half[0] = block;
    group.half[1] = block + 2;
    switch (format) {
        case SAMOVAR_Q4_0:
        case SAMOVAR_IQ4_NL: return read_nibbles(block + 2, group.quads);
        case SAMOVAR_Q4_1: return read_nibbles(block + 4, group.quads);
        case SAMOVAR_Q5_0:
            read_nibbles(block + 6, group.quads);
            return add_fifth_bits(word(block + 2), group.quads);
        case SAMOVAR_Q5_1:
            read_nibbles(block + 8, group.quads);
            return add_fifth_bits(word(block + 4), group.quads);
        case SAMOVAR_Q8_0:
            for (int j = 0; j < QUADS; j++) group.quads[j] = word(block + 2 + 4 * j) ^ SIGNS;
            return;
        case SAMOVAR_IQ4_XS:
            group.sub[0] = iq4_scale(block, g % per_block);
            return read_nibbles(block + 8 + 16 * (g % per_block), group.quads);
        default: return read_k_group(format, block, g % per_block, group);
    }
}

// Codes of row `n` of a group into its planes.
void write_codes(const Layout& layout, const Planes& planes, const uint32_t* quads, int g, int n, uint8_t* panel) {
    uint8_t* low = panel + int64_t(g) * layout.low_bits * 64 + 4 * n;
    uint8_t* high = panel + planes.high + int64_t(g) * layout.high_bits * 64 + 4 * n;
    if (layout.low_bits == 8)
        for (int j = 0; j < QUADS; j++) put(low + 64 * j, quads[j]);
    if (layout.low_bits == 4)
        for (int v = 0; v < 4; v++) put(low + 64 * v, (quads[v] & NIBBLES) | (quads[v + 4] & NIBBLES) << 4);
    auto pairs = [&](uint8_t* to, int shift) {
        for (int u = 0; u < 2; u++) {
            uint32_t fields = 0;
            for (int f = 0; f < 4; f++) fields |= (quads[2 * f + u] >> shift & PAIRS) << (2 * f);
            put(to + 64 * u, fields);
        }
    };
    if (layout.low_bits == 2) pairs(low, 0);
    if (layout.high_bits == 2) pairs(high, layout.low_bits);
    if (layout.high_bits == 1) {
        uint32_t bits = 0;
        for (int j = 0; j < QUADS; j++) bits |= (quads[j] >> layout.low_bits & BITS) << j;
        put(high, bits);
    }
}

void read_codes(const Layout& layout, const Planes& planes, const uint8_t* panel, int g, int n, uint32_t* quads) {
    const uint8_t* low = panel + int64_t(g) * layout.low_bits * 64 + 4 * n;
    const uint8_t* high = panel + planes.high + int64_t(g) * layout.high_bits * 64 + 4 * n;
    for (int j = 0; j < QUADS; j++) {
        if (layout.low_bits == 8) quads[j] = word(low + 64 * j);
        if (layout.low_bits == 4) quads[j] = word(low + 64 * (j % 4)) >> (4 * (j / 4)) & NIBBLES;
        if (layout.low_bits == 2) quads[j] = word(low + 64 * (j % 2)) >> (2 * (j / 2)) & PAIRS;
        if (layout.high_bits == 2) quads[j] |= (word(high + 64 * (j % 2)) >> (2 * (j / 2)) & PAIRS) << layout.low_bits;
        if (layout.high_bits == 1) quads[j] |= (word(high) >> j & BITS) << layout.low_bits;
    }
}

void pack_blocks(int format, const uint8_t* source, int64_t row_bytes, int count, int cols, uint8_t* panel) {
    const Layout layout = layout_of(format);
    const Planes planes = planes_of(format, cols);
    const int per_half = layout.half_columns / SAMOVAR_GROUP;
    Group group;
    for (int n = 0; n < count; n++) {
        for (int g = 0; g < cols / SAMOVAR_GROUP; g++) {
            read_group(format, layout, source + n * row_bytes, g, group);
            write_codes(layout, planes, group.quads, g, n, panel);
            for (int s = 0; s < layout.sub; s++)
                panel[planes.sub + (int64_t(g) * layout.sub + s) * SAMOVAR_PANEL + n] = group.sub[s];
            if (g % per_half) continue;
            for (int h = 0; h < layout.half; h++) {
                const int64_t at = (int64_t(g / per_half) * layout.half + h) * SAMOVAR_PANEL + n;
                std::memcpy(panel + planes.half + 2 * at, group.half[h], 2);
            }
        }
    }
}

void pack_bytes(const uint8_t* source, int64_t row_bytes, int count, int cols, uint8_t* panel) {
    const Planes planes = planes_of(SAMOVAR_I8, cols);
    std::memset(panel, 128, planes.half);
    for (int n = 0; n < count; n++) {
        for (int k = 0; k < cols; k++) panel[k / 4 * 64 + 4 * n + k % 4] = source[n * row_bytes + k] ^ 128;
        std::memcpy(panel + planes.half + 4 * n, source + n * row_bytes + cols, 4);
    }
}

void pack_plain(int format, const uint8_t* source, int64_t row_bytes, int count, int cols, uint8_t* panel) {
    const int64_t words = row_bytes / 4;  // one float32 or two 16-bit numbers
    for (int64_t w = 0; w < words; w++)
        for (int n = 0; n < count; n++) put(panel + 64 * w + 4 * n, word(source + n * row_bytes + 4 * w));
    if (format != SAMOVAR_F32 && cols % 2)
        for (int n = 0; n < count; n++) std::memcpy(panel + 64 * words + 4 * n, source + n * row_bytes + 4 * words, 2);
}

float from_half(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = uint32_t(half & 0x7fff) << 13;
    float value;
    if (magnitude >= 0x0f800000u) {  // infinity, NaN
        const uint32_t bits = magnitude | 0x7f800000u;
        std::memcpy(&value, &bits, 4);
    } else {
        std::memcpy(&value, &magnitude, 4);
        value *= 0x1p112f;  // moves the exponent's bias, and makes denormals normal
    }
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
    std::memcpy(&value, &bits, 4);
    return value;
}

int offset_of(int format) {
    switch (format) {
        case SAMOVAR_Q4_0: return 8;
        case SAMOVAR_Q5_0: return 16;
        case SAMOVAR_Q8_0: return 128;
        case SAMOVAR_Q3_K: return 4;
        case SAMOVAR_Q6_K: return 32;
        default: return 0;
    }
}

// What half a group (16 columns) of a row is multiplied by, and what is added.
struct Scale {
    float factor, addend;
};

Scale scale_of(int format, const uint8_t* sub, int half, float first, float second) {
    switch (format) {
        case SAMOVAR_Q4_1:
        case SAMOVAR_Q5_1: return {first, second};
        case SAMOVAR_Q4_K:
        case SAMOVAR_Q5_K: return {float(sub[0]) * first, -(float(sub[1]) * second)};
        case SAMOVAR_Q2_K: return {float(sub[half] & 15) * first, -(float(sub[half] >> 4) * second)};
        case SAMOVAR_Q3_K:
        case SAMOVAR_Q6_K: return {float(int8_t(sub[half])) * first, 0};
        case SAMOVAR_IQ4_XS: return {float(int8_t(sub[0])) * first, 0};
        default: return {first, 0};
    }
}

bool has_addend(int format) {
    return format == SAMOVAR_Q4_1 || format == SAMOVAR_Q5_1 || format == SAMOVAR_Q2_K || format == SAMOVAR_Q4_K ||
           format == SAMOVAR_Q5_K;
}

void unpack_blocks(int format, int cols, const uint8_t* panel, int n, float* values) {
    const Layout layout = layout_of(format);
    const Planes planes = planes_of(format, cols);
    const int offset = offset_of(format);
    const bool adds = has_addend(format), in_table = format == SAMOVAR_IQ4_NL || format == SAMOVAR_IQ4_XS;
    float halves[2] = {0, 0};
    for (int g = 0; g < cols / SAMOVAR_GROUP; g++) {
        uint32_t quads[QUADS];
        uint8_t sub[2] = {0, 0};
        read_codes(layout, planes, panel, g, n, quads);
        for (int s = 0; s < layout.sub; s++) sub[s] = panel[planes.sub + (int64_t(g) * layout.sub + s) * SAMOVAR_PANEL + n];
        if (g % (layout.half_columns / SAMOVAR_GROUP) == 0)
            for (int h = 0; h < layout.half; h++) {
                const int64_t block = g / (layout.half_columns / SAMOVAR_GROUP);
                halves[h] = from_half(panel + planes.half + 2 * ((block * layout.half + h) * SAMOVAR_PANEL + n));
            }
        for (int j = 0; j < QUADS; j++) {
            const Scale scale = scale_of(format, sub, j / 4, halves[0], halves[1]);
            for (int i = 0; i < 4; i++) {
                const int code = quads[j] >> (8 * i) & 255;
                const float value = float(in_table ? IQ4_VALUES[code] : code - offset) * scale.factor;
                values[SAMOVAR_GROUP * g + 4 * j + i] = adds ? value + scale.addend : value;
            }
        }
    }
}

void unpack_plain(int format, int cols, const uint8_t* panel, int n, float* values) {
    for (int k = 0; k < cols; k++) {
        const uint8_t* pair = panel + int64_t(k / 2) * 64 + 4 * n + k % 2 * 2;
        if (format == SAMOVAR_F32) std::memcpy(values + k, panel + int64_t(k) * 64 + 4 * n, 4);
        if (format == SAMOVAR_F16) values[k] = from_half(pair);
        if (format == SAMOVAR_BF16) {
            uint8_t bytes[4] = {0, 0, pair[0], pair[1]};
            std::memcpy(values + k, bytes, 4);
        }
    }
}

void unpack_bytes(int cols, const uint8_t* panel, int n, float* values) {
    float scale;
    std::memcpy(&scale, panel + planes_of(SAMOVAR_I8, cols).half + 4 * n, 4);
    for (int k = 0; k < cols; k++) values[k] = float(int(panel[int64_t(k / 4) * 64 + 4 * n + k % 4]) - 128) * scale;
}

__attribute__((format(printf, 3, 4))) bool refuse(char* error, size_t error_size, const char* text, ...) {
    if (error && error_size) {
        va_list values;
        va_start(values, text);
        std::vsnprintf(error, error_size, text, values);
        va_end(values);
    }
    return false;
}

bool check(int32_t format, int32_t rows, int32_t cols, char* error, size_t error_size) {
    const Layout layout = layout_of(format);
    if (!layout.block) return refuse(error, error_size, "format %d is not one of weights; see SamovarFormat", format);
    if (rows < 1 || cols < 1)
        return refuse(error, error_size, "a weight of %d rows and %d columns has no numbers; give at least 1 of each", rows, cols);
    if (cols % layout.block)
        return refuse(error, error_size, "%d columns do not fill blocks of %d (format %d); dequantize this weight", cols,
                      layout.block, format);
    return true;
}

}  // namespace

void unpack_row(const SamovarMatrix& matrix, int row, float* values) {
    const auto* panel = static_cast<const uint8_t*>(matrix.data) +
                        row / SAMOVAR_PANEL * planes_of(matrix.format, matrix.cols).bytes;
    const int n = row % SAMOVAR_PANEL;
    if (is_plain(matrix.format)) return unpack_plain(matrix.format, matrix.cols, panel, n, values);
    if (matrix.format == SAMOVAR_I8) return unpack_bytes(matrix.cols, panel, n, values);
    unpack_blocks(matrix.format, matrix.cols, panel, n, values);
}

}  // namespace samovar

using namespace samovar;

int64_t samovar_packed_bytes(int32_t format, int32_t rows, int32_t cols, char* error, size_t error_size) {
    return check(format, rows, cols, error, error_size) ? num_panels(rows) * planes_of(format, cols).bytes : 0;
}

int64_t samovar_source_row_bytes(int32_t format, int32_t cols) {
    const Layout layout = layout_of(format);
    if (!layout.block) return 0;
    return int64_t(cols) / layout.block * layout.block_bytes + (format == SAMOVAR_I8 ? 4 : 0);
}

int32_t samovar_pack(int32_t format, const void* source, int32_t first_row, int32_t num_rows, int32_t rows, int32_t cols,
                     void* packed, char* error, size_t error_size) {
    if (!check(format, rows, cols, error, error_size)) return 1;
    if (first_row < 0 || num_rows < 0 || num_rows > rows - first_row || first_row % SAMOVAR_PANEL ||
        (num_rows % SAMOVAR_PANEL && first_row + num_rows != rows)) {
        refuse(error, error_size, "rows %d to %d of %d are not whole panels of %d; pack multiples, or up to the last row",
               first_row, first_row + num_rows, rows, SAMOVAR_PANEL);
        return 1;
    }
    const int64_t panel_bytes = planes_of(format, cols).bytes, row_bytes = samovar_source_row_bytes(format, cols);
    std::vector<uint8_t> rows_in_place;
    for (int first = 0; first < num_rows; first += SAMOVAR_PANEL) {
        const int count = std::min(SAMOVAR_PANEL, num_rows - first);
        const auto* from = static_cast<const uint8_t*>(source) + first * row_bytes;
        auto* panel = static_cast<uint8_t*>(packed) + (first_row + first) / SAMOVAR_PANEL * panel_bytes;
        if (from < panel + panel_bytes && panel < from + count * row_bytes) {
            rows_in_place.assign(from, from + count * row_bytes);
            from = rows_in_place.data();
        }
        if (count < SAMOVAR_PANEL || (is_plain(format) && cols % SAMOVAR_GROUP)) std::memset(panel, 0, panel_bytes);
        if (is_plain(format)) pack_plain(format, from, row_bytes, count, cols, panel);
        else if (format == SAMOVAR_I8) pack_bytes(from, row_bytes, count, cols, panel);
        else pack_blocks(format, from, row_bytes, count, cols, panel);
    }
    return 0;
}

int32_t samovar_unpack(const SamovarMatrix* matrix, int32_t first_row, int32_t num_rows, float* values, char* error,
                       size_t error_size) {
    if (!check(matrix->format, matrix->rows, matrix->cols, error, error_size)) return 1;
    if (first_row < 0 || num_rows < 0 || num_rows > matrix->rows - first_row) {
        refuse(error, error_size, "rows %d to %d are not inside the weight's %d rows", first_row, first_row + num_rows,
               matrix->rows);
        return 1;
    }
    for (int row = 0; row < num_rows; row++) unpack_row(*matrix, first_row + row, values + int64_t(row) * matrix->cols);
    return 0;
}
