// Products of many rows: the input is brought into the form that the set multiplies fastest, once, in shared memory; then
// blocks of rows and panels are multiplied and handed to the caller's epilogue.
//
// With AMX, weights of all formats but float32 and I8 are multiplied as bfloat16 tiles: bfloat16 panels where they lie, others
// after a group of panels has been written as bfloat16 into the thread's scratch, which stays in its second-level cache while
// all rows pass by. I8 is multiplied as int8, with one scale for a row of activations. Without AMX this file serves the
// plain formats; quantized ones are fastest by small.h at any number of rows. float32 weights always have float32 products.
// The order of loops is that of Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
#pragma once

#include <algorithm>

#include "panels.h"
#include "plain.h"
#include "quantize.h"
#include "tiles.h"

namespace samovar::SAMOVAR_ISA {

constexpr int64_t WIDE_ROWS = 32;  // rows of a block: chunks begin at a multiple

// How activations are written for the product.
enum WideForm : unsigned { FORM_FLOAT = 1, FORM_BF16 = 2, FORM_INT8 = 4 };

SAMOVAR_INLINE WideForm wide_form(int format) {
#if defined(__AMX_TILE__)
    return format == SAMOVAR_F32 ? FORM_FLOAT : format == SAMOVAR_I8 ? FORM_INT8 : FORM_BF16;
#elif defined(__AVX512BF16__)
    return format == SAMOVAR_BF16 ? FORM_BF16 : FORM_FLOAT;
#else
    (void)format;
    return FORM_FLOAT;
#endif
}

// Is this the fastest way to multiply `rows` rows?
inline bool wide_pays(const SamovarMatrix& m, int64_t rows) {
#if defined(__AMX_TILE__)
    // Estimated, not measured: below, reading codes once for a few rows is cheaper than writing them as bfloat16.
    if (m.format == SAMOVAR_BF16) return rows > 4;
    return rows > (is_plain(m.format) || m.format == SAMOVAR_I8 ? 8 : 12);
#else
    return is_plain(m.format) && rows > PLAIN_ROWS;
#endif
}

// A gated pair is multiplied block by block together, which takes one form of the input.
inline bool wide_pays(const SamovarMatrix& gate, const SamovarMatrix& up, int64_t rows) {
    return wide_pays(gate, rows) && wide_pays(up, rows) && wide_form(gate.format) == wide_form(up.format);
}

// ---------------------------------------------------------------------------------------------- the input

// Where the forms of an input lie. bfloat16 and int8 are tiles of 16 rows x 64 bytes, the tiles of 16 rows one after the other.
struct WideInput {
    int cols;
    int64_t rows;
    unsigned forms;

    int64_t row_tiles() const { return (rows + 15) / 16; }
    int64_t tiles(WideForm form) const { return form == FORM_INT8 ? (cols + 63) / 64 : (cols + 31) / 32; }
    int64_t stride() const { return (cols + 15) / 16 * 16 + 16; }  // not a power of two: rows would share cache sets
    int64_t float_bytes() const { return forms & FORM_FLOAT ? rows * stride() * 4 : 0; }
    int64_t bf16_bytes() const { return forms & FORM_BF16 ? row_tiles() * tiles(FORM_BF16) * 1024 : 0; }
    int64_t int8_bytes() const { return forms & FORM_INT8 ? row_tiles() * tiles(FORM_INT8) * 1024 : 0; }
    size_t bytes() const {
        return size_t(float_bytes() + bf16_bytes() + int8_bytes() + (forms & FORM_INT8 ? row_tiles() * 16 * 8 : 0));
    }

