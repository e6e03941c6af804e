from router.api.batches.batch_format import (
    PATHS,
    BadBatch,
    BatchRequest,
    BatchResult,
    check_requests,
    read_requests,
    take_up,
)
from router.api.batches.fields import NewBatch
from router.api.batches.files import file_routes
from router.api.batches.routes import batch_routes
from router.api.batches.sender import BatchSender, Refused, SendSettings
from router.api.batches.service import BatchService

__all__ = [
    "BadBatch",
    "BatchRequest",
    "BatchResult",
    "BatchSender",
    "BatchService",
    "NewBatch",
    "PATHS",
    "Refused",
    "SendSettings",
    "batch_routes",
    "check_requests",
    "file_routes",
    "read_requests",
    "take_up",
]
