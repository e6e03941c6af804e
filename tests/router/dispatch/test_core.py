"""The dispatch core without an event loop: events and the time go in, actions come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytest

from common.config import RouterConfig
from common.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, RequestError, Unavailable
from common.latency.step_model import StepModel
from common.wire.messages import (
    AbortRequest,
    AdapterState,
    DecodeRequest,
    Message,
    ServingMode,
    SetServing,
    Timeline,
    TokenDelta,
    TokenOutput,
)
from common.wire.sampling_params import SamplingParams
from router.dispatch import silence
from router.dispatch.client import GenerationRequest
from router.dispatch.core import Actions, DispatchCore
from router.dispatch.request_scheduler import MAX_PLACED_A_TURN
from router.dispatch.silence import silence_reason
from router.dispatch.trail import Trail
from router.fleet.adapters import FleetAdapters
from router.fleet.prefix_index import PrefixIndex
from router.fleet.registry import WorkerRegistry
from router.fleet.serving import FleetServing
from router.fleet.worker import WorkerState

from ...fake_worker import heartbeat_of, hello_of

D, E = "tcp://d:1", "tcp://e:1"


class Rig:
    """A core over one decode worker. `later` holds what it wants called back, by the delay."""

    def __init__(self, prefill: tuple[str, ...] = (), **config: object) -> None:
        self.sent: list[Message] = []
        self.woken: list[str] = []
        self.later: list[tuple[float, Callable[[float], None]]] = []
        self.registry = WorkerRegistry(prefill, (D,), worker_timeout_s=1.0)
        actions = Actions(self.send, self.abort, self.call_later, self.woken.append)
        settings = RouterConfig(prefill=prefill, decode=(D,), **config)  # type: ignore[arg-type]
        self.core = DispatchCore(settings, self.registry, PrefixIndex(), actions)

    def send(self, address: str, message: Message) -> bool:
        self.sent.append(message)
        return True

    def abort(self, address: str, request_id: str, attempt: int) -> None:
        self.sent.append(AbortRequest(request_id=request_id, attempt=attempt))

    def call_later(self, delay_s: float, then: Callable[[float], None]) -> Callable[[], None]:
        entry = (delay_s, then)
        self.later.append(entry)
        return lambda: self.later.remove(entry) if entry in self.later else None

    def greet(self, now: float = 0.0) -> None:
        self.registry.on_hello(D, hello_of("d", max_model_len=1000, weights="w"), now)
        self.registry.on_heartbeat(D, heartbeat_of("d"), now)
        self.core.on_ready(D, now)

    def tokens(
        self,
        request_id: str,
        index: int,
        *token_ids: int,
        reason: str = "",
        now: float = 1.0,
        timeline: Timeline | None = None,
    ) -> None:
        delta = TokenDelta(request_id, 0, index, token_ids, reason, timeline=timeline)
        self.core.on_output(D, TokenOutput(worker_id="d", epoch=1, outputs=(delta,)), now)

    @property
    def requested(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, DecodeRequest)]


def request(name: str, **values: object) -> GenerationRequest:
    return GenerationRequest(name, [1, 2, 3], SamplingParams(max_tokens=4), **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("after", "error"),
    [
        (AdapterState("sql", 2, "loaded", "/new", "new"), Unavailable),
        (AdapterState("sql", 2, "unloaded"), ModelNotFound),
    ],
)
def test_a_request_whose_adapter_is_replaced_is_worth_sending_again(
    after: AdapterState, error: type[RequestError]
) -> None:
    rig = Rig()
    adapters = FleetAdapters(rig.registry)
    rig.registry.on_hello(D, hello_of("d", max_loras=2), 0.0)

    def report(state: AdapterState) -> None:
        beat = heartbeat_of("d", adapters=(state,))
        rig.registry.on_heartbeat(D, beat, 0.0)
        adapters.on_heartbeat(beat, 2)

    report(AdapterState("sql", 1, "loaded", "/old", "old"))
    found = {"adapter": adapters.digest_of("sql"), "adapter_name": "sql"}
    report(after)
    state = rig.core.submit(request("a", **found), 0.1)
    rig.core.on_tick(0.2)
    with pytest.raises(error) as failed:
        state.take_event()
    assert (failed.value.retry_after_s is not None) == (error is Unavailable)


def test_a_request_is_sent_and_its_tokens_wake_its_consumer() -> None:
    rig = Rig()
    rig.greet()
    state = rig.core.submit(request("a"), 0.5)
    assert rig.requested == ["a"] and not rig.woken
    assert state.take_event() is None
    rig.tokens("a", 0, 7, 8)
    assert rig.woken == ["a"]
    event = state.take_event()
    assert event is not None and event.token_ids == (7, 8) and not event.finish_reason
    rig.tokens("a", 2, 9, reason="stop")
    event = state.take_event()
    assert event is not None and event.finish_reason == "stop"
    rig.core.end(state)
    assert not rig.core.states and not rig.later
    assert not rig.registry.workers[D].bookings


def test_the_wait_for_the_step_that_a_worker_is_in_counts_as_waiting() -> None:
    """The worker reads the request after its step, and says that it waited for half a second."""
    rig = Rig()
    state = rig.core.submit(request("a"), 0.5)
    rig.greet(1.0)
    rig.tokens("a", 0, 7, now=4.0)
    rig.tokens("a", 1, 8, now=9.0, reason="stop", timeline=Timeline(queue_s=0.5, prefill_s=1.0, decode_s=5.0))
    event = state.take_event()
    assert event is not None and event.timeline is not None
    assert event.timeline.queue_s == pytest.approx(0.5 + 2.0)  # at the router, and from 1.0 to the step at 3.0
    assert (event.timeline.prefill_s, event.timeline.decode_s) == (1.0, 5.0)


def test_the_steps_of_a_request_are_recorded_with_its_decisions() -> None:
    rig, trail = Rig(), Trail()
    rig.core.submit(request("a", trail=trail), 0.5)
    rig.greet(1.0)
    rig.tokens("a", 0, 7, now=4.0)
    rig.core.on_lost(D, "silent for more than 2 s", 5.0)
    steps = [(step.at, step.kind, step.detail) for step in trail.steps]
    assert steps[0] == (0.5, "accepted", "")
    assert steps[1][1] == "waits" and steps[1][2].startswith("no decode worker is ready")
    assert steps[2:5] == [
        (1.0, "placed", "local"),
        (4.0, "token", "decode worker d"),
        (5.0, "failed", "decode worker d was lost: silent for more than 2 s"),
    ]
    choice = trail.steps[2].choice
    assert choice is not None and [one.worker.address for one in choice.considered[0].local] == [D]


def test_what_has_no_worker_waits_in_order_and_is_placed_a_few_a_turn() -> None:
    rig = Rig()
    names = [f"r{number:02}" for number in range(MAX_PLACED_A_TURN + 5)]
    states = [rig.core.submit(request(name), 0.0) for name in names]
    assert [state.request.request_id for state in rig.core.waiting] == names
    assert all(state in rig.core.waiting for state in states) and not rig.requested
    rig.greet(1.0)
    assert rig.requested == names[:MAX_PLACED_A_TURN]
    ((_, again),) = [entry for entry in rig.later if entry[0] == 0.0]
    again(1.0)
    assert rig.requested == names and not len(rig.core.waiting)


def test_the_deadline_ends_a_request_at_its_time() -> None:
    rig = Rig()
    rig.greet()
    state = rig.core.submit(request("a", deadline_s=5.0), 0.0)
    ((delay_s, then),) = rig.later
    assert delay_s == 5.0
    then(5.0)
    assert rig.woken == ["a"]
    assert rig.sent[-1] == AbortRequest(request_id="a", attempt=0)
    with pytest.raises(DeadlineExceeded, match="deadline of 5 s in its prefill phase"):
        state.take_event()


def test_a_wait_for_a_worker_ends_with_the_reason() -> None:
    rig = Rig(queue_timeout_s=2.0)
    state = rig.core.submit(request("a"), 0.0)
    rig.core.on_tick(1.9)
    assert state in rig.core.waiting
    rig.core.on_tick(2.1)
    assert state not in rig.core.waiting and rig.woken == ["a"]
    with pytest.raises(Unavailable, match="waited 2.1 s for a worker: no decode worker is ready"):
        state.take_event()


@pytest.mark.parametrize("mode", ["pause", "hold"])
def test_a_request_waits_for_the_end_of_a_pause_up_to_its_deadline(mode: ServingMode) -> None:
    rig = Rig(queue_timeout_s=2.0)
    rig.greet()
    serving = FleetServing(rig.registry)
    serving.order(SetServing(version=1, mode=mode))
    rig.registry.on_heartbeat(D, heartbeat_of("d", draining=True, num_running=1), 0.0)
    states = [rig.core.submit(request(name, deadline_s=600.0), 0.0) for name in ("a", "b")]
    rig.core.on_tick(599.0)
    assert [*rig.core.waiting] == states
    (_, expire), _ = rig.later
    expire(600.0)
    with pytest.raises(DeadlineExceeded, match="deadline of 600 s in its queue phase"):
        states[0].take_event()
    serving.order(SetServing(version=2))
    rig.core.on_tick(600.5)  # before a worker reports that it serves again
    assert [*rig.core.waiting] == states[1:]
    rig.core.on_tick(601.5)
    with pytest.raises(Unavailable, match="waited 601.5 s for a worker"):
        states[1].take_event()


def test_an_answer_that_has_begun_waits_while_a_decode_worker_loads_its_model() -> None:
    """A new request is refused in time: its client can ask elsewhere."""
    rig = Rig(queue_timeout_s=2.0)
    rig.greet()
    begun = rig.core.submit(request("begun"), 0.0)
    rig.tokens("begun", 0, 7)
    rig.registry.on_cut(D)
    rig.core.on_lost(D, "broken connection", 1.0)
    new = rig.core.submit(request("new"), 1.0)
    assert {begun, new} == set(rig.core.waiting)
    for now in (2.5, 3.5, 200.0):
        rig.registry.on_hello(D, hello_of("d", epoch=2, max_model_len=1000, weights="w"), now)
        rig.registry.on_heartbeat(D, heartbeat_of("d", epoch=2, ready=False), now)
        rig.core.on_tick(now)
    rig.registry.sweep(202.0)  # it is silent while it imports modules
    assert rig.registry.workers[D].state is WorkerState.DEAD
    rig.core.on_tick(202.0)
    rig.registry.on_hello(D, hello_of("d", epoch=2, max_model_len=1000, weights="w"), 202.0)
    rig.registry.on_heartbeat(D, heartbeat_of("d", epoch=2, ready=False), 202.0)
    assert rig.registry.on_forgotten(D)  # nor did it read the router's heartbeats
    rig.core.on_tick(202.0)
    assert [*rig.core.waiting] == [begun] and rig.woken == ["begun", "new"]
    rig.core.on_tick(233.0)
    with pytest.raises(Unavailable, match="waited 232.0 s for a worker"):
        begun.take_event()
        begun.take_event()


def test_a_request_that_cannot_be_taken_leaves_nothing_behind() -> None:
    rig = Rig(max_inflight=1)
    rig.greet()
    rig.core.submit(request("a"), 0.0)
    with pytest.raises(Unavailable, match="1 requests are in flight; 1 more would exceed --max-inflight 1"):
        rig.core.submit(request("b"), 0.0)
    rig.core.end(rig.core.states["a"])
    with pytest.raises(InvalidRequest, match="no tokens"):
        rig.core.submit(GenerationRequest("c", [], SamplingParams(max_tokens=4)), 0.0)
    assert not rig.core.states and not rig.later


def test_a_first_step_needs_room_for_the_later_ones_which_are_not_refused() -> None:
    rig = Rig(max_inflight=4)
    rig.greet()
    with pytest.raises(Unavailable, match="5 more would exceed --max-inflight 4"):
        rig.core.submit(request("wide", num_at_once=5), 0.0)
    rig.core.end(rig.core.submit(request("first", num_at_once=4), 0.0))
    rig.core.submit(request("other"), 0.0)
    for number in range(4):
        rig.core.submit(request(f"step-{number}", continues=True), 0.0)
    with pytest.raises(Unavailable, match="1 more would exceed --max-inflight 4"):
        rig.core.submit(request("new"), 0.0)


def test_answers_of_one_token_do_not_predict_others() -> None:
    """A beam search consists of hundreds of them."""
    rig = Rig()
    rig.greet()
    rig.core.submit(request("long"), 0.0)
    rig.tokens("long", 0, 7, 8, 9, reason="stop", timeline=Timeline(decode_s=4.0))
    lengths, estimates = rig.core._placement.lengths, rig.registry.workers[D].estimates
    expected = lengths.expected_more("default", 0, 1000)
    for step in range(50):
        one = GenerationRequest(f"s{step}", [1, 2, 3], SamplingParams(max_tokens=1), continues=step > 0)
        rig.core.submit(one, 1.0)
        rig.tokens(one.request_id, 0, 7, reason="length", timeline=Timeline())
    assert lengths.expected_more("default", 0, 1000) == expected and estimates.service_s.value == 4.0


def test_an_answer_that_has_moved_teaches_no_pace() -> None:
    """Its last worker reports the time of its own tokens, which are few."""
    registry = WorkerRegistry((), (D, E), worker_timeout_s=1.0)
    actions = Actions(lambda *_: True, lambda *_: None, lambda *_: lambda: None, lambda _: None)
    core = DispatchCore(RouterConfig(decode=(D, E)), registry, PrefixIndex(), actions)
    model = StepModel(fixed_s=0.02, num_steps=100)
    for address in (D, E):
        registry.on_hello(address, hello_of(address, max_model_len=1000), 0.0)
        registry.on_heartbeat(address, heartbeat_of(address, step_model=model), 0.0)
    state = core.submit(GenerationRequest("a", [1, 2, 3], SamplingParams(max_tokens=100)), 0.0)

    def receive(token_ids: Sequence[int], reason: str, decode_s: float) -> None:
        assert (decode := state.attempts.decode) is not None
        num_known, timeline = len(state.stream.token_ids), Timeline(decode_s=decode_s)
        delta = TokenDelta("a", decode.attempt, num_known, tuple(token_ids), reason, timeline=timeline)
        core.on_output(decode.address, TokenOutput(worker_id=decode.worker_id, epoch=1, outputs=(delta,)), 1.0)

    receive(range(90), "", 1.8)
    assert state.attempts.decode is not None
    target = next(one for one in registry.workers.values() if one.address != state.attempts.decode.address)
    assert core._handovers.begin(state, target, 1.0)
    receive((), "moved", 1.8)
    receive(range(10), "length", 0.2)
    assert state.done and state.attempts.decode.address == target.address and registry._pace.value == 1.0


def test_closing_fails_what_runs() -> None:
    rig = Rig()
    rig.greet()
    state = rig.core.submit(request("a"), 0.0)
    rig.core.close()
    with pytest.raises(Unavailable, match="shutting down"):
        state.take_event()
    assert rig.sent[-1] == AbortRequest(request_id="a", attempt=0)


def test_ticks_ask_seldom_of_streams_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand that wait for a token cost no more than ten: a tick asks of each when its answer can change."""
    rig, asked = Rig(worker_timeout_s=1.0, token_timeout_s=3.0), list[float]()
    rig.greet()
    rig.registry.on_heartbeat(D, heartbeat_of("d", num_running=1), 0.0)
    state = rig.core.submit(request("a"), 0.0)
    rig.tokens("a", 0, 7, now=0.0)

    def count(*values: object) -> str:
        asked.append(cast(float, values[-1]))
        return silence_reason(*values)  # type: ignore[arg-type]

    monkeypatch.setattr(silence, "silence_reason", count)
    for tick in range(1, 13):
        rig.core.on_tick(tick * 0.25)
    assert asked == [1.25, 2.25, 3.0] and not state.attempts.num_failures, "once a second, and when its time is over"
    rig.core.on_tick(3.25)
    assert asked[3:] == [3.25] and state.attempts.num_failures == 1, "as soon as if each tick asked"
    rig.core.end(state)
    assert not any(rig.core._silence._slots.values())


