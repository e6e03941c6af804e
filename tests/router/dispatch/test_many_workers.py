"""A request among more workers than are weighed."""

from __future__ import annotations

import pytest

from common.blocks.block_hash import block_hashes
from common.latency.link_model import LinkModel, Links
from common.latency.step_model import StepShape
from common.wire.messages import Message
from common.wire.sampling_params import SamplingParams
from router.dispatch.client import GenerationRequest
from router.dispatch.placement import Placement
from router.dispatch.request_state import RequestState
from router.policy.routing import Choice

from ..policy.test_shortlist import MODEL, Rig

PROMPT = [number % 250 for number in range(1000)]


class Placing(Rig):
    """80 workers, and what is sent to them; those in `unreachable` take no messages."""

    def __init__(self) -> None:
        super().__init__(40)
        self.unreachable: set[str] = set()
        self.sent: list[str] = []
        self.placement = Placement(
            self.registry, self.policy, self.index, self.send, lambda address, request_id, attempt: None
        )

    def send(self, address: str, message: Message) -> bool:
        if address not in self.unreachable:
            self.sent.append(address)
        return address not in self.unreachable

    def state(self, max_tokens: int = 50) -> RequestState:
        return RequestState(GenerationRequest("r", PROMPT, SamplingParams(max_tokens=max_tokens)), 0.0)

    def place(self, state: RequestState) -> Choice | None:
        return self.placement.place(state, 0.0)


@pytest.fixture
def placing() -> Placing:
    return Placing()


def test_a_request_goes_to_a_worker_of_each_role(placing: Placing) -> None:
    state = placing.state()
    choice = placing.place(state)
    assert choice is not None and choice.prefill is not None and choice.decode is not None
    assert sorted(placing.sent) == sorted([choice.prefill.address, choice.decode.address])
    assert state.attempts.prefill is not None and state.attempts.decode is not None


def test_a_worker_that_holds_the_prompt_computes_the_rest(placing: Placing) -> None:
    placing.index.store("d33", [digest[:8] for digest in block_hashes(PROMPT, 16)])
    choice = placing.place(placing.state())
    assert choice is not None and choice.local and choice.decode is not None and choice.decode.address == "d33"


def test_what_was_sent_is_expected_where_it_went(placing: Placing) -> None:
    state = placing.state()
    first = placing.place(state)
    assert first is not None and first.prefill is not None
    assert placing.index.hits(block_hashes(PROMPT, 16)).num_blocks(first.prefill.address) == 62
    placing.placement.settle(state)
    again = placing.place(placing.state())
    assert again is not None and again.prefill is first.prefill, "although it has not reported yet"


def test_deaf_workers_are_passed_over(placing: Placing) -> None:
    placing.unreachable = {f"d{number}" for number in range(39)}
    choice = placing.place(placing.state())
    assert choice is not None and choice.decode is not None and choice.decode.address == "d39"
    placing.unreachable.add("d39")
    assert placing.place(placing.state()) is None


def test_workers_that_failed_the_request_come_last(placing: Placing) -> None:
    state = placing.state()
    state.attempts.failed_incarnations = {(f"d{number}", 1) for number in range(39)}
    choice = placing.place(state)
    assert choice is not None and choice.decode is not None and choice.decode.address == "d39"
    state = placing.state()
    state.attempts.failed_incarnations = {(f"{role}{number}", 1) for role in "pd" for number in range(40)}
    choice = placing.place(state)
    assert choice is not None and choice.local, "a decode worker gets a second chance, a prefill worker none beside it"


def test_an_answer_of_one_token_needs_no_decode_worker(placing: Placing) -> None:
    choice = placing.place(placing.state(max_tokens=1))
    assert choice is not None and choice.decode is None


def test_without_decode_workers_a_request_waits(placing: Placing) -> None:
    for number in range(40):
        placing.registry.on_cut(f"d{number}")
    assert placing.place(placing.state()) is None and not placing.sent


def test_a_prompt_goes_to_the_worker_that_has_it_on_disk_unless_another_has_it_in_memory(placing: Placing) -> None:
    disk = LinkModel(byte_s=1e-10, block_bytes=10**6, num_transfers=9)
    placing.report("p33", links=Links(disk=disk))
    shorts = [digest[:8] for digest in block_hashes(PROMPT, 16)]
    placing.index.store_below("p33", shorts)
    placing.index.store_below("p34", shorts)  # which cannot say how long it reads
    choice = placing.place(placing.state(max_tokens=1))
    assert choice is not None and choice.prefill is not None and choice.prefill.address == "p33"
    computed = MODEL.seconds(StepShape.of_prompt(992, 1000))
    assert choice.forecast.prompt_s == pytest.approx(62 * 1e-4 + computed)
    placing.index.store("p20", shorts)
    again = placing.place(placing.state(max_tokens=1))
    assert again is not None and again.prefill is not None and again.prefill.address == "p20"
