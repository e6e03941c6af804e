"""vLLM's block events in hashes that routers know."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.blocks import BlockHasher
from common.engine.kv import BlockLog
from common.engine.vllm.block_events import CachedBlocks
from common.wire.messages import SHORT_HASH_BYTES

SIZE = 4
PROMPT = list(range(1, 13))


def stored(hashes: list[bytes], parent: bytes | None, tokens: list[int], **fields: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return {**event, "block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": None, **fields}


def removed(*hashes: bytes) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


class Cache:
    def __init__(self) -> None:
        self.log = BlockLog(1)
        self.cached = CachedBlocks(SIZE, self.log)
        self.number = 0

    def apply(self, *events: dict[str, Any], number: int | None = None) -> None:
        number = self.number if number is None else number
        self.cached.on_batch(number, msgspec.msgpack.encode([0.0, list(events), 0]))
        self.number = number + 1

    def held(self) -> bytes:
        return b"".join(piece.hashes for piece in self.log.snapshot())


def hashes(salt: str = "", adapter: str = "") -> list[bytes]:
    return BlockHasher(SIZE, salt, adapter).extend(PROMPT)


def test_hashes_are_those_of_the_router() -> None:
    cache = Cache()
    cache.apply(stored([b"A", b"B"], None, PROMPT[:8]), stored([b"C"], b"B", PROMPT[8:]))
    assert cache.cached.num_leading(hashes()) == 3
    assert set(split(cache.held())) == {each[:SHORT_HASH_BYTES] for each in hashes()}
    cache.apply(removed(b"B"))
    assert cache.cached.num_leading(hashes()) == 1
    assert len(cache.cached) == 2


@pytest.mark.parametrize(("salt", "adapter"), [("tenant", ""), ("", "ab" * 16), ("tenant", "ab" * 16)])
def test_salts_and_adapters_are_part_of_the_first_hash(salt: str, adapter: str) -> None:
    cache = Cache()
    keys = [key for key in (adapter, salt) if key]
    cache.apply(stored([b"A"], None, PROMPT[:4], lora_name=adapter or None, extra_keys=[keys]))
    assert cache.cached.num_leading(hashes(salt, adapter)) == 1
    assert cache.cached.num_leading(hashes()) == 0


def test_blocks_after_an_unknown_one_do_not_count() -> None:
    cache = Cache()
    cache.apply(stored([b"C"], b"B", PROMPT[8:]))
    assert len(cache.cached) == 0 and cache.cached.num_unknown == 1


def test_a_lost_batch_or_a_reset_drops_everything() -> None:
    cache = Cache()
    cache.apply(stored([b"A"], None, PROMPT[:4]))
    cache.apply(stored([b"X"], None, PROMPT[4:8]), number=5)
    assert cache.cached.num_leading(hashes()) == 0 and len(cache.cached) == 1
    cache.apply({"type": "AllBlocksCleared"})
    assert len(cache.cached) == 0
    cleared = [event for event in cache.log.take() if event.cleared]
    assert cleared and not cleared[-1].stored


def test_other_groups_tiers_and_partial_blocks_do_not_count() -> None:
    cache = Cache()
    cache.apply(
        stored([b"A"], None, PROMPT[:4], group_idx=1),
        stored([b"B"], None, PROMPT[:4], medium="CPU"),
        stored([b"C"], None, PROMPT[:3], block_size=3),
    )
    assert len(cache.cached) == 0


def split(packed: bytes) -> list[bytes]:
    return [packed[at : at + SHORT_HASH_BYTES] for at in range(0, len(packed), SHORT_HASH_BYTES)]
