"""From float32 in registers to what memory holds."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 x as `dtype`, to nearest even. The interpreter cuts bfloat16 off instead, so there it is done by hand."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        return tl.where(x == x, up, quiet).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def e4m3_bits(x):
    """float32 x as the bits of the nearest e4m3 number, ties to even, uint8; beyond the largest, 448, that one.

    Whole-number arithmetic, so that a chip without such numbers yields the same bytes. NaN becomes NaN.
    """
    size = tl.abs(x)
    wide = size.to(tl.uint32, bitcast=True)
    # From 2^-6 on, 3 of 23 bits of the mantissa stay, and the exponent's bias becomes 7 instead of 127.
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - (120 << 3)
    # Below, numbers are multiples of 2^-9: 2^14 has those as its last bit, so adding it rounds to them.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    bits = tl.where(size < 0.015625, small, tl.where(size >= 448.0, 0x7E, normal))
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (sign | tl.where(x == x, bits, 0x7F)).to(tl.uint8)
