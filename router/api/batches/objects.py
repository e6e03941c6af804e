"""JSON objects of files and batches in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence

from router.api.batches.fields import WINDOW
from router.generation import Object
from router.stored import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    BatchProblem,
    BatchUsage,
    StoredBatch,
    StoredFile,
)

STAMPED = (IN_PROGRESS, FINALIZING, COMPLETED, FAILED, EXPIRED, CANCELLING, CANCELLED)


def file_object(file: StoredFile) -> Object:
    """Return the object of a complete file."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at),
        "expires_at": int(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: StoredBatch) -> Object:
    """Return the object of a batch."""
    times = {f"{status}_at": int(batch.times[status]) if status in batch.times else None for status in STAMPED}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": [_problem(one) for one in batch.problems]} if batch.problems else None,
        "input_file_id": batch.input_file,
        "completion_window": WINDOW,
        "status": batch.status,
        "output_file_id": batch.output_file if batch.has_output else None,
        "error_file_id": batch.error_file if batch.has_errors else None,
        "created_at": int(batch.created_at),
        "expires_at": int(batch.expires_at),
        **times,
        "request_counts": {
            "total": batch.num_total,
            "completed": batch.num_completed,
            "failed": batch.num_failed,
        },
        "usage": _usage(batch.usage),
        "metadata": batch.metadata,
    }


def page_object(objects: Sequence[Object], limit: int) -> Object:
    """Return a page of a list. `objects` has `limit` + 1 items if there are more pages."""
    page = objects[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(objects) > limit,
    }


def _problem(problem: BatchProblem) -> Object:
    return {"code": problem.code, "message": problem.message, "param": problem.param, "line": problem.line}


def _usage(usage: BatchUsage) -> Object:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }
