"""The description of a model on disk. `resolve.py` finds one by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model on disk. `weights` are absolute paths: a .gguf file or its parts, or the .safetensors shards, in name
    order.

    `eos_token_ids` are all tokens that end a turn, the model's own first. `chat_template` is Jinja source, or None for
    a base model. `weights_hash` is 16 hex digits over all weights and what says how to use them. `config` is
    config.json for "hf". A model that was resolved without weights has none and no hash.
    """

    model_id: str
    format: Literal["gguf", "hf"]
    weights: tuple[Path, ...]
    tokenizer: Path
    config: Path | None = None
    chat_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    weights_hash: str
