"""The draft model's KV: which tokens of which sequence it has been computed for, in blocks of a pool of its own. Pure.

It is computed on this worker alone and never sent: a sequence that comes by a transfer or a hand-over, or comes back
after a preemption, has none at first. Blocks of tokens that are certain are published by their hashes, as those of the
model itself are, so prompts that begin alike, and the next turn of a conversation, find them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.engine.kv import BlockCounts, BlockPool

if TYPE_CHECKING:
    from decode_worker.sequence import DecodeSequence


@dataclass(slots=True)
class DraftKV:
    """Draft KV of a sequence: `blocks` hold that of its first `num_computed` tokens, and of the tokens `ahead` of them.

    Those `ahead` were drafted and run, and may be rejected. The first `num_published` blocks are published.
    """

    blocks: list[int]
    num_computed: int
    num_published: int
    ahead: list[int] = field(default_factory=list)


class DraftCache:
    """Belongs to the engine's thread. Blocks that no sequence owns stay cached until the pool needs them."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        self._held: dict[DecodeSequence, DraftKV] = {}

    def __len__(self) -> int:
        return len(self._held)

    def num_behind(self, sequence: DecodeSequence) -> int:
        """How many of the sequence's tokens have no KV here: at least the last one, from which a draft begins."""
        held = self._held.get(sequence)
        if held is None:
            return sequence.num_tokens - self.pool.block_size * len(self._cached_prefix(sequence))
        self._confirm(held, sequence)
        return sequence.num_tokens - held.num_computed

    def take(self, sequence: DecodeSequence, num_tokens: int) -> DraftKV | None:
        """What there is of a sequence, with blocks for its first `num_tokens` tokens; None while there are too few.

        It then gives back what it had: sequences that each held a part of what they need would wait for each other.
        """
        held = self._held.get(sequence)
        if held is None:
            hits = self._cached_prefix(sequence)
            self.pool.acquire(hits)
            num_computed = len(hits) * self.pool.block_size
            held = self._held[sequence] = DraftKV(hits, num_computed, len(hits))
        self._confirm(held, sequence)
        num_new = -(-num_tokens // self.pool.block_size) - len(held.blocks)
        if num_new > self.pool.num_available and sequence.runs:
            self.retain(lambda each: each.runs)  # those that wait catch up again
        if num_new > self.pool.num_available:
            self.pool.release(self._held.pop(sequence).blocks)
            return None
        if num_new > 0:
            held.blocks += self.pool.allocate(num_new)
        return held

    def computed(self, sequence: DecodeSequence, num_tokens: int, ahead: Sequence[int] = ()) -> None:
        """The draft model has run the sequence's first `num_tokens` tokens, and those `ahead` behind them."""
        held = self._held[sequence]
        self._advance(held, sequence, num_tokens)
        held.ahead = list(ahead)

    def retain(self, is_here: Callable[[DecodeSequence], bool]) -> None:
        """Release the blocks of sequences that are not here any more."""
        for sequence in [each for each in self._held if not is_here(each)]:
            self.pool.release(self._held.pop(sequence).blocks)

    def reset(self) -> None:
        """Forget what no sequence owns."""
        self.pool.reset_cache()

    def check_integrity(self) -> BlockCounts:
        """Each owned block belongs to a sequence that is here. Raises BlockError otherwise."""
        return self.pool.check_integrity(held.blocks for held in self._held.values())

    def _cached_prefix(self, sequence: DecodeSequence) -> list[int]:
        """Published blocks of the sequence's first tokens: its last token is run in any case."""
        hashes = sequence.hasher.extend(sequence.token_ids)
        return self.pool.match(hashes[: (sequence.num_tokens - 1) // self.pool.block_size])

    def _confirm(self, held: DraftKV, sequence: DecodeSequence) -> None:
        """Keep the KV of those tokens `ahead` that the sequence has got since, and forget the others."""
        if held.ahead:
            end = held.num_computed
            for token_id in held.ahead:
                if end >= sequence.num_tokens - 1 or sequence.token_ids[end] != token_id:
                    break
                end += 1
            held.ahead = []
            self._advance(held, sequence, end)

    def _advance(self, held: DraftKV, sequence: DecodeSequence, num_tokens: int) -> None:
        if num_tokens > held.num_computed:
            self.pool.wrote(held.blocks, held.num_computed, num_tokens)
            held.num_computed = num_tokens
        hashes: Collection[bytes] = ()
        num_full = held.num_computed // self.pool.block_size
        if num_full > held.num_published:
            hashes = sequence.hasher.extend(sequence.token_ids)
            for index in range(held.num_published, num_full):
                self.pool.publish(held.blocks[index], hashes[index])
            held.num_published = num_full