    float* floats(uint8_t* shared) const { return reinterpret_cast<float*>(shared); }
    uint8_t* bf16(uint8_t* shared) const { return shared + float_bytes(); }
    uint8_t* int8(uint8_t* shared) const { return bf16(shared) + bf16_bytes(); }
    // Of each row of int8: its scale, and minus 128 times its sum.
    float* scales(uint8_t* shared) const { return reinterpret_cast<float*>(int8(shared) + int8_bytes()); }
    int32_t* minus128(uint8_t* shared) const { return reinterpret_cast<int32_t*>(scales(shared) + row_tiles() * 16); }
};

inline WideInput wide_input(const SamovarMatrix* matrices, int count, int64_t rows) {
    WideInput input = {matrices[0].cols, rows, 0};
    for (int n = 0; n < count; n++)
        if (wide_pays(matrices[n], rows)) input.forms |= wide_form(matrices[n].format);
    return input;
}

SAMOVAR_INLINE V get_until(const float* x, int k, int cols) {
    return k + LANES <= cols ? get(x + k) : get(x + k, cols > k ? cols - k : 0);
}

#if defined(__AVX512BF16__)

inline void prepare_bf16(const float* x, int cols, int64_t tiles, uint8_t* to) {
    for (int t = 0; t < tiles; t++, to += 1024)
        for (int i = 0; i < 2; i++) store(to + 32 * i, to_bf16((F32)get_until(x, 32 * t + 16 * i, cols).part[0]));
}

#endif

#if defined(__AMX_TILE__)

// Symmetric int8 of a whole row; a row with an infinity or a NaN gets the scale NaN.
inline void prepare_int8(const float* x, int cols, int64_t tiles, uint8_t* to, float* scale, int32_t* minus128) {
    uint32_t bits = 0;
    for (int k = 0; k < cols; k += 2 * LANES)
        bits = std::max(bits, largest_bits(get_until(x, k, cols), get_until(x, k + LANES, cols)));
    float most;
    std::memcpy(&most, &bits, 4);
    const bool is_finite = bits < 0x7f800000u, counts = is_finite && most >= 0x1p-120f;
    const float factor = counts ? 127.f / most : 0.f;
    __m512i total = _mm512_setzero_si512();
    for (int t = 0; t < tiles; t++, to += 1024) {
        for (int i = 0; i < 4; i++)
            store_codes(reinterpret_cast<int8_t*>(to + 16 * i), counts ? get_until(x, 64 * t + 16 * i, cols) * factor : fill(0.f));
        total = _mm512_dpbusd_epi32(total, _mm512_set1_epi8(1), _mm512_loadu_si512(to));
    }
    *scale = counts ? most / 127.f : is_finite ? 0.f : NAN;
    *minus128 = -128 * _mm512_reduce_add_epi32(total);
}

#endif

// One row into shared memory; the last one writes the zeros of the rows that fill its tile, too.
inline void wide_prepare(const WideInput& input, int64_t row, const float* x, uint8_t* shared) {
    if (input.forms & FORM_FLOAT) std::memcpy(input.floats(shared) + row * input.stride(), x, input.cols * sizeof(float));
#if defined(__AVX512BF16__)
    const int64_t end = row == input.rows - 1 ? input.row_tiles() * 16 : row + 1;
    for (int64_t r = row; r < end; r++) {
        const int cols = r == row ? input.cols : 0;
        auto place = [&](uint8_t* tiles, WideForm form) { return tiles + r / 16 * input.tiles(form) * 1024 + r % 16 * 64; };
        if (input.forms & FORM_BF16) prepare_bf16(x, cols, input.tiles(FORM_BF16), place(input.bf16(shared), FORM_BF16));
#if defined(__AMX_TILE__)
        if (input.forms & FORM_INT8)
            prepare_int8(x, cols, input.tiles(FORM_INT8), place(input.int8(shared), FORM_INT8), input.scales(shared) + r,
                         input.minus128(shared) + r);
#endif
    }
#endif
}

// ---------------------------------------------------------------------------------------------- chunks

struct WideSplit {
    int panels;
    int64_t rows;
};

constexpr int64_t SPLIT_ROWS = 512;   // rows that pass a group of panels before it is made anew
constexpr int GROUP_PANELS = 16;      // panels that lie in the second-level cache together

// Chunks of all rows, so that a panel is dequantized once, in equal numbers for the threads and some to spare.
inline WideSplit wide_split(const SamovarMatrix& m, int64_t rows, int num_threads, bool gated) {
    const int panels = num_panels(m.rows), most = gated ? GROUP_PANELS / 2 : GROUP_PANELS, step = gated ? 1 : 2;
    int chunks = std::max(num_threads * 4, (panels + most - 1) / most);
    chunks = (chunks + num_threads - 1) / num_threads * num_threads;
    const int each = (panels + chunks - 1) / chunks;
    return {(each + step - 1) / step * step, std::min((rows + WIDE_ROWS - 1) / WIDE_ROWS * WIDE_ROWS, SPLIT_ROWS)};
}

// ---------------------------------------------------------------------------------------------- float32 products

// float32 activations with plain weights. `out` of the kernels is [panel][row]: what the epilogue takes.
template <typename Epilogue>
void multiply_floats(const WideInput& input, const SamovarMatrix& m, const SamovarMatrix* up, int first_panel, int end_panel,
                     int64_t first_row, int64_t end_row, uint8_t* shared, Epilogue&& epilogue) {
    const int64_t panel_bytes = planes_of(m.format, m.cols).bytes, stride = input.stride();
    const int64_t up_bytes = up ? planes_of(up->format, up->cols).bytes : 0;
    const int step = up ? 1 : KERNEL_PANELS;
    alignas(64) float out[KERNEL_PANELS * KERNEL_ROWS * LANES], up_out[KERNEL_ROWS * LANES];
    for (int p = first_panel; p < end_panel; p += step) {
        const int panels = std::min(step, end_panel - p);
        const uint8_t* panel = static_cast<const uint8_t*>(m.data) + p * panel_bytes;
        for (int64_t row = first_row; row < end_row; row += KERNEL_ROWS) {
            const int count = int(std::min<int64_t>(KERNEL_ROWS, end_row - row));
            const float* x = input.floats(shared) + row * stride;
            choose_plain(m.format, count, panels)(panel, panel_bytes, x, stride, m.cols, out);
            if (up)
                choose_plain(up->format, count, 1)(static_cast<const uint8_t*>(up->data) + p * up_bytes, up_bytes, x, stride,
                                                   up->cols, up_out);
            for (int n = 0; n < panels; n++) epilogue(p + n, row, count, out + n * count * LANES, up ? up_out : nullptr);
        }
    }
}

// ---------------------------------------------------------------------------------------------- bfloat16 pairs

#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)

// Eight rows of tiles with two panels by dot products of pairs (vdpbf16ps), which AMD's processors run at twice the rate of FMA.
template <int PANELS>
void multiply_pairs(const uint8_t* a, const uint8_t* panel, int64_t panel_bytes, int64_t tiles, float* out) {
    constexpr int ROWS = 8;
    __m512 sums[PANELS][ROWS];
    for (auto& panel_sums : sums)
        for (auto& value : panel_sums) value = _mm512_setzero_ps();
    for (int64_t t = 0; t < tiles; t++)
        for (int i = 0; i < 16; i++) {
            const uint8_t* from = panel + t * 1024 + i * 64;
            for (int n = 0; n < PANELS; n++) {
                const __m512i w = _mm512_loadu_si512(from + n * panel_bytes);
                for (int r = 0; r < ROWS; r++) {
                    const I8 pair = repeat4(a + t * 1024 + r * 64 + i * 4);
                    sums[n][r] = _mm512_dpbf16_ps(sums[n][r], (__m512bh)w, (__m512bh)pair);
                }
            }
        }
    for (int n = 0; n < PANELS; n++)
        for (int r = 0; r < ROWS; r++) _mm512_storeu_ps(out + (n * ROWS + r) * LANES, sums[n][r]);
}

template <typename Epilogue>
void multiply_bf16(const WideInput& input, const SamovarMatrix& m, const SamovarMatrix* up, int first_panel, int end_panel,
                   int64_t first_row, int64_t end_row, uint8_t* shared, Epilogue&& epilogue) {
    constexpr int ROWS = 8;
    const int64_t panel_bytes = planes_of(m.format, m.cols).bytes, tiles = input.tiles(FORM_BF16);
    alignas(64) float out[2 * ROWS * LANES];
    for (int p = first_panel; p < end_panel; p += up ? 1 : 2) {
        const bool is_pair = !up && p + 1 < end_panel;
        const uint8_t* panel = static_cast<const uint8_t*>(m.data) + p * panel_bytes;
        for (int64_t row = first_row; row < end_row; row += ROWS) {
            const int count = int(std::min<int64_t>(ROWS, end_row - row));
            const uint8_t* a = input.bf16(shared) + row / 16 * tiles * 1024 + row % 16 * 64;
            if (up) {
                multiply_pairs<1>(a, panel, panel_bytes, tiles, out);
                multiply_pairs<1>(a, static_cast<const uint8_t*>(up->data) + p * panel_bytes, panel_bytes, tiles,
                                  out + ROWS * LANES);
                epilogue(p, row, count, out, out + ROWS * LANES);
            } else {
                (is_pair ? multiply_pairs<2> : multiply_pairs<1>)(a, panel, panel_bytes, tiles, out);
                for (int n = 0; n < (is_pair ? 2 : 1); n++) epilogue(p + n, row, count, out + n * ROWS * LANES, nullptr);
            }
        }
    }
}

#endif

// ---------------------------------------------------------------------------------------------- tiles

#if defined(__AMX_TILE__)

constexpr int64_t GROUP_BYTES = 1 << 20;   // of weights as tiles in scratch
constexpr int L1_TILES = 11;               // columns, in tiles, of 32 rows and 2 panels that fit into the first-level cache
constexpr int64_t BLOCK_BYTES = 4 * TILE_ROWS * LANES * 4;  // sums of 32 rows x 2 panels
constexpr int64_t NEAR_BYTES = 7 << 18;    // of activations that the second-level cache keeps: asking for those costs more than it saves
constexpr int AHEAD = 4;                   // tiles between the product and what is asked of the memory

// How a product is cut: `depth` tiles of columns of `panels` panels lie in scratch; `step` of them are multiplied at a time.
struct TileBlocking {
    int tiles, panels, depth, step;
    bool is_deep;   // in several passes: sums of all rows wait in scratch

