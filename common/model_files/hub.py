"""Models by Hugging Face id, through the optional `huggingface_hub` package and its own cache."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

from common.errors import ModelError
from common.model_files.gguf.parts import gguf_parts

log = logging.getLogger(__name__)
TEXT = ("*.json", "*.jinja")
WEIGHTS = "*.safetensors"
SHARD = re.compile(r"-of-(\d+)\.safetensors\Z")


def hub_folder(model_id: str, *, download: bool = True, weights: bool = True) -> Path:
    """The local snapshot of `model_id` ("org/name"), downloaded if it is not there yet, or not all of it.

    Raises ModelError when the package is not installed, or the model is neither cached nor to be had.
    """
    if model_id.upper().endswith("GGUF"):
        raise ModelError(f"{model_id} holds GGUF files of several kinds: name one, such as {model_id}:Q4_K_M")
    patterns = [*TEXT, WEIGHTS] if weights else [*TEXT]
    return _snapshot(model_id, patterns, lambda folder: _is_whole(folder, weights=weights), download=download)


def hub_gguf(model_id: str, kind: str, *, download: bool = True) -> Path:
    """The first file of a model's GGUF files of a `kind` ("Q4_K_M"), all of which are downloaded if one is not there.

    Raises ModelError as `hub_folder`, and when there is no such file, or there are several models of that kind.
    """
    ends = (".gguf", "-*-of-*.gguf")
    names = [f"{kind}{end}" for kind in {kind, kind.lower(), kind.upper()} for end in ends]
    patterns = [*names, *(f"*{separator}{name}" for name in names for separator in "-._/")]
    folder = _snapshot(model_id, patterns, lambda folder: _has_gguf(folder, kind), download=download)
    found = sorted({gguf_parts(path)[0] for path in _ggufs(folder, kind)})
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(f"{model_id} has several models of kind {kind}: {[path.name for path in found]}")
    raise ModelError(f"{model_id} has no .gguf file of kind {kind!r}: see its list of files for the kinds that it has")


def _ggufs(folder: Path, kind: str) -> list[Path]:
    """The files of a kind in a snapshot; not those that see or hear (`mmproj`)."""
    wanted = re.compile(rf"(?:.*[-._])?{re.escape(kind)}(?:-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)
    return [path for path in folder.rglob("*.gguf") if wanted.fullmatch(path.name) and "mmproj" not in path.name]


def _has_gguf(folder: Path, kind: str) -> bool:
    """Whether a snapshot has a model of that kind, with all its files."""
    try:
        return bool([gguf_parts(path) for path in _ggufs(folder, kind)])
    except ModelError:  # one of several is missing
        return False


def _snapshot(model_id: str, patterns: list[str], is_whole: Callable[[Path], bool], *, download: bool) -> Path:
    """The snapshot's folder with the files that match the patterns. Raises ModelError."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise ModelError(
            f"{model_id!r} looks like a Hugging Face id, for which huggingface_hub is needed: "
            "pip install huggingface_hub, or name a local folder or .gguf file"
        ) from error
    try:
        folder = Path(snapshot_download(model_id, allow_patterns=patterns, local_files_only=True))
        if not download or is_whole(folder):
            return folder
    except LocalEntryNotFoundError as error:
        if not download:
            raise ModelError(f"{model_id} is not in the Hugging Face cache, and downloading is off") from error
    log.info("fetches %s from Hugging Face", model_id)
    try:
        return Path(snapshot_download(model_id, allow_patterns=patterns))
    except Exception as error:  # the hub's own, HTTP and OS errors mean the same to the user
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"{model_id} cannot be fetched from Hugging Face ({type(error).__name__}: {reason}). Check the id, "
            "the network and, for a gated model, HF_TOKEN; or name a local folder or .gguf file"
        ) from error


def _is_whole(folder: Path, *, weights: bool) -> bool:
    """Whether the snapshot is complete: it shows each file as soon as that one is there."""
    if not (folder / "config.json").exists() or not (folder / "tokenizer.json").exists():
        return False
    shards = [path.name for path in folder.glob(WEIGHTS)]
    numbers = [int(found[1]) for name in shards if (found := SHARD.search(name))]
    return not weights or (bool(shards) and len(numbers) >= max(numbers, default=0))
