"""Settings of files and batches: what clients upload, and how much of it is worked on at once."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.field import Config, setting


@dataclass(frozen=True)
class FileSettings(Config):
    """How much of `/v1/files` is kept and how long, and how `/v1/batches` works. `response_store` says where."""

    file_store_mib: int = setting(
        0,
        "MiB of files, uploaded ones and results of batches, beside the store of responses (--response-store); a key "
        "may have half of it. More get 413. 0: 4096 in a file, 128 in memory",
        group="HTTP",
        ge=0,
        le=10_000_000,
    )
    file_store_hours: float = setting(
        720.0, "hours after which a file, or a batch that ended, is deleted", group="HTTP", ge=0.01, le=876_000
    )
    max_file_mib: int = setting(200, "MiB of an uploaded file; larger ones get 413", group="HTTP", ge=1, le=100_000)
    batch_concurrency: int = setting(
        16,
        "requests of batches that are answered at once, of all batches of this router. Each counts towards "
        "--max-inflight too",
        group="HTTP",
        ge=1,
        le=10_000,
    )
