"""Requests of other APIs, planned as the chat requests that they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

from pydantic import ValidationError

from router.api.openai.chat import plan_chat
from router.generation.choices.origin import Origin
from router.generation.plan import AnswerPlan
from router.generation.service import Service
from router.request.errors import invalid_translation
from router.request.fields import ChatRequest
from router.request.translation import named_as

MANY_ITEMS = 1000
"""A conversation of more items is translated in a thread, because that takes milliseconds."""


class OtherFields(Protocol):
    """Fields of another API: their names by those of a chat request, and how ids of its answers begin."""

    names: ClassVar[Mapping[str, str]]
    id_prefix: ClassVar[str]


async def chat_of(service: Service, make: Callable[[], ChatRequest], num_items: int) -> ChatRequest:
    """The chat request that `make` translates a conversation of `num_items` to. Raises RequestError.

    What the other API allows may exceed the bounds of a chat request, for example calls of one message.
    """
    try:
        return make() if num_items <= MANY_ITEMS else await service.text.apart(make)
    except ValidationError as error:
        raise invalid_translation(error) from error


async def plan_translated(
    service: Service, fields: OtherFields, origin: Origin, make: Callable[[], ChatRequest], num_items: int
) -> AnswerPlan:
    """Render and tokenise the conversation. Raises RequestError, with the names that the other API has for fields."""
    chat = await chat_of(service, make, num_items)
    with named_as(fields.names):
        return await plan_chat(service, chat, origin, prefix=fields.id_prefix)
