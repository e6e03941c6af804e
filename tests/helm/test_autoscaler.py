from __future__ import annotations

from typing import Any

from .autoscaler import Scaler


def spec(**over: Any) -> dict[str, Any]:
    trigger = {
        "type": "metrics-api",
        "name": "load",
        "metadata": {
            "format": "prometheus",
            "valueLocation": 'load{role="prefill",model_name="m"}',
            "targetValue": "0.5",
            "activationTargetValue": "0",
        },
    }
    behavior = {
        "scaleUp": {
            "stabilizationWindowSeconds": 0,
            "policies": [{"type": "Pods", "value": 2, "periodSeconds": 10}],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": 60,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 10}],
        },
    }
    base = {"minReplicaCount": 0, "maxReplicaCount": 5, "cooldownPeriod": 100, "triggers": [trigger]}
    return base | {"advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}}} | over


def page(value: float) -> str:
    return f'load{{role="decode",model_name="m"}} 99\nload{{model_name="m",role="prefill"}} {value}\n'


def test_from_zero_up_within_the_speed_limit_and_the_bounds() -> None:
    scaler = Scaler(spec())
    assert [scaler.step(page(0), 0), scaler.step(page(3), 1)] == [0, 1]
    assert [scaler.step(page(3), at) for at in (2, 12, 23, 34)] == [2, 4, 5, 5]


def test_down_slowly_after_the_window_and_to_zero_after_the_cooldown() -> None:
    scaler = Scaler(spec(), replicas=4)
    assert scaler.step(page(2), 0) == 4
    assert scaler.step(page(0.6), 30) == 4, "four were wanted within the window"
    assert [scaler.step(page(0.6), at) for at in (61, 65, 72, 83)] == [3, 3, 2, 2]
    assert [scaler.step(page(0), at) for at in (150, 182, 184)] == [1, 1, 0]
    assert scaler.turns() == 0


def test_near_the_target_and_without_a_metric_nothing_changes() -> None:
    scaler = Scaler(spec(), replicas=3)
    assert scaler.step(page(1.6), 0) == 3
    assert scaler.step("other 1\n", 1) == 3
