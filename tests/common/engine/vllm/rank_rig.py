"""Pretended vLLM workers: ranks with caches of torch tensors, real sockets between them, and no vLLM."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
import zmq

from common.engine.vllm.layout import KVGroup, KVLayout, heads_of
from common.engine.vllm.link import (
    Admit,
    Announced,
    ConnectorSettings,
    Done,
    Expect,
    FromRank,
    Order,
    RankReady,
    Send,
    joined_addresses,
)
from common.engine.vllm.rank_transfers import Computed, LoadOrder, Open, RankTransfers, StepOrders
from common.engine.vllm.staging import RankCache
from common.wire.messages import KVDone, KVTarget

from ....waiting import wait_until

TOKENS, CONTENT, LAYERS = 4, 6, 3
NUM_BLOCKS = 32
FULL = KVGroup("full", TOKENS, 2, LAYERS * TOKENS * CONTENT * 4)


@dataclass
class RankRig:
    """One rank, its caches by group and layer, and what it has reported."""

    transfers: RankTransfers
    caches: list[list[torch.Tensor]]
    events: list[FromRank]
    released: set[str] = field(default_factory=set)
    loaded: dict[str, bool] = field(default_factory=dict)

    def take_finished(self) -> RankRig:
        """Collect vLLM's ids of requests whose blocks were released, and whether loads have succeeded."""
        released, received, failed = self.transfers.take_finished()
        self.released |= released
        self.loaded |= {name: name not in failed for name in received}
        return self

    def step(self, **orders: object) -> None:
        every = StepOrders(**orders)  # type: ignore[arg-type]
        self.transfers.before_step(every)
        self.transfers.after_step(every)

    def events_of(self, kind: type) -> list[FromRank]:
        return [event for event in list(self.events) if isinstance(event, kind)]


@dataclass
class WorkerRig:
    """A worker of several ranks, which admits prompts as they are announced if `admits`."""

    worker_id: str
    groups: tuple[KVGroup, ...]
    ranks: list[RankRig]
    epoch: int
    context: zmq.Context[zmq.Socket[bytes]]
    admits: bool = True
    announced: SimpleQueue[Announced | None] = field(default_factory=SimpleQueue)
    _ordering: threading.Lock = field(default_factory=threading.Lock)  # all ranks get all orders in the same order

    def __post_init__(self) -> None:
        self._admitting = threading.Thread(target=self._admit_all)
        self._admitting.start()

    def _admit_all(self) -> None:
        while (each := self.announced.get()) is not None:
            if self.admits:
                self.admit(each.request_id, each.attempt)

    def close(self) -> None:
        self.announced.put(None)
        self._admitting.join()
        for rank in self.ranks:
            rank.transfers.stop()
        self.context.term()

    @property
    def target(self) -> KVTarget:
        ready = [rank.events_of(RankReady)[0] for rank in self.ranks]
        return KVTarget(self.worker_id, self.epoch, joined_addresses([each.kv_address for each in ready]))  # type: ignore[attr-defined]

    def order(self, message: Order) -> None:
        with self._ordering:
            for rank in self.ranks:
                rank.transfers.order(message)

    def step(self, **orders: object) -> None:
        for rank in self.ranks:
            rank.step(**orders)

    def expect(self, name: str = "a", num_tokens: int = 18, first_block: int = 0, attempt: int = 0) -> None:
        self.order(Expect(request_id=name, attempt=attempt, num_tokens=num_tokens, first_block=first_block))

    def admit(self, name: str = "a", attempt: int = 0) -> None:
        self.order(Admit(request_id=name, attempt=attempt))

    def open(self, target: KVTarget, name: str = "a", num_tokens: int = 18, attempt: int = 0) -> None:
        send = Send(request_id=name, attempt=attempt, target=target)
        self.step(opens=[Open(f"v-{name}", send, num_tokens)])

    def computed(self, tables: Sequence[Sequence[int]], num_computed: int, name: str = "a") -> None:
        self.step(computed=[Computed((name, 0), tuple(tables), num_computed)])

    def done(self, name: str = "a", attempt: int = 0) -> None:
        done = KVDone(request_id=name, attempt=attempt, first_token=7)
        self.order(Done(request_id=name, attempt=attempt, done=done))

    def load(self, tables: Sequence[Sequence[int]], num_tokens: int = 18, num_cached: int = 0, name: str = "a") -> None:
        self.step(loads=[LoadOrder(f"v-{name}", (name, 0), num_tokens, num_cached, tuple(tables))])

    def wait(self, kind: type, count: int = 1) -> list[FromRank]:
        """Wait until every rank has reported `count` events of a kind, and return the last of each rank."""
        wait_until(
            lambda: all(len(rank.events_of(kind)) >= count for rank in self.ranks),
            f"{kind.__name__}: {[rank.events for rank in self.ranks]}",
            20,
        )
        return [rank.events_of(kind)[count - 1] for rank in self.ranks]

    def wait_announced(self, name: str = "a") -> None:
        """Wait until every rank was asked for blocks."""
        for rank in self.ranks:
            transfers = rank.transfers
            wait_until(
                lambda t=transfers: t._transfers._early or any(each.pairs for each in t._incoming.values()), name, 20
            )

    def has_arrived(self, name: str) -> bool:
        """Whether every rank has the KV of a request now."""
        return all(
            any(each.key[0] == name and each.has_arrived for each in rank.transfers._incoming.values())
            for rank in self.ranks
        )

    def wait_loaded(self, name: str = "a") -> bool:
        """Wait until the load has ended on all ranks; return whether it succeeded."""
        for rank in self.ranks:
            wait_until(lambda rank=rank: f"v-{name}" in rank.take_finished().loaded, "the load", 20)
        return all(rank.loaded[f"v-{name}"] for rank in self.ranks)

    def finish(self, name: str = "a") -> None:
        """vLLM has finished the request; wait until no rank reads its blocks."""
        self.step(finished=[(f"v-{name}", (name, 0))])
        for rank in self.ranks:
            wait_until(lambda rank=rank: f"v-{name}" in rank.take_finished().released, "released blocks", 20)

    def check_empty(self) -> None:
        for rank in self.ranks:
            assert rank.transfers.check_integrity() == []
            wait_until(lambda rank=rank: rank.transfers.is_idle, "an idle rank", 20)
            assert rank.transfers.slots.num_free == rank.transfers.slots.num_slots
            ring = getattr(rank.transfers._sender._outgoing, "ring", None)
            if ring is not None:
                wait_until(lambda ring=ring: ring.num_free == ring.num_slots, "free slots of the ring", 20)


