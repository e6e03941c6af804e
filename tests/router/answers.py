"""Whether a text is an answer of a grammar, whole and nothing but it, over the tiny model's bytes."""

from __future__ import annotations

from diptych.common.model.files import resolve_model
from diptych.common.model.grammar import Grammars
from diptych.common.model.tiny import EOS, VOCAB_SIZE
from diptych.kernels import bits_allowed


def is_answer(grammar: str, text: str) -> bool:
    """Asks for each byte in turn, and for the end behind the last one."""
    grammars = Grammars(resolve_model("tiny-random"), VOCAB_SIZE)
    try:
        constraint, tokens = grammars.constraint(grammar), [*text.encode(), EOS]
        masks = (bits_allowed(constraint.allowed(tokens[:i]), VOCAB_SIZE) for i in range(len(tokens)))
        return all(bool(mask[token_id]) for mask, token_id in zip(masks, tokens, strict=True))
    finally:
        grammars.close()
