// Vectors as wide as the machine's registers: of wider ones a compiler keeps the parts in memory, whatever is done with them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace diptych {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif
constexpr int VECTOR = 4 * LANES; // bytes
constexpr int LINE = 64; // bytes of the cache's lines
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

typedef float f32s __attribute__((vector_size(VECTOR)));
typedef int32_t i32s __attribute__((vector_size(VECTOR)));
typedef uint32_t u32s __attribute__((vector_size(VECTOR)));
typedef uint16_t u16s __attribute__((vector_size(VECTOR / 2)));

struct bf16 {
    uint16_t bits;
};

struct half { // float16
    uint16_t bits;
};

inline float widened(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float widened(half x) {
    const uint32_t sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u, fraction = x.bits & 0x3ffu;
    if (exponent == 0) return std::ldexp(sign ? -float(fraction) : float(fraction), -24);
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | (fraction << 13);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline f32s splat(float x) { return x - f32s{}; } // a number beside a vector is every lane's; less zero it stays what it is

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

inline f32s load(const bf16 *p) {
#if defined(__AVX512F__)
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return (f32s)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#elif defined(__AVX2__)
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return (f32s)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
#else
    u16s h;
    std::memcpy(&h, p, sizeof h);
    const u32s w = __builtin_convertvector(h, u32s) << 16;
    f32s v;
    std::memcpy(&v, &w, sizeof v);
    return v;
#endif
}

#if defined(__AVX512F__) || defined(__aarch64__) || (defined(__AVX2__) && defined(__F16C__))
#define DIPTYCH_HALVES 1
#endif

inline f32s load(const half *p) {
#if defined(__AVX512F__)
    return (f32s)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif defined(DIPTYCH_HALVES) && defined(__AVX2__)
    return (f32s)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#elif defined(DIPTYCH_HALVES)
    return (f32s)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
#else
    f32s v;
    for (int i = 0; i < LANES; i++) v[i] = widened(p[i]);
    return v;
#endif
}

inline void store(float *p, f32s v) { std::memcpy(p, &v, sizeof v); }

// Keeps a value that several operations use in a register, where compilers would rather load it again for each.
inline void hold(f32s &v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#else
    (void)v;
#endif
}

#if defined(__AVX512BF16__)
inline void store(bf16 *p, f32s v) { // to nearest, ties to even; NaN stays NaN, subnormals become zero
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), (__m256i)_mm512_cvtneps_pbh((__m512)v));
}
#else
inline void store(bf16 *p, f32s v) { // to nearest, ties to even; NaN stays NaN
    u32s w;
    std::memcpy(&w, &v, sizeof v);
    const u32s rounded = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
    const u32s quiet = (w >> 16) | 0x40u;
    const u32s chosen = (u32s)(v != v) ? quiet : rounded;
    const u16s h = __builtin_convertvector(chosen, u16s);
    std::memcpy(p, &h, sizeof h);
}
#endif

#if defined(__AVX512F__)
inline float sum(f32s v) { return _mm512_reduce_add_ps((__m512)v); }
inline float largest(f32s v) { return _mm512_reduce_max_ps((__m512)v); }
inline int32_t sum(i32s v) { return _mm512_reduce_add_epi32((__m512i)v); }
#else
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
#endif

// e^x to about one unit in the last place (Cephes' expf), for x clamped to [-87, 88].
inline f32s exponential(f32s x) {
    x = x < -87.f ? splat(-87.f) : x;
    x = x > 88.f ? splat(88.f) : x;
    const f32s magic = splat(12582912.f); // 1.5 * 2^23: adding and subtracting it rounds to an integer
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
    const i32s power = (__builtin_convertvector(n, i32s) + 127) << 23;
    f32s scale;
    std::memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

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

// The same to one part in 13,000, for what is rounded to bfloat16 (of least largest relative error).
inline f32s power_of_fraction_roughly(f32s r) {
    f32s p = splat(5.517166852951050e-2f);
    p = p * r + 2.426111251115799e-1f;
    p = p * r + 6.932609677314758e-1f;
    return p * r + 9.999280571937561e-1f;
}

// 2^x for x <= 127; zero far below, and for what is no number.
template <bool ROUGHLY = false> inline f32s power_of_two(f32s x) {
#if defined(__AVX512F__)
    x = x > -200.f ? x : splat(-200.f);
    const f32s n = (f32s)_mm512_roundscale_ps((__m512)x, 0);
#else
    const i32s seen = x > -126.f;
    x = seen ? x : splat(-126.f);
    const f32s magic = splat(12582912.f); // 1.5 * 2^23: adding and subtracting it rounds to an integer
    const f32s n = (x + magic) - magic;
#endif
    const f32s p = ROUGHLY ? power_of_fraction_roughly(x - n) : power_of_fraction(x - n);
#if defined(__AVX512F__)
    return (f32s)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const i32s power = (__builtin_convertvector(n, i32s) + 127) << 23;
    f32s scale;
    std::memcpy(&scale, &power, sizeof scale);
    return seen ? p * scale : f32s{};
#endif
}

// Whether a lane of x is above `limit`.
inline bool any_above(f32s x, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
#else
    return largest(x) > limit;
#endif
}

#if defined(__AVX512F__)
// As many rows as there are lanes to as many columns, in registers.
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
#elif defined(__AVX2__)
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
#else
inline void transpose(f32s (&block)[LANES]) {
    for (int d = 0; d < LANES; d++)
        for (int i = 0; i < d; i++) {
            const float held = block[i][d];
            block[i][d] = block[d][i];
            block[d][i] = held;
        }
}
#endif

} // namespace diptych
