// The number types of weights, activations and KV caches, one number at a time.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace diptych {

struct bf16 {
    uint16_t bits;
};

struct fp16 {
    uint16_t bits;
};

// A sign, four bits of exponent, three of fraction; no infinities, one NaN of either sign.
struct e4m3 {
    uint8_t bits;
};

// Each key and each value of such a cache has a scale.
struct int8 {
    int8_t number;
};

constexpr uint32_t E4M3_NAN = 0x7f, E4M3_NORMAL = 8; // the least bits that have a leading one
constexpr uint32_t E4M3_BIAS = 120;                  // what its exponents lack to be float32's

// Bytes of the scale of a key or a value in a cache of type C. Behind a block's keys and values of one layer and head
// lie the scales of its keys, then those of its values.
template <typename C> constexpr int SCALE = 0;
template <> constexpr int SCALE<int8> = sizeof(float);

inline float widened(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float widened(fp16 x) {
    const uint32_t sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u, fraction = x.bits & 0x3ffu;
    if (exponent == 0) return std::ldexp(sign ? -float(fraction) : float(fraction), -24);
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | (fraction << 13);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

} // namespace diptych
