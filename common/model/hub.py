"""Models by Hugging Face id, through the optional `huggingface_hub` package and its own cache."""

from __future__ import annotations

from pathlib import Path

from diptych.common.errors import ModelError

PATTERNS = ["*.json", "*.jinja", "*.safetensors"]


def hub_folder(model_id: str, *, download: bool = True) -> Path:
    """The local snapshot of `model_id` ("org/name"), downloaded if it is not there yet.

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
    try:
        folder = Path(snapshot_download(model_id, allow_patterns=PATTERNS, local_files_only=True))
        if not download or any(folder.glob("*.safetensors")):
            return folder
    except LocalEntryNotFoundError as error:
        if not download:
            raise ModelError(f"{model_id} is not in the Hugging Face cache, and downloading is off") from error
    try:
        return Path(snapshot_download(model_id, allow_patterns=PATTERNS))
    except Exception as error:  # the hub's own, HTTP and OS errors mean the same to the user
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"{model_id} cannot be fetched from Hugging Face ({type(error).__name__}: {reason}). Check the id, "
            "the network and, for a gated model, HF_TOKEN; or name a local folder or .gguf file"
        ) from error
