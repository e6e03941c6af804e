// Products with weights of 4, 5 and 6 bits: the lower four bits are stored as nibbles, followed by a plane of the rest.
//
// A unit of 32 inputs (5 bits) or 16 (6 bits) consists of its nibbles, two vectors per 8 inputs, and two vectors of
// upper bits. Byte b of a plane contains the upper bits of the weights whose nibbles are in byte b of the unit's
// vectors. Starting at the lowest bits: low half of the first vector, its high half, low half of the next one, etc.
#pragma once

#include "tile.h"

namespace diptych {

// The upper HIGH bits of the `nibble`-th nibbles of a unit, where they belong in a byte.
template <int HIGH> inline i32s upper_bits(i32s plane, int nibble) {
    const int shift = 4 - HIGH * nibble;
    const i32s moved = shift >= 0 ? plane << shift : plane >> -shift;
    return moved & splat_word(HIGH == 1 ? "\x10\x10\x10\x10" : "\x30\x30\x30\x30");
}

// The scales and offsets of a panel's outputs, group by group.
template <typename F> struct GroupScales {
    const char *scale, *offset;
    int64_t group, at = 0;

    GroupScales(const Weights &w, int64_t panel)
        : scale(static_cast<const char *>(w.scale) + panel * F::scale_bytes(w.k, w.group)),
          offset(static_cast<const char *>(w.offset) + panel * F::offset_bytes(w.k, w.group)), group(w.group) {}

    void next(f32s (&scales)[2], f32s (&offsets)[2]) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            if constexpr (!F::STEPS) {
                scales[half] = load_fp16(reinterpret_cast<const fp16 *>(scale) + half * LANES);
                offsets[half] = load_fp16(reinterpret_cast<const fp16 *>(offset) + half * LANES);
            } else {
                const fp16 *factors = reinterpret_cast<const fp16 *>(scale) + half * LANES;
                const int8 *steps = reinterpret_cast<const int8 *>(offset) + half * LANES;
                scales[half] = load_fp16(factors) * load_int8(steps);
                if constexpr (F::OFFSET_STEPS)
                    offsets[half] = load_fp16(factors + PANEL) * load_int8(steps + PANEL);
                else
                    offsets[half] = scales[half] * -32.f;
            }
        }
        at += group;
        if constexpr (F::STEPS) {
            offset += F::offset_bytes(group, group);
            if (at % BLOCK == 0) scale += F::scale_bytes(BLOCK, group);
        } else {
            offset += F::offset_bytes(group, group), scale += F::scale_bytes(group, group);
        }
    }
};

template <int R, typename F>
inline void multiply_nibbles(const Weights &w, int64_t panel, const Inputs &x, int64_t row, Fetcher &fetcher,
                             f32s (&out)[R][2]) {
    constexpr int HIGH = F::BITS - 4, UNIT = HIGH ? 32 / HIGH : 8, OCTETS = UNIT / 8;
    const int64_t groups = w.k / w.group, units = w.group / UNIT;
    const char *weights = w.template panel_of<F>(panel);
    const char *rows = static_cast<const char *>(x.data) + row * w.k;
    const float *factor = x.scale + row * groups, *sum = x.sum + row * groups;
    const i32s low_half = splat_word("\x0f\x0f\x0f\x0f");
    GroupScales<F> group_scales(w, panel);
    f32s total[R][2] = {};
    for (int64_t g = 0; g < groups; g++) {
        fetcher.step();
        i32s acc[R][2] = {};
        for (int64_t unit = 0; unit < units; unit++) {
            i32s plane = {}, plane2 = {};
            if constexpr (HIGH != 0) {
                plane = load_bytes(weights + OCTETS * 2 * VECTOR);
                plane2 = load_bytes(weights + (OCTETS * 2 + 1) * VECTOR);
                fetch_ahead<R>(weights + OCTETS * 2 * VECTOR);
            }
#pragma GCC unroll 4
            for (int octet = 0; octet < OCTETS; octet++, weights += 2 * VECTOR, rows += 8) {
                const i32s both = load_bytes(weights), both2 = load_bytes(weights + VECTOR);
                fetch_ahead<R>(weights);
                i32s low = both & low_half, high = both2 & low_half;
                i32s low2 = (both >> 4) & low_half, high2 = (both2 >> 4) & low_half;
                if constexpr (HIGH != 0) {
                    low |= upper_bits<HIGH>(plane, 2 * octet), high |= upper_bits<HIGH>(plane2, 2 * octet);
                    low2 |= upper_bits<HIGH>(plane, 2 * octet + 1), high2 |= upper_bits<HIGH>(plane2, 2 * octet + 1);
                }
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const i32s a = splat_word(rows + r * w.k), b = splat_word(rows + r * w.k + 4);
                    acc[r][0] = dot_nibbles(acc[r][0], low, a, low2, b);
                    acc[r][1] = dot_nibbles(acc[r][1], high, a, high2, b);
                }
            }
            if constexpr (HIGH != 0) weights += 2 * VECTOR;
        }
        f32s scales[2], offsets[2];
        group_scales.next(scales, offsets);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const f32s f = splat(factor[r * groups + g]), s = splat(sum[r * groups + g]);
            // One at a time: a sum of two products may be fused in either way, and clang chose by the number of rows.
            total[r][0] += __builtin_convertvector(acc[r][0], f32s) * f * scales[0];
            total[r][1] += __builtin_convertvector(acc[r][1], f32s) * f * scales[1];
            total[r][0] += s * offsets[0];
            total[r][1] += s * offsets[1];
        }
    }
    copy_tile(total, out);
}

template <int R, int64_t BITS>
inline void multiply_tile(Nibbles<BITS>, const Weights &w, int64_t panel, const Inputs &x, int64_t row,
                          Fetcher &fetcher, f32s (&out)[R][2]) {
    multiply_nibbles<R, Nibbles<BITS>>(w, panel, x, row, fetcher, out);
}

template <int R, int64_t BITS, bool OFFSET_STEPS>
inline void multiply_tile(SteppedNibbles<BITS, OFFSET_STEPS>, const Weights &w, int64_t panel, const Inputs &x,
                          int64_t row, Fetcher &fetcher, f32s (&out)[R][2]) {
    multiply_nibbles<R, SteppedNibbles<BITS, OFFSET_STEPS>>(w, panel, x, row, fetcher, out);
}

} // namespace diptych
