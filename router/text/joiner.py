"""The three ways in which tokenizers join tokens to text, one token at a time."""

from __future__ import annotations

import codecs

from common.model_files import Tokenizer
from router.text.token_table import TokenTable

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 16  # far more than the tokens of one character

new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class ByteJoiner:
    """Byte-level BPE: the bytes of all tokens are one stream of UTF-8."""

    held_chars = 0

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._held = b""  # the begin of a character

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
    """SentencePiece with byte fallback. A run of byte tokens waits for its end, as one bad byte spoils all of it."""

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
    """Any other decoder: a token's text is the text that it adds to the decode of the few tokens before it.

    As in text-generation-inference, text that ends in U+FFFD counts as an incomplete character and is held.
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
