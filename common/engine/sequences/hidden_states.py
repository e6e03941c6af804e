"""Slots for hidden states that a draft head reads in a later step. Pure.

The head's KV of a token requires the hidden state of the preceding token. Within a chunk that is the preceding row. The
first row of a chunk uses a state kept by the previous step: that of a prompt chunk's last token, or, because it is
unknown which draft tokens will be accepted, that of each row of a decoding sequence. Every step reads slots before it
writes them, so a sequence's next rows can reuse its slots while the previous step is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from common.engine.models import NO_SLOT
from common.engine.sequences.sequence import WorkerSequence

if TYPE_CHECKING:
    from common.engine.models.draft_heads import DraftingModel


class RowSlots(NamedTuple):
    """Slots of a chunk: where to read the state before its first token, and to keep those of its last and drafts."""

    before: int
    kept: Sequence[int]


NO_SLOTS = RowSlots(NO_SLOT, (NO_SLOT,))
"""Value for a one-row chunk of a model without a draft head."""


class HiddenStateSlots:
    """Slot allocator. Not thread-safe: use only from the engine thread.

    When all slots are in use, states are dropped, which only disables drafting for those tokens.
    """

    def __init__(self, num_places: int) -> None:
        self._free = list(range(num_places))
        self._held: dict[WorkerSequence, dict[int, int]] = {}

    def __len__(self) -> int:
        """Return the number of sequences that hold slots."""
        return len(self._held)

    def take(self, sequence: WorkerSequence, start: int, num_tokens: int, num_drafts: int = 0) -> RowSlots:
        """Allocate slots for `num_tokens` tokens of a sequence from position `start`, plus `num_drafts` drafts."""
        held = self._held.pop(sequence, {})
        before = held.get(start - 1, NO_SLOT)
        self._free += reversed(held.values())
        kept = [self._free.pop() for _ in range(min(1 + num_drafts, len(self._free)))]
        if kept:
            self._held[sequence] = dict(enumerate(kept, start + num_tokens - 1))
        return RowSlots(before, kept + [NO_SLOT] * (1 + num_drafts - len(kept)))

    def at(self, sequence: WorkerSequence, position: int) -> int:
        """Return the slot of the hidden state at `position` of the sequence, or NO_SLOT."""
        return self._held.get(sequence, {}).get(position, NO_SLOT)

    def retain(self, is_here: Callable[[WorkerSequence], bool]) -> None:
        """Release the slots of sequences for which `is_here` returns False."""
        for sequence in [each for each in self._held if not is_here(each)]:
            self._free += self._held.pop(sequence).values()


def hidden_state_slots(model: DraftingModel | None) -> HiddenStateSlots | None:
    """Create the slots of a model; None for a model without a draft head."""
    return None if model is None else HiddenStateSlots(model.num_places)
