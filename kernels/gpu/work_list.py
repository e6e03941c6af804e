"""The work list of decode attention: splits of sequences, which the device lists and its programs share out.

A sequence is cut at multiples of its split length, which depends on nothing but the number of keys that it sees. So the
order in which its parts are summed up is the same in every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT_TOKENS = 512  # of a sequence of up to MAX_SPLITS - 1 times as many tokens; longer ones have longer splits
MAX_SPLITS = 64
"""Of a sequence: bounds the memory of partial results."""
ITEM_FIELDS = 4  # span, first key, end of keys, place of the partial result (-1: the only split writes the output)
SPAN_BLOCK = 256  # spans that a program looks at in one go; one number for all plans, so one compilation


def max_splits(tokens: int) -> int:
    """Upper bound of the splits of a sequence of up to `tokens` tokens."""
    return max(1, min(MAX_SPLITS, -(-tokens // SPLIT_TOKENS)))


def num_places(tokens: int) -> int:
    """Upper bound of the partial results of a sequence of up to `tokens` tokens, whatever its window: none for one
    split, which writes the output."""
    splits = max_splits(tokens)
    return splits if splits > 1 else 0


class DecodeWork:
    """items int32 [spans + places, 4], of which total[0] count; splits int32 [S, 2]: of each span how many there are,
    and the place of the first one's partial result, the others' behind it."""

    def __init__(self, num_spans: int, places: int, window: int, device: torch.device) -> None:
        self.window = window
        self.items = torch.empty((num_spans + places, ITEM_FIELDS), dtype=torch.int32, device=device)
        self.total = torch.zeros(1, dtype=torch.int32, device=device)
        self.splits = torch.zeros((num_spans, 2), dtype=torch.int32, device=device)

    def build(self, spans: Tensor) -> None:
        """One launch, from int32 spans [S, 3] on the device."""
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
    """Of each span: its first visible key, their end, the split length, the first split, the number of splits."""
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
    """One program a span. Whole splits come first and the cut ones, at the end of their sequence, behind them all."""
    i_span = tl.program_id(0)
    n_full = 0  # whole splits of all spans
    n_full_before = 0  # ... of those before this one
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
