"""Blocks that travel as 8-bit numbers: from cache to cache over real sockets, spoilt on the way, and where refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.engine.kv.cache import KVCache
from common.engine.kv.checksums import checksum
from common.engine.kv.copy_stream import CopyStream
from common.engine.kv.quantised_staging import QuantisedIncoming, QuantisedOutgoing, quantised_outgoing
from common.engine.kv.staging import BlocksInPlace
from common.engine.transfer.receiver import IncomingTransfer, TransferCompleted, TransferFailed, TransferOpened
from common.engine.transfer.sender import KVSender, TransferEnded
from common.engine.transfer.transports.tcp import Frames
from common.model_files.config import from_hf
from common.model_files.resolve import resolve_model
from common.wire.messages import KVAck, KVBlocks, KVDone, KVFailed, KVGrant, KVTarget
from kernels import gather_blocks, scatter_blocks

from ..engine_rig import prompt
from ..waiting import wait_until

NUM_BLOCKS = 40
UNTOUCHED = 7.0
CPU = torch.device("cpu")
Rig = Any  # rigs and Peer of conftest, which test modules cannot import
Peer = Any


def make_cache(dtype: str) -> KVCache:
    folder: Path = resolve_model("tiny-random").weights[0].parent
    return KVCache(from_hf(folder / "config.json"), NUM_BLOCKS, 16, dtype)


def through_fp8(kv: Tensor, blocks: list[int]) -> Tensor:
    """What must arrive of `blocks`."""
    ids, there = torch.tensor(blocks), torch.zeros_like(kv)
    scatter_blocks(gather_blocks(kv, ids, quantised=True), there, ids, quantised=True)
    return there[ids]


class Caches:
    """A prefill worker's cache and sender, and a receiver over a decode worker's, which takes what it is offered."""

    def __init__(
        self, make_rig: Callable[..., Rig], dtype: str = "float32", *, offer: bool = True, take: bool = True
    ) -> None:
        self.take = take
        self.source, self.target = make_cache(dtype), make_cache(dtype)
        self.source.tensor.normal_()
        self.target.tensor.fill_(UNTOUCHED)
        self.outgoing = QuantisedOutgoing(self.source, CopyStream(CPU))
        self.incoming = QuantisedIncoming(self.target, CopyStream(CPU))
        self.rig = rig = make_rig(blocks=BlocksInPlace(self.target), quantised=self.incoming)
        self.transfers: dict[str, IncomingTransfer] = {}
        self.received: list[str] = []
        self.failed: list[TransferFailed] = []
        self.ended: list[TransferEnded] = []
        self.blocks = list(reversed(range(NUM_BLOCKS)))  # of the target
        self.wanted = NUM_BLOCKS
        rig.on_event = self.on_event
        self.sender = KVSender(
            rig.context,
            Frames(self.source.block, quantise=self.outgoing.views if offer else None),
            None,
            self.source.block_bytes,
            ("p", 5, "layout"),
            self.ended.append,
            lease_s=30.0,
            num_streams=1,
        )
        self.sender.start()

    def on_event(self, event: TransferOpened | TransferCompleted | TransferFailed) -> None:
        match event:
            case TransferOpened(peer, message):
                name, quantised = message.request_id, message.quantised and self.take
                transfer = IncomingTransfer(
                    name, 0, peer, self.blocks[: message.num_blocks], 1, 0.0, 0.0, quantised=quantised
                )
                self.transfers[name] = transfer
                self.rig.receiver.expect(transfer)
                grant = KVGrant(request_id=name, attempt=0, first_block=1, quantised=quantised)
                self.rig.receiver.send(peer, grant)
            case TransferCompleted(transfer):
                self.received.append(transfer.request_id)
            case TransferFailed():
                self.failed.append(event)

    def ship(self, name: str, count: int) -> None:
        self.sender.open(name, 0, KVTarget("d", 7, self.rig.receiver.address), list(range(count)), count)
        self.sender.progress(name, 0, count, KVDone(request_id=name, attempt=0, first_token=3))


@pytest.fixture
def make_caches(make_rig: Callable[..., Rig]) -> Iterator[Callable[..., Caches]]:
    made: list[Caches] = []

    def make(*arguments: Any, **options: Any) -> Caches:
        made.append(Caches(make_rig, *arguments, **options))
        return made[-1]

    yield make
    for caches in made:
        caches.sender.stop()
        assert caches.rig.receiver.failure is None and caches.sender.failure is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_lands_is_what_the_kernels_make_of_it(make_caches: Callable[..., Caches], dtype: str) -> None:
    caches = make_caches(dtype)
    caches.ship("a", NUM_BLOCKS - 2)
    wait_until(lambda: caches.ended and caches.received)
    shipped = list(range(1, NUM_BLOCKS - 2))
    found, exact = caches.target.tensor[[caches.blocks[index] for index in shipped]], caches.source.tensor[shipped]
    assert torch.equal(found, through_fp8(caches.source.tensor, shipped))
    step = exact.float().abs().amax((3, 5), keepdim=True) / 448 * 2**-10
    allowed = torch.maximum(exact.float().abs() * 2**-4, step) * 1.13  # bfloat16 rounds once more
    assert ((found.float() - exact.float()).abs() <= allowed).all()
    untouched = [caches.blocks[index] for index in (0, NUM_BLOCKS - 2, NUM_BLOCKS - 1)]
    assert (caches.target.tensor[untouched] == UNTOUCHED).all()
    num_bytes = len(shipped) * caches.outgoing.block_bytes
    assert caches.ended[0].num_bytes == caches.transfers["a"].num_bytes == num_bytes
    assert caches.sender.num_bytes == caches.rig.receiver.num_bytes == num_bytes
    assert num_bytes < 0.6 * len(shipped) * caches.source.block_bytes
    assert caches.outgoing.num_buffers <= len(shipped) and len(caches.incoming._free) <= len(shipped)


@pytest.mark.parametrize(("offer", "take"), [(True, False), (False, True)])
def test_only_who_offers_and_who_takes_quantise(make_caches: Callable[..., Caches], offer: bool, take: bool) -> None:
    caches = make_caches(offer=offer, take=take)
    caches.ship("a", 8)
    wait_until(lambda: caches.ended and caches.received)
    for index in range(1, 8):
        assert torch.equal(caches.target.tensor[caches.blocks[index]], caches.source.tensor[index])
    assert caches.sender.num_bytes == 7 * caches.source.block_bytes
    assert caches.outgoing.num_buffers == 0 and not caches.incoming._free


def test_an_abort_in_flight_harms_nobody(make_caches: Callable[..., Caches]) -> None:
    caches = make_caches()
    caches.sender.open("a", 0, KVTarget("d", 7, caches.rig.receiver.address), list(range(NUM_BLOCKS)), 2)
    wait_until(lambda: caches.rig.receiver.num_bytes)
    transfer = caches.rig.receiver.release("a", 0)
    assert transfer.received == {1}
    caches.target.tensor.fill_(UNTOUCHED)
    caches.sender.progress("a", 0, NUM_BLOCKS, KVDone(request_id="a", attempt=0, first_token=3))
    caches.ship("b", 3)
    wait_until(lambda: caches.received)
    assert caches.received == ["b"]
    assert (caches.target.tensor[: NUM_BLOCKS - 3] == UNTOUCHED).all()
    blocks = [caches.blocks[1], caches.blocks[2]]
    assert torch.equal(caches.target.tensor[blocks], through_fp8(caches.source.tensor, [1, 2]))
    caches.sender.cancel("a", 0, "aborted")
    wait_until(lambda: caches.failed)
    assert (caches.failed[0].request_id, caches.failed[0].by_peer) == ("a", True)


@pytest.fixture
def spoilt(make_caches: Callable[..., Caches]) -> tuple[Caches, Peer, list[bytes]]:
    """Caches, a peer of the test's own that was granted blocks 1 .. 3, and the frames of these."""
    caches = make_caches()
    peer = caches.rig.peer()
    peer.open("a", 4, quantised=True)
    grant = peer.read()
    assert isinstance(grant, KVGrant) and grant.quantised
    return caches, peer, [bytes(caches.outgoing.view(index)) for index in (1, 2, 3)]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda frame: frame[:-16], "bytes instead of"),
        (lambda frame: frame + bytes(16), "bytes instead of"),
        (lambda frame: frame[:5] + bytes([frame[5] ^ 8]) + frame[6:], "is corrupt"),
        (lambda frame: frame[:-20] + bytes([frame[-20] ^ 128]) + frame[-19:], "is corrupt"),
    ],
    ids=["truncated", "too long", "a number", "a scale"],
)
def test_a_frame_that_was_spoilt_never_reaches_the_cache(
    spoilt: tuple[Caches, Peer, list[bytes]], spoil: Callable[[bytes], bytes], says: str
) -> None:
    caches, peer, frames = spoilt
    sums = tuple(checksum(memoryview(frame)) for frame in frames)
    header = KVBlocks(request_id="a", attempt=0, first_block=1, checksums=sums)
    peer.send(header, frames[0], spoil(frames[1]), frames[2])
    answer = peer.read()
    assert isinstance(answer, KVFailed) and says in answer.reason and "block 2" in answer.reason
    wait_until(lambda: caches.failed)
    assert not caches.received and caches.rig.receiver.release("a", 0) is None
    blocks = [caches.blocks[index] for index in (1, 3)]
    assert torch.equal(caches.target.tensor[blocks], through_fp8(caches.source.tensor, [1, 3]))
    assert (caches.target.tensor[caches.blocks[2]] == UNTOUCHED).all()


