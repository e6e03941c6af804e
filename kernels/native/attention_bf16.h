// Attention of bfloat16 queries over blocks of bfloat16 or 8 bits, for CPUs that multiply pairs of bfloat16: the same tiles and the
// same order as attention.h, with scores and sums in float32 and the weights of a tile rounded to bfloat16.
#pragma once

#include "attention.h"
#include "linear.h"

namespace diptych {

#if defined(DIPTYCH_BF16) && defined(__AVX512BW__)

// What this points at is loaded where it is used: there are too few registers to keep it.
template <typename P> inline void again(P &pointer) { asm("" : "+r"(pointer)); }

// WORDS words of 16 keys from there on: word by word, a key in each lane.
template <int WORDS, typename C> inline void turn_words(const C *const *keys, int at, f32s (&words)[LANES]) {
    again(keys);
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) {
        if constexpr (WORDS == LANES)
            words[j] = load(reinterpret_cast<const float *>(keys[j] + at));
        else
            words[j] = (f32s)_mm512_maskz_loadu_epi32((1u << WORDS) - 1, keys[j] + at);
    }
    transpose(words);
}

// How bfloat16 pairs come out of a cache of type C. `load<P>` takes P pairs of dimensions, at most PAIRS, of 16 keys from there
// on; then `pair` is the p-th of these, a key in each lane; `arrange` puts a query's numbers into the order of these pairs.
// `interleave<V>` has 16 * V dimensions of two keys' values, side by side.
template <typename C> struct Pairs;

template <> struct Pairs<bf16> {
    static constexpr int PAIRS = 16, UNIT = 8; // P is a multiple of the latter
    f32s rows[LANES];

    template <int P> void load(const bf16 *const *keys, int at) { turn_words<P>(keys, at, rows); }

    i32s pair(int p) const { return (i32s)rows[p]; }

    static void arrange(const bf16 *query, bf16 *to, int dim) { std::memcpy(to, query, dim * sizeof(bf16)); }

    template <int V> static void interleave(const bf16 *even, const bf16 *odd, i32s (&values)[V]) {
        const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
                                               35, 3, 34, 2, 33, 1, 32, 0);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            const __m512i a = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(even + v * LANES)));
            const __m512i b = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(odd + v * LANES)));
            values[v] = (i32s)_mm512_permutex2var_epi16(a, order, b);
        }
    }
};

#if defined(__AVX512VBMI__)

// bfloat16's bits of the number that a code without its sign is.
constexpr uint32_t brain_bits(const e4m3 *, uint32_t code) {
    if (code == E4M3_NAN) return 0x7fc0;
    if (code >= E4M3_NORMAL) return (code << 4) + (E4M3_BIAS << 7);
    uint32_t top = 2; // the others are code / 512
    while (top && !(code >> top)) top--;
    return code ? (118 + top) << 7 | (code ^ 1u << top) << (7 - top) : 0;
}

constexpr uint32_t brain_bits(const int8 *, uint32_t code) {
    uint32_t top = 6;
    while (top && !(code >> top)) top--;
    return code ? (127 + top) << 7 | (code ^ 1u << top) << (7 - top) : 0;
}

template <typename C> struct Widened {
    alignas(64) uint8_t low[128], high[128];

    constexpr Widened() : low(), high() {
        for (uint32_t code = 0; code < 128; code++) {
            const uint32_t bits = brain_bits((const C *)nullptr, code);
            low[code] = uint8_t(bits), high[code] = uint8_t(bits >> 8);
        }
    }
};

template <typename C> alignas(64) constexpr Widened<C> WIDENED;

// Of numbers of 8 bits: of dimensions 0 to 3 the pairs are 0 and 2, 1 and 3, and so on.
template <typename C> struct Pairs {
    static_assert(sizeof(C) == 1);
    static constexpr int PAIRS = 32, UNIT = 8;
    f32s rows[LANES]; // of four codes

    template <int P> void load(const C *const *keys, int at) { turn_words<P / 2>(keys, at, rows); }

    i32s pair(int p) const {
        const Halves halves((__m512i)rows[p / 2]);
        const __m512i lower = _mm512_set1_epi16(0xff);
        if (p % 2 == 0) return (i32s)chosen(lower, halves.low, _mm512_slli_epi16(halves.high, 8));
        return (i32s)chosen(lower, _mm512_srli_epi16(halves.low, 8), halves.high);
    }

    static void arrange(const bf16 *query, bf16 *to, int dim) {
        for (int d = 0; d < dim; d += 4) to[d] = query[d], to[d + 1] = query[d + 2], to[d + 2] = query[d + 1], to[d + 3] = query[d + 3];
    }

    template <int V> static void interleave(const C *even, const C *odd, i32s (&values)[V]) {
        if constexpr (V == 4) {
            // So that unpacking, which goes by 16 bytes, leaves dimensions in order.
            const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
            const __m512i a = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(even));
            const __m512i b = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(odd));
            const Halves first(_mm512_unpacklo_epi8(a, b)), second(_mm512_unpackhi_epi8(a, b));
            values[0] = (i32s)_mm512_unpacklo_epi8(first.low, first.high), values[1] = (i32s)_mm512_unpackhi_epi8(first.low, first.high);
            values[2] = (i32s)_mm512_unpacklo_epi8(second.low, second.high);
            values[3] = (i32s)_mm512_unpackhi_epi8(second.low, second.high);
        } else {
            static_assert(V == 1);
            const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i *>(even));
            const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i *>(odd));
            const int64_t four = 0x1303120211011000, ones = 0x0101010101010101; // dimensions of both, of every 16 bytes the lower half
            const __m512i order = _mm512_set_epi64(0, four + 12 * ones, 0, four + 8 * ones, 0, four + 4 * ones, 0, four);
            const Halves halves(_mm512_permutexvar_epi8(order, _mm512_inserti32x4(_mm512_castsi128_si512(a), b, 1)));
            values[0] = (i32s)_mm512_unpacklo_epi8(halves.low, halves.high);
        }
    }

