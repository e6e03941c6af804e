"""The parts that an engine uses if its worker has them."""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.adapters import AdapterBank
from common.engine.kv.tiers import BlockTiers
from common.engine.sequences.hidden_states import HiddenPlaces
from common.engine.transfer import PeerCaches
from common.grammar import Grammars


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