def make_worker(
    worker_id: str,
    size: int = 1,
    groups: tuple[KVGroup, ...] = (FULL,),
    *,
    epoch: int = 3,
    num_slots: int = 16,
    model: Sequence[Sequence[torch.Tensor]] | None = None,
    admits: bool = True,
    **settings: object,
) -> WorkerRig:
    """`model`: KV of all heads, [groups][layers][blocks, heads, tokens, content], of which each rank has its part."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    worker = WorkerRig(worker_id, groups, [], epoch, context, admits)
    for rank in range(size):
        layout = KVLayout(groups, "float32", size, rank)
        caches = [
            [torch.zeros(NUM_BLOCKS, len(layout.heads(number)), *each.shape[2:]) for each in layers]
            for number, layers in enumerate(model or new_model(groups))
        ]
        if model is not None:
            for number, layers in enumerate(model):
                for cache, layer in zip(caches[number], layers, strict=True):
                    heads = heads_of(groups[number].num_heads, size, rank)
                    cache.copy_(layer[:, heads.start : heads.stop])
        slot = max(layout.unit_bytes(number) for number in range(len(groups)))
        fields = {"weights": "m", "staging_bytes": num_slots * (-(-slot // 8) * 8), "lease_s": 5.0} | settings
        chosen = ConnectorSettings(
            link_address="",
            link_key="",
            silence_s=9,
            worker_id=worker_id,
            epoch=epoch,
            **fields,  # type: ignore[arg-type]
        )
        events: list[FromRank] = []

        def report(event: FromRank, events: list[FromRank] = events) -> None:
            events.append(event)
            if isinstance(event, Announced):
                worker.announced.put(event)

        transfers = RankTransfers(context, chosen, RankCache(layout, caches, NUM_BLOCKS), report, world_size=size)
        transfers.start()
        worker.ranks.append(RankRig(transfers, caches, events))
    return worker


def new_model(groups: tuple[KVGroup, ...], seed: int = 0) -> list[list[torch.Tensor]]:
    """Random KV of all heads."""
    made = torch.Generator().manual_seed(seed)
    return [
        [torch.rand(NUM_BLOCKS, group.num_heads, TOKENS, CONTENT, generator=made) for _ in range(LAYERS)]
        for group in groups
    ]


def close(workers: Sequence[WorkerRig]) -> None:
    for worker in workers:
        worker.close()