private:
    // The bytes of the bfloat16 numbers that codes are.
    struct Halves {
        __m512i low, high;

        explicit Halves(__m512i codes)
            : low(looked_up(WIDENED<C>.low, magnitude(codes))),
              high(_mm512_ternarylogic_epi32(looked_up(WIDENED<C>.high, magnitude(codes)), codes, _mm512_set1_epi8(-128), 0xf8)) {}

        // Seven bits of it, which are all that a table looks at.
        static __m512i magnitude(__m512i codes) {
            if constexpr (std::is_same_v<C, int8>)
                return _mm512_abs_epi8(codes);
            else
                return codes;
        }

        static __m512i looked_up(const uint8_t *table, __m512i codes) {
            return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
        }
    };

    static __m512i chosen(__m512i mask, __m512i set, __m512i clear) { return _mm512_ternarylogic_epi32(mask, set, clear, 0xca); }
};

#endif

// Calls back with a number of pairs, at most those that are loaded together, and where they begin, until `dim` dimensions are done.
template <typename C, typename F> inline void by_pairs(int dim, F &&call) {
    int at = 0;
    for (; at + 2 * Pairs<C>::PAIRS <= dim; at += 2 * Pairs<C>::PAIRS) call(std::integral_constant<int, Pairs<C>::PAIRS>{}, at);
    switch ((dim - at) / 2 / Pairs<C>::UNIT) {
    case 1: return call(std::integral_constant<int, Pairs<C>::UNIT>{}, at);
    case 2: return call(std::integral_constant<int, std::min(2 * Pairs<C>::UNIT, Pairs<C>::PAIRS)>{}, at);
    case 3: return call(std::integral_constant<int, std::min(3 * Pairs<C>::UNIT, Pairs<C>::PAIRS)>{}, at);
    }
}

// acc[R] += queries[R][2 * P of dim] . keys, for 16 keys.
template <int R, int P, typename C>
inline void add_scores(const bf16 *queries, int dim, const C *const *rows, int at, f32s (&acc)[R]) {
    Pairs<C> pairs;
    pairs.template load<P>(rows, at);
    again(queries);
#pragma GCC unroll 32
    for (int p = 0; p < P; p++) {
        const i32s key = pairs.pair(p);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) acc[r] = dot_pairs(acc[r], key, splat_word(queries + r * dim + at + 2 * p));
    }
}

// scores[R][G * 16] = scale * queries[R][dim] . keys. The groups take turns, so that one's sums need not wait for themselves.
template <int R, int G, typename C>
void score_few(const bf16 *queries, const C *const *rows, float *scores, int dim, float scale, RowStream<bf16, C> &stream) {
    f32s acc[G][R] = {};
    by_pairs<C>(dim, [&](auto pairs, int at) {
#pragma GCC unroll 2
        for (int g = 0; g < G; g++) {
            stream.fetch(std::max(1, Pairs<C>::PAIRS * LANES / dim));
            add_scores<R, pairs>(queries, dim, rows + g * LANES, at, acc[g]);
        }
    });
#pragma GCC unroll 2
    for (int g = 0; g < G; g++)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) store(scores + r * TILE + g * LANES, acc[g][r] * scale);
}

