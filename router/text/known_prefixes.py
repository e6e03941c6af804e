"""Tokens of prompts that were tokenised before: of a prompt that continues one, only the rest is tokenised.

    <s>system ...<e>  <s>user ...<e>  <s>assistant ...<e>  <s>user ...
    └── segment ───┘  └── segment ─┘  └── segment ─────┘   └ tokenised, with the control token before it

A tokenizer cuts a text at control tokens before it does anything else, so the tokens up to one do not depend on what
follows. A segment is known by the digest of all text up to its end, and leads to the segment before it.

Of a short prompt only its head is known, such as a system message that many prompts share. The text is cut after the
first control token that occurred in it before, which is where its second message begins:

    <s>system ...<e>  <s>user ...
    └── head ──────────┘ tokenised, with the control token that ends the head
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
"""Of shorter texts only the head is known."""
SEGMENT_BYTES = 1024
"""A segment has at least so many: for fewer it pays to tokenise them again."""
MAX_KEPT_BYTES = 32 * 1024 * 1024
"""What all segments together may take: eight million tokens."""
ENTRY_BYTES = 400
"""What a segment takes beside its tokens."""

_Mark = tuple[int, int, int]
MIN_HEAD_CHARS = 64
"""A shorter head is tokenised as quickly as it is found."""
MAX_HEADS = 256
"""Those that were used last are kept."""
_SEEN = array("I")
"""The tokens of a head that came once: most first messages never come again."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """`before`: the digest of the text up to its begin, b"" for the first one."""

    before: bytes
    tokens: array[int]

    @property
    def num_bytes(self) -> int:
        return ENTRY_BYTES + TOKEN_BYTES * len(self.tokens)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a segment in a text: behind control token number `number`, which begins at byte `mark`."""

    number: int
    mark: int
    digest: bytes


class KnownPrefixes:
    """Safe to share between threads. `texts` show which control tokens prompts have: the source of a chat template.

    At most `max_bytes` are kept; the segments that were not used for longest go first.
    """

    def __init__(self, tokenizer: Tokenizer, texts: str, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._tokenizer, self._max_bytes = tokenizer, max_bytes
        marks = {name: token for name, token in tokenizer.cutting_tokens().items() if name in texts}
        self._marks = {name.encode(): token for name, token in marks.items()}
        self._heads = KnownHeads(tokenizer, marks) if marks else None
        self._segments: OrderedDict[bytes, _Segment] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """The size of all that is kept."""
        return self._num_bytes

    def encode(self, text: str, salt: str = "", *, alone: bool = False) -> list[int]:
        """The token ids of a rendered prompt, as `Tokenizer.encode` without special tokens gives them; so it raises.

        Prompts of another `salt` find nothing of it: what is known shows in the time.
        """
        if self._heads is None:
            return self._tokenizer.encode(text, add_special_tokens=False, alone=alone)
        if len(text) < MIN_BYTES:
            return self._heads.encode(text, salt, alone=alone)
        try:
            data = text.encode()
        except UnicodeEncodeError:
            return self._tokenizer.encode(text, add_special_tokens=False)  # which raises
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
        """Begin, end and id of each control token."""
        for mark, token_id in self._marks.items():
            at = data.find(mark)
            while at >= 0:
                yield at, at + len(mark), token_id
                at = data.find(mark, at + len(mark))

    def _tokens_up_to(self, digest: bytes) -> list[int] | None:
        """The tokens of the text with this digest; None if they are not all known. They count as used."""
        chain: list[_Segment] = []
        with self._lock:
            while digest:
                segment = self._segments.get(digest)
                if segment is None:
                    return None
                self._segments.move_to_end(digest)  # the first segment last: without it the others are of no use
                chain.append(segment)
                digest = segment.before
        tokens: list[int] = []
        for segment in reversed(chain):
            tokens += segment.tokens.tolist()
        return tokens

    def _keep(self, ends: Sequence[_End], after: _End | None, tokens: Sequence[int], marks: Sequence[_Mark]) -> None:
        """Remember the segments with these ends. `tokens` and `marks` begin with the control token of `after`, or are
        those of the whole text."""
        packed = array("I", tokens)
        found = np.isin(np.frombuffer(packed, np.uint32), list(self._marks.values())).nonzero()[0].tolist()
        if [tokens[place] for place in found] != [token_id for _, _, token_id in marks]:
            return  # what looks like a control token is part of another one
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
    """The ends of segments, each of which depends on the salt and the text before it alone."""
    begun, ends = 0, []
    digest = blake2b(blake2b(salt.encode(errors="surrogatepass")).digest(), digest_size=16)
    for number, (mark, end, _) in enumerate(marks):
        if end - begun >= SEGMENT_BYTES:
            digest.update(data[begun:end])
            ends.append(_End(number, mark, digest.digest()))
            begun = end
    return ends


class KnownHeads:
    """Safe to share between threads. `marks` are the control tokens at which texts are cut, by their names."""

    def __init__(self, tokenizer: Tokenizer, marks: Mapping[str, int]) -> None:
        self._tokenizer, self._marks, self._ids = tokenizer, marks, frozenset(marks.values())
        self._mark = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        self._heads: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, text: str, salt: str = "", *, alone: bool = False) -> list[int]:
        """The token ids of a rendered prompt, as `Tokenizer.encode` without special tokens gives them; so it raises.

        Prompts of another `salt` find nothing of it: what is known shows in the time.
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
            except InvalidRequest:  # it says where: in the whole text
                return self._tokenizer.encode(text, add_special_tokens=False)
            return head.tolist() + rest[1:]
        tokens = self._tokenizer.encode(text, add_special_tokens=False, alone=alone)
        self._keep(key, _SEEN if head is None else self._head_of(text, tokens, num_marks))
        return tokens

    # ------------------------------------------------------------ inside

    def _cut(self, text: str) -> tuple[int, int, int]:
        """How many control tokens the head has, and begin and end of the last of them; zeros without a head."""
        before: set[str] = set()
        for number, mark in enumerate(self._mark.finditer(text), 1):
            if mark[0] in before:
                return number, mark.start(), mark.end()
            before.add(mark[0])
        return 0, 0, 0

    def _head_of(self, text: str, tokens: list[int], num_marks: int) -> array[int]:
        """The tokens of a text up to so many control tokens."""
        places = [place for place, token in enumerate(tokens) if token in self._ids]
        if [tokens[place] for place in places] != [self._marks[mark] for mark in self._mark.findall(text)]:
            return _SEEN  # what looks like a control token is part of another one
        return array("I", tokens[: places[num_marks - 1] + 1])

    def _keep(self, key: tuple[str, str], head: array[int]) -> None:
        with self._lock:
            self._heads[key] = head
            self._heads.move_to_end(key)
            if len(self._heads) > MAX_HEADS:
                self._heads.popitem(last=False)
