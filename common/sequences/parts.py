"""The parts that an engine uses if its worker has them."""

from __future__ import annotations

from dataclasses import dataclass

from common.adapters.bank import AdapterBank
from common.grammar.grammars import Grammars
from common.sequences.hidden_places import HiddenPlaces
from common.tiers.block_tiers import BlockTiers
from common.transfer.peer_caches import PeerCaches


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Without `grammars`, requests with a grammar are refused, without `adapters` those that name one.

    The engine closes `tiers` and `peers`: nothing is read without the one, nothing is pulled without the other.
    `hidden` are places of hidden states, for a model with a draft head.
    """

    grammars: Grammars | None = None
    tiers: BlockTiers | None = None
    adapters: AdapterBank | None = None
    peers: PeerCaches | None = None
    hidden: HiddenPlaces | None = None


NO_PARTS = EngineParts()
