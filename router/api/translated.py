"""Requests of other APIs, planned as the chat requests that they mean."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from router.api.anthropic_fields import Conversation, MessagesRequest
from router.api.chat import plan_chat
from router.api.responses_fields import Item, ResponsesRequest
from router.generation.origin import Origin
from router.generation.plan import AnswerPlan
from router.generation.service import Service
from router.request.fields import ChatRequest
from router.request.translation import named_as

MANY_ITEMS = 1000
"""A conversation of more items is translated in a thread, because that takes milliseconds."""


async def chat_of(service: Service, fields: Conversation | ResponsesRequest, past: Sequence[Item] = ()) -> ChatRequest:
    """The chat request that `fields` mean, behind the items of the conversation so far. Raises RequestError."""
    make = partial(fields.as_chat, past) if isinstance(fields, ResponsesRequest) else fields.as_chat
    return make() if len(past) + fields.num_items <= MANY_ITEMS else await service.text.apart(make)


async def plan_translated(
    service: Service, fields: MessagesRequest | ResponsesRequest, origin: Origin, past: Sequence[Item] = ()
) -> AnswerPlan:
    """Render and tokenise the conversation. Raises RequestError, with the names that the other API has for fields."""
    chat = await chat_of(service, fields, past)
    with named_as(fields.names):
        return await plan_chat(service, chat, origin, prefix=fields.id_prefix)
