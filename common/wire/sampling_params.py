"""Sampling parameters of a request. Names, limits and defaults are defined only here.

Field names are those of the APIs. The router's request fields use `bounds_of`. See
docs/contributing/add-a-sampling-parameter.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta

from common.wire.message_fields import TOKEN_BYTES, pack_tokens

MAX_STOP_TOKEN_IDS, MAX_LOGIT_BIAS, MAX_ALLOWED_TOKENS = 128, 1024, 65_536
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 1024, 1024
"""Limits of the lists of one request, which workers process for every token."""
MAX_TOP_LOGPROBS = 20
"""Maximum number of alternatives that any request may ask for."""
MAX_VOCABULARY = 2**20
"""Upper limit of vocabulary sizes: the number of alternatives if the operator allows all."""
MAX_THINKING_MARK = 32
"""Maximum number of tokens of a marker that begins or ends thinking."""
MAX_GRAMMAR_CHARS = 128 * 1024
"""Maximum size of a grammar passed to llguidance, whose own limits apply in addition."""
MAX_NESTED_GRAMMAR_CHARS = 2 * MAX_GRAMMAR_CHARS + 4096
"""Maximum size of a grammar after a thought: JSON, in which a grammar takes up to twice its size."""
LOGPROB_FLOOR = -9999.0
"""Replaces minus infinity and NaN, which JSON cannot express. vLLM and OpenAI use the same value."""
PENALTIES: Final = ("presence_penalty", "frequency_penalty", "repetition_penalty")
"""Parameters that change logits depending on the sequence."""
PLAIN: Final = (
    *("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("prompt_logprobs", "logprob_token_ids", "pooling"),
)
"""Parameters that do not require preparation of a row on the host at each step (`SamplingParams.is_plain`). All others
do if they differ from their defaults."""
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Logprob = Annotated[float, Meta(ge=-1e15, le=1e15)]
Pooling = Literal["", "last", "mean"]
"""Pooling of a prompt's hidden states into one vector: of the last token, or the mean of all; "" for generation."""
Mark = Annotated[tuple[int, ...], Meta(max_length=MAX_THINKING_MARK)]


class BadWord(NamedTuple):
    """A token sequence that answers must not contain: all tokens but the last, packed for comparison, and the last."""

    beginning: Annotated[bytes, Meta(max_length=TOKEN_BYTES * (MAX_BAD_WORD_TOKENS - 1))]
    last: Annotated[int, Meta(ge=0)]

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> BadWord:
        return cls(pack_tokens(token_ids[:-1]), token_ids[-1])

    @property
    def num_tokens(self) -> int:
        return len(self.beginning) // TOKEN_BYTES + 1


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """Limit of thinking: an answer that begins with `start` gets `end` after `num_tokens` tokens.

    Does nothing if `end` came before. `start` is empty if the prompt itself ends with it.
    """

    num_tokens: Annotated[int, Meta(ge=0)]
    end: Annotated[tuple[int, ...], Meta(min_length=1, max_length=MAX_THINKING_MARK)]
    start: Mark = ()


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Sampling parameters, used by prefill and decode workers.

    - `seed` is always set; the router draws one if the client sends none. Noise depends only on (seed, position), so it
      is unchanged when a request moves to another worker.
    - `logprobs` is the number of alternatives reported with the sampled token, -1 for none. `logprob_token_ids`
      replaces the alternatives.
    - `stop_token_ids` are in addition to the model's end tokens, which apply unless `ignore_eos`.
    - `grammar` constrains the answer, in the form of `common.grammar.grammar`; "" for none.
    - `prompt_logprobs` is like `logprobs` for the prompt's tokens, reported by the worker that computes the prompt.
    - With `pooling` nothing is sampled: the answer is the pooled hidden states of the prompt.
    - `allowed_token_ids` restricts sampling unless it is empty. `bad_words` are token sequences that are never
      completed.
    """

    max_tokens: Annotated[int, Meta(ge=1)]
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] = 1.0  # logits are divided by it
    logit_bias: Annotated[tuple[tuple[int, Bias], ...], Meta(max_length=MAX_LOGIT_BIAS)] = ()
    logprobs: Annotated[int, Meta(ge=-1, le=MAX_VOCABULARY)] = -1
    ignore_eos: bool = False
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    grammar: Annotated[str, Meta(max_length=MAX_NESTED_GRAMMAR_CHARS)] = ""
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=MAX_VOCABULARY)] = -1
    allowed_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_ALLOWED_TOKENS)] = ()
    bad_words: Annotated[tuple[BadWord, ...], Meta(max_length=MAX_BAD_WORDS)] = ()
    logprob_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_LOGIT_BIAS)] = ()
    thinking: ThinkingBudget | None = None
    pooling: Pooling = ""

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def is_plain(self) -> bool:
        """Whether logits and noise determine the token after `min_tokens`, and only the token is requested."""
        return bool(_prepared(self) == _NOTHING_PREPARED)

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the sequence's tokens."""
        return bool(_penalties(self) != _NO_PENALTIES)


_DEFAULT: Final = SamplingParams(max_tokens=1)
_prepared: Final = attrgetter(*(name for name in SamplingParams.__struct_fields__ if name not in PLAIN))
_penalties: Final = attrgetter(*PENALTIES)
_NOTHING_PREPARED, _NO_PENALTIES = _prepared(_DEFAULT), _penalties(_DEFAULT)
_TYPES: Final = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}


def default_of(name: str) -> Any:
    """Return the default of a sampling parameter."""
    return getattr(_DEFAULT, name)


def bounds_of(name: str) -> dict[str, Any]:
    """Return the limits of a sampling parameter as keywords: some of ge, gt, le and lt."""
    _, meta = get_args(_TYPES[name])
    found = {bound: getattr(meta, bound) for bound in ("ge", "gt", "le", "lt")}
    return {bound: value for bound, value in found.items() if value is not None}


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one position: of its token, and (token id, logprob) alternatives, best first.

    `rank` is the token's rank among all tokens, from 1; 0 if unknown.
    """

    logprob: Logprob
    top: Annotated[tuple[tuple[int, Logprob], ...], Meta(max_length=MAX_VOCABULARY)] = ()
    rank: Annotated[int, Meta(ge=0, le=MAX_VOCABULARY)] = 0


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """Result of the sampler for one sequence."""

    token_id: int
    logprobs: TokenLogprobs | None = None
