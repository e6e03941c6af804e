"""Prompts in the order in which they came, as plain systems compute them.

Production's order puts requests whose clients read already first, the oldest before all others: these say of themselves
that they are such requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.sequence import DecodeSequence
from prefill_worker.scheduler import PrefillSequence


@dataclass(slots=True, eq=False)
class FirstComePrefill(PrefillSequence):
    """A prompt on a prefill worker that none which came later passes."""

    @property
    def has_output(self) -> bool:
        return True


@dataclass(slots=True, eq=False)
class FirstComeDecode(DecodeSequence):
    """The same on a decode worker that computes prompts."""

    @property
    def has_output(self) -> bool:
        return True
