"""Tokens of how short prompts begin: a system message that many prompts share is tokenised once.

    <s>system ...<e>  <s>user ...
    └── head ──────────┘ tokenised, with the control token that ends the head

A text is cut behind the first control token that stood in it before: where its second message begins. Why tokens up to
there do not depend on what follows: `known_prefixes.py`.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping

from common.errors import InvalidRequest
from common.model_files import Tokenizer

MIN_CHARS = 64
"""A shorter head is tokenised as quickly as it is found."""
MAX_HEADS = 256
"""Those that were used last are kept."""

_SEEN = array("I")
"""The tokens of a head that came once: most first messages never come again."""


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
        if end < MIN_CHARS:
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
