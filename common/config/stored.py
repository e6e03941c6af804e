"""Settings of the store of responses, and of answers in the background."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.field import AUTO, Config, setting

MEMORY, OFF = "memory", "off"


@dataclass(frozen=True)
class StoreSettings(Config):
    """Where responses of the Responses API are kept, how many, and how long."""

    response_store: str = setting(
        AUTO,
        "SQLite file in which responses of /v1/responses are kept for previous_response_id, background and GET. auto: "
        "diptych/responses.sqlite3 under $XDG_STATE_HOME (~/.local/state), or in memory where that cannot be written; "
        "memory: until the router ends; off: nothing is kept",
        group="HTTP",
        pattern=r".+",
        expects="a file, auto, memory or off",
        metavar="FILE",
    )
    response_store_mib: int = setting(
        0,
        "MiB of stored responses, inputs included; above it, the key that has most loses its least recently used ones. "
        "0: 1024 in a file, 128 in memory",
        group="HTTP",
        ge=0,
        le=1_000_000,
    )
    response_store_hours: float = setting(
        720.0,
        "hours after which a stored response is deleted, counted from when it was made or a conversation last went on "
        "from it",
        group="HTTP",
        ge=0.01,
        le=876_000,
    )
    max_background: int = setting(
        64,
        "answers with background: true that are made at once; one key may have half of them; more get 429. Each counts "
        "towards --max-inflight too",
        group="HTTP",
        ge=1,
        le=100_000,
    )
