"""Where the stores of responses and of files lie, by the settings."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from common.config import AUTO, MEMORY, RouterConfig
from common.errors import ConfigError
from router.stored.files import FileStore
from router.stored.records import IN_MEMORY
from router.stored.responses import ResponseStore

log = logging.getLogger(__name__)

DEFAULT_FILE_MIB, DEFAULT_MEMORY_MIB = 1024, 128
"""Of responses, in a file and in memory."""
FILES_DEFAULT_FILE_MIB, FILES_DEFAULT_MEMORY_MIB = 4096, 128
"""Of files, which are larger."""
MAX_RESPONSES, MAX_FILES = 100_000, 10_000
"""Entries of each store; files include batches that ended."""


def store_of(config: RouterConfig, on_failure: Callable[[str], None], memory: str = IN_MEMORY) -> ResponseStore:
    """The store of responses that the settings ask for, which is not `off`.

    `memory`: what stands for memory among processes of one router, which share no memory. Raises ConfigError for a file
    that cannot be used.
    """
    chosen = config.response_store
    if chosen == MEMORY:
        return _open(config, memory, on_failure, DEFAULT_MEMORY_MIB)
    if chosen != AUTO:
        return _checked(config, chosen, on_failure)
    path = default_path()
    if path is None:
        log.warning("responses are kept in memory only: there is no folder to write to")
        return _open(config, memory, on_failure, DEFAULT_MEMORY_MIB)
    try:
        return _open(config, str(path), on_failure)
    except (sqlite3.OperationalError, OSError) as error:
        log.warning("responses are kept in memory only: %s", error, extra={"path": str(path)})
        return _open(config, memory, on_failure, DEFAULT_MEMORY_MIB)
    except sqlite3.DatabaseError as error:
        raise _refusal(str(path), error) from error


def file_store_of(
    config: RouterConfig, responses: ResponseStore, on_failure: Callable[[str], None], memory: str = IN_MEMORY
) -> FileStore:
    """The store of files next to that of `responses`. Raises ConfigError for an unusable file.

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


def files_path(path: str) -> str:
    """responses.sqlite3 -> responses-files.sqlite3"""
    place = Path(path)
    return str(place.with_name(f"{place.stem}-files{place.suffix}"))


def default_path() -> Path | None:
    """`responses.sqlite3` in the user's folder for state, which is made; None where that cannot be written."""
    chosen = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = (Path(chosen) if chosen.startswith("/") else Path.home() / ".local" / "state") / "diptych"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the latter: there is no home
        return None
    return folder / "responses.sqlite3" if os.access(folder, os.W_OK) else None


def _checked(config: RouterConfig, path: str, on_failure: Callable[[str], None]) -> ResponseStore:
    try:
        return _open(config, path, on_failure)
    except (sqlite3.Error, OSError) as error:
        raise _refusal(path, error) from error


def _refusal(path: str, error: Exception) -> ConfigError:
    return ConfigError(
        "response_store", path, f"a SQLite file that can be written ({error}); move it away, or name another"
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
