// Matrix products with packed weights: y[rows][n] = x[rows][k] W^T, in tiles of a few rows by one panel.
//
// An output is one chain of additions over k, the same in every tile, so a row's result depends on that row alone.
#pragma once

#include "bf16_12bit.h"
#include "elementwise.h"
#include "nibbles.h"

#include <cmath>

namespace diptych {

constexpr int ROWS_AT_ONCE = 96;     // rows that share one pass over a panel while it is in the cache
// Writes one row of dense weights to `to` as it was before it was packed. Python unpacks quantised ones.
template <typename F> inline void unpack_row(F, const Weights &w, int64_t row, void *to) {
    if constexpr (!F::QUANTISED) {
        typedef typename F::Number Number;
        typedef typename F::Input Input;
        const Number *from = reinterpret_cast<const Number *>(w.panel_of<F>(row / PANEL)) + row % PANEL * F::INPUTS;
        for (int64_t i = 0; i < w.k; i++) {
            const Number value = from[i / F::INPUTS * PANEL * F::INPUTS + i % F::INPUTS];
            if constexpr (std::is_same_v<Number, Input>)
                static_cast<Input *>(to)[i] = value;
            else
                static_cast<Input *>(to)[i] = widened(value);
        }
    }
}

inline void unpack_row(const Weights &w, int64_t row, void *to) {
    by_format(w.format, [&](auto format) { unpack_row(format, w, row, to); });
}

// First or second elements of LANES pairs of bf16.
inline f32s one_of_pairs(const void *pairs, int odd) {
    const u32s both = (u32s)load_bytes(pairs);
    return as_floats(odd ? both & 0xffff0000u : both << 16);
}

// multiply_tile: R rows by one panel of weights, to out[R][2]. This one is of float32 rows and weights with INPUTS = 1.
template <int R, typename F>
inline void multiply_single(const Weights &w, int64_t panel, const Inputs &x, int64_t row, Fetcher &fetcher,
                            f32s (&out)[R][2]) {
    typedef typename F::Number T;
    const T *weights = reinterpret_cast<const T *>(w.panel_of<F>(panel));
    const int64_t stride = x.row_stride(w);
    const float *rows = static_cast<const float *>(x.data) + row * stride;
    f32s acc[R][2] = {};
    for (int64_t i = 0; i < w.k; i++, weights += PANEL, rows++) {
        if (i % STRIDE == 0) fetcher.step();
        const f32s low = load(weights), high = load(weights + LANES);
        fetch_ahead<R, PANEL * sizeof(T)>(weights);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const f32s a = splat(rows[r * stride]);
            acc[r][0] = a * low + acc[r][0];
            acc[r][1] = a * high + acc[r][1];
        }
    }
    copy_tile(acc, out);
}

template <int R>
inline void multiply_tile(Float32, const Weights &w, int64_t panel, const Inputs &x, int64_t row, Fetcher &fetcher,
                          f32s (&out)[R][2]) {
    multiply_single<R, Float32>(w, panel, x, row, fetcher, out);
}

template <int R>
inline void multiply_tile(WidenedFp16, const Weights &w, int64_t panel, const Inputs &x, int64_t row, Fetcher &fetcher,
                          f32s (&out)[R][2]) {
    multiply_single<R, WidenedFp16>(w, panel, x, row, fetcher, out);
}

template <int R>
inline void multiply_tile(WidenedBf16, const Weights &w, int64_t panel, const Inputs &x, int64_t row, Fetcher &fetcher,
                          f32s (&out)[R][2]) {
    const char *weights = w.panel_of<WidenedBf16>(panel);
    const int64_t stride = x.row_stride(w);
    const float *rows = static_cast<const float *>(x.data) + row * stride;
    f32s acc[R][2] = {};
    for (int64_t pair = 0; pair < w.k / 2; pair++, weights += 2 * VECTOR) {
        if (pair % (STRIDE / 2) == 0) fetcher.step();
        fetch_ahead<R, 2 * VECTOR>(weights);
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++, rows++) {
            const f32s low = one_of_pairs(weights, odd), high = one_of_pairs(weights + VECTOR, odd);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const f32s a = splat(rows[r * stride]);
                acc[r][0] = a * low + acc[r][0];
                acc[r][1] = a * high + acc[r][1];
            }
        }
    }
    copy_tile(acc, out);
}

