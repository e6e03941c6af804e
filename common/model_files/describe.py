"""Descriptions of GGUF files and Hugging Face folders. Slow: `resolve.py` caches the result."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ModelError, shown
from common.model_files.architecture.fields import FieldReader
from common.model_files.config import from_hf
from common.model_files.files import TOOL_TEMPLATE, ModelFiles
from common.model_files.gguf.metadata import GGUFHead, read_gguf_head, rope_factors
from common.model_files.gguf.tokenizer import convert_gguf_tokenizer
from common.model_files.gguf.vocabulary import CONTROL, GGUFVocabulary
from common.model_files.gguf_config import TensorFacts, from_gguf
from common.model_files.json_file import read_json, read_text, refuse_pointer
from common.model_files.model_cache import make_folder, write_atomically
from common.model_files.stamp import hash_weights
from common.model_files.tokenizer import Tokenizer
from common.model_files.weight_paths import check_safetensors, weight_files
from common.model_files.weight_scheme import read_weight_scheme

log = logging.getLogger(__name__)
EMBEDDING = "token_embd.weight"
TEMPLATE = "tokenizer.chat_template"
DEFAULT_TEMPLATE, TOOL_USE = "default", "tool_use"
"""Names of chat templates: for all requests, and for requests with tools. Others, such as `rag`, are not used."""
# Control tokens that end a turn in some chat format. GGUF files name one end token; the others are found by their text,
# as in llama.cpp.
END_TOKENS = frozenset(
    ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "</s>")
)

HARMONY_ENDS = frozenset(("<|return|>", "<|call|>"))
"""End tokens of gpt-oss, whose <|end|> ends one message of an answer, not the answer."""

CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
"""Fields of config.json with the context length, by architecture."""
UNKNOWN_CONTEXT = 2**20
"""Context length of a model whose config.json does not name it. Workers report the actual length to the router."""
OF_THE_FILE = frozenset(
    ("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache")
)
"""Fields of config.json that do not affect the computation."""


def describe_gguf(parts: Sequence[Path], model_id: str, folder: Path, *, progress: bool) -> ModelFiles:
    """Describe a .gguf file or its parts, and convert its vocabulary to `folder`/tokenizer.json.

    Raises ModelError if the file is damaged, or its model or tokenizer is not supported.
    """
    path = parts[0]
    for part in parts:
        refuse_pointer(part)
    head = read_gguf_head(path)
    try:
        vocabulary = GGUFVocabulary.of(head.metadata)
        names = {tensor.name for tensor in head.tensors}
        facts = TensorFacts.of(names, len(vocabulary.tokens), rope_factors(path, head))
        config = from_gguf(head.metadata, facts, path)  # refuses unsupported models before the weights are hashed
        tokenizer = convert_gguf_tokenizer(head.metadata)
    except ModelError as error:
        raise error if str(path) in str(error) else ModelError(f"{path}: {error}") from error
    _check_rows(path, head, vocabulary)
    template, tool_template = (_gguf_template(path, head, key) for key in (TEMPLATE, f"{TEMPLATE}.{TOOL_USE}"))
    target = make_folder(folder) / "tokenizer.json"
    write_atomically(target, tokenizer.to_str().encode())
    tokens, eos_token_ids = vocabulary.tokens, gguf_end_tokens(vocabulary)
    return ModelFiles(
        model_id=model_id,
        format="gguf",
        weights=tuple(parts),
        tokenizer=target,
        chat_template=template,
        tool_template=tool_template,
        bos_token=tokens[vocabulary.ids["bos"]] if "bos" in vocabulary.ids else "",
        eos_token=tokens[eos_token_ids[0]] if eos_token_ids else "",
        eos_token_ids=eos_token_ids,
        max_model_len=config.max_model_len,
        vocab_size=len(tokens),
        weights_hash=hash_weights(parts, progress=progress),
    )


def _gguf_template(path: Path, head: GGUFHead, key: str) -> str | None:
    template = head.metadata.get(key)
    if not isinstance(template, str | None):
        raise ModelError(f"{path}: {key} is {shown(template)}, expected a string: convert the model again")
    return template


def _check_rows(path: Path, head: GGUFHead, vocabulary: GGUFVocabulary) -> None:
    """Raise ModelError if the embedding has fewer rows than the vocabulary has tokens."""
    rows = next((tensor.shape[-1] for tensor in head.tensors if tensor.name == EMBEDDING and tensor.shape), None)
    if rows is not None and rows < len(vocabulary.tokens):
        raise ModelError(
            f"{path}: tokenizer.ggml.tokens has {len(vocabulary.tokens):,} tokens, tensor {EMBEDDING} has {rows:,} "
            "rows: convert the model again"
        )


def gguf_end_tokens(vocabulary: GGUFVocabulary) -> tuple[int, ...]:
    """Return the tokens that end an answer: those named in the metadata, and control tokens by their text."""
    named = [vocabulary.ids[name] for name in ("eos", "eot", "eom") if name in vocabulary.ids]
    control = {vocabulary.tokens[i]: i for i, kind in enumerate(vocabulary.types) if kind == CONTROL}
    ends = END_TOKENS - {"<|end|>"} | HARMONY_ENDS if control.keys() >= HARMONY_ENDS else END_TOKENS
    return _unique([*named, *(i for token, i in control.items() if token in ends)])


def describe_folder(
    folder: Path, model_id: str, *, progress: bool, weights: bool = True, supported: bool = True
) -> ModelFiles:
    """Describe a folder with config.json, tokenizer.json and .safetensors weights (unless `weights` is False).

    With `supported` False, the architecture and the weight format may be those of another engine.

    Raises ModelError if a file is missing, truncated or unreadable, or the model is not supported.
    """
    path, tokenizer_path = folder / "config.json", folder / "tokenizer.json"
    fields = read_json(path, required=True)
    unsupported = ""
    try:
        config = from_hf(path)
        read_weight_scheme(path)
        max_model_len, vocab_size = config.max_model_len, config.vocab_size
    except ModelError as error:
        if supported:  # refused before the weights are hashed
            raise
        unsupported, max_model_len, vocab_size = str(error), 0, 0
    text = FieldReader(fields, path).mapping("text_config")
    if read_text(tokenizer_path) is None:
        raise ModelError(
            f"{folder} has no tokenizer.json: create it with transformers, "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    tokenizer = Tokenizer.from_file(tokenizer_path)
    if unsupported:
        max_model_len = _first_count(({**fields, **text},), CONTEXT_FIELDS) or UNKNOWN_CONTEXT
        vocab_size = max(_first_count((fields, text), ("vocab_size",)), tokenizer.highest_id + 1)
    shards = weight_files(folder) if weights else ()
    for shard in shards:
        check_safetensors(shard)
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    templates = _chat_templates(folder, tokenizer_config)
    bos_token, eos_token = _special_tokens(folder, tokenizer_config)
    sources = (read_json(folder / "generation_config.json"), fields, text)
    given = next((ids for source in sources if (ids := source.get("eos_token_id")) is not None), None)
    listed = given if isinstance(given, list) else [given]
    own = tokenizer.token_to_id(eos_token) if eos_token else None
    return ModelFiles(
        model_id=model_id,
        format="hf",
        weights=shards,
        tokenizer=tokenizer_path,
        config=path,
        chat_template=templates.get(DEFAULT_TEMPLATE) or None,
        tool_template=templates.get(TOOL_USE) or None,
        bos_token=bos_token,
        eos_token=eos_token,
        eos_token_ids=_end_tokens([own, *listed], vocab_size, folder),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        weights_hash=hash_weights(shards, progress=progress, also=_computation({**fields, **text})) if weights else "",
        unsupported=unsupported,
    )


def _first_count(sources: Sequence[Mapping[str, object]], names: Sequence[str]) -> int:
    """Return the first positive whole number of these fields, or 0."""
    found = (source.get(name) for name in names for source in sources)
    return next((value for value in found if type(value) is int and value > 0), 0)


def _computation(config: dict[str, Any]) -> bytes:
    """Return the part of a config.json that affects the KV cache, such as rotary angles."""
    kept = {name: value for name, value in config.items() if name not in OF_THE_FILE}
    return json.dumps(kept, sort_keys=True).encode()


def _end_tokens(ids: Sequence[object], vocab_size: int, folder: Path) -> tuple[int, ...]:
    """Return the tokenizer's end token (it ends a chat turn), then those of generation_config.json or config.json.

    Ids outside of the vocabulary are dropped.
    """
    given = [token_id for token_id in ids if isinstance(token_id, int) and not isinstance(token_id, bool)]
    if unknown := [token_id for token_id in given if not 0 <= token_id < vocab_size]:
        log.warning("model %s: ignored eos_token_id %s: the vocabulary has %d tokens", folder, unknown, vocab_size)
    return _unique(token_id for token_id in given if 0 <= token_id < vocab_size)


def _chat_templates(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return the templates of a folder by name.

    As in transformers, .jinja files take precedence over all templates of tokenizer_config.json. Only a missing default
    template is taken from there.
    """
    files = {DEFAULT_TEMPLATE: folder / "chat_template.jinja", TOOL_USE: folder / TOOL_TEMPLATE}
    templates = {name: source for name, path in files.items() if (source := read_text(path)) is not None}
    if DEFAULT_TEMPLATE in templates:
        return templates
    path, template = folder / "tokenizer_config.json", tokenizer_config.get("chat_template")
    if template is None:
        path = folder / "chat_template.json"
        template = read_json(path).get("chat_template")
    entries = template if isinstance(template, list) else [{"name": DEFAULT_TEMPLATE, "template": template}]
    if not all(isinstance(entry, dict) for entry in entries):
        raise ModelError(f"{path}: chat_template is {shown(template)}, expected named templates: fetch it again")
    named = {str(entry.get("name")): entry.get("template") for entry in entries}
    for name in (DEFAULT_TEMPLATE,) if templates else (DEFAULT_TEMPLATE, TOOL_USE):
        if not isinstance(source := named.get(name), str | None):
            raise ModelError(f"{path}: chat_template is {shown(source)}, expected a string: fetch it again")
        if source is not None:
            templates[name] = source
    return templates


def _special_tokens(folder: Path, tokenizer_config: dict[str, Any]) -> tuple[str, str]:
    """Return the texts of the BOS and EOS tokens ("" if there is none).

    As in transformers, special_tokens_map.json takes precedence if tokenizer_config.json has no `added_tokens_decoder`.
    """
    special = read_json(folder / "special_tokens_map.json")
    is_old = "added_tokens_decoder" not in tokenizer_config

    def text_of(name: str) -> str:
        return (is_old and _token_text(special.get(name))) or _token_text({**special, **tokenizer_config}.get(name))

    return text_of("bos_token"), text_of("eos_token")


def _token_text(token: Any) -> str:
    """Return the text of a special token, which is a string or an object with a `content`."""
    return str(token.get("content", "")) if isinstance(token, dict) else token if isinstance(token, str) else ""


def _unique(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))
