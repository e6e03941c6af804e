"""Work list of decode attention: splits of sequences, listed on the device and distributed among its programs.

A sequence is split at multiples of its split length, which depends only on the number of visible keys. The order of
summation is therefore the same in every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT_TOKENS = 512  # minimum split length; doubles until the visible keys fit in MAX_SPLITS - 1 splits
MAX_SPLITS = 64
"""Maximum splits per sequence. Limits the memory of partial results."""
ITEM_FIELDS = 4  # span, first key, end of keys, index of the partial result (-1: a single split writes the output)
SPAN_BLOCK = 256  # spans that a program reads at a time; the same for all plans, to compile only once


def max_splits(tokens: int) -> int:
    """Return the maximum number of splits of a sequence of up to `tokens` tokens."""
    return max(1, min(MAX_SPLITS, -(-tokens // SPLIT_TOKENS)))


def num_places(tokens: int) -> int:
    """Return the maximum number of partial results of a sequence of up to `tokens` tokens, for any window. A single
    split writes the output directly and has none."""
    splits = max_splits(tokens)
    return splits if splits > 1 else 0


class DecodeWork:
    """Work list in device memory.

    items int32 [spans + places, 4], of which the first total[0] are valid. splits int32 [S, 2]: number of splits of
    each span, and index of its first partial result; the others follow.
    """

    def __init__(self, num_spans: int, places: int, window: int, device: torch.device) -> None:
        self.window = window
        self.items = torch.empty((num_spans + places, ITEM_FIELDS), dtype=torch.int32, device=device)
        self.total = torch.zeros(1, dtype=torch.int32, device=device)
        self.splits = torch.zeros((num_spans, 2), dtype=torch.int32, device=device)

    def build(self, spans: Tensor) -> None:
        """Build the list from spans int32 [S, 3] on the device, in one launch."""
        num_spans = spans.shape[0]
        if num_spans:
            list_splits[(num_spans,)](
                spans,
                self.items,
                self.total,
                self.splits,
                num_spans,
                self.window,
                SPLIT=SPLIT_TOKENS,
                MAX_SPLITS=MAX_SPLITS,
                BLOCK=SPAN_BLOCK,
                num_warps=4,
                enable_fp_fusion=False,
            )


@triton.jit
def _splits(spans, o_span, num_spans, window, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Return first visible key, end of keys, split length, first split and number of splits of each span."""
    m_span = o_span < num_spans
    b_rows = tl.load(spans + o_span * 3 + 1, mask=m_span, other=0)
    b_end = tl.load(spans + o_span * 3 + 2, mask=m_span, other=0) + 1
    b_begin = tl.where(window > 0, tl.maximum(b_end - window, 0), 0)
    b_seen = b_end - b_begin
    b_length = tl.full(b_seen.shape, SPLIT, tl.int32)
    for i in tl.static_range(12):  # splits of up to 512 << 12 tokens: sequences of two million
        b_length = tl.where(b_seen > (MAX_SPLITS - 1) * (SPLIT << i), SPLIT << (i + 1), b_length)
    b_first = b_begin // b_length
    b_count = tl.where(b_rows == 1, (b_end + b_length - 1) // b_length - b_first, 0)
    return b_begin, b_end, b_length, b_first, b_count


@triton.jit(do_not_specialize=["num_spans", "window"])
def list_splits(
    spans, items, total, splits, num_spans, window,
    SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program lists the splits of one span. Full splits precede the partial splits at the ends of sequences."""
    i_span = tl.program_id(0)
    n_full = 0  # full splits of all spans
    n_full_before = 0  # full splits of the spans before this one
    n_cut = 0
    n_cut_before = 0
    n_places_before = 0  # partial results of the spans before this one
    for start in range(0, num_spans, BLOCK):
        o_span = start + tl.arange(0, BLOCK)
        _, b_end, b_length, _, b_count = _splits(spans, o_span, num_spans, window, SPLIT, MAX_SPLITS)
        b_cut = ((b_count > 0) & (b_end % b_length != 0)).to(tl.int32)
        b_full = b_count - b_cut
        n_full += tl.sum(b_full)
        n_full_before += tl.sum(tl.where(o_span < i_span, b_full, 0))
        n_cut += tl.sum(b_cut)
        n_cut_before += tl.sum(tl.where(o_span < i_span, b_cut, 0))
        n_places_before += tl.sum(tl.where((o_span < i_span) & (b_count > 1), b_count, 0))
    if i_span == 0:
        tl.store(total, n_full + n_cut)
    o_own = i_span + tl.arange(0, 1)  # [1]
    b_begin, b_end, b_length, b_first, b_count = _splits(spans, o_own, num_spans, window, SPLIT, MAX_SPLITS)
    tl.store(splits + o_own * 2, b_count)
    tl.store(splits + o_own * 2 + 1, n_places_before + tl.zeros_like(b_count))
    o_split = tl.arange(0, MAX_SPLITS)
    b_from = tl.maximum((b_first + o_split) * b_length, b_begin)
    b_to = tl.minimum((b_first + o_split + 1) * b_length, b_end)
    is_cut = b_to % b_length != 0
    p_item = items + tl.where(is_cut, n_full + n_cut_before, n_full_before + o_split) * 4
    m_split = o_split < b_count
    tl.store(p_item, i_span + tl.zeros_like(o_split), mask=m_split)
    tl.store(p_item + 1, b_from, mask=m_split)
    tl.store(p_item + 2, b_to, mask=m_split)
    tl.store(p_item + 3, tl.where(b_count == 1, -1, n_places_before + o_split), mask=m_split)
