"""A KV receiver, prefill workers' sockets for the test to speak through, and a real sender for the pair."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from common.engine.kv.block_pool import BlockPool
from common.engine.kv.cache import KVCache
from common.engine.kv.checksums import checksum
from common.engine.kv.quantised_staging import quantised_incoming
from common.engine.kv.shared_memory import SharedMemory
from common.engine.kv.staging import BlocksInPlace, IncomingBlocks
from common.engine.models.batch import SequenceChunk
from common.engine.models.decoder import Decoder
from common.engine.run.runner import ModelRunner
from common.engine.sampling.sampler import Sampler
from common.engine.sequences.engine import EngineParts
from common.engine.transfer.receiver import (
    IncomingTransfer,
    KVListener,
    KVReceiver,
    TransferCompleted,
    TransferFailed,
    TransferOpened,
)
from common.engine.transfer.sender import KVSender
from common.engine.transfer.transports.interface import IncomingEnd
from common.engine.transfer.transports.shm import SharedReads
from common.engine.worker.engine import EngineConfig, RouterLost
from common.engine.worker.metrics import WorkerMetrics
from common.grammar.grammars import Grammars
from common.model_files.resolve import resolve_model
from common.wire.codec import decode, encode
from common.wire.message_fields import pack_tokens
from common.wire.messages import (
    AbortRequest,
    AnyMessage,
    DecodeRequest,
    KVAck,
    KVBlocks,
    KVDone,
    KVGrant,
    KVOffer,
    KVOpen,
    KVPeer,
    Message,
    TokenDelta,
)
from common.wire.sampling_params import SamplingParams, TokenLogprobs
from decode_worker.engine import DecodeEngine
from decode_worker.incoming_transfers import IncomingTransfers, TransferEndpoints
from decode_worker.pipeline import DecodeModel, Launcher
from decode_worker.scheduler import DecodeScheduler

from ..engine_rig import ROUTER, WAIT_S, DiskTier, PlainBlocks, RouterSide, made, peer_caches, prompt, sending, wait
from .drafting_engines import LAUNCHERS, Headed, drafter_of, engines_that_draft, head_drafter_of, patient_limits
from .handover_pair import Pair

# A KV receiver over plain memory, and the prefill worker's socket that a test speaks through.


class Peer:
    """A prefill worker's socket. `blocks` are what the test ships by default: numbered, one pattern each."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, block_bytes: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(address)
        self.blocks = [bytes([number + 1]) * block_bytes for number in range(64)]
        self.shared: SharedMemory | None = None
        self.offer: KVOffer | None = None
        self.tokens: dict[tuple[str, int], int] = {}  # of grants

    def send(self, message: Message | bytes, *frames: bytes) -> None:
        self.socket.send_multipart([encode(message) if isinstance(message, Message) else message, *frames])

    def ship(
        self, first: int, count: int, name: str = "a", *, attempt: int = 0, frames: Sequence[bytes] | None = None
    ) -> None:
        """Blocks `first .. first + count - 1`, honestly labelled; `frames` replaces what really travels."""
        sums = tuple(checksum(memoryview(block)) for block in self.blocks[first : first + count])
        token = self.tokens.get((name, attempt), 0)
        header = KVBlocks(request_id=name, attempt=attempt, first_block=first, checksums=sums, token=token)
        self.send(header, *(self.blocks[first : first + count] if frames is None else frames))

    def share(self, *, is_ring: bool = False) -> SharedMemory:
        """Offer `blocks`, in their order, to be copied; `is_ring`: as places of a ring."""
        data = b"".join(self.blocks)
        self.shared = SharedMemory(len(data), is_ring=is_ring)
        self.shared.pages[: len(data)] = data
        self.offer = KVOffer.of("shm", self.shared.offer)
        return self.shared

    def name(self, first: int, sources: Sequence[int], name: str = "a", *, sums: Sequence[bytes] = ()) -> None:
        """Blocks from `first` on are `blocks[source]` of the shared memory; `sums` replaces what is checksummed."""
        known = sums or [self.blocks[source % len(self.blocks)] for source in sources]
        checksums = tuple(checksum(memoryview(block)) for block in known)
        self.send(KVBlocks(request_id=name, attempt=0, first_block=first, checksums=checksums, sources=tuple(sources)))

    def done(self, name: str = "a", *, attempt: int = 0, token: int = 3, logprobs: TokenLogprobs | None = None) -> None:
        secret = self.tokens.get((name, attempt), 0)
        self.send(KVDone(request_id=name, attempt=attempt, first_token=token, logprobs=logprobs, token=secret))

    def open(self, name: str = "a", blocks: int = 4, *, attempt: int = 0, **fields: object) -> None:
        values = {"worker_id": "p", "epoch": 5, "decode_epoch": 7, "fingerprint": "layout"} | fields
        self.send(KVOpen(request_id=name, attempt=attempt, num_blocks=blocks, **values))  # type: ignore[arg-type]

    def read(self) -> AnyMessage:
        assert self.socket.poll(int(WAIT_S * 1000)), "nothing came"
        message = decode(self.socket.recv())
        if isinstance(message, KVGrant):
            self.tokens[message.request_id, message.attempt] = message.token
        return message


