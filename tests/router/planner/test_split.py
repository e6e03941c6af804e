"""Which split is predicted to miss least, and what the whole loop makes of it in virtual time."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from common.config import RouterConfig
from common.latency.step_model import StepModel, StepShape
from common.wire.messages import ChangeRole, Message
from router.dispatch import role_changes
from router.dispatch.load import DispatchCounters
from router.dispatch.role_changes import RoleChanges
from router.fleet.registry import WorkerRegistry
from router.planner import split
from router.planner.offered_load import OfferedLoad, SampledRequest
from router.planner.pool import Fleet, Goals, PoolState, WorkerKind
from router.planner.split import PresentWork, SizingForecaster, SplitEvaluator

from ...fake_worker import heartbeat_of, hello_of

# Four or more workers in virtual time, behind production's registry, forecaster and `RoleChanges`.
#
# Prompts wait in line, rows share steps, admission refuses what it predicts to miss a goal, a drained worker changes.
# Routing is plain: the worker with least to do.

PREFILL = StepModel(fixed_s=0.01, token_s=2e-4, num_steps=1000)
DECODE = StepModel(fixed_s=0.04, token_s=2e-4, row_s=0.002, num_steps=1000)
BLOCK, NUM_BLOCKS = 16, 20_000
STEP_TOKENS = {"prefill": 512, "decode": 128}
DT_S, BEAT_S, CHANGE_S = 0.01, 0.25, 0.25
CAREFUL = 0.95
"""Admission fills workers up to this share of the goal for tokens: prompts come between tokens."""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Role changes come sooner than by default."""
    monkeypatch.setattr(role_changes, "CHANGE_AFTER_S", 2.0)
    monkeypatch.setattr(role_changes, "CHANGE_INTERVAL_S", 5.0)
    monkeypatch.setattr(split, "CHANGE_INTERVAL_S", 5.0)


@dataclass
class Request:
    """`began` and `first` in seconds; it has `done` of its tokens."""

    num_prompt: int
    num_output: int
    began: float
    first: float = 0.0
    ended: float = 0.0
    done: int = 0
    serial: int = 0
    booking: object = None

    def met(self, ttft_s: float, tpot_s: float) -> bool:
        if not self.ended:
            return False
        return self.first - self.began <= ttft_s and self.ended - self.first <= tpot_s * (self.num_output - 1)


@dataclass
class Node:
    """One worker: prompts in line with the seconds that they still take, and the rows of its steps."""

    name: str
    role: str
    epoch: int = 1
    prompts: list[tuple[Request, float]] = field(default_factory=list)
    rows: list[Request] = field(default_factory=list)
    coming: int = 0
    step_left_s: float = 0.0
    changes_to: str = ""
    ready_at: float = 0.0

    @property
    def wait_s(self) -> float:
        return sum(left for _, left in self.prompts)


