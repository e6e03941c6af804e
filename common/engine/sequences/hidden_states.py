"""Where the hidden states are kept that a draft head reads in a later step than they were made in. Pure.

The head's KV of a token needs the hidden state of the token before it. Within a chunk that is the row before; the first
row of a chunk needs what the step before kept: the state of the last token of a prompt's chunk, or, as it is open which
draft tokens will be accepted, that of each row of a decoding sequence. Every step of the model reads places before it
writes them, so a sequence's next rows take over its places, even while the step before is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from common.engine.models import NO_PLACE
from common.engine.sequences.sequence import WorkerSequence

if TYPE_CHECKING:
    from common.engine.models.draft_heads import DraftingModel


class RowPlaces(NamedTuple):
    """Where a chunk reads the state before its first token, and keeps those of its last token and its draft tokens."""

    before: int
    kept: Sequence[int]


NO_PLACES = RowPlaces(NO_PLACE, (NO_PLACE,))
"""A chunk of one row has these for a model without a draft head."""


class HiddenPlaces:
    """Belongs to the engine's thread. Places may run out: what is not kept costs draft tokens, and no more."""

    def __init__(self, num_places: int) -> None:
        self._free = list(range(num_places))
        self._held: dict[WorkerSequence, dict[int, int]] = {}

    def __len__(self) -> int:
        """Sequences that hold places."""
        return len(self._held)

    def take(self, sequence: WorkerSequence, start: int, num_tokens: int, num_drafts: int = 0) -> RowPlaces:
        """Places for `num_tokens` tokens of a sequence from `start` on, and so many draft tokens behind them."""
        held = self._held.pop(sequence, {})
        before = held.get(start - 1, NO_PLACE)
        self._free += reversed(held.values())
        kept = [self._free.pop() for _ in range(min(1 + num_drafts, len(self._free)))]
        if kept:
            self._held[sequence] = dict(enumerate(kept, start + num_tokens - 1))
        return RowPlaces(before, kept + [NO_PLACE] * (1 + num_drafts - len(kept)))

    def at(self, sequence: WorkerSequence, position: int) -> int:
        """Where the hidden state of the sequence's token at `position` is, or NO_PLACE."""
        return self._held.get(sequence, {}).get(position, NO_PLACE)

    def retain(self, is_here: Callable[[WorkerSequence], bool]) -> None:
        """Forget sequences that are not here any more."""
        for sequence in [each for each in self._held if not is_here(each)]:
            self._free += self._held.pop(sequence).values()


def hidden_places(model: DraftingModel | None) -> HiddenPlaces | None:
    """The places of a model, all free; None for a model without a draft head."""
    return None if model is None else HiddenPlaces(model.num_places)
