"""Cache of prompt tokens: for a prompt that extends an earlier one, only the new text is tokenized.

    <s>system ...<e>  <s>user ...<e>  <s>assistant ...<e>  <s>user ...
    └── segment ───┘  └── segment ─┘  └── segment ─────┘   └ tokenized, with the control token before it

A tokenizer splits a text at control tokens first, so the tokens up to a control token do not depend on the text after
it. A segment's key is the digest of all text up to its end. Each segment refers to the one before it.

For short prompts only the head is cached, such as a system message that many prompts share. The head ends after the
first control token that occurs for the second time, which is where the second message begins:

    <s>system ...<e>  <s>user ...
    └── head ──────────┘ tokenized, with the control token that ends the head
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from common.errors import InvalidRequest
from common.model_files import Tokenizer
from common.wire import TOKEN_BYTES

MIN_BYTES = 4096
"""Minimum size of a text for segments. For shorter texts only the head is cached."""
SEGMENT_BYTES = 1024
"""Minimum size of a segment. Tokenizing less text again is cheaper."""
MAX_KEPT_BYTES = 32 * 1024 * 1024
"""Maximum size of all segments, enough for eight million tokens."""
ENTRY_BYTES = 400
"""Memory of a segment in addition to its tokens, in bytes."""

_Mark = tuple[int, int, int]
"""Start and end of a control token in a text, in bytes, and its id."""
MIN_HEAD_CHARS = 64
"""Minimum length of a cached head. Looking up a shorter one takes as long as tokenizing it."""
MAX_HEADS = 256
"""Maximum number of cached heads (LRU)."""
_SEEN = array("I")
"""Placeholder for a head that occurred once. Its tokens are cached on the second use, as most never recur."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A cached segment. `before` is the digest of the text up to its beginning, or b"" for the first segment."""

    before: bytes
    tokens: array[int]

    @property
    def num_bytes(self) -> int:
        return ENTRY_BYTES + TOKEN_BYTES * len(self.tokens)


@dataclass(frozen=True, slots=True)
class _End:
    """End of a segment: after control token number `number` of the text, which begins at byte `mark`."""

    number: int
    mark: int
    digest: bytes


