"""Request fields of the embedding, score and rerank endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Discriminator, Field, Tag

from common.errors import InvalidRequest
from router.request import MAX_CLASS_CHARS, MAX_SALT_CHARS, Fields, Refused
from router.request.fields import CompletionRequest, Ids, kind_of_prompt

MAX_INPUTS = 2048
"""OpenAI's limit on the number of inputs of a request."""

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
    """Fields that the embedding, score and rerank endpoints share."""

    model: Annotated[str, Field(max_length=1024)] | None = Field(None, description="Default: the default model.")
    user: Annotated[str, Field(max_length=4096)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="Maximum number of tokens of each text; further ones are cut. -1: the model's maximum."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Side on which truncate_prompt_tokens cuts. Default: right."
    )
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = Field(
        None, description="Only requests with the same salt share cached prefixes."
    )
    request_class: Annotated[str, Field(max_length=MAX_CLASS_CHARS)] | None = Field(
        None, description="The request class. Equivalent to the header X-Request-Class."
    )
    service_tier: Any = Field(
        None, description="`flex` selects the class batch, `priority` the class interactive, if these classes exist."
    )

    # Fields of vLLM's API that this server does not support.
    mm_processor_kwargs: Refused = None
    embed_dtype: Refused = None
    endianness: Refused = None

    @property
    def tier(self) -> str | None:
        """The requested service tier. Values that are not strings have no effect."""
        return self.service_tier if isinstance(self.service_tier, str) else None

    @property
    def end_user(self) -> str:
        """The client's user id, if the body has one."""
        return self.user or ""

    def longest_text(self) -> str | list[int]:
        """See `SamplingFields.longest_text`. The length of text that may be truncated is unknown."""
        return ""

    def as_completion(self) -> CompletionRequest:
        """Return the equivalent completion request for the workers, whose single generated token is not used."""
        named = {"model": self.model, "cache_salt": self.cache_salt, "user": self.user}
        return CompletionRequest.model_validate({"prompt": "", "max_tokens": 1, **named})

    def check(self) -> None:
        """Raise InvalidRequest for fields that exclude each other."""
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise InvalidRequest("truncation_side: only allowed with truncate_prompt_tokens", param="truncation_side")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens: must be -1 or at least 1, got 0", param="truncate_prompt_tokens"
            )


class EmbeddingRequest(PoolingFields):
    """Body of `POST /v1/embeddings`."""

    input: Input = Field(description="A text, a list of texts, token ids, or a list of token id lists.")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="Default: float.")
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None,
        description="Number of leading dimensions to return, normalised again. Only for models trained for it.",
    )
    normalize: bool | None = Field(None, description="Whether to normalise the embeddings. Default: as the model does.")
    add_special_tokens: bool | None = None
    messages: Refused = None

    def longest_text(self) -> str | list[int]:
        given = self.input if self.truncate_prompt_tokens is None else ""
        if isinstance(given, str) or not given or isinstance(given[0], int):
            return cast(str | list[int], given)
        return max(cast(list[str], given), key=len)  # works for lists of token ids too

    @property
    def sources(self) -> list[tuple[str | list[int], str]]:
        """Return each input with the name of its field. Raises InvalidRequest if there is none."""
        given = self.input
        if isinstance(given, str):
            return [(given, "input")]
        if not given:
            raise InvalidRequest("input: must not be empty", param="input")
        if isinstance(given[0], int):
            return [([part for part in given if isinstance(part, int)], "input")]
        return [(cast(str | list[int], part), f"input[{i}]") for i, part in enumerate(given)]


class ScoreRequest(PoolingFields):
    """Body of `POST /v1/score`. Scores the texts of both sides pairwise, or one text with each of the other side."""

    text_1: TextOrTexts
    text_2: TextOrTexts
    activation: Refused = None
    use_activation: Refused = None

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """Return the texts of both sides. Raises InvalidRequest if they do not form pairs."""
        first, second = ([side] if isinstance(side, str) else side for side in (self.text_1, self.text_2))
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"text_1: must have 1 text or the number of texts of text_2 ({len(second):,}), got {len(first):,}",
                param="text_1",
            )
        return first, second


class RerankRequest(PoolingFields):
    """Body of `POST /v1/rerank`, in the format of Jina's and Cohere's APIs."""

    query: str
    documents: Texts
    top_n: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="Number of documents to return. Null or 0: all."
    )
    return_documents: bool | None = Field(None, description="Whether to return the documents' texts. Default: true.")

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """The query and the documents."""
        return [self.query], self.documents
