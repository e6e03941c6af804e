"""Location and creation of the stores of responses and files, according to the settings."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from common.config import AUTO, MEMORY, OFF, RouterConfig
from common.errors import ConfigError
from router.stored.files import FileStore
from router.stored.records import IN_MEMORY
from router.stored.responses import ResponseStore

log = logging.getLogger(__name__)

DEFAULT_FILE_MIB, DEFAULT_MEMORY_MIB = 1024, 128
"""Default size of the response store, in a file and in memory."""
FILES_DEFAULT_FILE_MIB, FILES_DEFAULT_MEMORY_MIB = 4096, 128
"""Default size of the file store, in a file and in memory."""
MAX_RESPONSES, MAX_FILES = 100_000, 10_000
"""Maximum number of entries of each store. The second also limits finished batches."""


def store_of(config: RouterConfig, on_failure: Callable[[str], None], memory: str = IN_MEMORY) -> ResponseStore:
    """Open the configured response store, which must not be `off`. Raises ConfigError for an unusable file.

    `memory` is the path to use instead of memory. The processes of one router use a temporary file, because they share
    no memory.
    """
    chosen = config.response_store
    if chosen == MEMORY:
        return _open(config, memory, on_failure, DEFAULT_MEMORY_MIB)
    if chosen != AUTO:
        return _checked(config, chosen, on_failure)
    path = default_path()
    if path is None:
        log.warning("response store: no writable folder; keeping responses in memory only")
        return _open(config, memory, on_failure, DEFAULT_MEMORY_MIB)
    try:
        return _open(config, str(path), on_failure)
    except (sqlite3.OperationalError, OSError) as error:
        log.warning(
            "response store: cannot open the file (%s); keeping responses in memory only",
            error,
            extra={"path": str(path)},
        )
        return _open(config, memory, on_failure, DEFAULT_MEMORY_MIB)
    except sqlite3.DatabaseError as error:
        raise _refusal(str(path), error) from error


def file_store_of(
    config: RouterConfig, responses: ResponseStore, on_failure: Callable[[str], None], memory: str = IN_MEMORY
) -> FileStore:
    """Open the file store next to the store `responses`. Raises ConfigError for an unusable file.

    `memory`: as for `store_of`.
    """
    path = IN_MEMORY if responses.path == IN_MEMORY else files_path(responses.path)
    default = FILES_DEFAULT_MEMORY_MIB if responses.path == memory else FILES_DEFAULT_FILE_MIB
    try:
        return FileStore(
            path,
            on_failure,
            max_bytes=2**20 * (config.file_store_mib or default),
            max_entries=MAX_FILES,
            max_age_s=config.file_store_hours * 3600,
        )
    except (sqlite3.Error, OSError) as error:
        raise _refusal(path, error) from error


def check_stores(config: RouterConfig) -> None:
    """Open and close the files of the configured stores. Raises ConfigError for an unusable file."""
    if config.response_store in (MEMORY, OFF):
        return
    responses = store_of(config, _ignore)
    try:
        file_store_of(config, responses, _ignore).close()
    finally:
        responses.close()


def _ignore(reason: str) -> None:
    """The router, which opens the files again, counts failures."""


def files_path(path: str) -> str:
    """Return the path of the file store: responses.sqlite3 becomes responses-files.sqlite3."""
    place = Path(path)
    return str(place.with_name(f"{place.stem}-files{place.suffix}"))


def default_path() -> Path | None:
    """Return `responses.sqlite3` in the user's state folder, which is created, or None if it is not writable."""
    chosen = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = (Path(chosen) if chosen.startswith("/") else Path.home() / ".local" / "state") / "diptych"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None
    return folder / "responses.sqlite3" if os.access(folder, os.W_OK) else None


def _checked(config: RouterConfig, path: str, on_failure: Callable[[str], None]) -> ResponseStore:
    try:
        return _open(config, path, on_failure)
    except (sqlite3.Error, OSError) as error:
        raise _refusal(path, error) from error


def _refusal(path: str, error: Exception) -> ConfigError:
    return ConfigError(
        "response_store", path, f"a writable SQLite file ({error}); move this file away, or use another path"
    )


def _open(
    config: RouterConfig, path: str, on_failure: Callable[[str], None], default_mib: int = DEFAULT_FILE_MIB
) -> ResponseStore:
    return ResponseStore(
        path,
        on_failure,
        max_bytes=2**20 * (config.response_store_mib or default_mib),
        max_entries=MAX_RESPONSES,
        max_age_s=config.response_store_hours * 3600,
    )