class ReceiverRig:
    """`memory` holds the blocks, `events` what the receiver reported."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        block_bytes: int = 64,
        transports: Callable[[np.ndarray], Sequence[IncomingEnd[Any]]] = lambda memory: (SharedReads(),),
        blocks: IncomingBlocks | None = None,
        quantised: IncomingBlocks | None = None,
    ) -> None:
        """`transports` is given `memory`. Blocks arrive in `blocks` instead of `memory` if these are given."""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.block_bytes = block_bytes
        self.memory = np.zeros((num_blocks, block_bytes), np.uint8)
        self.events: list[TransferOpened | TransferCompleted | TransferFailed] = []
        self.on_event: Callable[[TransferOpened | TransferCompleted | TransferFailed], None] = self.events.append
        self.receiver = KVReceiver(
            self.context,
            KVListener(self.context, "127.0.0.1", 0),
            blocks or PlainBlocks(self.memory),
            lambda event: self.on_event(event),
            transports=transports(self.memory),
            quantised=quantised,
        )
        self.receiver.start()
        self.peers: list[Peer] = []

    def peer(self) -> Peer:
        self.peers.append(Peer(self.context, self.receiver.address, self.block_bytes))
        return self.peers[-1]

    def expect(
        self, peer: Peer, blocks: Sequence[int] = range(4), name: str = "a", *, first: int = 0, attempt: int = 0,
        offer: KVOffer | None = None,
    ) -> IncomingTransfer:  # fmt: skip
        """Lend `blocks` to a prefill worker that announces itself, makes its `offer` and gets its grant."""
        peer.open(name, len(blocks), attempt=attempt, offer=offer or peer.offer)
        wait(lambda: self.events)
        opened = self.events.pop()
        assert isinstance(opened, TransferOpened)
        transfer = IncomingTransfer(
            name, attempt, opened.peer, tuple(blocks), first, 0.0, time.monotonic(), memory=opened.memory
        )
        self.receiver.expect(transfer)
        shared = opened.memory is not None
        self.receiver.send(opened.peer, KVGrant(request_id=name, attempt=attempt, first_block=first, shared=shared))
        assert isinstance(peer.read(), KVGrant)
        return transfer

    def event(self) -> TransferOpened | TransferCompleted | TransferFailed:
        wait(lambda: self.events)
        return self.events.pop(0)

    def sync(self) -> None:
        """Wait until everything that peers have sent so far was handled."""
        for number, peer in enumerate(self.peers):
            peer.open(f"sync{number}")
            wait(lambda name=f"sync{number}": any(_name(event) == name for event in self.events))  # type: ignore[misc]
        self.events = [event for event in self.events if not _name(event).startswith("sync")]
        self.on_event = self.events.append

    def close(self) -> None:
        self.receiver.stop()
        for peer in self.peers:
            peer.socket.close()
        self.context.term()


def _name(event: TransferOpened | TransferCompleted | TransferFailed) -> str:
    return event.message.request_id if isinstance(event, TransferOpened) else ""


@pytest.fixture(autouse=True)
def an_idle_engine_waits_but_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for its next command keeps the others of its test from their turns."""
    monkeypatch.setattr("common.engine.worker.engine.IDLE_WAIT_S", 0.001)


@pytest.fixture
def rig() -> Iterator[ReceiverRig]:
    rig = ReceiverRig()
    yield rig
    rig.close()


@pytest.fixture
def peer(rig: ReceiverRig) -> Peer:
    return rig.peer()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., ReceiverRig]]:
    yield from made(ReceiverRig)


