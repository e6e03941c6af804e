"""A plan as a table, as sentences, and as JSON values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from string import ascii_lowercase
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.load.report import print_table
from benchmarks.plan.candidate import Candidate, base_flags, varies
from benchmarks.plan.evidence import Evidence, Tails
from benchmarks.plan.outlook import Outlook
from benchmarks.plan.reach import Reach, Reached
from benchmarks.plan.search import Search
from benchmarks.plan.spec import PlanGoals, PlanSpec

MOST_ROWS = 12
MUCH_ERROR = 0.15
"""A mean error of a worker's model of its steps beyond which the report warns of it."""
COLUMNS = (
    "pools",
    "flags",
    "TTFT ms p50/p95/p99",
    "TPOT ms p50/p95/p99",
    "met goals",
    "interval, %",
    "goodput /s",
    "cost/h",
    "cost/Mtok",
    "most used",
    "runs",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """`pick` is None where no candidate meets the goals; `reach` says then what can be met."""

    search: Search
    pick: Evidence | None
    reach: Reach | None

    @property
    def spec(self) -> PlanSpec:
        return self.search.trials.spec

    @property
    def outlook(self) -> Outlook:
        return self.search.outlook


def print_plan(console: Console, plan: Plan, *, title: str) -> None:
    """Print the ranked candidates, then the pick and why, or what is possible."""
    shown, base = _shown(plan), base_flags(plan.spec)
    changes = [text for text in dict.fromkeys(one.candidate.flags.changes(base) for one in shown) if text]
    letters = {"": ""} | dict(zip(changes, ascii_lowercase, strict=False))
    rows = [_cells(plan, one, letters[one.candidate.flags.changes(base)]) for one in shown]
    print_table(console, title, COLUMNS, rows, left=(0, 1, 9))
    for text in changes:
        console.print(f"flags {letters[text]}: {text}", highlight=False)
    if (rest := len(plan.search.ranked()) - len(shown)) > 0:
        console.print(f"and {rest} more that were simulated (--json has all)", highlight=False)
    for line in sentences(plan):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _shown(plan: Plan) -> list[Evidence]:
    """The best half that meet the goals, then those that came nearest, and the best of one pool."""
    ranked = plan.search.ranked()
    met = [one for one in ranked if plan.search.meets(one)]
    missed = [one for one in ranked if not plan.search.meets(one)]
    num_met = min(len(met), max(MOST_ROWS // 2, MOST_ROWS - len(missed)))
    found = [*met[:num_met], *missed[: MOST_ROWS - num_met]]
    one_pool = next((one for one in ranked if one.candidate.is_one_pool), None)
    return found if one_pool is None or one_pool in found else [*found, one_pool]


def _cells(plan: Plan, found: Evidence, flags: str) -> tuple[str, ...]:
    candidate, low_high = found.candidate, found.interval
    cost = candidate.cost(plan.spec)
    is_pick = plan.pick is not None and candidate == plan.pick.candidate
    token_cost = found.token_cost(cost)
    return (
        f"{'> ' if is_pick else '  '}{candidate.shape}",
        flags,
        _tails(found.ttft_ms, ",.0f"),
        _tails(found.tpot_ms, ",.1f"),
        f"{found.attainment:.1%}",
        "{:.1f} to {:.1f}".format(*(100 * value for value in low_high)),
        f"{found.goodput:.2f}",
        f"{cost:,.2f}",
        f"{token_cost:,.3f}" if math.isfinite(token_cost) else "-",
        plan.outlook.binding(candidate),
        f"{len(found.trials)}",
    )


def _tails(tails: Tails, form: str) -> str:
    return " / ".join(format(value, form) for value in (tails.p50, tails.p95, tails.p99))


def _percent(interval: Sequence[float]) -> str:
    return "{:.1%} to {:.1%}".format(*interval)


def sentences(plan: Plan) -> list[str]:
    """What to do and why, a line each."""
    if plan.pick is not None:
        return [*_of_pick(plan, plan.pick), *_doubts(plan.spec)]
    assert plan.reach is not None  # the pick or what can be reached
    return [*_of_reach(plan, plan.reach), *_doubts(plan.spec)]


def _doubts(spec: PlanSpec) -> Iterable[str]:
    for role, worker in (("prefill", spec.prefill), ("decode", spec.decode)):
        if (error := worker.coefficients.error) > MUCH_ERROR:
            yield (
                f"The coefficients of {role} workers miss measured steps by {error:.0%} on average, so the plan may "
                "be off as far. A machine that does nothing else is measured better."
            )


def _of_pick(plan: Plan, pick: Evidence) -> list[str]:
    spec, candidate = plan.spec, pick.candidate
    cost, flags = candidate.cost(spec), candidate.flags.changes(base_flags(spec))
    with_flags = f" with {flags}" if flags else ""
    found = [
        f"Pick: {candidate.shape}{with_flags}, {cost:,.2f} an hour, {pick.token_cost(cost):,.3f} per million output "
        f"tokens. {pick.attainment:.1%} ({_percent(pick.interval)}) of requests meet {_goals(spec.goals)}; "
        f"{spec.goals.quantile:.0%} should."
    ]
    if pick.interval[0] < spec.goals.quantile:
        found.append(
            f"The interval reaches below {spec.goals.quantile:.0%}: the pick is likely, not sure. "
            "A longer --duration-s or more --seeds narrow it."
        )
    judged = plan.search.ranked()
    cheaper = [one for one in judged if one.candidate.cost(spec) < cost and not plan.search.meets(one)]
    if cheaper:
        found.append(f"Of what costs less, {_why_missed(cheaper[0])}.")
    else:
        found.append("Nothing that costs less had to be simulated: formulas or failures of larger pools rule it out.")
    other = [
        one
        for one in judged
        if one.candidate.is_one_pool != candidate.is_one_pool and plan.search.meets(one) and plan.search.is_settled(one)
    ]
    kind = "Two pools" if candidate.is_one_pool else "One pool"
    if other:
        tried = other[0].candidate
        plain = " with the first value of each flag" if varies(spec) and tried.flags == base_flags(spec) else ""
        found.append(f"{kind} would take {tried.shape}{plain}, {tried.cost(spec):,.2f} an hour.")
    else:
        found.append(f"{kind}: none that was simulated meets the goals.")
    return found


def _why_missed(found: Evidence) -> str:
    reasons = {
        "refused": found.share("num_refused"),
        "with a late first token": found.share("num_late_first"),
        "with slow tokens": found.share("num_late_tokens"),
        "failed": found.share("num_failed"),
    }
    parts = [f"{share:.1%} {what}" for what, share in reasons.items() if share >= 0.001]
    return f"{found.candidate.shape} came nearest: {found.attainment:.1%} met the goals ({', '.join(parts)})"


def _of_reach(plan: Plan, found: Reach) -> list[str]:
    spec = plan.spec
    goals, bounds = spec.goals, spec.bounds
    limits = f"at most {bounds.max_workers} workers" + (f", {bounds.max_cost:g} an hour" if bounds.max_cost else "")
    lines = [
        f"No candidate meets {_goals(goals)} for {goals.quantile:.0%} of requests within the bounds ({limits}).",
        f"Best possible: {_why_missed(found.best)}; the most used is {plan.outlook.binding(found.best.candidate)}.",
        *_impossible(plan),
    ]
    if found.load is None:
        lines.append("Load: not even a 32nd of it meets the goals.")
    else:
        rate = plan.outlook.num_requests / plan.outlook.seconds * found.load.load_factor
        lines.append(
            f"Load: {found.load.load_factor:.0%} of it, about {rate:.3g} requests a second, meets the goals with "
            f"{found.load.candidate.shape}."
        )
    for name, one, field in (("TTFT", found.ttft, "ttft_ms"), ("TPOT", found.tpot, "tpot_ms")):
        if getattr(goals, field):
            lines.append(_goal_reached(name, one, field))
    if found.both is not None:
        lines.append(f"Both goals: {_goals(found.both.goals)} would be met with {found.both.candidate.shape}.")
    return lines


def _impossible(plan: Plan) -> Iterable[str]:
    goals, outlook = plan.spec.goals, plan.outlook
    if goals.ttft_ms and outlook.best_ttft_ms > goals.ttft_ms:
        yield (
            f"No number of workers meets the TTFT: prompts alone take {outlook.best_ttft_ms:,.0f} ms "
            f"at p{goals.quantile * 100:g}."
        )
    if goals.tpot_ms and outlook.best_tpot_ms > goals.tpot_ms:
        yield f"No number of workers meets the TPOT: a lone sequence takes {outlook.best_tpot_ms:,.1f} ms for a token."


def _goal_reached(name: str, found: Reached | None, field: str) -> str:
    if found is None:
        return f"{name}: a looser goal for it alone does not help, up to 32 times the goal."
    return f"{name}: a goal of {getattr(found.goals, field):,.3g} ms would be met with {found.candidate.shape}."


def _goals(goals: PlanGoals) -> str:
    parts = [f"{name} {value:,.4g} ms" for name, value in (("TTFT", goals.ttft_ms), ("TPOT", goals.tpot_ms)) if value]
    return " and ".join(parts)


def as_json(plan: Plan, conditions: dict[str, Any]) -> dict[str, Any]:
    """Input, candidates with their runs, pick and what can be reached; latencies of single requests are left out."""
    return {
        "conditions": conditions,
        "plan": msgspec.to_builtins(plan.spec),
        "pick": _candidate(plan.pick.candidate) if plan.pick else None,
        "sentences": sentences(plan),
        "candidates": [_evidence(plan, one) for one in plan.search.ranked()],
        "reach": _reach(plan.reach) if plan.reach else None,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "prefill": candidate.num_prefill,
        "decode": candidate.num_decode,
        "flags": asdict(candidate.flags),
    }


def _evidence(plan: Plan, found: Evidence) -> dict[str, Any]:
    cost = found.candidate.cost(plan.spec)
    token_cost = found.token_cost(cost)
    runs = [
        {key: value for key, value in asdict(trial).items() if key not in ("ttft_s", "tpot_s")}
        for trial in found.trials
    ]
    return _candidate(found.candidate) | {
        "meets": plan.search.meets(found),
        "settled": plan.search.is_settled(found),
        "attainment": found.attainment,
        "interval": found.interval,
        "ttft_ms": asdict(found.ttft_ms),
        "tpot_ms": asdict(found.tpot_ms),
        "goodput": found.goodput,
        "output_tokens_per_s": found.tokens_per_s,
        "cost_per_hour": cost,
        "cost_per_million_output_tokens": token_cost if math.isfinite(token_cost) else None,
        "used": plan.outlook.used(found.candidate),
        "runs": runs,
    }


def _reach(found: Reach) -> dict[str, Any]:
    def of(one: Reached | None) -> dict[str, Any] | None:
        if one is None:
            return None
        goals = msgspec.to_builtins(one.goals)
        return _candidate(one.candidate) | {
            "load_factor": one.load_factor,
            "goals": goals,
            "attainment": one.attainment,
        }

    return {
        "best": _candidate(found.best.candidate),
        **{name: of(getattr(found, name)) for name in ("load", "ttft", "tpot", "both")},
    }