// sums[R][V * 16 of dim] += weights[R][count] . values
template <int R, int V, typename C>
void add_few(const bf16 *weights, const C *const *rows, int at, float *sums, int count, int dim, RowStream<bf16, C> &stream) {
    f32s acc[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = load(sums + r * dim + v * LANES);
    for (int i = 0; i < count; i += 2) {
        if (at == 0) stream.fetch(1);
        i32s value[V];
        Pairs<C>::interleave(rows[i] + dim + at, rows[i + 1] + dim + at, value);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const i32s p = splat_word(weights + r * TILE + i);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[r][v] = dot_pairs(acc[r][v], p, value[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(sums + r * dim + v * LANES, acc[r][v]);
}

// scores[R][V * 16 of TILE] = scale * queries[R][dim] . keys
template <int R, int V> void score_pairs(const bf16 *queries, const uint32_t *keys, float *scores, int dim, float scale) {
    f32s acc[R][V] = {};
    for (int d = 0; d < dim / 2; d++) {
        i32s key[V];
        for (int v = 0; v < V; v++) key[v] = load_bytes(keys + d * TILE + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const i32s q = splat_word(queries + r * dim + 2 * d);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[r][v] = dot_pairs(acc[r][v], q, key[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(scores + r * TILE + v * LANES, acc[r][v] * scale);
}

// sums[R][V * 16 of dim] += weights[R][count] . values
template <int R, int V> void add_pairs(const bf16 *weights, const uint32_t *values, float *sums, int count, int dim) {
    f32s acc[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = load(sums + r * dim + v * LANES);
    for (int i = 0; i < count / 2; i++) {
        i32s value[V];
        for (int v = 0; v < V; v++) value[v] = load_bytes(values + i * dim + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const i32s p = splat_word(weights + r * TILE + 2 * i);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[r][v] = dot_pairs(acc[r][v], p, value[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(sums + r * dim + v * LANES, acc[r][v]);
}

// In pairs. For more than one group of rows a tile's pairs are put down first: keys [dim / 2][TILE], values [TILE / 2][dim].
template <typename C> struct PairWork {
    alignas(64) float scores[GROUP * TILE];
    alignas(64) bf16 weights[GROUP * TILE];
    std::vector<bf16> queries; // [rows][dim]
    std::vector<uint32_t> keys, values;
    static constexpr bool SCALES_LATER = SCALE<C> != 0; // by scores and weights, which are wider than what is multiplied here
    Sums so_far;

    void begin(int rows, int dim) {
        queries.resize(rows * dim);
        keys.resize(TILE * dim / 2);
        values.resize(TILE * dim / 2);
    }

    void take(int row, const bf16 *query, int dim, float) { Pairs<C>::arrange(query, &queries[row * dim], dim); }

    void score(const Tile<C> &tile, int row, int rows, int dim, float scale, RowStream<bf16, C> &stream) {
        const bf16 *query = &queries[row * dim];
        by_rows(rows - row, [&](auto r) {
            if (rows <= GROUP) {
                int i = 0;
                for (; i + 2 * LANES <= tile.count; i += 2 * LANES)
                    score_few<r, 2>(query, tile.rows + i, scores + i, dim, scale, stream);
                if (i < tile.count) score_few<r, 1>(query, tile.rows + i, scores + i, dim, scale, stream);
            } else if (tile.count == LANES) {
                score_pairs<r, 1>(query, keys.data(), scores, dim, scale);
            } else if (tile.count == 2 * LANES) {
                score_pairs<r, 2>(query, keys.data(), scores, dim, scale);
            } else {
                score_pairs<r, VECTORS>(query, keys.data(), scores, dim, scale);
            }
        });
    }


    void add(const Tile<C> &tile, int row, int rows, int dim, RowStream<bf16, C> &stream) {
        float *sums = &so_far.sums[row * dim];
        by_rows(rows - row, [&](auto r) {
            int d = 0;
            for (; d + 4 * LANES <= dim; d += 4 * LANES) add_some<r, 4>(tile, d, sums + d, rows, dim, stream);
            for (; d < dim; d += LANES) add_some<r, 1>(tile, d, sums + d, rows, dim, stream);
        });
    }

    template <int R, int V>
    void add_some(const Tile<C> &tile, int d, float *sums, int rows, int dim, RowStream<bf16, C> &stream) {
        if (rows <= GROUP)
            add_few<R, V>(weights, tile.rows, d, sums, tile.count, dim, stream);
        else
            add_pairs<R, V>(weights, values.data() + d, sums, tile.count, dim);
    }

    template <int P> void put_keys(const C *const *rows, int d, int at) {
        Pairs<C> pairs;
        pairs.template load<P>(rows, d);
#pragma GCC unroll 32
        for (int p = 0; p < P; p++) store(reinterpret_cast<float *>(&keys[(d / 2 + p) * TILE + at]), (f32s)pairs.pair(p));
    }

    void read(const Tile<C> &tile, int rows, int dim, RowStream<bf16, C> &stream) {
        if (rows <= GROUP) return; // they are made in registers, and used there
        for (int i = 0; i < tile.count; i += LANES)
            by_pairs<C>(dim, [&](auto pairs, int d) {
                stream.fetch(std::max(1, 2 * Pairs<C>::PAIRS * LANES / dim));
                put_keys<pairs>(tile.rows + i, d, i);
            });
        for (int i = 0; i < tile.count; i += 2)
            for (int d = 0; d < dim; d += LANES) {
                i32s value[1];
                Pairs<C>::interleave(tile.rows[i] + dim + d, tile.rows[i + 1] + dim + d, value);
                std::memcpy(&values[i / 2 * dim + d], value, sizeof value);
            }
    }
};

template <> struct Chosen<bf16, bf16> {
    typedef PairWork<bf16> Work;
};

#if defined(__AVX512VBMI__)
template <> struct Chosen<bf16, e4m3> {
    typedef PairWork<e4m3> Work;
};

template <> struct Chosen<bf16, int8> {
    typedef PairWork<int8> Work;
};
#endif

#endif

} // namespace diptych
