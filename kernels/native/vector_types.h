// Vectors as wide as the machine's registers, which a header of an instruction set defines LANES for before it
// includes this.
//
// Wider vectors are no option: a compiler keeps their parts in memory.
#pragma once

#include "numbers.h"

#include <limits>

namespace diptych {

constexpr int VECTOR = 4 * LANES; // bytes
constexpr int LINE = 64;          // bytes of the cache's lines
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

typedef float f32s __attribute__((vector_size(VECTOR)));
typedef int32_t i32s __attribute__((vector_size(VECTOR)));
typedef uint32_t u32s __attribute__((vector_size(VECTOR)));
typedef uint16_t u16s __attribute__((vector_size(VECTOR / 2)));
typedef uint8_t u8s __attribute__((vector_size(LANES)));
typedef int8_t i8s __attribute__((vector_size(LANES)));

inline f32s as_floats(u32s bits) {
    f32s v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}

inline u32s as_bits(f32s v) {
    u32s bits;
    std::memcpy(&bits, &v, sizeof bits);
    return bits;
}

// Broadcasts x to all lanes. Subtracting zero preserves its value.
inline f32s splat(float x) { return x - f32s{}; }

// Four bytes into every lane.
inline i32s splat_word(const void *p) {
    int32_t word;
    std::memcpy(&word, p, sizeof word);
    return word - i32s{};
}

inline i32s iota() {
    i32s lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    return lanes;
}

inline f32s load(const float *p) {
    f32s v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline i32s load_bytes(const void *p) {
    i32s v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float *p, f32s v) { std::memcpy(p, &v, sizeof v); }

// Adding 1.5 * 2^23 to a float rounds it to an integer, ties to even, which its lowest bits hold; subtracting it
// again gives the integer as a float.
constexpr float ROUNDER = 12582912.f;

// 2^r for |r| <= 1/2, to about one unit in the last place (Cephes' exp2f).
inline f32s power_of_fraction(f32s r) {
    f32s p = splat(1.535336188319500e-4f);
    p = p * r + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    return p * r + 1.f;
}

// The same to one part in 13,000, for what is rounded to bf16 (of least largest relative error).
inline f32s power_of_fraction_roughly(f32s r) {
    f32s p = splat(5.517166852951050e-2f);
    p = p * r + 2.426111251115799e-1f;
    p = p * r + 6.932609677314758e-1f;
    return p * r + 9.999280571937561e-1f;
}

// 2^n for whole n, -127 < n < 128.
inline f32s power_of_integer(f32s n) {
    const i32s bits = (__builtin_convertvector(n, i32s) + 127) << 23;
    f32s power;
    std::memcpy(&power, &bits, sizeof power);
    return power;
}

} // namespace diptych
