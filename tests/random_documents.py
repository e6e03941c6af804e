"""Random documents drawn from a grammar, and whether a text is one: token by token, as workers generate an answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import llguidance
import numpy as np

from common.grammar.vocabulary import build_vocabulary
from common.model_files.files import ModelFiles
from common.model_files.tokenizer import Tokenizer

MAX_TOKENS = 4_000
"""Of a document. A longer one is given up: it is a beginning, of which nothing can be said."""
CLOSING, UNLIKELY = b'"}]', b" \n\t\\"
"""Bytes that become likelier as a document grows, and bytes that are unlikely, as are those outside of ASCII."""
RARE, LONG = 0.02, 1e-5
"""How likely unlikely bytes are, and tokens of several bytes: where text is forced, only those may come."""


@dataclass(slots=True)
class Documents:
    """Walks through grammars, mostly with tokens of one byte; masks are those of the whole vocabulary."""

    files: ModelFiles
    vocabulary: llguidance.LLTokenizer = field(init=False)
    _text_of: list[bytes] = field(init=False)
    _token_of: dict[int, int] = field(init=False)
    _weights: np.ndarray = field(init=False)
    _closing: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        files = self.files
        self.vocabulary = build_vocabulary(files.tokenizer, files.eos_token_ids, files.vocab_size)
        tokenizer = Tokenizer.from_file(files.tokenizer)
        special = set(tokenizer.special_ids)
        self._text_of = [b"" if i in special else tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self._token_of = {text[0]: token for token, text in enumerate(self._text_of) if len(text) == 1}
        self._weights, self._closing = np.zeros(files.vocab_size), np.zeros(files.vocab_size, dtype=bool)
        for token, text in enumerate(self._text_of):
            if text:
                is_likely = text[0] < 128 and text[0] not in UNLIKELY
                self._weights[token] = LONG if len(text) > 1 else 1.0 if is_likely else RARE
                self._closing[token] = text[0] in CLOSING
        for token in files.eos_token_ids:
            self._weights[token], self._closing[token] = 1.0, True

    def draw(self, matcher: llguidance.LLMatcher, rng: random.Random) -> bytes | None:
        """A random document of a grammar; None for one that did not end. Raises ValueError where nothing can follow."""
        matcher, text = matcher.deep_copy(), bytearray()
        mask = np.zeros(-(-self.files.vocab_size // 32), dtype=np.int32)
        for length in range(MAX_TOKENS):
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher.is_error():
                raise ValueError(matcher.get_error()[:200])
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.files.vocab_size]
            weights = self._weights * allowed
            weights[self._closing] *= 1 + length / 20
            if not (total := weights.sum()):
                raise ValueError(f"no token can follow {bytes(text[-60:])!r}")
            token = int(np.searchsorted(np.cumsum(weights), rng.random() * total, side="right"))
            if token in self.files.eos_token_ids:
                return bytes(text)
            matcher.consume_token(token)
            text += self._text_of[token]
        return None

    def accepts(self, matcher: llguidance.LLMatcher, text: bytes) -> bool:
        """Whether a text is a whole document of a grammar."""
        matcher = matcher.deep_copy()
        tokens: Sequence[int] = [self._token_of[byte] for byte in text]
        return matcher.try_consume_tokens(list(tokens)) == len(tokens) and matcher.is_accepting()
