"""In which order waiting requests get places: by priority, fairly between keys, by slack; and that none starves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config.request_class import RequestClass
from common.wire.messages import TokenDelta
from common.wire.sampling_params import SamplingParams
from router.dispatch.client import GenerationRequest
from router.dispatch.request_state import RequestState
from router.dispatch.waiting import AGE_CAP_S, HOLD_S, PLACEMENTS_PER_OLDEST, WaitingRequests

from ...examples import examples


def request(
    name: str, *, key: str = "", priority: int = 0, num_tokens: int = 10, ttft_s: float = 0.0, at: float = 0.0,
    of: str = "default", share: float = 0.0,
) -> RequestState:  # fmt: skip
    wanted = GenerationRequest(
        name, [1] * num_tokens, SamplingParams(max_tokens=8), priority=priority, key=key, ttft_s=ttft_s,
        request_class=of, share=share,
    )  # fmt: skip
    return RequestState(wanted, at)


def queue_of(*states: RequestState) -> WaitingRequests:
    queue = WaitingRequests()
    for state in states:
        queue.add(state, state.times.accepted_at)
    return queue


def names(states: Iterable[RequestState]) -> str:
    return "".join(state.request.request_id for state in states)


def served(queue: WaitingRequests, now: float = 0.0, most: int = 10_000) -> list[RequestState]:
    """Requests in the order of their places, one at a time."""
    order: list[RequestState] = []
    while len(queue) and len(order) < most:
        order.append(next(queue.in_order(now)))
        queue.placed(order[-1])
    return order


def test_priority_comes_first() -> None:
    queue = queue_of(request("a", priority=-5), request("b"), request("c", priority=5, at=1.0))
    assert names(queue.in_order(1.0)) == names(served(queue, 1.0)) == "cba"


def test_iteration_is_in_the_order_in_which_requests_were_queued() -> None:
    first, *others = request("a", at=0.0), request("b", at=1.0), request("c", at=2.0)
    queue = queue_of(first, *others)
    queue.hold(others[0], 1.0)
    queue.add(first, 3.0)
    assert names(queue) == "bca"


def test_an_answer_that_has_begun_comes_before_all() -> None:
    begun = request("b", priority=-5)
    begun.stream.add(TokenDelta("b", 0, 0, (7,)))
    assert names(queue_of(request("a", priority=5), begun).in_order(0.0)) == "ba"


def test_of_one_key_the_least_slack_comes_first_and_who_is_late_comes_last() -> None:
    queue = queue_of(
        request("a", ttft_s=9.0), request("b", ttft_s=5.0), request("c", num_tokens=5), request("d", num_tokens=2)
    )
    assert names(queue.in_order(1.0)) == "badc"
    assert names(queue.in_order(6.0)) == "adcb"


def test_a_prompt_leaves_in_time_for_those_that_its_worker_has() -> None:
    queue = queue_of(request("a", ttft_s=1.0), request("b", ttft_s=2.0))
    assert names(queue.in_order(1.0 - HOLD_S - 0.01)) == "ab"
    assert names(queue.in_order(1.0 - HOLD_S + 0.01)) == "ba"
    assert names(queue_of(request("c", ttft_s=0.15), request("d", ttft_s=2.0)).in_order(0.09)) == "cd"


def test_a_long_prompt_must_begin_sooner_to_be_in_time() -> None:
    states = [request("a", ttft_s=3.0), request("b", ttft_s=4.0)]
    queue = queue_of(*states)
    queue.hold(states[0], 0.5)
    queue.hold(states[1], 2.0)
    assert names(queue.in_order(0.0)) == "ba"


def test_a_key_with_many_requests_does_not_starve_one_with_few() -> None:
    many = [request(f"many-{i}", key="many") for i in range(1000)]
    few = [request(f"few-{i}", key="few", at=1.0) for i in range(10)]
    order = served(queue_of(*many, *few), 1.0, most=21)
    assert Counter(state.request.key for state in order)["few"] == 10


def test_keys_take_turns_within_one_pass() -> None:
    queue = queue_of(*(request(f"{key}{i}", key=key) for i in range(3) for key in "ab"))
    order = []
    for state in queue.in_order(0.0):
        order.append(state)
        queue.placed(state)
    assert names(order) == "a0b0a1b1a2b2"


def test_keys_share_tokens_and_not_requests() -> None:
    long = [request(f"l{i}", key="long", num_tokens=400) for i in range(20)]
    short = [request(f"s{i}", key="short", num_tokens=100) for i in range(80)]
    got = Counter[str]()
    for state in served(queue_of(*long, *short), most=50):
        got[state.request.key] += len(state.request.prompt_token_ids)
    assert got["long"] == got["short"] == 4000


def test_the_tokens_of_answers_count_too() -> None:
    wordy, terse = [request(f"w{i}", key="w") for i in range(4)], [request(f"t{i}", key="t") for i in range(4)]
    queue = queue_of(*wordy, *terse)
    queue.placed(wordy[0])
    queue.charge(wordy[0], 100)
    assert names(served(queue, most=4)) == "t0t1t2t3"


def test_a_key_that_comes_back_gets_no_turns_for_the_time_when_it_was_away() -> None:
    first = [request(f"a{i}", key="a") for i in range(100)]
    queue = queue_of(*first)
    served(queue, most=50)
    for i in range(50):
        queue.add(request(f"b{i}", key="b"), 0.0)
    got = Counter(state.request.key for state in served(queue, most=20))
    assert abs(got["a"] - got["b"]) <= 1


def many(of: str, share: float, num: int = 400, **fields: Any) -> list[RequestState]:
    return [request(f"{of}{fields.get('key', '')}{i}", of=of, share=share, **fields) for i in range(num)]


def tokens_by_class(states: Iterable[RequestState]) -> Counter[str]:
    got = Counter[str]()
    for state in states:
        got[state.request.request_class] += len(state.request.prompt_token_ids)
    return got


def test_classes_divide_tokens_by_their_shares_and_not_requests() -> None:
    queue = queue_of(*many("gold", 3.0, num_tokens=100), *many("silver", 1.0, num_tokens=25), *many("rest", 0.0))
    got = tokens_by_class(served(queue, most=300))
    total = sum(got.values())
    assert [got[of] / total for of in ("gold", "silver", "rest")] == pytest.approx([0.6, 0.2, 0.2], abs=0.02)


def test_a_class_that_asks_for_little_leaves_its_share_to_the_others() -> None:
    few = many("gold", 100.0, num=5)
    order = served(queue_of(*many("silver", 1.0), *few))
    assert len(order) == 405, "all are served, one after the other"
    assert set(order[:6]) >= set(few), "the class of the larger share gets its five at once"


def test_a_class_that_comes_back_gets_no_turns_for_the_time_when_it_was_away() -> None:
    queue = queue_of(*many("gold", 1.0))
    served(queue, most=300)
    for state in many("silver", 1.0):
        queue.add(state, 0.0)
    got = tokens_by_class(served(queue, most=100))
    assert abs(got["gold"] - got["silver"]) <= 10


def test_within_a_class_its_keys_share_equally_however_many_there_are_elsewhere() -> None:
    crowd = [state for key in "abcd" for state in many("gold", 1.0, key=key)]
    order = served(queue_of(*crowd, *many("silver", 1.0, key="alone")), most=400)
    got = Counter(state.request.key for state in order)
    assert got == {"alone": 200, "a": 50, "b": 50, "c": 50, "d": 50}


def test_a_key_gains_nothing_by_asking_in_two_classes_without_shares() -> None:
    states = [*many("x", 0.0, key="both"), *many("y", 0.0, key="both"), *many("y", 0.0, key="one")]
    got = Counter(state.request.key for state in served(queue_of(*states), most=100))
    assert got == {"both": 50, "one": 50}


def test_a_share_counts_only_beside_classes_of_the_same_priority() -> None:
    queue = queue_of(*many("gold", 1000.0, num=3), request("first", priority=1, share=0.001))
    assert served(queue)[0].request.request_id == "first"


def test_the_tokens_of_answers_count_for_the_class() -> None:
    wordy, terse = many("wordy", 1.0, num=4), many("terse", 1.0, num=4)
    queue = queue_of(*wordy, *terse)
    queue.placed(wordy[0])
    queue.charge(wordy[0], 100)
    assert {state.request.request_class for state in served(queue, most=4)} == {"terse"}


def test_a_class_that_is_served_out_of_turn_takes_no_turns_from_those_that_wait() -> None:
    gold, silver = many("gold", 1.0), many("silver", 1.0)
    queue = queue_of(*gold, *silver)
    for state in silver[:100]:  # each has a place at once, at a worker that takes no others
        queue.placed(state)
    for state in gold[:10]:
        queue.placed(state)
        queue.charge(state, 1)
    assert tokens_by_class(served(queue, most=80)) == {"gold": 800}


def test_a_request_that_is_held_again_and_again_keeps_its_place_in_the_order() -> None:
    waits, other = request("a", key="a"), [request(f"b{i}", key="b") for i in range(3)]
    queue = queue_of(waits, *other)
    for state in other[:2]:  # they pass: the worker that they need has room
        queue.hold(waits, 1.0)
        queue.placed(state)
    queue.hold(waits, 1.0)
    assert names(queue.in_order(0.0)) == "ab2"


def test_the_oldest_gets_each_eighth_place_once_it_has_waited_long() -> None:
    old = [request(f"old{i}", priority=-5) for i in range(3)]
    queue = queue_of(*old, *(request(f"n{i}", priority=5, at=AGE_CAP_S) for i in range(100)))
    now = AGE_CAP_S + 0.1
    places = [place for place, state in enumerate(served(queue, now, most=40)) if state in old]
    assert places == [PLACEMENTS_PER_OLDEST * (i + 1) - 1 for i in range(3)]
    young = queue_of(request("b", priority=-5), *(request(f"n{i}", priority=5) for i in range(100)))
    assert "b" not in names(served(young, AGE_CAP_S - 0.1, most=100))


def test_what_is_held_ahead_of_a_new_request() -> None:
    states = [
        request("a", key="mine"), request("b", key="other"), request("c", key="more"),
        request("d", key="mine", priority=5), request("e", key="mine", priority=-5),
    ]  # fmt: skip
    queue = queue_of(*states)
    for state, prompt_s in zip(states, (1.0, 0.5, 8.0, 3.0, 50.0), strict=True):
        queue.hold(state, prompt_s)
    assert queue.ahead(RequestClass(), "mine") == (1.0 + 0.5 + 1.0 + 3.0, 4), "as much of each other key as of its own"
    assert queue.ahead(RequestClass(priority=5), "new") == (0.0, 0)
    assert queue.held_s == 62.5 and queue.num_held == 5
    queue.discard(states[2])
    queue.placed(states[3])
    assert queue.held_s == 51.5 and queue.num_held == 3
    assert [state.held_s for state in states[2:4]] == [None, None]


def test_what_is_held_ahead_of_a_new_request_by_the_shares() -> None:
    gold, silver = RequestClass("gold", share=3.0), RequestClass("silver", share=1.0)
    states = [*many("gold", 3.0, num=9), *many("silver", 1.0, num=2)]
    queue = queue_of(*states)
    for state in states:
        queue.hold(state, 1.0)
    assert queue.ahead(gold, "") == (9.0 + 2.0, 11), "a third of what is before it in its own class, so all there is"
    assert queue.ahead(silver, "") == (2.0 + 6.0, 8), "three of the other class for each of its own"
    assert queue.ahead(RequestClass(), "") == (0.0, 0), "classes without a share come next: none of them waits"


steps = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.sampled_from([-5, 0, 5]), st.integers(1, 50), st.integers(0, 3),
        st.sampled_from([0.0, 0.5, 3.0]),
    ),
    max_size=40,
)  # fmt: skip


@given(steps)
@settings(derandomize=True, deadline=None, max_examples=examples(50))
def test_every_request_is_there_once_until_it_is_placed(steps: list[tuple[str, int, int, int, float]]) -> None:
    queue, here, now = WaitingRequests(), dict[str, RequestState](), 0.0
    for number, (key, priority, num_tokens, num_placed, share) in enumerate(steps):
        now += 0.7
        fields = {"key": key, "priority": priority, "num_tokens": num_tokens, "of": f"share-{share}", "share": share}
        state = request(f"r{number}", ttft_s=float(number % 3), **fields)
        here[state.request.request_id] = state
        queue.add(state, now)
        if number % 2:
            queue.hold(state, 0.1 * num_tokens)
        for placed in served(queue, now, most=num_placed):
            del here[placed.request.request_id]
        in_order = list(queue.in_order(now))
        assert len(in_order) == len(queue) == len(here) and set(in_order) == set(here.values())
        assert queue.held_s == pytest.approx(sum(state.held_s or 0.0 for state in here.values()))


def test_a_short_prompt_without_a_goal_passes_longer_ones_that_are_held() -> None:
    states = [request(f"{num}", num_tokens=num, key="mine") for num in (100, 300, 900)]
    states.append(request("other", num_tokens=900, key="other"))
    queue = queue_of(*states)
    for state in states:
        queue.hold(state, len(state.request.prompt_token_ids) / 100)
    assert queue.ahead(RequestClass(), "mine", 50) == (0.0, 0)
    assert queue.ahead(RequestClass(), "mine", 300) == (4.0 + 4.0, 3), "as much of another key as of its own"
    assert queue.ahead(RequestClass(), "mine", 1000) == queue.ahead(RequestClass(), "mine") == (13.0 + 9.0, 4)
