"""Errors of the Files and Batches APIs."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from common.errors import InvalidRequest, RequestError, quoted
from router.stored import FileInUse, StoreFull, asked

T = TypeVar("T")

OFF = "This router does not store files (--response-store off)."
ELSEWHERE = "It may have expired, been deleted, or belong to another API key or router."


class NoFiles(RequestError):
    """This router has no file store."""

    status = 404
    type = "invalid_request_error"
    code = "files_not_kept"


class UnknownFile(RequestError):
    """The file does not exist or belongs to another key."""

    status = 404
    type = "invalid_request_error"
    code = "file_not_found"

    def __init__(self, file_id: str, *, param: str | None = None) -> None:
        super().__init__(f"The file {quoted(file_id)} does not exist. {ELSEWHERE}", param=param)


class UnknownBatch(RequestError):
    """The batch does not exist or belongs to another key."""

    status = 404
    type = "invalid_request_error"
    code = "batch_not_found"

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"The batch {quoted(batch_id)} does not exist. {ELSEWHERE}")


class FilesFull(RequestError):
    """The file store has no capacity for another file."""

    status = 413
    type = "invalid_request_error"
    code = "file_storage_full"


async def answered(question: Awaitable[T]) -> T:
    """Await a result of the file store. Raises FilesFull, InvalidRequest, or Unavailable if the store fails."""
    try:
        return await asked(question)
    except StoreFull as full:
        raise FilesFull(str(full)) from full
    except FileInUse as used:
        raise InvalidRequest(str(used), code="file_in_use") from used
