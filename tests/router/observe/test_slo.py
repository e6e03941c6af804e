"""How goals about time were kept, and who counts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import msgspec
import pytest

from common.config.request_class import RequestClass
from common.errors import InvalidRequest, Overloaded, RequestError, Unavailable
from common.wire.sampling_params import SamplingParams
from router.dispatch.client import Caller, GenerationRequest, TokenEvent
from router.dispatch.dispatcher import Dispatcher
from router.observe.measured_client import MeasuredClient
from router.observe.slo import RecentShare, SLOWindow
from router.planner.offered_load import LoadWindow

REQUEST = GenerationRequest("r", [1], SamplingParams(max_tokens=4))


def test_a_share_of_nothing_is_whole_and_old_promises_are_forgotten() -> None:
    share = RecentShare(60.0)
    assert share.value(0.0) == 1.0
    for now, kept in ((1.0, False), (2.0, True), (40.0, True), (41.0, True)):
        share.add(kept, now)
    assert share.value(45.0) == 0.75
    assert share.value(70.0) == 1.0
    share.add(False, 70.0)
    assert share.value(70.0) == pytest.approx(2 / 3)


def test_only_goals_that_exist_are_told() -> None:
    assert SLOWindow(0.0, 0.0).attainment(1.0) == {} and not SLOWindow(0.0, 0.0).has_goals
    assert SLOWindow(0.5, 0.0).attainment(1.0) == {"ttft": 1.0}


def test_each_class_has_goals_of_its_own() -> None:
    window = SLOWindow(0.0, 0.1, others=[RequestClass("quick", ttft_s=0.5), RequestClass("batch")])
    for name in ("default", "quick", "batch", "of no such class"):
        window.first_token(0.7, 1.0, name)
        window.finished(0.05, 1.0, name)
    window.failed(False, 1.0, "batch")
    window.failed(True, 1.0, "quick")
    window.first_token(0.4, 1.0, "quick")
    assert window.class_attainment(1.0) == {"default": {"tpot": 1.0}, "quick": {"ttft": 0.5}, "batch": {}}
    assert window.attainment(1.0) == {"ttft": 0.5, "tpot": 1.0} and window.tpot_s == 0.1


class Script:
    """A client that gives tokens at scripted times, and then perhaps an error."""

    def __init__(self, *steps: tuple[float, int] | RequestError) -> None:
        self.steps, self.now, self.closed = steps, 100.0, False

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        try:
            for step in self.steps:
                if isinstance(step, RequestError):
                    raise step
                self.now += step[0]
                yield TokenEvent(tuple(range(step[1])))
        finally:
            self.closed = True


async def attained(script: Script, *, take: int = 100) -> tuple[dict[str, float], SLOWindow]:
    window = SLOWindow(0.5, 0.1)
    client = MeasuredClient(cast(Dispatcher, script), window, lambda: script.now)
    stream: Any = client.generate(REQUEST)
    try:
        async for _ in stream:
            take -= 1
            if not take:
                break
    except RequestError:
        pass
    await stream.aclose()
    assert script.closed
    return window.attainment(script.now), window


async def test_tokens_that_went_to_a_sink_count_as_others() -> None:
    script, window, sunk = Script((0.4, 1), (0.3, 1), (0.3, 1), (0.0, 1)), SLOWindow(0.5, 0.1), list[TokenEvent]()

    async def generate(request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        async for event in Script.generate(script, request):
            assert request.sink is not None
            if not request.sink(event):
                yield event

    script.generate = generate  # type: ignore[method-assign]
    client = MeasuredClient(cast(Dispatcher, script), window, lambda: script.now)
    request = msgspec.structs.replace(REQUEST, sink=lambda event: not sunk.append(event))
    assert len([event async for event in client.generate(request)]) == 1, "the first token has no sink"
    assert len(sunk) == 3 and window.attainment(script.now) == {"ttft": 1.0, "tpot": 0.0}


async def test_a_beam_search_has_one_first_token() -> None:
    script, window, load = Script((0.2, 1)), SLOWindow(1.0, 0.1), LoadWindow(quantile=0.5)
    client = MeasuredClient(cast(Dispatcher, script), window, lambda: script.now, load)
    for step, script.steps in enumerate((((2.0, 1),), ((0.2, 1),), ((0.2, 1),), ((3.0, 0),))):
        request = msgspec.structs.replace(REQUEST, continues=step > 0)
        assert [event async for event in client.generate(request)]
    assert window.attainment(script.now) == {"ttft": 0.0, "tpot": 1.0}
    assert load.tails_s(script.now)[0] == pytest.approx(2.0, rel=0.05)
    script.steps = (Unavailable("gone"),)
    with pytest.raises(Unavailable):
        await anext(client.generate(msgspec.structs.replace(REQUEST, continues=True)))
    assert window.attainment(script.now) == {"ttft": 0.0, "tpot": 0.0}, "it ended after its first token"


async def test_a_stream_within_its_goals() -> None:
    shares, _ = await attained(Script((0.4, 1), (0.08, 1), (0.09, 1), (0.0, 0)))
    assert shares == {"ttft": 1.0, "tpot": 1.0}


async def test_a_stream_that_misses_both() -> None:
    shares, _ = await attained(Script((0.6, 1), (0.5, 2), (0.1, 1)))
    assert shares == {"ttft": 0.0, "tpot": 0.0}


async def test_one_token_promises_nothing_of_the_next() -> None:
    assert (await attained(Script((0.1, 1))))[0] == {"ttft": 1.0, "tpot": 1.0}


@pytest.mark.parametrize(
    ("error", "ttft"), [(Unavailable("none"), 0.0), (Overloaded("full"), 0.0), (InvalidRequest("bad"), 1.0)]
)
async def test_who_is_refused_for_want_of_capacity_was_not_served(error: RequestError, ttft: float) -> None:
    assert (await attained(Script(error)))[0] == {"ttft": ttft, "tpot": 1.0}


async def test_a_stream_that_breaks_off_kept_its_first_promise() -> None:
    assert (await attained(Script((0.1, 1), Unavailable("gone"))))[0] == {"ttft": 1.0, "tpot": 0.0}


async def test_a_client_that_stops_early_has_had_what_it_wanted() -> None:
    shares, _ = await attained(Script((0.1, 1), (0.05, 1), (9.0, 1)), take=2)
    assert shares == {"ttft": 1.0, "tpot": 1.0}


async def test_who_is_refused_unread_got_no_first_token_in_time() -> None:
    class Full:
        def check_room(self, is_longer: Callable[[int], bool], caller: Caller) -> None:
            if is_longer(64):
                raise Overloaded("full")

    window = SLOWindow(0.5, 0.1)
    client = MeasuredClient(cast(Dispatcher, Full()), window, lambda: 1.0)
    client.check_room(lambda num_tokens: False)
    assert window.attainment(1.0) == {"ttft": 1.0, "tpot": 1.0}
    with pytest.raises(Overloaded):
        client.check_room(lambda num_tokens: True)
    assert window.attainment(1.0) == {"ttft": 0.0, "tpot": 1.0}
