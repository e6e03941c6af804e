// Matrix products with packed weights: y[rows][n] = x[rows][k] W^T, in tiles of a few rows by one panel.
//
// An output is one chain of additions over k, the same in every tile, so a row's result depends on that row alone.
#pragma once

#include "elementwise.h"
#include "short_weights.h"

#include <cmath>

namespace diptych {

constexpr int ROWS_AT_ONCE = 96;    // rows that share one pass over a panel while it is in the cache
constexpr int PREFETCH_BYTES = 2048; // ahead of a panel that streams from memory
constexpr int STREAMED_ROWS = 4;     // as many rows wait for memory all the time, more of them now and then

// Rows as the product wants them: float32 or bf16 [rows][k]; for INT8 uint8 codes, x = scale * (code - 128), for INT4 int8 codes,
// x = scale * code, a scale for each group of k, and for INT4 the sum of the group's values.
struct Inputs {
    const void *codes;
    const float *scale, *sum; // [rows][k / group]
};

// Products of bytes that are added by fours: of the vectors that are in use.
#if defined(__AVX512F__)
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define DIPTYCH_BYTES 1
#endif
#elif defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define DIPTYCH_BYTES 1
#endif

inline f32s load_half(const uint16_t *p) { return load(reinterpret_cast<const half *>(p)); }

// acc[i] += sum over 4 of u[i * 4 + j] * s[i * 4 + j], u unsigned and s signed bytes.
inline i32s dot_bytes(i32s acc, i32s u, i32s s) {
#if defined(DIPTYCH_BYTES) && defined(__AVX512F__)
    return (i32s)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)s);
#elif defined(DIPTYCH_BYTES) && defined(__AVX2__)
    return (i32s)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)u, (__m256i)s);
#elif defined(DIPTYCH_BYTES) && defined(__ARM_FEATURE_MATMUL_INT8)
    return (i32s)vusdotq_s32((int32x4_t)acc, (uint8x16_t)u, (int8x16_t)s);
#elif defined(DIPTYCH_BYTES)
    // Signed bytes only: u - 128, and what that takes away is 128 times the sum of s.
    const int32x4_t sums = vdotq_s32(vdupq_n_s32(0), (int8x16_t)s, vdupq_n_s8(1));
    const int8x16_t less = (int8x16_t)veorq_u8((uint8x16_t)u, vdupq_n_u8(128));
    return (i32s)vaddq_s32(vdotq_s32((int32x4_t)acc, less, (int8x16_t)s), vshlq_n_s32(sums, 7));
#elif defined(__AVX512BW__)
    // By way of 16 bits, since the sum of two products of bytes is wider: even bytes and odd ones.
    const __m512i low = _mm512_set1_epi16(255), a = (__m512i)u, b = (__m512i)s;
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(a, low), _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
    return acc + (i32s)_mm512_add_epi32(even, odd);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i low = _mm256_set1_epi16(255), a = (__m256i)u, b = (__m256i)s;
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return acc + (i32s)_mm256_add_epi32(even, odd);
#else
#pragma GCC unroll 4
    for (int shift = 0; shift < 32; shift += 8) acc += ((u >> shift) & 255) * (s << (24 - shift) >> 24);
    return acc;
#endif
}

// The same of nibbles, u <= 15, twice: sums of four products fit 16 bits.
inline i32s dot_nibbles(i32s acc, i32s u, i32s s, i32s u2, i32s s2) {
#if !defined(DIPTYCH_BYTES) && defined(__AVX512BW__)
    const __m512i first = _mm512_maddubs_epi16((__m512i)u, (__m512i)s), second = _mm512_maddubs_epi16((__m512i)u2, (__m512i)s2);
    return acc + (i32s)_mm512_madd_epi16(_mm512_add_epi16(first, second), _mm512_set1_epi16(1));
#elif !defined(DIPTYCH_BYTES) && defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i first = _mm256_maddubs_epi16((__m256i)u, (__m256i)s), second = _mm256_maddubs_epi16((__m256i)u2, (__m256i)s2);
    return acc + (i32s)_mm256_madd_epi16(_mm256_add_epi16(first, second), _mm256_set1_epi16(1));
#else
    return dot_bytes(dot_bytes(acc, u, s), u2, s2);
#endif
}

inline i32s splat_word(const void *p) { // four bytes into every lane
    int32_t w;
    std::memcpy(&w, p, 4);
    return w - i32s{};
}

