"""Sizing: the number of workers that each pool needs for a load, and whether the goals can be met. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.cluster import UNLOADED_SLACK
from common.wire import Role
from router.planner.forecast import MOST_USED, DecodeForecast, PromptForecast, of_decode, of_prompts
from router.planner.offered_load import OfferedLoad
from router.planner.pool import Fleet, Goals, WorkerKind

MOST_TRIED = 4096
"""Maximum number of workers that is considered."""
SHARE_HALVINGS = 7
"""Bisection steps for a share of a load: a precision of one per cent."""


@dataclass(frozen=True, slots=True)
class Need:
    """The minimum number of workers of a pool that meets the goals, and the limit that binds it.

    `impossible`: why no number of workers meets a goal, and the best possible value; "" if the goals can be met.
    """

    num: int = 0
    binds: str = "no load"
    impossible: str = ""


@dataclass(frozen=True, slots=True)
class Prediction:
    """TTFT and TPOT at the quantile in seconds; 0 without load, infinity if queues grow without limit."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


Breaks = Callable[[OfferedLoad, int], str]
"""Returns which limit a number of workers violates under a load, or ""."""


def size_prefill(load: OfferedLoad, kind: WorkerKind, goals: Goals) -> Need:
    """Return the minimum number of prefill workers for `load`, without prompts that decode workers compute."""
    if load.rate <= 0.0 or not load.requests:
        return Need()
    breaks, impossible = _prefill_breaks(load, kind, goals)
    return _fewest(lambda num: breaks(load, num), impossible)


def size_decode(load: OfferedLoad, local: OfferedLoad, kind: WorkerKind, goals: Goals, least_rows: float = 0.0) -> Need:
    """Return the minimum number of decode workers for `load`; they also compute the prompts of `local`.

    `least_rows` requests must be held in any case.
    """
    if (load.rate <= 0.0 and least_rows <= 0.0) or not load.requests:
        return Need()
    breaks, impossible = _decode_breaks(load, local, kind, goals, least_rows)
    return _fewest(lambda num: breaks(load, num), impossible)


def prefill_share(load: OfferedLoad, kind: WorkerKind, goals: Goals, num: int) -> float:
    """Return the largest fraction of `load` for which `num` prefill workers suffice."""
    if load.rate <= 0.0 or not load.requests:
        return 1.0
    breaks, _ = _prefill_breaks(load, kind, goals)
    return _largest(lambda share: breaks(load.at(share * load.rate), num)) if num else 0.0


def decode_share(load: OfferedLoad, local: OfferedLoad, kind: WorkerKind, goals: Goals, num: int) -> float:
    """Return the largest fraction of `load` and `local` for which `num` decode workers suffice."""
    if load.rate <= 0.0 or not load.requests:
        return 1.0
    breaks, _ = _decode_breaks(load, local, kind, goals)
    return _largest(lambda share: breaks(load.at(share * load.rate), num)) if num else 0.0


def _prefill_breaks(load: OfferedLoad, kind: WorkerKind, goals: Goals) -> tuple[Breaks, str]:
    """Return the check of a pool's size at any rate of `load`, and why a goal cannot be met."""
    own_s = of_prompts(load, kind, 1).best_s(goals.quantile)
    goal_s, impossible = _reachable("TTFT", goals.ttft_s, own_s, "prompts without any wait take", goals.quantile)

    def breaks(load: OfferedLoad, num: int) -> str:
        found = of_prompts(load, kind, num)
        if found.used > MOST_USED:
            return f"prompts: {found.used:.0%} busy with {load.rate:.3g} per second"
        return _too_late("prompts", found, goal_s, goals.quantile)

    return breaks, impossible


def _decode_breaks(
    load: OfferedLoad, local: OfferedLoad, kind: WorkerKind, goals: Goals, least_rows: float = 0.0
) -> tuple[Breaks, str]:
    """Return the same for a decode pool. `local` scales with the load."""
    lone = of_decode(load.at(1e-9), local.at(0.0), kind, 1, goals.quantile)
    goal_s, impossible = _reachable("TPOT", goals.tpot_s, lone.lone_s, "a lone sequence takes", goals.quantile)
    own_s = of_prompts(local, kind, 1).best_s(goals.quantile)
    ttft_s, too_long = _reachable("TTFT", goals.ttft_s, own_s, "prompts without any wait take", goals.quantile)
    local_share = local.rate / load.rate if load.rate > 0.0 else 0.0

    def breaks(load: OfferedLoad, num: int) -> str:
        part = local.at(local_share * load.rate) if local_share else local
        return _broken(of_decode(load, part, kind, num, goals.quantile, least_rows), kind, goals, goal_s, ttft_s)

    return breaks, impossible or too_long


