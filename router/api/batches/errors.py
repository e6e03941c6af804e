"""Why a request for a file or a batch is refused."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from common.errors import InvalidRequest, RequestError, quoted
from router.stored import FileInUse, StoreFull, asked

T = TypeVar("T")

OFF = "this router keeps no files (--response-store off)"
ELSEWHERE = "has expired, was deleted, belongs to another API key, or lives on another router"


class NoFiles(RequestError):
    """This router has no store of files."""

    status = 404
    type = "invalid_request_error"
    code = "files_not_kept"


class UnknownFile(RequestError):
    """There is no such file for this key."""

    status = 404
    type = "invalid_request_error"
    code = "file_not_found"

    def __init__(self, file_id: str, *, param: str | None = None) -> None:
        super().__init__(f"there is no file {quoted(file_id)} here: it {ELSEWHERE}", param=param)


class UnknownBatch(RequestError):
    """There is no such batch for this key."""

    status = 404
    type = "invalid_request_error"
    code = "batch_not_found"

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"there is no batch {quoted(batch_id)} here: it {ELSEWHERE}")


class FilesFull(RequestError):
    """There is no room for another file."""

    status = 413
    type = "invalid_request_error"
    code = "file_storage_full"


async def answered(question: Awaitable[T]) -> T:
    """The answer of the store of files. Raises FilesFull, InvalidRequest, or Unavailable when it has none."""
    try:
        return await asked(question)
    except StoreFull as full:
        raise FilesFull(str(full)) from full
    except FileInUse as used:
        raise InvalidRequest(str(used), code="file_in_use") from used
