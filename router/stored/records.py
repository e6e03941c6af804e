"""Records of the stores: responses, files and batches. Does not import SQLite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import orjson

IN_MEMORY: Final = ":memory:"
"""Path of a store without a file."""

QUEUED: Final = "queued"
IN_PROGRESS: Final = "in_progress"
RUNNING: Final = frozenset((QUEUED, IN_PROGRESS))
ROW_BYTES = 512
"""Size of an entry in addition to its JSON: names, times and indexes, in bytes."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response of the API key `owner`, as JSON: its `input` items, its `output` items, and everything else (`head`).

    `previous` is the response that it continues.
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
"""States of a file. Clients can access it once it is ready."""

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
    """A file of the API key `owner`. Times are in seconds since the epoch."""

    id: str
    owner: str
    purpose: str
    filename: str
    created_at: float
    expires_at: float
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BatchProblem:
    """Reason why a batch failed: an error in one line of its input, or in the input as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class BatchUsage:
    """Token counts of answers."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch of the API key `owner`. `times` maps each status to the time at which the batch entered it.

    `expires_at` is the deadline of the batch. Result files are kept for `result_s` seconds. Their ids are assigned in
    advance: `has_output` and `has_errors` state whether the files exist for clients.
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
        """Fields that are stored as JSON, because no query uses them."""
        return orjson.dumps(
            {"metadata": self.metadata, "model": self.model, "times": self.times, "problems": self.problems}
        )


@dataclass(frozen=True, slots=True)
class LineResult:
    """Result of line `number` of a batch's input, as a line of the output or error file."""

    number: int
    line: bytes
    is_good: bool
    usage: BatchUsage = BatchUsage()


@dataclass(frozen=True, slots=True)
class BatchChanges:
    """Changes found during maintenance: batches claimed from expired leases, and own batches cancelled or lost."""

    claimed: Sequence[StoredBatch] = ()
    cancelled: Sequence[str] = ()
    lost: Sequence[str] = ()
