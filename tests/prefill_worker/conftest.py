"""A prefill engine, and a decode worker's KV socket that the test holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor

from common.blocks.block_hash import block_hashes
from common.engine.kv.block_pool import BlockPool
from common.engine.kv.cache import KVCache
from common.engine.kv.quantised_staging import quantised_outgoing
from common.engine.models.batch import SequenceChunk
from common.engine.models.decoder import Decoder
from common.engine.models.load import load_model
from common.engine.run.runner import ModelRunner
from common.engine.sampling.sampler import Sampler
from common.engine.sequences.engine import EngineParts
from common.engine.worker.loop import EngineConfig
from common.engine.worker.metrics import WorkerMetrics
from common.model_files.resolve import resolve_model
from common.wire.message_fields import pack_tokens
from common.wire.messages import (
    KVPeer,
    Message,
    PrefillRequest,
)
from common.wire.sampling_params import Pooling, SamplingParams
from kernels import Linear
from prefill_worker.engine import PrefillEngine
from prefill_worker.launcher import Pooler, PromptLauncher
from prefill_worker.scheduler import PrefillScheduler

from ..common.engine.transfer.sender_rig import DecodeSide, make_sender_rig  # noqa: F401
from ..engine_rig import ROUTER, DiskTier, RouterSide, as_peer, made, peer_caches, tiny_grammars
from .lazy_launcher import LazyLauncher


@pytest.fixture(autouse=True)
def an_idle_engine_waits_but_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for its next command keeps the others of its test from their turns."""
    monkeypatch.setattr("common.engine.worker.loop.IDLE_WAIT_S", 0.001)


class EngineRig(DecodeSide, RouterSide):
    """A prefill engine over a tiny real model. The test turns its loop; `sent` is what routers got."""

    def __init__(
        self,
        model: Decoder,
        eos: tuple[int, ...],
        *,
        num_blocks: int = 32,
        budget: int = 32,
        lease_s: float = 30.0,
        max_waiting: int = 64,
        quantise: bool = False,
        grammars: bool = False,
        pooler: Pooler | None = None,
        disk: Path | None = None,
        num_host: int = 0,
        peers: bool = False,
        share: bool = True,
        ahead: bool = False,
        name: str = "p",
    ) -> None:
        """Blocks are kept in a file at `disk`, too, and above it in `num_host` slots of host memory.

        With `peers` others may copy them, out of memory if `share`. `ahead`: on a device that runs steps late.
        """
        super().__init__()
        self.model, self.eos = model, eos
        self.grammars = tiny_grammars(model.config.vocab_size) if grammars else None
        self.kv = KVCache(model.config, num_blocks, 16, "float32", share=peers and share)
        pool = BlockPool(num_blocks, 16)
        scheduler = PrefillScheduler(pool, max_num_batched_tokens=budget, max_num_seqs=4)
        sender = self.make_sender(
            self.kv.block, self.kv.block_bytes, lambda event: self.engine.notify(event), lease_s, 1,
            quantise=quantised_outgoing(self.kv).views if quantise else None,
        )  # fmt: skip
        notify = lambda event: self.engine.notify(event)  # noqa: E731
        self.tiers = None if disk is None else DiskTier(disk, self.kv, pool, notify, num_host)
        self.peers = None
        if peers:
            self.peers = peer_caches(self.context, self.kv, pool, notify, (name, 5), tiers=self.tiers, share=share)
            self.lender, self.puller = self.peers.lender, self.peers.puller
            self.as_peer = as_peer(self.peers, (name, 5), 0)
        self.sent: list[tuple[bytes, Message]] = []
        runner, sampler = ModelRunner(model, self.kv), Sampler(model.config.vocab_size)
        self.device = LazyLauncher(runner, sampler, pooler) if ahead else None
        launcher = self.device or PromptLauncher(runner, sampler, pooler)
        self.engine = PrefillEngine(
            self.sent.extend,
            EngineConfig(identity=("p", 5), eos_token_ids=eos, max_model_len=1024, max_waiting=max_waiting),
            scheduler,
            launcher,
            sender,
            WorkerMetrics("m", "p", lambda: self.engine.status),
            EngineParts(self.grammars, self.tiers, peers=self.peers),
        )
        sender.start()

    def ask(
        self, tokens: list[int], name: str = "a", *, router: bytes = ROUTER, attempt: int = 0, remote: bool = False,
        num_output: int = 0, deadline_s: float = 60.0, ttft_s: float = 0.0, prompt: bytes | None = None,
        peer: KVPeer | None = None, **params: object,
    ) -> None:  # fmt: skip
        request = PrefillRequest(
            request_id=name,
            attempt=attempt,
            prompt=pack_tokens(tokens) if prompt is None else prompt,
            params=SamplingParams(**({"max_tokens": 8 if remote else 1, "temperature": 0.0} | params)),  # type: ignore[arg-type]
            decode=self.target if remote else None,
            num_output_tokens=num_output,
            deadline_s=deadline_s,
            ttft_s=ttft_s,
            peer=peer,
        )
        self.tell(request, router)

    def hashes(self, tokens: list[int]) -> list[bytes]:
        return block_hashes(tokens, 16)

    def kv_of(self, tokens: list[int]) -> list[bytes]:
        """The blocks of a prompt that is computed alone, a step for what a step of the engine computes."""
        blocks = range(-(-len(tokens) // 16))
        kv = KVCache(self.model.config, len(blocks), 16, "float32")
        runner, budget = ModelRunner(self.model, kv), self.engine.scheduler.most_step_tokens
        for start in range(0, len(tokens), budget):
            runner.forward([SequenceChunk(tokens[start : start + budget], start, blocks, sample=False)])
        return [bytes(kv.block(block)) for block in blocks]

    def oracle(self, tokens: list[int], count: int = 1, **params: object) -> list[int]:
        return super().oracle(tokens, count, **params)

    def close(self) -> None:
        self.stop_engine()
        self.router.close()
        self.context.term()
        self.engine.check_integrity()


@pytest.fixture
def make_engine(tiny: tuple[Decoder, tuple[int, ...]]) -> Iterator[Callable[..., EngineRig]]:
    yield from made(EngineRig, *tiny)


@pytest.fixture
def engine(make_engine: Callable[..., EngineRig]) -> EngineRig:
    return make_engine()


@pytest.fixture
def make_pooling_engine() -> Iterator[Callable[..., EngineRig]]:
    """Engines over the tiny model without its head, which pool by `pooling`; with `score` that head makes a score."""
    for make in made(EngineRig, load_model(resolve_model("tiny-random"), with_head=False), ()):

        def pooling_engine(
            pooling: Pooling = "last",
            score: Tensor | None = None,
            *,
            make: Callable[..., EngineRig] = make,
            **options: object,
        ) -> EngineRig:
            return make(pooler=Pooler(pooling, None if score is None else Linear(score)), **options)

        yield pooling_engine
