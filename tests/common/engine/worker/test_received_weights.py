"""Weights on their way from a router to a worker: which router is asked, and what is refused."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.engine.worker import received_weights
from common.engine.worker.received_weights import WeightsReceiver
from common.errors import ModelError
from common.model_files import ReceivedWeights
from common.wire.messages import WEIGHTS_PART_BYTES, WeightsPart, WeightsRequest

DATA = b"".join(bytes([i]) * WEIGHTS_PART_BYTES for i in range(3)) + b"end"
WEIGHTS = ReceivedWeights(hashlib.sha256(DATA).hexdigest(), len(DATA), Path("/absent/weights"))


class Routers:
    """Two routers, of which `b` has the file. `loses(number)` returns whether the answer to this request is lost."""

    def __init__(self, data: bytes = DATA, loses: Callable[[int], bool] = lambda number: False) -> None:
        self.receiver = WeightsReceiver()
        self.data, self.loses = data, loses
        self.asked: list[tuple[bytes, int]] = []

    def send(self, router: bytes, request: WeightsRequest) -> int:
        self.asked.append((router, request.offset))
        part = self.data[request.offset : request.offset + WEIGHTS_PART_BYTES]
        if router == b"b" and part and not self.loses(len(self.asked)):
            message = WeightsPart(sha256=request.sha256, offset=request.offset, data=part)
            self.receiver.on_part(b"b", WeightsPart(sha256=request.sha256, offset=request.offset + 1, data=b"late"))
            self.receiver.on_part(b"b", message)
            self.receiver.on_part(b"b", message)
        return 0

    def broadcast(self, request: WeightsRequest, protocol: int) -> None:
        for router in (b"a", b"b"):
            self.send(router, request)

    async def fetch(self, weights: ReceivedWeights = WEIGHTS, check: Callable[[], None] = lambda: None) -> Path:
        control: Any = self
        return await self.receiver.fetch(weights, control, check)


async def test_a_full_temporary_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(received_weights, "PrivateFolder", full)
    with pytest.raises(ModelError, match="no space is left on the disk"):
        await Routers().fetch()


async def test_the_router_that_has_a_file_sends_it_once() -> None:
    routers = Routers()
    path = await routers.fetch()
    assert path.read_bytes() == DATA and path.parent.stat().st_mode & 0o077 == 0
    offsets = [i * WEIGHTS_PART_BYTES for i in range(4)]
    assert routers.asked == [(b"a", 0), *((b"b", offset) for offset in offsets)]
    assert await routers.fetch() == path and len(routers.asked) == 5
    await routers.receiver.keep(str(WEIGHTS))
    assert path.exists()
    await routers.receiver.keep("/other", "")
    assert not path.exists()
    assert (await routers.fetch()).read_bytes() == DATA
    routers.receiver.close()
    assert not path.parent.exists()


async def test_a_file_on_the_same_host_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(DATA)
    routers = Routers()
    weights = ReceivedWeights(WEIGHTS.sha256, len(DATA), path)
    found = await routers.fetch(weights)
    assert found.samefile(path) and not routers.asked
    path.unlink()
    assert await routers.fetch(weights) == found and found.read_bytes() == DATA
    await routers.receiver.keep()
    assert not found.exists()

    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "another file system")

    path.write_bytes(DATA)
    monkeypatch.setattr(received_weights.os, "link", link)
    assert await routers.fetch(weights) == path and not routers.asked
    await routers.receiver.keep()
    assert path.exists()
    routers.receiver.close()


async def test_lost_parts_are_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received_weights, "PART_S", 0.02)
    routers = Routers(loses=lambda number: number == 4)
    assert (await routers.fetch()).read_bytes() == DATA
    again = 2 * WEIGHTS_PART_BYTES
    assert routers.asked[3:6] == [(b"b", again), (b"a", again), (b"b", again)]
    routers.receiver.close()


@pytest.mark.parametrize(
    ("routers", "why"),
    [
        (Routers, "no router sent weights .* repeat the update"),
        (lambda: Routers(DATA[:-1] + b"X"), "do not have SHA-256"),
        (lambda: Routers(DATA + b"more"), "do not have SHA-256"),
    ],
)
async def test_missing_and_damaged_weights_are_refused(
    monkeypatch: pytest.MonkeyPatch, routers: Callable[[], Routers], why: str
) -> None:
    monkeypatch.setattr(received_weights, "PART_S", 0.01)
    monkeypatch.setattr(received_weights, "MAX_SILENCE_S", 0.02)
    found = routers()
    if routers is Routers:
        found.loses = lambda number: True
    with pytest.raises(ModelError, match=why):
        await found.fetch()
    assert found.receiver._folder is not None
    assert not list(found.receiver._folder.path.glob("*.safetensors"))
    found.receiver.close()


async def test_a_newer_order_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received_weights, "PART_S", 0.01)
    routers = Routers(loses=lambda number: True)

    def check() -> None:
        if len(routers.asked) > 4:
            raise ValueError("superseded")

    with pytest.raises(ValueError, match="superseded"):
        await routers.fetch(check=check)
    routers.receiver.close()
