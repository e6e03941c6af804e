"""Fields that vLLM adds to every API: how tokens are drawn, and the answer's form."""

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


@dataclass(frozen=True, slots=True)
class Only:
    """Annotates a field that may only be null or one of `same`: values that ask for what this server does anyway."""

    same: tuple[object, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.same], "description": "nothing else is supported by this server"}

    def _checked(self, value: object) -> object:
        if value is None or any(type(value) is type(same) and value == same for same in self.same):
            return value
        shown = repr(value)[:MAX_SHOWN_CHARS] if type(value) in (str, int, float) else "this field"
        raise PydanticCustomError(NOT_HERE, "{what} is not supported by this server", {"what": shown})


Refused = Annotated[Any, Only(NOTHING)]


MAX_CHARS_OF_A_STOP = 1024
"""Of one stop string; all of a request together have a bound of their own."""
MAX_SALT_CHARS = 256
MAX_CLASS_CHARS = 256
MAX_STRUCTURED_CHOICES = 4096
"""Texts, one of which the answer must be: each is a rule of a grammar."""
MAX_WORDS = 256
"""Bad words of a request; each may have several spellings in tokens."""

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
    """Limit the entries of an object before they are validated, because each invalid entry creates an error."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > num_entries:
            raise ValueError(f"must have at most {num_entries:,} entries, not {len(value):,}")
        return value

    return BeforeValidator(check)


LogitBias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], at_most(MAX_LOGIT_BIAS)]


class Fields(BaseModel):
    """Base of all requests: values keep their JSON type (no "1" for 1), and unknown fields are dropped."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StructuredOutputs(Fields):
    """The form that the whole answer must match: one of these fields."""

    json_schema: JsonSchema | GrammarText | None = Field(None, alias="json", description="a JSON schema, or its text")
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = Field(None, description="rules in the form of Lark or GBNF")
    structural_tag: Refused = None
    whitespace_pattern: Refused = None
    disable_any_whitespace: Refused = None


class CopiedFields(Fields):
    """Optional fields whose value becomes the worker's sampling parameter of the same name as it is."""

    min_p: Annotated[float, Field(**bounds_of("min_p"))] | None = None
    presence_penalty: Annotated[float, Field(**bounds_of("presence_penalty"))] | None = None
    frequency_penalty: Annotated[float, Field(**bounds_of("frequency_penalty"))] | None = None
    repetition_penalty: Annotated[float, Field(**bounds_of("repetition_penalty"))] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None


COPIED = ("temperature", "top_p", *CopiedFields.model_fields)
"""Sampling parameters that workers get as the client gave them, or else with the default of `SamplingParams`."""


class Extensions(CopiedFields):
    """Optional fields of every generation endpoint."""

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(None, description="-1 or 0: off")
    seed: Int64 | None = None
    logit_bias: LogitBias | None = Field(None, description="token id (as text) -> bias")
    allowed_token_ids: AllowedTokens | None = Field(None, description="no other token is generated")
    bad_words: BadWords | None = Field(None, description="texts that the answer never contains as whole tokens")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="keep so many tokens of the prompt at most; -1: as many as fit"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="where truncate_prompt_tokens cuts; default left"
    )
    thinking_token_budget: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="tokens that a thought may have at most; -1: as many as it needs"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = Field(
        None, description="requests share cached prefixes only with requests of the same salt"
    )

    request_class: Annotated[str, Field(max_length=MAX_CLASS_CHARS)] | None = Field(
        None, description="the class of requests that it is of; so does the header X-Request-Class"
    )
    service_tier: Any = Field(None, description="flex: class batch, priority: class interactive, where these exist")

    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's: what the answer must match")
    guided_json: JsonSchema | OptionalText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    json_schema: JsonSchema | OptionalText | None = Field(None, description="llama.cpp's and SGLang's")
    grammar: OptionalText | None = Field(None, description="llama.cpp's")
    regex: OptionalText | None = Field(None, description="SGLang's")
    ebnf: OptionalText | None = Field(None, description="SGLang's")

    # vLLM or SGLang have these, this server has not, or not in this API.
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
        """The service tier that it asks for; any other value than a text has no effect."""
        return self.service_tier if isinstance(self.service_tier, str) else None


OLDER_ONLY = ("best_of", "use_beam_search", "length_penalty")
"""Fields that OpenAI's two older APIs serve, and that here may only ask for the default, in any spelling of it."""
EXTENSIONS = tuple(name for name in Extensions.model_fields if name not in OLDER_ONLY)
"""Fields that a translated request hands on as they are."""


CHANGES_SCORES: Mapping[str, object] = {
    **{name: default_of(name) for name in PENALTIES},
    "logit_bias": None,
}
"""Fields that would change the log-probabilities by which beams compete, with the values that change nothing."""
NEEDS_ONE_ANSWER: Mapping[str, object] = {
    **dict.fromkeys(("structured_outputs", "response_format", "tools")),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar")),
    **dict.fromkeys(("json_schema", "grammar", "regex", "ebnf")),
    "thinking_token_budget": -1,
}
"""Fields that a worker keeps along an answer; each step of a search is an answer of its own, of one token."""
MAX_ALLOWED = MAX_LOGIT_BIAS
"""Allowed tokens of a search: a step asks for the log-probability of each."""


def check_beams(fields: Extensions, num_alternatives: int | None) -> None:
    """Raises InvalidRequest for what a beam search cannot do. `num_alternatives` are those that its answer shows."""
    _refuse(fields, CHANGES_SCORES, "beams compete by the model's own log-probabilities")
    _refuse(fields, NEEDS_ONE_ANSWER, "each token of a beam is an answer of its own")
    _refuse(fields, {"logprob_token_ids": None}, "a search asks for the likeliest tokens")
    allowed = fields.allowed_token_ids or ()
    if len(allowed) > MAX_ALLOWED:
        raise InvalidRequest(
            f"allowed_token_ids: must be at most {MAX_ALLOWED:,} with use_beam_search (got {len(allowed):,})",
            param="allowed_token_ids",
        )
    if allowed and num_alternatives:  # a worker reports the likeliest tokens or the allowed ones, not both
        name = "top_logprobs" if "top_logprobs" in type(fields).model_fields else "logprobs"
        raise InvalidRequest(
            f"{name}: must be 0 with use_beam_search and allowed_token_ids (got {num_alternatives})", param=name
        )


def _refuse(fields: Extensions, lacking: Mapping[str, object], why: str) -> None:
    for name, same in lacking.items():
        if getattr(fields, name, None) not in (None, same, [], {}):
            raise InvalidRequest(f"{name}: not allowed with use_beam_search: {why}", param=name)
