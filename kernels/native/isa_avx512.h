// x86-64 with AVX-512: vectors of 64 bytes; with BW, VNNI and BF16 where the machine has them.
#pragma once

#include <immintrin.h>

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define DIPTYCH_BF16 1 // what multiplies pairs of bf16 is compiled: see isa_avx512_bf16.h
#endif

namespace diptych {
constexpr int LANES = 16, REGISTERS = 32;
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr bool DOTS_INT8 = true;
#else
constexpr bool DOTS_INT8 = false;
#endif
#if defined(DIPTYCH_BF16)
constexpr bool DOTS_BF16 = true;
#else
constexpr bool DOTS_BF16 = false;
#endif
constexpr bool WIDENS_FP16 = true;
} // namespace diptych

#include "portable.h"

namespace diptych {

inline f32s load_bf16(const bf16 *p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return (f32s)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

inline f32s load_fp16(const fp16 *p) {
    return (f32s)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}

// e4m3's bits moved up by seven are 1/256 of its number in fp16, the smallest ones too.
inline f32s load_e4m3(const e4m3 *p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    const __m256i number = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(int16_t(0xbf80)));
    const __m256i negative = _mm256_or_si256(number, _mm256_set1_epi16(int16_t(0x8000)));
    const __m256i nan = _mm256_cmpeq_epi16(negative, _mm256_set1_epi16(int16_t(0xbf80)));
    return (f32s)_mm512_cvtph_ps(_mm256_or_si256(number, nan)) * 256.f;
}

inline f32s load_int8(const int8 *p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return (f32s)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

#if defined(__AVX512BF16__)
inline void store_bf16(bf16 *p, f32s v) { // subnormals become zero
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), (__m256i)_mm512_cvtneps_pbh((__m512)v));
}
#else
using portable::store_bf16;
#endif

inline void hold(f32s &v) { asm("" : "+v"(v)); }

inline float sum(f32s v) { return _mm512_reduce_add_ps((__m512)v); }
inline int32_t sum(i32s v) { return _mm512_reduce_add_epi32((__m512i)v); }
inline float largest(f32s v) { return _mm512_reduce_max_ps((__m512)v); }

inline bool any_above(f32s x, float limit) {
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
}

template <bool ROUGHLY = false> inline f32s power_of_two(f32s x) {
    x = x > -200.f ? x : splat(-200.f);
    const f32s n = (f32s)_mm512_roundscale_ps((__m512)x, 0);
    const f32s p = ROUGHLY ? power_of_fraction_roughly(x - n) : power_of_fraction(x - n);
    return (f32s)_mm512_scalef_ps((__m512)p, (__m512)n);
}

inline void transpose(f32s (&block)[LANES]) {
    __m512 t[16], r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = (__m512)block[i];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
        const __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 2]);
        const __m512d c = _mm512_castps_pd(t[i + 1]), d = _mm512_castps_pd(t[i + 3]);
        r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
        r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
        r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        block[i] = (f32s)_mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        block[i + 4] = (f32s)_mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        block[i + 8] = (f32s)_mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        block[i + 12] = (f32s)_mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
inline i32s dot_bytes(i32s acc, i32s u, i32s s) {
    return (i32s)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)s);
}

inline i32s dot_nibbles(i32s acc, i32s u, i32s s, i32s u2, i32s s2) { return dot_bytes(dot_bytes(acc, u, s), u2, s2); }
#elif defined(__AVX512BW__)
// By way of 16 bits, since the sum of two products of bytes is wider: even bytes and odd ones.
inline i32s dot_bytes(i32s acc, i32s u, i32s s) {
    const __m512i low = _mm512_set1_epi16(255), a = (__m512i)u, b = (__m512i)s;
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(a, low), _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
    return acc + (i32s)_mm512_add_epi32(even, odd);
}

// The sums of four products of 6 bits by 8 fit 16 bits.
inline i32s dot_nibbles(i32s acc, i32s u, i32s s, i32s u2, i32s s2) {
    const __m512i first = _mm512_maddubs_epi16((__m512i)u, (__m512i)s);
    const __m512i second = _mm512_maddubs_epi16((__m512i)u2, (__m512i)s2);
    return acc + (i32s)_mm512_madd_epi16(_mm512_add_epi16(first, second), _mm512_set1_epi16(1));
}
#else
using portable::dot_bytes;
using portable::dot_nibbles;
#endif

#if defined(DIPTYCH_BF16)
inline f32s dot_pairs(f32s acc, i32s x, i32s w) {
    return (f32s)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)w);
}
#else
using portable::dot_pairs;
#endif

} // namespace diptych

#if defined(DIPTYCH_BF16)
#include "isa_avx512_bf16.h"
#endif
