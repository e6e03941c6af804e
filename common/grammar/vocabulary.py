"""Vocabulary for compiling grammars, and the limits of the library's work on one grammar.

Does not load torch: the router compiles grammars too, to refuse those that workers could not use.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import llguidance

from common.errors import ModelError
from common.model_files import Tokenizer

MAX_ITEMS_IN_ROW = 20_000
"""Parser limit. The library's default of 2,000 refuses a schema of 500 optional members. Bounds the time of a step."""
STEP_LEXER_FUEL = 100_000
"""Lexer limit for the mask of one token, half of the library's default: at most 20 ms for slow grammars."""
MAX_LEXER_STATES = 32_768
"""Lexer limit of all answers of one grammar: 64 MiB at about 2 KB per state. A bounded string needs one per
character."""
MASK_BITS = 32
"""Tokens per integer of a mask, as the library writes masks."""
MAX_PROBLEM_CHARS = 400
"""Maximum length of a parser error that a client sees."""
APPENDED = re.compile(r"\n( +\d+ \||<state>)")
"""Where the library's error begins to quote the grammar or its parser state."""


def limits() -> llguidance.LLParserLimits:
    """Return the limits of every grammar, equal in all processes, so that all refuse the same grammars."""
    return llguidance.LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        step_lexer_fuel=STEP_LEXER_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )


def build_vocabulary(tokenizer: Path, ends: Sequence[int], vocab_size: int) -> llguidance.LLTokenizer:
    """Build the library's vocabulary of a tokenizer.json, padded or cut to `vocab_size`, the rows of the logits.

    `ends` are the tokens that end an answer. Holds the GIL for 1.3 s with 262,144 tokens. Raises ModelError.
    """
    sampled_ends = [token_id for token_id in ends if token_id < vocab_size]
    if not sampled_ends:
        raise ModelError("the model has no end-of-sequence token, so an answer could never end")
    words = _TokenizerAdapter(Tokenizer.from_file(tokenizer), sampled_ends[0], vocab_size)
    vocabulary = llguidance.LLTokenizer(words, eos_token=sampled_ends)  # type: ignore[arg-type]
    if vocabulary.vocab_size != vocab_size:
        raise ModelError(
            f"the grammar vocabulary has {vocabulary.vocab_size} tokens, but the logits have {vocab_size} rows"
        )
    return vocabulary


def compile_grammar(vocabulary: llguidance.LLTokenizer, grammar: str) -> tuple[llguidance.LLMatcher, str]:
    """Return a matcher at the beginning of an answer, and the grammar's problem or "".

    Also computes the first tokens of an answer: for some grammars these cost more than compiling.
    """
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits())
    if not matcher.is_error():
        first = matcher.deep_copy()  # shares the automaton, but not the position or the error
        first.compute_bitmask()
        if not first.is_error():
            first.compute_ff_tokens()
        return matcher, brief(first.get_error())
    return matcher, brief(matcher.get_error())


def brief(message: str) -> str:
    """Return the library's error in one line, without the grammar that it quotes."""
    return " ".join(APPENDED.split(message.strip(), 1)[0].split())[:MAX_PROBLEM_CHARS]


class _TokenizerAdapter:
    """Adapter of a tokenizer to the library's interface: the bytes of each token, and the special tokens.

    The number of tokens is the size of the library's masks. Rows of the logits without a token have no bytes and are
    never allowed. Tokens without a row cannot be sampled, so they are left out.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int, vocab_size: int) -> None:
        self._tokenizer, self.eos_token_id, self._vocab_size = tokenizer, eos_token_id, vocab_size
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self._special = frozenset(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        self.special_token_ids = sorted(self._special)

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the tokens of a text that the grammar forces. Text that spells a special token is still text."""
        whole = text.decode(errors="replace") if isinstance(text, bytes) else text
        token_ids = self._tokenizer.encode(whole, add_special_tokens=False)
        if max(token_ids, default=0) < self._vocab_size and self._special.isdisjoint(token_ids):
            return token_ids
        return list(chain.from_iterable(map(self._as_text, token_ids)))

    def _as_text(self, token_id: int) -> tuple[int, ...]:
        return self._spelled(token_id) if token_id >= self._vocab_size or token_id in self._special else (token_id,)

    def _spelled(self, token_id: int) -> tuple[int, ...]:
        """Spell a token with the longest ones that have a row and are not special, from left to right."""
        left, found = self._tokenizer.token_bytes(token_id), list[int]()
        while left:
            size = next((size for size in range(len(left), 0, -1) if left[:size] in self._with_row), 0)
            if not size:
                break  # not spellable: the library then allows no token, and the request fails
            found.append(self._with_row[left[:size]])
            left = left[size:]
        return tuple(found)

    @cached_property
    def _with_row(self) -> dict[bytes, int]:
        return {text: token_id for token_id, text in enumerate(self.tokens) if token_id not in self._special}
