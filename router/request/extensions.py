"""Sampling and structured-output fields that vLLM adds to every API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from common.errors import MAX_SHOWN_CHARS, InvalidRequest
from common.wire import (
    MAX_ALLOWED_TOKENS,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    PENALTIES,
    bounds_of,
    default_of,
)
from router.request.errors import NOT_HERE

NOTHING: tuple[object, ...] = (False, "", [], {})


@dataclass(frozen=True, slots=True, eq=False)
class Only:
    """Annotates a field that may only be null or one of `same`, the values that do not change the answer.

    Compared by identity: `Annotated` would share one instance for equal values, and 1 equals True.
    """

    same: tuple[object, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.same], "description": "other values are not supported"}

    def _checked(self, value: object) -> object:
        if value is None or any(type(value) is type(same) and value == same for same in self.same):
            return value
        shown = repr(value)[:MAX_SHOWN_CHARS] if type(value) in (str, int, float) else "this field"
        raise PydanticCustomError(NOT_HERE, "{what} is not supported by this server", {"what": shown})


Refused = Annotated[Any, Only(NOTHING)]


MAX_CHARS_OF_A_STOP = 1024
"""Maximum length of one stop string."""
MAX_SALT_CHARS = 256
MAX_CLASS_CHARS = 256
MAX_STRUCTURED_CHOICES = 4096
"""Maximum number of choices for an answer. Each is a rule of a grammar."""
MAX_WORDS = 256
"""Maximum number of bad words of a request. Each may have several spellings in tokens."""

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CHARS_OF_A_STOP)]
JsonSchema = dict[str, Any] | bool
GrammarText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
OptionalText = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]
"""Like a `GrammarText`, but "" means no constraint."""
AllowedTokens = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True)]
BadWords = Annotated[list[StopText], Field(max_length=MAX_WORDS, fail_fast=True)]
Choices = Annotated[list[GrammarText], Field(min_length=1, max_length=MAX_STRUCTURED_CHOICES, fail_fast=True)]


def at_most(num_entries: int) -> BeforeValidator:
    """Create a validator that limits the entries of an object first, because each invalid entry adds an error."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > num_entries:
            raise ValueError(f"must have at most {num_entries:,} entries, not {len(value):,}")
        return value

    return BeforeValidator(check)


LogitBias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], at_most(MAX_LOGIT_BIAS)]


class Fields(BaseModel):
    """Base class of all requests. Values keep their JSON type (no "1" for 1), and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StructuredOutputs(Fields):
    """The format that the whole answer must match, given by one of these fields."""

    json_schema: JsonSchema | GrammarText | None = Field(None, alias="json", description="a JSON schema, or its text")
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = Field(None, description="a grammar in Lark or GBNF syntax")
    structural_tag: Refused = None
    whitespace_pattern: Refused = None
    disable_any_whitespace: Refused = None


class CopiedFields(Fields):
    """Optional fields that are copied unchanged to the worker's sampling parameters of the same names."""

    min_p: Annotated[float, Field(**bounds_of("min_p"))] | None = None
    presence_penalty: Annotated[float, Field(**bounds_of("presence_penalty"))] | None = None
    frequency_penalty: Annotated[float, Field(**bounds_of("frequency_penalty"))] | None = None
    repetition_penalty: Annotated[float, Field(**bounds_of("repetition_penalty"))] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None


COPIED = ("temperature", "top_p", *CopiedFields.model_fields)
"""Sampling parameters that are copied from the request, or have the default of `SamplingParams`."""


