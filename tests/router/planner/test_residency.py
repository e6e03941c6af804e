"""Which models are in memory: what requests, ends, failures and time make of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import Unavailable
from router.planner.residency import FIRST_PAUSE_S, LONGEST_PAUSE_S, Residency

GB = 10**9


def loaded(residency: Residency, *names: str, num_bytes: int = 4 * GB) -> None:
    """Load models one after the other. Each is used once, at 1 s, 2 s, ..."""
    for number, name in enumerate(names, 1):
        residency.begin(name, num_bytes, number)
        residency.step(number)
        residency.loaded(name, number)
        residency.end(name, number)


def test_the_first_request_loads_a_model_and_time_without_requests_unloads_it() -> None:
    residency = Residency(10 * GB, keep_s=300.0)
    residency.begin("a", 4 * GB, 0.0)
    assert residency.step(0.0) == ["a"]
    residency.begin("a", 4 * GB, 1.0)  # a second request meanwhile
    residency.loaded("a", 5.0)
    residency.end("a", 6.0)
    assert residency.step(1000.0) == ["a"], "the other request runs"
    residency.end("a", 1000.0)
    assert residency.step(1299.0) == ["a"]
    assert residency.models["a"].expires_at == 1300.0
    assert residency.step(1300.0) == []
    assert residency.stage("a") == "unloading"
    residency.gone("a", 1301.0)
    assert residency.stage("a") == "idle"


def test_the_least_recently_used_model_without_requests_makes_room() -> None:
    residency = Residency(13 * GB, keep_s=math.inf)
    loaded(residency, "a", "b", "c")
    residency.begin("a", 4 * GB, 10.0)
    residency.begin("d", 4 * GB, 11.0)
    assert residency.step(11.0) == ["a", "c"], "d waits for the memory of b"
    residency.gone("b", 12.0)
    assert residency.step(12.0) == ["a", "c", "d"]


def test_models_that_are_kept_for_ever_make_room_last() -> None:
    residency = Residency(9 * GB, keep_s=300.0)
    loaded(residency, "kept", "b")
    residency.models["kept"].keep_s = math.inf
    residency.begin("c", 4 * GB, 10.0)
    assert (residency.stage("kept"), residency.stage("b")) == ("loaded", "unloading")


def test_a_model_for_which_no_memory_can_be_freed_is_refused_with_the_numbers() -> None:
    residency = Residency(10 * GB, keep_s=300.0)
    loaded(residency, "a", "b")
    residency.begin("a", 4 * GB, 10.0)
    with pytest.raises(Unavailable, match=r"'c' needs 8.0 GB of memory. Of 10.0 GB .*: a \(4.0 GB\)\.") as refused:
        residency.begin("c", 8 * GB, 11.0)
    assert refused.value.retry_after_s
    assert residency.stage("b") == "loaded", "nothing is unloaded in vain"
    with pytest.raises(Unavailable, match="'d' needs 11.0 GB of memory, more than the 10.0 GB"):
        residency.begin("d", 11 * GB, 12.0)
    residency.end("a", 13.0)
    residency.begin("c", 8 * GB, 14.0)
    assert (residency.stage("a"), residency.stage("b")) == ("unloading", "unloading")


def test_requests_for_a_model_that_is_being_unloaded_load_it_again() -> None:
    residency = Residency(10 * GB, keep_s=0.0)
    loaded(residency, "a")
    assert residency.step(5.0) == []
    residency.begin("a", 4 * GB, 6.0)
    assert residency.step(6.0) == []
    residency.gone("a", 7.0)
    assert residency.step(7.0) == ["a"]


def test_a_keep_alive_of_a_request_counts_until_the_next_one() -> None:
    residency = Residency(10 * GB, keep_s=300.0)
    loaded(residency, "a")
    residency.begin("a", 4 * GB, 10.0, keep_s=math.inf)
    residency.end("a", 10.0)
    assert residency.step(1e9) == ["a"]
    residency.begin("a", 4 * GB, 1e9, keep_s=0.0)
    assert residency.step(1e9) == ["a"], "until the answer is complete"
    residency.end("a", 1e9 + 1)
    assert residency.step(1e9 + 1) == []


def test_a_failed_load_is_not_tried_again_before_a_pause_which_grows() -> None:
    residency, now = Residency(10 * GB, keep_s=300.0), 0.0
    pauses = []
    for _ in range(9):
        residency.begin("a", GB, now)
        residency.step(now)
        residency.failed("a", "the file is damaged", now)
        residency.end("a", now)
        assert residency.step(now) == []
        pauses.append(residency.models["a"].retry_at - now)
        with pytest.raises(Unavailable, match="'a' cannot be loaded: the file is damaged"):
            residency.begin("a", GB, now + 0.9 * pauses[-1])
        now += pauses[-1]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_a_load_that_always_fails_keeps_the_longest_pause() -> None:
    residency = Residency(10 * GB, keep_s=300.0)
    for _ in range(2000):
        residency.failed("a", "the file is damaged", 0.0)
    assert residency.models["a"].retry_at == LONGEST_PAUSE_S


def test_a_model_whose_requests_ended_while_it_waited_is_not_loaded() -> None:
    residency = Residency(4 * GB, keep_s=300.0)
    loaded(residency, "a")
    residency.begin("b", 4 * GB, 10.0)
    residency.end("b", 11.0)
    residency.gone("a", 12.0)
    assert residency.step(12.0) == []


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: memory suffices, requests keep their models, and nothing waits for ever."""

    BUDGET = 10

    def __init__(self) -> None:
        super().__init__()
        self.residency, self.now = Residency(self.BUDGET, keep_s=5.0), 0.0
        self.served: set[str] = set()  # models whose requests run now

    @rule(name=st.sampled_from("abcde"), keep_s=st.sampled_from((None, 0.0, math.inf)))
    def request(self, name: str, keep_s: float | None) -> None:
        before = {one: model.stage for one, model in self.residency.models.items()}
        try:
            self.residency.begin(name, 2 + ord(name) - ord("a"), self.now, keep_s)
        except Unavailable:
            assert {one: model.stage for one, model in self.residency.models.items() if one in before} == before

    @precondition(lambda self: any(model.num_uses for model in self.residency.models.values()))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        used = [name for name, model in self.residency.models.items() if model.num_uses]
        self.residency.end(data.draw(st.sampled_from(used)), self.now)

    @precondition(lambda self: self.in_stage("loading"))
    @rule(data=st.data(), fails=st.booleans())
    def load(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(self.in_stage("loading")))
        if fails:
            self.residency.failed(name, "why", self.now)
        else:
            self.residency.loaded(name, self.now)

    @precondition(lambda self: self.in_stage("unloading"))
    @rule(data=st.data())
    def exit(self, data: st.DataObject) -> None:
        self.residency.gone(data.draw(st.sampled_from(self.in_stage("unloading"))), self.now)

    @rule(seconds=st.floats(0.1, 100.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def in_stage(self, stage: str) -> list[str]:
        return [name for name, model in self.residency.models.items() if model.stage == stage]

    @invariant()
    def keeps_its_promises(self) -> None:
        used = {name for name in self.in_stage("loaded") if self.residency.models[name].num_uses}
        wanted = self.residency.step(self.now)
        assert used <= set(wanted), "a model with requests was unloaded"
        assert self.residency.num_resident_bytes <= self.BUDGET
        reserved = sum(model.num_bytes for model in self.residency.models.values() if model.is_wanted)
        assert reserved <= self.BUDGET, "a request waits for memory that will never be free"
        if not self.in_stage("unloading"):
            assert not self.in_stage("waiting"), "nothing prevents the load"


TestAnyOrder = AnyOrder.TestCase


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 9))
def test_no_more_is_unloaded_than_needed(sizes: list[int], wanted: int) -> None:
    residency = Residency(sum(sizes), keep_s=math.inf)
    for number, size in enumerate(sizes):
        loaded(residency, str(number), num_bytes=size)
    if wanted > sum(sizes):
        return
    residency.begin("new", wanted, 100.0)
    freed = [model.num_bytes for model in residency.models.values() if model.stage == "unloading"]
    assert sum(freed) >= wanted
    assert sum(freed) - freed[-1] < wanted
