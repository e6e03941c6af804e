"""Request body of OpenAI's Batches API."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from router.api.batches.batch_format import PATHS
from router.request import EMBEDDINGS_PATH, GENERATING, at_most
from router.stored import BATCH_INPUT

ENDPOINTS: Final = tuple(path for path in (*PATHS, EMBEDDINGS_PATH) if path in GENERATING)
"""Endpoints that batches may use: those that this router has and that answer without a stream."""
PURPOSES: Final = (BATCH_INPUT,)
"""Allowed purposes of uploaded files."""
MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
"""OpenAI's limits on metadata."""
MAX_FILE_ID_CHARS = 200
LEAST_RESULT_S, MOST_RESULT_S = 3600, 30 * 86_400
"""OpenAI's limits on the retention of results: one hour to 30 days."""
WINDOW: Final = "24h"
WINDOW_S = 86_400.0
"""The only completion window in OpenAI's API: 24 hours."""


class ResultExpiry(BaseModel):
    """Retention of the result files, counted from their creation."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_RESULT_S, le=MOST_RESULT_S)


class NewBatch(BaseModel):
    """Body of `POST /v1/batches`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    input_file_id: Annotated[str, Field(max_length=MAX_FILE_ID_CHARS)] = Field(
        description="Id of an uploaded JSON Lines file with one request per line."
    )
    endpoint: str = Field(description=f"Endpoint of all requests in the batch. One of {', '.join(ENDPOINTS)}.")
    completion_window: Literal["24h"] = Field(
        description="Time within which the batch is processed. Unprocessed requests then expire."
    )
    metadata: Annotated[dict[str, str], at_most(MAX_PAIRS)] | None = None
    output_expires_after: ResultExpiry | None = None

    @field_validator("endpoint")
    @classmethod
    def _is_served(cls, endpoint: str) -> str:
        if endpoint not in ENDPOINTS:
            raise ValueError(f"must be one of {', '.join(ENDPOINTS)}")
        return endpoint

    @field_validator("metadata")
    @classmethod
    def _is_short(cls, metadata: dict[str, str] | None) -> dict[str, str] | None:
        for key, value in (metadata or {}).items():
            if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
                raise ValueError(
                    f"keys may have up to {MAX_KEY_CHARS} characters, values up to {MAX_VALUE_CHARS} characters"
                )
        return metadata
