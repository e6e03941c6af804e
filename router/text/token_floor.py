"""Lower bound on the number of tokens of a text, to reject huge prompts before they are tokenized."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from common.model_files import Tokenizer

NFC_SHRINKS = 4  # composing shortens UTF-8 at most threefold (three jamo to one syllable)
LOSSLESS_SPLITS = frozenset(("ByteLevel", "Digits", "Metaspace"))
UTF8_BYTES = frozenset((*range(0xC0), *range(0xC2, 0xF5)))


@dataclass(frozen=True, slots=True)
class TokenFloor:
    """A token covers at most `bytes_per_token` bytes of text; 0 means that no bound is proven.

    `dropped` are bytes that are missing from the vocabulary. They do not count, because encoding drops them.
    """

    bytes_per_token: int = 0
    dropped: bytes = b""

    def of(self, text: str) -> int:
        """Return the minimum number of tokens of `text`."""
        if not self.bytes_per_token:
            return 0
        return -(-len(text.encode(errors="surrogatepass").translate(None, self.dropped)) // self.bytes_per_token)


class _AddedToken(msgspec.Struct):
    lstrip: bool = False
    rstrip: bool = False


class _Model(msgspec.Struct):
    type: str = ""


class _Document(msgspec.Struct):
    """The parts of tokenizer.json that determine whether encoding can lose text, without the vocabulary."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    truncation: dict[str, Any] | None = None


def token_floor(path: Path, tokenizer: Tokenizer) -> TokenFloor:
    """Compute the bound for the tokenizer.json at `path`, which is loaded as `tokenizer`."""
    try:
        document = msgspec.json.decode(path.read_bytes(), type=_Document)
    except msgspec.MsgspecError:  # nothing is proven for an unknown format
        return TokenFloor()
    shrinks = _shrinks(document.normalizer)
    stripped = any(token.lstrip or token.rstrip for token in document.added_tokens)
    if document.model.type != "BPE" or document.truncation or stripped or not shrinks:
        return TokenFloor()
    if not _lossless(document.pre_tokenizer):
        return TokenFloor()
    raws = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    single = {raw[0] for raw in raws if len(raw) == 1}
    return TokenFloor(max(map(len, raws), default=0) * shrinks, bytes(sorted(UTF8_BYTES - single)))


def _shrinks(normalizer: dict[str, Any] | None) -> int:
    """Return the factor by which normalization may shorten a text, or 0 if it is unknown."""
    if normalizer is None:
        return 1
    kind = normalizer.get("type")
    if kind == "Sequence":
        product = 1
        for step in normalizer["normalizers"]:
            product *= _shrinks(step)
        return product
    if kind == "Replace":  # replacing a space with "▁" does not shorten: a token's "▁" counts as one byte
        return int(normalizer.get("pattern") == {"String": " "} and normalizer.get("content") == "▁")
    return {"NFC": NFC_SHRINKS, "Prepend": 1}.get(str(kind), 0)


def _lossless(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether every character of the text becomes part of a word."""
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(_lossless(step) for step in pre_tokenizer["pretokenizers"])
    return kind in LOSSLESS_SPLITS or (kind == "Split" and pre_tokenizer.get("behavior") != "Removed")
