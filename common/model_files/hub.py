"""Models by Hugging Face id, through the optional `huggingface_hub` package and its cache."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

from common.errors import ModelError
from common.machine import NO_ROOM, write_failure
from common.model_files.gguf.parts import gguf_parts, model_ggufs
from common.model_files.model_cache import FULL_REMEDY
from common.packages import install_command

log = logging.getLogger(__name__)
TEXT = ("*.json", "*.jinja")
WEIGHTS = "*.safetensors"
CODE = ("*.py", "*.model", "*.tiktoken", "*.txt")
"""Files that other engines may need: a model's own code, and vocabularies."""
SHARD = re.compile(r"-of-(\d+)\.safetensors\Z")


def hub_folder(model_id: str, *, download: bool = True, weights: bool = True, supported: bool = True) -> Path:
    """Return the local snapshot of `model_id` ("org/name"), and download it if it is missing or incomplete.

    With `supported` False, it includes files that only other engines need.

    Raises ModelError if the package is not installed, or the model is neither cached nor available.
    """
    if model_id.upper().endswith("GGUF"):
        raise ModelError(f"{model_id} has GGUF files of several quantisations: select one, such as {model_id}:Q4_K_M")
    patterns = [*TEXT, *([WEIGHTS] if weights else ()), *(CODE if weights and not supported else ())]
    return _snapshot(model_id, patterns, lambda folder: _is_whole(folder, weights=weights), download=download)


def hub_gguf(model_id: str, kind: str, *, download: bool = True) -> Path:
    """Return the first GGUF file of a model with quantisation `kind` ("Q4_K_M"), and download all if any is missing.

    Raises ModelError like `hub_folder`, and if no file or several models match.
    """
    ends = (".gguf", "-*-of-*.gguf")
    names = [f"{kind}{end}" for kind in {kind, kind.lower(), kind.upper()} for end in ends]
    patterns = [*names, *(f"*{separator}{name}" for name in names for separator in "-._/")]
    folder = _snapshot(model_id, patterns, lambda folder: _has_gguf(folder, kind), download=download)
    found = sorted({gguf_parts(path)[0] for path in _ggufs(folder, kind)})
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(
            f"{model_id} has several GGUF models of quantisation {kind!r}: {[path.name for path in found]}"
        )
    raise ModelError(f"{model_id} has no .gguf file of quantisation {kind!r}: see its file list on Hugging Face")


def _ggufs(folder: Path, kind: str) -> list[Path]:
    """Return the files of a quantisation in a snapshot."""
    wanted = re.compile(rf"(?:.*[-._])?{re.escape(kind)}(?:-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)
    return [path for path in model_ggufs(folder.rglob("*.gguf")) if wanted.fullmatch(path.name)]


def _has_gguf(folder: Path, kind: str) -> bool:
    """Whether a snapshot has a model of this quantisation with all its files."""
    try:
        return bool([gguf_parts(path) for path in _ggufs(folder, kind)])
    except ModelError:  # a part is missing
        return False


def _snapshot(model_id: str, patterns: list[str], is_whole: Callable[[Path], bool], *, download: bool) -> Path:
    """Return the snapshot folder with the files that match `patterns`. Raises ModelError."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise ModelError(
            f"{model_id!r} looks like a Hugging Face id, which needs the package huggingface_hub: install it with "
            f"{install_command('hub')}, or use a local folder or .gguf file"
        ) from error
    try:
        folder = Path(snapshot_download(model_id, allow_patterns=patterns, local_files_only=True))
        if not download or is_whole(folder):
            return folder
    except LocalEntryNotFoundError as error:
        if not download:
            raise ModelError(f"{model_id} is not in the Hugging Face cache, and downloads are disabled") from error
    log.info("hub: downloading %s from Hugging Face", model_id)
    try:
        return Path(snapshot_download(model_id, allow_patterns=patterns))
    except Exception as error:  # errors of the hub, of HTTP and of the OS
        if (full := _full_disk(error)) is not None:
            from huggingface_hub.constants import HF_HUB_CACHE

            raise ModelError(f"{write_failure(HF_HUB_CACHE, full)}. {FULL_REMEDY}") from error
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"cannot download {model_id} from Hugging Face ({type(error).__name__}: {reason}). Check the id, the "
            "network and, for a gated model, HF_TOKEN; or use a local folder or .gguf file"
        ) from error


def _full_disk(error: BaseException | None) -> OSError | None:
    """Return the error of a full disk that caused `error`, or None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return error
        error = error.__cause__ or error.__context__
    return None


def _is_whole(folder: Path, *, weights: bool) -> bool:
    """Whether a snapshot is complete. Files appear in it one by one."""
    if not (folder / "config.json").exists() or not (folder / "tokenizer.json").exists():
        return False
    shards = [path.name for path in folder.glob(WEIGHTS)]
    numbers = [int(found[1]) for name in shards if (found := SHARD.search(name))]
    return not weights or (bool(shards) and len(numbers) >= max(numbers, default=0))
