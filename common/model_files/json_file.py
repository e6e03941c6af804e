"""Reader of the text files of a model folder, most of which are JSON."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from common.errors import ModelError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_text(path: Path) -> str | None:
    """Return the text of a file without its byte order mark, or None if the file does not exist.

    Raises ModelError if it is unreadable, not UTF-8, or a Git LFS pointer.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelError(f"{path} is not a file: fetch it again")
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        if path.is_symlink():
            raise ModelError(f"{path} is a link to a file that does not exist: fetch it again") from None
        return None
    except NotADirectoryError:
        return None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not valid UTF-8 ({error}): fetch it again") from error
    _refuse_pointer(path, text.encode()[: len(LFS_POINTER)])
    return text


def refuse_pointer(path: Path) -> None:
    """Raise ModelError if the file is a Git LFS pointer or cannot be read."""
    try:
        with path.open("rb") as file:
            _refuse_pointer(path, file.read(len(LFS_POINTER)))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def _refuse_pointer(path: Path, beginning: bytes) -> None:
    if beginning == LFS_POINTER:
        raise ModelError(f"{path} is a Git LFS pointer instead of the file: run `git lfs pull`, or fetch it again")


def parse_json(text: str, path: Path) -> Any:
    """Parse the text of a JSON file. Raises ModelError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}): fetch it again") from error


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Return the object in a file. A missing file is {} unless `required`. Raises ModelError."""
    text = read_text(path)
    if text is None:
        if required:
            raise ModelError(f"{path.parent} is not a model folder: {path.name} is missing")
        return {}
    value = parse_json(text, path)
    if not isinstance(value, dict):
        raise ModelError(f"{path} must contain a JSON object, not {type(value).__name__}")
    return value
