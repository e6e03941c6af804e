"""Grammars and masks that requests wait for, without blocking the engine's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from common.engine.sequences.sequence import WorkerSequence
from common.grammar import GRAMMAR_TIMEOUT_S, CompiledGrammar, Constraint, GrammarReady, Grammars

S = TypeVar("S", bound=WorkerSequence)
Failed = TypeVar("Failed", contravariant=True)


class Fail(Protocol[Failed]):
    """Drops a sequence and reports the reason to its router."""

    def __call__(self, sequence: Failed, phase: str, why: str, *, retryable: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class MaskReady:
    """Event: the mask of a sequence's next token was computed."""

    sequence: WorkerSequence
    constraint: Constraint


class PendingGrammars(Generic[S]):
    """Compiles grammars and masks for sequences. Used on the engine thread.

    `notify` delivers an event to that thread. `constrain` ends a sequence's wait. Without `grammars`, for example if
    the model has no end token, sequences must not use a grammar.
    """

    def __init__(
        self,
        grammars: Grammars | None,
        notify: Callable[[GrammarReady | MaskReady], None],
        constrain: Callable[[S, Constraint], None],
        fail: Fail[S],
    ) -> None:
        self._grammars, self._notify, self._constrain, self._fail = grammars, notify, constrain, fail

    def ask(self, sequence: S) -> None:
        """Start compiling a new sequence's grammar. If it is cached, the sequence is constrained immediately."""
        if self._grammars is None or not sequence.awaits_grammar:
            return
        grammar, salt = sequence.params.grammar, sequence.request.cache_salt
        compiled = self._grammars.get(grammar, lambda compiled: self._notify(GrammarReady(compiled)), salt)
        if compiled is not None:
            self._settle(sequence, compiled)

    def ready(self, compiled: CompiledGrammar, sequences: Iterable[S]) -> None:
        """Constrain or fail the `sequences` that wait for this grammar."""
        for sequence in list(sequences):
            if sequence.awaits_grammar and not sequence.awaits_mask and sequence.params.grammar == compiled.grammar:
                self._settle(sequence, compiled)

    def ask_mask(self, sequence: WorkerSequence, constraint: Constraint) -> None:
        """Request the mask of the sequence's next token from the mask thread."""
        assert self._grammars is not None  # it made the constraint
        sequence.awaits_mask = True
        on_ready = partial(self._notify, MaskReady(sequence, constraint))
        self._grammars.compute_mask(constraint, sequence.output_token_ids, on_ready)

    def on_mask(self, sequence: S, constraint: Constraint) -> None:
        """End a sequence's wait for a mask."""
        sequence.awaits_mask = False
        if sequence.awaits_grammar:
            self._constrain(sequence, constraint)

    def expire(self, sequence: S, now: float) -> None:
        """Fail a sequence that has waited too long."""
        if sequence.awaits_grammar and sequence.accepted_at < now - GRAMMAR_TIMEOUT_S:
            why = f"compiling the grammar took longer than {GRAMMAR_TIMEOUT_S:g} s"
            self._fail(sequence, "grammar", why, retryable=True)

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()

    def _settle(self, sequence: S, compiled: CompiledGrammar) -> None:
        if compiled.problem:
            self._fail(sequence, "grammar", compiled.problem, retryable=not compiled.is_final)
        elif sequence.has_output:  # parsing the whole output may take long
            self.ask_mask(sequence, compiled.constraint())
        else:
            self._constrain(sequence, compiled.constraint())