    TileBlocking(int64_t num_tiles, bool is_one_block) : tiles(int(num_tiles)) {
        panels = std::max<int>(GROUP_PANELS, GROUP_BYTES / TILE_BYTES / tiles / 2 * 2);
        const int passes = int((tiles * TILE_BYTES * GROUP_PANELS + GROUP_BYTES - 1) / GROUP_BYTES);
        depth = (tiles + passes - 1) / passes;
        const int steps = is_one_block ? 1 : (depth + L1_TILES - 1) / L1_TILES;
        step = (depth + steps - 1) / steps;
        is_deep = passes > 1;
    }

    int64_t weight_bytes() const { return panels * depth * TILE_BYTES; }
    size_t bytes() const {
        return size_t(weight_bytes() + (is_deep ? SPLIT_ROWS / WIDE_ROWS : 1) * ((panels + 1) / 2) * BLOCK_BYTES);
    }
};

// One or two matrices as a row of panels; a gated pair's take turns.
struct TilePanels {
    const SamovarMatrix* matrices[2];
    Planes planes[2];
    Dequantizer dequantizers[2];
    int first_panel, count;
    bool is_gated;

    TilePanels(const SamovarMatrix& m, const SamovarMatrix* up, int first, int end)
        : matrices{&m, up ? up : &m}, first_panel(first), count((end - first) * (up ? 2 : 1)), is_gated(up != nullptr) {
        for (int n = 0; n < 2; n++) {
            planes[n] = planes_of(matrices[n]->format, m.cols);
            dequantizers[n] = choose_dequantizer(matrices[n]->format);
        }
    }