class Extensions(CopiedFields):
    """Optional fields of every generation endpoint."""

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(None, description="-1 or 0: disabled")
    seed: Int64 | None = None
    logit_bias: LogitBias | None = Field(None, description="map of token ids (as strings) to biases")
    allowed_token_ids: AllowedTokens | None = Field(None, description="only these tokens are generated")
    bad_words: BadWords | None = Field(None, description="texts that are never generated as whole tokens")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="maximum number of prompt tokens to keep; -1: up to the model's context length"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="side from which truncate_prompt_tokens removes tokens; default left"
    )
    thinking_token_budget: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="maximum number of reasoning tokens; -1: no limit"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = Field(
        None, description="only requests with the same salt share cached prefixes"
    )

    request_class: Annotated[str, Field(max_length=MAX_CLASS_CHARS)] | None = Field(
        None, description="request class; the header X-Request-Class has the same effect"
    )
    service_tier: Any = Field(None, description="flex: class batch; priority: class interactive, if these exist")

    structured_outputs: StructuredOutputs | None = Field(None, description="format of the answer, as in vLLM")
    guided_json: JsonSchema | OptionalText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    json_schema: JsonSchema | OptionalText | None = Field(None, description="as in llama.cpp and SGLang")
    grammar: OptionalText | None = Field(None, description="as in llama.cpp")
    regex: OptionalText | None = Field(None, description="as in SGLang")
    ebnf: OptionalText | None = Field(None, description="as in SGLang")

    # Fields of vLLM or SGLang that this server does not support, or not in this API.
    best_of: Annotated[Any, Only((1,))] = None
    use_beam_search: Refused = None
    length_penalty: Annotated[Any, Only((1, 1.0))] = None
    logits_processors: Refused = None
    custom_logit_processor: Refused = None
    guided_whitespace_pattern: Refused = None
    structural_tag: Refused = None
    documents: Refused = None
    vllm_xargs: Refused = None
    input_ids: Refused = None
    stop_regex: Refused = None
    no_stop_trim: Refused = None
    separate_reasoning: Annotated[Any, Only((True,))] = None
    return_hidden_states: Refused = None
    lora_path: Refused = None
    session_params: Refused = None

    @property
    def tier(self) -> str | None:
        """The requested service tier. Values other than strings are ignored."""
        return self.service_tier if isinstance(self.service_tier, str) else None


OLDER_ONLY = ("best_of", "use_beam_search", "length_penalty")
"""Fields that only OpenAI's two older APIs support. In others they must have their default value."""
EXTENSIONS = tuple(name for name in Extensions.model_fields if name not in OLDER_ONLY)
"""Fields that translated requests pass on unchanged."""


CHANGES_SCORES: Mapping[str, object] = {
    **{name: default_of(name) for name in PENALTIES},
    "logit_bias": None,
}
"""Fields that would change the log probabilities that rank beams, with their neutral values."""
NEEDS_ONE_ANSWER: Mapping[str, object] = {
    **dict.fromkeys(("structured_outputs", "response_format", "tools")),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar")),
    **dict.fromkeys(("json_schema", "grammar", "regex", "ebnf")),
    "thinking_token_budget": -1,
}
"""Fields with per-answer state in a worker. In a beam search each step is a separate answer of one token."""
MAX_ALLOWED = MAX_LOGIT_BIAS
"""Maximum number of allowed tokens in a beam search. Each step requests the log probability of each."""


def check_beams(fields: Extensions, num_alternatives: int | None) -> None:
    """Raise InvalidRequest for fields that beam search does not support. `num_alternatives` are shown per token."""
    _refuse(fields, CHANGES_SCORES, "beams are ranked by the model's unmodified log probabilities")
    _refuse(fields, NEEDS_ONE_ANSWER, "each token of a beam is generated separately")
    _refuse(fields, {"logprob_token_ids": None}, "beam search requests the likeliest tokens")
    allowed = fields.allowed_token_ids or ()
    if len(allowed) > MAX_ALLOWED:
        raise InvalidRequest(
            f"allowed_token_ids: must have at most {MAX_ALLOWED:,} ids with use_beam_search, not {len(allowed):,}",
            param="allowed_token_ids",
        )
    if allowed and num_alternatives:  # a worker reports either the likeliest or the allowed tokens
        name = "top_logprobs" if "top_logprobs" in type(fields).model_fields else "logprobs"
        raise InvalidRequest(
            f"{name}: must be 0 with use_beam_search and allowed_token_ids (got {num_alternatives})", param=name
        )


def _refuse(fields: Extensions, lacking: Mapping[str, object], why: str) -> None:
    for name, same in lacking.items():
        if getattr(fields, name, None) not in (None, same, [], {}):
            raise InvalidRequest(f"{name}: not allowed with use_beam_search: {why}", param=name)
