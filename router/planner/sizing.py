"""How many workers each pool needs for a load, and what binds it; whether the goals can be met, and what can. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.cluster import UNLOADED_SLACK
from common.wire import Role
from router.planner.forecast import MOST_USED, DecodeForecast, PromptForecast, of_decode, of_prompts
from router.planner.offered_load import OfferedLoad
from router.planner.pool import Fleet, Goals, WorkerKind

MOST_TRIED = 4096
"""The search ends here: more is no plan."""
SHARE_HALVINGS = 7
"""A share of a load is found to one per cent."""


@dataclass(frozen=True, slots=True)
class Need:
    """The fewest workers of a pool that keep the goals, and what one fewer would break, in words and numbers.

    `impossible`: why no number of workers keeps a goal, and what can be had; "" when the goals can be met.
    """

    num: int = 0
    binds: str = "nothing is asked for"
    impossible: str = ""


@dataclass(frozen=True, slots=True)
class Prediction:
    """TTFT and TPOT at the quantile, in seconds; 0 while nothing is asked for, infinity for queues without end."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


Breaks = Callable[[OfferedLoad, int], str]
"""What so many workers do not keep under this load, or ""."""


def size_prefill(load: OfferedLoad, kind: WorkerKind, goals: Goals) -> Need:
    """The fewest prefill workers for `load`, whose prompts decode workers do not compute."""
    if load.rate <= 0.0 or not load.requests:
        return Need()
    breaks, impossible = _prefill_breaks(load, kind, goals)
    return _fewest(lambda num: breaks(load, num), impossible)


def size_decode(load: OfferedLoad, local: OfferedLoad, kind: WorkerKind, goals: Goals, least_rows: float = 0.0) -> Need:
    """The fewest decode workers for `load`; they also compute the prompts of `local`.

    `least_rows` requests are to be held in any case.
    """
    if (load.rate <= 0.0 and least_rows <= 0.0) or not load.requests:
        return Need()
    breaks, impossible = _decode_breaks(load, local, kind, goals, least_rows)
    return _fewest(lambda num: breaks(load, num), impossible)


def prefill_share(load: OfferedLoad, kind: WorkerKind, goals: Goals, num: int) -> float:
    """The largest share of `load` for which `num` prefill workers suffice."""
    if load.rate <= 0.0 or not load.requests:
        return 1.0
    breaks, _ = _prefill_breaks(load, kind, goals)
    return _largest(lambda share: breaks(load.at(share * load.rate), num)) if num else 0.0


def decode_share(load: OfferedLoad, local: OfferedLoad, kind: WorkerKind, goals: Goals, num: int) -> float:
    """The largest share of `load`, and of `local` as well, for which `num` decode workers suffice."""
    if load.rate <= 0.0 or not load.requests:
        return 1.0
    breaks, _ = _decode_breaks(load, local, kind, goals)
    return _largest(lambda share: breaks(load.at(share * load.rate), num)) if num else 0.0


def _prefill_breaks(load: OfferedLoad, kind: WorkerKind, goals: Goals) -> tuple[Breaks, str]:
    """What breaks at another rate of `load`, and why a goal cannot be met at any."""
    own_s = of_prompts(load, kind, 1).best_s(goals.quantile)
    goal_s, impossible = _reachable("TTFT", goals.ttft_s, own_s, "prompts alone take", goals.quantile)

    def breaks(load: OfferedLoad, num: int) -> str:
        found = of_prompts(load, kind, num)
        if found.used > MOST_USED:
            return f"prompts: {found.used:.0%} of its time for {load.rate:.3g} a second"
        return _too_late("prompts", found, goal_s, goals.quantile)

    return breaks, impossible


