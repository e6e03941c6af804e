"""The bytes of each token and the way a tokenizer joins tokens, found once and shared by all requests."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from common.model_files import BYTE_TOKEN, Tokenizer

TABLES_KEPT = 4
"""One for each tokenizer: a router serves few models."""
TEXTS_KEPT = 65_536
"""Token texts kept for log-probabilities, about 300 bytes each."""


class Joining(Enum):
    """How decoding turns tokens into text.

    BYTES     byte-level BPE: the tokens' bytes, concatenated, are the UTF-8 text
    RUNS      SentencePiece with byte fallback: tokens are text, except byte tokens; each unbroken run of those is
              decoded as a whole, to one U+FFFD per byte if it is not UTF-8
    CONTEXT   anything else: a token's text may depend on the tokens before it
    """

    BYTES = "bytes"
    RUNS = "runs"
    CONTEXT = "context"


class TokenText(NamedTuple):
    """One token alone, for log-probabilities: `token` has U+FFFD where its bytes are only part of a character."""

    token: str
    byte_values: tuple[int, ...]


class TokenTable:
    """The bytes of each token, filled on first use. Threads may share it.

    `strips_leading_space`: decoding drops the one space that the tokenizer puts before every text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._raw: list[bytes | None] = [None] * tokenizer.vocab_size
        self._whole: dict[int, str | None] = {}
        self._names: dict[int, str] = {}
        self.text = lru_cache(maxsize=TEXTS_KEPT)(self._text)
        self.joining = _joining(tokenizer)
        self.strips_leading_space = self.joining is Joining.RUNS and _decodes(tokenizer, ["▁"], "")

    def raw(self, token_id: int) -> bytes:
        """The bytes of a token (a control token's are its name); b"" for an id without a token."""
        if not 0 <= token_id < len(self._raw):
            return b""
        found = self._raw[token_id]
        if found is None:
            found = self._raw[token_id] = self._tokenizer.token_bytes(token_id)
        return found

    def whole(self, token_id: int) -> str | None:
        """The text of a token whose bytes are whole characters; None for one that has part of a character."""
        try:
            return self._whole[token_id]
        except KeyError:
            pass
        try:
            text: str | None = self.raw(token_id).decode()
        except UnicodeDecodeError:
            text = None
        if 0 <= token_id < len(self._raw):
            self._whole[token_id] = text
        return text

    def is_byte(self, token_id: int) -> bool:
        """Whether this is one of the 256 byte tokens ("<0x0A>") of a vocabulary with byte fallback."""
        return len(self.raw(token_id)) == 1 and BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id)) is not None

    def name(self, token_id: int) -> str:
        """The token's text, or its bytes for part of a character: as U+FFFD, two parts would have one name.

        An answer may ask for twenty of them with each token, so they are kept.
        """
        try:
            return self._names[token_id]
        except KeyError:
            pass
        text, raw = self.whole(token_id), self.raw(token_id)
        if text is None or "\ufffd" in text:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        if 0 <= token_id < len(self._raw):
            self._names[token_id] = text
        return text

    def _text(self, token_id: int) -> TokenText:
        raw = self.raw(token_id)
        return TokenText(raw.decode(errors="replace"), tuple(raw))


@lru_cache(maxsize=TABLES_KEPT)
def token_table(tokenizer: Tokenizer) -> TokenTable:
    """The table of this tokenizer object, made on first use."""
    return TokenTable(tokenizer)


def _joining(tokenizer: Tokenizer) -> Joining:
    """Recognised by the decode of the two bytes of "é", which no other scheme joins."""
    if _decodes(tokenizer, ["Ã", "©"], "é"):
        return Joining.BYTES
    if _decodes(tokenizer, ["<0xC3>", "<0xA9>"], "é"):
        return Joining.RUNS
    return Joining.CONTEXT


def _decodes(tokenizer: Tokenizer, tokens: list[str], text: str) -> bool:
    ids = [tokenizer.token_to_id(token) for token in tokens]
    known = [token_id for token_id in ids if token_id is not None]
    return len(known) == len(ids) and tokenizer.decode(known, skip_special_tokens=False) == text
