"""Requests of other APIs, planned as the chat requests that they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

from pydantic import ValidationError

from router.api.openai.chat import plan_chat
from router.generation import AnswerPlan, Origin, Service
from router.request import named_as
from router.request.errors import invalid_translation
from router.request.fields import ChatRequest


class OtherFields(Protocol):
    """Fields of another API: their names by those of a chat request, and how ids of its answers begin."""

    names: ClassVar[Mapping[str, str]]
    id_prefix: ClassVar[str]


async def chat_of(service: Service, make: Callable[[], ChatRequest], *, is_long: bool) -> ChatRequest:
    """The chat request that `make` translates a conversation to, in a thread if it `is_long`. Raises RequestError.

    A valid request of the other API may exceed the bounds of a chat request, for example on calls of one message.
    """
    try:
        return await service.text.apart(make) if is_long else make()
    except ValidationError as error:
        raise invalid_translation(error) from error


async def plan_translated(
    service: Service, fields: OtherFields, origin: Origin, make: Callable[[], ChatRequest], *, is_long: bool
) -> AnswerPlan:
    """Render and tokenise the conversation. Raises RequestError, with the names that the other API has for fields."""
    chat = await chat_of(service, make, is_long=is_long)
    with named_as(fields.names):
        return await plan_chat(service, chat, origin, prefix=fields.id_prefix)
