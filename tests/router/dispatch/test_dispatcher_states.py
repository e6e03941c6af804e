"""The dispatcher over an imagined fleet, under any order of deaths, restarts, pauses, losses, repetitions and aborts.

Each request ends exactly once and with the tokens of an undisturbed run, and nothing stays booked. Where workers round
differently, or have other weights, each token is one that some worker computes behind exactly those before it, by the
weights of the first.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.config import RouterConfig
from common.wire.messages import KVTarget, Message
from common.wire.sampling_params import SamplingParams
from router.dispatch.client import GenerationRequest
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.request_state import Assignment, RequestState
from router.dispatch.silence import silence_reason
from router.fleet.worker import Worker
from router.fleet.worker_connection import WorkerConnection

from ...examples import examples
from ...fake_worker import FakeWorker, expected, next_token

# A scripted worker that moves when a state machine says so, and what is asked of it.

KV = dict[tuple[str, int, str, int], list[int]]
ROUTER = b"router"
ROUNDINGS = range(3)


def follows(prompt: list[int], tokens: list[int]) -> bool:
    """Whether workers of one model may have made these tokens, each behind those before it."""
    weights = {token // 10_000 for token in tokens}
    known = [*prompt, *tokens]
    possible = (
        {next_token(known[:i], r, w) for r in ROUNDINGS for w in weights} for i in range(len(prompt), len(known))
    )
    return len(weights) <= 1 and all(token in choices for token, choices in zip(tokens, possible, strict=True))


class SteppedWorker(FakeWorker):
    """A scripted worker whose messages travel, and whose requests advance, when the machine says so."""

    def __init__(self, role: str, address: str, kv: KV, rounding: int, weights: int) -> None:
        identity = {"fingerprint": f"{weights}", "weights": f"{weights}", "max_num_seqs": 8}
        super().__init__(address.rpartition(":")[2], role, **identity)
        self.address, self.kv = address, kv
        self.script = partial(next_token, rounding=rounding, weights=weights)
        self.alive = self.awake = True
        self.inbox, self.outbox = deque[Message](), deque[Message]()

    def send(self, router: bytes, message: Message) -> None:
        self.outbox.append(message)

    def ship(self, request_id: str, attempt: int, target: KVTarget, tokens: list[int]) -> None:
        self.kv[(request_id, attempt, target.worker_id, target.epoch)] = list(tokens)

    def read(self) -> None:
        """Take the next message from the router."""
        if self.awake and self.inbox:
            self.take(ROUTER, self.inbox.popleft())

    def work(self, number: int) -> None:
        """Advance one request by a token, or by its hand-over, which fails at times."""
        if not self.awake or not self.jobs:
            return
        job = list(self.jobs.values())[number % len(self.jobs)]
        if job.tokens is None:
            key = (job.request.request_id, job.request.attempt, self.worker_id, self.epoch)
            if key not in self.kv:
                return
            job.tokens = list(self.kv[key])
        if job.order is None or number % 3 == 0:
            self.advance(job)
        elif number % 3 == 1:
            self.fail(ROUTER, job.order)
            job.order = None
        else:
            self.hand_over(job)

    def refuse(self, number: int) -> None:
        """Give a request up."""
        if self.awake and self.jobs:
            self.fail(ROUTER, self.jobs.pop(list(self.jobs)[number % len(self.jobs)]).request)

    def go_on(self) -> None:
        """Say of every request that it makes progress."""
        for job in self.jobs.values() if self.awake else ():
            self.output(ROUTER, job.request, job.index, [])

    def forget(self) -> None:
        self.jobs.clear()
        self.inbox.clear()
        self.outbox.clear()


@dataclass
class Asked:
    """A request, what came of it, and how it ended."""

    prompt: list[int]
    count: int
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


BEAT_S, TIMEOUT_S, TOKEN_TIMEOUT_S = 0.25, 1.0, 4.0
POOLS = ("prefill", "prefill", "decode", "decode", "decode")
T = TypeVar("T")


class DispatcherMachine(RuleBasedStateMachine):
    roundings: Sequence[int] = (0,) * len(POOLS)
    weights: Sequence[int] = (0,) * len(POOLS)

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.num_lost = 0
        self.kv: KV = {}
        self.workers = [
            SteppedWorker(role, f"tcp://127.0.0.1:{number}", self.kv, rounding, weights)
            for number, (role, rounding, weights) in enumerate(zip(POOLS, self.roundings, self.weights, strict=True), 1)
        ]
        self.by_address = {worker.address: worker for worker in self.workers}
        self.asked: list[Asked] = []
        self.said: list[tuple[SteppedWorker, Message]] = []
        self.loop = asyncio.new_event_loop()
        self.patch = patch.object(WorkerConnection, "send", lambda connection, message: self.carry(connection, message))
        self.patch.start()
        self.blamed: list[str] = []
        self.dispatcher = self.run(self.make_dispatcher)
        for worker in self.workers:
            self.greet(worker)

    def make_dispatcher(self) -> Dispatcher:
        config = RouterConfig(
            prefill=tuple(worker.address for worker in self.workers if worker.role == "prefill"),
            decode=tuple(worker.address for worker in self.workers if worker.role == "decode"),
            heartbeat_s=BEAT_S, worker_timeout_s=TIMEOUT_S, queue_timeout_s=3600.0, request_timeout_s=3600.0,
            prefill_timeout_s=TOKEN_TIMEOUT_S, token_timeout_s=TOKEN_TIMEOUT_S, max_retries=100,
            local_prefill_threshold=3,
        )  # fmt: skip
        with patch("router.fleet.fleet.secrets.token_hex", return_value="router"):  # or equal workers' order differs
            dispatcher = Dispatcher(config)
        dispatcher._open = True
        dispatcher._clock = dispatcher.fleet._clock = lambda: self.now
        recover = dispatcher.core._recovery.recover
        dispatcher.core._recovery.recover = lambda state, failed, reason, now, **how: (  # type: ignore[method-assign]
            self.blamed.append(reason) or recover(state, failed, reason, now, **how)  # type: ignore[func-returns-value]
        )
        quiet = dispatcher.core._silence
        self.silent = quiet.silent
        quiet.silent = self.silent_as_when_all_are_asked  # type: ignore[method-assign]
        return dispatcher

    def silent_as_when_all_are_asked(
        self, ids: Collection[str], workers: Mapping[str, Worker], now: float
    ) -> list[tuple[RequestState, Assignment, str]]:
        core, asked = self.dispatcher.core, []
        for state in core.states.values():
            if not state.done and (assignment := state.waits_for) is not None:
                idle_since = workers[assignment.address].life.idle_since
                asked.append((state, assignment, silence_reason(state, assignment, core._config, idle_since, now)))
        found = self.silent(ids, workers, now)
        told = [(state.request.request_id, why) for state, _, why in found]
        assert told == [(state.request.request_id, why) for state, _, why in asked if why]
        return found

    # ------------------------------------------------------------ what can happen

    @rule(seed=st.integers(0, 2**32), num=st.integers(1, 4))
    def ask(self, seed: int, num: int) -> None:
        source = random.Random(seed)
        for _ in range(num):
            self.ask_one([source.randrange(1, 500) for _ in range(source.randrange(1, 10))], source.randrange(1, 13))

    def ask_one(self, prompt: list[int], count: int) -> None:
        asked = Asked(prompt, count)
        request = GenerationRequest(
            f"r{len(self.asked)}", prompt, SamplingParams(max_tokens=count, ignore_eos=True), deadline_s=3600.0
        )
        self.asked.append(asked)

        def begin() -> None:
            asked.task = self.loop.create_task(self.consume(request, asked))

        self.run(begin)

    @rule(seed=st.integers(0, 2**32), num=st.integers(1, 150))
    def progress(self, seed: int, num: int) -> None:
        """Workers read, work and speak, in any order."""
        source = random.Random(seed)
        for _ in range(num):
            worker = source.choice(self.workers)
            move = source.randrange(3)
            if move == 0:
                worker.read()
            elif move == 1:
                worker.work(source.randrange(100))
            else:
                self.hear(worker)

    @rule(seed=st.integers(0, 2**32))
    def progress_a_little(self, seed: int) -> None:
        self.progress(seed, 20)

    @rule(count=st.integers(1, 6))
    def tick(self, count: int) -> None:
        for _ in range(count):
            self.pass_time(BEAT_S)

    @rule(index=st.integers(0, 4), said=st.booleans())
    def die(self, index: int, said: bool) -> None:
        """With `said`, what it had sent still arrives."""
        worker = self.workers[index]
        if worker.alive:
            while said and worker.outbox:
                self.hear(worker)
            worker.alive = worker.awake = False
            worker.forget()
            self.run(lambda: self.dispatcher.fleet._monitor.on_cut(worker.address, self.now))

    @precondition(lambda self: any(self.transferring()))
    @rule()
    def die_in_transfer(self) -> None:
        """The client has its first token, the decode worker not yet its KV."""
        victim = self.transferring()[0]
        self.kv.clear()
        self.num_lost += 1
        self.die(self.workers.index(victim), False)

    @rule(index=st.integers(0, 4))
    def restart(self, index: int) -> None:
        worker = self.workers[index]
        if not worker.alive:
            worker.alive, worker.awake = True, True
            worker.beat.clear()
            worker.epoch += 1
            self.greet(worker)

    @rule(index=st.integers(0, 4), awake=st.booleans())
    def pause(self, index: int, awake: bool) -> None:
        worker = self.workers[index]
        worker.awake = worker.alive and awake

    @rule(index=st.integers(0, 4), draining=st.booleans())
    def drain(self, index: int, draining: bool) -> None:
        self.workers[index].beat["draining"] = draining
        self.pass_time(BEAT_S)

    @precondition(lambda self: any(self.streaming()))
    @rule()
    def drain_a_busy_one(self) -> None:
        self.drain(self.workers.index(self.streaming()[0]), True)

    @rule(index=st.integers(0, 4), number=st.integers(0, 99))
    def refuse(self, index: int, number: int) -> None:
        self.workers[index].refuse(number)

    @rule(index=st.integers(0, 4))
    def go_on(self, index: int) -> None:
        self.workers[index].go_on()

    @rule(index=st.integers(0, 4), outgoing=st.booleans())
    def lose(self, index: int, outgoing: bool) -> None:
        """A message vanishes although the connection stays."""
        worker = self.workers[index]
        queue = worker.outbox if outgoing else worker.inbox
        if queue:
            queue.popleft()
            self.num_lost += 1

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A worker says again what it said long ago."""
        worker, message = data.draw(st.sampled_from(self.said))
        self.run(lambda: self.dispatcher.fleet._on_message(worker.address, message))  # type: ignore[arg-type]

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        if asked.task is not None:
            self.run(asked.task.cancel)

    # ------------------------------------------------------------ what must hold

    @invariant()
    def nothing_wrong_was_streamed(self) -> None:
        for asked in self.asked:
            assert self.is_right(asked)
            assert len(asked.ends) <= 1

    @invariant()
    def nobody_is_blamed_for_rounding(self) -> None:
        """All of them are honest."""
        assert not [reason for reason in self.blamed if "other tokens" in reason]

    @invariant()
    def bookings_belong_to_requests(self) -> None:
        states = self.dispatcher.core.states.values()
        used = [
            a.booking.serial
            for f in states
            for a in (f.attempts.prefill, f.attempts.decode, f.attempts.successor)
            if a is not None
        ]
        booked = [
            serial for worker in self.dispatcher.fleet.registry.workers.values() for serial in worker.bookings.by_serial
        ]
        assert set(booked) <= set(used)
        assert len(used) == len(set(used))

    @invariant()
    def what_is_decoded_is_known(self) -> None:
        core = self.dispatcher.core
        core._decoding.look()
        running = [state for state in core.states.values() if not state.done]
        assert core._decoding.open == [state for state in running if state.decoded_on is None]
        begun: dict[str, dict[str, float]] = {}
        for state in running:
            if (decode := state.decoded_on) is not None:
                begun.setdefault(decode.address, {})[state.request.request_id] = decode.delivered_at
        assert core._decoding.begun == begun

    def teardown(self) -> None:
        try:
            for worker in self.workers:
                worker.beat.clear()
                worker.awake = worker.alive
                self.restart(self.workers.index(worker))
            for _ in range(400):
                if all(asked.ends for asked in self.asked):
                    break
                for worker in self.workers:
                    while worker.inbox:
                        worker.read()
                    for number in range(len(worker.jobs)):
                        worker.work(number)
                    while worker.outbox:
                        self.hear(worker)
                self.pass_time(BEAT_S)
            for asked in self.asked:
                assert asked.ends in (["length"], ["aborted"])
                assert asked.ends == ["aborted"] or len(asked.tokens) == asked.count
                assert self.is_right(asked)
            self.nobody_is_blamed_for_rounding()
            self.pass_time(BEAT_S)
            for worker in self.workers:
                while worker.inbox:
                    worker.read()
                # One that speaks is told to forget it; one that waits for KV in vain has deadlines of its own.
                assert all(job.tokens is None and self.num_lost for job in worker.jobs.values())
            assert not self.dispatcher.core.states
            assert not self.dispatcher.core.waiting
            for known in self.dispatcher.fleet.registry.workers.values():
                assert (
                    known.bookings.total.num_requests,
                    known.bookings.total.num_tokens,
                    known.bookings.total.num_blocks,
                ) == (0, 0, 0)
        finally:
            for asked in self.asked:
                if asked.task is not None:
                    self.run(asked.task.cancel)
            self.loop.close()
            self.patch.stop()

    # ------------------------------------------------------------ inside

    def is_right(self, asked: Asked) -> bool:
        """Whether what was streamed is what honest workers make."""
        if any(self.roundings) or any(self.weights):
            return follows(asked.prompt, asked.tokens)
        return asked.tokens == expected(asked.prompt, asked.count)[: len(asked.tokens)]

    def streaming(self) -> list[SteppedWorker]:
        """Decode workers whose tokens come."""
        decode = [state.attempts.decode for state in self.dispatcher.core.states.values() if not state.done]
        return [self.by_address[one.address] for one in decode if one is not None and one.delivered]

    def transferring(self) -> list[SteppedWorker]:
        """Prefill workers that have sent a first token, of which the decode worker has not told yet."""
        states = [state for state in self.dispatcher.core.states.values() if state.stage == "transfer"]
        prefill = [
            self.by_address[state.attempts.prefill.address] for state in states if state.attempts.prefill is not None
        ]
        return [worker for worker in prefill if worker.alive]

    async def consume(self, request: GenerationRequest, asked: Asked) -> None:
        reason = "nothing"
        try:
            async with aclosing(self.dispatcher.generate(request)) as events:
                async for event in events:
                    asked.tokens += event.token_ids
                    reason = event.finish_reason
        except asyncio.CancelledError:
            reason = "aborted"
        finally:
            asked.ends.append(reason)

    def run(self, action: Callable[[], T]) -> T:
        async def act() -> T:
            result = action()
            for _ in range(3):
                await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(act())

    def carry(self, connection: WorkerConnection, message: Message) -> bool:
        worker = self.by_address[connection.address]
        if worker.alive:
            worker.inbox.append(message)
        return worker.alive

    def hear(self, worker: SteppedWorker) -> None:
        """The router gets the worker's next message."""
        if worker.outbox:
            message = worker.outbox.popleft()
            self.said.append((worker, message))
            self.run(lambda: self.dispatcher.fleet._on_message(worker.address, message))  # type: ignore[arg-type]

    def greet(self, worker: SteppedWorker) -> None:
        def speak() -> None:
            self.dispatcher.fleet._on_message(worker.address, worker.hello_message())
            self.dispatcher.fleet._on_message(worker.address, worker.heartbeat(ROUTER))

        self.run(speak)

    def pass_time(self, seconds: float) -> None:
        """What the fleet does at each beat, after the workers' own."""
        self.now += seconds
        fleet = self.dispatcher.fleet
        for worker in self.workers:
            if worker.awake:
                worker.step += 1
                if fleet.registry.needs_hello(worker.address):
                    self.greet(worker)
                else:
                    self.run(lambda worker=worker: fleet._on_message(worker.address, worker.heartbeat(ROUTER)))

        def tick() -> None:
            fleet._monitor.sweep(self.now)
            for connection in fleet.connections.values():
                connection.flush_aborts()
            self.dispatcher.on_tick(self.now)

        self.run(tick)


class RoundingMachine(DispatcherMachine):
    """Every worker rounds in its own way: what one computes anew is not what another sent."""

    roundings = (0, 1, 2, 0, 1)


class WeightsMachine(DispatcherMachine):
    """In the middle of a rolling change of the model; both have prefill and decode workers."""

    roundings = (0, 1, 0, 1, 2)
    weights = (0, 1, 0, 0, 1)


TestDispatcherMachine = DispatcherMachine.TestCase
TestRoundingMachine = RoundingMachine.TestCase
TestWeightsMachine = WeightsMachine.TestCase
TestDispatcherMachine.settings = TestRoundingMachine.settings = TestWeightsMachine.settings = settings(
    derandomize=True,
    deadline=None,
    max_examples=examples(80),
    stateful_step_count=50,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
