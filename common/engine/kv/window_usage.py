"""Computes how much of a sequence's KV is kept but never read again because of attention windows. Pure.

A block contains all layers of its tokens. If all layers have windows, blocks outside the widest window are released.
If any layer has full attention, every block is kept, including the parts of layers with windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.blocks import Window


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Per-layer blocks of a sequence: `num_kept` are in memory, and `num_read` of them may be read again."""

    num_kept: int
    num_read: int

    @property
    def unread_share(self) -> float:
        """Share of the kept blocks, in memory and in transfers, that no later token reads."""
        return 1.0 - self.num_read / self.num_kept


def kv_usage(layer_windows: Sequence[int], block_size: int, num_tokens: int) -> KVUsage:
    """Return the kept and read blocks of a sequence of `num_tokens` tokens. A window of 0 means full attention."""
    widest = max(layer_windows) if all(layer_windows) else 0
    num_blocks = Window(widest, block_size).most_blocks(num_tokens)
    num_read = sum(Window(window, block_size).most_blocks(num_tokens) for window in layer_windows)
    return KVUsage(len(layer_windows) * num_blocks, num_read)


def in_words(layer_windows: Sequence[int], block_size: int, max_model_len: int) -> str:
    """Describe a model's attention windows for the log; "" if no window is shorter than `max_model_len`."""
    with_window = [window for window in layer_windows if 0 < window < max_model_len]
    if not with_window:
        return ""
    num_blocks = Window(max(with_window), block_size).most_blocks(max_model_len)
    if len(with_window) == len(layer_windows):
        return (
            f"all layers have attention windows of at most {max(with_window)} tokens: "
            f"a sequence uses at most {num_blocks} blocks"
        )
    shares = [
        f"{kv_usage(layer_windows, block_size, length).unread_share:.0%} at {length:,} tokens"
        for length in (8192, 32768)
        if length <= max_model_len
    ] or [f"{kv_usage(layer_windows, block_size, max_model_len).unread_share:.0%} at {max_model_len:,} tokens"]
    return (
        f"{len(with_window)} of {len(layer_windows)} layers have attention windows of at most {max(with_window)} "
        f"tokens, the others full attention: share of a sequence's KV that is kept but never read again: "
        f"{' and '.join(shares)}"
    )
