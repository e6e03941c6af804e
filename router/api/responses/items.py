"""Conversion of conversation items between the Responses API, the store and later requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import TypeAdapter

from common.errors import InvalidRequest
from router.api.responses.fields import Content, Item, ResponsesRequest
from router.generation import Object
from router.stored import StoredResponse, StoredTurn

SANE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
ITEMS = TypeAdapter(list[Item])


def listed(fields: ResponsesRequest, response_id: str) -> bytes:
    """Serialise the request's own input items with ids. Items without one get a number and the response's id."""
    base = response_id.rpartition("_")[2]
    return orjson.dumps([_listed(item, f"{base}_i{i}") for i, item in enumerate(fields.items)])


def _listed(item: Item, name: str) -> Object:
    kind = item.type or "message"
    given = isinstance(item.id, str) and SANE_ID.fullmatch(item.id)
    shown: Object = {"id": item.id if given else f"{PREFIXES[kind]}_{name}", "type": kind, "status": "completed"}
    match kind:
        case "message":
            shown |= {"role": item.role, "content": _parts(item.content or "", item.role)}
        case "function_call":
            shown |= {"call_id": item.call_id, "name": item.name, "arguments": item.arguments or "{}"}
            shown |= {"namespace": item.namespace} if item.namespace else {}
        case "function_call_output":
            output = item.output or ""
            shown |= {"call_id": item.call_id, "output": output if isinstance(output, str) else _parts(output, "user")}
        case "reasoning":
            parts = item.content if isinstance(item.content, list) else []
            shown |= {"summary": item.summary if isinstance(item.summary, list) else []}
            shown |= {"content": [{"type": "reasoning_text", "text": part.text or ""} for part in parts]}
    return shown


def _parts(content: Content, role: str | None) -> list[Object]:
    texts = [content] if isinstance(content, str) else [part.text or "" for part in content]
    if role != "assistant":
        return [{"type": "input_text", "text": text} for text in texts]
    return [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts]


def record_of(response: Object, fields: ResponsesRequest, given: bytes, owner: str) -> StoredResponse:
    """Return the store's record of a response. `given` are the request's items as returned by `listed`.

    If there are log-probabilities, only `head` has the output with them, because they would use up the size limit of
    conversations.
    """
    output = orjson.dumps(response["output"])
    head = response if fields.wants_logprobs else {name: response[name] for name in response if name != "output"}
    return StoredResponse(
        id=str(response["id"]),
        owner=owner,
        status=str(response["status"]),
        input=given,
        head=orjson.dumps(head),
        output=orjson.dumps(_without_logprobs(output)) if fields.wants_logprobs else output,
        previous=fields.previous_response_id or None,
        background=bool(fields.background),
    )


def _without_logprobs(output: bytes) -> list[Object]:
    items: list[dict[str, Any]] = orjson.loads(output)
    for item in items:
        for part in item.get("content") or ():
            part.pop("logprobs", None)
    return [*items]


def shown(record: StoredResponse, **changed: object) -> Object:
    """Return a stored response for `orjson`. `changed` replaces its members."""
    head: Object = orjson.loads(record.head)
    return {"output": orjson.Fragment(record.output)} | head | changed


def conversation_items(turns: Sequence[StoredTurn]) -> list[Item]:
    """Return the items of a conversation so far, for a request that continues it."""
    return [item for turn in turns for part in (turn.input, turn.output) for item in ITEMS.validate_json(part)]


def input_items(turns: Sequence[StoredTurn]) -> list[Object]:
    """Return all input items of the last response of a conversation, in order and with unique ids."""
    items: list[Object] = []
    for turn in turns:
        items += orjson.loads(turn.input)
        if turn is not turns[-1]:
            items += orjson.loads(turn.output)
    seen: set[object] = set()
    for i, item in enumerate(items):
        while item["id"] in seen:  # clients may send an item twice
            item["id"] = f"{item['id']}_{i}"
        seen.add(item["id"])
    return items


def page_of(items: Sequence[Object], *, order: str, limit: int, after: str | None) -> Object:
    """Return a page of a list in OpenAI's format. Raises InvalidRequest if `after` is not an item's id."""
    ordered = [*items] if order == "asc" else [*reversed(items)]
    start = 0
    if after is not None:
        places = [i for i, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise InvalidRequest(f"after: the item {after[:80]!r} is not in this list", param="after")
        start = places[0] + 1
    page = ordered[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(ordered),
    }
