"""KEDA and the HPA on the triggers that the chart renders, and a prefill pool in virtual time that they scale."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.cluster import RATE_WINDOW_S, prefill_pressure
from common.latency.step_model import StepModel
from common.wire.message_fields import ROLES
from router.planner.offered_load import LoadWindow, SampledRequest
from router.planner.planner import Planner
from router.planner.pool import Fleet, PoolState, WorkerKind

TOLERANCE = 0.1


@dataclass(frozen=True)
class Trigger:
    """One `metrics-api` trigger: which sample of the routers' metrics, and what one pod may have of it."""

    name: str
    metric: str
    labels: tuple[str, ...]
    target: float
    activation: float

    @classmethod
    def of(cls, rendered: dict[str, Any]) -> Trigger:
        metadata = rendered["metadata"]
        assert rendered["type"] == "metrics-api" and metadata["format"] == "prometheus"
        metric, _, selector = metadata["valueLocation"].partition("{")
        labels = tuple(selector.rstrip("}").split(","))
        numbers = float(metadata["targetValue"]), float(metadata["activationTargetValue"])
        return cls(rendered["name"], metric, labels, *numbers)

    def value(self, page: str) -> float:
        """The first sample with these labels, as KEDA takes it. Raises LookupError when there is none."""
        for line in page.splitlines():
            if line.startswith(self.metric + "{") and all(label in line for label in self.labels):
                return float(line.rsplit(" ", 1)[1])
        raise LookupError(self.metric)


@dataclass
class Scaler:
    """What KEDA and the HPA do with one rendered ScaledObject. Pure: `now` is passed in.

    Desired pods are ceil(value / target) of the trigger that asks for most (AverageValue), within a tolerance of 10 %,
    the bounds, the speed limits of `behavior` and, downwards, the largest wish of the stabilisation window. KEDA
    scales from zero when any trigger is above its activation value, and to zero when all have been below it for the
    cooldown period.
    """

    spec: dict[str, Any]
    replicas: int = 0
    last_active: float = -math.inf
    wishes: list[tuple[float, int]] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.triggers = [Trigger.of(each) for each in self.spec["triggers"]]
        self.behavior = self.spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]

    def step(self, page: str, now: float) -> int:
        """The number of pods from now on. A metric that cannot be had changes nothing."""
        try:
            values = {trigger: trigger.value(page) for trigger in self.triggers}
        except LookupError:
            return self.replicas
        if any(value > trigger.activation for trigger, value in values.items()):
            self.last_active = now
        if self.replicas == 0:
            wanted = max(1, self.spec["minReplicaCount"]) if self.last_active == now else 0
        elif self.spec["minReplicaCount"] == 0 and now - self.last_active >= self.spec["cooldownPeriod"]:
            wanted = 0
        else:
            wanted = self._limited(max(self._wish(trigger, values[trigger]) for trigger in self.triggers), now)
        if wanted != self.replicas:
            self.changes.append((now, wanted - self.replicas))
            self.replicas = wanted
        return self.replicas

    def _wish(self, trigger: Trigger, value: float) -> int:
        if abs(value / (trigger.target * self.replicas) - 1) <= TOLERANCE:
            return self.replicas
        return math.ceil(value / trigger.target)

    def _limited(self, wish: int, now: float) -> int:
        wish = min(max(wish, self.spec["minReplicaCount"], 1), self.spec["maxReplicaCount"])
        self.wishes.append((now, wish))
        down, up = self.behavior["scaleDown"], self.behavior["scaleUp"]
        recent = [each for at, each in self.wishes if at > now - down["stabilizationWindowSeconds"]]
        if wish > self.replicas:
            allowed = max(self._allowed(policy, now, +1) for policy in up["policies"])
            return min(wish, self.replicas + allowed)
        lowest = max([wish, *recent])
        allowed = max(self._allowed(policy, now, -1) for policy in down["policies"])
        return min(self.replicas, max(lowest, self.replicas - allowed))

    def _allowed(self, policy: dict[str, Any], now: float, sign: int) -> int:
        """How many pods a policy still allows within its period."""
        used = sum(sign * by for at, by in self.changes if at > now - policy["periodSeconds"] and sign * by > 0)
        at_start = self.replicas - sign * used
        limit = policy["value"] if policy["type"] == "Pods" else math.ceil(at_start * policy["value"] / 100)
        return max(0, int(limit) - used)

    def turns(self) -> int:
        """How often growing and shrinking took turns: flapping."""
        signs = [by > 0 for _, by in self.changes]
        return sum(a != b for a, b in zip(signs, signs[1:], strict=False))


# ---------------------------------------------------------------- a pool

PROMPT_S, SPREAD, TOKEN_S = 0.2, 0.7, 4e-5
"""Mean and coefficient of variation of the time that a prompt takes, and the time that one of its tokens takes."""
POLL_S, SETTLED_S = 15.0, 900.0
"""Time between two looks of the autoscaler, and the time before a run counts."""


