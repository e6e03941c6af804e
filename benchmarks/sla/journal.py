"""What a step has measured so far, in a file: a step that is stopped after minutes goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Journal:
    """Keeps the parts of one step by name, one JSON line each, in `file`; without a file only in memory.

    The first line says with which settings they were measured: `resume` keeps parts of the same settings only. A last
    line that was cut off is dropped.
    """

    def __init__(self, file: Path | None = None, settings: str = "", *, resume: bool = False) -> None:
        self._file = file
        self._parts: dict[str, Any] = _read(file, settings) if file is not None and resume else {}
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = [{"settings": settings}, *({"part": name, "found": found} for name, found in self._parts.items())]
            file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def __len__(self) -> int:
        return len(self._parts)

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """The part of this name: what is known of it, or else what `measure` returns: a JSON value."""
        if name not in self._parts:
            found = self._parts[name] = measure()
            if self._file is not None:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"part": name, "found": found}) + "\n")
        return self._parts[name]

    def remove(self) -> None:
        """Delete the file: the step has written its result."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def _read(file: Path, settings: str) -> dict[str, Any]:
    """Parts of a file that was written with the same settings."""
    try:
        first, *lines = file.read_text(encoding="utf-8").splitlines()
        if json.loads(first)["settings"] != settings:
            return {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    parts: dict[str, Any] = {}
    for line in lines:
        try:
            part = json.loads(line)
        except ValueError:
            break
        parts[part["part"]] = part["found"]
    return parts
