"""Which requests a worker takes, and when their sequences end. Prefill and decode workers must agree on it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from common.engine.sequences.sequence import WorkerSequence
from common.errors import WireError
from common.grammar import TokenLimits, finish_reason, num_output_needed, token_limits
from common.wire import TOKEN_BYTES, Pooling, unpack_tokens
from common.wire.messages import DecodeRequest, PrefillRequest


class RequestRules:
    """`max_model_len` is the longest prompt plus answer, `max_prompt_len` the longest prompt, in tokens."""

    def __init__(
        self,
        eos_token_ids: Collection[int],
        *,
        vocab_size: int,
        max_model_len: int,
        max_prompt_len: int,
        knows_grammars: bool,
        pooling: Pooling = "",
    ) -> None:
        """`pooling` is how this worker pools prompts; "" if it generates text."""
        self._pooling = pooling
        self._eos, self._knows_grammars = tuple(eos_token_ids), knows_grammars
        self.vocab_size, self.max_model_len, self._max_prompt_len = vocab_size, max_model_len, max_prompt_len

    def prompt(self, request: PrefillRequest | DecodeRequest) -> list[int]:
        """The prompt's tokens. Raises WireError for a request that cannot be served here."""
        token_ids = unpack_tokens(request.prompt)
        if not token_ids:
            raise WireError("the prompt is empty")
        if len(token_ids) > self._max_prompt_len:
            raise WireError(f"the prompt has {len(token_ids)} tokens, this worker takes at most {self._max_prompt_len}")
        if max(token_ids) >= self.vocab_size:
            raise WireError(f"token id {max(token_ids)} is outside of the vocabulary of {self.vocab_size}")
        self._check_pooling(request)
        if request.num_output_tokens >= len(token_ids):
            raise WireError(f"{request.num_output_tokens} of the prompt's {len(token_ids)} tokens cannot be output")
        if request.params.thinking is not None and max(request.params.thinking.end) >= self.vocab_size:
            raise WireError(f"a thought cannot end with token {max(request.params.thinking.end)}")
        if any(len(word.beginning) % TOKEN_BYTES for word in request.params.bad_words):
            raise WireError("a bad word is not a list of token ids")
        if request.params.grammar and not self._knows_grammars:
            raise WireError("this worker knows no grammars")
        return token_ids

    def _check_pooling(self, request: PrefillRequest | DecodeRequest) -> None:
        asked, mine = request.params.pooling, self._pooling
        if asked != mine:
            wanted = f"pooling by {asked!r}" if asked else "generated text"
            gives = f"pools by {mine!r}" if mine else "generates text"
            raise WireError(f"the request wants {wanted}, this worker {gives}")
        if asked and isinstance(request, PrefillRequest) and request.decode is not None:
            raise WireError("a prompt that is pooled goes to no decode worker")

    def limits(self, sequence: WorkerSequence, drafted: Sequence[int] = (), num_unseen: int = 0) -> TokenLimits:
        """What must not come next, behind the sequence, `num_unseen` tokens in flight and those `drafted`.

        Bad words and the end of a thought are only right without unseen tokens.
        """
        params = sequence.params
        num_output = sequence.num_output_tokens + num_unseen + len(drafted)
        end: tuple[int, ...] = ()
        if params.bad_words or params.thinking is not None:
            needed = num_output_needed(params, num_output)
            first = max(sequence.num_prompt_tokens, sequence.num_tokens - needed)
            end = (*sequence.token_ids[first:], *drafted)
        return token_limits(params, self._eos, num_output, end)

    def finish_reason(self, sequence: WorkerSequence, token_id: int, num_more: int = 0) -> str:
        """ "stop", "length" or "" (go on) once `token_id` is the sequence's last token.

        `num_more` tokens, `token_id` included, are not in the sequence yet.
        """
        num_tokens = len(sequence.token_ids) + num_more
        return finish_reason(
            sequence.request.params,
            self._eos,
            num_output_tokens=num_tokens - sequence.num_prompt_tokens,
            token_id=token_id,
            num_tokens=num_tokens,
            max_model_len=self.max_model_len,
        )
