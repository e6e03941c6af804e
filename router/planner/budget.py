"""Divides a budget among the pools of one model, or of all models of a router. Pure.

needed ──bounds──> asked ──the budget, in proportion to the needs of all pools──> allowed

Each model's planner asks separately. The total never exceeds the budget: a model that should get more waits until
others were allowed less, which takes one planning round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from common.wire import Role
from router.planner.pool import Bounds

EXACT = 1e-9
"""Tolerance for sums of prices."""

Pool = tuple[str, Role]
"""A pool of a model."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Workers that a model needs, by role.

    At most `most_paid` of a role cost anything: the others are unschedulable.
    """

    needed: Mapping[Role, int]
    bounds: Mapping[Role, Bounds]
    most_paid: Mapping[Role, int]

    @property
    def bounded(self) -> dict[Role, int]:
        """Needed workers within the bounds."""
        return {role: self.bounds[role].clamp(num) for role, num in self.needed.items()}

    def cost(self, nums: Mapping[Role, int]) -> float:
        return sum(self.price(role, num) for role, num in nums.items())

    def price(self, role: Role, num: int) -> float:
        """Return the cost of `num` workers of a role."""
        return min(num, self.most_paid.get(role, num)) * self.bounds[role].price


@dataclass(frozen=True, slots=True)
class Sizing:
    """Workers that the bounds and the budget allow. `shortfall` describes the missing ones."""

    allowed: Mapping[Role, int]
    shortfall: str


class Budget:
    """Budget of one model, or of all models of a router, with the last request and allowance of each."""

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        self._asks: dict[str, Ask] = {}
        self._allowed: dict[str, Mapping[Role, int]] = {}

    def fit(self, model: str, ask: Ask) -> Sizing:
        """Return the number of workers that a model may have now."""
        self._asks[model] = ask
        wanted = ask.bounded
        found = self._part(model, wanted)
        short = [
            f"{num} {role} workers are needed, but the maximum is {ask.bounds[role].most}"
            for role, num in ask.needed.items()
            if num > ask.bounds[role].most
        ]
        if found != wanted:
            others_cost = self._cost_of_others(model)
            of_others = f", of which other models use {others_cost:g}" if others_cost else ""
            short.append(f"the needed workers cost {ask.cost(wanted):g}, but the budget is {self._most:g}{of_others}")
        self._allowed[model] = found
        return Sizing(found, "; ".join(short))

    def _part(self, model: str, wanted: Mapping[Role, int]) -> Mapping[Role, int]:
        """Return the model's part. It shrinks at once, but grows only into what the others leave now.

        A new model may already have workers, which keep running although other models asked first.
        """
        before = self._allowed.get(model, wanted)
        part = divide(self._asks, self._most, self._allowed)[model]
        if self._asks[model].cost(part) <= self._most - self._cost_of_others(model) + EXACT:
            return part
        bounds = self._asks[model].bounds
        return {role: max(bounds[role].least, min(num, before[role])) for role, num in part.items()}

    def _cost_of_others(self, model: str) -> float:
        """Return the cost of the workers of all other models."""
        return sum(self._asks[other].cost(nums) for other, nums in self._allowed.items() if other != model)


def divide(asks: Mapping[str, Ask], budget: float, now: Mapping[str, Mapping[Role, int]]) -> dict[str, dict[Role, int]]:
    """Divide a budget among models.

    All pools get about the same fraction of what they need, because a model's goodput is limited by its scarcest pool.
    Each needed pool keeps one worker if possible. Otherwise prefill pools lose their last worker first, because decode
    workers also compute prompts, followed by decode pools of models without a decode worker `now`.
    """
    nums = {model: ask.bounded for model, ask in asks.items()}
    over = sum(ask.cost(nums[model]) for model, ask in asks.items()) - budget

    def take(model: str, role: Role) -> float:
        """Remove one worker and return what that saves."""
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
    """Return whether a pool can lose a worker, and still keep one if it is needed."""
    model, role = pool
    return nums[model][role] > max(asks[model].bounds[role].least, 1 if asks[model].needed[role] else 0)
