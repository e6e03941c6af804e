"""A request that wakes a pool from zero waits as long as a worker may take to start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .chart import Refused, render, settings_of
from .test_values import notes_of

pytestmark = pytest.mark.helm

ZERO = {"type": "keda", "minReplicas": 0}


def settings(helm: Path, over: dict[str, Any]) -> dict[str, Any]:
    rendered = render(helm, over=over)
    return settings_of(rendered, rendered.named("Deployment", "demo-diptych-router-smollm2-135m"))


@pytest.mark.slow
def test_routers_hold_requests_until_the_slowest_pool_could_have_started(helm4: Path) -> None:
    over: dict[str, Any] = {
        "workers": {"autoscaling": ZERO, "startupSeconds": 400},
        "decode": {"defaults": {"startupSeconds": 900}},
    }
    found = settings(helm4, over)
    assert (found["queue_timeout_s"], found["request_timeout_s"]) == (900, 1500)
    assert not {"queue_timeout_s", "request_timeout_s"} & settings(helm4, {}).keys()
    chosen = settings(helm4, over | {"router": {"settings": {"queue_timeout_s": 60}}})
    assert chosen["queue_timeout_s"] == 60


def test_a_wait_that_the_whole_request_does_not_allow_is_refused(helm4: Path) -> None:
    over = {"workers": {"autoscaling": ZERO}, "router": {"settings": {"request_timeout_s": 300}}}
    with pytest.raises(Refused, match="1800 is above request_timeout_s 300, which includes the waiting time"):
        render(helm4, over=over)


@pytest.mark.slow
def test_notes_say_when_requests_would_give_up_first(helm4: Path, tmp_path: Path) -> None:
    flags = ("--set", "workers.autoscaling.type=planner", "--set", "workers.autoscaling.minReplicas=0")
    warning = "is held 30 s (router.settings.queue_timeout_s) and then answered 503, but a worker may take up to 1800 s"
    assert warning in notes_of(helm4, tmp_path, *flags, "--set", "router.settings.queue_timeout_s=30")
    assert "answered 503" not in notes_of(helm4, tmp_path, *flags)
