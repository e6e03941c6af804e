"""Selects a running answer to move to another decode worker, before one is preempted or too slow. Pure.

A worker that will run out of blocks within seconds preempts its youngest answer and recomputes it later, while the
client waits. Moving an answer costs only a copy and a short pause. A worker whose steps exceed the goal for the time
per token also gives one away. The limits of sources and targets differ, so that answers do not move back and forth.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from common.latency import StepShape
from router.fleet import Worker
from router.policy.forecast import forecast_inputs, transfer_s

HORIZON_S = 3.0
"""A worker with enough blocks for longer than this does nothing yet, because answers may end before."""
SPARE_SHARE = 0.1
"""Fraction of a target's blocks that must stay free after all its answers, including the new one, have grown."""
TOKEN_SHARE = 0.8
"""Maximum step time of a target with the new answer, as a fraction of the goal and of the source's step time."""
LEAST_LEFT_S = 1.0
"""Answers predicted to end sooner are not moved, because their end frees as much."""
LEAST_COPIES = 4.0
"""Minimum remaining time of an answer, as a multiple of the time to copy it."""


@dataclass(frozen=True, slots=True)
class Running:
    """A running answer with `num_tokens` tokens, including the prompt, and `num_blocks` blocks.

    It is predicted to need `num_expected` more tokens and `num_more` more blocks. `tpot_s` is its goal for the time per
    token, 0 for none. `adapter` is the digest of its adapter or "".
    """

    request_id: str
    num_tokens: int
    num_blocks: int
    num_expected: int
    num_more: int
    tpot_s: float = 0.0
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """A move. `reason` is the scarce resource of the source: "blocks" or "tokens" (time per token)."""

    request_id: str
    target: Worker
    reason: str


def until_full_s(worker: Worker) -> float:
    """Return the seconds until a decode worker runs out of blocks, infinity if it will not."""
    inputs = forecast_inputs(worker)
    if inputs.num_spare_blocks >= 0 or not inputs.is_known or not inputs.rows.num_rows:
        return math.inf
    blocks_a_s = inputs.rows.num_rows / inputs.step_s / inputs.block_size
    return worker.load.num_available_blocks / blocks_a_s


def overload_reason(worker: Worker, tpot_s: float) -> str:
    """Return why an answer should leave a decode worker, or "". `tpot_s` is the strictest goal there, 0 for none.

    An answer that cannot take its KV along stays, because computing it again costs at least as much as a preemption.
    """
    if not worker.identity.hands_over:
        return ""
    if until_full_s(worker) < HORIZON_S:
        return "blocks"
    inputs = forecast_inputs(worker)
    return "tokens" if 0.0 < tpot_s < inputs.step_s and inputs.is_known and inputs.rows.num_rows > 1 else ""


def choose_move(
    source: Worker, targets: Sequence[Worker], running: Iterable[Running], busy: Collection[str] = ()
) -> Move | None:
    """Return the answer that should leave `source` now, and its target. None if there is no need or no target.

    Among the answers that fit somewhere, the one with the most relief per copied byte is chosen. Workers in `busy`
    already take part in a hand-over.
    """
    answers = list(running)
    goal_s = min((one.tpot_s for one in answers if one.tpot_s > 0), default=0.0)
    if source.address in busy or not (reason := overload_reason(source, goal_s)):
        return None
    for answer in sorted(answers, key=lambda one: (_price(source, one, reason), one.request_id)):
        limit_s = _limit_s(source, answer, goal_s if reason == "tokens" else 0.0)
        fitting = [one for one in targets if one.address not in busy and _takes(one, source, answer, limit_s)]
        if fitting:
            target = min(
                fitting, key=lambda one: (_step_with(one, answer), -forecast_inputs(one).num_spare_blocks, one.address)
            )
            return Move(answer.request_id, target, reason)
    return None


def _price(source: Worker, answer: Running, reason: str) -> float:
    """Return the blocks to copy per block, or per second of a step, that the source saves."""
    if reason == "blocks":
        return answer.num_blocks / max(1, answer.num_blocks + answer.num_more)
    model = forecast_inputs(source).model
    return answer.num_blocks / max(1e-9, model.row_s + model.context_s * answer.num_tokens)


def _limit_s(source: Worker, answer: Running, goal_s: float) -> float:
    """Return the maximum step time of the target. `goal_s` is the goal that the source misses, 0 for none."""
    step_s = forecast_inputs(source).step_s
    if goal_s:
        return TOKEN_SHARE * min(goal_s, step_s)
    return TOKEN_SHARE * answer.tpot_s if answer.tpot_s else step_s / TOKEN_SHARE


def _takes(target: Worker, source: Worker, answer: Running, limit_s: float) -> bool:
    """Return whether the target has capacity for the whole answer, and the move is worth the copy."""
    there = forecast_inputs(target)
    if target.address == source.address or target.identity.fingerprint != source.identity.fingerprint:
        return False
    if target.life.suspect or there.num_requests >= there.num_places:
        return False
    if answer.adapter and answer.adapter not in target.load.digests:
        return False
    num_tokens = answer.num_tokens + answer.num_expected
    left = there.num_spare_blocks - target.num_blocks_of(num_tokens)
    if num_tokens > target.max_tokens or left < SPARE_SHARE * target.identity.num_blocks:
        return False
    least_left_s = max(LEAST_LEFT_S, LEAST_COPIES * transfer_s(there, answer.num_tokens))
    return (
        answer.num_expected * forecast_inputs(source).step_s >= least_left_s and _step_with(target, answer) <= limit_s
    )


def _step_with(target: Worker, answer: Running) -> float:
    inputs = forecast_inputs(target)
    return inputs.model.seconds(inputs.rows + StepShape.of_rows(1, answer.num_tokens))