def _decode_breaks(
    load: OfferedLoad, local: OfferedLoad, kind: WorkerKind, goals: Goals, least_rows: float = 0.0
) -> tuple[Breaks, str]:
    """The same for a decode pool; `local` keeps its share of the load."""
    lone = of_decode(load.at(1e-9), local.at(0.0), kind, 1, goals.quantile)
    goal_s, impossible = _reachable("TPOT", goals.tpot_s, lone.lone_s, "a lone sequence takes", goals.quantile)
    own_s = of_prompts(local, kind, 1).best_s(goals.quantile)
    ttft_s, too_long = _reachable("TTFT", goals.ttft_s, own_s, "prompts alone take", goals.quantile)
    local_share = local.rate / load.rate if load.rate > 0.0 else 0.0

    def breaks(load: OfferedLoad, num: int) -> str:
        part = local.at(local_share * load.rate) if local_share else local
        return _broken(of_decode(load, part, kind, num, goals.quantile, least_rows), kind, goals, goal_s, ttft_s)

    return breaks, impossible or too_long


def _broken(found: DecodeForecast, kind: WorkerKind, goals: Goals, tpot_s: float, ttft_s: float) -> str:
    """What a decode pool of this forecast does not keep, or ""."""
    at = f"at p{goals.quantile * 100:g}"
    if found.used > MOST_USED:
        return "decode steps: tokens come faster than steps make them"
    if found.blocks > MOST_USED:
        return f"KV blocks: {found.blocks:.0%} of {kind.num_blocks} {at}"
    if found.num_rows > kind.max_num_seqs:
        return f"places: {found.num_rows:.1f} sequences {at}, a worker takes {kind.max_num_seqs}"
    if 0.0 < tpot_s < found.tpot_s:
        return f"decode steps: TPOT of {_ms(found.tpot_s)} {at}, the goal is {_ms(tpot_s)}"
    return _too_late("prompts on decode workers", found.prompts, ttft_s, goals.quantile)


def _too_late(what: str, found: PromptForecast, goal_s: float, quantile: float) -> str:
    """Why first tokens miss their goal, or ""."""
    if goal_s <= 0.0 or (share := found.late(goal_s)) <= 1.0 - quantile:
        return ""
    return f"{what}: {share:.0%} of first tokens take more than {_ms(goal_s)}, {1.0 - quantile:.0%} may"


def size(
    load: OfferedLoad, fleet: Fleet, goals: Goals, *, least_rows: float = 0.0, more_prompts: float = 0.0
) -> dict[Role, Need]:
    """What each pool needs, without bounds; nothing for a pool whose workers cannot be predicted.

    `more_prompts` a second come to prefill workers beside the load.
    """
    remote, local = parts(load, fleet)
    needs: dict[Role, Need] = {}
    if fleet.pools["decode"].kind.is_known:
        needs["decode"] = size_decode(load, local, fleet.pools["decode"].kind, goals, least_rows)
    if fleet.has_prefill and fleet.pools["prefill"].kind.is_known:
        needs["prefill"] = size_prefill(remote.at(remote.rate + more_prompts), fleet.pools["prefill"].kind, goals)
    return needs


def parts(load: OfferedLoad, fleet: Fleet) -> tuple[OfferedLoad, OfferedLoad]:
    """The load whose prompts prefill workers compute, and the rest: all of it without such a pool."""
    if not fleet.has_prefill:
        return load.split(1 << 60)
    return load.split(fleet.threshold)


def predict(load: OfferedLoad, fleet: Fleet, nums: Mapping[Role, int], goals: Goals) -> Prediction:
    """The tails with so many workers; where there is no prefill worker, decode workers compute all prompts."""
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
    """The goal that workers are counted for, and why that is not the one that was set, or "".

    Towards a goal that no number of workers meets, a pool would only grow.
    """
    if goal_s <= 0.0 or best_s < goal_s:
        return goal_s, ""
    why = f"{name} of {_ms(goal_s)} at p{quantile * 100:g} cannot be met: {what} {_ms(best_s)}, which is the best"
    return UNLOADED_SLACK * best_s, why


def _fewest(broken: Callable[[int], str], impossible: str) -> Need:
    """The smallest number at which nothing is broken: more workers never break what fewer keep."""
    high, binds = 1, "one worker suffices"
    while high < MOST_TRIED and (found := broken(high)):
        high, binds = 2 * high, found
    low = high // 2  # broken, or 0
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
    """The largest share of a load at which nothing is broken: less load never breaks what more keeps."""
    if not broken(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(SHARE_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if broken(middle) else (middle, high)
    return low


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1e6 else "no end"