#if defined(DIPTYCH_BF16)
inline f32s dot_pairs(f32s acc, i32s x, i32s w) {
    return (f32s)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)w);
}
#else
inline f32s dot_pairs(f32s acc, i32s x, i32s w) {
    u32s a, b;
    std::memcpy(&a, &x, VECTOR);
    std::memcpy(&b, &w, VECTOR);
    f32s a0, a1, b0, b1;
    const u32s alow = a << 16, ahigh = a & 0xffff0000u, blow = b << 16, bhigh = b & 0xffff0000u;
    std::memcpy(&a0, &alow, VECTOR);
    std::memcpy(&a1, &ahigh, VECTOR);
    std::memcpy(&b0, &blow, VECTOR);
    std::memcpy(&b1, &bhigh, VECTOR);
    return acc + a0 * b0 + a1 * b1;
}
#endif

// The first or the second of as many pairs of bfloat16 as there are lanes.
inline f32s one_of_pairs(const void *pairs, int odd) {
    u32s both;
    std::memcpy(&both, pairs, sizeof both);
    const u32s bits = odd ? both & 0xffff0000u : both << 16;
    f32s v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}

template <int R, int BYTES = 2 * LINE> inline void fetch_ahead(const void *weights) {
    if (R > STREAMED_ROWS) return;
    for (int at = 0; at < BYTES; at += LINE) __builtin_prefetch(static_cast<const char *>(weights) + PREFETCH_BYTES + at);
}

// R rows in float32 by one panel of weights, as wide or widened on their way, to out[R][2].
template <int R, typename T>
inline void multiply_float32(const Weights &w, int64_t panel, const Inputs &x, int64_t row, Fetcher &fetcher, f32s (&out)[R][2]) {
    const T *weights = static_cast<const T *>(w.codes) + panel * w.k * PANEL;
    const float *rows = static_cast<const float *>(x.codes) + row * w.k;
    f32s acc[R][2] = {};
    for (int64_t i = 0; i < w.k; i++, weights += PANEL, rows++) {
        if (i % STRIDE == 0) fetcher.step();
        const f32s low = load(weights), high = load(weights + LANES);
        fetch_ahead<R, PANEL * sizeof(T)>(weights);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const f32s a = splat(rows[r * w.k]);
            acc[r][0] = a * low + acc[r][0];
            acc[r][1] = a * high + acc[r][1];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) out[r][0] = acc[r][0], out[r][1] = acc[r][1];
}

// The same of pairs of bfloat16.
template <int R>
inline void multiply_brain(const Weights &w, int64_t panel, const Inputs &x, int64_t row, Fetcher &fetcher, f32s (&out)[R][2]) {
    const char *weights = static_cast<const char *>(w.codes) + panel * w.k * PANEL * 2;
    const float *rows = static_cast<const float *>(x.codes) + row * w.k;
    f32s acc[R][2] = {};
    for (int64_t pair = 0; pair < w.k / 2; pair++, weights += 2 * VECTOR) {
        if (pair % (STRIDE / 2) == 0) fetcher.step();
        fetch_ahead<R, 2 * VECTOR>(weights);
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++, rows++) {
            const f32s low = one_of_pairs(weights, odd), high = one_of_pairs(weights + VECTOR, odd);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const f32s a = splat(rows[r * w.k]);
                acc[r][0] = a * low + acc[r][0];
                acc[r][1] = a * high + acc[r][1];
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) out[r][0] = acc[r][0], out[r][1] = acc[r][1];
}

template <int R>
inline void multiply_bfloat16(const Weights &w, int64_t panel, const Inputs &x, int64_t row, Fetcher &fetcher, f32s (&out)[R][2]) {
    const char *weights = static_cast<const char *>(w.codes) + panel * w.k * PANEL * 2;
    const char *rows = static_cast<const char *>(x.codes) + row * w.k * 2;
    const int64_t stride = w.k * 2;
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
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) out[r][0] = acc[r][0], out[r][1] = acc[r][1];
}

#if defined(DIPTYCH_BF16)
// The same, of short weights: those that have no code are added at the end.
template <int R>
inline void multiply_short(const Weights &w, int64_t panel, const Inputs &x, int64_t row, Fetcher &fetcher, f32s (&out)[R][2]) {
    const char *weights = static_cast<const char *>(w.codes) + panel * w.k * PANEL * 3 / 2;
    const char *rows = static_cast<const char *>(x.codes) + row * w.k * 2;
    const int64_t stride = w.k * 2;
    const Exponents exponents(w, panel);
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
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) out[r][0] = acc[r][0], out[r][1] = acc[r][1];
    const bf16 *inputs = static_cast<const bf16 *>(x.codes) + row * w.k;
    for (const Odd *odd = odds(w, panel); odd < odds(w, panel + 1); odd++)
        for (int r = 0; r < R; r++)
            out[r][odd->output / LANES][odd->output % LANES] += widened(inputs[r * w.k + odd->input]) * widened(odd->value);
}
#endif

template <int R>
inline void multiply_int8(const Weights &w, int64_t panel, const Inputs &x, int64_t row, Fetcher &fetcher, f32s (&out)[R][2]) {
    const int64_t groups = w.k / w.group, quads = w.group / 4;
    const char *weights = static_cast<const char *>(w.codes) + panel * w.k * PANEL;
    const uint16_t *scale = static_cast<const uint16_t *>(w.scale) + panel * groups * PANEL;
    const int32_t *offset = static_cast<const int32_t *>(w.offset) + panel * groups * PANEL;
    const char *rows = static_cast<const char *>(x.codes) + row * w.k;
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
        const f32s slow = load_half(scale), shigh = load_half(scale + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const f32s f = splat(factor[r * groups + g]);
            total[r][0] += __builtin_convertvector(acc[r][0], f32s) * f * slow;
            total[r][1] += __builtin_convertvector(acc[r][1], f32s) * f * shigh;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) out[r][0] = total[r][0], out[r][1] = total[r][1];
}

template <int R>
inline void multiply_int4(const Weights &w, int64_t panel, const Inputs &x, int64_t row, Fetcher &fetcher, f32s (&out)[R][2]) {
    const int64_t groups = w.k / w.group, octets = w.group / 8;
    const char *weights = static_cast<const char *>(w.codes) + panel * w.k * PANEL / 2;
    const uint16_t *scale = static_cast<const uint16_t *>(w.scale) + panel * groups * PANEL;
    const uint16_t *offset = static_cast<const uint16_t *>(w.offset) + panel * groups * PANEL;
    const char *rows = static_cast<const char *>(x.codes) + row * w.k;
    const float *factor = x.scale + row * groups, *sum = x.sum + row * groups;
    const i32s low_half = splat_word("\x0f\x0f\x0f\x0f");
    f32s total[R][2] = {};
    for (int64_t g = 0; g < groups; g++, scale += PANEL, offset += PANEL) {
        fetcher.step();
        i32s acc[R][2] = {};
        for (int64_t octet = 0; octet < octets; octet++, weights += 2 * VECTOR, rows += 8) {
            const i32s both = load_bytes(weights), both2 = load_bytes(weights + VECTOR);
            fetch_ahead<R>(weights);
            const i32s low = both & low_half, high = both2 & low_half;
            const i32s low2 = (both >> 4) & low_half, high2 = (both2 >> 4) & low_half;
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const i32s a = splat_word(rows + r * w.k), b = splat_word(rows + r * w.k + 4);
                acc[r][0] = dot_nibbles(acc[r][0], low, a, low2, b);
                acc[r][1] = dot_nibbles(acc[r][1], high, a, high2, b);
            }
        }
        const f32s slow = load_half(scale), shigh = load_half(scale + LANES);
        const f32s olow = load_half(offset), ohigh = load_half(offset + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const f32s f = splat(factor[r * groups + g]), s = splat(sum[r * groups + g]);
            // One at a time: a sum of two products may be fused in either way, and clang chose by the number of rows.
            total[r][0] += __builtin_convertvector(acc[r][0], f32s) * f * slow;
            total[r][1] += __builtin_convertvector(acc[r][1], f32s) * f * shigh;
            total[r][0] += s * olow;
            total[r][1] += s * ohigh;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) out[r][0] = total[r][0], out[r][1] = total[r][1];
}

