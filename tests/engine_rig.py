"""What tests of both engines share: a router's part, the loop's turns, and the true tokens of the tiny model."""

from __future__ import annotations

import atexit
import functools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import pytest
import torch
import zmq

from common.engine.kv.block_pool import BlockPool
from common.engine.kv.cache import KVCache
from common.engine.kv.staging import outgoing_blocks
from common.engine.kv.tiers.block_file import BlockFile
from common.engine.kv.tiers.block_tiers import BlockTiers
from common.engine.kv.tiers.copies import copied_incoming, copied_outgoing
from common.engine.kv.tiers.host_slots import HostSlotStore
from common.engine.kv.tiers.tier import BlockTier
from common.engine.models.decoder import Decoder
from common.engine.run.runner import ModelRunner
from common.engine.transfer.lender import KVLender, LendableBlocks, LenderIdentity
from common.engine.transfer.puller import KVPuller, PeerCaches
from common.engine.transfer.transports.shm import SharedBlocks, SharedReads
from common.engine.transfer.transports.tcp import Frames
from common.engine.worker.contract import RequestReceived
from common.errors import DeviceLost
from common.grammar.checks import GrammarChecks, Verdict
from common.grammar.grammars import Grammars
from common.model_files.resolve import resolve_model
from common.wire.messages import KVOffer, KVPeer, Message, RequestFailed, TokenDelta, TokenOutput
from common.wire.sampling_params import SamplingParams

from .oracle import generate
from .waiting import wait_until

WAIT_S = 60.0
ROUTER = b"router"
Rig = TypeVar("Rig")


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def made(cls: type[Rig], *arguments: object) -> Iterator[Callable[..., Rig]]:
    """The life of a fixture that makes rigs with options of a test's own, and closes them all."""
    rigs: list[Any] = []

    def make(**options: object) -> Rig:
        rigs.append(cls(*arguments, **options))
        rig: Rig = rigs[-1]
        return rig

    yield make
    for rig in rigs:
        rig.close()


ENDLESS = 'start: %json {"type": "integer", "multipleOf": 99999989}'
"""Takes minutes and gigabytes to compile."""
SLOW = "start: /[0-9]{2}:[0-9]{2}/"
"""Taken for a slow one by `Compiler`."""


@functools.cache
def _lender(vocab_size: int) -> GrammarChecks:
    checks = GrammarChecks(resolve_model("tiny-random"), vocab_size)
    atexit.register(checks.close)
    return checks


class BorrowedChecks(GrammarChecks):
    """Checks of one engine. One compiler process, which takes 0.1 s to start, serves all engines of a test process."""

    def _live_compiler(self) -> Any:
        return _lender(self._model.vocab_size)._live_compiler()


def tiny_grammars(vocab_size: int) -> Grammars:
    """Grammars of the tiny model."""
    files = resolve_model("tiny-random")
    return Grammars(files, vocab_size, BorrowedChecks(files, vocab_size))


class Compiler:
    """Holds up ENDLESS and SLOW, as grammars that take long are, until they may `go_on`."""

    def __init__(self, grammars: Grammars) -> None:
        self._go_on, submit = threading.Event(), grammars._checks.submit
        self._held: list[threading.Thread] = []

        def held(grammar: str, *, salt: str = "") -> Future[Verdict]:
            if grammar not in (ENDLESS, SLOW):
                return submit(grammar, salt=salt)
            found: Future[Verdict] = Future()

            def later() -> None:
                self._go_on.wait()
                submit(grammar, salt=salt).add_done_callback(lambda each: found.set_result(each.result()))

            self._held.append(threading.Thread(target=later, daemon=True))
            self._held[-1].start()
            return found

        grammars._checks.submit = held  # type: ignore[method-assign]

    def go_on(self) -> None:
        self._go_on.set()
        for thread in self._held:
            thread.join()


ANSWERS: WeakKeyDictionary[Decoder, dict[tuple[object, ...], tuple[int, ...]]] = WeakKeyDictionary()
"""What `RouterSide.oracle` has computed."""


class RouterSide:
    """Over an `engine` whose loop the test turns; `sent` is what routers got."""

    engine: Any
    model: Decoder
    eos: tuple[int, ...]
    sent: list[tuple[bytes, Message]]
    grammars: Grammars | None = None

    def tell(self, message: Message, router: bytes = ROUTER) -> None:
        self.engine.submit(RequestReceived(router, message))

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine._turn()

    def until(self, condition: Callable[[], object]) -> None:
        wait_until(condition, meanwhile=self.turn)

    def gently(self, condition: Callable[[], object]) -> None:
        """While the engine turns for what comes to it only: nothing is computed to its end before something comes."""
        wait_until(condition, meanwhile=self.nudge)

    def nudge(self) -> None:
        if not self.engine._inbox.empty():
            self.turn()
        time.sleep(0.001)

    def wait(self, condition: Callable[[], object]) -> None:
        """While the engine turns by itself."""
        wait_until(condition)

    def deltas(self, name: str = "a", *, attempt: int | None = None) -> list[TokenDelta]:
        """Reports on a request, under one attempt or any; not that it makes progress, as some time says."""
        deltas = self._told(name)
        return [d for d in deltas if attempt in (None, d.attempt) and (d.token_ids or d.finish_reason)]

    def progress(self, *names: str) -> list[str]:
        """Which of the requests the next turn says of that they make progress, the last word being long ago."""
        known = {name: len(self._told(name)) for name in names}
        self.engine._progress_told_at = 0.0
        self.turn()
        return [name for name in names if any(not d.token_ids for d in self._told(name)[known[name] :])]

    def _told(self, name: str) -> list[TokenDelta]:
        outputs = [message for _, message in self.sent if isinstance(message, TokenOutput)]
        return [delta for output in outputs for delta in output.outputs if delta.request_id == name]

    def failures(self, name: str = "a") -> list[RequestFailed]:
        return [m for _, m in self.sent if isinstance(m, RequestFailed) and m.request_id == name]

    @property
    def is_clean(self) -> bool:
        """Every command was applied, and nothing is left of any request."""
        idle = self.engine._inbox.empty() and self.engine.is_empty
        return bool(idle and self.engine.check_integrity().owned == 0)

    def oracle(self, tokens: list[int], count: int = 8, **params: object) -> list[int]:
        """The true answer, computed once per process: all engines of a model must give the same."""
        values = {"max_tokens": count, "temperature": 0.0} | params
        known = SamplingParams(**values)  # type: ignore[arg-type]
        answers = ANSWERS.setdefault(self.model, {})
        key = (tuple(tokens), repr(known), self.eos, self.grammars is not None)
        if key not in answers:
            constraint = self.grammars.constraint(known.grammar) if self.grammars and known.grammar else None
            answers[key] = tuple(generate(self.model, tokens, known, self.eos, constraint))
        return list(answers[key])

    def stop_engine(self) -> None:
        """Ends the engine's thread, or the engine itself where it has none."""
        if self.engine._thread.ident is None:
            self.engine.close()
        else:
            self.engine.stop()


