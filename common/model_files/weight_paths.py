"""Selects the weight files of a model folder. Does not load torch.

The weights are `model.safetensors`, or the shards listed in `model.safetensors.index.json` (even if it lists that
file), or a complete set `model-00001-of-00003.safetensors`. Without any of these, they are the folder's only other
file or set. All other files (`consolidated.safetensors`, `adapter_model.safetensors`, another precision) are ignored,
as in transformers.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from common.errors import ModelError, shown
from common.model_files.json_file import read_json, read_text, refuse_pointer

SUFFIX: Final = ".safetensors"
WHOLE: Final = f"model{SUFFIX}"
INDEX: Final = f"{WHOLE}.index.json"
SHARD: Final = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the model's .safetensors files by name. Raises ModelError if files are missing or ambiguous."""
    listed = _listed(folder)
    if (folder / WHOLE).is_file() and WHOLE not in listed:
        return (folder / WHOLE,)
    if listed:
        missing = [name for name in listed if not (folder / name).is_file()]
        if missing:
            raise ModelError(
                f"{folder / INDEX} lists {len(listed)} shards, of which {missing} are missing: fetch the model again"
            )
        return tuple(folder / name for name in listed)
    try:
        names = sorted(path.name for path in folder.iterdir() if path.suffix == SUFFIX and path.is_file())
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}") from error
    if not names:
        raise ModelError(f"{folder} has no .safetensors weights: convert the model (pickled weights are not loaded)")
    sets = _sets(names)
    own = [key for key in sets if key[0] == "model" and key[1]] or list(sets)
    if len(own) > 1:
        raise ModelError(
            f"{folder} has neither {WHOLE} nor {INDEX}, but several other .safetensors files ({', '.join(names)}): "
            f"keep the files of one model, or rename a single file to {WHOLE}"
        )
    (name, count), found = own[0], sets[own[0]]
    missing_numbers = sorted({*range(1, count + 1)} - {number for number, _ in found})
    if missing_numbers:
        raise ModelError(
            f"{folder} has {len(found)} of the {count} files {name}-...-of-{count:05}{SUFFIX}, without numbers "
            f"{shown(missing_numbers)}: fetch the model again"
        )
    return tuple(folder / file for _, file in sorted(found))


def _listed(folder: Path) -> list[str]:
    """Return the sorted files of the index. Raises ModelError for a file outside of the folder."""
    if read_text(folder / INDEX) is None:
        return []
    placed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ModelError(f"{folder / INDEX}: weight_map is {shown(placed)}, expected an object: fetch it again")
    for tensor, name in placed.items():
        where = f"{folder / INDEX}: weight_map.{shown(tensor)[1:-1]} is {shown(name)}"
        if not isinstance(name, str) or not name.endswith(SUFFIX):
            raise ModelError(f"{where}, expected the name of a {SUFFIX} file: fetch it again")
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ModelError(f"{where}, which is outside of the model folder: fetch the model from a trusted source")
    return sorted(set(placed.values()))


def _sets(names: Iterable[str]) -> dict[tuple[str, int], list[tuple[int, str]]]:
    """Group (shard number, file) by name and number of shards (0: not sharded)."""
    found: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for file in names:
        shard = SHARD.fullmatch(file)
        key, number = (file, 0), 0
        if shard is not None and 0 < int(shard[3]) <= 99999:
            key, number = (shard[1], int(shard[3])), int(shard[2])
        found.setdefault(key, []).append((number, file))
    return found


def check_safetensors(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of each tensor. Format: 8 bytes of length, JSON, data.

    Raises ModelError if the file is truncated, before a worker maps it.
    """
    refuse_pointer(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ValueError(f"its header has {length:,} bytes")
            head = json.loads(file.read(length))
        head.pop("__metadata__", None)
        expected = 8 + length + max((tensor["data_offsets"][1] for tensor in head.values()), default=0)
        found = {name: (str(tensor["dtype"]), tuple(tensor["shape"])) for name, tensor in head.items()}
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ModelError(f"{path} ({size:,} bytes) is not a safetensors file ({error}): fetch it again") from error
    if size != expected:
        raise ModelError(f"{path} is damaged: it has {size:,} bytes instead of {expected:,}. Fetch it again")
    return found
