"""Models by Hugging Face id, through the optional `huggingface_hub` package and its own cache."""

from __future__ import annotations

import re
from pathlib import Path

from common.errors import ModelError

TEXT = ("*.json", "*.jinja")
WEIGHTS = "*.safetensors"
SHARD = re.compile(r"-of-(\d+)\.safetensors\Z")


def hub_folder(model_id: str, *, download: bool = True, weights: bool = True) -> Path:
    """The local snapshot of `model_id` ("org/name"), downloaded if it is not there yet, or not all of it.

    Raises ModelError when the package is not installed, or the model is neither cached nor to be had.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise ModelError(
            f"{model_id!r} looks like a Hugging Face id, for which huggingface_hub is needed: "
            "pip install huggingface_hub, or name a local folder or .gguf file"
        ) from error
    patterns = [*TEXT, WEIGHTS] if weights else [*TEXT]
    try:
        folder = Path(snapshot_download(model_id, allow_patterns=patterns, local_files_only=True))
        if not download or _is_whole(folder, weights=weights):
            return folder
    except LocalEntryNotFoundError as error:
        if not download:
            raise ModelError(f"{model_id} is not in the Hugging Face cache, and downloading is off") from error
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
