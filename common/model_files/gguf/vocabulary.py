"""Vocabulary in the metadata of a GGUF file, and its validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from common.errors import ModelError, shown

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""GGUF's token types."""
PREFIX: Final = "tokenizer.ggml."
NO_TOKEN: Final = (-1, 0xFFFF_FFFF)
"""Ids that mean "no token", as in llama.cpp."""
IDS: Final = ("bos", "eos", "eot", "eom", "unknown")


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """Validated vocabulary.

    `tokens` are distinct, `types` has one entry per token, and `ids` has the ids of `IDS` that the file sets. A BPE
    vocabulary has `merges`, which are pairs of tokens. An SPM vocabulary has `scores`, one per token.
    """

    kind: str
    pre: str | None
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[tuple[str, str]]
    ids: Mapping[str, int]

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> GGUFVocabulary:
        """Read the vocabulary. Raises ModelError, with field and value, for invalid metadata."""
        tokens = _list(metadata, "tokens", str)
        if not tokens:
            raise ModelError(f"the GGUF file has no vocabulary ({PREFIX}tokens): use a complete file")
        if len(known := {token: i for i, token in enumerate(tokens)}) != len(tokens):
            twice = next(i for i, token in enumerate(tokens) if known[token] != i)
            raise _wrong("tokens", f"{tokens[twice]!r} as tokens {twice} and {known[tokens[twice]]}", "distinct tokens")
        types = _list(metadata, "token_type", int) or [NORMAL] * len(tokens)
        scores = _list(metadata, "scores", float, int)
        for name, values in (("token_type", types), ("scores", scores)):
            if values and len(values) != len(tokens):
                raise _wrong(name, f"a list of {len(values):,}", f"one for each of {len(tokens):,} tokens")
        kind = metadata.get(f"{PREFIX}model")
        if kind not in ("gpt2", "llama"):
            raise ModelError(
                f"the GGUF file has a tokenizer of kind {shown(kind)}, must be 'gpt2' (BPE) or 'llama' (SPM)"
            )
        if kind == "gpt2" and not metadata.get(f"{PREFIX}merges"):
            raise ModelError("the GGUF file has a BPE vocabulary without merges: convert the model again")
        if kind == "llama" and not (scores and metadata.get(f"{PREFIX}token_type")):
            raise ModelError("the GGUF file has an SPM vocabulary without scores and types: convert the model again")
        pre = metadata.get(f"{PREFIX}pre")
        if pre is not None and not isinstance(pre, str):
            raise _wrong("pre", shown(pre), "a name")
        merges = [_merge(merge, i, known) for i, merge in enumerate(_list(metadata, "merges", str))]
        named = {name: _id(metadata, f"{name}_token_id", len(tokens)) for name in IDS}
        ids = {name: token_id for name, token_id in named.items() if token_id is not None}
        return cls(str(kind), pre, tokens, types, scores, merges if kind == "gpt2" else (), ids)


def flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """Read a Boolean field. Raises ModelError for other values."""
    value = metadata.get(PREFIX + name, default)
    if value not in (True, False):
        raise _wrong(name, shown(value), "true or false")
    return bool(value)


def _id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    value = metadata.get(PREFIX + name)
    if value is None or value in NO_TOKEN:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise _wrong(name, shown(value), f"the id of one of {count:,} tokens")
    return value


def _merge(merge: str, index: int, known: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not right or not {left, right, left + right} <= known.keys():
        raise _wrong(f"merges[{index}]", shown(merge), "two tokens that make a third")
    return left, right


def _list(metadata: Mapping[str, Any], name: str, *kinds: type) -> list[Any]:
    """Read a list field. Returns [] if it is missing."""
    values = metadata.get(PREFIX + name)
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(value, kinds) for value in values):
        raise _wrong(name, shown(values), f"a list of {kinds[0].__name__}")
    return values


def _wrong(name: str, value: str, expected: str) -> ModelError:
    return ModelError(f"{PREFIX}{name} is {value}, expected {expected}: convert the model again")