def break_sampling(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Have the function `broken`, named with its module, raise for requests with `allowed_token_ids` (65, 66)."""
    module, _, name = broken.rpartition(".")
    sound = getattr(import_module(module), name)

    def fail(*arguments: Any, **named: Any) -> Any:
        asked = arguments[0].allowed_token_ids if "limits" in broken else arguments[0]
        if asked == (65, 66):
            raise OverflowError("an unexpected parameter")
        return sound(*arguments, **named)

    monkeypatch.setattr(broken, fail)


def check_device_loss(engine: Any, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed CUDA context never works again. Routers count a death, so the requests get no answer."""

    def forward(chunks: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def wait(runner: ModelRunner) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nMore words")

    with monkeypatch.context() as broken:
        broken.setattr(runner, "forward", forward)
        broken.setattr(ModelRunner, "wait", wait)
        engine.ask(prompt(20), "a")
        engine.ask(prompt(20), "b")
        with pytest.raises(DeviceLost) as lost:
            engine.turn()
    assert not engine.failures()
    assert str(lost.value) == (
        "cpu failed: CUDA error: an illegal memory access was encountered. The step had requests a, b. "
        "2 requests move to other workers. Check the GPU: nvidia-smi, and Xid in the kernel's log"
    )


# What a test's engine takes from other caches, and what it lends of its own.

LAYOUT = "layout"


def peer_caches(
    context: zmq.Context[zmq.Socket[bytes]],
    kv: KVCache,
    pool: BlockPool,
    notify: Callable[[Any], None],
    identity: tuple[str, int],
    *,
    tiers: BlockTiers | None = None,
    share: bool = True,
) -> PeerCaches:
    """Started; `share`: out of memory, where the caches are shared."""
    lender = KVLender(context, "127.0.0.1", 0)
    transport = SharedReads() if share else None
    puller = KVPuller(context, LAYOUT, kv.block_bytes, copied_incoming(kv), notify, transport=transport)
    offer = KVOffer.of("shm", kv.shared.offer) if kv.shared is not None else None
    lender.start(
        LenderIdentity(*identity, LAYOUT, offer), LendableBlocks(pool, outgoing_blocks(kv), kv.block_bytes, tiers)
    )
    puller.start()
    return PeerCaches(lender, puller)


class PlainBlocks:
    """Implements `IncomingBlocks`: the rows of uint8 [blocks, block_bytes]."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def num_bytes(self, index: int) -> int:
        return len(self.view(index))

    def view(self, index: int) -> memoryview:
        return memoryview(self._memory[index])

    def commit(self, indices: Sequence[int]) -> None:
        """Nothing to copy."""


def sending(kv: KVCache, *, is_required: bool = False) -> tuple[Frames, SharedBlocks | None]:
    """What a sender of this cache needs: frames, and its memory if that is shared."""
    frames = Frames(kv.block)
    return frames, SharedBlocks(frames, kv.shared.offer, is_required=is_required) if kv.shared is not None else None


def as_peer(caches: PeerCaches, identity: tuple[str, int], num_blocks: int) -> KVPeer:
    """As a router names it to others."""
    return KVPeer(*identity, caches.lender.address, num_blocks)


# A tier on disk under a test's engine, whose reads the test may hold up.

NUM_SLOTS = 64


class SlowFile(BlockFile):
    """Reads wait for `gate`."""

    def __init__(self, path: Path, block_bytes: int) -> None:
        super().__init__(path, "layout", block_bytes, NUM_SLOTS)
        self.gate = threading.Event()
        self.gate.set()
        self.num_reads = 0

    def read(self, slot: int, block_hash: bytes, into: memoryview) -> bool:
        self.num_reads += 1
        self.gate.wait()
        return super().read(slot, block_hash, into)


class DiskTier(BlockTiers):
    """One tier in a file at `path`, started; above it one of `num_host` slots in host memory, if any."""

    def __init__(
        self, path: Path, kv: KVCache, pool: BlockPool, notify: Callable[[object], None], num_host: int = 0
    ) -> None:
        self.file = SlowFile(path, kv.block_bytes)
        tiers = [BlockTier("host", HostSlotStore(kv.block_bytes, num_host))] if num_host else []
        tiers.append(BlockTier("disk", self.file))
        super().__init__(tiers, pool, copied_outgoing(kv), copied_incoming(kv), notify)
        self.start()
