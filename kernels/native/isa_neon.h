// ARM, 64 bits: NEON, with products of bytes where the machine has them (dotprod, i8mm).
#pragma once

#include <arm_neon.h>

namespace diptych {
constexpr int LANES = 4, REGISTERS = 32;
#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool DOTS_INT8 = true;
#else
constexpr bool DOTS_INT8 = false;
#endif
constexpr bool WIDENS_FP16 = true, DOTS_BF16 = false;
} // namespace diptych

#include "portable.h"

namespace diptych {

using portable::any_above;
using portable::dot_pairs;
using portable::hold;
using portable::largest;
using portable::load_bf16;
using portable::load_e4m3;
using portable::load_int8;
using portable::power_of_two;
using portable::store_bf16;
using portable::sum;
using portable::transpose;

inline f32s load_fp16(const fp16 *p) { return (f32s)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }

inline i32s dot_bytes(i32s acc, i32s u, i32s s) {
#if defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FEATURE_MATMUL_INT8)
    return (i32s)vusdotq_s32((int32x4_t)acc, (uint8x16_t)u, (int8x16_t)s);
#elif defined(__ARM_FEATURE_DOTPROD)
    // Signed bytes only: u - 128, and what that takes away is 128 times the sum of s.
    const int32x4_t sums = vdotq_s32(vdupq_n_s32(0), (int8x16_t)s, vdupq_n_s8(1));
    const int8x16_t less = (int8x16_t)veorq_u8((uint8x16_t)u, vdupq_n_u8(128));
    return (i32s)vaddq_s32(vdotq_s32((int32x4_t)acc, less, (int8x16_t)s), vshlq_n_s32(sums, 7));
#else
    return portable::dot_bytes(acc, u, s);
#endif
}

inline i32s dot_nibbles(i32s acc, i32s u, i32s s, i32s u2, i32s s2) { return dot_bytes(dot_bytes(acc, u, s), u2, s2); }

} // namespace diptych
