"""A decode engine, and prefill workers' sockets for the test to speak through."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from common.engine.kv.block_pool import BlockPool
from common.engine.kv.cache import KVCache
from common.engine.kv.quantised_staging import quantised_incoming
from common.engine.kv.staging import BlocksInPlace
from common.engine.models.batch import SequenceChunk
from common.engine.models.decoder import Decoder
from common.engine.run.runner import ModelRunner
from common.engine.sampling.sampler import Sampler
from common.engine.sequences.engine import EngineParts
from common.engine.transfer import IncomingTransfers, TransferEndpoints
from common.engine.transfer.receiver import KVListener, KVReceiver
from common.engine.transfer.sender import KVSender
from common.engine.transfer.transports.shm import SharedReads
from common.engine.worker.contract import RouterLost
from common.engine.worker.loop import EngineConfig
from common.engine.worker.metrics import WorkerMetrics
from common.wire.message_fields import pack_tokens
from common.wire.messages import (
    AbortRequest,
    DecodeRequest,
    KVAck,
    KVGrant,
    KVPeer,
    Message,
    TokenDelta,
)
from common.wire.sampling_params import SamplingParams
from decode_worker.engine import DecodeEngine
from decode_worker.pipeline import DecodeModel, Launcher
from decode_worker.scheduler import DecodeScheduler

from ..common.engine.transfer.receiver_rig import Peer, make_rig  # noqa: F401
from ..engine_rig import ROUTER, DiskTier, RouterSide, made, peer_caches, prompt, sending, tiny_grammars
from .drafting_engines import LAUNCHERS, Headed, drafter_of, engines_that_draft, head_drafter_of, patient_limits
from .handover_pair import Pair


@pytest.fixture(autouse=True)
def an_idle_engine_waits_but_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for its next command keeps the others of its test from their turns."""
    monkeypatch.setattr("common.engine.worker.loop.IDLE_WAIT_S", 0.001)


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
        self.grammars = tiny_grammars(model.config.vocab_size) if grammars else None
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
