"""Token sampling on the device: one program per row, a single launch, no synchronisation with the host.

A token's weight is exp(logit / temperature - the row's maximum), float32, so 1 at most. The filters are thresholds on
weights, found as whole numbers: positive floats are ordered as their bits are. Masses are whole multiples of 2^-44, so
sums are exact and their order does not matter.

top_k and top_p first count the weights in bins of an eighth of an octave. Counts bound the masses from below, which
yields a lower bound of the threshold. The few tokens above this bound are copied, in order of their ids, and a binary
search among them finds the bits of the threshold.

Compared with the same steps in other arithmetic, a weight may differ by about one part in a million (its exponential
in the last bits, its mass by 2^-44). So may the borders between neighbouring tokens of the cumulative distribution, and
which of two tokens a filter drops whose weights are equal in all but the last bits. The token is another one only if
the noise falls between two versions of a border.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import SamplingTensors
from kernels.plain import masked

WARPS = 16
"""Warps of a program, which samples one row."""
MIN_BLOCK, MAX_BLOCK = WARPS * 32, 4096  # at least one token per thread
MAX_VOCAB = (1 << 19) - 1
"""Tokens whose masses add up without overflow."""
BINS = tl.constexpr(256)
BIN_BITS = tl.constexpr(20)  # of a float32 below its exponent and 3 bits of its mantissa
ONE_BITS = tl.constexpr(0x3F800000)
FIRST_BIN = tl.constexpr((0x3F800000 >> 20) - 255)  # so that the last bin holds the weight 1
NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def mass_of(b_weight):
    """float32 in [0, 1] as a multiple of 2^-44, int64: half a million of them add up without overflow."""
    return (b_weight * 17592186044416.0).to(tl.int64)


@triton.jit
def mixed(z):
    """splitmix64's finaliser, uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def uniform(seed, position):
    """Noise of (seed, position), int64 both: 53 bits in [0, 1), float64. splitmix64 (Steele, Lea, Flood 2014)."""
    key = mixed(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    word = mixed(key + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    return (word >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def load_weights(p, o, size, maximum, temperature, COPIED: tl.constexpr):
    """Return the weights at o [BLOCK], computed from logits or COPIED; 0 past `size`."""
    m = o < size
    if COPIED:
        return tl.load(p + o, mask=m, other=0.0)
    b_x = tl.div_rn(tl.load(p + o, mask=m, other=float("-inf")), tl.zeros([o.shape[0]], tl.float32) + temperature)
    equal = b_x == maximum  # both may be infinite, and their difference is 0 all the same
    b_weight = tl.exp(tl.where(equal, 0.0, b_x) - tl.where(equal, 0.0, maximum))
    return tl.where(m, b_weight, 0.0)


@triton.jit
def best_token(p_logits, vocab, BLOCK: tl.constexpr):
    """The largest logit and the lowest id that has it; NONE where one is not a number, or all are minus infinity."""
    b_best = tl.full([BLOCK], float("-inf"), tl.float32)
    b_id = tl.arange(0, BLOCK)
    for start in range(0, vocab, BLOCK):
        o = start + tl.arange(0, BLOCK)
        b_x = tl.load(p_logits + o, mask=o < vocab, other=float("-inf"))
        better = (b_x > b_best) | (b_x != b_x)  # nothing is better than NaN
        b_best, b_id = tl.where(better, b_x, b_best), tl.where(better, o, b_id)
    wrong = tl.max((b_best != b_best).to(tl.int32), 0)
    maximum = tl.max(b_best, 0)
    token = tl.min(tl.where(b_best == maximum, b_id, NONE), 0)
    return maximum, tl.where((wrong > 0) | (maximum == float("-inf")), NONE, token)


@triton.jit
def sum_from(p_weights, size, threshold, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Copied weights whose bits are `threshold` or more: their mass, or how many there are; int64."""
    b_sum = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        b_weight = load_weights(p_weights, start + tl.arange(0, BLOCK), size, 0.0, 1.0, True)
        b_one = mass_of(b_weight) if MASS else tl.full([BLOCK], 1, tl.int64)
        b_sum += tl.where(b_weight.to(tl.int32, bitcast=True) >= threshold, b_one, 0)
    return tl.sum(b_sum, 0)


@triton.jit
def search(p_weights, size, low, high, goal, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest threshold in [low, high) from which on there is `goal`; `low` if there never is."""
    high += 0 * low  # a tensor, even if it came as a constant
    while high - low > 1:
        middle = low + (high - low) // 2
        if sum_from(p_weights, size, middle, MASS, BLOCK) >= goal:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def nucleus_goal(total, top_p):
    """The least whole mass that is top_p of `total`."""
    share = total.to(tl.float64) * top_p
    goal = share.to(tl.int64)
    goal += (goal.to(tl.float64) < share).to(tl.int64)
    return tl.minimum(tl.maximum(goal, 1), total)


@triton.jit
def pick(p, size, threshold, total, noise, maximum, temperature, COPIED: tl.constexpr, BLOCK: tl.constexpr):
    """Index of the first weight at which the mass of those from `threshold` on exceeds noise * total."""
    goal = tl.minimum((total.to(tl.float64) * noise).to(tl.int64), total - 1)
    before = total * 0
    found = NONE + 0 * size
    start = 0 * size
    while (start < size) & (found == NONE):
        o = start + tl.arange(0, BLOCK)
        b_weight = load_weights(p, o, size, maximum, temperature, COPIED)
        b_mass = tl.where(b_weight.to(tl.int32, bitcast=True) >= threshold, mass_of(b_weight), 0)
        found = tl.min(tl.where(before + tl.cumsum(b_mass, 0) > goal, o, NONE), 0)
        before += tl.sum(b_mass, 0)
        start += BLOCK
    return found


@triton.jit
def copy_from(p_logits, p_weights, p_ids, vocab, maximum, temperature, lowest, BLOCK: tl.constexpr):
    """Copies out the weights whose bits are `lowest` or more, with their ids, in order. Returns how many."""
    size = 0 * vocab
    for start in range(0, vocab, BLOCK):
        o = start + tl.arange(0, BLOCK)
        b_weight = load_weights(p_logits, o, vocab, maximum, temperature, False)
        m = (b_weight.to(tl.int32, bitcast=True) >= lowest) & (o < vocab)
        o_to = size + tl.cumsum(m.to(tl.int32), 0) - 1
        tl.store(p_weights + o_to, b_weight, mask=m)
        tl.store(p_ids + o_to, o, mask=m)
        size += tl.sum(m.to(tl.int32), 0)
    tl.debug_barrier()  # other threads of the program will read them
    return size


@triton.jit
def edge_bits(i_bin):
    """Bits of the least weight of a bin; the first one holds all the rest."""
    return tl.where(i_bin == 0, 0, (i_bin + FIRST_BIN) << BIN_BITS)


# A batch's numbers may begin anywhere: not one compilation for every alignment.
@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions"])
def draw_tokens(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, weights, ids, out, vocab, stride_row,
    SEARCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i draws row i. `weights` and `ids` [n, vocab] are scratch memory, needed with SEARCH."""
    i_row = tl.program_id(0).to(tl.int64)
    p_logits = logits + i_row * stride_row
    maximum, token = best_token(p_logits, vocab, BLOCK)
    temperature = tl.load(temperatures + i_row)
    if (temperature > 0.0) & (token != NONE):
        maximum = tl.div_rn(maximum, temperature)
        floor = tl.maximum(tl.load(min_ps + i_row).to(tl.int32, bitcast=True), 1)  # a weight of 0 is never drawn
        noise = uniform(tl.load(seeds + i_row), tl.load(positions + i_row))
        top_k, top_p = tl.load(top_ks + i_row), tl.load(top_ps + i_row)
        limited = (top_k > 0) & (top_k < vocab)
        searching = limited | (top_p < 1.0)
        b_total, b_counts = tl.zeros([BLOCK], tl.int64), tl.zeros([BINS], tl.int32)
        for start in range(0, vocab, BLOCK):
            o = start + tl.arange(0, BLOCK)
            b_weight = load_weights(p_logits, o, vocab, maximum, temperature, False)
            b_bits = b_weight.to(tl.int32, bitcast=True)
            keep = b_bits >= floor
            b_total += tl.where(keep, mass_of(b_weight), 0)
            if SEARCH and searching:
                b_bin = tl.where(keep, tl.maximum((b_bits >> BIN_BITS) - FIRST_BIN, 0), 0)
                b_counts += tl.histogram(b_bin, BINS)
        total = tl.sum(b_total, 0)
        if SEARCH and searching:
            o_bin = tl.arange(0, BINS)
            b_edge = edge_bits(o_bin)
            if limited:
                enough = tl.cumsum(b_counts, 0, reverse=True) >= top_k
            else:
                b_least = b_counts.to(tl.int64) * mass_of(b_edge.to(tl.float32, bitcast=True))
                enough = tl.cumsum(b_least, 0, reverse=True) >= nucleus_goal(total, top_p)
            i_bin = tl.max(tl.where(enough, o_bin, 0), 0)
            threshold = tl.maximum(floor, edge_bits(i_bin))
            p_weights, p_ids = weights + i_row * vocab, ids + i_row * vocab
            size = copy_from(p_logits, p_weights, p_ids, vocab, maximum, temperature, threshold, BLOCK)
            if limited:  # this bin contains the k-th largest weight
                above = tl.minimum(edge_bits(i_bin + 1), ONE_BITS + 1)
                threshold = search(p_weights, size, threshold, above, top_k.to(tl.int64), False, BLOCK)
                total = sum_from(p_weights, size, threshold, True, BLOCK)
            if top_p < 1.0:
                goal = nucleus_goal(total, top_p)
                threshold = search(p_weights, size, threshold, ONE_BITS + 1, goal, True, BLOCK)
                total = sum_from(p_weights, size, threshold, True, BLOCK)
            drawn = pick(p_weights, size, threshold, total, noise, 0.0, 1.0, True, BLOCK)
            drawn = tl.load(p_ids + tl.maximum(tl.minimum(drawn, size - 1), 0))  # never beyond what was copied
        else:
            drawn = pick(p_logits, vocab, floor, total, noise, maximum, temperature, False, BLOCK)
        token = drawn
    tl.store(out + i_row, token.to(tl.int64))


def sample(logits: Tensor | Sequence[Tensor], rows: SamplingTensors, allowed: Sequence[Tensor | None] = ()) -> Tensor:
    """As `kernels.sample`; ValueError beyond 524,287 tokens. A row with a NaN gets an id that is no token."""
    logits = masked(logits, allowed)
    count, vocab = logits.shape
    if vocab > MAX_VOCAB:
        raise ValueError(f"{vocab} tokens: masses add up without overflow for at most {MAX_VOCAB}")
    out = torch.empty(count, dtype=torch.int64, device=logits.device)
    if not count:
        return out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    shape = (count, vocab) if rows.searches else (1, 1)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    draw_tokens[(count,)](
        logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.position, weights, ids, out,
        vocab, logits.stride(0),
        SEARCH=rows.searches, BLOCK=sampling_block(vocab), num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def sampling_block(vocab: int) -> int:
    """Tokens that a program looks at in one go."""
    block: int = triton.next_power_of_2(vocab)
    return max(MIN_BLOCK, min(MAX_BLOCK, block))
