"""Requests of other APIs, planned as the chat requests that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from router.api.chat import plan_chat
from router.auth.keys import ApiKey
from router.generation.plan import Plan
from router.generation.service import Service
from router.request.fields import ChatRequest
from router.request.translation import named_as

MANY_ITEMS = 1000
"""A conversation of more items is translated in a thread, because that takes milliseconds."""


class Translatable(Protocol):
    """A request of another API."""

    @property
    def num_items(self) -> int:
        """The length of the conversation."""

    def as_chat(self) -> ChatRequest:
        """The chat request that means the same. Raises InvalidRequest."""


async def chat_of(service: Service, fields: Translatable) -> ChatRequest:
    """The chat request that `fields` mean. Raises RequestError."""
    return fields.as_chat() if fields.num_items <= MANY_ITEMS else await service.text.apart(fields.as_chat)


async def plan_translated(
    service: Service, fields: Translatable, key: ApiKey, traceparent: str, *, prefix: str, names: Mapping[str, str]
) -> Plan:
    """Render and tokenise the conversation; errors call fields by the other API's `names`. Raises RequestError."""
    chat = await chat_of(service, fields)
    with named_as(names):
        return await plan_chat(service, chat, key, traceparent, prefix=prefix)