class PromptTokenCache:
    """Cache of prompt tokens for one tokenizer. Thread-safe.

    `texts` contain the control tokens that prompts may have: the source of the chat template. Above `max_bytes`, the
    least recently used segments are evicted.
    """

    def __init__(self, tokenizer: Tokenizer, texts: str, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._tokenizer, self._max_bytes = tokenizer, max_bytes
        marks = {name: token for name, token in tokenizer.cutting_tokens().items() if name in texts}
        self._marks = {name.encode(): token for name, token in marks.items()}
        self._heads = PromptHeadCache(tokenizer, marks) if marks else None
        self._segments: OrderedDict[bytes, _Segment] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Size of the cached segments."""
        return self._num_bytes

    def encode(self, text: str, salt: str = "", *, alone: bool = False) -> list[int]:
        """Return the token ids of a rendered prompt, like `Tokenizer.encode` without special tokens. Raises as it does.

        Prompts with another `salt` share no entries: otherwise response times would reveal cached prompts.
        """
        if self._heads is None:
            return self._tokenizer.encode(text, add_special_tokens=False, alone=alone)
        if len(text) < MIN_BYTES:
            return self._heads.encode(text, salt, alone=alone)
        try:
            data = text.encode()
        except UnicodeEncodeError:
            return self._tokenizer.encode(text, add_special_tokens=False)  # raises InvalidRequest
        marks = sorted(self._found(data))
        ends = _ends(data, marks, salt)
        for number in range(len(ends) - 1, -1, -1):
            if (known := self._tokens_up_to(ends[number].digest)) is not None:
                rest = self._tokenizer.encode(data[ends[number].mark :].decode(), add_special_tokens=False)
                self._keep(ends[number + 1 :], ends[number], rest, marks[ends[number].number :])
                known += rest[1:]
                return known
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        self._keep(ends, None, tokens, marks)
        return tokens

    # ------------------------------------------------------------ inside

    def _found(self, data: bytes) -> Iterable[_Mark]:
        """Yield the start, end and id of each control token."""
        for mark, token_id in self._marks.items():
            at = data.find(mark)
            while at >= 0:
                yield at, at + len(mark), token_id
                at = data.find(mark, at + len(mark))

    def _tokens_up_to(self, digest: bytes) -> list[int] | None:
        """Return the tokens of the text with this digest, or None if some are missing. Marks them as used."""
        chain: list[_Segment] = []
        with self._lock:
            while digest:
                segment = self._segments.get(digest)
                if segment is None:
                    return None
                self._segments.move_to_end(digest)  # the first segment last, because the others depend on it
                chain.append(segment)
                digest = segment.before
        tokens: list[int] = []
        for segment in reversed(chain):
            tokens += segment.tokens.tolist()
        return tokens

    def _keep(self, ends: Sequence[_End], after: _End | None, tokens: Sequence[int], marks: Sequence[_Mark]) -> None:
        """Cache the segments with these ends. `tokens` and `marks` begin with the control token of `after`, or at the
        beginning of the text if it is None."""
        packed = array("I", tokens)
        found = np.isin(np.frombuffer(packed, np.uint32), list(self._marks.values())).nonzero()[0].tolist()
        if [tokens[place] for place in found] != [token_id for _, _, token_id in marks]:
            return  # some text that looks like a control token is part of another token
        first = 0 if after is None else after.number
        places = [found[end.number - first] for end in ends]
        before, begun = (b"", 0) if after is None else (after.digest, 1)
        made = []
        for end, place in zip(ends, places, strict=True):
            made.append((end.digest, _Segment(before, packed[begun : place + 1])))
            before, begun = end.digest, place + 1
        with self._lock:
            for digest, segment in reversed(made):
                if digest not in self._segments:
                    self._segments[digest] = segment
                    self._num_bytes += segment.num_bytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._segments.popitem(last=False)[1].num_bytes


def _ends(data: bytes, marks: Sequence[_Mark], salt: str) -> list[_End]:
    """Return the ends of segments, each of which depends only on the salt and the text before it."""
    begun, ends = 0, []
    digest = blake2b(blake2b(salt.encode(errors="surrogatepass")).digest(), digest_size=16)
    for number, (mark, end, _) in enumerate(marks):
        if end - begun >= SEGMENT_BYTES:
            digest.update(data[begun:end])
            ends.append(_End(number, mark, digest.digest()))
            begun = end
    return ends


class PromptHeadCache:
    """Cache of the tokens of prompt heads. Thread-safe. `marks` are the control tokens that split texts, by name."""

    def __init__(self, tokenizer: Tokenizer, marks: Mapping[str, int]) -> None:
        self._tokenizer, self._marks, self._ids = tokenizer, marks, frozenset(marks.values())
        self._mark = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        self._heads: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, text: str, salt: str = "", *, alone: bool = False) -> list[int]:
        """Return the token ids of a rendered prompt, like `Tokenizer.encode` without special tokens. Raises as it does.

        Prompts with another `salt` share no entries: otherwise response times would reveal cached prompts.
        """
        num_marks, begin, end = self._cut(text)
        if end < MIN_HEAD_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=False, alone=alone)
        key = (salt, text[:end])
        with self._lock:
            if (head := self._heads.get(key)) is not None:
                self._heads.move_to_end(key)
        if head:
            try:
                rest = self._tokenizer.encode(text[begin:], add_special_tokens=False, alone=alone)
            except InvalidRequest:  # encode the whole text for an error with the right position
                return self._tokenizer.encode(text, add_special_tokens=False)
            return head.tolist() + rest[1:]
        tokens = self._tokenizer.encode(text, add_special_tokens=False, alone=alone)
        self._keep(key, _SEEN if head is None else self._head_of(text, tokens, num_marks))
        return tokens

    # ------------------------------------------------------------ inside

    def _cut(self, text: str) -> tuple[int, int, int]:
        """Return the number of control tokens in the head, and start and end of the last one; zeros without a head."""
        before: set[str] = set()
        for number, mark in enumerate(self._mark.finditer(text), 1):
            if mark[0] in before:
                return number, mark.start(), mark.end()
            before.add(mark[0])
        return 0, 0, 0

    def _head_of(self, text: str, tokens: list[int], num_marks: int) -> array[int]:
        """Return the tokens of a text up to its control token number `num_marks`."""
        places = [place for place, token in enumerate(tokens) if token in self._ids]
        if [tokens[place] for place in places] != [self._marks[mark] for mark in self._mark.findall(text)]:
            return _SEEN  # some text that looks like a control token is part of another token
        return array("I", tokens[: places[num_marks - 1] + 1])

    def _keep(self, key: tuple[str, str], head: array[int]) -> None:
        with self._lock:
            self._heads[key] = head
            self._heads.move_to_end(key)
            if len(self._heads) > MAX_HEADS:
                self._heads.popitem(last=False)
