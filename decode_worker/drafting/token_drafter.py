"""What drafts tokens by computing them: a draft model, or a head of the served model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from common.engine.kv import BlockCounts
from decode_worker.drafting.row_costs import RowCosts

if TYPE_CHECKING:
    from decode_worker.rules import DecodeRules
    from decode_worker.sequence import DecodeSequence


class TokenDrafter(Protocol):
    """Belongs to the engine's thread; no step may be in flight while it computes."""

    @property
    def costs(self) -> RowCosts:
        """The time of its steps, by their rows."""

    @property
    def counts(self) -> BlockCounts:
        """How its own blocks are used; it has none if its KV lies in the served model's."""

    @property
    def token_s(self) -> float:
        """Seconds that a token takes to catch up with; 0 while nothing is known."""

    def is_ready(self, sequence: DecodeSequence) -> bool:
        """Whether it can draft for the sequence right away."""

    def num_behind(self, sequence: DecodeSequence) -> int:
        """How many tokens of the sequence it has to catch up with before it can draft; 0 if it is ready or never is."""

    def catch_up(self, sequence: DecodeSequence, most_tokens: int) -> int:
        """Compute draft KV of the sequence's next tokens. Returns of how many; 0 while there is no room."""

    def draft(
        self, wanted: Sequence[tuple[DecodeSequence, int]], rules: DecodeRules
    ) -> dict[DecodeSequence, tuple[int, ...]]:
        """Draft up to the wanted number of tokens for each sequence. All their tokens are known. Some may get none."""

    def retain(self, is_here: Callable[[DecodeSequence], bool]) -> None:
        """Forget sequences that are not here any more."""

    def reset(self) -> None:
        """Forget what no sequence owns."""

    def check_integrity(self) -> None:
        """Raises BlockError unless each owned block belongs to a sequence that is here."""
