"""Answers that must match a grammar: which tokens may come next, after those that an answer has.

A grammar is text of the library llguidance: a JSON schema, a regular expression or rules in Lark's form, which the
router has checked. Where an answer stands in it is a function of its tokens alone, so a request that moves to another
worker goes on there as it would have here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance
import numpy as np
import torch
from torch import Tensor

from diptych.common.errors import ModelError
from diptych.common.model.files import ModelFiles
from diptych.common.model.tokenizer import Tokenizer

COMPILED_KEPT = 64
VOCABULARY_TIMEOUT_S = 30.0
"""It takes three seconds for 262,144 tokens, and begins when the worker does."""
COMPILE_TIMEOUT_S = 5.0
"""Of one grammar: a second for a schema of two thousand members."""
WORD = 32
MAX_PROBLEM_CHARS = 300


class Constraint:
    """One answer's place in its grammar. Owned by whoever samples for the answer."""

    def __init__(self, matcher: llguidance.LLMatcher | None, vocab_size: int, problem: str = "") -> None:
        """`matcher` is None where a `problem` kept it from being made."""
        self._matcher, self._vocab_size = matcher, vocab_size
        self._num_taken = 0
        self.problem = problem
        """Why nothing more can come, or ""."""

    def allowed(self, output_token_ids: Sequence[int]) -> Tensor:
        """What may follow these tokens, which begin with those of the call before: a bit a token, 32 in each int32.

        An end token may come where the grammar is satisfied, and only such where nothing can be added. None may
        where there is a `problem`: tokens outside of the grammar, or a grammar beyond the library's bounds.
        """
        mask = np.zeros(-(-self._vocab_size // WORD), dtype=np.int32)
        if self._matcher is not None and not self.problem:
            self._follow(self._matcher, output_token_ids)
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():
                self.problem = _first_line(self._matcher.get_error())
                mask[:] = 0
        return torch.from_numpy(mask)

    def forced(self, output_token_ids: Sequence[int]) -> list[int]:
        """What must follow these tokens, as a tokenizer writes it; others may spell the same text. None at an end."""
        if self._matcher is None or self.problem:
            return []
        self._follow(self._matcher, output_token_ids)
        return [] if self._matcher.is_stopped() or self._matcher.is_error() else self._matcher.compute_ff_tokens()

    def num_allowed(self, output_token_ids: Sequence[int], guessed: Sequence[int]) -> int:
        """How many of the tokens `guessed`, none of which is an end, may follow these tokens one after the other."""
        if self._matcher is None or self.problem:
            return 0
        self._follow(self._matcher, output_token_ids)
        return 0 if self._matcher.is_stopped() else self._matcher.validate_tokens(list(guessed))

    def copy(self) -> Constraint:
        """The same place, to be followed on its own from here."""
        copied = Constraint(self._matcher and self._matcher.deep_copy(), self._vocab_size, self.problem)
        copied._num_taken = self._num_taken
        return copied

    def _follow(self, matcher: llguidance.LLMatcher, output_token_ids: Sequence[int]) -> None:
        for token_id in output_token_ids[self._num_taken :]:
            self._num_taken += 1
            if not matcher.is_stopped():  # behind an end, `ignore_eos` asks for more of the same
                matcher.consume_token(token_id)


def unsampled(constraint: Constraint | None, phase: str) -> tuple[str, str]:
    """In which phase, and why, a request fails for which the sampler found no token."""
    if constraint is not None and constraint.problem:
        return "grammar", constraint.problem
    return phase, "its logits are not finite numbers: nothing can be sampled"


class Grammars:
    """Compiles grammars for a model, on a thread of its own, and keeps those of late. Belongs to one engine.

    `vocab_size` is that of the logits, which may have more rows than the tokenizer has tokens.
    """

    def __init__(self, files: ModelFiles, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._vocabulary = self._thread.submit(_vocabulary, files, vocab_size)
        self._compiled: OrderedDict[str, Future[llguidance.LLMatcher]] = OrderedDict()

    def prepare(self, grammar: str) -> None:
        """Begin to compile what will be needed soon."""
        if grammar not in self._compiled:
            self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            if len(self._compiled) > COMPILED_KEPT:
                self._compiled.popitem(last=False)[1].cancel()
        self._compiled.move_to_end(grammar)

    def constraint(self, grammar: str) -> Constraint:
        """The beginning of an answer in `grammar`; one with a `problem` if that cannot be compiled, or not in time."""
        self.prepare(grammar)
        try:
            self._vocabulary.result(VOCABULARY_TIMEOUT_S)
            compiled = self._compiled[grammar].result(COMPILE_TIMEOUT_S)
        except TimeoutError:
            return Constraint(None, self._vocab_size, f"the grammar was not compiled within {COMPILE_TIMEOUT_S:.0f} s")
        except Exception as error:  # of the library, or for a model without an end token
            return Constraint(None, self._vocab_size, f"the grammar cannot be used: {_first_line(str(error))}")
        problem = compiled.get_error()
        return Constraint(compiled.deep_copy(), self._vocab_size, problem and _first_line(problem))

    def close(self) -> None:
        """End the thread once what it compiles is done."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._vocabulary.result(0), grammar, log_level=0)


class _Words:
    """A tokenizer as the library wants it: each token's bytes, and which tokens are no text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, eos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: bytes | str) -> list[int]:
        whole = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(whole, add_special_tokens=False)


def _first_line(message: str) -> str:
    """What is wrong, without the state of the parser that the library tells behind it."""
    return message.strip().split("\n", 1)[0][:MAX_PROBLEM_CHARS]


def _vocabulary(files: ModelFiles, vocab_size: int) -> llguidance.LLTokenizer:
    ends = files.eos_token_ids
    if not ends:
        raise ModelError("the model has no end token, so nothing could end an answer")
    words = _Words(Tokenizer.from_file(files.tokenizer), ends[0])
    return llguidance.LLTokenizer(words, n_vocab=vocab_size, eos_token=list(ends))  # type: ignore[arg-type]
