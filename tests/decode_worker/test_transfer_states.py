"""Prefill and decode engines joined by the real wire, under any order of what can happen to a transfer.

The test turns the engines' loops; the threads that send and receive run as they like. Whatever happens, every block has
its owner, each attempt ends exactly once, tokens are those of an undisturbed run, every published block holds the KV of
the tokens that its hash stands for, and in the end nothing is left.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from common.blocks.block_hash import block_hashes
from common.engine.kv.block_pool import BlockPool
from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.models.load import load_model
from common.engine.run.runner import ModelRunner
from common.engine.sampling.sampler import Sampler
from common.engine.transfer.sender import KVSender
from common.engine.transfer.transports import interface
from common.engine.transfer.transports.tcp import Frames
from common.engine.worker.contract import RequestReceived, RouterLost
from common.engine.worker.loop import EngineConfig
from common.engine.worker.metrics import WorkerMetrics
from common.model_files.resolve import resolve_model
from common.wire.message_fields import pack_tokens
from common.wire.messages import (
    AbortRequest,
    DecodeRequest,
    HandOver,
    KVTarget,
    Message,
    PrefillRequest,
    RequestFailed,
    ResetPrefixCache,
    TokenOutput,
)
from common.wire.sampling_params import SamplingParams
from prefill_worker.engine import PrefillEngine
from prefill_worker.launcher import PromptLauncher
from prefill_worker.scheduler import PrefillScheduler

from ..examples import examples
from .lazy_device import LazyDevice

pytestmark = pytest.mark.slow


# A prefill engine and two decode engines joined by the real wire, and checks of what they own, send and publish.

Rig = Any  # EngineRig of conftest, which test modules cannot import
ROUTER = b"router"
NUM_TOKENS = 30
WAIT_S = 100.0


class Asked:
    """A request, its attempt, and the decode engine that has it. `handed`: its next attempt is a hand-over's."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.name, self.tokens = name, tokens
        self.attempt, self.place = 0, 0
        self.over = self.handed = False


def runner_of(engine: Any) -> Any:
    """What runs an engine's steps."""
    return engine._launcher._runner if isinstance(engine, PrefillEngine) else engine._runner


