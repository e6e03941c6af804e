"""Small scenarios."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.simulator.world.scenario import Scenario, scenario_of

PREFILL = {"fixed_s": 0.004, "token_s": 4e-5, "pair_s": 1e-9}
DECODE = {"fixed_s": 0.008, "token_s": 4e-5, "pair_s": 1e-9, "row_s": 2e-4, "context_s": 2e-8}


def make_scenario(
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    load: dict[str, Any] | None = None,
    **values: Any,
) -> Scenario:
    """Two workers of each kind at five requests a second for ten seconds, unless other values are given."""
    pools = [
        {"name": "prefill", "role": "prefill", "count": 2, "coefficients": PREFILL, "num_blocks": 4096},
        {"name": "decode", "role": "decode", "count": 2, "coefficients": DECODE, "num_blocks": 4096},
    ]
    return scenario_of(
        {
            "duration_s": 10.0,
            "model": {"max_model_len": 8192},
            "pool": [pools[0] | (prefill or {}), pools[1] | (decode or {})],
            "load": {"rate": 5.0, "input_len": "100-1500", "output_len": "1-120"} | (load or {}),
        }
        | values
    )


@pytest.fixture
def scenario() -> Callable[..., Scenario]:
    return make_scenario
