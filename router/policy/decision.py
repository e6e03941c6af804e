"""Describes a routing decision for `diptych explain`: the candidates with their predicted times, and the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nsmallest
from typing import Final

import msgspec

from common.wire import Role
from router.policy.forecast import Forecast
from router.policy.policy import Candidate, Choice, Considered
from router.policy.routing import equal_s

MAX_CANDIDATES: Final = 8
"""Candidates described per role and layout: the chosen one and the cheapest."""
PROBLEMS: Final = ("the answer might not fit", "it failed recently", "it lacks KV blocks")
"""Why a candidate ranks below others, by position in its rank."""


class WeighedWorker(msgspec.Struct, frozen=True):
    """A candidate. `computes_prompt`: whether a decode worker would also compute the prompt.

    `cost_s` is what the policy compared: the predicted time of the request plus the delay of others, in seconds.
    """

    worker: str
    role: Role
    computes_prompt: bool
    is_chosen: bool
    cost_s: float
    forecast: Forecast
    num_requests: int
    num_cached_tokens: int
    problem: str = ""


def shortened(choice: Choice) -> Choice:
    """Return the choice with at most `MAX_CANDIDATES` candidates per role and layout."""
    for one in choice.considered:
        if max(len(one.prefill), len(one.decode), len(one.local)) > MAX_CANDIDATES:
            break
    else:
        return choice
    chosen = (choice.prefill, choice.decode)

    def first(group: Sequence[Candidate]) -> Sequence[Candidate]:
        if len(group) <= MAX_CANDIDATES:
            return group
        return nsmallest(MAX_CANDIDATES, group, key=lambda one: (one.worker not in chosen, one.rank, one.cost_s))

    considered = tuple(
        Considered(first(one.prefill), first(one.decode), first(one.local), one.remote_s) for one in choice.considered
    )
    return Choice(choice.prefill, choice.decode, choice.forecast, considered)


def weighed(choice: Choice) -> Iterator[WeighedWorker]:
    """Yield the candidates of a decision, the chosen ones first, then by cost."""
    for one in choice.considered:
        for role, group, is_local in _groups(one):
            chosen = _chosen(choice, group, is_local=is_local)
            for each in sorted(group, key=lambda each: (each is not chosen, each.rank, each.cost_s)):
                yield WeighedWorker(
                    each.worker.worker_id,
                    role,
                    is_local or role == "prefill",
                    each is chosen,
                    each.cost_s,
                    each.forecast,
                    each.inputs.num_likely,
                    each.hits,
                    ", ".join(text for text, applies in zip(PROBLEMS, each.rank, strict=True) if applies),
                )


def reason(choice: Choice) -> str:
    """Return what decided, in sentences. "" for a policy that does not compare predictions."""
    parts = []
    for one in choice.considered:
        for role, group, is_local in _groups(one):
            if (chosen := _chosen(choice, group, is_local=is_local)) is None:
                continue
            if is_local:
                parts.append(_why_local(chosen, one))
            if not (is_local and len(group) == 1 and one.prefill):  # decode workers that should not are not in it
                parts.append(_why(chosen, group, role))
    return " ".join(filter(None, parts))


def _groups(considered: Considered) -> Iterator[tuple[Role, Sequence[Candidate], bool]]:
    """Yield candidates for each part of a request: their role then, they, and whether they also compute the prompt."""
    yield "prefill", considered.prefill, False
    yield "decode", considered.decode, False
    yield "decode", considered.local, True


def _chosen(choice: Choice, group: Sequence[Candidate], *, is_local: bool) -> Candidate | None:
    """Return the candidate of the group that was chosen for its part in the request."""
    if is_local != choice.local:
        return None
    return next((one for one in group if one.worker in (choice.prefill, choice.decode)), None)


def _why_local(chosen: Candidate, considered: Considered) -> str:
    name = chosen.worker.worker_id
    if not considered.prefill:
        return f"{name} computes the prompt: no prefill worker could take it."
    costs = f"predicted cost {_ms(chosen.cost_s)}, {_ms(considered.remote_s)} with a prefill worker"
    if chosen.cost_s > considered.remote_s:
        costs += ", which is not clearly less"
    return f"{name} computes the prompt itself ({costs}; {chosen.hits:,} tokens cached there)."


def _why(chosen: Candidate, group: Sequence[Candidate], role: Role) -> str:
    """Return why this candidate was preferred to the others of its group."""
    name, others = chosen.worker.worker_id, [one for one in group if one is not chosen]
    if not others:
        return f"{name} was the only {role} candidate."
    equals = [one for one in others if one.rank == chosen.rank]
    if not equals:
        return f"The other {len(others)} {role} candidates have a problem."
    next_best = min(equals, key=lambda one: one.cost_s)
    least, other = sorted((chosen, next_best), key=lambda one: one.cost_s)
    if other.cost_s > equal_s(least, other):
        costs = f"{_ms(chosen.cost_s)}, next {next_best.worker.worker_id} {_ms(next_best.cost_s)}"
        return f"{name} has the lowest predicted cost ({costs})."
    costs = f"{_ms(chosen.cost_s)}, {next_best.worker.worker_id} {_ms(next_best.cost_s)}"
    loads = f"{chosen.inputs.num_likely:,} and {next_best.inputs.num_likely:,} requests"
    return f"{name} is the least loaded of those with about equal predicted costs ({costs}; {loads})."


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
