"""What a goal for the time of a token changes: how many sequences run, and in which chunks; never a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.blocks.block_hash import BlockHasher
from common.engine.kv.block_pool import BlockPool
from common.engine.sequences.step_budget import LEAST_BATCH, LEAST_CHUNK, TokenGoal
from common.latency.step_fit import StepFit
from common.latency.step_model import StepModel
from common.wire.message_fields import pack_tokens
from common.wire.messages import DecodeRequest
from common.wire.sampling_params import SamplingParams
from decode_worker.pace import TokenGaps
from decode_worker.queue import ADMISSIONS_PER_OLDEST, PATIENCE, YIELD_S
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence, RequestStatus

Rig = Any  # EngineRig of conftest, which test modules cannot import
MODEL = StepModel(fixed_s=0.01, token_s=1e-3, row_s=2e-3, num_steps=100)
ERRING = StepModel(fixed_s=0.01, token_s=1e-3, row_s=2e-3, num_steps=100, error=0.5)
"""Of a goal of 50 ms, steps are planned for 40: 15 sequences, or 8 and 14 prompt tokens."""


def scheduler(**options: Any) -> DecodeScheduler:
    pool = BlockPool(256, 4)
    plan = DecodeScheduler(pool, max_num_seqs=32, local_prefill_chunk=64, watermark=0.0, slo_tpot_s=0.05, **options)
    plan.goal.share = 0.8
    return plan


def sequence(name: str, num_tokens: int, now: float = 0.0, priority: int = 0) -> DecodeSequence:
    tokens = [hash((name, place)) % 250 for place in range(num_tokens)]
    params = SamplingParams(max_tokens=8, temperature=0.0)
    request = DecodeRequest(request_id=name, attempt=0, prompt=pack_tokens(tokens), params=params, priority=priority)
    return DecodeSequence(b"r", request, tokens, BlockHasher(4, ""), now, 1e9, status=RequestStatus.WAITING)


def decoding(plan: DecodeScheduler, count: int, model: StepModel = MODEL) -> None:
    """Let `count` short sequences come, and decode as many as may run."""
    for number in range(count):
        plan.add(sequence(f"s{number}", 1))
    for chunk in plan.schedule(0.0, model).chunks:
        plan.advance(chunk)
        chunk.sequence.token_ids.append(7)


def test_as_many_run_as_keep_the_goal_and_the_others_wait() -> None:
    plan = scheduler()
    decoding(plan, 20)
    assert (len(plan.running), plan.num_waiting, plan.batch_cap.reason) == (15, 5, "goal")
    patience_s = PATIENCE * plan.goal.goal_s
    assert len(plan.schedule(patience_s, MODEL).chunks) == 15
    assert len(plan.schedule(patience_s + 0.1, MODEL).chunks) == 15, "a larger batch would make all answers late"
    assert len(plan.schedule(patience_s + 0.2, ERRING).chunks) == 20, "a model that errs keeps nobody out for long"
    plan.check_integrity()


def test_without_a_flag_patience_ends_at_the_usual_number() -> None:
    plan = scheduler(usual_num_seqs=17)
    decoding(plan, 20, StepModel())
    assert (len(plan.running), plan.batch_cap.reason) == (17, "bound"), "nothing is known yet"
    plan = scheduler(usual_num_seqs=17)
    decoding(plan, 20)
    assert len(plan.running) == 15
    assert len(plan.schedule(PATIENCE * plan.goal.goal_s + 0.1, ERRING).chunks) == 17


def test_answers_that_miss_the_goal_anyway_yield_to_others_but_do_not_starve() -> None:
    plan = scheduler()
    decoding(plan, 20)
    for number in range(12):
        one = sequence(f"q{number}", 4, now=0.0)
        one.status, one.opened_at = RequestStatus.EXPECTING, 0.1 * number
        plan.add(one)
        plan.open(one)
    plan.queue[:] = [one for one in plan.queue if one.status is RequestStatus.OPENED]

    def joins(now: float) -> str:
        plan.remove(plan.running[0])
        return "".join(one.request_id for one in plan.schedule(now, MODEL).granted)

    assert joins(0.2) == "q0"
    assert joins(0.95 + PATIENCE * 0.05) == "q10", "all before it have waited for more than 0.4 s"
    late = [joins(YIELD_S + 10.0) for _ in range(2)]
    assert late == ["q1", "q2"], "when all are late, the oldest is first"
    for number in range(20, 30):
        one = sequence(f"q{number}", 4, now=YIELD_S + 10.0)
        one.status, one.opened_at = RequestStatus.EXPECTING, YIELD_S + 10.0
        plan.add(one)
        plan.open(one)
    order = [joins(YIELD_S + 10.1) for _ in range(ADMISSIONS_PER_OLDEST)]
    assert order.index("q3") == ADMISSIONS_PER_OLDEST - 1 and order[0] == "q20"


def opened(plan: DecodeScheduler, name: str, num_tokens: int, priority: int = 0, **fields: Any) -> DecodeSequence:
    """Announce the KV of a prompt to a worker."""
    one = sequence(name, num_tokens, priority=priority)
    one.status = RequestStatus.EXPECTING
    for field, value in fields.items():
        setattr(one, field, value)
    plan.add(one)
    plan.open(one)
    return one


def in_turn(plan: DecodeScheduler, now: float) -> list[str]:
    """Announced requests in the order in which a full worker gives them places."""
    order = []
    while any(one.status is RequestStatus.OPENED for one in plan.queue):
        plan.remove(plan.running[0])
        order += [one.request_id for one in plan.schedule(now, MODEL).granted]
    return order


def test_an_answer_whose_first_token_was_late_yields() -> None:
    plan = scheduler()
    decoding(plan, 15)
    opened(plan, "late", 4, opened_at=0.3, due_at=0.2)
    opened(plan, "in time", 4, opened_at=0.3, due_at=0.4)
    assert in_turn(plan, 0.35) == ["in time", "late"]


def test_small_requests_come_first_but_the_oldest_does_not_starve() -> None:
    plan = scheduler()
    decoding(plan, 15)
    opened(plan, "large", 12)
    for number in range(10):
        opened(plan, f"small {number}", 4, accepted_at=YIELD_S)
    order = in_turn(plan, YIELD_S + 0.1)
    assert order.index("large") == ADMISSIONS_PER_OLDEST - 1 and order[0] == "small 0"


def test_a_late_answer_of_higher_priority_yields_only_to_its_own_priority() -> None:
    plan = scheduler()
    decoding(plan, 15)
    opened(plan, "late", 4, opened_at=0.3, due_at=0.2, priority=5)
    opened(plan, "low", 4, opened_at=0.3, due_at=0.4)
    opened(plan, "in time", 4, opened_at=0.3, due_at=0.4, priority=5)
    assert in_turn(plan, 0.35) == ["in time", "late", "low"]


def test_long_answers_whose_steps_take_little_of_the_goal_may_wait_longer() -> None:
    orders = []
    for num_tokens in (8, 101):  # of 40 ms, so that 100 of them spare a second
        plan = scheduler()
        decoding(plan, 15)
        plan.goal.answered(num_tokens)
        opened(plan, "first", 4, opened_at=0.1)
        opened(plan, "second", 4, opened_at=0.9)
        orders.append(in_turn(plan, 1.0))
    assert orders == [["second", "first"], ["first", "second"]]


def test_a_step_judges_each_waiting_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = scheduler()
    for number in range(40):
        one = sequence(f"q{number}", 4)
        one.status = RequestStatus.EXPECTING
        plan.add(one)
        plan.open(one)
    judged: list[DecodeSequence] = []

    def is_late(_: DecodeScheduler, waiting: DecodeSequence) -> bool:
        judged.append(waiting)
        return False

    monkeypatch.setattr(DecodeScheduler, "_is_late", is_late)
    assert len(plan.schedule(0.2, MODEL).granted) > 1 and len(judged) == 40


def test_a_place_that_gets_free_is_given_away() -> None:
    plan = scheduler()
    decoding(plan, 20)
    plan.remove(plan.running[3])
    plan.schedule(0.1, MODEL)
    assert (len(plan.running), plan.num_waiting) == (15, 4)


def test_a_prompt_gets_what_the_sequences_leave_of_the_goal() -> None:
    plan = scheduler()
    decoding(plan, 8)
    plan.add(sequence("long", 100))
    *rows, prompt = plan.schedule(0.1, MODEL).chunks
    assert (len(rows), prompt.num_tokens, plan.step_tokens.reason) == (8, LEAST_CHUNK, "least")
    cheap = StepModel(fixed_s=0.01, token_s=5e-4, row_s=2e-3, num_steps=100)
    *_, prompt = plan.schedule(0.2, cheap).chunks
    assert prompt.num_tokens == 28 and plan.step_tokens.reason == "goal"
    assert plan.max_step_tokens == 28


def test_a_goal_that_nothing_keeps_changes_nothing() -> None:
    plan, slow = scheduler(), StepModel(fixed_s=0.06, row_s=1e-3, token_s=1e-3, num_steps=99)
    decoding(plan, 20, slow)
    assert (len(plan.running), plan.batch_cap.reason) == (20, "missed")


def test_the_least_batch_runs_whatever_the_goal() -> None:
    plan, slow = scheduler(), StepModel(fixed_s=0.045, row_s=1e-3, num_steps=99)
    decoding(plan, 20, slow)
    assert (len(plan.running), plan.batch_cap.reason) == (LEAST_BATCH, "least")


@pytest.mark.parametrize(
    "goal_s",
    [
        pytest.param(0.005, marks=pytest.mark.slow),
        pytest.param(0.012, marks=pytest.mark.slow),
        0.02,
        pytest.param(0.08, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_the_true_ones_whatever_the_knobs(
    make_engine: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, goal_s: float
) -> None:
    monkeypatch.setattr(StepFit, "observe", lambda *observed: None)
    rig = make_engine(slo_tpot_s=goal_s, num_blocks=48, chunk=48, max_draft_tokens=3)
    rig.engine.step_fit.model = StepModel(fixed_s=0.002, token_s=4e-4, row_s=1e-3, num_steps=99)
    rig.mix(5)


def test_a_gap_lies_between_steps_with_a_sequence_in_common() -> None:
    goal, one, other = TokenGoal(0.05), sequence("a", 3), sequence("b", 3)
    observed: list[float] = []
    goal.observe = lambda gap_s, predicted_s: observed.append(round(gap_s, 6))  # type: ignore[method-assign]
    gaps = TokenGaps(goal)
    for now, sequences, tokens_each in ((1.0, [one], 1), (1.2, [one, other], 1), (1.5, [other], 3), (9.0, [one], 1)):
        gaps.stepped(sequences, now, predicted_s=0.01, tokens_each=tokens_each)
    assert observed == [0.2, 0.1], "a pause in which nothing ran is no gap; three tokens at once share theirs"