def _broken(found: DecodeForecast, kind: WorkerKind, goals: Goals, tpot_s: float, ttft_s: float) -> str:
    """Return which limit a decode pool violates, or ""."""
    at = f"at p{goals.quantile * 100:g}"
    if found.used > MOST_USED:
        return "decode steps: more tokens are requested than steps can generate"
    if found.blocks > MOST_USED:
        return f"KV blocks: {found.blocks:.0%} of {kind.num_blocks} {at}"
    if found.num_rows > kind.max_num_seqs:
        return f"batch slots: {found.num_rows:.1f} sequences {at}, the maximum is {kind.max_num_seqs} per worker"
    if 0.0 < tpot_s < found.tpot_s:
        return f"decode steps: TPOT of {_ms(found.tpot_s)} {at}, the goal is {_ms(tpot_s)}"
    return _too_late("prompts on decode workers", found.prompts, ttft_s, goals.quantile)


def _too_late(what: str, found: PromptForecast, goal_s: float, quantile: float) -> str:
    """Return why first tokens miss their goal, or ""."""
    if goal_s <= 0.0 or (share := found.late(goal_s)) <= 1.0 - quantile:
        return ""
    return f"{what}: {share:.0%} of first tokens take more than {_ms(goal_s)}, the limit is {1.0 - quantile:.0%}"


def size(
    load: OfferedLoad, fleet: Fleet, goals: Goals, *, least_rows: float = 0.0, more_prompts: float = 0.0
) -> dict[Role, Need]:
    """Return what each pool needs, without bounds, for pools whose workers can be predicted.

    `more_prompts` per second are added to the load of prefill workers.
    """
    remote, local = parts(load, fleet)
    needs: dict[Role, Need] = {}
    if fleet.pools["decode"].kind.is_known:
        needs["decode"] = size_decode(load, local, fleet.pools["decode"].kind, goals, least_rows)
    if fleet.has_prefill and fleet.pools["prefill"].kind.is_known:
        needs["prefill"] = size_prefill(remote.at(remote.rate + more_prompts), fleet.pools["prefill"].kind, goals)
    return needs


def parts(load: OfferedLoad, fleet: Fleet) -> tuple[OfferedLoad, OfferedLoad]:
    """Split the load by whether prefill workers compute the prompts; without prefill pool, none does."""
    if not fleet.has_prefill:
        return load.split(1 << 60)
    return load.split(fleet.threshold)


def predict(load: OfferedLoad, fleet: Fleet, nums: Mapping[Role, int], goals: Goals) -> Prediction:
    """Predict the tails with these numbers of workers. Without prefill workers, decode workers compute all prompts."""
    remote, local = parts(load, fleet)
    num_prefill = nums.get("prefill", 0)
    if not num_prefill:
        remote, local = load.split(1 << 60)
    first = PromptForecast()
    if num_prefill:
        first = of_prompts(remote, fleet.pools["prefill"].kind, num_prefill)
    decode = of_decode(load, local, fleet.pools["decode"].kind, nums.get("decode", 0), goals.quantile)
    ttft_s = max(first.ttft_s(goals.quantile), decode.prompts.ttft_s(goals.quantile))
    return Prediction(ttft_s, decode.tpot_s)


def _reachable(name: str, goal_s: float, best_s: float, what: str, quantile: float) -> tuple[float, str]:
    """Return the goal to size for, and why it differs from the configured one, or "".

    A goal that no number of workers meets would make the pool grow without limit.
    """
    if goal_s <= 0.0 or best_s < goal_s:
        return goal_s, ""
    why = f"{name} of {_ms(goal_s)} at p{quantile * 100:g} cannot be met: {what} {_ms(best_s)} at best"
    return UNLOADED_SLACK * best_s, why


def _fewest(broken: Callable[[int], str], impossible: str) -> Need:
    """Return the smallest number of workers that violates no limit, by bisection."""
    high, binds = 1, "one worker suffices"
    while high < MOST_TRIED and (found := broken(high)):
        high, binds = 2 * high, found
    low = high // 2  # too few, or 0
    while high - low > 1:
        middle = (low + high) // 2
        if found := broken(middle):
            low, binds = middle, found
        else:
            high = middle
    return Need(
        high, binds if high == 1 else f"{binds} with {high - 1} workers".replace(" 1 workers", " 1 worker"), impossible
    )


def _largest(broken: Callable[[float], str]) -> float:
    """Return the largest fraction of a load that violates no limit, by bisection."""
    if not broken(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(SHARE_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if broken(middle) else (middle, high)
    return low


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1e6 else "infinity"