def test_native_frames_do_not_pass_for_quantised_ones(spoilt: tuple[Caches, Peer, list[bytes]]) -> None:
    caches, peer, _ = spoilt
    frames = [bytes(caches.source.block(index)) for index in (1, 2, 3)]
    sums = tuple(checksum(memoryview(frame)) for frame in frames)
    peer.send(KVBlocks(request_id="a", attempt=0, first_block=1, checksums=sums), *frames)
    answer = peer.read()
    assert isinstance(answer, KVFailed) and "block 1 has" in answer.reason
    assert (caches.target.tensor == UNTOUCHED).all()


def test_an_engine_decodes_with_what_arrived(make_engine: Callable[..., Rig]) -> None:
    rig, tokens = make_engine(quantised=True), prompt(40)
    rig.ask(tokens, remote=True)
    rig.compute(tokens)
    exact = torch.stack([torch.frombuffer(bytearray(block), dtype=torch.float32) for block in rig.peer.blocks])
    kv = KVCache(rig.model.config, 3, 16, "float32")
    kv.tensor.copy_(exact.view(kv.tensor.shape))
    view = quantised_outgoing(kv).view
    rig.peer.blocks = [bytes(view(index)) for index in range(3)]
    rig.peer.open("a", 3, quantised=True)
    rig.until(lambda: rig.peer.socket.poll(0))
    grant = rig.peer.read()
    assert isinstance(grant, KVGrant) and grant.quantised and not grant.shared
    blocks = rig.engine.scheduler.find("a").blocks[:3]
    rig.peer.ship(0, 3)
    rig.peer.done(token=rig.oracle(tokens, 1)[0])
    rig.until(lambda: rig.peer.socket.poll(0))
    assert isinstance(rig.peer.read(), KVAck)
    arrived, expected = rig.kv.tensor[blocks], through_fp8(kv.tensor, [0, 1, 2])
    assert torch.equal(arrived[:2], expected[:2])
    assert torch.equal(arrived[2, :, :, :8], expected[2, :, :, :8])  # of 40 tokens; the next ones may be there already
    rig.until(lambda: rig.reason() and rig.is_clean)
    assert len(rig.tokens()) == 8


def test_a_receiver_that_knows_native_blocks_only_gets_these(make_engine: Callable[..., Rig]) -> None:
    rig, tokens = make_engine(), prompt(40)
    rig.ask(tokens, remote=True)
    rig.compute(tokens)
    rig.peer.open("a", 3, quantised=True)
    rig.until(lambda: rig.peer.socket.poll(0))
    grant = rig.peer.read()
    assert isinstance(grant, KVGrant) and not grant.quantised
    rig.ship(tokens, 0)
    rig.until(lambda: rig.reason() and rig.is_clean)
    assert rig.tokens() == rig.oracle(tokens)


def test_memory_that_can_be_read_is_read_as_it_is(make_engine: Callable[..., Rig]) -> None:
    rig, tokens = make_engine(quantised=True), prompt(40)
    rig.ask(tokens, remote=True)
    rig.compute(tokens)
    rig.peer.share()
    rig.peer.open("a", 3, quantised=True, offer=rig.peer.offer)
    rig.until(lambda: rig.peer.socket.poll(0))
    grant = rig.peer.read()
    assert isinstance(grant, KVGrant) and grant.shared and not grant.quantised
