"""Which running answer should move from one decode worker to another, so that none is preempted or too slow. Pure.

A worker that will run out of blocks within seconds preempts its youngest answer, computes it again later, and lets its
client wait. Handing one over while it is decoded costs a copy and a short pause. A worker whose steps are longer than
the goal for a token gives one away, too. Between the two limits, that of a source and that of a target, lies a gap, so
that an answer has no reason to come back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from common.latency import StepShape
from router.fleet import Worker
from router.policy.forecast import terms_of, transfer_s

HORIZON_S = 3.0
"""A worker that has blocks for longer has time: some of its answers may end before."""
SPARE_SHARE = 0.1
"""Of a target's blocks, that stay spare when all answers there, the new one included, have grown."""
TOKEN_SHARE = 0.8
"""Of the goal for a token, and of the source's step, that a target's step with the new answer takes at most."""
LEAST_LEFT_S = 1.0
"""An answer that is expected to end sooner stays: its end frees as much."""
LEAST_COPIES = 4.0
"""So many times what its copy takes, an answer must be expected to run on."""


@dataclass(frozen=True, slots=True)
class Running:
    """An answer that is decoded: it has `num_tokens` tokens, prompt included, `num_blocks` blocks, and is expected to
    get `num_expected` tokens and `num_more` blocks more. `tpot_s`: its goal for a token; 0: none. `adapter`: the digest
    of the one that it uses, or ""."""

    request_id: str
    num_tokens: int
    num_blocks: int
    num_expected: int
    num_more: int
    tpot_s: float = 0.0
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """`reason`: "blocks" or "tokens", whichever the source has not enough of."""

    request_id: str
    target: Worker
    reason: str


def until_full_s(worker: Worker) -> float:
    """Seconds until a decode worker's answers have taken its last block; infinity when they will not."""
    terms = terms_of(worker)
    if terms.num_spare_blocks >= 0 or not terms.is_known or not terms.rows.num_rows:
        return math.inf
    blocks_a_s = terms.rows.num_rows / terms.step_s / terms.block_size
    return worker.load.num_available_blocks / blocks_a_s


def why_leave(worker: Worker, tpot_s: float) -> str:
    """Why an answer should leave a decode worker, or "". `tpot_s`: the strictest goal of those there; 0: none."""
    if until_full_s(worker) < HORIZON_S:
        return "blocks"
    terms = terms_of(worker)
    return "tokens" if 0.0 < tpot_s < terms.step_s and terms.is_known and terms.rows.num_rows > 1 else ""


def choose_move(
    source: Worker, targets: Sequence[Worker], running: Iterable[Running], busy: Collection[str] = ()
) -> Move | None:
    """The answer that should leave `source` now, and where to; None when none should, or no worker has room.

    Of those that fit somewhere the one that relieves most for the bytes of its copy. `busy` workers take part in a
    hand-over already.
    """
    answers = list(running)
    goal_s = min((one.tpot_s for one in answers if one.tpot_s > 0), default=0.0)
    if source.address in busy or not (reason := why_leave(source, goal_s)):
        return None
    for answer in sorted(answers, key=lambda one: (_price(source, one, reason), one.request_id)):
        limit_s = _limit_s(source, answer, goal_s if reason == "tokens" else 0.0)
        fitting = [one for one in targets if one.address not in busy and _takes(one, source, answer, limit_s)]
        if fitting:
            target = min(
                fitting, key=lambda one: (_step_with(one, answer), -terms_of(one).num_spare_blocks, one.address)
            )
            return Move(answer.request_id, target, reason)
    return None


def _price(source: Worker, answer: Running, reason: str) -> float:
    """Blocks to copy for each block, or second of a step, that the source is relieved of."""
    if reason == "blocks":
        return answer.num_blocks / max(1, answer.num_blocks + answer.num_more)
    model = terms_of(source).model
    return answer.num_blocks / max(1e-9, model.row_s + model.context_s * answer.num_tokens)


def _limit_s(source: Worker, answer: Running, goal_s: float) -> float:
    """What a step of the target may take. `goal_s`: the goal that the source misses; 0: none."""
    step_s = terms_of(source).step_s
    if goal_s:
        return TOKEN_SHARE * min(goal_s, step_s)
    return TOKEN_SHARE * answer.tpot_s if answer.tpot_s else step_s / TOKEN_SHARE


def _takes(target: Worker, source: Worker, answer: Running, limit_s: float) -> bool:
    """Whether the target has room for all that the answer will become, and it is worth the copy."""
    there = terms_of(target)
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
    return answer.num_expected * terms_of(source).step_s >= least_left_s and _step_with(target, answer) <= limit_s


def _step_with(target: Worker, answer: Running) -> float:
    terms = terms_of(target)
    return terms.model.seconds(terms.rows + StepShape.of_rows(1, answer.num_tokens))
