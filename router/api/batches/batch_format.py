"""The files of a batch, a JSON object a line, in the form of OpenAI's batches: requests in, results out."""

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
"""Of a custom_id."""
MAX_SHOWN_CHARS = 100
"""Of a faulty line's value in an error."""
AGAIN = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
"""Statuses of answers that may be better another time."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
"""Before the second try of a request; each further wait is twice as long, up to the second number."""
MAX_FAILURES = 5
"""How often a request may be answered with 500 before this counts as its answer: it may be what fails."""


class BadBatch(Exception):
    """A file that cannot be used; the message says where and why."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line: `body` goes to `path`, and `custom_id` names its result."""

    custom_id: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """How a request ended: an answer with its status, or with status 0 the reason why none came."""

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
        """As a line of the output; `name` is its id, a new one without it."""
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
    """The id of a request of a batch."""
    return f"batch_req_{uuid.uuid4().hex}"


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """The requests in their order; empty lines do not count. Raises BadBatch."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _request(line, f"{path}, line {number}")


def check_requests(path: Path) -> int:
    """The number of requests, all of which are in order, with names of their own. Raises BadBatch."""
    known: set[str] = set()
    for request in read_requests(path):
        if request.custom_id in known:
            raise BadBatch(f"{path}: two requests have the custom_id {request.custom_id[:MAX_SHOWN_CHARS]!r}")
        known.add(request.custom_id)
    return len(known)


def take_up(path: Path) -> tuple[set[str], bool]:
    """Make the output of an earlier run ready for more lines.

    Returns the names of the requests that it answers, and whether a new file has taken its place: without a line that
    the run could not finish, and without those that say that no answer came, so that these requests are sent again.
    Raises BadBatch for a file that is no output of a batch.
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
    """Copy the results that stay: the names of their requests, and whether some do not stay."""
    answered: set[str] = set()
    changed = False
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return answered, True
        result = _object(line, f"{path}, line {number}")
        name = result.get("custom_id")
        if not isinstance(name, str) or "response" not in result:
            raise BadBatch(f"{path}, line {number}: is no result of a batch; name another output file")
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
        raise BadBatch(f"{where}: custom_id must be a text of 1 to {MAX_ID_CHARS} characters")
    if method not in (None, "POST"):
        raise BadBatch(f"{where}: method is {str(method)[:MAX_SHOWN_CHARS]!r}, only POST is possible")
    if path not in PATHS:
        raise BadBatch(f"{where}: url is {str(path)[:MAX_SHOWN_CHARS]!r}, possible are {', '.join(PATHS)}")
    if not isinstance(body, dict):
        raise BadBatch(f"{where}: body must be a JSON object")
    if body.get("stream") or body.get("background"):
        raise BadBatch(f"{where}: a request of a batch has its answer whole, without stream and background")
    return BatchRequest(name, path, body)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadBatch(f"{where}: is not valid JSON ({error})") from error
    if not isinstance(fields, dict):
        raise BadBatch(f"{where}: must be a JSON object")
    return fields


def _opened(path: Path) -> BinaryIO:
    try:
        return cast(BinaryIO, path.open("rb"))
    except OSError as error:
        raise BadBatch(f"{path}: cannot be read ({error.strerror})") from error
