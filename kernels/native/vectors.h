// The machine's vectors: the primitives of its instruction set, and the arithmetic that is the same on all of them.
#pragma once

#if defined(__AVX512F__)
#include "isa_avx512.h"
#elif defined(__AVX2__)
#include "isa_avx2.h"
#elif defined(__aarch64__)
#include "isa_neon.h"
#else
#include "isa_portable.h"
#endif

namespace diptych {

inline f32s load(const bf16 *p) { return load_bf16(p); }
inline f32s load(const fp16 *p) { return load_fp16(p); }
inline f32s load(const e4m3 *p) { return load_e4m3(p); }
inline f32s load(const int8 *p) { return load_int8(p); }
inline void store(bf16 *p, f32s v) { store_bf16(p, v); }

inline void store(e4m3 *p, f32s v) { // to nearest, ties to even, at most 448; NaN stays NaN
    const u32s sign = as_bits(v) & 0x80000000u;
    f32s size = as_floats(as_bits(v) ^ sign);
    size = size > 448.f ? splat(448.f) : size;
    const u32s bits = as_bits(size);
    const u32s normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (E4M3_BIAS << 3);
    const f32s magic = splat(0x1.8p14f); // floats there are as far apart as the smallest e4m3 numbers are
    const u32s small = as_bits(size + magic) - as_bits(magic);
    u32s result = (u32s)(size < 0x1p-6f) != 0u ? small : normal;
    result = (u32s)(v != v) != 0u ? result - result + E4M3_NAN : result;
    const u8s bytes = __builtin_convertvector(result | sign >> 24, u8s);
    std::memcpy(p, &bytes, sizeof bytes);
}

// Copies dim numbers to a key or a value of a cache, or to another type. The scale is unused: these types have none.
template <typename C, typename T> void put_row(C *to, float *, const T *x, int64_t dim) {
    for (int64_t i = 0; i < dim; i += LANES) store(to + i, load(x + i));
}

// The scale is the largest of them / 127; NaN where they are not all finite.
inline void put_row(int8 *to, float *scale, const float *x, int64_t dim) {
    f32s most = {}, odd = {};
    for (int64_t i = 0; i < dim; i += LANES) {
        const f32s v = load(x + i), size = as_floats(as_bits(v) & 0x7fffffffu);
        most = size > most ? size : most;
        odd += v - v; // zero, unless v is infinite or NaN
    }
    const float peak = largest(most);
    *scale = peak / 127.f + sum(odd);
    const float inverse = peak > 0.f ? 127.f / peak : 0.f;
    const f32s magic = splat(ROUNDER);
    for (int64_t i = 0; i < dim; i += LANES) {
        const u8s numbers = __builtin_convertvector(as_bits(load(x + i) * inverse + magic), u8s);
        std::memcpy(to + i, &numbers, sizeof numbers);
    }
}

// e^x to about one unit in the last place (Cephes' expf), for x clamped to [-87, 88].
inline f32s exponential(f32s x) {
    x = x < -87.f ? splat(-87.f) : x;
    x = x > 88.f ? splat(88.f) : x;
    const f32s magic = splat(ROUNDER);
    const f32s n = (x * 1.44269504088896341f + magic) - magic;
    f32s r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    f32s p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    return p * power_of_integer(n);
}

} // namespace diptych