class EngineRig(RouterSide):
    """A decode engine over a tiny real model, and `peer`, a prefill worker's socket with the true KV of any prompt.

    The test turns the engine's loop; `sent` is what routers got.
    """

    def __init__(
        self,
        model: Decoder,
        eos: tuple[int, ...],
        *,
        num_blocks: int = 32,
        max_num_seqs: int = 8,
        chunk: int = 32,
        watermark: float = 0.0,
        max_waiting: int = 64,
        launcher: Callable[[ModelRunner, Sampler], Launcher] | None = None,
        worker_id: str = "d",
        shared: bool = False,
        quantised: bool = False,
        grammars: bool = False,
        max_draft_tokens: int = 0,
        slo_tpot_s: float = 0.0,
        disk: Path | None = None,
        lends: bool = False,
        draft: Decoder | None = None,
        num_draft_blocks: int = 64,
        headed: Headed | None = None,
        runner: ModelRunner | None = None,
    ) -> None:
        """Blocks are kept in a file at `disk`, too. With `lends` other engines may copy them, and this one theirs.

        A `draft` model drafts, or the head of `headed`, which is then what is served. A `runner` brings its own cache.
        """
        self.model, self.eos = model if headed is None else headed.alone, eos
        self.served = model if headed is None else headed.together
        self.grammars = Grammars(resolve_model("tiny-random"), model.config.vocab_size) if grammars else None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        kv = KVCache(self.served.config, num_blocks, 16, "float32", share=shared)
        runner, sampler = runner or ModelRunner(self.served, kv), Sampler(self.served.config.vocab_size)
        self.kv = runner.kv
        self.receiver = self._new_receiver(quantised)
        self.sent: list[tuple[bytes, Message]] = []
        self.sender = self._new_sender(worker_id)
        pool = BlockPool(self.kv.num_blocks, 16)
        self.drafter = None if draft is None else drafter_of(draft, sampler, num_draft_blocks)
        head = None if headed is None else head_drafter_of(headed, runner, sampler)
        self.engine = DecodeEngine(
            self.sent.extend,
            EngineConfig(identity=(worker_id, 7), eos_token_ids=eos, max_model_len=1024, max_waiting=max_waiting),
            patient_limits(max_draft_tokens),
            DecodeScheduler(
                pool, max_num_seqs=max_num_seqs, local_prefill_chunk=chunk, watermark=watermark, slo_tpot_s=slo_tpot_s
            ),
            DecodeModel(runner, sampler, None if launcher is None else launcher(runner, sampler), self.drafter or head),
            TransferEndpoints(IncomingTransfers(self.receiver, epoch=7, fingerprint="layout"), self.sender),
            WorkerMetrics("m", "d", lambda: self.engine.status),
            replace(self._parts(pool, worker_id, disk, lends), hidden=None if head is None else head.hidden),
        )
        self.receiver.start()
        self.sender.start()
        self.peers = [Peer(self.context, self.receiver.address, self.kv.block_bytes)]

    def _parts(self, pool: BlockPool, worker_id: str, disk: Path | None, lends: bool) -> EngineParts:
        def notify(event: object) -> None:
            self.engine.notify(event)

        self.tiers = None if disk is None else DiskTier(disk, self.kv, pool, notify)
        self.caches = peer_caches(self.context, self.kv, pool, notify, (worker_id, 7)) if lends else None
        return EngineParts(self.grammars, self.tiers, peers=self.caches)

    def _new_receiver(self, quantised: bool) -> KVReceiver:
        return KVReceiver(
            self.context,
            KVListener(self.context, "127.0.0.1", 0),
            BlocksInPlace(self.kv),
            lambda event: self.engine.notify(event),
            transports=(SharedReads(),),
            quantised=quantised_incoming(self.kv) if quantised else None,
        )

    def _new_sender(self, worker_id: str) -> KVSender:
        notify = lambda event: self.engine.notify(event)  # noqa: E731
        return KVSender(
            self.context,
            *sending(self.kv),
            self.kv.block_bytes,
            (worker_id, 7, "layout"),
            notify,
            lease_s=30.0,
            num_streams=1,
            on_advanced=notify,
        )

    @property
    def peer(self) -> Peer:
        return self.peers[0]

    def another_peer(self) -> Peer:
        self.peers.append(Peer(self.context, self.receiver.address, self.kv.block_bytes))
        return self.peers[-1]

    # ------------------------------------------------------------ the router's part

    def ask(
        self, tokens: list[int], name: str = "a", *, router: bytes = ROUTER, attempt: int = 0, remote: bool = False,
        num_output: int = 0, deadline_s: float = 600.0, prompt: bytes | None = None, peer: KVPeer | None = None,
        **params: object,
    ) -> None:  # fmt: skip
        request = DecodeRequest(
            request_id=name,
            attempt=attempt,
            prompt=pack_tokens(tokens) if prompt is None else prompt,
            params=SamplingParams(**({"max_tokens": 8, "temperature": 0.0} | params)),  # type: ignore[arg-type]
            prefill_worker="p" if remote else "",
            num_output_tokens=num_output,
            deadline_s=deadline_s,
            peer=peer,
        )
        self.tell(request, router)

    def mix(self, seed: int, peer: KVPeer | None = None) -> None:
        """Requests that come, end and are aborted at random, all of whose tokens are the true ones."""
        rng = random.Random(seed)
        asked: dict[str, tuple[list[int], int]] = {}
        aborted: set[str] = set()
        for number in range(24):
            name, tokens, count = f"r{number}", prompt(rng.randrange(1, 70), number), rng.randrange(1, 40)
            asked[name] = (tokens, count)
            self.ask(tokens, name, max_tokens=count, peer=peer)
            self.turn(rng.randrange(8))
            if rng.random() < 0.3:
                aborted.add(victim := rng.choice([*asked]))
                self.tell(AbortRequest(request_id=victim, attempt=0))
            self.engine.scheduler.check_integrity()
        self.until(lambda: self.is_clean)
        for name, (tokens, count) in asked.items():
            found, expected = self.tokens(name), self.oracle(tokens, count)
            assert found == (expected[: len(found)] if name in aborted else expected), name

    def deltas(self, name: str = "a", *, attempt: int | None = 0) -> list[TokenDelta]:
        return super().deltas(name, attempt=attempt)

    def tokens(self, name: str = "a", *, attempt: int = 0) -> list[int]:
        """All tokens reported under an attempt, which must follow each other without gap or repetition."""
        tokens: list[int] = []
        for delta in self.deltas(name, attempt=attempt):
            assert delta.index == self.deltas(name, attempt=attempt)[0].index + len(tokens)
            tokens += delta.token_ids
        return tokens

    def reason(self, name: str = "a", *, attempt: int = 0) -> str:
        return "".join(delta.finish_reason for delta in self.deltas(name, attempt=attempt))

    # ------------------------------------------------------------ the prefill worker's part

    def compute(self, tokens: list[int], peer: Peer | None = None) -> None:
        """Let `peer` hold the true KV of `tokens`."""
        num_blocks = -(-len(tokens) // 16)
        kv = KVCache(self.served.config, num_blocks, 16, "float32")
        ModelRunner(self.served, kv).forward([SequenceChunk(tokens, 0, range(num_blocks))])
        (peer or self.peer).blocks = [bytes(kv.block(index)) for index in range(num_blocks)]

    def granted(self, tokens: list[int], name: str = "a", *, attempt: int = 0, peer: Peer | None = None) -> int:
        """Announce the KV of a prompt: the first block that the engine wants."""
        peer = peer or self.peer
        self.compute(tokens, peer)
        peer.open(name, len(peer.blocks), attempt=attempt)
        self.until(lambda: peer.socket.poll(0))
        grant = peer.read()
        assert isinstance(grant, KVGrant), grant
        return grant.first_block

    def ship(
        self, tokens: list[int], first: int, name: str = "a", *, attempt: int = 0, peer: Peer | None = None,
        **params: object,
    ) -> None:  # fmt: skip
        """All blocks from `first` on, and the first token; until the engine took them over."""
        peer = peer or self.peer
        if first < len(peer.blocks):
            peer.ship(first, len(peer.blocks) - first, name, attempt=attempt)
        peer.done(name, attempt=attempt, token=self.oracle(tokens, 1, **params)[0])
        self.until(lambda: peer.socket.poll(0))
        assert isinstance(peer.read(), KVAck)

    def received_blocks(self, name: str, attempt: int, count: int) -> None:
        """Wait until `count` blocks of a transfer are here."""
        self.until(lambda: len(self.receiver._transfers[(name, attempt)].received) == count)

    # ------------------------------------------------------------ time

    def later(self, seconds: float) -> None:
        """What the engine does when that much time has passed."""
        self.engine._expire_at = 0.0
        self.engine.expire(time.monotonic() + seconds)
        self.engine._flush()

    def close(self) -> None:
        if self.engine._thread.ident is None:
            for router in {sequence.router for sequence in self.engine.scheduler}:
                self.engine.apply(RouterLost(router))
        self.stop_engine()
        for peer in self.peers:
            peer.socket.close()
        self.context.term()
        assert self.engine.check_integrity().owned == 0
        assert self.drafter is None or self.drafter.cache.check_integrity().owned == 0


@pytest.fixture
def make_engine(tiny: tuple[Decoder, tuple[int, ...]]) -> Iterator[Callable[..., EngineRig]]:
    yield from made(EngineRig, *tiny)


@pytest.fixture
def engine(make_engine: Callable[..., EngineRig]) -> EngineRig:
    return make_engine()


@pytest.fixture
def pair(make_engine: Callable[..., EngineRig]) -> Pair:
    """Two decode engines, for a hand-over."""
    return Pair(make_engine)


@pytest.fixture(params=LAUNCHERS)
def drafting(
    request: pytest.FixtureRequest,
    make_engine: Callable[..., EngineRig],
    monkeypatch: pytest.MonkeyPatch,
    right: Headed,
) -> Iterator[Callable[..., EngineRig]]:
    """Engines with a draft head, by default the module's `right` one, to which rows cost nothing."""
    with engines_that_draft(request.param, make_engine, monkeypatch, headed=right) as make:
        yield make
