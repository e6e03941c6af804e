// AVX-512 support for products of bf16 pairs: loading pairs from a KV cache and from 12-bit weights.
#pragma once

#include "portable.h"

#include <algorithm>
#include <type_traits>

namespace diptych {

// Reads what this points at where it is used: there are too few registers to keep it.
template <typename P> inline void again(P &pointer) { asm("" : "+r"(pointer)); }

// WORDS words of 16 keys from there on: word by word, a key in each lane.
template <int WORDS, typename C> inline void transpose_words(const C *const *keys, int at, f32s (&words)[LANES]) {
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

// How bf16 pairs come out of a cache of type C.
//   load<P>        takes P pairs of dimensions, at most PAIRS and a multiple of UNIT, of 16 keys;
//   pair           is the p-th of these, a key in each lane;
//   arrange        reorders a query's numbers as these pairs are;
//   interleave<V>  has 16 * V dimensions of two keys' values, side by side.
template <typename C> struct Pairs;

template <> struct Pairs<bf16> {
    static constexpr int PAIRS = 16, UNIT = 8;
    f32s rows[LANES];

    template <int P> void load(const bf16 *const *keys, int at) { transpose_words<P>(keys, at, rows); }

    i32s pair(int p) const { return (i32s)rows[p]; }

    static void arrange(const bf16 *query, bf16 *to, int dim) { std::memcpy(to, query, dim * sizeof(bf16)); }

    template <int V> static void interleave(const bf16 *even, const bf16 *odd, i32s (&values)[V]) {
        const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, //
                                               39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(even + v * LANES));
            const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(odd + v * LANES));
            const __m512i a = _mm512_castsi256_si512(first), b = _mm512_castsi256_si512(second);
            values[v] = (i32s)_mm512_permutex2var_epi16(a, order, b);
        }
    }
};

#if defined(__AVX512VBMI__)

// bf16's bits of the number that a byte without its sign is.
constexpr uint32_t bf16_bits(const e4m3 *, uint32_t byte) {
    if (byte == E4M3_NAN) return 0x7fc0;
    if (byte >= E4M3_NORMAL) return (byte << 4) + (E4M3_BIAS << 7);
    uint32_t top = 2; // the others are byte / 512
    while (top && !(byte >> top)) top--;
    return byte ? (118 + top) << 7 | (byte ^ 1u << top) << (7 - top) : 0;
}

constexpr uint32_t bf16_bits(const int8 *, uint32_t byte) {
    uint32_t top = 6;
    while (top && !(byte >> top)) top--;
    return byte ? (127 + top) << 7 | (byte ^ 1u << top) << (7 - top) : 0;
}

template <typename C> struct Bf16Table {
    alignas(64) uint8_t low[128], high[128];

    constexpr Bf16Table() : low(), high() {
        for (uint32_t byte = 0; byte < 128; byte++) {
            const uint32_t bits = bf16_bits((const C *)nullptr, byte);
            low[byte] = uint8_t(bits), high[byte] = uint8_t(bits >> 8);
        }
    }
};

template <typename C> alignas(64) constexpr Bf16Table<C> BF16_TABLE;

