"""Description of a model on disk. `resolve.py` creates it from a name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

DESCRIBED = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "hf_quant_config.json"),
)
"""Files other than weights that the description of a folder depends on."""
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""File with the chat template for requests with tools, relative to the model's folder."""


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model on disk.

    `weights` are absolute paths, in name order: a .gguf file or its parts, or .safetensors shards. `eos_token_ids` are
    all tokens that end a turn, the model's own first. `chat_template` is Jinja source, or None for a base model;
    `tool_template` is the source for requests with tools, if the model has a separate one.
    `weights_hash` is 16 hex digits over the weights and the settings that affect the KV cache. `config` is the path of
    config.json for "hf". A model resolved without weights has no `weights` and no hash. `unsupported` is why Diptych's
    engine cannot compute the model, or "". The `max_model_len` of such a model is an upper bound.
    """

    model_id: str
    format: Literal["gguf", "hf"]
    weights: tuple[Path, ...]
    tokenizer: Path
    config: Path | None = None
    chat_template: str | None = None
    tool_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    weights_hash: str
    unsupported: str = ""
