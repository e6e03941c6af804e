"""The one endpoint of platforms that know no other: what a body asks for is seen from its fields."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import ModelWrapValidatorHandler, model_validator

from router.request.fields import ChatRequest, CompletionRequest, SamplingFields


class Invocation(SamplingFields):
    """`POST /invocations`. It is read as a `ChatRequest` if it has `messages`, and else as a `CompletionRequest`."""

    known_fields: ClassVar = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()

    def longest_text(self) -> str | list[int]:
        raise NotImplementedError("an invocation is read as one of two other requests")

    def without_prompt(self) -> Self:
        raise NotImplementedError("an invocation is read as one of two other requests")

    @property
    def num_alternatives(self) -> int | None:
        raise NotImplementedError("an invocation is read as one of two other requests")

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, body: Any, handler: ModelWrapValidatorHandler[Self]) -> Any:
        return (ChatRequest if "messages" in body else CompletionRequest).model_validate(body)
