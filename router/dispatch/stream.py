"""Merges the tokens that the workers of a request send into one ordered sequence."""

from __future__ import annotations

from math import isfinite

from common.wire import TokenLogprobs
from common.wire.messages import TokenDelta


class StreamConflict(Exception):
    """A worker sent tokens that cannot belong to this sequence."""


class TokensDiffer(StreamConflict):
    """The tokens differ from those received before. Healthy workers may round differently."""


class TokenStream:
    """Merges deltas by output position, each position exactly once.

    The first token arrives twice, from the prefill and the decode worker, in either order. Known tokens are compared
    and dropped. A delta ahead of the stream is buffered. The stream contains at most `max_tokens` tokens.
    """

    def __init__(
        self, max_tokens: int, *, with_logprobs: bool, num_prompt_logprobs: int = 0, pooled_width: int = 0
    ) -> None:
        """`num_prompt_logprobs`: logprobs of the prompt that must arrive before the first token, or 0.

        `pooled_width`: size of the pooled vector, which arrives instead of tokens; 0 for a stream of tokens.
        """
        self.pooled = b""
        self._pooled_width = pooled_width
        self.token_ids: list[int] = []
        self.finish_reason = ""
        self._logprobs: list[TokenLogprobs] = []
        self._max_tokens, self._with_logprobs = max_tokens, with_logprobs
        self._ahead: dict[int, TokenDelta] = {}
        self._num_taken = 0
        self._num_prompt_logprobs = num_prompt_logprobs
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs_taken = False
        self._is_plain = not (with_logprobs or num_prompt_logprobs or pooled_width)

    @property
    def has_gap(self) -> bool:
        """Whether buffered tokens wait for earlier ones."""
        return bool(self._ahead)

    @property
    def num_pending(self) -> int:
        """Number of merged tokens that were not taken yet."""
        return len(self.token_ids) - self._num_taken

    def add(self, delta: TokenDelta) -> bool:
        """Merge a delta. Return True if the stream grew or ended. Raises StreamConflict."""
        if self._is_plain and self._takes_next(delta):
            return True
        self._check(delta)
        if self.finish_reason:
            return False
        if delta.index > len(self.token_ids):
            self._ahead[delta.index] = delta
            return False
        grew = self._append(delta)
        while self._ahead and not self.finish_reason:
            first = min(self._ahead)
            if first > len(self.token_ids):
                break
            grew |= self._append(self._ahead.pop(first))
        return grew

    def add_prompt_logprobs(self, start: int, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Merge logprobs of the prompt's tokens from position `start` on. Raises StreamConflict."""
        known, end = len(self._prompt_logprobs), start - 1 + len(logprobs)
        if start - 1 > known or end > self._num_prompt_logprobs:
            here = f"{known} of {self._num_prompt_logprobs} received"
            raise StreamConflict(f"log-probabilities of the prompt's tokens {start} to {end}: {here}")
        self._prompt_logprobs.extend(logprobs[known - (start - 1) :])

    def add_pooled(self, values: bytes) -> None:
        """Store the pooled vector. Raises StreamConflict for a wrong size or non-finite numbers."""
        if len(values) != 4 * self._pooled_width:
            raise StreamConflict(f"a vector of {len(values)} bytes instead of {self._pooled_width} numbers")
        if not isfinite(sum(memoryview(values).cast("f"))):
            raise StreamConflict("a vector with non-finite numbers")
        self.pooled = values

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Return the logprobs of the prompt in the first call, none later."""
        logprobs = () if self._prompt_logprobs_taken else tuple(self._prompt_logprobs)
        self._prompt_logprobs_taken = True
        return logprobs

    def drop_prompt_logprobs(self) -> None:
        """Drop logprobs of the prompt that were not taken: another worker will send them."""
        if not self._prompt_logprobs_taken:
            self._prompt_logprobs.clear()

    def drop_ahead(self) -> None:
        """Drop buffered tokens: their sender no longer serves the request."""
        self._ahead.clear()

    def take(self) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """Return all new tokens and their logprobs (empty if not requested)."""
        start, self._num_taken = self._num_taken, len(self.token_ids)
        token_ids = tuple(self.token_ids[start:])
        if not self._logprobs:
            return token_ids, ()
        logprobs = tuple(self._logprobs)
        self._logprobs.clear()
        return token_ids, logprobs

    def _takes_next(self, delta: TokenDelta) -> bool:
        """Append a single token in the middle of the sequence, the common case. Return False for any other delta."""
        token_ids, fresh = self.token_ids, delta.token_ids
        if (
            len(fresh) != 1
            or delta.index != len(token_ids)
            or delta.finish_reason
            or self.finish_reason
            or self._ahead
            or delta.index >= self._max_tokens
            or not 0 <= fresh[0] < 2**32
        ):
            return False
        token_ids.append(fresh[0])
        return True

    def _check(self, delta: TokenDelta) -> None:
        end = delta.index + len(delta.token_ids)
        if end > self._max_tokens:
            raise StreamConflict(f"tokens up to output position {end}; the request allows {self._max_tokens}")
        if len(self._prompt_logprobs) < self._num_prompt_logprobs:
            here = f"{len(self._prompt_logprobs)} of {self._num_prompt_logprobs}"
            raise StreamConflict(f"tokens after only {here} log-probabilities of the prompt")
        if self._pooled_width and (delta.token_ids or not self.pooled):
            raise StreamConflict(f"{len(delta.token_ids)} tokens and {len(self.pooled)} bytes of a vector")
        if delta.token_ids and not 0 <= min(delta.token_ids) <= max(delta.token_ids) < 2**32:
            raise StreamConflict(f"invalid token ids: {delta.token_ids[:8]}")
        if self._with_logprobs and len(delta.logprobs) != len(delta.token_ids):
            raise StreamConflict(f"{len(delta.logprobs)} logprobs for {len(delta.token_ids)} tokens")

    def _append(self, delta: TokenDelta) -> bool:
        known = self.token_ids[delta.index : delta.index + len(delta.token_ids)]
        if tuple(known) != delta.token_ids[: len(known)]:
            raise TokensDiffer(f"tokens that differ from those sent before, from output position {delta.index} on")
        fresh = delta.token_ids[len(known) :]
        self.token_ids.extend(fresh)
        if self._with_logprobs:
            self._logprobs.extend(delta.logprobs[len(known) :])
        if delta.finish_reason and delta.index + len(delta.token_ids) == len(self.token_ids):
            self.finish_reason = delta.finish_reason
        return bool(fresh or self.finish_reason)
