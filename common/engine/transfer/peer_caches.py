"""Both sides of pulls at one worker, as its engine asks and closes them."""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.transfer.lender import KVLender
from common.engine.transfer.puller import KVPuller


@dataclass(frozen=True, slots=True)
class PeerCaches:
    """A lender and a puller, both started. The engine's thread closes them."""

    lender: KVLender
    puller: KVPuller

    def close(self) -> None:
        self.lender.stop()
        self.puller.stop()