template <int R>
inline void multiply_tile(Bf16, const Weights &w, int64_t panel, const Inputs &x, int64_t row, Fetcher &fetcher,
                          f32s (&out)[R][2]) {
    const char *weights = w.panel_of<Bf16>(panel);
    const int64_t stride = x.row_stride(w) * 2;
    const char *rows = static_cast<const char *>(x.data) + row * stride;
    f32s acc[R][2] = {};
    for (int64_t pair = 0; pair < w.k / 2; pair++, weights += 2 * VECTOR, rows += 4) {
        if (pair % (STRIDE / 2) == 0) fetcher.step();
        const i32s low = load_bytes(weights), high = load_bytes(weights + VECTOR);
        fetch_ahead<R>(weights);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const i32s a = splat_word(rows + r * stride);
            acc[r][0] = dot_pairs(acc[r][0], a, low);
            acc[r][1] = dot_pairs(acc[r][1], a, high);
        }
    }
    copy_tile(acc, out);
}

#if defined(DIPTYCH_BF16)
// Outliers are added at the end.
template <int R>
inline void multiply_tile(Bf16In12Bits, const Weights &w, int64_t panel, const Inputs &x, int64_t row, Fetcher &fetcher,
                          f32s (&out)[R][2]) {
    const char *weights = w.panel_of<Bf16In12Bits>(panel);
    const int64_t stride = x.row_stride(w) * 2;
    const char *rows = static_cast<const char *>(x.data) + row * stride;
    const ExponentRegisters exponents(exponent_table(w, panel));
    f32s acc[R][2] = {};
    for (int64_t quad = 0; quad < w.k / 4; quad++, weights += 192, rows += 8) {
        if (quad % (STRIDE / 4) == 0) fetcher.step();
        const i32s codes = load_bytes(weights);
        fetch_ahead<R>(weights);
        if (R <= STREAMED_ROWS) __builtin_prefetch(weights + PREFETCH_BYTES + 128);
#pragma GCC unroll 2
        for (int pair = 0; pair < 2; pair++) {
            i32s low, high;
            exponents.expand(pair ? codes >> 4 : codes, load_bytes(weights + 64 + 64 * pair), low, high);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const i32s a = splat_word(rows + r * stride + 4 * pair);
                acc[r][0] = dot_pairs(acc[r][0], a, low);
                acc[r][1] = dot_pairs(acc[r][1], a, high);
            }
        }
    }
    copy_tile(acc, out);
    const bf16 *inputs = reinterpret_cast<const bf16 *>(static_cast<const char *>(x.data) + row * stride);
    for (const Outlier *o = outliers(w, panel); o < outliers(w, panel + 1); o++)
        for (int r = 0; r < R; r++)
            out[r][o->output / LANES][o->output % LANES] +=
                widened(inputs[r * stride / 2 + o->input]) * widened(o->value);
}
#else
template <int R, typename... Ts> inline void multiply_tile(Bf16In12Bits, Ts &&...) {} // nothing is packed so here
#endif

template <int R>
inline void multiply_tile(Q8, const Weights &w, int64_t panel, const Inputs &x, int64_t row, Fetcher &fetcher,
                          f32s (&out)[R][2]) {
    const int64_t groups = w.k / w.group, quads = w.group / 4;
    const char *weights = w.panel_of<Q8>(panel);
    const fp16 *scale = static_cast<const fp16 *>(w.scale) + panel * groups * PANEL;
    const int32_t *offset = static_cast<const int32_t *>(w.offset) + panel * groups * PANEL;
    const char *rows = static_cast<const char *>(x.data) + row * w.k;
    const float *factor = x.scale + row * groups;
    f32s total[R][2] = {};
    for (int64_t g = 0; g < groups; g++, scale += PANEL, offset += PANEL) {
        fetcher.step();
        i32s acc[R][2];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) acc[r][0] = load_bytes(offset), acc[r][1] = load_bytes(offset + LANES);
        for (int64_t quad = 0; quad < quads; quad++, weights += 2 * VECTOR, rows += 4) {
            const i32s low = load_bytes(weights), high = load_bytes(weights + VECTOR);
            fetch_ahead<R>(weights);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const i32s a = splat_word(rows + r * w.k);
                acc[r][0] = dot_bytes(acc[r][0], a, low);
                acc[r][1] = dot_bytes(acc[r][1], a, high);
            }
        }
        const f32s slow = load_fp16(scale), shigh = load_fp16(scale + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const f32s f = splat(factor[r * groups + g]);
            total[r][0] += __builtin_convertvector(acc[r][0], f32s) * f * slow;
            total[r][1] += __builtin_convertvector(acc[r][1], f32s) * f * shigh;
        }
    }
    copy_tile(total, out);
}

