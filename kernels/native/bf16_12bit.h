// bf16 weights in 12 bits, without loss: sign and fraction take a byte, and the exponent a code of 4 bits.
//
// Weights are roughly normally distributed, so a panel has few distinct exponents: 15 of them cover all but one weight
// in a few thousand. The remaining weights, the outliers, are stored in a separate list. DFloat11 (arXiv 2504.11651)
// uses the same property with variable-length codes; fixed-length codes need no table in memory.
//
//   data:   [panel][k / 4][3][64] bytes. First the exponents' codes of two pairs of inputs, the first pair's in the low
//           halves; then sign and fraction of the one pair, and of the other. A byte's place in its 64 is where
//           unpacking bytes to words wants it: see `place`.
//   scale:  [panel][2][16] bytes: the high byte of a weight with that exponent, without its sign, and the top bit of
//           the low one.
//   offset: int64 [panels + 1], start of each panel's outliers in the `Outlier` list that follows.
#pragma once

#include "weights.h"

namespace diptych {

constexpr int EXPONENTS = 16; // that have a code; code 0 is exponent 0, of zero and what is next to it

struct Outlier {
    int32_t input;
    uint16_t output; // of the panel
    bf16 value;
};
static_assert(sizeof(Outlier) == sizeof(int64_t), "Python allocates the list as int64");

inline const Outlier *outliers(const Weights &w, int64_t panel) {
    const int64_t *begins = static_cast<const int64_t *>(w.offset);
    return reinterpret_cast<const Outlier *>(begins + w.panels() + 1) + begins[panel];
}

inline const uint8_t *exponent_table(const Weights &w, int64_t panel) {
    return static_cast<const uint8_t *>(w.scale) + panel * 2 * EXPONENTS;
}

// Of output 0 .. 31 and input 0 or 1 of a pair.
inline int place(int64_t output, int64_t input) {
    const int64_t word = output % LANES * 2 + input; // 8 words come of 8 bytes in each 16
    return int(word / 8 * 16 + output / LANES * 8 + word % 8);
}

inline int exponent(uint16_t bits) { return bits >> 7 & 0xff; }

// Writes the table of a panel's commonest exponents to `table`. Returns how many weights are outliers.
inline int64_t choose_exponents(const uint16_t *rows, int64_t k, uint8_t *table) {
    int64_t count[256] = {}, others = 0;
    for (int64_t i = 0; i < PANEL * k; i++) count[exponent(rows[i])]++;
    std::memset(table, 0, 2 * EXPONENTS);
    count[0] = 0;
    for (int code = 1; code < EXPONENTS; code++) {
        const int chosen = int(std::max_element(count, count + 256) - count);
        if (count[chosen] == 0) break;
        count[chosen] = 0;
        table[code] = uint8_t(chosen >> 1);
        table[EXPONENTS + code] = uint8_t((chosen & 1) << 7);
    }
    for (int e = 0; e < 256; e++) others += count[e];
    return others;
}

// The code of each exponent, 0 for none: [256].
inline void exponent_codes(const uint8_t *table, uint8_t *code) {
    std::memset(code, 0, 256);
    for (int c = 1; c < EXPONENTS; c++) code[table[c] << 1 | table[EXPONENTS + c] >> 7] = uint8_t(c);
    code[0] = 0;
}

// rows: bf16 [32][k]. `to` has room for k * 48 bytes, `outlier` for the panel's.
inline void pack_12bit_panel(const uint16_t *rows, int64_t k, const uint8_t *code, uint8_t *to, Outlier *outlier) {
    for (int64_t quad = 0; quad < k / 4; quad++, to += 192)
        for (int64_t i = 0; i < 4; i++)
            for (int64_t output = 0; output < PANEL; output++) {
                const int64_t input = quad * 4 + i;
                uint16_t bits = rows[output * k + input];
                const int at = place(output, i % 2), chosen = code[exponent(bits)];
                if (chosen == 0 && exponent(bits) != 0) {
                    *outlier++ = {int32_t(input), uint16_t(output), bf16{bits}};
                    bits = 0;
                }
                to[at] = uint8_t(i < 2 ? chosen : to[at] | chosen << 4);
                to[64 + i / 2 * 64 + at] = uint8_t((bits >> 8 & 0x80) | (bits & 0x7f));
            }
}

// As `unpack_row` of linear.h.
inline void unpack_row(Bf16In12Bits, const Weights &w, int64_t row, void *to) {
    const int64_t panel = row / PANEL, output = row % PANEL;
    const uint8_t *table = exponent_table(w, panel);
    const uint8_t *from = reinterpret_cast<const uint8_t *>(w.panel_of<Bf16In12Bits>(panel));
    uint16_t *weights = static_cast<uint16_t *>(to);
    for (int64_t input = 0; input < w.k; input++) {
        const uint8_t *quad = from + input / 4 * 192;
        const int at = place(output, input % 2), second = input % 4 / 2;
        const uint8_t code = quad[at] >> 4 * second & 15, rest = quad[64 + second * 64 + at];
        weights[input] = uint16_t((table[code] | (rest & 0x80)) << 8 | table[EXPONENTS + code] | (rest & 0x7f));
    }
    for (const Outlier *outlier = outliers(w, panel); outlier < outliers(w, panel + 1); outlier++)
        if (outlier->output == output) weights[outlier->input] = outlier->value.bits;
}

} // namespace diptych
