"""Draft model and its KV: drafts the next tokens of sequences, and computes the KV that this needs.

Draft KV has its own block pool. It is never sent to other workers, so sequences have none after a transfer, hand-over
or preemption. Blocks of certain tokens are published by their hashes, like those of the served model, and are reused
for prompts with the same prefix and later turns of a conversation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.engine.kv import BlockCounts, BlockPool
from common.engine.models import SequenceChunk
from common.engine.run import ModelRunner
from common.engine.sampling import Sampler
from common.observe import Ewma
from decode_worker.drafting.row_costs import RowCosts

if TYPE_CHECKING:
    from decode_worker.rules import DecodeRules
    from decode_worker.sequence import DecodeSequence

MAX_BEHIND = 8
"""Maximum number of tokens without draft KV at which a sequence may draft. They are rows of the first draft step."""
SMOOTHING = 0.1
"""Weight of a new chunk in the average time of a token when catching up."""


@dataclass(slots=True)
class DraftKV:
    """Draft KV of a sequence: `blocks` store that of its first `num_computed` tokens, followed by the tokens `ahead`.

    Tokens `ahead` were drafted and computed, and may be rejected. The first `num_published` blocks are published.
    """

    blocks: list[int]
    num_computed: int
    num_published: int
    ahead: list[int] = field(default_factory=list)


class DraftCache:
    """Draft KV of all sequences. Not thread-safe. Blocks without an owner stay cached until the pool needs them."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        self._held: dict[DecodeSequence, DraftKV] = {}

    def __len__(self) -> int:
        return len(self._held)

    def num_behind(self, sequence: DecodeSequence) -> int:
        """Return the number of tokens without KV, at least 1: a draft starts with the last token."""
        held = self._held.get(sequence)
        if held is None:
            return sequence.num_tokens - self.pool.block_size * len(self._cached_prefix(sequence))
        self._confirm(held, sequence)
        return sequence.num_tokens - held.num_computed

    def take(self, sequence: DecodeSequence, num_tokens: int) -> DraftKV | None:
        """Return the KV of a sequence, with blocks for its first `num_tokens` tokens, or None if the pool is exhausted.

        In that case its blocks are released, so that sequences with partial allocations cannot deadlock.
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
            self.retain(lambda each: each.runs)  # waiting sequences catch up again later
        if num_new > self.pool.num_available:
            self.pool.release(self._held.pop(sequence).blocks)
            return None
        if num_new > 0:
            held.blocks += self.pool.allocate(num_new)
        return held

    def computed(self, sequence: DecodeSequence, num_tokens: int, ahead: Sequence[int] = ()) -> None:
        """Record that the draft model has computed the first `num_tokens` tokens, and those `ahead` after them."""
        held = self._held[sequence]
        self._advance(held, sequence, num_tokens)
        held.ahead = list(ahead)

    def retain(self, is_here: Callable[[DecodeSequence], bool]) -> None:
        """Release the blocks of sequences for which `is_here` is False."""
        for sequence in [each for each in self._held if not is_here(each)]:
            self.pool.release(self._held.pop(sequence).blocks)

    def reset(self) -> None:
        """Drop cached blocks without an owner."""
        self.pool.reset_cache()

    def check_integrity(self) -> BlockCounts:
        """Raise BlockError unless each owned block belongs to a known sequence."""
        return self.pool.check_integrity(held.blocks for held in self._held.values())

    def _cached_prefix(self, sequence: DecodeSequence) -> list[int]:
        """Return published blocks of the first tokens. The last token is always computed."""
        hashes = sequence.hasher.extend(sequence.token_ids)
        return self.pool.match(hashes[: (sequence.num_tokens - 1) // self.pool.block_size])

    def _confirm(self, held: DraftKV, sequence: DecodeSequence) -> None:
        """Keep the KV of those tokens `ahead` that the sequence has accepted, and drop the others."""
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


@dataclass(slots=True, eq=False)
class _Chain:
    """Draft of one sequence so far, with at most `limit` tokens. Its draft KV is in `blocks`."""

    sequence: DecodeSequence
    limit: int
    blocks: Sequence[int]
    first: int
    """First token without draft KV."""
    token_ids: list[int] = field(default_factory=list)

    def next_chunks(self) -> list[SequenceChunk]:
        """Return the chunks for the next token. Recorded steps need a chunk for each token."""
        known = self.sequence.token_ids
        if not self.token_ids:
            places = range(self.first, len(known))
            return [SequenceChunk((known[place],), place, self.blocks) for place in places]
        return [SequenceChunk((self.token_ids[-1],), len(known) + len(self.token_ids) - 1, self.blocks)]


class Drafter:
    """Drafts with a draft model. Not thread-safe; no step may be in flight while it computes.

    A draft token is sampled exactly like the token itself, but from the draft model's logits: with the same parameters,
    penalties, bans and grammar, and the same noise of (seed, position).
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        cache: DraftCache,
        *,
        step_s: float = 0.0,
        token_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`step_s` and `token_s`: measured times of a step of one row and a token of a small chunk (0: unknown)."""
        self.cache, self.costs = cache, RowCosts()
        if step_s:
            self.costs.add(1, step_s)
        self._runner, self._sampler, self._clock = runner, sampler, clock
        self._token_s = Ewma(SMOOTHING, token_s or None)
        self._foreign: set[DecodeSequence] = set()

    @property
    def token_s(self) -> float:
        """Seconds per token when catching up, or 0 if unknown."""
        return self._token_s.value

    def is_ready(self, sequence: DecodeSequence) -> bool:
        """Whether it can draft for the sequence immediately."""
        return sequence not in self._foreign and self.cache.num_behind(sequence) <= MAX_BEHIND

    def num_behind(self, sequence: DecodeSequence) -> int:
        """Return the number of tokens to catch up before drafting, or 0 if it is ready or can never draft."""
        return 0 if self.is_ready(sequence) or sequence in self._foreign else self.cache.num_behind(sequence)

    def catch_up(self, sequence: DecodeSequence, most_tokens: int) -> int:
        """Compute draft KV of the sequence's next tokens. Return their number, or 0 if there are no free blocks."""
        start = sequence.num_tokens - self.cache.num_behind(sequence)
        end = min(start + most_tokens, sequence.num_tokens - 1)
        if end <= start or not self._can_read(sequence, start, end):
            return 0
        held = self.cache.take(sequence, end)
        if held is None:
            return 0
        began = self._clock()
        self._runner.forward([SequenceChunk(sequence.token_ids[start:end], start, held.blocks, sample=False)])
        self._runner.wait()
        self._token_s.observe((self._clock() - began) / (end - start))
        self.cache.computed(sequence, end)
        return end - start

    def draft(
        self, wanted: Sequence[tuple[DecodeSequence, int]], rules: DecodeRules
    ) -> dict[DecodeSequence, tuple[int, ...]]:
        """Draft up to the given number of tokens per sequence. All their tokens must be known. Some may get none."""
        chains = [chain for sequence, limit in wanted if (chain := self._chain(sequence, limit)) is not None]
        active = chains
        while active:
            began = self._clock()
            chunks = [each.next_chunks() for each in active]
            logits = self._last_logits(chunks)
            drawn = self._sampler.draw(logits, [rules.row(each.sequence, tuple(each.token_ids)) for each in active])
            for chain, token_id in zip(active, drawn, strict=True):
                chain.token_ids.append(token_id)
            self.costs.add(sum(map(len, chunks)), self._clock() - began)
            active = [
                each
                for each in active
                if len(each.token_ids) < each.limit and not rules.may_end(each.sequence, each.token_ids[-1])
            ]
        for chain in chains:
            *known, last = chain.sequence.token_ids
            self.cache.computed(chain.sequence, len(known), [last, *chain.token_ids[:-1]])
        return {chain.sequence: tuple(chain.token_ids) for chain in chains}

    @property
    def counts(self) -> BlockCounts:
        """Usage of its KV blocks."""
        return self.cache.pool.counts

    def reset(self) -> None:
        """Drop cached KV without an owner."""
        self.cache.reset()

    def check_integrity(self) -> None:
        """Raise BlockError unless each owned block belongs to a known sequence."""
        self.cache.check_integrity()

    def retain(self, is_here: Callable[[DecodeSequence], bool]) -> None:
        """Forget sequences for which `is_here` is False."""
        self.cache.retain(is_here)
        self._foreign = {each for each in self._foreign if is_here(each)}

    def _chain(self, sequence: DecodeSequence, limit: int) -> _Chain | None:
        first = sequence.num_tokens - self.cache.num_behind(sequence)
        end = sequence.num_tokens + limit - 1  # the last draft token is not computed
        if limit < 1 or not self._can_read(sequence, first, end):
            return None
        held = self.cache.take(sequence, end)
        return None if held is None else _Chain(sequence, limit, held.blocks, first)

    def _can_read(self, sequence: DecodeSequence, start: int, end: int) -> bool:
        """Whether `end` tokens fit the draft model's context, and those from `start` on are in its vocabulary.

        The embedding tables of two sizes of a model may differ by some rows at the end.
        """
        config = self._runner.model.config
        if end <= config.max_model_len and max(sequence.token_ids[start:]) < config.vocab_size:
            return True
        self._foreign.add(sequence)
        return False

    def _last_logits(self, chunks: Sequence[Sequence[SequenceChunk]]) -> Tensor:
        """Return the logits after the last chunk of each sequence, [len(chunks), vocab_size of the served model]."""
        logits = self._runner.forward([chunk for each in chunks for chunk in each])
        if len(logits) != len(chunks):
            ends, at = [], -1
            for each in chunks:
                at += len(each)
                ends.append(at)
            logits = logits[torch.tensor(ends, device=logits.device)]
        missing = self._sampler.vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self._sampler.vocab_size]
