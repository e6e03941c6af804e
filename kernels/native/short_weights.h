// bfloat16 weights in 12 bits, without loss: sign and fraction take a byte, and the exponent a code of 4 bits.
//
// The exponents of a panel's weights crowd together, since sizes are spread about as a normal distribution is: 15 of them serve all but one
// weight in some thousands. Those that have another one lie in a list beside the panel. That bfloat16's exponents carry far
// fewer than 8 bits is what DFloat11 (arXiv 2504.11651) is built on; codes of one length need no table in memory.
//
//   codes:  [panel][k / 4][3][64] bytes. First the exponents' codes of two pairs of inputs, the first pair's in the low halves;
//           then sign and fraction of the one pair, and of the other. A byte's place in its 64 is that which unpacking bytes
//           to words wants: see `place`.
//   scale:  [panel][2][16] bytes: the high byte of a weight with that exponent, the sign left out, and the top bit of the low one.
//   offset: int64 [panels + 1], where each panel's odd weights begin in the list behind it, `Odd` [..].
#pragma once

#include "weights.h"

#if defined(__AVX512BF16__)
#define DIPTYCH_BF16 1
#endif

namespace diptych {

inline i32s load_bytes(const void *p) {
    i32s v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

constexpr int EXPONENTS = 16; // that have a code; code 0 is exponent 0, of zero and what is next to it

struct Odd {
    int32_t input;
    uint16_t output; // of the panel
    bf16 value;
};

inline const Odd *odds(const Weights &w, int64_t panel) {
    const int64_t *begins = static_cast<const int64_t *>(w.offset);
    return reinterpret_cast<const Odd *>(begins + w.panels() + 1) + begins[panel];
}

// Of output 0 .. 31 and input 0 or 1 of a pair.
inline int place(int64_t output, int64_t input) {
    const int64_t word = output % LANES * 2 + input; // 8 words come of 8 bytes in each 16
    return int(word / 8 * 16 + output / LANES * 8 + word % 8);
}

inline int exponent(uint16_t bits) { return bits >> 7 & 0xff; }

// A panel's table of exponents.
class Exponents {
public:
    Exponents(const Weights &w, int64_t panel) : Exponents(static_cast<const uint8_t *>(w.scale) + panel * 2 * EXPONENTS) {}

    explicit Exponents(const uint8_t *bytes) : bytes(bytes) {
#if defined(DIPTYCH_BF16)
        high = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)));
        low = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes + EXPONENTS)));
#endif
    }

    uint16_t weight(int code, uint8_t rest) const {
        return uint16_t((bytes[code] | (rest & 0x80)) << 8 | bytes[EXPONENTS + code] | (rest & 0x7f));
    }

#if defined(DIPTYCH_BF16)
    // Pairs of 16 outputs and of the next 16; only the codes' lower halves count.
    void expand(i32s codes, i32s rest, i32s &first, i32s &second) const {
        const __m512i code = _mm512_and_si512((__m512i)codes, _mm512_set1_epi8(15)), sign = _mm512_set1_epi8(-128);
        // (rest & sign) | high byte, (rest & ~sign) | low byte
        const __m512i upper = _mm512_ternarylogic_epi32((__m512i)rest, sign, _mm512_shuffle_epi8(high, code), 0xea);
        const __m512i lower = _mm512_ternarylogic_epi32((__m512i)rest, sign, _mm512_shuffle_epi8(low, code), 0xba);
        first = (i32s)_mm512_unpacklo_epi8(lower, upper);
        second = (i32s)_mm512_unpackhi_epi8(lower, upper);
    }
#endif

private:
    const uint8_t *bytes;
#if defined(DIPTYCH_BF16)
    __m512i high, low;
#endif
};