def test_a_stream_waits_for_the_prefill_worker_that_replaces_another() -> None:
    """The first one died with KV in transit, after its first token: only the next one can make progress."""
    prefill = ("tcp://p0:1", "tcp://p1:1")
    rig = Rig(prefill, local_prefill_threshold=0, token_timeout_s=3.0)
    for address, role in ((prefill[0], "prefill"), (prefill[1], "prefill"), (D, "decode")):
        rig.registry.on_hello(address, hello_of(address, role), 0.0)
        rig.registry.on_heartbeat(address, heartbeat_of(address, num_running=1), 0.0)
    state = rig.core.submit(request("a"), 0.0)
    first, decode = state.attempts.prefill, state.attempts.decode
    assert first is not None and decode is not None

    def report(address: str, token_ids: tuple[int, ...], now: float) -> None:
        delta = TokenDelta("a", state.attempts.number, 0, token_ids)
        rig.core.on_output(address, TokenOutput(worker_id=address, epoch=1, outputs=(delta,)), now)

    report(first.address, (7,), 0.1)
    rig.core.on_lost(first.address, "died", 0.2)
    second = state.attempts.prefill
    assert second is not None and second is not first and state.stage == "transfer"
    for tick in range(1, 41):  # a long queue
        report(second.address, (), tick * 0.25)
        rig.core.on_tick(tick * 0.25)
    assert state.attempts.prefill is second and state.attempts.num_failures == 1
    for tick in range(41, 54):  # it has lost the request, and the decode worker waits for its KV
        rig.core.on_tick(tick * 0.25)
    assert state.attempts.decode is decode and state.attempts.prefill is not second
