// Sixteen float32 at a time, whatever the machine has: the compiler splits the vectors where its registers are narrower.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace diptych {

constexpr int LANES = 16;
constexpr int LINE = 64; // bytes of the cache's lines
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

inline f32x16 splat(float x) { return f32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

inline f32x16 load(const float *p) {
    f32x16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline f32x16 load(const bf16 *p) {
#if defined(__AVX512F__)
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#else
    u16x16 h;
    std::memcpy(&h, p, sizeof h);
    const u32x16 w = __builtin_convertvector(h, u32x16) << 16;
    f32x16 v;
    std::memcpy(&v, &w, sizeof v);
    return v;
#endif
}

inline void store(float *p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

// Keeps a value that several operations use in a register, where compilers would rather load it again for each.
inline void hold(f32x16 &v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#else
    (void)v;
#endif
}

#if defined(__AVX512BF16__)
inline void store(bf16 *p, f32x16 v) { // to nearest, ties to even; NaN stays NaN, subnormals become zero
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), (__m256i)_mm512_cvtneps_pbh((__m512)v));
}
#else
inline void store(bf16 *p, f32x16 v) { // to nearest, ties to even; NaN stays NaN
    u32x16 w;
    std::memcpy(&w, &v, sizeof v);
    const u32x16 rounded = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
    const u32x16 quiet = (w >> 16) | 0x40u;
    const u32x16 chosen = (u32x16)(v != v) ? quiet : rounded;
    const u16x16 h = __builtin_convertvector(chosen, u16x16);
    std::memcpy(p, &h, sizeof h);
}
#endif

#if defined(__AVX512F__)
inline float sum(f32x16 v) { return _mm512_reduce_add_ps((__m512)v); }
inline float largest(f32x16 v) { return _mm512_reduce_max_ps((__m512)v); }
inline int32_t sum(i32x16 v) { return _mm512_reduce_add_epi32((__m512i)v); }
#else
inline float sum(f32x16 v) {
    float lanes[LANES];
    std::memcpy(lanes, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

inline int32_t sum(i32x16 v) {
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

inline float largest(f32x16 v) {
    float lanes[LANES];
    std::memcpy(lanes, &v, sizeof v);
    float best = lanes[0];
    for (int i = 1; i < LANES; i++) best = lanes[i] > best ? lanes[i] : best;
    return best;
}
#endif

// e^x to about one unit in the last place (Cephes' expf), for x clamped to [-87, 88].
inline f32x16 exponential(f32x16 x) {
    x = x < -87.f ? splat(-87.f) : x;
    x = x > 88.f ? splat(88.f) : x;
    const f32x16 magic = splat(12582912.f); // 1.5 * 2^23: adding and subtracting it rounds to an integer
    const f32x16 n = (x * 1.44269504088896341f + magic) - magic;
    f32x16 r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    const i32x16 power = (__builtin_convertvector(n, i32x16) + 127) << 23;
    f32x16 scale;
    std::memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

// 2^r for |r| <= 1/2, to about one unit in the last place (Cephes' exp2f).
inline f32x16 power_of_fraction(f32x16 r) {
    f32x16 p = splat(1.535336188319500e-4f);
    p = p * r + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    return p * r + 1.f;
}

// The same to one part in 13,000, for what is rounded to bfloat16 (of least largest relative error).
inline f32x16 power_of_fraction_roughly(f32x16 r) {
    f32x16 p = splat(5.517166852951050e-2f);
    p = p * r + 2.426111251115799e-1f;
    p = p * r + 6.932609677314758e-1f;
    return p * r + 9.999280571937561e-1f;
}

// 2^x for x <= 127; zero far below, and for what is no number.
template <bool ROUGHLY = false> inline f32x16 power_of_two(f32x16 x) {
#if defined(__AVX512F__)
    x = x > -200.f ? x : splat(-200.f);
    const f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)x, 0);
#else
    const i32x16 seen = x > -126.f;
    x = seen ? x : splat(-126.f);
    const f32x16 magic = splat(12582912.f); // 1.5 * 2^23: adding and subtracting it rounds to an integer
    const f32x16 n = (x + magic) - magic;
#endif
    const f32x16 p = ROUGHLY ? power_of_fraction_roughly(x - n) : power_of_fraction(x - n);
#if defined(__AVX512F__)
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const i32x16 power = (__builtin_convertvector(n, i32x16) + 127) << 23;
    f32x16 scale;
    std::memcpy(&scale, &power, sizeof scale);
    return seen ? p * scale : f32x16{};
#endif
}

// Whether a lane of x is above `limit`.
inline bool any_above(f32x16 x, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
    return largest(x) > limit;
#endif
}

#if defined(__AVX512F__)
// 16 rows of 16 to 16 columns, in registers.
inline void transpose16(f32x16 (&block)[16]) {
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
        block[i] = (f32x16)_mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        block[i + 4] = (f32x16)_mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        block[i + 8] = (f32x16)_mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        block[i + 12] = (f32x16)_mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
}
#else
inline void transpose16(f32x16 (&block)[16]) {
    for (int d = 0; d < LANES; d++)
        for (int i = 0; i < d; i++) {
            const float held = block[i][d];
            block[i][d] = block[d][i];
            block[d][i] = held;
        }
}
#endif

} // namespace diptych
