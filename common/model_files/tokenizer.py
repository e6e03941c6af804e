"""Tokenizer of a model: text to token ids and back from a `tokenizer.json`, and the raw bytes of each token."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import tokenizers

from common.errors import InvalidRequest, ModelError

# Each batch has one text, so the library's thread pool would not help.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

LONG_CHARS = 4096
"""Minimum text length for encoding without the GIL. Shorter texts take up to 2 ms, less than reacquiring the GIL."""
LONG_TOKENS = 8192
"""Minimum number of ids for decoding without the GIL."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> list[str]:
    """Return the printable character of each byte in byte-level BPE vocabularies (GPT-2's encoder.py)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


CHAR_TO_BYTE = {char: byte for byte, char in enumerate(byte_alphabet())}


class Tokenizer:
    """Tokenizer of a model. Thread-safe; has no state of requests.

    `vocab_size` is the highest id plus one. A model may have more rows (padding), whose ids decode to "". `special_ids`
    are control tokens, which text omits by default.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        added = inner.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = max(inner.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        decoder = inner.decoder.__getstate__() if inner.decoder is not None else b""
        self._byte_level = b'"ByteLevel"' in decoder

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Load a tokenizer.json (`ModelFiles.tokenizer`). Raises ModelError if it cannot be read."""
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} is not a readable tokenizer.json ({error}): fetch or convert it again") from error
        # Truncation and padding of the file are settings of its training. transformers ignores both, too.
        inner.no_truncation()
        inner.no_padding()
        return cls(inner)

    @cached_property
    def highest_id(self) -> int:
        """Highest id of the vocabulary. The first access takes tens of milliseconds."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)

    def vocabulary(self) -> dict[int, str]:
        """Return all tokens by id. Takes tens of milliseconds."""
        return {token_id: token for token, token_id in self._inner.get_vocab(with_added_tokens=True).items()}

    def cutting_tokens(self) -> dict[str, int]:
        """Return the control tokens at which text can be split without changing its tokens.

        The text up to and including such a token has the same tokens in all texts that begin with it. Returns {} if
        the tokenizer does not guarantee this.
        """
        if self._inner.truncation is not None or self._inner.padding is not None:
            return {}
        added = self._inner.get_added_tokens_decoder()
        names = [token.content for token in added.values()]
        return {
            token.content: token_id
            for token_id, token in added.items()
            if token.special
            and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
            and not any(token.content in name and token.content != name for name in names)
        }

    def encode(self, text: str, *, add_special_tokens: bool = True, alone: bool = False) -> list[int]:
        """Return the token ids of `text`. Control tokens spelled out in it are encoded as such, for chat templates.

        `add_special_tokens` adds BOS (and EOS) where the model wants them: set it for plain prompts, not for rendered
        chat templates, which contain them. Set `alone` if no other thread needs the GIL. Raises InvalidRequest if the
        text is not valid Unicode.
        """
        _check_unicode(text)
        return self._ids(text, None, add_special_tokens, alone)

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the token ids of a pair of texts, joined by the model's template or concatenated if it has none.

        Raises InvalidRequest if a text is not valid Unicode.
        """
        _check_unicode(first)
        _check_unicode(second)
        return self._ids(first, second, True)

    def encode_cut(
        self,
        text: str,
        keep: int,
        *,
        second: str | None = None,
        side: Literal["left", "right"] = "right",
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Encode a text or a pair and truncate it to `keep` tokens, like transformers' `truncation=True`.


        Truncates on `side`; in a pair, truncates the longer text first. Keeps special tokens, unless there are `keep`
        or more of them. Raises InvalidRequest if a text is not valid Unicode.
        """
        texts = [text] if second is None else [text, second]
        for one in texts:
            _check_unicode(one)
        encodings = self._inner.encode_batch(texts, add_special_tokens=False)
        num_special = self._inner.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
        room = keep - num_special
        if room > 0:
            for encoding, length in zip(encodings, _cut_lengths([len(one) for one in encodings], room), strict=True):
                encoding.truncate(length, direction=side)
        pair = encodings[1] if second is not None else None
        whole = self._inner.post_process(encodings[0], pair, add_special_tokens)
        ids: list[int] = whole.ids
        return ids[-keep:] if side == "left" else ids[:keep]

    def _ids(self, text: str, second: str | None, add_special_tokens: bool, alone: bool = False) -> list[int]:
        # The library's `encode` and `decode` hold the GIL, its batch functions release it. Batches are also faster, as
        # they skip offsets, but reacquiring the GIL may take long when other threads want it.
        if not alone and len(text) + len(second or "") <= LONG_CHARS:
            encoding = self._inner.encode(text, second, add_special_tokens=add_special_tokens)
        else:
            given = text if second is None else (text, second)
            (encoding,) = self._inner.encode_batch_fast([given], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Invalid UTF-8 becomes U+FFFD; ids without a token are skipped."""
        if len(ids) <= LONG_TOKENS:
            return str(self._inner.decode(ids, skip_special_tokens=skip_special_tokens))
        (text,) = self._inner.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text (for a control token, its name), or b"" for an unknown id.

        Concatenated over a sequence, these are the UTF-8 text, even if a character is split between tokens.
        """
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            if token_id in self._added_ids or any(char not in CHAR_TO_BYTE for char in token):
                return token.encode()
            return bytes(CHAR_TO_BYTE[char] for char in token)
        byte = BYTE_TOKEN.fullmatch(token)
        if byte and token_id not in self._added_ids:
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode()

    def id_to_token(self, token_id: int) -> str:
        """Return the token as spelled in the vocabulary ("Ġhello", "▁hello"), or "" for an unknown id."""
        return self._inner.id_to_token(token_id) or ""

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as spelled in the vocabulary."""
        found: int | None = self._inner.token_to_id(token)
        return found


def _cut_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """Return the truncated lengths of one or two texts, `room` in total. Cuts the longer text first."""
    if sum(lengths) <= room:
        return list(lengths)
    if len(lengths) == 1:
        return [room]
    shorter = min(*lengths, room // 2)
    if lengths[0] <= lengths[1]:
        return [shorter, room - shorter]
    return [room - shorter, shorter]


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"Invalid text: lone surrogate at character {error.start}, must be valid Unicode."
        ) from error