// Of numbers of 8 bits: of dimensions 0 to 3 the pairs are 0 and 2, 1 and 3, and so on.
template <typename C> struct Pairs {
    static_assert(sizeof(C) == 1);
    static constexpr int PAIRS = 32, UNIT = 8;
    f32s rows[LANES]; // of four bytes

    template <int P> void load(const C *const *keys, int at) { transpose_words<P / 2>(keys, at, rows); }

    i32s pair(int p) const {
        const Halves halves((__m512i)rows[p / 2]);
        const __m512i lower = _mm512_set1_epi16(0xff);
        if (p % 2 == 0) return (i32s)chosen(lower, halves.low, _mm512_slli_epi16(halves.high, 8));
        return (i32s)chosen(lower, _mm512_srli_epi16(halves.low, 8), halves.high);
    }

    static void arrange(const bf16 *query, bf16 *to, int dim) {
        for (int d = 0; d < dim; d += 4) {
            to[d] = query[d], to[d + 1] = query[d + 2];
            to[d + 2] = query[d + 1], to[d + 3] = query[d + 3];
        }
    }

    template <int V> static void interleave(const C *even, const C *odd, i32s (&values)[V]) {
        if constexpr (V == 4) {
            // So that unpacking, which goes by 16 bytes, leaves dimensions in order.
            const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
            const __m512i a = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(even));
            const __m512i b = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(odd));
            const Halves first(_mm512_unpacklo_epi8(a, b)), second(_mm512_unpackhi_epi8(a, b));
            values[0] = (i32s)_mm512_unpacklo_epi8(first.low, first.high);
            values[1] = (i32s)_mm512_unpackhi_epi8(first.low, first.high);
            values[2] = (i32s)_mm512_unpacklo_epi8(second.low, second.high);
            values[3] = (i32s)_mm512_unpackhi_epi8(second.low, second.high);
        } else {
            static_assert(V == 1);
            const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i *>(even));
            const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i *>(odd));
            // Dimensions of both, to the lower half of every 16 bytes.
            const int64_t four = 0x1303120211011000, ones = 0x0101010101010101;
            const int64_t fours[] = {four, four + 4 * ones, four + 8 * ones, four + 12 * ones};
            const __m512i order = _mm512_set_epi64(0, fours[3], 0, fours[2], 0, fours[1], 0, fours[0]);
            const __m512i both = _mm512_inserti32x4(_mm512_castsi128_si512(a), b, 1);
            const Halves halves(_mm512_permutexvar_epi8(order, both));
            values[0] = (i32s)_mm512_unpacklo_epi8(halves.low, halves.high);
        }
    }

private:
    // The low and the high bytes of the bf16 numbers that bytes of type C are.
    struct Halves {
        __m512i low, high;

        explicit Halves(__m512i bytes) {
            const __m512i size = magnitude(bytes), sign = _mm512_set1_epi8(-128);
            low = looked_up(BF16_TABLE<C>.low, size);
            // high | (bytes & sign)
            high = _mm512_ternarylogic_epi32(looked_up(BF16_TABLE<C>.high, size), bytes, sign, 0xf8);
        }

        // A table looks at its seven low bits only.
        static __m512i magnitude(__m512i bytes) {
            if constexpr (std::is_same_v<C, int8>)
                return _mm512_abs_epi8(bytes);
            else
                return bytes;
        }

        static __m512i looked_up(const uint8_t *table, __m512i bytes) {
            return _mm512_permutex2var_epi8(_mm512_load_si512(table), bytes, _mm512_load_si512(table + 64));
        }
    };

    static __m512i chosen(__m512i mask, __m512i set, __m512i clear) {
        return _mm512_ternarylogic_epi32(mask, set, clear, 0xca);
    }
};

#endif

// The table of a panel's exponents, in registers: see bf16_12bit.h.
class ExponentRegisters {
public:
    explicit ExponentRegisters(const uint8_t *table)
        : high(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table)))),
          low(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table + 16)))) {}

    // Pairs of 16 outputs and of the next 16, from codes of exponents, whose lower halves count, and signs and
    // fractions.
    void expand(i32s codes, i32s rest, i32s &first, i32s &second) const {
        const __m512i code = _mm512_and_si512((__m512i)codes, _mm512_set1_epi8(15)), sign = _mm512_set1_epi8(-128);
        // (rest & sign) | high byte, (rest & ~sign) | low byte
        const __m512i upper = _mm512_ternarylogic_epi32((__m512i)rest, sign, _mm512_shuffle_epi8(high, code), 0xea);
        const __m512i lower = _mm512_ternarylogic_epi32((__m512i)rest, sign, _mm512_shuffle_epi8(low, code), 0xba);
        first = (i32s)_mm512_unpacklo_epi8(lower, upper);
        second = (i32s)_mm512_unpackhi_epi8(lower, upper);
    }

private:
    __m512i high, low;
};

} // namespace diptych
