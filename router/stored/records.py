"""What the stores keep: responses, files and batches. Needs no SQLite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import orjson

IN_MEMORY: Final = ":memory:"
"""The path of a store without a file."""

QUEUED: Final = "queued"
IN_PROGRESS: Final = "in_progress"
RUNNING: Final = frozenset((QUEUED, IN_PROGRESS))
ROW_BYTES = 512
"""What an entry takes beside its JSON: names, times, indexes."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response of the key `owner`, as JSON: its own `input` items, its `output` items, and the rest as `head`.

    `previous` is the response that its conversation goes on from.
    """

    id: str
    owner: str
    status: str
    input: bytes
    head: bytes
    output: bytes = b"[]"
    previous: str | None = None
    background: bool = False

    @property
    def num_bytes(self) -> int:
        return ROW_BYTES + len(self.input) + len(self.head) + len(self.output)


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """The `input` and `output` items of one response of a conversation, as JSON lists."""

    id: str
    status: str
    input: bytes
    output: bytes


@dataclass(frozen=True, slots=True)
class StoreSize:
    num_entries: int = 0
    num_bytes: int = 0


BATCH_INPUT: Final = "batch"
BATCH_OUTPUT: Final = "batch_output"

WRITING: Final = "writing"
READY: Final = "ready"
DELETED: Final = "deleted"
"""States of a file. Clients see it when it is ready."""

VALIDATING: Final = "validating"
FINALIZING: Final = "finalizing"
CANCELLING: Final = "cancelling"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
EXPIRED: Final = "expired"
CANCELLED: Final = "cancelled"
UNFINISHED: Final = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the key `owner`. Times are seconds since the epoch."""

    id: str
    owner: str
    purpose: str
    filename: str
    created_at: float
    expires_at: float
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BatchProblem:
    """Why a batch failed: a fault of a line of its input, or of all of it."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class BatchUsage:
    """Tokens of answers."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch of the key `owner`; `times` says when it came into a state, `expires_at` when it must have ended.

    Its results keep their files for `result_s` seconds. The ids of these files are those that they have or will have:
    `has_output` and `has_errors` say whether they are there for clients.
    """

    id: str
    owner: str
    status: str
    endpoint: str
    input_file: str
    output_file: str
    error_file: str
    created_at: float
    expires_at: float
    result_s: float
    metadata: Mapping[str, str] | None = None
    model: str | None = None
    times: Mapping[str, float] = field(default_factory=dict)
    problems: Sequence[BatchProblem] = ()
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    has_output: bool = False
    has_errors: bool = False
    usage: BatchUsage = BatchUsage()

    @property
    def has_ended(self) -> bool:
        return self.status not in UNFINISHED

    @property
    def details(self) -> bytes:
        """Fields that are stored as JSON, because nothing is looked up by them."""
        return orjson.dumps(
            {"metadata": self.metadata, "model": self.model, "times": self.times, "problems": self.problems}
        )


@dataclass(frozen=True, slots=True)
class LineResult:
    """How line `number` of a batch's input ended, as a line of the output or of the errors."""

    number: int
    line: bytes
    is_good: bool
    usage: BatchUsage = BatchUsage()


@dataclass(frozen=True, slots=True)
class BatchNews:
    """What a look found: batches whose lease ran out, which are this router's now, and what happened to its own."""

    claimed: Sequence[StoredBatch] = ()
    cancelled: Sequence[str] = ()
    lost: Sequence[str] = ()