    int panel(int n) const { return first_panel + (is_gated ? n / 2 : n); }
    const uint8_t* data(int n) const {
        const int which = is_gated ? n % 2 : 0;
        return static_cast<const uint8_t*>(matrices[which]->data) + panel(n) * planes[which].bytes;
    }
    const float* scales(int n) const { return reinterpret_cast<const float*>(data(n) + planes[is_gated ? n % 2 : 0].half); }

    // Tiles [first, end) of panel n: where they lie already, or in `scratch`.
    template <bool IS_INT8>
    const uint8_t* tiles(int n, int first, int end, uint8_t* scratch) const {
        const uint8_t* from = data(n);
        const int which = is_gated ? n % 2 : 0;
        if constexpr (IS_INT8) {
            // The last tile may be half of one, and what follows is not always ours to read.
            const int64_t left = planes[which].half - first * TILE_BYTES, wanted = (end - first) * TILE_BYTES;
            if (left >= wanted) return from + first * TILE_BYTES;
            std::memcpy(scratch, from + first * TILE_BYTES, left);
            std::memset(scratch + left, 0, wanted - left);
            return scratch;
        } else {
            if (!dequantizers[which]) return from + first * TILE_BYTES;
            dequantizers[which](from, planes[which], first, end, scratch);
            return scratch;
        }
    }
};

// int32 sums of a row tile and a panel to floats, in place.
inline void scale_sums(float* c, const float* row_scales, const int32_t* minus128, const float* scales) {
    const F32 scale = load<F32>(scales);
    for (int r = 0; r < TILE_ROWS; r++)
        store(c + r * LANES, to_float(load<I32>(c + r * LANES) + splat(minus128[r])) * (scale * row_scales[r]));
}

// Asks for memory piece by piece while products run: the activations of the next block of rows, which come from afar.
struct Forerunner {
    const uint8_t* at = nullptr;
    const uint8_t* end = nullptr;
    int64_t piece = 0;