// To `bytes` the table of the exponents that a panel has most of. Says how many weights are odd.
inline int64_t choose_exponents(const uint16_t *rows, int64_t k, uint8_t *bytes) {
    int64_t count[256] = {}, odd = 0;
    for (int64_t i = 0; i < PANEL * k; i++) count[exponent(rows[i])]++;
    std::memset(bytes, 0, 2 * EXPONENTS);
    count[0] = 0;
    for (int code = 1; code < EXPONENTS; code++) {
        const int chosen = int(std::max_element(count, count + 256) - count);
        if (count[chosen] == 0) break;
        count[chosen] = 0;
        bytes[code] = uint8_t(chosen >> 1);
        bytes[EXPONENTS + code] = uint8_t((chosen & 1) << 7);
    }
    for (int e = 0; e < 256; e++) odd += count[e];
    return odd;
}

// The code of each exponent, 0 for none: [256].
inline void codes_of(const uint8_t *bytes, uint8_t *code) {
    std::memset(code, 0, 256);
    for (int c = 1; c < EXPONENTS; c++) code[bytes[c] << 1 | bytes[EXPONENTS + c] >> 7] = uint8_t(c);
    code[0] = 0;
}

// rows: bfloat16 [32][k]. `to` has room for k * 48 bytes, `odd` for those that have no code.
inline void shorten_panel(const uint16_t *rows, int64_t k, const uint8_t *code, uint8_t *to, Odd *odd) {
    for (int64_t quad = 0; quad < k / 4; quad++, to += 192)
        for (int64_t i = 0; i < 4; i++)
            for (int64_t output = 0; output < PANEL; output++) {
                const int64_t input = quad * 4 + i;
                uint16_t bits = rows[output * k + input];
                const int at = place(output, i % 2), chosen = code[exponent(bits)];
                if (chosen == 0 && exponent(bits) != 0) {
                    *odd++ = {int32_t(input), uint16_t(output), bf16{bits}};
                    bits = 0;
                }
                to[at] = uint8_t(i < 2 ? chosen : to[at] | chosen << 4);
                to[64 + i / 2 * 64 + at] = uint8_t((bits >> 8 & 0x80) | (bits & 0x7f));
            }
}

// One row of short weights, as it was.
inline void unpack_short_row(const Weights &w, int64_t row, uint16_t *to) {
    const int64_t panel = row / PANEL, output = row % PANEL;
    const Exponents exponents(w, panel);
    const uint8_t *from = static_cast<const uint8_t *>(w.codes) + panel * w.k * PANEL * 3 / 2;
    for (int64_t input = 0; input < w.k; input++) {
        const uint8_t *quad = from + input / 4 * 192;
        const int at = place(output, input % 2), second = input % 4 / 2;
        to[input] = exponents.weight(quad[at] >> 4 * second & 15, quad[64 + second * 64 + at]);
    }
    for (const Odd *odd = odds(w, panel); odd < odds(w, panel + 1); odd++)
        if (odd->output == output) to[odd->input] = odd->value.bits;
}

// One row of weights that are widened to float32.
inline void widen_row(const Weights &w, int64_t row, float *to) {
    const int64_t pair = w.format == BRAIN ? 2 : 1;
    const uint16_t *from = static_cast<const uint16_t *>(w.codes) + row / PANEL * w.k * PANEL + row % PANEL * pair;
    for (int64_t i = 0; i < w.k; i++) {
        const uint16_t bits = from[i / pair * PANEL * pair + i % pair];
        to[i] = w.format == BRAIN ? widened(bf16{bits}) : widened(half{bits});
    }
}

// One row of dense weights, as it was before it was packed.
inline void unpack_row(const Weights &w, int64_t row, void *to) {
    if (w.format == SHORT) return unpack_short_row(w, row, static_cast<uint16_t *>(to));
    if (w.format == BRAIN || w.format == HALF) return widen_row(w, row, static_cast<float *>(to));
    const int64_t words = w.format == FLOAT32 ? w.k : w.k / 2; // of four bytes
    const uint32_t *from = static_cast<const uint32_t *>(w.codes) + row / PANEL * words * PANEL + row % PANEL;
    for (int64_t i = 0; i < words; i++) std::memcpy(static_cast<uint32_t *>(to) + i, from + i * PANEL, sizeof *from);
}

} // namespace diptych