@dataclass
class Follower:
    """A pool's autoscaler, with the samples that the pool's load would give the triggers. `plan`: the router plans."""

    scaler: Scaler
    plan: Planner | None = None
    window: LoadWindow = field(default_factory=LoadWindow)
    num_seen: int = 0

    def look(self, world: PrefillPools, number: int, backlog: float, busy: float) -> int:
        values = {"backlog": backlog, "pressure": prefill_pressure(busy, backlog)}
        if self.plan is not None:
            values["wanted"] = self._planned(self.plan, world, number, backlog)
        lines = []
        for trigger in self.scaler.triggers:
            value = next((value for name, value in values.items() if name in trigger.metric), 0.0)
            lines.append(f"{trigger.metric}{{{','.join(trigger.labels)}}} {value}")
        return self.scaler.step("\n".join(lines), world.now)

    def _planned(self, plan: Planner, world: PrefillPools, number: int, backlog: float) -> int:
        """The plan of a router that has seen the prompts since the last look."""
        for at, prompt_s in world.prompts[self.num_seen :]:
            self.window.arrived(at)
            self.window.ended(SampledRequest(round(prompt_s / TOKEN_S), 0, 1), at)
        self.num_seen = len(world.prompts)
        kind = WorkerKind(
            StepModel(token_s=TOKEN_S, num_steps=99), num_blocks=10**6, max_num_seqs=64, step_tokens=10**6
        )
        ready, starting = world.count(number)
        waiting = max(0, round(backlog / PROMPT_S) - ready)
        pool = PoolState(kind, num_ready=ready, num_starting=starting, num_waiting=waiting)
        decode = PoolState(kind, num_ready=99)
        fleet = Fleet({"prefill": pool, "decode": decode}, start_s=dict.fromkeys(ROLES, world.start_s))
        return plan.plan(self.window.offered(world.now, world.start_s), fleet, world.now).wanted("prefill")


@dataclass
class PrefillPools:
    """Prompts arrive at random, and each goes where it is computed first. Pods start within `start_s`.

    `load` is the number of workers of speed 1 that the prompts keep busy, over time. The pods of each pool have one of
    the `speeds`.
    """

    load: Callable[[float], float]
    scalers: Sequence[Follower]
    start_s: float
    speeds: Sequence[float] = (1.0,)
    seed: int = 1
    now: float = 0.0
    ttft_s: list[tuple[float, float]] = field(default_factory=list)
    history: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._free_at = [[0.0] * one.scaler.replicas for one in self.scalers]
        self._starting: list[list[float]] = [[] for _ in self.scalers]
        self._queued: list[list[tuple[float, float]]] = [[] for _ in self.scalers]
        self._done: list[deque[tuple[float, float]]] = [deque() for _ in self.scalers]
        self.prompts: list[tuple[float, float]] = []

    def count(self, pool: int) -> tuple[int, int]:
        """Ready and starting pods of a pool."""
        return len(self._free_at[pool]), len(self._starting[pool])

    def run(self, seconds: float) -> PrefillPools:
        """Let time pass until `seconds`."""
        sigma = math.sqrt(math.log(1 + SPREAD**2))
        next_at, look_at = 0.0, POLL_S
        while min(next_at, look_at) < seconds:
            self.now = min(next_at, look_at)
            for free, starting in zip(self._free_at, self._starting, strict=True):
                while starting and starting[0] <= self.now:
                    free.append(heapq.heappop(starting))
            if self.now == look_at:
                self._look()
                look_at += POLL_S
                continue
            self._arrive(self._chance.lognormvariate(math.log(PROMPT_S) - sigma**2 / 2, sigma))
            next_at = self.now + self._chance.expovariate(self.load(self.now) / PROMPT_S)
        return self

    def _arrive(self, prompt_s: float) -> None:
        self.prompts.append((self.now, prompt_s))
        ends = [
            (max(at, self.now) + prompt_s / speed, pool, number)
            for pool, (free, speed) in enumerate(zip(self._free_at, self.speeds, strict=True))
            for number, at in enumerate(free)
        ]
        end, pool, number = min(ends)  # at least one pod is ready
        self._free_at[pool][number] = end
        heapq.heappush(self._queued[pool], (end, prompt_s / self.speeds[pool]))
        self.ttft_s.append((self.now, end - self.now))

    def _look(self) -> None:
        for pool, scaler in enumerate(self.scalers):
            queued, done, free, starting = (
                each[pool] for each in (self._queued, self._done, self._free_at, self._starting)
            )
            while queued and queued[0][0] <= self.now:
                done.append(heapq.heappop(queued))
            while done and done[0][0] <= self.now - RATE_WINDOW_S:
                done.popleft()
            backlog = sum(work for _, work in queued)
            busy = sum(work for _, work in done) / min(self.now, RATE_WINDOW_S)
            wanted = scaler.look(self, pool, backlog, busy)
            while len(free) + len(starting) < wanted:
                heapq.heappush(starting, self.now + self.start_s)
            while len(free) + len(starting) > wanted:
                if starting:
                    starting.pop()
                else:  # it computes what it has
                    free.remove(min(free))
        self.history.append((self.now, sum(one.scaler.replicas for one in self.scalers)))

    # ------------------------------------------------------------ results

    @property
    def sizes(self) -> list[int]:
        """Pods at each look after the pool has settled."""
        return [num for at, num in self.history if at >= SETTLED_S]

    @property
    def mean(self) -> float:
        return sum(self.sizes) / len(self.sizes)

    @property
    def turns(self) -> int:
        """Turns between growing and shrinking after the pool has settled."""
        steps = [b - a for a, b in zip(self.sizes, self.sizes[1:], strict=False) if a != b]
        return sum(a * b < 0 for a, b in zip(steps, steps[1:], strict=False))

    def ttft_at(self, share: float) -> float:
        """A quantile of the time to first token after the pool has settled."""
        found = sorted(ttft for at, ttft in self.ttft_s if at >= SETTLED_S)
        return found[int(share * (len(found) - 1))]
