"""One prompt on a prefill worker, from acceptance until its KV is acknowledged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.engine.sequences import WorkerSequence
from common.wire.messages import PrefillRequest

if TYPE_CHECKING:  # torch: schedulers also run without it, in virtual time
    from torch import Tensor


@dataclass(slots=True, eq=False)
class PrefillSequence(WorkerSequence):
    """`blocks` covers the whole prompt from admission on. Before, while it was the oldest that waited and did not fit,
    `num_passing_blocks` went to others. A step in flight computes the `num_in_flight` tokens behind those computed.
    `hidden_sum`, float64 [hidden_size], is that of all these tokens, for a mean.

    accepted_at ─ admitted_at ─ computed_at ─ released        (engine clock, seconds)
         queue        prefill        hold
    """

    request: PrefillRequest
    computed_at: float = 0.0
    num_passing_blocks: int = 0
    num_in_flight: int = 0
    hidden_sum: Tensor | None = None

    @property
    def num_begun(self) -> int:
        return self.num_computed + self.num_in_flight

    @property
    def computed(self) -> bool:
        return self.num_computed == self.num_tokens

    @property
    def prefill_s(self) -> float:
        """Seconds from admission to the first token."""
        return self.computed_at - self.admitted_at
