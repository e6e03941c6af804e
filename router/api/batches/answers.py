"""Response bodies of the Files and Batches APIs, for the OpenAPI schema only."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class FileBody(BaseModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileListBody(BaseModel):
    object: Literal["list"]
    data: list[FileBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchErrorBody(BaseModel):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrorsBody(BaseModel):
    object: Literal["list"]
    data: list[BatchErrorBody]


class RequestCountsBody(BaseModel):
    total: int
    completed: int
    failed: int


class InputTokensBody(BaseModel):
    cached_tokens: int


class OutputTokensBody(BaseModel):
    reasoning_tokens: int


class BatchUsageBody(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensBody
    output_tokens: int
    output_tokens_details: OutputTokensBody
    total_tokens: int


class BatchBody(BaseModel):
    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrorsBody | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCountsBody
    usage: BatchUsageBody
    metadata: dict[str, str] | None


class BatchListBody(BaseModel):
    object: Literal["list"]
    data: list[BatchBody]
    first_id: str | None
    last_id: str | None
    has_more: bool