// Quantises one row for quantised weights: x to the nearest of 127 steps on either side of zero in each group. Q8's
// products take unsigned bytes: `offset` adds 128 to them.
template <typename T>
void quantise_row(const T *x, int64_t k, int64_t group, bool offset, uint8_t *to, float *scale, float *sum) {
    for (int64_t g = 0; g < k / group; g++, x += group, to += group) {
        f32s top = {};
        for (int64_t i = 0; i < group; i += LANES) {
            const f32s v = load(x + i), negative = -v;
            const f32s size = v > negative ? v : negative;
            top = size > top ? size : top;
        }
        const float peak = largest(top), step = peak / 127.f, inverse = peak > 0.f ? 127.f / peak : 0.f;
        i32s total = {};
        for (int64_t i = 0; i < group; i += LANES) {
            const f32s magic = splat(ROUNDER);
            const f32s rounded = (load(x + i) * inverse + magic) - magic;
            const i32s q = __builtin_convertvector(rounded, i32s);
            total += q;
            const i8s bytes = __builtin_convertvector(offset ? q + 128 : q, i8s);
            std::memcpy(to + i, &bytes, sizeof bytes);
        }
        scale[g] = step;
        sum[g] = step * float(diptych::sum(total));
    }
}

template <typename Out> inline void store_some(Out *to, f32s v, int64_t count) {
    if (count >= LANES) return store(to, v);
    Out lanes[LANES];
    store(lanes, v);
    for (int64_t i = 0; i < count; i++) to[i] = lanes[i];
}

// Rows [row, row + R) of one panel: product, bias, and epilogue. With a gate, a panel is a vector of gates and their
// ups.
template <int R, typename Out>
void finish_tile(const Weights &w, int64_t panel, const Inputs &x, int64_t row, Epilogue epilogue, Out *out,
                 Fetcher &fetcher) {
    f32s y[R][2];
    by_format(w.format, [&](auto format) {
        if constexpr (R <= decltype(format)::ROWS) multiply_tile<R>(format, w, panel, x, row, fetcher, y);
    });
    if (w.bias) {
        const float *bias = w.bias + panel * PANEL;
        for (int r = 0; r < R; r++) y[r][0] += load(bias), y[r][1] += load(bias + LANES);
    }
    if (epilogue != Epilogue::PLAIN) {
        const int64_t width = w.n / 2, at = panel * LANES;
        for (int r = 0; r < R; r++) {
            // Round first, for the same result as when gate and up are stored before the gate is applied.
            Out gate[LANES], up[LANES];
            store(gate, y[r][0]);
            store(up, y[r][1]);
            const f32s gated = gate_lanes(load(gate), load(up), epilogue);
            store_some(out + (row + r) * width + at, gated, width - at);
        }
        return;
    }
    const int64_t at = panel * PANEL, stride = x.out_stride ? x.out_stride : w.n;
    for (int r = 0; r < R; r++) {
        store_some(out + (row + r) * stride + at, y[r][0], w.n - at);
        if (w.n - at > LANES) store_some(out + (row + r) * stride + at + LANES, y[r][1], w.n - at - LANES);
    }
}

// The same for a number of rows, at most R.
template <int R, typename Out>
void finish_rows(const Weights &w, int64_t panel, const Inputs &x, int64_t row, int64_t rows, Epilogue epilogue,
                 Out *out, Fetcher &fetcher) {
    if (rows == R) return finish_tile<R>(w, panel, x, row, epilogue, out, fetcher);
    if constexpr (R > 1) finish_rows<R - 1>(w, panel, x, row, rows, epilogue, out, fetcher);
}

// Rows [row, end) of one panel, in tiles of nearly equal height.
template <typename Out>
void multiply(const Weights &w, int64_t panel, const Inputs &x, int64_t row, int64_t end, Epilogue epilogue, Out *out,
              Fetcher &fetcher) {
    const int64_t most = w.rows_of_tile();
    for (int64_t tiles = (end - row + most - 1) / most; tiles > 0; tiles--) {
        const int64_t rows = (end - row + tiles - 1) / tiles;
        finish_rows<DENSE_ROWS>(w, panel, x, row, rows, epilogue, out, fetcher);
        row += rows;
    }
}

// Multiplies rows [row, end) of one head by the head's dense weights. x is [rows][heads * of], of which the first k
// elements of each head are used; out is [rows][heads * n].
template <typename Out>
void multiply_head(const Weights &w, int64_t head, int64_t heads, const Out *x, int64_t of, int64_t row, int64_t end,
                   Out *out) {
    const Inputs inputs{x + head * of, nullptr, nullptr, heads * of, heads * w.n};
    Fetcher nothing;
    for (int64_t panel = 0; panel < w.panels(); panel++)
        multiply(w, panel, inputs, row, end, Epilogue::PLAIN, out + head * w.n, nothing);
}

} // namespace diptych
