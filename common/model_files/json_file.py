"""The JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import ModelError


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """The object in a file; an empty one if there is no file and none is `required`. Raises ModelError."""
    if not path.exists():
        if required:
            raise ModelError(f"{path.parent} is not a model folder: it has no {path.name}")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}): fetch it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} should hold a JSON object, not {type(value).__name__}")
    return value
