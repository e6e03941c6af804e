"""Incremental detokenization. Emitted text is final, and all of it together equals the full decode."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple, Protocol

from common.model_files import BYTE_TOKEN, Tokenizer

TABLES_KEPT = 4
"""Number of cached token tables, one per tokenizer."""
TEXTS_KEPT = 65_536
"""Number of cached token texts for log probabilities, about 300 bytes each."""
REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 16  # far more than the tokens of one character
new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


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
    """A single token, for log probabilities. `token` contains U+FFFD if its bytes are only part of a character."""

    token: str
    byte_values: tuple[int, ...]


class TokenTable:
    """Bytes of each token, computed on first use. Thread-safe.

    `strips_leading_space`: decoding drops the space that the tokenizer inserts before every text.
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
        """Return the bytes of a token (for a control token, its name), or b"" for an unused id."""
        if not 0 <= token_id < len(self._raw):
            return b""
        found = self._raw[token_id]
        if found is None:
            found = self._raw[token_id] = self._tokenizer.token_bytes(token_id)
        return found

    def whole(self, token_id: int) -> str | None:
        """Return the text of a token, or None if its bytes are not whole characters."""
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
        """Return the token's text, or its bytes for partial characters, which would all be named U+FFFD otherwise.

        Cached, because an answer may request twenty names per token.
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
    """Return the cached table of this tokenizer object."""
    return TokenTable(tokenizer)


def _joining(tokenizer: Tokenizer) -> Joining:
    """Detect the scheme by decoding the two bytes of "é", which each scheme joins differently."""
    if _decodes(tokenizer, ["Ã", "©"], "é"):
        return Joining.BYTES
    if _decodes(tokenizer, ["<0xC3>", "<0xA9>"], "é"):
        return Joining.RUNS
    return Joining.CONTEXT


def _decodes(tokenizer: Tokenizer, tokens: list[str], text: str) -> bool:
    ids = [tokenizer.token_to_id(token) for token in tokens]
    known = [token_id for token_id in ids if token_id is not None]
    return len(known) == len(ids) and tokenizer.decode(known, skip_special_tokens=False) == text


class Joiner(Protocol):
    """Converts a stream of tokens to final text."""

    @property
    def held_chars(self) -> int:
        """Number of complete characters that have not been emitted yet."""
        ...

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """Incremental detokenizer of one sequence. Emits each character once it is complete, in constant time per token.

    The text from `push` and `flush` together equals `tokenizer.decode` of all ids. Control tokens are omitted unless
    `skip_special_tokens` is False or they are in `kept`. Unused ids add nothing.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()
    ) -> None:
        table = token_table(tokenizer)
        self._table = table
        self._skipped = tokenizer.special_ids - kept if skip_special_tokens else frozenset[int]()
        self._joiner = _joiner(tokenizer, table)
        self._given = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Return the text that became final."""
        if len(token_ids) == 1:
            token_id = token_ids[0]
            shown = token_id not in self._skipped and self._table.raw(token_id)
            return self._count(self._joiner.push(token_id) if shown else "")
        pieces = [
            self._joiner.push(token_id)
            for token_id in token_ids
            if token_id not in self._skipped and self._table.raw(token_id)
        ]
        return self._count("".join(pieces))

    def flush(self) -> str:
        """Return the held text at the end of the sequence. An incomplete character becomes U+FFFD."""
        return self._count(self._joiner.flush())

    @property
    def position(self) -> int:
        """Position at which the next token's text begins. Within a character, the position of that character."""
        return self._given + self._joiner.held_chars

    def _count(self, text: str) -> str:
        self._given += len(text)
        return text


def _joiner(tokenizer: Tokenizer, table: TokenTable) -> Joiner:
    if table.joining is Joining.BYTES:
        return ByteJoiner(table)
    if table.joining is Joining.RUNS:
        return RunJoiner(table)
    return ContextJoiner(tokenizer)


class ByteJoiner:
    """Joiner for byte-level BPE: the bytes of all tokens are one UTF-8 stream."""

    held_chars = 0

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._held = b""  # the beginning of an incomplete character

    def push(self, token_id: int) -> str:
        if not self._held and (whole := self._table.whole(token_id)) is not None:
            return whole
        return self._decode(self._table.raw(token_id))

    def flush(self) -> str:
        return self._decode(b"", end=True)

    def _decode(self, data: bytes, *, end: bool = False) -> str:
        data = self._held + data
        text, num_bytes = codecs.utf_8_decode(data, "replace", end)
        self._held = data[num_bytes:]
        return text


class RunJoiner:
    """Joiner for SentencePiece with byte fallback. Holds a run of byte tokens until its end: one invalid byte
    invalidates the whole run."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._run = bytearray()
        self._counter = new_utf8_decoder("replace")
        self._at_start = table.strips_leading_space
        self.held_chars = 0

    def push(self, token_id: int) -> str:
        raw = self._table.raw(token_id)
        if self._table.is_byte(token_id):
            self._run += raw
            self.held_chars += len(self._counter.decode(raw))
            return ""
        return self._stripped(self._end_run() + raw.decode(errors="replace"))

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        self._counter.reset()
        self.held_chars = 0
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        if not self._at_start or not text:
            return text
        self._at_start = False
        return text.removeprefix(" ")


class ContextJoiner:
    """Joiner for any other decoder: emits the text that a token adds to the decoded text of a few tokens before it.

    As in text-generation-inference, text that ends with U+FFFD is considered incomplete and held.
    """

    held_chars = 0

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._added()
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        self._before, self._held = self._held, []
        return text

    def flush(self) -> str:
        text = self._added()
        self._before, self._held = [*self._before, *self._held], []
        return text

    def _added(self) -> str:
        before = self._tokenizer.decode(self._before, skip_special_tokens=False)
        return self._tokenizer.decode(self._before + self._held, skip_special_tokens=False)[len(before) :]
