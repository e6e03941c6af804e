"""Content blocks of Anthropic's Messages API, and the texts that documents and search results become in a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from common.errors import InvalidRequest
from router.request import Fields, Only, Refused, as_content, text_content
from router.request.errors import unsupported
from router.request.fields import MAX_MESSAGES, ContentPart

TEXT = frozenset(("text",))
SOURCES = frozenset(("text", "content"))


class DocumentSource(Fields):
    """Text of a document. Its type determines its members."""

    type: Annotated[str, Field(max_length=64)] | None = Field(None, description='"text" or "content".')
    data: str | None = Field(None, description='Only with type "text".')
    media_type: Annotated[str, Field(max_length=256)] | None = None
    content: str | Annotated[list[Block], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = Field(
        None, description='Only with type "content".'
    )


class Block(Fields):
    """One part of a message. Its type determines its members."""

    type: Annotated[str, Field(max_length=64)]
    text: str | None = Field(None, description='Only with type "text".')
    thinking: str | None = Field(None, description='Only with type "thinking".')
    id: Annotated[str, Field(max_length=256)] | None = Field(None, description='Only with type "tool_use".')
    name: Annotated[str, Field(max_length=64)] | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Annotated[str, Field(max_length=256)] | None = Field(None, description='Only with type "tool_result".')
    content: str | Annotated[list[Block], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    is_error: bool | None = None
    source: str | DocumentSource | None = Field(None, description='Only with types "document" and "search_result".')
    title: str | None = Field(None, description='Only with types "document" and "search_result".')
    context: str | None = Field(None, description='Only with type "document".')
    citations: Any = Field(None, description="Answers contain no citations, so they must not be enabled.")
    tool_name: Annotated[str, Field(max_length=64)] | None = Field(None, description='Only with type "tool_reference".')
    caller: Annotated[Any, Only(({"type": "direct"},))] = None
    toolset_name: Refused = None


Content = str | Annotated[list[Block], Field(max_length=MAX_MESSAGES, fail_fast=True)]


def content_of(content: Content | None, where: str, *, has_documents: bool = False) -> str | list[ContentPart]:
    """Return content as that of a chat message, with the texts of documents if it may have them."""
    if isinstance(content, str):
        return content
    if not has_documents:
        return as_content(text_content(content or (), TEXT, where))
    return as_content([part for i, block in enumerate(content or ()) for part in parts_of(block, where, i)])


def parts_of(block: Block, where: str, index: int) -> list[ContentPart]:
    """Return the text of block `index` of the content `where`. Raises InvalidRequest if it is not text."""
    write = _WRITERS.get(block.type)
    if write is None:
        return text_content([block], TEXT, where, first=index)
    return [ContentPart(type="text", text=write(block, f"{where}[{index}]"), refusal=None)]


def references(content: Content | None, where: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each tool that the result of a call refers to, with its path in the request."""
    for i, block in enumerate(content if isinstance(content, list) else ()):
        if block.type == "tool_reference" and block.tool_name is not None:
            yield block.tool_name, f"{where}[{i}].tool_name"
        elif block.type == "tool_result":
            yield from references(block.content, f"{where}[{i}].content")


def _document(block: Block, where: str) -> str:
    source = block.source
    if not isinstance(source, DocumentSource):
        raise _missing(f"{where}.source")
    if source.type is None:
        raise _missing(f"{where}.source.type")
    if source.type not in SOURCES:
        raise InvalidRequest(
            f"{where}.source.type: {source.type!r} is not supported, because this server does not read PDF files or "
            "fetch documents: send the text of the document with the source type 'text'",
            param="messages",
        )
    place = f"{where}.source.{'data' if source.type == 'text' else 'content'}"
    text = source.data if source.type == "text" else _joined(source.content, place)
    if text is None:
        raise _missing(place)
    return _tagged(block, where, {"title": block.title, "context": block.context, "content": text})


def _search_result(block: Block, where: str) -> str:
    if not isinstance(block.source, str):
        raise _missing(f"{where}.source")
    if (text := _joined(block.content, f"{where}.content")) is None:
        raise _missing(f"{where}.content")
    return _tagged(block, where, {"title": block.title, "source": block.source, "content": text})


def _tool_reference(block: Block, where: str) -> str:
    if block.tool_name is None:
        raise _missing(f"{where}.tool_name")
    return f"<tool_reference>{block.tool_name}</tool_reference>"


_WRITERS = {"document": _document, "search_result": _search_result, "tool_reference": _tool_reference}


def _joined(content: str | Sequence[Block] | None, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    return "\n".join([part.text or "" for part in text_content(content, TEXT, where)])


def _tagged(block: Block, where: str, members: dict[str, str | None]) -> str:
    """Write a block as one element for each member, in the element of its type."""
    if isinstance(block.citations, dict) and block.citations.get("enabled"):
        raise unsupported(f"{where}.citations.enabled", "true")
    lines = [f"<{name}>{text}</{name}>" for name, text in members.items() if name != "content" and text]
    body = f"<content>\n{members['content']}\n</content>"
    return "\n".join([f"<{block.type}>", *lines, body, f"</{block.type}>"])


def _missing(where: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: is required", param="messages")
