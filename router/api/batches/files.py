"""OpenAI's Files API, under `/v1/files`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from router.api.batches.answers import DeletedFile, FileBody, FileListBody
from router.api.batches.errors import OFF, NoFiles
from router.api.batches.fields import PURPOSES
from router.api.batches.objects import file_object, page_object
from router.api.openapi import documented
from router.api.query import json_answer, number, order_of, owner_of, parameters
from router.stored import StoredFile
from router.stored import asked as asked_of_store

if TYPE_CHECKING:  # loaded with a store
    from router.api.batches.service import BatchService
    from router.stored import FileStore

file_routes = APIRouter()
"""`/v1/files` and the files under it."""

TAGS: list[str | Enum] = ["files"]
ONE: Final = "/v1/files/{file_id}"
MAX_LISTED = 10_000
"""OpenAI's limit on the number of files in one page."""
DOWNLOAD_BYTES = 1024 * 1024
"""Maximum memory of a download."""

UPLOADED: dict[str, Any] = documented(None, FileBody) | {
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "required": ["file", "purpose"],
                        "properties": {
                            "file": {"type": "string", "format": "binary"},
                            "purpose": {"enum": list(PURPOSES)},
                            "expires_after[anchor]": {"enum": ["created_at"]},
                            "expires_after[seconds]": {"type": "integer"},
                        },
                    }
                }
            },
        }
    }
}
LISTED: dict[str, Any] = documented(None, FileListBody) | {
    "openapi_extra": parameters(
        purpose={"type": "string"},
        limit={"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": MAX_LISTED},
        order={"enum": ["asc", "desc"], "default": "desc"},
        after={"type": "string"},
    )
}

DOWNLOADED: dict[str, Any] = {
    "response_class": StreamingResponse,
    "responses": documented(None, FileBody)["responses"]
    | {200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
}


def batches_of(request: Request) -> BatchService:
    """Return the application's files and batches. Raises NoFiles if there is no store."""
    kept: BatchService | None = request.app.state.batches
    if kept is None:
        raise NoFiles(OFF)
    return kept


@file_routes.post("/v1/files", tags=TAGS, **UPLOADED)
async def upload(request: Request) -> Response:
    """Upload a file. The multipart form must have the parts `file` and `purpose`."""
    return json_answer(file_object(await batches_of(request).upload(request, owner_of(request))))


@file_routes.get("/v1/files", tags=TAGS, **LISTED)
async def list_files(request: Request) -> Response:
    """List the files of the API key, newest first by default."""
    query = request.query_params
    limit = number(query, "limit", default=MAX_LISTED, least=1, most=MAX_LISTED)
    found = await batches_of(request).files(
        owner_of(request),
        purpose=query.get("purpose"),
        descending=order_of(query) == "desc",
        limit=limit + 1,
        after=query.get("after"),
    )
    return json_answer(page_object([file_object(file) for file in found], limit))


@file_routes.get(ONE, tags=TAGS, **documented(None, FileBody))
async def show_file(file_id: str, request: Request) -> Response:
    """Retrieve information about a file."""
    return json_answer(file_object(await batches_of(request).file(file_id, owner_of(request))))


@file_routes.get("/v1/files/{file_id}/content", tags=TAGS, **DOWNLOADED)
async def download(file_id: str, request: Request) -> Response:
    """Download the content of a file."""
    kept = batches_of(request)
    file = await kept.file(file_id, owner_of(request))
    return StreamingResponse(
        _content(kept.store, file),
        media_type="application/octet-stream",
        headers={"content-length": str(file.num_bytes), "x-content-type-options": "nosniff"},
    )


@file_routes.delete(ONE, tags=TAGS, **documented(None, DeletedFile))
async def delete_file(file_id: str, request: Request) -> Response:
    """Delete a file."""
    await batches_of(request).delete_file(file_id, owner_of(request))
    return json_answer({"id": file_id, "object": "file", "deleted": True})


async def _content(store: FileStore, file: StoredFile) -> AsyncIterator[bytes]:
    last = -1
    while pieces := await asked_of_store(store.read(file.id, last, DOWNLOAD_BYTES)):
        last = pieces[-1][0]
        yield b"".join(content for _, content in pieces)