    void start(const uint8_t* from, int64_t bytes, int pieces) {
        at = from;
        end = from + bytes;
        piece = (bytes / pieces + 63) / 64 * 64;
    }
    SAMOVAR_INLINE void run() {
        for (const uint8_t* until = std::min(at + piece, end); at < until; at += 64) __builtin_prefetch(at, 0, 2);
    }
};

// Up to SPLIT_ROWS rows with the panels [first, end) of `panels`.
template <bool IS_INT8, typename Epilogue>
void multiply_group(const WideInput& input, const TilePanels& panels, int first, int end, int64_t first_row, int64_t end_row,
                    uint8_t* shared, uint8_t* scratch, Epilogue&& epilogue) {
    constexpr int SIZE = TILE_ROWS * LANES;
    const WideForm form = IS_INT8 ? FORM_INT8 : FORM_BF16;
    const TileBlocking blocking(input.tiles(form), end_row - first_row <= WIDE_ROWS);
    const int64_t row_tile_bytes = blocking.tiles * TILE_BYTES;
    const uint8_t* activations = IS_INT8 ? input.int8(shared) : input.bf16(shared);
    uint8_t* sums = scratch + blocking.weight_bytes();
    const uint8_t* weights[GROUP_BYTES / TILE_BYTES + GROUP_PANELS];
    const bool is_far = (end_row - first_row) / TILE_ROWS * row_tile_bytes > NEAR_BYTES;
    for (int depth = 0; depth < blocking.tiles; depth += blocking.depth) {
        const int depth_end = std::min(depth + blocking.depth, blocking.tiles);
        for (int n = first; n < end; n++)
            weights[n - first] = panels.tiles<IS_INT8>(n, depth, depth_end, scratch + (n - first) * blocking.depth * TILE_BYTES);
        for (int64_t row = first_row; row < end_row; row += WIDE_ROWS) {
            const int row_tiles = end_row - row > TILE_ROWS ? 2 : 1;
            const uint8_t* a = activations + row / TILE_ROWS * row_tile_bytes;
            const int64_t next_row = row + WIDE_ROWS < end_row ? row + WIDE_ROWS : first_row;
            const int calls = ((end - first + 1) / 2) * ((depth_end - depth + blocking.step - 1) / blocking.step);
            Forerunner runner[2];
            for (int i = 0; is_far && i < (next_row + TILE_ROWS < end_row ? 2 : 1); i++)
                runner[i].start(activations + (next_row / TILE_ROWS + i) * row_tile_bytes + depth * TILE_BYTES,
                                (depth_end - depth) * TILE_BYTES, calls);
            uint8_t* row_sums = sums + (blocking.is_deep ? (row - first_row) / WIDE_ROWS * ((blocking.panels + 1) / 2) * BLOCK_BYTES : 0);
            for (int t = depth; t < depth_end; t += blocking.step) {
                const int count = std::min(blocking.step, depth_end - t);
                for (int n = first; n < end; n += 2) {
                    const int width = std::min(2, end - n);
                    auto* c = reinterpret_cast<float*>(row_sums + (n - first) / 2 * BLOCK_BYTES);
                    const int64_t at = (t - depth) * TILE_BYTES;
                    for (Forerunner& each : runner) each.run();
                    const TileKernel multiply = row == first_row ? choose_tiles<IS_INT8, AHEAD>(row_tiles, width)
                                                                 : choose_tiles<IS_INT8, 0>(row_tiles, width);
                    multiply(a + t * TILE_BYTES, row_tile_bytes, weights[n - first] + at, weights[n - first + width - 1] + at, count,
                             c, t == 0);
                    if (t + count < blocking.tiles) continue;
                    for (int i = 0; i < row_tiles; i++, c += 2 * SIZE) {
                        const int64_t at_row = row + i * TILE_ROWS;
                        const int rows = int(std::min<int64_t>(TILE_ROWS, end_row - at_row));
                        if constexpr (IS_INT8)
                            for (int j = 0; j < width; j++)
                                scale_sums(c + j * SIZE, input.scales(shared) + at_row, input.minus128(shared) + at_row,
                                           panels.scales(n + j));
                        if (panels.is_gated) epilogue(panels.panel(n), at_row, rows, c, c + SIZE);
                        else
                            for (int j = 0; j < width; j++) epilogue(panels.panel(n + j), at_row, rows, c + j * SIZE, nullptr);
                    }
                }
            }
        }
    }
}

template <bool IS_INT8, typename Epilogue>
void multiply_by_tiles(const WideInput& input, const SamovarMatrix& m, const SamovarMatrix* up, int first_panel, int end_panel,
                       int64_t first_row, int64_t end_row, uint8_t* shared, uint8_t* scratch, Epilogue&& epilogue) {
    const TilePanels panels(m, up, first_panel, end_panel);
    const int group = TileBlocking(input.tiles(IS_INT8 ? FORM_INT8 : FORM_BF16), false).panels;
    for (int64_t row = first_row; row < end_row; row += SPLIT_ROWS)
        for (int n = 0; n < panels.count; n += group)
            multiply_group<IS_INT8>(input, panels, n, std::min(n + group, panels.count), row, std::min(row + SPLIT_ROWS, end_row),
                                    shared, scratch, epilogue);
}

#endif

// ---------------------------------------------------------------------------------------------- the product

// Scratch of a thread for one wide_multiply.
inline size_t wide_thread_bytes(const SamovarMatrix& m, bool) {
#if defined(__AMX_TILE__)
    const WideForm form = wide_form(m.format);
    return form == FORM_FLOAT ? 0 : TileBlocking(WideInput{m.cols, 1, form}.tiles(form), false).bytes();
#else
    (void)m;
    return 0;
#endif
}

// Panels [first_panel, end_panel) of `m` (and, of a gated pair, of `up`) x rows [first_row, end_row), first_row a multiple of
// WIDE_ROWS. epilogue(panel, row, count, c, up_c): c[r * 16 + lane] for `count` rows from `row` on; up_c null without `up`.
template <typename Epilogue>
void wide_multiply(const WideInput& input, const SamovarMatrix& m, const SamovarMatrix* up, int first_panel, int end_panel,
                   int64_t first_row, int64_t end_row, const uint8_t* prepared, uint8_t* scratch, Epilogue&& epilogue) {
    auto* shared = const_cast<uint8_t*>(prepared);  // only read from here on
    switch (wide_form(m.format)) {
#if defined(__AMX_TILE__)
        case FORM_BF16:
            return multiply_by_tiles<false>(input, m, up, first_panel, end_panel, first_row, end_row, shared, scratch, epilogue);
        case FORM_INT8:
            return multiply_by_tiles<true>(input, m, up, first_panel, end_panel, first_row, end_row, shared, scratch, epilogue);
#elif defined(__AVX512BF16__)
        case FORM_BF16: return multiply_bf16(input, m, up, first_panel, end_panel, first_row, end_row, shared, epilogue);
#endif
        default: break;
    }
    (void)scratch;
    multiply_floats(input, m, up, first_panel, end_panel, first_row, end_row, shared, epilogue);
}

// Once on every thread of a team, before its first product.
inline void wide_enter() {
#if defined(__AMX_TILE__)
    configure_tiles();
#endif
}

}  // namespace samovar::SAMOVAR_ISA
