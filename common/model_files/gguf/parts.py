"""Parts of a GGUF model. llama.cpp's tools split large models into `NAME-00001-of-00003.gguf` and so on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from common.errors import ModelError

PART: Final = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf\Z")


def model_ggufs(paths: Iterable[Path]) -> list[Path]:
    """Return the GGUF files of models among `paths`, without multimodal projectors (`mmproj`)."""
    return [path for path in paths if path.suffix == ".gguf" and "mmproj" not in path.name]


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """Return all files of the model that a file is part of, in order. Raises ModelError if one is missing."""
    if (found := PART.match(path.name)) is None:
        return (path,)
    name, count = found.groups()
    if not int(count):
        raise ModelError(f"{path} is named part of 0 files: rename it")
    parts = tuple(path.with_name(f"{name}-{i:05}-of-{count}.gguf") for i in range(1, int(count) + 1))
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(f"{path} is one of {int(count)} files, of which {missing} are missing: fetch the model again")
    return parts


def gguf_name(path: Path) -> str:
    """Return the model's name: the file name without its part number."""
    found = PART.match(path.name)
    return found[1] if found is not None else path.stem
