"""A prefill engine whose prompts read blocks from a file instead of computing them: the same answers, and no waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.engine.kv.copy_stream import CopyStream
from common.engine.kv.staging import StagedIncoming, StagedOutgoing
from common.latency.step_fit import StepFit
from common.latency.step_model import StepModel
from common.wire.messages import AbortRequest, KVBlocks, KVDone, ResetPrefixCache

from .. import engine_rig
from ..engine_rig import prompt
from ..waiting import wait_until

Rig = Any  # EngineRig of conftest, which test modules cannot import
FIRST, OTHERS = prompt(70), prompt(160, 1)
"""Of 4 full blocks, and as many as the pool has."""


@pytest.fixture(autouse=True)
def reads_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the disk of this machine is, and however fast its cores."""
    monkeypatch.setattr(StepFit, "observe", lambda *observed: None)
    monkeypatch.setattr("common.engine.sequences.restores.LEAST_WAIT_S", 60.0)
    monkeypatch.setattr("common.engine.sequences.restores.MOST_WAIT_S", 60.0)


@pytest.fixture
def make(make_engine: Callable[..., Rig], tmp_path: Path) -> Callable[..., Rig]:
    def with_file(**options: Any) -> Rig:
        return make_engine(disk=tmp_path / "blocks", num_blocks=10, **options)

    return with_file


def ask(rig: Rig, tokens: list[int], name: str, **options: Any) -> tuple[list[int], int]:
    """The first token, and how many of the prompt were cached."""
    rig.ask(tokens, name, **options)
    rig.until(lambda: rig.deltas(name))
    (delta,) = rig.deltas(name)
    return list(delta.token_ids), delta.num_cached_tokens


def evicted(rig: Rig, *, written: int = 4) -> None:
    """FIRST was computed and written, and has left memory."""
    assert ask(rig, FIRST, "first") == (rig.oracle(FIRST), 0)
    wait_until(lambda: rig.tiers.counts[0].num_blocks == written)
    ask(rig, OTHERS, "others")
    assert rig.engine.scheduler.pool.match(rig.hashes(FIRST)) == []


def outcomes(rig: Rig) -> dict[str, float]:
    counter = rig.engine.metrics._tier_reads
    return {s.labels["outcome"]: s.value for m in counter.collect() for s in m.samples if s.name.endswith("_total")}


def test_an_evicted_prompt_is_read_and_answers_the_same(make: Callable[..., Rig]) -> None:
    rig = make()
    evicted(rig)
    assert ask(rig, FIRST, "again") == (rig.oracle(FIRST), 64)
    longer = [*FIRST, *prompt(10, 2)]
    ask(rig, OTHERS, "others again")
    assert ask(rig, longer, "longer") == (rig.oracle(longer), 64)
    assert outcomes(rig)["read"] >= 2
    rig.until(lambda: rig.is_clean)


