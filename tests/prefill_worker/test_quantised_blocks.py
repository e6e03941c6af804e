"""When a prefill worker sends 8-bit numbers, and of which blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from common.engine.kv.cache import KVCache
from common.engine.kv.shared_memory import KVMemory
from common.wire.messages import KVBlocks, KVDone
from kernels import gather_blocks

from ..engine_rig import prompt

Rig = Any  # rigs of conftest, which test modules cannot import
SMALL = b"12345678"


def quantise(indices: Sequence[int]) -> list[memoryview]:
    return [memoryview(SMALL + bytes([index])) for index in indices]


def test_blocks_are_quantised_for_who_takes_it_only(make_sender_rig: Callable[..., Rig]) -> None:
    rig = make_sender_rig(quantise=quantise)
    for name, quantised in (("a", True), ("b", False)):
        rig.open(name, num_ready=4)
        rig.finish(name)
        assert rig.read_open().quantised
        rig.grant(name, 2, quantised=quantised)
        header, frames = rig.read()
        assert isinstance(header, KVBlocks)
        native = [bytes(block) for block in rig.memory[2:4]]
        assert frames == ([SMALL + b"\x02", SMALL + b"\x03"] if quantised else native)
        assert isinstance(rig.read()[0], KVDone)
        rig.ack(name)
    rig.wait(lambda: len(rig.ended) == 2)
    assert [event.num_bytes for event in rig.ended] == [2 * 9, 2 * 64]
    assert rig.sender.num_bytes == 2 * 9 + 2 * 64


OFFER = KVMemory(1, 3, 64 * 16, bytes(16))


@pytest.mark.parametrize("options", [{}, {"memory": OFFER}, {"memory": OFFER, "quantise": quantise}])
def test_a_grant_of_what_was_not_offered_is_dropped(
    make_sender_rig: Callable[..., Rig], options: dict[str, Any]
) -> None:
    rig = make_sender_rig(**options)
    rig.open(num_ready=4)
    rig.finish()
    assert rig.read_open().quantised == ("quantise" in options)
    rig.grant(quantised=True, shared="quantise" in options)
    rig.wait(lambda: rig.sender.num_dropped_frames)
    rig.grant()
    header, frames = rig.read()
    assert isinstance(header, KVBlocks) and frames == [bytes(block) for block in rig.memory[:4]]


def test_what_an_earlier_prompt_left_in_a_block_is_no_part_of_it(make_engine: Callable[..., Rig]) -> None:
    rig, tokens = make_engine(quantise=True), prompt(40)
    rig.kv.tensor.fill_(torch.nan)
    rig.ask(tokens, remote=True)
    rig.until(lambda: rig.router.poll(0))
    rig.read_open()
    rig.grant(quantised=True)
    frames: list[bytes] = []
    while len(frames) < 3:
        rig.until(lambda: rig.router.poll(0))
        message, more = rig.read()
        frames += more
    fresh = KVCache(rig.model.config, 32, 16, "float32")
    blocks = rig.engine.scheduler.find("a").blocks
    for block in blocks:
        fresh.tensor[block] = rig.kv.tensor[block]
    fresh.tensor[blocks[-1], :, :, 40 % 16 :] = 0
    assert fresh.tensor.isfinite().all()
    assert frames == [bytes(row.tolist()) for row in gather_blocks(fresh.tensor, torch.tensor(blocks), quantised=True)]
    rig.ack()
    rig.until(lambda: rig.is_clean)


def test_native_blocks_are_not_touched(make_engine: Callable[..., Rig]) -> None:
    rig, tokens = make_engine(), prompt(40)
    rig.kv.tensor.fill_(3.0)
    rig.ask(tokens, remote=True)
    rig.until(lambda: rig.engine.scheduler.held)
    last = rig.engine.scheduler.find("a").blocks[-1]
    assert (rig.kv.tensor[last, :, :, 40 % 16 :] == 3.0).all()
