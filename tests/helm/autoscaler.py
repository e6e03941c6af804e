"""What KEDA and the HPA do with a rendered ScaledObject, small enough to run in a test. Pure: `now` comes in.

Desired pods are ceil(value / target) of the trigger that wants most (AverageValue), within a tolerance of 10 %, the
bounds, the speed limits of `behavior` and, downwards, the largest wish of the stabilisation window. From and to zero
KEDA decides: up when any trigger is above its activation value, down when all have been below for the cooldown period.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

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
    """One ScaledObject and its target's number of pods."""

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
