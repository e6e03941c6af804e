"""Rules of a decode worker: how to sample a sequence, what it may draft, and which received tokens are valid.

Masks of grammars are computed within their step, or on the mask thread while other answers continue.

    fast grammar   launch N+1 ── tokens of N ── masks of N+1 ── launch N+2 ...       while the model of N+1 runs
    slow grammar   tokens of N ── mask thread, one or more steps ── launch N+k ...   the answer skips these steps

A step's masks have a time budget. A sequence whose mask exceeds it is deferred: the step samples nothing for it, and
its last token is computed again when its mask is ready.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from common.blocks import Window
from common.engine.sampling import UNSAMPLED, SamplingRow, TokenCounts, allowed_mask
from common.engine.sequences import PendingGrammars, RequestRules
from common.errors import WireError
from common.grammar import Constraint
from common.wire import SampledToken, unpack_tokens
from common.wire.messages import KVDone
from decode_worker.scheduler import DecodeChunk
from decode_worker.sequence import DecodeSequence

STEP_S = 0.05
"""Time budget of the masks of one step, in seconds. The last mask may exceed it."""


class DecodeRules(RequestRules):
    """Rules of decode requests. `max_model_len` is the limit of model and cache."""

    def rows(self, chunk: DecodeChunk) -> list[SamplingRow]:
        """Return how to sample after a chunk's last token, and after each of its draft tokens."""
        sequence, draft = chunk.sequence, chunk.draft.token_ids
        num_unseen = chunk.start + chunk.num_tokens - sequence.num_tokens
        try:
            return [self.row(sequence, draft[:count], num_unseen) for count in range(len(draft) + 1)]
        except Exception as error:  # a request's parameters must not fail the step of others
            sequence.note_problem(error)
            return [UNSAMPLED] * chunk.num_spans

    def follows_tokens(self, sequence: DecodeSequence) -> bool:
        """Whether sampling a row depends on the tokens before it, which must then be known."""
        params = sequence.params
        return bool(params.has_penalties or params.grammar or params.bad_words or params.thinking is not None)

    def num_drafts(self, sequence: DecodeSequence, num_tokens: int) -> int:
        """Return how many of `num_tokens` draft tokens after the next token fit in the sequence's maximum length.

        Returns 0 for a slow grammar, because only the mask thread may use its constraint.
        """
        if sequence.constraint is not None and sequence.constraint.is_slow:
            return 0
        num_output = sequence.num_output_tokens + sequence.num_pending
        left = min(sequence.params.max_tokens - num_output, self.max_model_len - sequence.num_planned)
        return min(num_tokens, left - 1)

    def num_possible(self, sequence: DecodeSequence, drafted: Sequence[int]) -> int:
        """Return how many leading tokens of `drafted` neither end the sequence nor violate its grammar."""
        params = sequence.params
        ends = (place for place, token_id in enumerate(drafted) if self.may_end(sequence, token_id))
        count = next(ends, len(drafted))
        if sequence.constraint is not None:
            return sequence.constraint.num_allowed(sequence.output_token_ids, drafted[:count])
        return 0 if params.grammar else count

    def may_end(self, sequence: DecodeSequence, token_id: int) -> bool:
        """Whether a token may end the sequence, or is invalid. Nothing is drafted after it."""
        ends = token_id in self._eos or token_id in sequence.params.stop_token_ids
        return ends or token_id >= self.vocab_size

    def row(self, sequence: DecodeSequence, drafted: tuple[int, ...], num_unseen: int = 0) -> SamplingRow:
        """Return how to sample the token after `drafted`, which follow `num_unseen` tokens of the step in flight.

        `num_unseen` must be 0 if `follows_tokens`.
        """
        num_prompt, params = sequence.num_prompt_tokens, sequence.params
        position = sequence.num_tokens + num_unseen + len(drafted)
        if sequence.allowed_mask is None:
            sequence.allowed_mask = allowed_mask(params, self.vocab_size)
        own, problems = sequence.allowed_mask, sequence.problems
        if position - num_prompt >= params.min_tokens and not self.follows_tokens(sequence):
            return SamplingRow(params, position, allowed=own, problems=problems)  # most rows in large batches
        if params.has_penalties:
            sequence.counts = sequence.counts or TokenCounts(sequence.token_ids[:num_prompt])
            sequence.counts.push(sequence.token_ids[num_prompt + sequence.counts.num_output_tokens :])
        return SamplingRow(
            params,
            position,
            output_token_ids=[*sequence.output_token_ids, *drafted] if params.grammar else (),
            limits=self.limits(sequence, drafted, num_unseen),
            constraint=sequence.constraint.copy() if sequence.constraint and drafted else sequence.constraint,
            counts=sequence.counts,
            draft=drafted,
            allowed=own,
            problems=problems,
        )

    def received_tokens(
        self, sequence: DecodeSequence, done: KVDone, *, num_blocks: int, window: Window
    ) -> list[SampledToken]:
        """Return the tokens received with `num_blocks` blocks, which must cover the window except the last token.

        Raises WireError.
        """
        token_ids = [done.first_token, *unpack_tokens(done.more_tokens)]
        largest, which = max(token_ids), "first token" if max(token_ids) == done.first_token else "token"
        if largest >= self.vocab_size:
            raise WireError(f"{which} {largest} is outside of the vocabulary of {self.vocab_size}")
        num_tokens = sequence.num_request_tokens + len(token_ids) - 1
        if num_blocks != -(-num_tokens // window.block_size):
            raise WireError(f"received {num_blocks} blocks, which {num_tokens} tokens do not fill")
        if sequence.first_block > (needed := window.first_block(num_tokens)):
            raise WireError(f"received blocks from {sequence.first_block} on, but the window begins in block {needed}")
        logprobs = (done.logprobs, *done.more_logprobs)
        if sequence.params.logprobs < 0:
            logprobs = (None,) * len(token_ids)
        if len(logprobs) != len(token_ids):
            raise WireError(f"received {len(logprobs)} logprobs for {len(token_ids)} tokens")
        return [SampledToken(*pair) for pair in zip(token_ids, logprobs, strict=True)]

    def ends_in_flight(self, sequence: DecodeSequence) -> bool:
        """Whether the sequence ends with the steps in flight, whatever they sample."""
        if not sequence.num_pending:
            return False
        planned = sequence.num_planned
        return planned >= self.max_model_len or planned - sequence.num_prompt_tokens >= sequence.params.max_tokens


class StepMasks:
    """Computes and requests masks. Not thread-safe: use only from the engine thread."""

    def __init__(self, rules: DecodeRules, grammars: PendingGrammars[DecodeSequence]) -> None:
        self.rules, self._grammars = rules, grammars

    def ask_slow(self, running: Iterable[DecodeSequence]) -> None:
        """Request the masks of slow grammars for the sequences that would sample in the next step."""
        for sequence in running:
            constraint = sequence.constraint
            if constraint is None or not constraint.is_slow or sequence.skips_step or sequence.num_remaining != 1:
                continue
            if not constraint.has_mask(sequence.num_output_tokens):
                self._grammars.ask_mask(sequence, constraint)

    def rows(self, chunks: Sequence[DecodeChunk]) -> list[Sequence[SamplingRow]]:
        """Return the rows of each chunk, with their masks; none for a deferred sequence."""
        began, rows_of = time.monotonic(), list[Sequence[SamplingRow]]()
        for chunk in chunks:
            sequence, constraint = chunk.sequence, chunk.sequence.constraint
            is_late = time.monotonic() - began > STEP_S
            if constraint is not None and self._must_wait(sequence, constraint, is_late=is_late):
                sequence.deferred = True
                if not sequence.awaits_mask:
                    self._grammars.ask_mask(sequence, constraint)
                rows_of.append(())
                continue
            rows = self.rules.rows(chunk)
            for row in rows:
                if row.constraint is not None:
                    row.constraint.allowed(row.output_token_ids)
            rows_of.append(rows)
        return rows_of

    @staticmethod
    def _must_wait(sequence: DecodeSequence, constraint: Constraint, *, is_late: bool) -> bool:
        if sequence.awaits_mask:
            return True
        return (is_late or constraint.is_slow) and not constraint.has_mask(sequence.num_output_tokens)
