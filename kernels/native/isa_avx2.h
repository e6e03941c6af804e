// x86-64 with AVX2: vectors of 32 bytes; with F16C and AVX-VNNI where the machine has them.
#pragma once

#include <immintrin.h>

namespace diptych {
constexpr int LANES = 8, REGISTERS = 16;
#if defined(__F16C__)
constexpr bool WIDENS_FP16 = true;
#else
constexpr bool WIDENS_FP16 = false;
#endif
#if defined(__AVXVNNI__)
constexpr bool DOTS_INT8 = true;
#else
constexpr bool DOTS_INT8 = false;
#endif
constexpr bool DOTS_BF16 = false;
} // namespace diptych

#include "portable.h"

namespace diptych {

using portable::dot_pairs;
using portable::hold;
using portable::largest;
using portable::power_of_two;
using portable::store_bf16;
using portable::sum;

inline f32s load_bf16(const bf16 *p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return (f32s)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
}

#if defined(__F16C__)
inline f32s load_fp16(const fp16 *p) {
    return (f32s)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}

// e4m3's bits moved up by seven are 1/256 of its number in fp16, the smallest ones too.
inline f32s load_e4m3(const e4m3 *p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
    const __m128i number = _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7), _mm_set1_epi16(int16_t(0xbf80)));
    const __m128i negative = _mm_or_si128(number, _mm_set1_epi16(int16_t(0x8000)));
    const __m128i nan = _mm_cmpeq_epi16(negative, _mm_set1_epi16(int16_t(0xbf80)));
    return (f32s)_mm256_cvtph_ps(_mm_or_si128(number, nan)) * 256.f;
}
#else
using portable::load_e4m3;
using portable::load_fp16;
#endif

inline f32s load_int8(const int8 *p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
    return (f32s)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

inline bool any_above(f32s x, float limit) {
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
}

inline void transpose(f32s (&block)[LANES]) {
    __m256 t[8], r[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps((__m256)block[i], (__m256)block[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps((__m256)block[i], (__m256)block[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        block[i] = (f32s)_mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        block[i + 4] = (f32s)_mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
}

#if defined(__AVXVNNI__)
inline i32s dot_bytes(i32s acc, i32s u, i32s s) {
    return (i32s)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)u, (__m256i)s);
}

inline i32s dot_nibbles(i32s acc, i32s u, i32s s, i32s u2, i32s s2) { return dot_bytes(dot_bytes(acc, u, s), u2, s2); }
#else
// By way of 16 bits, since the sum of two products of bytes is wider: even bytes and odd ones.
inline i32s dot_bytes(i32s acc, i32s u, i32s s) {
    const __m256i low = _mm256_set1_epi16(255), a = (__m256i)u, b = (__m256i)s;
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return acc + (i32s)_mm256_add_epi32(even, odd);
}

// The sums of four products of 6 bits by 8 fit 16 bits.
inline i32s dot_nibbles(i32s acc, i32s u, i32s s, i32s u2, i32s s2) {
    const __m256i first = _mm256_maddubs_epi16((__m256i)u, (__m256i)s);
    const __m256i second = _mm256_maddubs_epi16((__m256i)u2, (__m256i)s2);
    return acc + (i32s)_mm256_madd_epi16(_mm256_add_epi16(first, second), _mm256_set1_epi16(1));
}
#endif

} // namespace diptych
