// Numbers of 8 bits for a cache. e4m3: a sign, four bits of exponent, three of fraction; no infinities, one NaN (of either sign).
// int8: whole numbers; each key and each value of them has a scale.
#pragma once

#include "simd.h"

namespace diptych {

struct e4m3 {
    uint8_t bits;
};

struct int8 {
    int8_t number;
};

// Bytes of the scale of a key or a value in a cache of type C. Behind a block's keys and values of one layer and head are first
// the scales of its keys, then those of its values.
template <typename C> constexpr int SCALE = 0;
template <> constexpr int SCALE<int8> = sizeof(float);

typedef uint8_t u8s __attribute__((vector_size(LANES)));

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

constexpr uint32_t E4M3_NAN = 0x7f, E4M3_NORMAL = 8; // the least code that has a leading one
constexpr uint32_t E4M3_BIAS = 120; // what its exponents lack to be float32's

// Exact. Where float16 is at hand, a code moved by seven bits is 1/256 of its number in float16, the smallest ones too.
inline f32s load(const e4m3 *p) {
#if defined(__AVX512F__)
    const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))), 7);
    const __m256i number = _mm256_and_si256(bits, _mm256_set1_epi16(int16_t(0xbf80)));
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_or_si256(number, _mm256_set1_epi16(int16_t(0x8000))), _mm256_set1_epi16(int16_t(0xbf80)));
    return (f32s)_mm512_cvtph_ps(_mm256_or_si256(number, nan)) * 256.f;
#elif defined(DIPTYCH_HALVES) && defined(__AVX2__)
    const __m128i bits = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))), 7);
    const __m128i number = _mm_and_si128(bits, _mm_set1_epi16(int16_t(0xbf80)));
    const __m128i nan = _mm_cmpeq_epi16(_mm_or_si128(number, _mm_set1_epi16(int16_t(0x8000))), _mm_set1_epi16(int16_t(0xbf80)));
    return (f32s)_mm256_cvtph_ps(_mm_or_si128(number, nan)) * 256.f;
#else
    u8s codes;
    std::memcpy(&codes, p, sizeof codes);
    const u32s wide = __builtin_convertvector(codes, u32s), code = wide & 0x7fu;
    const f32s small = __builtin_convertvector((i32s)code, f32s) * 0x1p-9f; // not left to float32's subnormals, which may be slow
    u32s bits = code < E4M3_NORMAL ? as_bits(small) : (code << 20) + (E4M3_BIAS << 23);
    bits = code == E4M3_NAN ? code - code + 0x7fc00000u : bits;
    return as_floats(bits | (wide & 0x80u) << 24);
#endif
}

inline void store(e4m3 *p, f32s v) { // to nearest, ties to even, at most 448; NaN stays NaN
    const u32s sign = as_bits(v) & 0x80000000u;
    f32s size = as_floats(as_bits(v) ^ sign);
    size = size > 448.f ? splat(448.f) : size;
    const u32s bits = as_bits(size);
    const u32s normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (E4M3_BIAS << 3);
    const f32s magic = splat(0x1.8p14f); // the distance of numbers there is that of the smallest ones here
    const u32s small = as_bits(size + magic) - as_bits(magic);
    u32s code = (u32s)(size < 0x1p-6f) != 0u ? small : normal;
    code = (u32s)(v != v) != 0u ? code - code + E4M3_NAN : code;
    const u8s codes = __builtin_convertvector(code | sign >> 24, u8s);
    std::memcpy(p, &codes, sizeof codes);
}

inline f32s load(const int8 *p) {
#if defined(__AVX512F__)
    return (f32s)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
#elif defined(__AVX2__)
    return (f32s)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
#else
    typedef int8_t i8s __attribute__((vector_size(LANES)));
    i8s numbers;
    std::memcpy(&numbers, p, sizeof numbers);
    return __builtin_convertvector(__builtin_convertvector(numbers, i32s), f32s);
#endif
}

// dim numbers to a key or a value of a cache, or to another type. `scale` is where theirs belongs, if they have one.
template <typename C, typename T> void put_row(C *to, float *, const T *x, int64_t dim) {
    for (int64_t i = 0; i < dim; i += LANES) store(to + i, load(x + i));
}

// The scale is the largest of them / 127; NaN where they are not all finite.
inline void put_row(int8 *to, float *scale, const float *x, int64_t dim) {
    f32s most = {}, odd = {};
    for (int64_t i = 0; i < dim; i += LANES) {
        const f32s v = load(x + i), size = as_floats(as_bits(v) & 0x7fffffffu);
        most = size > most ? size : most;
        odd += v - v; // zero, unless v is infinite or none
    }
    const float peak = largest(most);
    *scale = peak / 127.f + sum(odd);
    const float inverse = peak > 0.f ? 127.f / peak : 0.f;
    const f32s magic = splat(12582912.f); // 1.5 * 2^23: adding it rounds to an integer, ties to even
    for (int64_t i = 0; i < dim; i += LANES) {
        const u8s numbers = __builtin_convertvector(as_bits(load(x + i) * inverse + magic), u8s); // the lowest bits
        std::memcpy(to + i, &numbers, sizeof numbers);
    }
}

} // namespace diptych
