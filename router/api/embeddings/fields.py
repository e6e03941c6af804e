"""The fields of requests whose answers are made of prompts alone: embeddings, scores and rankings."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Discriminator, Field, Tag

from common.errors import InvalidRequest
from router.request import MAX_CLASS_CHARS, MAX_SALT_CHARS, Fields, Refused
from router.request.fields import CompletionRequest, Ids, kind_of_prompt

MAX_INPUTS = 2048
"""Of one request, as OpenAI has it."""

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
TextOrTexts = str | Texts
Input = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[list[Ids], Field(max_length=MAX_INPUTS, fail_fast=True), Tag("lists of ids")],
    Discriminator(kind_of_prompt),
]


class PoolingFields(Fields):
    """The fields that all of these requests have."""

    model: Annotated[str, Field(max_length=1024)] | None = Field(None, description="null: the served model")
    user: Annotated[str, Field(max_length=4096)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="keep so many tokens of each text at most; -1: as many as the model takes"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="where truncate_prompt_tokens cuts; default right"
    )
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = Field(
        None, description="requests share cached prefixes only with requests of the same salt"
    )
    request_class: Annotated[str, Field(max_length=MAX_CLASS_CHARS)] | None = Field(
        None, description="the class of requests that it is of; so does the header X-Request-Class"
    )
    service_tier: Any = Field(None, description="flex: class batch, priority: class interactive, where these exist")

    # vLLM has these, this server has not.
    mm_processor_kwargs: Refused = None
    embed_dtype: Refused = None
    endianness: Refused = None

    @property
    def tier(self) -> str | None:
        """The service tier that it asks for; any other value than a text has no effect."""
        return self.service_tier if isinstance(self.service_tier, str) else None

    @property
    def end_user(self) -> str:
        """The client's own user, if the body names one."""
        return self.user or ""

    def longest_text(self) -> str | list[int]:
        """See `SamplingFields.longest_text`: of a text that may be cut nothing is sure."""
        return ""

    def as_completion(self) -> CompletionRequest:
        """What such a request means to the pools: a prompt, behind which nothing is generated."""
        named = {"model": self.model, "cache_salt": self.cache_salt, "user": self.user}
        return CompletionRequest.model_validate({"prompt": "", "max_tokens": 1, **named})

    def check(self) -> None:
        """Raises InvalidRequest for fields that exclude each other."""
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise InvalidRequest("truncation_side: only allowed with truncate_prompt_tokens", param="truncation_side")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens: must be -1 or at least 1 (got 0)", param="truncate_prompt_tokens"
            )


class EmbeddingRequest(PoolingFields):
    """`POST /v1/embeddings`."""

    input: Input = Field(description="text, texts, token ids or lists of token ids")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="default float")
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None,
        description="keep so many numbers of each embedding, normalised again; for models that were trained for it",
    )
    normalize: bool | None = Field(None, description="default: as the model has it")
    add_special_tokens: bool | None = None
    messages: Refused = None

    def longest_text(self) -> str | list[int]:
        given = self.input if self.truncate_prompt_tokens is None else ""
        if isinstance(given, str) or not given or isinstance(given[0], int):
            return cast(str | list[int], given)
        return max(cast(list[str], given), key=len)  # or lists of ids: the longest either way

    @property
    def sources(self) -> list[tuple[str | list[int], str]]:
        """Each input with the name of its field. Raises InvalidRequest without any."""
        given = self.input
        if isinstance(given, str):
            return [(given, "input")]
        if not given:
            raise InvalidRequest("input: must not be empty", param="input")
        if isinstance(given[0], int):
            return [([part for part in given if isinstance(part, int)], "input")]
        return [(cast(str | list[int], part), f"input[{i}]") for i, part in enumerate(given)]


class ScoreRequest(PoolingFields):
    """`POST /v1/score`: each text of the one side with its text of the other, or one text with each of the others."""

    text_1: TextOrTexts
    text_2: TextOrTexts
    activation: Refused = None
    use_activation: Refused = None

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """The texts of both sides. Raises InvalidRequest where they make no pairs."""
        first, second = ([side] if isinstance(side, str) else side for side in (self.text_1, self.text_2))
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"text_1: {len(first):,} texts make no pairs with the {len(second):,} of text_2: send one, or as many",
                param="text_1",
            )
        return first, second


class RerankRequest(PoolingFields):
    """`POST /v1/rerank`: documents in the order of their scores, in the shape of Jina's and Cohere's APIs."""

    query: str
    documents: Texts
    top_n: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(None, description="null or 0: all")
    return_documents: bool | None = Field(None, description="default true")

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """The query, and what is compared with it."""
        return [self.query], self.documents
