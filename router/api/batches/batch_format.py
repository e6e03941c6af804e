"""Input and output files of batches in OpenAI's JSON Lines format."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from router.request import CHAT_PATH, COMPLETION_PATH, EMBEDDINGS_PATH, MESSAGES_PATH, RESPONSES_PATH

PATHS = (CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH, MESSAGES_PATH, EMBEDDINGS_PATH)
MAX_ID_CHARS = 512
"""Maximum length of a custom_id."""
MAX_SHOWN_CHARS = 100
"""Maximum length, in characters, of an invalid value quoted in an error."""
AGAIN = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
"""Statuses that are worth a retry."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
"""Initial and maximum delay between attempts, in seconds. The delay doubles each time."""
MAX_FAILURES = 5
"""Number of 500 answers after which the last one is final, because the request itself may be the cause."""


class BadBatch(Exception):
    """An invalid batch file. The message gives the line and the reason."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input: `body` is sent to `path`, and `custom_id` identifies its result."""

    custom_id: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of a request: an answer with its status, or status 0 with the reason why there is none."""

    custom_id: str
    status: int
    request_id: str = ""
    body: Any = None
    problem: str = ""
    code: str = "no_answer"

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300

    def line(self, name: str = "") -> bytes:
        """Return the result as a line of the output. `name` is its id; without it a new one is generated."""
        answer = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        error = {"code": self.code, "message": self.problem}
        return orjson.dumps(
            {
                "id": name or new_request_id(),
                "custom_id": self.custom_id,
                "response": answer if self.status else None,
                "error": None if self.status else error,
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )


def new_request_id() -> str:
    """Generate the id of a batch request."""
    return f"batch_req_{uuid.uuid4().hex}"


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """Yield the requests in order, skipping empty lines. Raises BadBatch."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _request(line, f"{path}, line {number}")


def check_requests(path: Path) -> int:
    """Validate all requests, including the uniqueness of their ids, and return their number. Raises BadBatch."""
    known: set[str] = set()
    for request in read_requests(path):
        if request.custom_id in known:
            raise BadBatch(f"{path}: duplicate custom_id {request.custom_id[:MAX_SHOWN_CHARS]!r}")
        known.add(request.custom_id)
    return len(known)


def take_up(path: Path) -> tuple[set[str], bool]:
    """Prepare the output file of an earlier run for appending.

    Returns the custom ids of completed requests, and whether the file was replaced. The new file omits an incomplete
    last line and results without an answer, so that these requests are sent again. Raises BadBatch if the file is not
    the output of a batch.
    """
    kept = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with _opened(path) as file, kept.open("wb") as copy:
            answered, changed = _copied(file, copy, path)
            copy.flush()
            os.fsync(copy.fileno())
        if changed:
            kept.replace(path)
        return answered, changed
    finally:
        kept.unlink(missing_ok=True)


def _copied(file: BinaryIO, copy: BinaryIO, path: Path) -> tuple[set[str], bool]:
    """Copy the results to keep. Returns the custom ids of their requests, and whether any result was omitted."""
    answered: set[str] = set()
    changed = False
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return answered, True
        result = _object(line, f"{path}, line {number}")
        name = result.get("custom_id")
        if not isinstance(name, str) or "response" not in result:
            raise BadBatch(f"{path}, line {number}: not a batch result; choose another output file")
        if result["response"] is None:
            changed = True
        else:
            answered.add(name)
            copy.write(line)
    return answered, changed


def _request(line: bytes, where: str) -> BatchRequest:
    fields = _object(line, where)
    name, method, path, body = (fields.get(key) for key in ("custom_id", "method", "url", "body"))
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_CHARS:
        raise BadBatch(f"{where}: custom_id must be a string of 1 to {MAX_ID_CHARS} characters")
    if method not in (None, "POST"):
        raise BadBatch(f"{where}: invalid method {str(method)[:MAX_SHOWN_CHARS]!r}: must be POST")
    if path not in PATHS:
        raise BadBatch(f"{where}: invalid url {str(path)[:MAX_SHOWN_CHARS]!r}: must be one of {', '.join(PATHS)}")
    if not isinstance(body, dict):
        raise BadBatch(f"{where}: body must be a JSON object")
    if body.get("stream") or body.get("background"):
        raise BadBatch(f"{where}: stream and background are not supported in batches")
    return BatchRequest(name, path, body)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadBatch(f"{where}: invalid JSON ({error})") from error
    if not isinstance(fields, dict):
        raise BadBatch(f"{where}: must be a JSON object")
    return fields


def _opened(path: Path) -> BinaryIO:
    try:
        return cast(BinaryIO, path.open("rb"))
    except OSError as error:
        raise BadBatch(f"{path}: cannot be read ({error.strerror})") from error
