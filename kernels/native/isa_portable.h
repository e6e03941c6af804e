// Any machine: vectors of 16 bytes, which SSE2 has at least, in plain vector arithmetic.
#pragma once

namespace diptych {
constexpr int LANES = 4, REGISTERS = 16;
constexpr bool WIDENS_FP16 = false, DOTS_INT8 = false, DOTS_BF16 = false;
} // namespace diptych

#include "portable.h"

namespace diptych {

using portable::any_above;
using portable::dot_bytes;
using portable::dot_nibbles;
using portable::dot_pairs;
using portable::hold;
using portable::largest;
using portable::load_bf16;
using portable::load_e4m3;
using portable::load_fp16;
using portable::load_int8;
using portable::power_of_two;
using portable::store_bf16;
using portable::sum;
using portable::transpose;

} // namespace diptych
