"""A decode engine that computes prompts itself, with blocks of a file where it holds some: the same answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.blocks.block_hash import block_hashes
from common.engine.kv.tiers.block_read import BlockRead
from common.engine.worker.contract import RequestReceived
from common.wire.messages import AbortRequest, ResetPrefixCache

from ..engine_rig import prompt
from ..waiting import wait_until

Rig = Any  # EngineRig of conftest, which test modules cannot import
FIRST = prompt(40)


@pytest.fixture
def rig(make_engine: Callable[..., Rig], tmp_path: Path) -> Rig:
    """FIRST and its answer of 40 tokens have left memory: 4 full blocks are in the file."""
    rig = make_engine(disk=tmp_path / "blocks", num_blocks=12)
    rig.ask(FIRST, "first", max_tokens=40)
    rig.until(lambda: rig.is_clean)
    wait_until(lambda: rig.tiers.counts[0].num_blocks == 4)
    rig.ask(prompt(180, 1), "others", max_tokens=1)
    rig.until(lambda: rig.is_clean)
    return rig


@pytest.mark.slow
def test_a_next_turn_reads_the_answer_before_it(rig: Rig) -> None:
    turn = [*FIRST, *rig.oracle(FIRST, 40), 5]
    rig.ask(turn, "next", max_tokens=10)
    rig.until(lambda: rig.is_clean)
    assert rig.tokens("next") == rig.oracle(turn, 10)
    assert rig.deltas("next")[-1].num_cached_tokens == 64


def test_others_are_answered_while_one_is_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.engine.sequences.restores.LEAST_WAIT_S", 60.0)
    monkeypatch.setattr("common.engine.sequences.restores.MOST_WAIT_S", 60.0)
    rig.tiers.file.gate.clear()
    rig.ask(FIRST, "again")
    rig.until(lambda: rig.tiers.file.num_reads)
    assert not rig.engine.has_work
    rig.ask(prompt(20, 3), "other")
    rig.until(lambda: rig.reason("other"))
    assert rig.tokens("other") == rig.oracle(prompt(20, 3)) and not rig.deltas("again")
    rig.tiers.file.gate.set()
    rig.until(lambda: rig.is_clean)
    assert rig.tokens("again") == rig.oracle(FIRST)


def test_a_prompt_may_be_aborted_while_it_is_read(rig: Rig) -> None:
    rig.tiers.file.gate.clear()
    rig.ask(FIRST, "again")
    rig.until(lambda: rig.tiers.file.num_reads)
    rig.tell(AbortRequest(request_id="again", attempt=0))
    rig.until(lambda: rig.is_clean)
    rig.tiers.file.gate.set()
    wait_until(lambda: rig.tiers.num_unread_blocks == 0)
    rig.turn()
    assert rig.is_clean


def test_a_reset_drops_blocks_that_were_just_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.engine.sequences.restores.LEAST_WAIT_S", 60.0)
    monkeypatch.setattr("common.engine.sequences.restores.MOST_WAIT_S", 60.0)
    commit = BlockRead.commit

    def first_only(read: BlockRead, tier: str, write: Callable[[], None]) -> bool:
        done = commit(read, tier, write)
        rig.tiers.file.gate.clear()
        return done

    monkeypatch.setattr(BlockRead, "commit", first_only)
    rig.ask(FIRST, "again", max_tokens=1)
    pool, hashes = rig.engine.scheduler.pool, block_hashes(FIRST, rig.kv.block_size)
    rig.until(lambda: rig.tiers.file.num_reads == 2)
    rig.engine.apply(RequestReceived(b"router", ResetPrefixCache(request_id="reset")))
    assert not pool.match(hashes) and not rig.tiers.num_held(hashes) and not rig.tiers._offered
    rig.tiers.file.gate.set()
    rig.until(lambda: rig.is_clean)
    assert rig.tokens("again") == rig.oracle(FIRST, 1)


@pytest.mark.slow
def test_the_true_tokens_whatever_is_preempted_aborted_or_read(make_engine: Callable[..., Rig], tmp_path: Path) -> None:
    """The second engine reads what the first one wrote of prompts that begin alike."""
    first = make_engine(disk=tmp_path / "blocks", num_blocks=14)
    first.mix(1)
    first.tiers.close()
    second = make_engine(disk=tmp_path / "blocks", num_blocks=14)
    second.mix(2)
    hits = second.engine.metrics._tier_hits
    assert sum(s.value for m in hits.collect() for s in m.samples if s.labels.get("tier") == "disk") > 0
