// Plain vector arithmetic versions of all primitives of an instruction set header: see README.md. The comments here are
// the specification. Headers use these versions where their instructions offer nothing better.
#pragma once

#include "vector_types.h"

namespace diptych {
namespace portable {

inline f32s load_bf16(const bf16 *p) {
    u16s h;
    std::memcpy(&h, p, sizeof h);
    return as_floats(__builtin_convertvector(h, u32s) << 16);
}

inline f32s load_fp16(const fp16 *p) {
    f32s v;
    for (int i = 0; i < LANES; i++) v[i] = widened(p[i]);
    return v;
}

// Exact.
inline f32s load_e4m3(const e4m3 *p) {
    u8s bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    const u32s wide = __builtin_convertvector(bytes, u32s), size = wide & 0x7fu;
    // Not left to float32's subnormals, which may be slow.
    const f32s small = __builtin_convertvector((i32s)size, f32s) * 0x1p-9f;
    u32s bits = size < E4M3_NORMAL ? as_bits(small) : (size << 20) + (E4M3_BIAS << 23);
    bits = size == E4M3_NAN ? size - size + 0x7fc00000u : bits;
    return as_floats(bits | (wide & 0x80u) << 24);
}

inline f32s load_int8(const int8 *p) {
    i8s numbers;
    std::memcpy(&numbers, p, sizeof numbers);
    return __builtin_convertvector(__builtin_convertvector(numbers, i32s), f32s);
}

// To nearest, ties to even; NaN stays NaN. Subnormals may become zero.
inline void store_bf16(bf16 *p, f32s v) {
    const u32s w = as_bits(v);
    const u32s rounded = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
    const u32s quiet = (w >> 16) | 0x40u;
    const u32s chosen = (u32s)(v != v) ? quiet : rounded;
    const u16s h = __builtin_convertvector(chosen, u16s);
    std::memcpy(p, &h, sizeof h);
}

// Keeps a value that several operations use in a register, where compilers would rather load it again for each.
inline void hold(f32s &) {}

inline float sum(f32s v) {
    float lanes[LANES];
    std::memcpy(lanes, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

inline int32_t sum(i32s v) {
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

inline float largest(f32s v) {
    float lanes[LANES];
    std::memcpy(lanes, &v, sizeof v);
    float best = lanes[0];
    for (int i = 1; i < LANES; i++) best = lanes[i] > best ? lanes[i] : best;
    return best;
}

// Whether a lane of x is above `limit`.
inline bool any_above(f32s x, float limit) { return largest(x) > limit; }

// 2^x for x <= 127; zero far below and for NaN. ROUGHLY: good enough for what is rounded to bf16.
template <bool ROUGHLY = false> inline f32s power_of_two(f32s x) {
    const i32s seen = x > -126.f;
    x = seen ? x : splat(-126.f);
    const f32s n = (x + splat(ROUNDER)) - splat(ROUNDER);
    const f32s p = ROUGHLY ? power_of_fraction_roughly(x - n) : power_of_fraction(x - n);
    return seen ? p * power_of_integer(n) : f32s{};
}

// Transposes LANES rows of LANES elements.
inline void transpose(f32s (&block)[LANES]) {
    for (int d = 0; d < LANES; d++)
        for (int i = 0; i < d; i++) {
            const float held = block[i][d];
            block[i][d] = block[d][i];
            block[d][i] = held;
        }
}

// acc[i] += sum over 4 of u[i * 4 + j] * s[i * 4 + j], u unsigned and s signed bytes.
inline i32s dot_bytes(i32s acc, i32s u, i32s s) {
#pragma GCC unroll 4
    for (int shift = 0; shift < 32; shift += 8) acc += ((u >> shift) & 255) * (s << (24 - shift) >> 24);
    return acc;
}

// The same twice, u and u2 at most 63, s and s2 at least -127.
inline i32s dot_nibbles(i32s acc, i32s u, i32s s, i32s u2, i32s s2) { return dot_bytes(dot_bytes(acc, u, s), u2, s2); }

// acc[i] += x[2 * i] * w[2 * i] + x[2 * i + 1] * w[2 * i + 1] of bf16 numbers.
inline f32s dot_pairs(f32s acc, i32s x, i32s w) {
    const u32s a = (u32s)x, b = (u32s)w;
    const f32s a0 = as_floats(a << 16), a1 = as_floats(a & 0xffff0000u);
    const f32s b0 = as_floats(b << 16), b1 = as_floats(b & 0xffff0000u);
    return acc + a0 * b0 + a1 * b1;
}

} // namespace portable
} // namespace diptych