// Codes and scales of one row, for INT8 or INT4 weights: x to the nearest of 127 steps on either side of zero in each group.
template <typename T>
void quantise_row(const T *x, int64_t k, int64_t group, bool offset, uint8_t *codes, float *scale, float *sum) {
    for (int64_t g = 0; g < k / group; g++, x += group, codes += group) {
        f32s top = {};
        for (int64_t i = 0; i < group; i += LANES) {
            const f32s v = load(x + i), negative = -v;
            const f32s size = v > negative ? v : negative;
            top = size > top ? size : top;
        }
        const float peak = largest(top), step = peak / 127.f, inverse = peak > 0.f ? 127.f / peak : 0.f;
        i32s total = {};
        for (int64_t i = 0; i < group; i += LANES) {
            const f32s magic = splat(12582912.f); // 1.5 * 2^23: adding it rounds to an integer, ties to even
            const f32s rounded = (load(x + i) * inverse + magic) - magic;
            const i32s code = __builtin_convertvector(rounded, i32s);
            total += code;
            typedef int8_t i8s __attribute__((vector_size(LANES)));
            const i8s bytes = __builtin_convertvector(offset ? code + 128 : code, i8s);
            std::memcpy(codes + i, &bytes, sizeof bytes);
        }
        scale[g] = step;
        sum[g] = step * float(diptych::sum(total));
    }
}

enum class Epilogue : int { PLAIN = 0, SILU = 1, GELU = 2 };

template <typename Out> inline void store_some(Out *to, f32s v, int64_t count) {
    if (count >= LANES) return store(to, v);
    Out lanes[LANES];
    store(lanes, v);
    for (int64_t i = 0; i < count; i++) to[i] = lanes[i];
}

// Rows [row, row + R) of one panel: product, bias, and the epilogue. With a gate, a panel is a vector of gates and their ups.
template <int R, typename Out>
void finish_tile(const Weights &w, int64_t panel, const Inputs &x, int64_t row, Epilogue epilogue, Out *out, Fetcher &fetcher) {
    f32s y[R][2];
    if (w.format == FLOAT32)
        multiply_float32<R, float>(w, panel, x, row, fetcher, y);
    else if (w.format == BRAIN)
        multiply_brain<R>(w, panel, x, row, fetcher, y);
    else if (w.format == HALF)
        multiply_float32<R, half>(w, panel, x, row, fetcher, y);
    else if (w.format == BFLOAT16)
        multiply_bfloat16<R>(w, panel, x, row, fetcher, y);
#if defined(DIPTYCH_BF16)
    else if (w.format == SHORT)
        multiply_short<R>(w, panel, x, row, fetcher, y);
#endif
    else if constexpr (R <= CODED_ROWS) {
        if (w.format == INT8)
            multiply_int8<R>(w, panel, x, row, fetcher, y);
        else
            multiply_int4<R>(w, panel, x, row, fetcher, y);
    }
    if (w.bias)
        for (int r = 0; r < R; r++) y[r][0] += load(w.bias + panel * PANEL), y[r][1] += load(w.bias + panel * PANEL + LANES);
    if (epilogue != Epilogue::PLAIN) {
        const int64_t width = w.n / 2, at = panel * LANES;
        for (int r = 0; r < R; r++) {
            // Rounded first, as they are where gate and up are stored between the two steps.
            Out gate[LANES], up[LANES];
            store(gate, y[r][0]);
            store(up, y[r][1]);
            store_some(out + (row + r) * width + at, gate_lanes(load(gate), load(up), epilogue == Epilogue::GELU), width - at);
        }
        return;
    }
    const int64_t at = panel * PANEL;
    for (int r = 0; r < R; r++) {
        store_some(out + (row + r) * w.n + at, y[r][0], w.n - at);
        if (w.n - at > LANES) store_some(out + (row + r) * w.n + at + LANES, y[r][1], w.n - at - LANES);
    }
}

// The same for a number of rows, at most R.
template <int R, typename Out>
void finish_rows(const Weights &w, int64_t panel, const Inputs &x, int64_t row, int64_t rows, Epilogue epilogue, Out *out,
                 Fetcher &fetcher) {
    if (rows == R) return finish_tile<R>(w, panel, x, row, epilogue, out, fetcher);
    if constexpr (R > 1) finish_rows<R - 1>(w, panel, x, row, rows, epilogue, out, fetcher);
}

// Rows [row, end) of one panel, in tiles of nearly equal height.
template <typename Out>
void multiply(const Weights &w, int64_t panel, const Inputs &x, int64_t row, int64_t end, Epilogue epilogue, Out *out,
              Fetcher &fetcher) {
    const int64_t most = w.coded() ? CODED_ROWS : DENSE_ROWS;
    for (int64_t tiles = (end - row + most - 1) / most; tiles > 0; tiles--) {
        const int64_t rows = (end - row + tiles - 1) / tiles;
        finish_rows<DENSE_ROWS>(w, panel, x, row, rows, epilogue, out, fetcher);
        row += rows;
    }
}

} // namespace diptych
