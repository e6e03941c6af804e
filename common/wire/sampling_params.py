"""Sampling parameters of a request: names, bounds and defaults, each stated here only.

Field names are those of the APIs. The router's request fields take their bounds from `bounds_of`.
See docs/contributing/add-a-sampling-parameter.md.
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
"""Entries of the lists of one request, which a worker goes through for every token of its answer."""
MAX_TOP_LOGPROBS = 20
"""Alternatives that every request may ask for."""
MAX_VOCABULARY = 2**20
"""More ids than any model has: as many alternatives may be asked for where the router's operator allows it."""
MAX_THINKING_MARK = 32
"""Tokens of the text that begins or ends a thought."""
MAX_GRAMMAR_CHARS = 128 * 1024
"""Of what llguidance compiles, before its own bounds end the work."""
LOGPROB_FLOOR = -9999.0
"""Stands for minus infinity and NaN, which JSON does not have; vLLM and OpenAI use the same."""
PENALTIES: Final = ("presence_penalty", "frequency_penalty", "repetition_penalty")
"""Parameters that change logits by the tokens of the sequence so far."""
PLAIN: Final = (
    *("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("prompt_logprobs", "logprob_token_ids", "pooling"),
)
"""Parameters that a row with `SamplingParams.is_plain` may have: they need nothing from the host at a step. Any other
parameter that differs from its default makes the host prepare the row."""
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Logprob = Annotated[float, Meta(ge=-1e15, le=1e15)]
Pooling = Literal["", "last", "mean"]
"""How a prompt's hidden states become one vector: the last token's, or the mean of all; "" where text is generated."""
Mark = Annotated[tuple[int, ...], Meta(max_length=MAX_THINKING_MARK)]


class BadWord(NamedTuple):
    """A token sequence that an answer must not contain: all but the last token, packed for comparison, and the last."""

    beginning: Annotated[bytes, Meta(max_length=TOKEN_BYTES * (MAX_BAD_WORD_TOKENS - 1))]
    last: Annotated[int, Meta(ge=0)]

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> BadWord:
        return cls(pack_tokens(token_ids[:-1]), token_ids[-1])

    @property
    def num_tokens(self) -> int:
        return len(self.beginning) // TOKEN_BYTES + 1


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """An answer that begins with `start` gets `end` once it has `num_tokens` tokens, if `end` has not come before.

    `start` is empty where the prompt's own end begins the thought.
    """

    num_tokens: Annotated[int, Meta(ge=0)]
    end: Annotated[tuple[int, ...], Meta(min_length=1, max_length=MAX_THINKING_MARK)]
    start: Mark = ()


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Parameters that both workers sample by.

    `seed` is always set (the router draws one when the client gives none). Noise is a function of (seed, position)
    only, so a request that moves to another worker continues with the same noise.
    `logprobs` is -1 for none, else the number of alternatives to report beside the sampled token; with
    `logprob_token_ids` these are the alternatives.
    `stop_token_ids` excludes the model's own end tokens, which apply unless `ignore_eos`.
    `grammar` is what the answer must match, in the form that `common.grammar.grammar` takes, or "".
    `prompt_logprobs` is like `logprobs`, for the prompt's own tokens: the worker that computes the prompt reports them.
    With `pooling` nothing is sampled: the answer is the prompt's hidden states, pooled.
    Only `allowed_token_ids` may be sampled, unless it is empty, and no token that would complete one of `bad_words`.
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
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)] = ""
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
        """Whether a row's logits and draw determine its token once `min_tokens` is reached, and only the token is
        wanted."""
        return bool(_prepared(self) == _NOTHING_PREPARED)

    @property
    def has_penalties(self) -> bool:
        """Whether a row's logits depend on the sequence's tokens."""
        return bool(_penalties(self) != _NO_PENALTIES)


_DEFAULT: Final = SamplingParams(max_tokens=1)
_prepared: Final = attrgetter(*(name for name in SamplingParams.__struct_fields__ if name not in PLAIN))
_penalties: Final = attrgetter(*PENALTIES)
_NOTHING_PREPARED, _NO_PENALTIES = _prepared(_DEFAULT), _penalties(_DEFAULT)
_TYPES: Final = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}


def default_of(name: str) -> Any:
    """The default of a sampling parameter."""
    return getattr(_DEFAULT, name)


def bounds_of(name: str) -> dict[str, Any]:
    """The bounds of a sampling parameter, as keywords: some of ge, gt, le and lt."""
    _, meta = get_args(_TYPES[name])
    found = {bound: getattr(meta, bound) for bound in ("ge", "gt", "le", "lt")}
    return {bound: value for bound, value in found.items() if value is not None}


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one position: its token's own, and (token id, logprob) alternatives, best first.

    `rank` counts the tokens before it, and itself, in the order of the alternatives; 0: not counted.
    """

    logprob: Logprob
    top: Annotated[tuple[tuple[int, Logprob], ...], Meta(max_length=MAX_VOCABULARY)] = ()
    rank: Annotated[int, Meta(ge=0, le=MAX_VOCABULARY)] = 0


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """What the sampler returns for one sequence."""

    token_id: int
    logprobs: TokenLogprobs | None = None
