"""What planned workers may cost, and how pools divide that: those of one model, or of all models of a router. Pure.

    needed ──bounds──> asked ──the budget, by the shares of what all pools need──> allowed

Each model's planner asks in a look of its own. What all models may have together does not cost more than the budget: a
model that should have more waits until others were allowed less, which is one look.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from common.wire import Role
from router.planner.pool import Bounds

EXACT = 1e-9
"""Sums of prices are not exact."""

Pool = tuple[str, Role]
"""A model's pool."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a model needs by role. Of a role no more than `most_paid` workers cost anything: others find no machine."""

    needed: Mapping[Role, int]
    bounds: Mapping[Role, Bounds]
    most_paid: Mapping[Role, int]

    @property
    def bounded(self) -> dict[Role, int]:
        """What the bounds leave of it."""
        return {role: self.bounds[role].clamp(num) for role, num in self.needed.items()}

    def cost(self, nums: Mapping[Role, int]) -> float:
        return sum(self.price(role, num) for role, num in nums.items())

    def price(self, role: Role, num: int) -> float:
        """What so many workers of a role cost."""
        return min(num, self.most_paid.get(role, num)) * self.bounds[role].price


@dataclass(frozen=True, slots=True)
class Sizing:
    """The workers that the bounds and the budget allow; `shortfall` says how many of those needed are missing."""

    allowed: Mapping[Role, int]
    shortfall: str


class Budget:
    """The budget of one model, or of all models of a router; what each was allowed last, and asked for."""

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        self._asks: dict[str, Ask] = {}
        self._allowed: dict[str, Mapping[Role, int]] = {}

    def fit(self, model: str, ask: Ask) -> Sizing:
        """The numbers that a model may have now."""
        self._asks[model] = ask
        wanted = ask.bounded
        found = self._part(model, wanted)
        short = [
            f"{num} {role} workers are needed, {ask.bounds[role].most} allowed"
            for role, num in ask.needed.items()
            if num > ask.bounds[role].most
        ]
        if found != wanted:
            beside = self._cost_beside(model)
            of_others = f", of which other models have {beside:g}" if beside else ""
            short.append(f"the workers needed cost {ask.cost(wanted):g}, the budget is {self._most:g}{of_others}")
        self._allowed[model] = found
        return Sizing(found, "; ".join(short))

    def _part(self, model: str, wanted: Mapping[Role, int]) -> Mapping[Role, int]:
        """The model's part. It grows only by what the parts of others leave now, and shrinks at once.

        A model that is heard for the first time has workers, perhaps, which do not end because others were heard first.
        """
        before = self._allowed.get(model, wanted)
        part = divide(self._asks, self._most, self._allowed)[model]
        if self._asks[model].cost(part) <= self._most - self._cost_beside(model) + EXACT:
            return part
        return {role: min(num, before[role]) for role, num in part.items()}

    def _cost_beside(self, model: str) -> float:
        """What the workers of all other models cost."""
        return sum(self._asks[other].cost(nums) for other, nums in self._allowed.items() if other != model)


def divide(asks: Mapping[str, Ask], budget: float, now: Mapping[str, Mapping[Role, int]]) -> dict[str, dict[Role, int]]:
    """What each model may have of a budget, all of them together.

    All pools get about the same share of what they need: a model's goodput is that of its pool that is shortest. Each
    pool that is needed keeps one worker while that is possible. Else prefill pools go first, because decode workers
    compute prompts, too, and then models without a decode worker `now` wait until another needs less.
    """
    nums = {model: ask.bounded for model, ask in asks.items()}
    over = sum(ask.cost(nums[model]) for model, ask in asks.items()) - budget

    def take(model: str, role: Role) -> float:
        """One worker fewer; what that saves."""
        num = nums[model][role]
        nums[model][role] = num - 1
        return asks[model].price(role, num) - asks[model].price(role, num - 1)

    def share(model: str, role: Role) -> float:
        return (nums[model][role] - 1) / max(1, asks[model].needed[role])

    order = {pool: number for number, pool in enumerate((model, role) for model in nums for role in nums[model])}
    spare = [(-share(*pool), order[pool], pool) for pool in order if _is_spare(asks, nums, pool)]
    heapify(spare)
    while over > EXACT and spare:
        _, number, pool = heappop(spare)
        over -= take(*pool)
        if _is_spare(asks, nums, pool):
            heappush(spare, (-share(*pool), number, pool))
    last = [(model, role) for model, role in order if nums[model][role] > asks[model].bounds[role].least]
    last.sort(key=lambda pool: (pool[1] != "prefill", now.get(pool[0], {}).get(pool[1], 0) > 0, -order[pool]))
    for pool in last:
        if over > EXACT:
            over -= take(*pool)
    return nums


def _is_spare(asks: Mapping[str, Ask], nums: Mapping[str, Mapping[Role, int]], pool: Pool) -> bool:
    """Whether a pool can do with one worker fewer, and still keep one if it is needed."""
    model, role = pool
    return nums[model][role] > max(asks[model].bounds[role].least, 1 if asks[model].needed[role] else 0)
