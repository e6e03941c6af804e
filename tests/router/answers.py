"""Whether a text is an answer of a grammar, whole and nothing but it, over the tiny model's bytes."""

from __future__ import annotations

import functools

from common.grammar.checks import GrammarChecks
from common.grammar.grammars import Grammars
from common.model_files.resolve import resolve_model
from common.model_files.tiny import EOS, VOCAB_SIZE
from kernels.plain.reference import bits_allowed
from router.text.answer_grammar import bounded, without_position


def checked(grammar: str) -> str:
    """The grammar, if a router would send it to workers. Raises ValueError with what it would say instead."""
    problem = without_position(_checks().submit(bounded(grammar)).result(60).problem)
    if problem:
        raise ValueError(problem)
    return grammar


@functools.cache
def _checks() -> GrammarChecks:
    return GrammarChecks(resolve_model("tiny-random"), VOCAB_SIZE)


@functools.cache
def _grammars() -> Grammars:
    return Grammars(resolve_model("tiny-random"), VOCAB_SIZE, _checks())


def is_answer(grammar: str, text: str) -> bool:
    """Asks for each byte in turn, and for the end behind the last one."""
    constraint, tokens = _grammars().constraint(grammar), [*text.encode(), EOS]
    masks = (bits_allowed(constraint.allowed(tokens[:i]), VOCAB_SIZE) for i in range(len(tokens)))
    return all(bool(mask[token_id]) for mask, token_id in zip(masks, tokens, strict=True))


def close() -> None:
    """After the last question of a session."""
    if _checks.cache_info().currsize:
        _grammars().close()
