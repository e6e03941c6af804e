"""Prompts wait in the router while workers are busy, and go elsewhere from a slow one: the core in virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common.config import RouterConfig
from common.errors import Overloaded, Unavailable
from common.latency.step_model import StepModel
from common.wire.messages import Message, PrefillRequest, RequestFailed, TokenDelta, TokenOutput
from common.wire.sampling_params import SamplingParams
from router.dispatch.client import ANYONE, Caller, GenerationRequest
from router.dispatch.core import Actions, DispatchCore
from router.dispatch.request_state import RequestState
from router.dispatch.waiting import AGE_CAP_S, PLACEMENTS_PER_OLDEST, WaitingRequests
from router.fleet.prefix_index import PrefixIndex
from router.fleet.registry import WorkerRegistry

from ...fake_worker import heartbeat_of, hello_of

CLASSES = ("name=interactive,ttft_ms=1000,priority=5", "name=batch,priority=-5")
ENOUGH_S = 0.3
"""Three full steps of 100 tokens, 1 ms a token: with as much to compute, a worker gets no more."""


class Rig:
    """A core over workers that compute a token of a prompt in a millisecond, and say so when told to."""

    def __init__(self, num_prefill: int = 1, **settings: Any) -> None:
        self.now = 0.0
        self.sent: list[tuple[str, PrefillRequest]] = []
        self.aborted: list[tuple[str, str]] = []
        self.timers: list[tuple[float, int, list[Callable[[float], None]]]] = []
        self.numbers = itertools.count()
        self.addresses = [f"tcp://p:{i}" for i in range(num_prefill)]
        self.registry = WorkerRegistry(self.addresses, ["tcp://d:1"], worker_timeout_s=1e6)
        settings = {"request_class": CLASSES, "prefill": tuple(self.addresses), "local_prefill_threshold": 0} | settings
        config = RouterConfig(model="m", **settings)
        actions = Actions(self.send, lambda *abort: self.aborted.append(abort[:2]), self.later, lambda _: None)
        self.core = DispatchCore(config, self.registry, PrefixIndex(), actions)
        self.classes = config.classes
        for address in (*self.addresses, "tcp://d:1"):
            role = "prefill" if "p" in address.split("/")[2] else "decode"
            hello = hello_of(address[6:], role, num_blocks=10_000, max_model_len=5000, max_step_tokens=100)
            self.registry.on_hello(address, hello, 0.0)
            self.beat(address)

    def beat(self, address: str, token_s: float = 1e-3, **fields: Any) -> None:
        model = StepModel(token_s=token_s, row_s=1e-3, num_steps=100)
        values = {"num_free_blocks": 10_000, "step_model": model, "serial": self.registry.next_serial - 1} | fields
        beat = heartbeat_of(address[6:], **values)
        self.registry.on_heartbeat(address, beat, self.now)

    def send(self, address: str, message: Message) -> bool:
        if isinstance(message, PrefillRequest):
            self.sent.append((address, message))
        return True

    def later(self, pause_s: float, then: Callable[[float], None]) -> Callable[[], None]:
        timer = (self.now + pause_s, next(self.numbers), [then])
        heapq.heappush(self.timers, timer)
        return timer[2].clear

    def run(self, until: float) -> None:
        while self.timers and self.timers[0][0] <= until:
            self.now, _, then = heapq.heappop(self.timers)
            for call in then:
                call(self.now)
        self.now = until

    def ask(
        self, name: str, num_tokens: int = 100, of: str = "default", key: str = "", *, continues: bool = False
    ) -> RequestState:
        one = self.classes[of]
        wanted = GenerationRequest(
            name, [next(self.numbers)] * num_tokens, SamplingParams(max_tokens=8), ttft_s=one.ttft_s, tpot_s=one.tpot_s,
            priority=one.priority, request_class=of, key=key, share=one.share,
            continues=continues,
        )  # fmt: skip
        return self.core.submit(wanted, self.now)

    def first_token(self, state: RequestState) -> None:
        """Its prefill worker has computed the prompt."""
        assert state.attempts.prefill is not None
        delta = TokenDelta(state.request.request_id, state.attempts.number, 0, (7,))
        output = TokenOutput(worker_id=state.attempts.prefill.worker_id, epoch=1, outputs=(delta,))
        self.core.on_output(state.attempts.prefill.address, output, self.now)

    @property
    def placed(self) -> list[str]:
        return [message.request_id for _, message in self.sent]

    @property
    def held(self) -> list[str]:
        return [state.request.request_id for state in self.core.waiting.held(self.now)]


def full(num_prefill: int = 1, **settings: Any) -> tuple[Rig, list[RequestState]]:
    """A rig whose workers have just enough to compute."""
    rig = Rig(num_prefill, **settings)
    return rig, [rig.ask(f"first-{i}", 301) for i in range(num_prefill)]


def test_a_prompt_waits_in_the_router_while_every_worker_has_enough() -> None:
    rig, first = full(2)
    assert sorted(address for address, _ in rig.sent) == rig.addresses
    rig.ask("next")
    assert rig.held == ["next"] and len(rig.placed) == 2
    demand = rig.core.demand(0.0, 0.0)
    assert demand.held["decode"] == 0, "to be held is not to lack a worker"
    rig.first_token(first[1])
    rig.run(rig.now + 0.001)
    assert rig.sent[-1][0] == first[1].attempts.prefill.address and rig.placed[-1] == "next" and not rig.held


def test_it_has_its_turn_when_the_worker_should_have_room_though_none_says_so() -> None:
    rig, _ = full()
    rig.beat(rig.addresses[0], waiting_s=0.8, num_waiting=1)
    rig.ask("next")
    rig.run(0.8 - ENOUGH_S - 0.01)
    assert rig.held == ["next"]
    rig.run(0.8 - ENOUGH_S + 0.02)
    assert rig.placed[-1] == "next"


def test_a_new_request_passes_none_that_is_held_unless_its_turn_is_before() -> None:
    rig, (first,) = full()
    rig.ask("a", of="batch")
    rig.first_token(first)
    rig.ask("b", of="batch")
    assert rig.held == ["a", "b"], "though there is room by now"
    rig.run(0.02)
    assert rig.placed[-2:] == ["a", "b"]


def test_requests_of_higher_priority_do_not_see_those_below() -> None:
    rig = Rig()
    batch = [rig.ask(f"b{i}", 300, of="batch") for i in range(20)]
    assert rig.placed == ["b0", "b1"] and len(rig.held) == 18
    rig.ask("i0", of="interactive")
    assert rig.placed[-1] == "i0", "5.4 s of prompts of lower priority wait, and it has a goal of a second"
    assert rig.core.states["i0"].forecast.wait_s == 0.0
    assert (batch[5].held_s, batch[5].forecast.wait_s) == pytest.approx((0.3, 1.5))


def with_old_batch(num: int) -> tuple[Rig, RequestState]:
    """A rig whose worker has 4 s of a batch prompt, which chats pass, while old batch prompts are held."""
    rig = Rig()
    long = rig.ask("long", 4000, of="batch")
    for i in range(num):
        rig.ask(f"old-{i}", of="batch")
    for i in range(PLACEMENTS_PER_OLDEST):
        rig.first_token(rig.ask(f"first-{i}", 50, of="interactive"))
    while rig.now <= AGE_CAP_S:
        rig.beat(rig.addresses[0], waiting_s=4.0, num_waiting=1)
        rig.run(rig.now + 1.0)
    rig.beat(rig.addresses[0], waiting_s=4.0, num_waiting=1)
    assert next(rig.core.waiting.in_order(rig.now)).request.request_id == "old-0" and len(rig.held) == num
    return rig, long


def test_an_old_request_passes_higher_priorities_only_where_it_has_room() -> None:
    rig, long = with_old_batch(2)
    chats = [rig.ask(f"chat-{i}", 350, of="interactive") for i in range(3)]
    assert rig.placed[-1] == "chat-0", "its worker has nothing else of this priority"
    for chat in chats[:2]:
        rig.first_token(chat)
        rig.run(rig.now + 0.001)
    assert rig.placed[-2:] == ["chat-1", "chat-2"]
    chats.append(rig.ask("chat-3", 350, of="interactive"))
    for state in (long, chats[2]):
        rig.first_token(state)
    rig.beat(rig.addresses[0])
    rig.run(rig.now + 0.001)
    assert rig.placed[-2:] == ["old-0", "chat-3"], "its worker has room for any priority: the old one is first"


def test_a_turn_looks_at_few_of_many_old_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, _ = with_old_batch(100)
    first, _ = (rig.ask(f"chat-{i}", 350, of="interactive") for i in range(2))
    in_order, seen = WaitingRequests.in_order, list[str]()

    def recorded(queue: WaitingRequests, now: float) -> Iterator[RequestState]:
        for state in in_order(queue, now):
            seen.append(state.request.request_id)
            yield state

    rig.first_token(first)
    monkeypatch.setattr(WaitingRequests, "in_order", recorded)
    rig.run(rig.now + 0.001)
    assert rig.placed[-1] == "chat-1" and len(seen) <= 3 and seen[:2] == ["old-0", "chat-1"]


def test_classes_get_places_by_their_shares_and_all_while_the_others_ask_for_nothing() -> None:
    rig = Rig(request_class=("name=gold,share=3", "name=silver,share=1"), max_wait_s=60.0)
    for i in range(40):
        rig.ask(f"silver-{i}", of="silver")
    alone = len(rig.placed)
    for i in range(40):
        rig.ask(f"gold-{i}", of="gold")
    while len(rig.placed) < alone + 40:  # its worker computes one prompt after the other
        rig.run(rig.now + 0.1)
        rig.first_token(rig.core.states[rig.placed[len(rig.placed) - alone]])
        rig.run(rig.now)
        for request_id in rig.placed[: len(rig.placed) - alone]:
            if (state := rig.core.states.get(request_id)) is not None:
                rig.core.end(state)
        rig.beat(rig.addresses[0])
    assert set(rig.placed[:alone]) == {f"silver-{i}" for i in range(alone)}
    shared = rig.placed[alone : alone + 40]
    assert sum(name.startswith("gold") for name in shared) == pytest.approx(30, abs=2)


def test_a_class_is_refused_for_what_its_share_lets_pass_before_it_and_not_for_the_rest() -> None:
    rig = Rig(request_class=("name=gold,share=3", "name=silver,share=1"), max_wait_s=2.0)
    for i in range(16):
        rig.ask(f"silver-{i}", of="silver")
    with pytest.raises(Overloaded, match="the limit is 2 s"):
        for i in range(16):
            rig.ask(f"more-{i}", of="silver")
    assert rig.ask("gold", of="gold").forecast.wait_s < 1.0


def test_workers_hear_of_goals_and_priority() -> None:
    rig = Rig(request_class=("name=fast,ttft_ms=700,tpot_ms=30,priority=3",))
    rig.ask("a", of="fast")
    _, sent = rig.sent[-1]
    assert (sent.ttft_s, sent.tpot_s, sent.priority) == (0.7, 0.03, 3)


def test_a_class_is_refused_by_its_own_goal_alone() -> None:
    rig = Rig(request_class=("name=interactive,ttft_ms=1000,priority=5,refuse=predicted", CLASSES[1]))
    for i in range(2):
        rig.ask(f"i{i}", 500, of="interactive")
    why = r"TTFT goal 1,000 ms, predicted 1,100 ms: 1 prompt waits before it with 500 tokens, and 0\.5 s of "
    why += r"prompts in the router\."
    with pytest.raises(Overloaded, match=why) as refused:
        rig.ask("late", of="interactive")
    assert refused.value.retry_after_s == 1.0
    assert rig.ask("patient", of="batch").held_s == pytest.approx(0.1)
    with pytest.raises(Overloaded, match="TTFT goal 1,000 ms"):
        rig.core.check_room(lambda num_tokens: True, rig.now, Caller("", (rig.classes["interactive"],)))
    both = (rig.classes["interactive"], rig.classes["batch"])
    rig.core.check_room(lambda num_tokens: True, rig.now, Caller("", both))
    rig.core.check_room(lambda num_tokens: True, rig.now, ANYONE)
    assert rig.core.counters.num_refused == {"interactive": 2}


def test_goals_refuse_nothing_unless_their_class_says_so() -> None:
    """Of clients that ask again at once, all are served, although most are predicted to miss both goals."""
    goals = {"slo_ttft_ms": 300.0, "slo_tpot_ms": 2.0}
    rig = Rig(request_class=(), **goals)
    rig.beat("tcp://d:1", num_running=30, num_context_tokens=3000)
    for i in range(30):
        rig.ask(f"r{i}", 180)
    assert not rig.core.counters.num_refused and len(rig.placed) + len(rig.held) == 30
    rig = Rig(request_class=(), slo_refuse="predicted", **goals)
    with pytest.raises(Overloaded, match=r"TPOT goal 2 ms, predicted 31 ms"):
        rig.beat("tcp://d:1", num_running=30, num_context_tokens=3000)
        rig.ask("r", 180)


def test_prompts_that_miss_their_goal_leave_room_for_those_that_may_meet_it() -> None:
    rig = Rig(request_class=(), slo_ttft_ms=400.0)
    for i in range(6):
        rig.ask(f"r{i}", 200)
    rig.run(0.35)
    assert rig.held, "all that are held are late by now"
    rig.beat(rig.addresses[0], waiting_s=0.15, num_waiting=1)
    rig.core.on_tick(rig.now)
    num_placed = len(rig.placed)
    rig.ask("new", 100)
    rig.core.on_tick(rig.now)
    assert rig.placed[num_placed:] == ["new"], "it may still be in time, and passes them"
    rig.beat(rig.addresses[0], waiting_s=0.05, num_waiting=1)
    rig.core.on_tick(rig.now)
    assert len(rig.placed) == num_placed + 2, "a worker never idles for that"


def test_draft_tokens_count_for_a_goal() -> None:
    rig = Rig(request_class=("name=fast,tpot_ms=20,refuse=predicted",))
    rig.beat("tcp://d:1", num_running=30, num_context_tokens=3000)
    rig.registry.workers["tcp://d:1"].estimates.token_pace = 0.5
    assert rig.ask("fast", of="fast").admitted.tpot_s == pytest.approx(0.0155)


def test_a_queue_that_grows_without_end_is_bounded_whatever_goals_say() -> None:
    rig = Rig(request_class=(), slo_ttft_ms=300.0, max_wait_s=2.0)
    for i in range(7):
        rig.ask(f"r{i}", 300)
    with pytest.raises(Overloaded, match=r"would wait about 2\.1 s; the limit is 2 s"):
        rig.ask("late")


def test_a_patient_class_waits_no_longer_than_requests_may() -> None:
    rig = Rig(max_wait_s=2.0)
    for i in range(7):
        rig.ask(f"b{i}", 300, of="batch")
    with pytest.raises(Overloaded, match=r"about 2\.1 s; the limit is 2 s"):
        rig.ask("late", of="batch")


def test_a_later_step_of_an_answer_is_not_refused() -> None:
    rig = Rig(max_wait_s=2.0)
    for i in range(7):
        rig.ask(f"b{i}", 300, of="batch")
    with pytest.raises(Overloaded, match=r"about 2\.1 s; the limit is 2 s"):
        rig.ask("late", of="batch")
    rig.ask("step", of="batch", continues=True)
    assert "step" in rig.held


def test_a_later_step_of_an_answer_is_held_for_as_long_as_it_takes() -> None:
    rig, _ = full(queue_timeout_s=1.0)
    first, step = rig.ask("first"), rig.ask("step", continues=True)
    for _ in range(12):
        rig.beat(rig.addresses[0], waiting_s=5.0, num_waiting=2)
        rig.run(rig.now + 0.1)
        rig.core.on_tick(rig.now)
    with pytest.raises(Unavailable):
        first.take_event()
    assert rig.held == ["step"] and step.take_event() is None


def test_those_that_are_held_will_take_places_of_the_batch_too() -> None:
    rig = Rig(num_prefill=0, max_wait_s=20.0)
    rig.registry.on_request_finished("tcp://d:1", 64 * 2.0)  # a place becomes free every two seconds
    rig.beat("tcp://d:1", num_running=64, num_context_tokens=6400, waiting_s=1.0, num_waiting=1)
    for i in range(8):
        rig.ask(f"r{i}")
    assert len(rig.held) == 8 and rig.core.waiting.held_s == pytest.approx(8 * 0.164, rel=0.1)
    rig.ask("ninth")
    with pytest.raises(Overloaded, match=r"would wait about 22\.0 s; the limit is 20 s"):
        rig.ask("late")


def test_who_is_held_too_long_hears_why() -> None:
    rig, _ = full(queue_timeout_s=1.0)
    state = rig.ask("next")
    for _ in range(12):
        rig.beat(rig.addresses[0], waiting_s=5.0, num_waiting=1)
        rig.run(rig.now + 0.1)
        rig.core.on_tick(rig.now)
    with pytest.raises(Unavailable, match=r"all workers are busy, and the router holds 0\.1 s of prompts"):
        state.take_event()
    assert not rig.core.waiting


def test_a_decode_worker_takes_over_when_what_is_held_takes_longer_there() -> None:
    rig, _ = full(local_prefill_threshold=4)
    for i in range(40):
        rig.ask(f"b{i}", 300, of="batch")
    assert rig.core.counters.num_choices["local"] > 0 and rig.held


def test_held_prompts_of_lower_priority_send_no_prompt_to_a_slower_decode_worker() -> None:
    rig = Rig(local_prefill_threshold=4)
    rig.beat("tcp://d:1", token_s=3e-3)
    rig.ask("first", 1000, of="interactive")
    for i in range(10):
        rig.ask(f"b{i}", 2000, of="batch")
    chat = rig.ask("chat", 300, of="interactive")
    assert chat.held_s is not None
    rig.beat(rig.addresses[0], waiting_s=0.1, num_waiting=1)
    rig.core.on_tick(rig.now)
    assert rig.placed == ["first", "chat"], "no other prompt of its priority waits"


def test_a_token_that_would_take_too_long_is_refused_by_what_runs_when_its_prompt_arrives() -> None:
    classes = ("name=fast,tpot_ms=20,refuse=predicted",)
    rig = Rig(request_class=classes)
    rig.beat("tcp://d:1", num_running=30, num_context_tokens=3000)
    with pytest.raises(Overloaded, match=r"TPOT goal 20 ms, predicted 31 ms: 30 sequences in a batch of 64\."):
        rig.ask("slow", of="fast")
    rig.ask("other")
    rig.registry.on_request_finished("tcp://d:1", 0.1)  # so that most of the 30 end while 300 tokens are computed
    rig.ask("next", 300, of="fast")
    assert rig.core.counters.num_refused == {"fast": 1}


def test_a_prompt_that_a_slow_worker_has_not_begun_goes_elsewhere() -> None:
    rig, first = full(2)
    slow, quick = (state.attempts.prefill.address for state in first)
    state = first[0]
    rig.first_token(first[1])
    rig.run(1.0)
    rig.beat(slow, waiting_s=0.3, num_waiting=1)
    rig.core.on_tick(rig.now)
    assert state.attempts.num_taken_back == 0, "0.7 s late is not late enough"
    rig.run(3.0)
    rig.core.on_tick(rig.now)
    assert (state.attempts.num_taken_back, state.attempts.prefill.address, state.attempts.num_failures) == (1, quick, 0)
    assert (slow, "first-0") in rig.aborted and rig.core.counters.num_taken_back == 1
    rig.core.on_tick(rig.now)
    assert state.attempts.num_taken_back == 1, "it has just been moved"


def test_where_all_are_slow_no_prompt_moves() -> None:
    rig, first = full(2)
    rig.run(3.0)
    for address in rig.addresses:
        rig.beat(address, waiting_s=3.0, num_waiting=1)
    rig.core.on_tick(rig.now)
    assert [state.attempts.num_taken_back for state in first] == [0, 0]


def test_a_replacement_whose_kv_is_no_longer_needed_leaves_no_backlog() -> None:
    rig = Rig(2)
    state = rig.ask("a", 3000)
    first, decode = state.attempts.prefill, state.attempts.decode
    assert first is not None and decode is not None
    failure = RequestFailed(
        worker_id=first.worker_id, request_id="a", attempt=0, phase="prefill", message="lost", retryable=True
    )
    rig.core.on_failed(first.address, failure, rig.now)
    helper = state.attempts.prefill
    assert helper is not None and rig.core.demand(0.0, rig.now).backlog_s == 3.0
    delta = TokenDelta("a", state.attempts.number, 0, (7,))
    rig.core.on_output(decode.address, TokenOutput(worker_id=decode.worker_id, epoch=1, outputs=(delta,)), rig.now)
    assert rig.aborted[-1] == (helper.address, "a")
    assert rig.core.demand(0.0, rig.now).backlog_s == 0.0, "although the answer has not ended"
