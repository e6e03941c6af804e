"""Files of weights that a router has received: which parts workers get, and until when."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from common.wire.messages import WEIGHTS_PART_BYTES, WeightsPart, WeightsRequest
from router.fleet.weights import WeightsFiles

from ...waiting import until

DATA = (2).to_bytes(8, "little") + b"{}" + bytes(WEIGHTS_PART_BYTES)


async def body() -> AsyncIterator[bytes]:
    for start in range(0, len(DATA), 100_000):
        yield DATA[start : start + 100_000]


async def test_workers_get_the_parts_that_they_request() -> None:
    sent: list[tuple[str, Any]] = []
    files = WeightsFiles(lambda address, message: sent.append((address, message)) is None)
    try:
        weights = await files.receive(body(), "")
        assert weights.num_bytes == len(DATA)
        for address in ("a", "b"):
            files.on_request(address, WeightsRequest(sha256=weights.sha256, offset=0))
            files.on_request(address, WeightsRequest(sha256=weights.sha256, offset=0))  # one at a time
        await until(lambda: len(sent) == 2)
        first = WeightsPart(sha256=weights.sha256, offset=0, data=DATA[:WEIGHTS_PART_BYTES])
        assert sorted(sent, key=lambda one: one[0]) == [("a", first), ("b", first)]
        files.on_request("a", WeightsRequest(sha256=weights.sha256, offset=WEIGHTS_PART_BYTES))
        await until(lambda: len(sent) == 3)
        assert sent[2][1].data == DATA[WEIGHTS_PART_BYTES:]

        files.on_request("a", WeightsRequest(sha256=weights.sha256, offset=len(DATA)))
        files.on_request("a", WeightsRequest(sha256="0" * 64, offset=0))
        await files.keep(str(weights))
        assert weights.path.exists()
        await files.keep("/other")
        files.on_request("a", WeightsRequest(sha256=weights.sha256, offset=0))
        assert not weights.path.exists()
    finally:
        await files.close()
    assert len(sent) == 3 and not weights.path.parent.exists()
