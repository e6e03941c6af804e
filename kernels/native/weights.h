// The weights of one matrix, in the order in which its product reads them: see README.md.
#pragma once

#include "fetch.h"

#include <algorithm>
#include <type_traits>

namespace diptych {

constexpr int PANEL = 2 * LANES; // outputs of a panel: two vectors, side by side
constexpr int64_t STRIDE = 64;   // inputs between two steps of fetching
constexpr int DENSE_ROWS = REGISTERS == 32 ? 12 : 6, QUANTISED_ROWS = DENSE_ROWS / 2; // of a tile: what registers hold

// Formats are types. A weight takes BITS and is stored as a Number. INPUTS weights of an output are adjacent. Products
// take inputs of type Input. Panels are contiguous; the last one is padded with zeros.
template <int64_t BITS_, int64_t INPUTS_, typename Number_, typename Input_> struct FormatTraits {
    static constexpr int64_t BITS = BITS_, INPUTS = INPUTS_;
    static constexpr bool QUANTISED = std::is_same_v<Input_, int8>;      // the inputs as well: see quantise_row
    static constexpr int ROWS = QUANTISED ? QUANTISED_ROWS : DENSE_ROWS; // of a tile at most
    typedef Number_ Number;
    typedef Input_ Input;

    // Bytes of `scale` and of `offset` for a panel of quantised weights.
    static int64_t scale_bytes(int64_t, int64_t) { return 0; }
    static int64_t offset_bytes(int64_t, int64_t) { return 0; }
};

// [panel][k][PANEL]
struct Float32 : FormatTraits<32, 1, float, float> {};

// Weights of float32 models that 16 bits hold without loss. Laid out as Bf16, or as Float32.
struct WidenedBf16 : FormatTraits<16, 2, bf16, float> {};
struct WidenedFp16 : FormatTraits<16, 1, fp16, float> {};

// [panel][k / 2][PANEL][2]
struct Bf16 : FormatTraits<16, 2, bf16, bf16> {};

// bf16 without loss: see bf16_12bit.h.
struct Bf16In12Bits : FormatTraits<12, 4, void, bf16> {};

// [panel][k / 4][PANEL][4] int8 q; w = scale * q, scale fp16 [panel][k / group][PANEL]. `offset` int32 of that shape is
// -128 * sum(q), because the inputs' bytes are 128 above their values.
struct Q8 : FormatTraits<8, 4, int8, int8> {
    static int64_t scale_bytes(int64_t k, int64_t group) { return k / group * PANEL * 2; }
    static int64_t offset_bytes(int64_t k, int64_t group) { return k / group * PANEL * 4; }
};

// Weights of BITS = 4, 5 or 6: w = scale * q + offset, q 0 .. 2^BITS - 1. The lower four bits lie as [panel][k / 8]
// [PANEL][4] bytes, the first four inputs in the low halves; the rest of 32 (5 bits) or 16 inputs (6 bits) follows them
// as [PANEL][4] bytes: see nibbles.h. Scale and offset are fp16 [panel][k / group][PANEL].
template <int64_t BITS_> struct Nibbles : FormatTraits<BITS_, 8, void, int8> {
    static constexpr bool STEPS = false, OFFSET_STEPS = false;
    static int64_t scale_bytes(int64_t k, int64_t group) { return k / group * PANEL * 2; }
    static int64_t offset_bytes(int64_t k, int64_t group) { return scale_bytes(k, group); }
};
typedef Nibbles<4> Q4;
typedef Nibbles<5> Q5;

// Nibbles whose scales are small integers (steps) times a factor per BLOCK inputs, as in GGUF's K-quants.
// `scale` is fp16 [panel][k / BLOCK][1 or 2][PANEL], the factors of scales and of offsets; `offset` int8
// [panel][k / group][1 or 2][PANEL], their steps. Without OFFSET_STEPS, an offset is -32 scales.
constexpr int64_t BLOCK = 256;
template <int64_t BITS_, bool OFFSET_STEPS_> struct SteppedNibbles : FormatTraits<BITS_, 8, void, int8> {
    static constexpr bool STEPS = true, OFFSET_STEPS = OFFSET_STEPS_;
    static int64_t scale_bytes(int64_t k, int64_t) { return k / BLOCK * PANEL * 2 * (1 + OFFSET_STEPS); }
    static int64_t offset_bytes(int64_t k, int64_t group) { return k / group * PANEL * (1 + OFFSET_STEPS); }
};
typedef SteppedNibbles<4, true> Q4K;
typedef SteppedNibbles<5, true> Q5K;
typedef SteppedNibbles<6, false> Q6K;
typedef SteppedNibbles<6, true> MixedK; // of Q4_K, Q5_K and Q6_K in one matrix, which it holds all

// The numbers that Python names formats by: kernels/cpu/packed.py.
enum class Format : int64_t {
    FLOAT32,
    WIDENED_BF16,
    WIDENED_FP16,
    BF16,
    BF16_12BIT,
    Q8,
    Q4,
    Q5,
    Q4K,
    Q5K,
    Q6K,
    MIXED_K,
};

// Calls back with an object of the format's type.
template <typename F> inline auto by_format(Format format, F &&call) {
    switch (format) {
    case Format::FLOAT32: return call(Float32{});
    case Format::WIDENED_BF16: return call(WidenedBf16{});
    case Format::WIDENED_FP16: return call(WidenedFp16{});
    case Format::BF16: return call(Bf16{});
    case Format::BF16_12BIT: return call(Bf16In12Bits{});
    case Format::Q8: return call(Q8{});
    case Format::Q4: return call(Q4{});
    case Format::Q5: return call(Q5{});
    case Format::Q4K: return call(Q4K{});
    case Format::Q5K: return call(Q5K{});
    case Format::Q6K: return call(Q6K{});
    default: return call(MixedK{});
    }
}

// `scale` and `offset` are null where a format has none.
struct Weights {
    const void *data, *scale, *offset;
    const float *bias; // [n] or null
    int64_t n, k, group;
    Format format;

    int64_t panels() const { return (n + PANEL - 1) / PANEL; }
    bool quantised() const { return format >= Format::Q8; }
    int64_t rows_of_tile() const { return quantised() ? QUANTISED_ROWS : DENSE_ROWS; }

    // Where a panel's weights begin.
    template <typename F> const char *panel_of(int64_t panel) const {
        return static_cast<const char *>(data) + panel * k * PANEL * F::BITS / 8;
    }

    // Calls of `Fetcher::step` while `rows` rows meet one panel.
    int64_t steps(int64_t rows) const {
        const int64_t most = rows_of_tile();
        return (rows + most - 1) / most * (quantised() ? k / group : (k + STRIDE - 1) / STRIDE);
    }

    void fetch(int64_t panel, Fetcher &fetcher) const {
        by_format(format, [&](auto f) {
            typedef decltype(f) F;
            const int64_t bytes = k * PANEL * F::BITS / 8;
            const int64_t scales = F::scale_bytes(k, group), offsets = F::offset_bytes(k, group);
            fetcher.add(static_cast<const char *>(data) + panel * bytes, bytes);
            fetcher.add(static_cast<const char *>(scale) + panel * scales, scales);
            fetcher.add(static_cast<const char *>(offset) + panel * offsets, offsets);
        });
    }
};

} // namespace diptych
