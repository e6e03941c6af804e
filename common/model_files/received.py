"""Weights that a router received from a client: a safetensors file outside of a model folder.

The file has the tensors of the served model. Configuration and tokenizer remain those of the model.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from common.errors import ModelError, shown
from common.model_files.files import ModelFiles
from common.model_files.weight_paths import check_safetensors

MAX_HEAD_BYTES = 32 * 1024 * 1024
"""Maximum size of the file's header: 250,000 tensors."""
TEXT = re.compile(r"tensors:([0-9a-f]{64}):([0-9]{1,18}):(/.*)", re.DOTALL)
MAX_NAMED = 3
"""Maximum number of tensors named in an error."""


@dataclass(frozen=True, slots=True)
class ReceivedWeights:
    """A file of weights, identified by its content. `path` is its place on the router's host."""

    sha256: str
    num_bytes: int
    path: Path

    def __str__(self) -> str:
        return f"tensors:{self.sha256}:{self.num_bytes}:{self.path}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Inverse of `str`. Returns None for the path or name of a model."""
        match = TEXT.fullmatch(text)
        return cls(match[1], int(match[2]), Path(match[3])) if match is not None else None

    def is_here(self) -> bool:
        """Whether `path` has these bytes, because the router runs on this host or shares the folder. Reads the file."""
        try:
            if not self.path.is_file() or self.path.stat().st_size != self.num_bytes:
                return False
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256
        except OSError:
            return False


def with_received(files: ModelFiles, path: Path, sha256: str) -> ModelFiles:
    """Return a model with the weights of a received file. Raises ModelError unless it has the same tensors."""
    if files.format != "hf":
        raise ModelError(f"{files.model_id} is a GGUF model: its weights change with /update_weights_from_disk only")
    wanted = {name: head for shard in files.weights for name, head in check_safetensors(shard).items()}
    given = check_safetensors(path)
    if missing := sorted(wanted.keys() - given.keys()):
        raise ModelError(f"{len(missing)} of the model's {len(wanted)} tensors are missing: {_named(missing)}")
    if unknown := sorted(given.keys() - wanted.keys()):
        raise ModelError(f"{len(unknown)} tensors do not exist in the model: {_named(unknown)}")
    for name, (dtype, shape) in wanted.items():
        if given[name] != (dtype, shape):
            other_dtype, other_shape = given[name]
            raise ModelError(
                f"tensor {name} is {shown(other_dtype)} of shape {shown([*other_shape])}, that of the model is "
                f"{shown(dtype)} of shape {shown([*shape])}"
            )
    return msgspec.structs.replace(files, weights=(path,), weights_hash=sha256[:16])


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(shown(name)[1:-1] for name in names[:MAX_NAMED]) + more
