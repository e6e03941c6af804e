"""What outlives its request, in SQLite: responses, files and batches. Loaded only where one is kept."""

from router.stored.batches import BatchNews
from router.stored.database import IN_MEMORY
from router.stored.errors import ConversationGone, ConversationTooLong, FileInUse, StoreFailed, StoreFull, asked
from router.stored.file_record import (
    BATCH_INPUT,
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FAILED,
    FINALIZING,
    VALIDATING,
    BatchProblem,
    BatchUsage,
    LineResult,
    StoredBatch,
    StoredFile,
)
from router.stored.files import FileStore
from router.stored.location import file_store_of, store_of
from router.stored.record import IN_PROGRESS, QUEUED, RUNNING, StoredResponse, StoredTurn, StoreSize
from router.stored.responses import ResponseStore

__all__ = [
    "BATCH_INPUT",
    "BatchNews",
    "BatchProblem",
    "BatchUsage",
    "CANCELLED",
    "CANCELLING",
    "COMPLETED",
    "ConversationGone",
    "ConversationTooLong",
    "EXPIRED",
    "FAILED",
    "FINALIZING",
    "FileInUse",
    "FileStore",
    "IN_MEMORY",
    "IN_PROGRESS",
    "LineResult",
    "QUEUED",
    "RUNNING",
    "ResponseStore",
    "StoreFailed",
    "StoreFull",
    "StoreSize",
    "StoredBatch",
    "StoredFile",
    "StoredResponse",
    "StoredTurn",
    "VALIDATING",
    "asked",
    "file_store_of",
    "store_of",
]
