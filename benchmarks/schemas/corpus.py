"""Reads schemas from folders and files, as JSONSchemaBench and MaskBench lay them out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """A schema of a split, with documents that are known to match it or not."""

    split: str
    name: str
    schema: Any
    valid: tuple[Any, ...] = ()
    invalid: tuple[Any, ...] = ()


def samples_of(paths: Sequence[Path]) -> Iterator[Sample]:
    """Every sample in files and folders, in the order of their names.

    A `.jsonl` file has a schema a line (`json_schema` or `schema`, an object or text); a `.json` file is a schema, or
    an object of a `schema` and its `tests`. The split is the file's name up to `---`, else its folder, else its file.
    Raises ValueError for what is no JSON.
    """
    for path in paths:
        files = sorted(path.rglob("*.json*")) if path.is_dir() else [path]
        for file in files:
            if file.suffix == ".jsonl":
                yield from _lines(file)
            elif file.suffix == ".json":
                yield _file(file)


def _file(file: Path) -> Sample:
    split, _, name = file.stem.rpartition("---")
    content = _parsed(file.read_text(encoding="utf-8"), str(file))
    return _sample(split or file.parent.name, name or file.stem, content)


def _lines(file: Path) -> Iterator[Sample]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            content = _parsed(line, f"{file}:{number}")
            yield _sample(file.stem, str(content.get("unique_id", number)), content)


def _sample(split: str, name: str, content: Any) -> Sample:
    if not isinstance(content, Mapping):
        return Sample(split, name, content)
    schema = content.get("json_schema", content.get("schema"))
    if isinstance(schema, str):
        schema = _parsed(schema, f"{split} {name}")
    tests = content.get("tests")
    if isinstance(schema, Mapping | bool) and isinstance(tests, list):
        valid, invalid = ([each["data"] for each in tests if each["valid"] is kind] for kind in (True, False))
        return Sample(split, name, schema, tuple(valid), tuple(invalid))
    return Sample(split, name, schema if isinstance(schema, Mapping) and "json_schema" in content else content)


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: is not JSON: {error}") from error