class World:
    """`least` bounds and times of role changes are settings of a router; without `role_change` the split is fixed."""

    def __init__(
        self, prefill: int, decode: int, *, ttft_ms: float = 4000.0, tpot_ms: float = 70.0, **settings: object
    ):
        names = {f"p{i}": "prefill" for i in range(prefill)} | {f"d{i}": "decode" for i in range(decode)}
        self.nodes = {name: Node(name, role) for name, role in names.items()}
        of = {role: tuple(name for name in names if names[name] == role) for role in ("prefill", "decode")}
        self.config = RouterConfig(
            **{"slo_ttft_ms": ttft_ms, "slo_tpot_ms": tpot_ms, "role_change": True} | settings  # type: ignore[arg-type]
        )
        self.ttft_s, self.tpot_s = ttft_ms / 1e3, tpot_ms / 1e3
        self.registry = WorkerRegistry(list(of["prefill"]), list(of["decode"]), worker_timeout_s=2.0)
        self.forecaster = SizingForecaster(self.config)
        self.counters = DispatchCounters()
        self.changes = RoleChanges(self.config, self.registry, self.send, "a", self.counters, self.forecaster)
        self.now, self.beat_at = 0.0, 0.0
        self.requests: list[Request] = []
        self.orders: list[tuple[float, str, ChangeRole]] = []
        self.splits: list[tuple[float, int, int]] = []
        self.silent: set[str] = set()
        for node in self.nodes.values():
            self.hello(node)
        self.beat()

    def hello(self, node: Node) -> None:
        home = self.registry.workers[node.name].home
        told = hello_of(
            node.name, node.role, epoch=node.epoch, home=home, changes_role=True, max_num_seqs=64, block_size=BLOCK,
            num_blocks=NUM_BLOCKS, max_step_tokens=STEP_TOKENS[node.role], max_model_len=8192,
        )  # fmt: skip
        self.registry.on_hello(node.name, told, self.now)

    def beat(self) -> None:
        for node in self.nodes.values():
            if node.name in self.silent or self.now < node.ready_at:
                continue
            beat = heartbeat_of(
                node.name, epoch=node.epoch, step=int(self.now / BEAT_S) + 1, planner="a",
                draining=bool(node.changes_to), num_running=len(node.rows) + len(node.prompts),
                num_free_blocks=NUM_BLOCKS,
                num_context_tokens=sum(one.num_prompt + one.done for one in node.rows), waiting_s=node.wait_s,
                num_waiting_tokens=round(node.wait_s * 5000), step_model=PREFILL if node.role == "prefill" else DECODE,
                serial=max((one.serial for one in node.rows), default=0),
            )  # fmt: skip
            self.registry.on_heartbeat(node.name, beat, self.now)

    def send(self, address: str, message: Message) -> bool:
        assert isinstance(message, ChangeRole)
        self.orders.append((self.now, address, message))
        self.nodes[address].changes_to = message.role
        self.beat()
        return True

    def of(self, role: str) -> list[Node]:
        return [node for node in self.nodes.values() if node.role == role and self.usable(node)]

    def usable(self, node: Node) -> bool:
        return not node.changes_to and self.now >= node.ready_at and node.name not in self.silent

    # ------------------------------------------------------------ requests

    def offer(self, num_prompt: int, num_output: int) -> None:
        request = Request(num_prompt, num_output, self.now)
        self.requests.append(request)
        self.changes.arrived(num_prompt, 0, num_output, self.now)
        decode = min(self.of("decode"), key=lambda node: len(node.rows) + node.coming)
        first = min(self.of("prefill"), key=lambda node: node.wait_s, default=decode)
        model = PREFILL if first.role == "prefill" else DECODE
        beside = StepShape.of_rows(0 if first.role == "prefill" else len(decode.rows), 0)
        own_s = model.steps_s(StepShape.of_prompt(0, num_prompt), STEP_TOKENS[first.role], beside)
        if first.wait_s + own_s > self.ttft_s:
            self.counters.num_refused_for["prefill"] += 1
            return
        if DECODE.seconds(StepShape.of_rows(len(decode.rows) + decode.coming + 1, 0)) > CAREFUL * self.tpot_s:
            self.counters.num_refused_for["decode"] += 1
            return
        first.prompts.append((request, own_s))

    def advance(self) -> None:
        self.now += DT_S
        for node in list(self.nodes.values()):
            self.compute(node)
            if node.changes_to:
                self.drain(node)
        if self.now - self.beat_at >= BEAT_S:
            self.beat_at = self.now
            self.beat()
            self.registry.sweep(self.now)
            self.grow()
            self.changes.tick(self.now)
            split = (len(self.of("prefill")), len(self.of("decode")))
            if not self.splits or self.splits[-1][1:] != split:
                self.splits.append((self.now, *split))

    def compute(self, node: Node) -> None:
        """Prompts first, as far as the time goes; a decode worker's rows stand still meanwhile."""
        left_s = DT_S
        while node.prompts and left_s > 0.0:
            request, own_s = node.prompts[0]
            spent = min(left_s, own_s)
            left_s -= spent
            if own_s > spent:
                node.prompts[0] = (request, own_s - spent)
            else:
                node.prompts.pop(0)
                request.first, request.done = self.now, 1
                self.decode(request)
        if node.rows and left_s > 0.0:
            node.step_left_s -= left_s
            if node.step_left_s <= 0.0:
                node.step_left_s += DECODE.seconds(StepShape.of_rows(len(node.rows), 0))
                for request in list(node.rows):
                    request.done += 1
                    if request.done >= request.num_output:
                        request.ended = self.now
                        node.rows.remove(request)
                        self.registry.release(request.booking)  # type: ignore[arg-type]
                        self.changes.ended(request.num_prompt, request.num_output)

    def decode(self, request: Request) -> None:
        node = min(self.of("decode"), key=lambda node: len(node.rows))
        node.rows.append(request)
        if request.booking is not None:
            self.registry.release(request.booking)  # type: ignore[arg-type]
        more = (request.num_output - request.done) // BLOCK
        booking = self.registry.book(node.name, self.now, prompt=StepShape(), num_blocks=1, num_more=more)
        request.booking, request.serial = booking, booking.serial

    def grow(self) -> None:
        for node in self.nodes.values():
            sizes = {one.serial: (0, (one.num_output - one.done) // BLOCK) for one in node.rows}
            self.registry.resize(node.name, sizes)

    def drain(self, node: Node) -> None:
        if node.prompts:
            return
        for request in list(node.rows):
            node.rows.remove(request)
            self.decode(request)
        node.role, node.changes_to, node.epoch = node.changes_to, "", node.epoch + 1
        node.ready_at = self.now + CHANGE_S
        self.hello(node)

    # ------------------------------------------------------------ loads

    def run(self, seconds: float, kinds: Iterable[tuple[float, int, int]], seed: int = 1) -> int:
        """Poisson arrivals of (rate, prompt tokens, answer tokens); how many requests met both goals."""
        chance, end, begin = random.Random(seed), self.now + seconds, len(self.requests)
        due = [(self.now + chance.expovariate(rate), rate, prompt, output) for rate, prompt, output in kinds if rate]
        while self.now < end:
            self.advance()
            for number, (at, rate, prompt, output) in enumerate(due):
                if at <= self.now:
                    self.offer(prompt, output)
                    due[number] = (at + chance.expovariate(rate), rate, prompt, output)
        return self.met(begin)

    def met(self, begin: int = 0) -> int:
        return sum(one.met(self.ttft_s, self.tpot_s) for one in self.requests[begin:])


FLEET = Fleet(
    {
        "prefill": PoolState(WorkerKind(PREFILL, num_blocks=4000, max_num_seqs=64, step_tokens=512)),
        "decode": PoolState(WorkerKind(DECODE, num_blocks=4000, max_num_seqs=64, step_tokens=128)),
    }
)
PROMPTS = OfferedLoad(2.8, 2.8, 1.0, (SampledRequest(4000, 0, 32),) * 8)
ANSWERS = OfferedLoad(3.6, 3.6, 1.0, (SampledRequest(100, 0, 200),) * 8)
LONG_PROMPTS, LONG_ANSWERS = [(2.8, 4000, 32)], [(3.6, 100, 200)]


NOTHING = PresentWork()


def missed(load: OfferedLoad, running: PresentWork = NOTHING, ttft_s: float = 4.0, tpot_s: float = 0.07) -> list[float]:
    """By number of prefill workers, of four workers, in ten seconds."""
    splits = SplitEvaluator(load, FLEET, Goals(ttft_s, tpot_s), running, 10.0)
    return [splits.num_missed(num, 4 - num) for num in range(4)]


def best(found: list[float]) -> int:
    return min(range(len(found)), key=found.__getitem__)


def test_long_prompts_want_prefill_workers_and_long_answers_decode_workers() -> None:
    prompts, answers = missed(PROMPTS), missed(ANSWERS)
    assert best(prompts) == 3 and prompts[3] < 0.5 and prompts[1] > 10
    assert answers[1] < answers[2] < answers[3] and answers[3] > 20


def test_prompts_that_wait_already_count_against_few_workers() -> None:
    assert missed(PROMPTS, PresentWork(waiting_s=6.0))[2] > missed(PROMPTS)[2] + 5
    assert missed(PROMPTS, PresentWork(waiting_s=6.0))[3] < 0.5


def test_answers_that_run_keep_their_workers_until_they_have_ended() -> None:
    """Long prompts begin to come while long answers still run: first two workers change, the third one later."""

    def then(num: int, waiting_s: float) -> int:
        return best(missed(PROMPTS, PresentWork(waiting_s, num, context=250.0, tokens_left=100.0, num_decode=3)))

    assert [then(45, 0.0), then(30, 4.0), then(15, 6.0)] == [1, 2, 3]


def test_goals_that_nothing_meets_still_tell_a_better_split() -> None:
    assert best(missed(PROMPTS, ttft_s=0.1)) == 3
    assert missed(ANSWERS, tpot_s=0.01)[1] < missed(ANSWERS, tpot_s=0.01)[3]


def test_both_pools_short_is_shared() -> None:
    """Each pool alone would need all four workers."""
    load = OfferedLoad(6.0, 6.0, 1.0, (SampledRequest(4000, 0, 32), SampledRequest(100, 0, 200)) * 4)
    found = missed(load)
    assert best(found) in (1, 2) and found[best(found)] > 20


# ---------------------------------------------------------------- the loop, in virtual time


def test_it_jumps_by_several_workers_at_once() -> None:
    world = World(3, 1)
    world.run(8.0, LONG_ANSWERS)
    assert len(world.orders) >= 2 and len({at for at, _, _ in world.orders[:2]}) == 1
    assert all(order.role == "decode" for _, _, order in world.orders)
    assert "would miss a goal with 3 prefill and 1 decode workers" in world.orders[0][2].reason


@pytest.mark.slow
def test_an_alternating_load_is_served_better_than_by_any_fixed_split() -> None:
    def served(world: World) -> int:
        for number in range(2):
            world.run(40.0, (LONG_PROMPTS, LONG_ANSWERS)[number % 2], 21 + number)
        return world.met()

    fixed = max(served(World(num, 4 - num, role_change=False)) for num in (1, 2, 3))
    assert served(World(2, 2)) > 1.1 * fixed


@pytest.mark.slow
@pytest.mark.parametrize("load", [LONG_PROMPTS, LONG_ANSWERS, [(0.5, 4000, 32), (0.6, 100, 200)]])
def test_a_steady_load_settles(load: list[tuple[float, int, int]]) -> None:
    world = World(2, 2)
    world.run(40.0, load, seed=2)
    assert len(world.orders) <= 2


@pytest.mark.slow
def test_a_load_that_swings_faster_than_a_change_pays_costs_little() -> None:
    def served(world: World) -> int:
        for number in range(24):
            world.run(5.0, (LONG_PROMPTS, LONG_ANSWERS)[number % 2], 1 + number)
        return world.met()

    changing = World(2, 2)
    assert served(changing) > 0.85 * served(World(2, 2, role_change=False))
    assert len(changing.orders) <= 12


@pytest.mark.parametrize(("load", "least"), [(LONG_PROMPTS, (1, 2)), (LONG_ANSWERS, (2, 1))])
def test_pools_keep_their_least_numbers(load: list[tuple[float, int, int]], least: tuple[int, int]) -> None:
    world = World(2, 2, min_prefill=least[0], min_decode=least[1])
    world.run(20.0, load)
    assert world.orders == []


def test_nothing_changes_while_half_of_a_pool_is_silent() -> None:
    world = World(2, 2)
    world.silent = {"d1"}
    world.run(4.0, [])
    world.run(10.0, LONG_PROMPTS)
    assert not any("would miss" in order.reason for _, _, order in world.orders)


def test_without_data_or_goals_nothing_is_forecast() -> None:
    world = World(2, 2)
    world.run(3.0, [])
    assert world.forecaster.forecast(world.registry.workers.values(), 0, 0, 3, world.now) is None
    config = World(2, 2, ttft_ms=0.0, tpot_ms=0.0).config
    assert type(world.forecaster).of(config) is None and type(world.forecaster).of(world.config) is not None
