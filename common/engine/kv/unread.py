"""How much of a sequence's KV no token reads again, because only some layers of a block look back that far. Pure.

A block holds all layers of its tokens. Where all of them see through windows, blocks out of the widest are given back.
Where one layer sees all, every block stays, and with it the part of the layers with windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.blocks import Window


@dataclass(frozen=True, slots=True)
class KeptKV:
    """Blocks of one layer, of a sequence: `num_kept` are in memory, of which `num_read` may be read again."""

    num_kept: int
    num_read: int

    @property
    def unread_share(self) -> float:
        """The share of the kept blocks, in memory and in a transfer, that no later token reads."""
        return 1.0 - self.num_read / self.num_kept


def kept_kv(layer_windows: Sequence[int], block_size: int, num_tokens: int) -> KeptKV:
    """What is kept and what is read of a sequence of `num_tokens` tokens; a window of 0 sees all."""
    widest = max(layer_windows) if all(layer_windows) else 0
    num_blocks = Window(widest, block_size).most_blocks(num_tokens)
    num_read = sum(Window(window, block_size).most_blocks(num_tokens) for window in layer_windows)
    return KeptKV(len(layer_windows) * num_blocks, num_read)


def in_words(layer_windows: Sequence[int], block_size: int, max_model_len: int) -> str:
    """What an operator should know of a model's windows; "" without any that matters."""
    with_window = [window for window in layer_windows if 0 < window < max_model_len]
    if not with_window:
        return ""
    num_blocks = Window(max(with_window), block_size).most_blocks(max_model_len)
    if len(with_window) == len(layer_windows):
        return (
            f"no layer looks back further than {max(with_window)} tokens: a sequence owns {num_blocks} blocks at most"
        )
    shares = [
        f"{kept_kv(layer_windows, block_size, length).unread_share:.0%} at {length:,} tokens"
        for length in (8192, 32768)
        if length <= max_model_len
    ] or [f"{kept_kv(layer_windows, block_size, max_model_len).unread_share:.0%} at {max_model_len:,} tokens"]
    return (
        f"{len(with_window)} of {len(layer_windows)} layers look back at most {max(with_window)} tokens, others see "
        f"all: of a sequence's KV is kept, but never read again, {' and '.join(shares)}"
    )
