"""Makes a ModelFiles description of a GGUF file or a Hugging Face folder. Slow: resolve.py keeps the result."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.gguf_format.metadata import GGUFHead, read_gguf_head, rope_factors
from common.gguf_format.tokenizer import CONTROL, convert_gguf_tokenizer
from common.model_files.cache_folder import make_folder, write_atomically
from common.model_files.config import from_hf
from common.model_files.files import ModelFiles
from common.model_files.gguf_config import TensorFacts, from_gguf
from common.model_files.json_file import read_json
from common.model_files.stamp import hash_weights

# Control tokens that end a turn in some chat format. GGUF files name only one end token, so the others are found by
# their text, as in llama.cpp.
END_TOKENS = frozenset(
    ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "</s>")
)

HARMONY_ENDS = frozenset(("<|return|>", "<|call|>"))
"""Of gpt-oss, whose <|end|> ends a message of several, and no answer."""

OF_THE_FILE = frozenset(
    ("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache")
)
"""Fields of a config.json that say nothing of what is computed."""


def describe_gguf(parts: Sequence[Path], model_id: str, folder: Path, *, progress: bool) -> ModelFiles:
    """Describes a .gguf file, or the parts of one, and converts its vocabulary to `folder`/tokenizer.json.

    Raises ModelError when the file is damaged, or its model or its tokenizer is not supported.
    """
    path = parts[0]
    head = read_gguf_head(path)
    tokens = head.metadata.get("tokenizer.ggml.tokens") or []
    facts = TensorFacts.of({tensor.name for tensor in head.tensors}, len(tokens), rope_factors(path, head))
    from_gguf(head.metadata, facts, path)  # refuses what is not supported before hashing weights
    tokenizer = convert_gguf_tokenizer(head.metadata)
    target = make_folder(folder) / "tokenizer.json"
    write_atomically(target, tokenizer.to_str().encode())
    eos_token_ids = gguf_end_tokens(head, tokens)
    bos = head.metadata.get("tokenizer.ggml.bos_token_id")
    return ModelFiles(
        model_id=model_id,
        format="gguf",
        weights=tuple(parts),
        tokenizer=target,
        chat_template=head.metadata.get("tokenizer.chat_template"),
        bos_token=tokens[bos] if bos is not None else "",
        eos_token=tokens[eos_token_ids[0]] if eos_token_ids else "",
        eos_token_ids=eos_token_ids,
        max_model_len=_positive(head.metadata.get(f"{head.architecture}.context_length"), "context_length", path),
        vocab_size=len(tokens),
        weights_hash=hash_weights(parts, progress=progress),
    )


def gguf_end_tokens(head: GGUFHead, tokens: list[str]) -> tuple[int, ...]:
    """The tokens that end an answer: those that the metadata name, and control tokens by their text."""
    named = [head.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    types = head.metadata.get("tokenizer.ggml.token_type") or []
    control = {tokens[i]: i for i, kind in enumerate(types) if kind == CONTROL}
    ends = END_TOKENS - {"<|end|>"} | HARMONY_ENDS if control.keys() >= HARMONY_ENDS else END_TOKENS
    return _unique([*(i for i in named if i is not None), *(i for token, i in control.items() if token in ends)])


def describe_folder(folder: Path, model_id: str, *, progress: bool, weights: bool = True) -> ModelFiles:
    """Describes a folder with config.json, tokenizer.json and .safetensors weights (unless `weights` is False).

    Raises ModelError when one of them is missing, cut short or not readable, or the model is not supported.
    """
    config = read_json(folder / "config.json", required=True)
    config = {**config, **config.get("text_config", {})}
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    generation = read_json(folder / "generation_config.json")
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():
        raise ModelError(
            f"{folder} has no tokenizer.json: write one with transformers' AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(...), and keep it beside config.json"
        )
    if weights:
        from_hf(folder / "config.json")  # refuses what is not supported before the weights are hashed
    shards = _safetensors(folder) if weights else ()
    eos_token = _token_text(tokenizer_config.get("eos_token"))
    return ModelFiles(
        model_id=model_id,
        format="hf",
        weights=shards,
        tokenizer=tokenizer,
        config=folder / "config.json",
        chat_template=_chat_template(folder, tokenizer_config),
        bos_token=_token_text(tokenizer_config.get("bos_token")),
        eos_token=eos_token,
        eos_token_ids=_folder_eos_token_ids(config, generation, tokenizer, eos_token),
        max_model_len=_positive(config.get("max_position_embeddings"), "max_position_embeddings", folder),
        vocab_size=_positive(config.get("vocab_size"), "vocab_size", folder),
        weights_hash=hash_weights(shards, progress=progress, also=_computation(config)) if weights else "",
    )


def _computation(config: dict[str, Any]) -> bytes:
    """What of a config.json says how the weights are used: other rotary angles make other KV of the same weights."""
    kept = {name: value for name, value in config.items() if name not in OF_THE_FILE}
    return json.dumps(kept, sort_keys=True).encode()


def _folder_eos_token_ids(
    config: dict[str, Any], generation: dict[str, Any], tokenizer: Path, eos_token: str
) -> tuple[int, ...]:
    """The tokenizer's own end token first (it ends a chat turn), then those of generation_config.json or config.json"""
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(tokenizer)).token_to_id(eos_token) if eos_token else None
    listed = generation.get("eos_token_id", config.get("eos_token_id"))
    listed = listed if isinstance(listed, list) else [listed]
    return _unique(i for i in [own, *listed] if isinstance(i, int))


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """A chat_template.jinja file wins over tokenizer_config.json; of several named templates the default is taken."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _safetensors(folder: Path) -> tuple[Path, ...]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing or not names:
            raise ModelError(
                f"{index} lists {len(names)} shards, of which {missing} are missing: fetch the model again"
            )
        weights = [folder / name for name in names]
    else:
        weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ModelError(f"{folder} has no .safetensors weights: convert the model (pickled weights are not loaded)")
    for path in weights:
        _check_safetensors(path)
    return tuple(weights)


def _check_safetensors(path: Path) -> None:
    """Finds a file cut short before a worker maps it. Format: 8 bytes of length, JSON, then the data."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ValueError(f"its head should have {length:,} bytes")
            head = json.loads(file.read(length))
        expected = 8 + length + max((t["data_offsets"][1] for k, t in head.items() if k != "__metadata__"), default=0)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} ({size:,} bytes) is not a safetensors file ({error}): fetch it again") from error
    if size != expected:
        raise ModelError(f"{path} is damaged: it has {size:,} bytes, its head says {expected:,}. Fetch it again")


def _token_text(token: Any) -> str:
    """Special tokens are written as text or as an object with their matching rules."""
    return str(token.get("content", "")) if isinstance(token, dict) else token if isinstance(token, str) else ""


def _positive(value: Any, name: str, where: Path) -> int:
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{where} gives {name}={value!r}, not a positive number: the model cannot be served")
    return value


def _unique(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))