def test_blocks_of_a_device_pass_through_buffers(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do on a GPU; here the device is the CPU itself."""
    monkeypatch.setattr(engine_rig, "copied_outgoing", lambda kv: StagedOutgoing(kv, CopyStream(kv.device)))
    monkeypatch.setattr(engine_rig, "copied_incoming", lambda kv: StagedIncoming(kv, CopyStream(kv.device)))
    rig = make()
    evicted(rig)
    assert ask(rig, FIRST, "again") == (rig.oracle(FIRST), 64)


def test_host_memory_comes_before_the_disk(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the buffers of a device, as on a GPU; what host memory has no room for is read from the file."""
    monkeypatch.setattr(engine_rig, "copied_outgoing", lambda kv: StagedOutgoing(kv, CopyStream(kv.device)))
    monkeypatch.setattr(engine_rig, "copied_incoming", lambda kv: StagedIncoming(kv, CopyStream(kv.device)))
    rig = make(num_host=20)
    evicted(rig)
    assert ask(rig, FIRST, "again") == (rig.oracle(FIRST), 64)
    assert rig.tiers.file.num_reads == 0 and tokens_by_tier(rig)["host"] == 64
    few = allocate(rig)
    assert few and tokens_by_tier(rig)["disk"] > 0
    rig.until(lambda: rig.is_clean)


def allocate(rig: Rig) -> bool:
    """Other prompts push FIRST out of both memories; it is answered from the file. Whether that was right."""
    for seed in (11, 12, 13):
        ask(rig, prompt(160, seed), f"others {seed}")
        wait_until(lambda: not rig.tiers._offered)
    return ask(rig, FIRST, "once more") == (rig.oracle(FIRST), 64)


def tokens_by_tier(rig: Rig) -> dict[str, float]:
    counter = rig.engine.metrics._tier_hits
    return {s.labels["tier"]: s.value for m in counter.collect() for s in m.samples if s.name.endswith("_total")}


def test_what_was_read_is_shipped_like_what_was_computed(make: Callable[..., Rig]) -> None:
    rig = make()
    evicted(rig)
    rig.ask(FIRST, "again", remote=True)
    rig.until(lambda: rig.router.poll(0))
    assert rig.read_open().num_blocks == 5
    rig.grant("again")
    frames: list[bytes] = []
    while True:
        rig.until(lambda: rig.router.poll(0))
        message, more = rig.read()
        if isinstance(message, KVDone):
            break
        if isinstance(message, KVBlocks):
            frames += more
    assert message.num_cached_tokens == 64 and len(frames) == 5
    fresh = rig.kv_of(FIRST)
    assert [bytes(frame) for frame in frames[:4]] == fresh[:4]
    rig.ack("again")
    rig.until(lambda: rig.is_clean)


def test_a_restarted_engine_reads_what_the_one_before_wrote(make: Callable[..., Rig]) -> None:
    rig = make()
    assert ask(rig, FIRST, "first")[1] == 0
    wait_until(lambda: rig.tiers.counts[0].num_blocks == 4)
    rig.tiers.close()
    again = make()
    assert ask(again, FIRST, "first") == (again.oracle(FIRST), 64)


def test_damaged_blocks_are_computed_anew(make: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make()
    evicted(rig)
    size, begin = (tmp_path / "blocks").stat().st_size, 2 * 4096
    with (tmp_path / "blocks").open("r+b") as raw:
        raw.seek(begin)
        raw.write(bytes(size - begin))
    assert ask(rig, FIRST, "again") == (rig.oracle(FIRST), 0)
    assert outcomes(rig) == {"missing": 1.0} and rig.tiers.counts[0].num_corrupt == 1


def test_a_read_that_takes_too_long_is_given_up(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.engine.sequences.restores.LEAST_WAIT_S", 0.01)
    monkeypatch.setattr("common.engine.sequences.restores.MOST_WAIT_S", 0.01)
    rig = make()
    evicted(rig)
    rig.tiers.file.gate.clear()
    assert ask(rig, FIRST, "again") == (rig.oracle(FIRST), 0)
    rig.tiers.file.gate.set()
    assert outcomes(rig) == {"late": 1.0}
    rig.until(lambda: rig.is_clean)


def test_others_are_computed_while_one_is_read(make: Callable[..., Rig]) -> None:
    rig = make()
    evicted(rig)
    rig.tiers.file.gate.clear()
    rig.ask(FIRST, "again")
    rig.until(lambda: rig.tiers.file.num_reads)
    assert not rig.engine.has_work
    other = prompt(20, 3)
    assert ask(rig, other, "other") == (rig.oracle(other), 0) and not rig.deltas("again")
    rig.tiers.file.gate.set()
    rig.until(lambda: rig.deltas("again"))
    assert list(rig.deltas("again")[0].token_ids) == rig.oracle(FIRST)


@pytest.mark.parametrize("end", ["abort", "reset"])
def test_a_prompt_may_end_while_it_is_read(make: Callable[..., Rig], end: str) -> None:
    rig = make()
    evicted(rig)
    rig.tiers.file.gate.clear()
    rig.ask(FIRST, "again")
    rig.until(lambda: rig.tiers.file.num_reads)
    rig.tell(AbortRequest(request_id="again", attempt=0) if end == "abort" else ResetPrefixCache(request_id="reset"))
    rig.until(lambda: rig.is_clean)
    rig.tiers.file.gate.set()
    wait_until(lambda: rig.tiers.num_unread_blocks == 0)
    if end == "reset":
        assert list(rig.deltas("again")[0].token_ids) == rig.oracle(FIRST)
        wait_until(lambda: rig.tiers.counts[0].num_blocks == 4)  # those that were computed since
    rig.turn()
    assert rig.is_clean


def test_computing_is_not_replaced_by_what_is_slower(make: Callable[..., Rig]) -> None:
    rig = make()
    evicted(rig)
    rig.engine.step_fit.model = StepModel(token_s=1e-3, num_steps=9)
    rig.tiers.tiers[0].observe(1, 100.0)
    assert ask(rig, FIRST, "again") == (rig.oracle(FIRST), 0)
    assert outcomes(rig) == {"slower": 1.0}