class Fleet:
    """One prefill engine and two decode engines; the test is their router. `pool` blocks each: they are scarce."""

    def __init__(self, make_engine: Callable[..., Rig], num_blocks: int) -> None:
        self.decode = [
            make_engine(num_blocks=num_blocks, worker_id=f"d{number}", launcher=launcher)
            for number, launcher in enumerate((None, self.launcher))
        ]
        first = self.decode[0]
        self.kv = KVCache(first.model.config, num_blocks, 16, "float32")
        self.sent: list[tuple[bytes, Message]] = []
        self.computing, self.linger = False, 1
        sender = KVSender(
            first.context, Frames(self.kv.block), None, self.kv.block_bytes, ("p", 5, "layout"),
            lambda event: self.prefill.notify(event), lease_s=30.0, num_streams=2,
        )  # fmt: skip
        self.prefill = PrefillEngine(
            self.sent.extend,
            EngineConfig(identity=("p", 5), eos_token_ids=first.eos, max_model_len=1024, max_waiting=64),
            PrefillScheduler(BlockPool(num_blocks, 16), max_num_batched_tokens=32, max_num_seqs=4),
            PromptLauncher(
                ModelRunner(load_model(resolve_model("tiny-random")), self.kv), Sampler(first.model.config.vocab_size)
            ),
            sender,
            WorkerMetrics("m", "p", lambda: self.prefill.status),
        )
        sender.start()
        self.engines = [self.prefill, *(rig.engine for rig in self.decode)]
        self.caches = [self.kv, *(rig.kv for rig in self.decode)]
        for engine in self.engines:
            runner = runner_of(engine)
            runner.forward = self.beside(engine, runner.forward)
        self.strays: list[str] = []
        self.owners: dict[int, tuple[Any, int]] = {}  # of a view that a sender took: its engine, and the block
        senders = (sender, *(rig.sender for rig in self.decode))
        for engine, its_sender in zip(self.engines, senders, strict=True):
            frames = its_sender._frames
            frames.view = self.remembering(engine, frames.view)
        self.texts: dict[bytes, tuple[tuple[int, ...], int]] = {}  # of a hash: a text, and which of its blocks

    def beside(self, engine: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward pass that takes so long that the other engines turn `linger` times meanwhile, and blocks travel."""

        def run(*arguments: Any) -> Any:
            result = forward(*arguments)
            if not self.computing:
                self.computing = True
                for turn in range(self.linger):
                    for other in self.engines:
                        if other is not engine:
                            other._turn()
                    time.sleep(0.002 if turn else 0.0)
                self.computing = False
            return result

        return run

    def remembering(self, engine: Any, view_of: Callable[[int], memoryview]) -> Callable[[int], memoryview]:
        def view(block: int) -> memoryview:
            taken = view_of(block)
            self.owners[id(taken)] = (engine, block)
            return taken

        return view

    def check_lent(self, request_id: str, views: Sequence[memoryview]) -> None:
        """Called by senders that are about to read blocks, and hold the lock that takes these back."""
        for view in views:
            engine, block = self.owners.pop(id(view))
            sequence = engine.scheduler.find(request_id)
            if sequence is None or not sequence.lent or block not in sequence.blocks:
                self.strays.append(f"block {block} was shipped for {request_id}, which does not own it")

    def launcher(self, runner: ModelRunner, sampler: Sampler) -> LazyDevice:
        self.device = LazyDevice(runner, sampler)
        return self.device

    # ------------------------------------------------------------ the router's part

    def ask(self, asked: Asked, *, remote: bool) -> None:
        """Send the present attempt to decode engine `place`, and with `remote` to the prefill engine."""
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        common = {
            "request_id": asked.name, "attempt": asked.attempt, "prompt": pack_tokens(asked.tokens), "params": params
        }  # fmt: skip
        rig = self.decode[asked.place]
        rig.tell(DecodeRequest(**common, prefill_worker="p" if remote else ""))
        if remote:
            target = KVTarget(f"d{asked.place}", 7, rig.receiver.address)
            self.prefill.submit(RequestReceived(ROUTER, PrefillRequest(**common, decode=target)))

    def hand_over(self, asked: Asked) -> None:
        """Begin a hand-over to the other decode engine, whose attempt counts from now on if it succeeds."""
        source, target = self.decode[asked.place], self.decode[1 - asked.place]
        output = self.output(asked)
        if asked.handed or not output or self.ended(asked):
            return
        asked.handed = True
        num_reserved = NUM_TOKENS - len(output)
        request = DecodeRequest(
            request_id=asked.name, attempt=asked.attempt + 1, prompt=pack_tokens(asked.tokens + output),
            params=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
            prefill_worker=f"d{asked.place}", num_output_tokens=len(output), num_reserved_tokens=num_reserved,
        )  # fmt: skip
        target.tell(request)
        order = HandOver(
            request_id=asked.name, attempt=asked.attempt, new_attempt=asked.attempt + 1,
            target=KVTarget(f"d{1 - asked.place}", 7, target.receiver.address),
            num_output_tokens=len(output), num_reserved_tokens=num_reserved,
        )  # fmt: skip
        source.tell(order)

    def react(self, asked: Asked) -> None:
        """What a router does about failures, and about those who do not know yet that it is over."""
        moved = any(delta.finish_reason == "moved" for delta in self.deltas(asked, asked.attempt))
        reasons = [delta.finish_reason for a in (0, 1) for delta in self.deltas(asked, asked.attempt + a)]
        knowing = [engine for engine in self.engines if engine.scheduler.find(asked.name) is not None]
        if "length" in reasons or self.failures(asked, asked.attempt):
            self.abort(asked, knowing)
        elif self.failures(asked, asked.attempt + 1):
            target = self.decode[1 - asked.place].engine
            self.abort(asked, [engine for engine in knowing if moved or engine is target])

    def abort(self, asked: Asked, where: list[Any]) -> None:
        for engine in where:
            engine.submit(RequestReceived(ROUTER, AbortRequest(request_id=asked.name, attempt=asked.attempt + 1)))

    # ------------------------------------------------------------ what came

    def deltas(self, asked: Asked, attempt: int) -> list[Any]:
        rigs = [message for rig in self.decode for _, message in rig.sent]
        outputs = [message for message in rigs if isinstance(message, TokenOutput)]
        return [d for o in outputs for d in o.outputs if (d.request_id, d.attempt) == (asked.name, attempt)]

    def output(self, asked: Asked) -> list[int]:
        """What decode engines generated under the present attempt."""
        return [token for delta in self.deltas(asked, asked.attempt) for token in delta.token_ids]

    def failures(self, asked: Asked, attempt: int) -> list[RequestFailed]:
        sent = [message for rig in self.decode for _, message in rig.sent] + [message for _, message in self.sent]
        failed = [message for message in sent if isinstance(message, RequestFailed)]
        return [message for message in failed if (message.request_id, message.attempt) == (asked.name, attempt)]

    def ended(self, asked: Asked) -> bool:
        reasons = [delta.finish_reason for delta in self.deltas(asked, asked.attempt)]
        return any(reasons) or bool(self.failures(asked, asked.attempt))

    # ------------------------------------------------------------ time

    def turn(self, source: random.Random, count: int) -> None:
        for _ in range(count):
            source.choice(self.engines)._turn()

    def settle(self, asked: Sequence[Asked] = ()) -> None:
        """Work on until no worker knows a request."""
        began = time.monotonic()
        while not all(engine._inbox.empty() and engine.is_empty for engine in self.engines):
            waited_s = time.monotonic() - began
            assert waited_s < WAIT_S, [[(s.request_id, s.attempt) for s in engine.scheduler] for engine in self.engines]
            for engine in self.engines:
                engine._turn()
            for one in asked:
                self.react(one)
            if waited_s > 0.5:
                for rig in self.decode:
                    rig.later(11.0)  # workers refuse announcements without a request

    def check(self) -> None:
        assert not self.strays
        for engine in self.engines:
            engine.check_integrity()

    def learn(self, text: list[int]) -> None:
        """A text whose blocks may be published."""
        for index, block_hash in enumerate(block_hashes(text, 16)):
            self.texts.setdefault(block_hash, (tuple(text), index))

    def check_published(self) -> None:
        """Every published block of every engine holds the KV of its tokens."""
        for engine, cache in zip(self.engines, self.caches, strict=True):
            for block_hash, block in engine.scheduler.pool._block_of.items():
                text, index = self.texts[block_hash]
                found = np.frombuffer(cache.block(block), np.float32)
                assert np.abs(found - self.true_block(text, index)).max() < 1e-3, (engine, text, index)

    @functools.lru_cache(maxsize=512)  # noqa: B019 - the fleet lives as long as its test
    def true_block(self, text: tuple[int, ...], index: int) -> np.ndarray[Any, Any]:
        count = len(text) // 16
        cache = KVCache(self.kv.config, count, 16, "float32")
        ModelRunner(self.decode[0].model, cache).forward([SequenceChunk(text[: count * 16], 0, range(count))])
        return np.frombuffer(bytes(cache.block(index)), np.float32)

    def close(self) -> None:
        self.prefill.close()


@pytest.fixture
def fleet(make_engine: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    fleet = Fleet(make_engine, num_blocks=16)
    send = interface.try_send_blocks

    def checked(stream: Any, request_id: str, attempt: int, first: int, views: Any, *rest: Any) -> bool:
        fleet.check_lent(request_id, views)
        return send(stream, request_id, attempt, first, views, *rest)

    monkeypatch.setattr(interface, "try_send_blocks", checked)
    yield fleet
    fleet.settle()
    fleet.close()


class Story:
    """One run of events on a fleet that the runs before have left empty."""

    count = 0

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet, self.source = fleet, random.Random(seed)
        self.asked: list[Asked] = []
        for sent in (fleet.sent, *(rig.sent for rig in fleet.decode)):
            sent.clear()

    def happen(self, event: str) -> None:
        live = [asked for asked in self.asked if not asked.over]
        if event == "ask" or not live:
            self.begin()
            return
        asked = self.source.choice(live)
        match event:
            case "again":  # the router found another prefill worker, or none
                if not asked.handed and not self.fleet.ended(asked):
                    asked.attempt += 1
                    self.fleet.ask(asked, remote=self.source.random() < 0.7)
            case "twice":
                if not asked.handed and not self.fleet.ended(asked):
                    self.fleet.ask(asked, remote=True)
            case "hand over":
                for one in live:
                    self.fleet.hand_over(one)
            case "abort":
                asked.over = True
                self.fleet.abort(asked, self.fleet.engines)
            case "abort prefill":  # the decode engine is left to find out, and told later
                asked.over = True
                self.fleet.abort(asked, [self.fleet.prefill])
                self.fleet.turn(self.source, 6)
                self.fleet.abort(asked, self.fleet.engines)
            case "lose router":
                for other in live:
                    other.over = True
                for engine in self.fleet.engines:
                    engine.notify(RouterLost(ROUTER))
            case "stall":  # no block came for longer than allowed
                for rig in self.fleet.decode:
                    rig.later(31.0)
            case "reset":
                for engine in self.fleet.engines:
                    engine.submit(RequestReceived(ROUTER, ResetPrefixCache(request_id="reset")))
            case "fail":
                self.fail_a_step()
            case "crowd":
                self.crowd()
            case "turn":
                self.fleet.turn(self.source, self.source.randrange(1, 20))

    def begin(self) -> None:
        self.ask(self.source.randrange(1, 110), self.source.randrange(2), remote=self.source.random() < 0.8)

    def ask(self, length: int, place: int, *, remote: bool) -> Asked:
        Story.count += 1
        asked = Asked(f"r{Story.count}", [self.source.randrange(1, 255) for _ in range(length)])
        asked.place = place
        self.asked.append(asked)
        self.fleet.learn(asked.tokens + self.fleet.decode[0].oracle(asked.tokens, NUM_TOKENS, ignore_eos=True))
        self.fleet.ask(asked, remote=remote)
        return asked

    def crowd(self) -> None:
        """Three sequences that together outgrow their worker; they are handed over about when one is preempted."""
        place = self.source.randrange(2)
        engine = self.fleet.decode[place].engine
        three = [self.ask(self.source.randrange(66, 80), place, remote=False) for _ in range(3)]
        for _ in range(60):
            if engine.scheduler.lacks_blocks:
                break
            engine._turn()
        for one in three:
            self.fleet.hand_over(one)
        self.fleet.linger = 40
        for _ in range(4):
            engine._turn()
        self.fleet.linger = 1

    def fail_a_step(self) -> None:
        engine, device = self.source.choice(self.fleet.engines), self.fleet.device
        if engine is self.fleet.decode[1].engine:
            device.fail_full = True
            return
        forward = runner_of(engine).forward

        def raise_once(*arguments: object) -> None:
            runner_of(engine).forward = forward
            raise RuntimeError("scripted")

        runner_of(engine).forward = raise_once
        engine._turn()
        runner_of(engine).forward = forward

    def end(self) -> None:
        """Let everything run out, and look at what came of it."""
        self.fleet.settle(self.asked)
        for asked in self.asked:
            expected = self.fleet.decode[0].oracle(asked.tokens, NUM_TOKENS, ignore_eos=True)
            for attempt in range(asked.attempt + 2):
                deltas = self.fleet.deltas(asked, attempt)
                for delta in deltas:
                    assert delta.token_ids == tuple(expected[delta.index : delta.index + len(delta.token_ids)])
                assert sum(bool(delta.finish_reason) for delta in deltas) <= 1
            if not asked.over:
                assert self.finished(asked) or self.failed(asked)

    def finished(self, asked: Asked) -> bool:
        attempts = (asked.attempt, asked.attempt + 1)  # the second is a hand-over's
        return any(delta.finish_reason == "length" for a in attempts for delta in self.fleet.deltas(asked, a))

    def failed(self, asked: Asked) -> bool:
        return any(self.fleet.failures(asked, attempt) for attempt in (asked.attempt, asked.attempt + 1))


EVENTS = (
    *("ask", "again", "twice", "hand over", "abort", "abort prefill", "lose router", "stall", "reset", "fail"),
    *("turn",) * 8,
    *("ask",) * 2,
    *("hand over",) * 2,
    "fail",
)
ORDERS = settings(
    derandomize=True,
    deadline=None,
    max_examples=examples(12),
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def tell(fleet: Fleet, seed: int, events: list[str]) -> None:
    story = Story(fleet, seed)
    for event in events:
        story.happen(event)
        fleet.check()
        fleet.check_published()
    story.end()
    fleet.check_published()
    for engine in fleet.engines:
        assert engine.check_integrity().owned == 0


@pytest.mark.timeout(300)  # its waits are real
@given(seed=st.integers(0, 2**32), events=st.lists(st.sampled_from(EVENTS), min_size=5, max_size=40))
@ORDERS
def test_any_order_of_events_leaves_the_right_tokens_and_nothing_else(
    fleet: Fleet, seed: int, events: list[str]
) -> None:
    tell(fleet, seed, events)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_preempted_while_it_leaves_is_shipped_no_more(fleet: Fleet, seed: int) -> None:
    source = random.Random(seed)
    tell(fleet, seed, [*source.choices(("turn", "fail", "abort", "ask"), k=source.randrange(4)), *["crowd"] * 3])
