"""Blocks from tiers and peers, apart from an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from common.engine.sequences.restores import BlockRestorer


def test_the_lender_ends_before_the_tiers_that_it_reads() -> None:
    closed: list[str] = []
    tiers, peers = (SimpleNamespace(close=lambda name=name: closed.append(name)) for name in ("tiers", "peers"))
    made: Any = BlockRestorer
    made(tiers, 16, None, peers).close()
    assert closed == ["peers", "tiers"]
