from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.latency.step_model import StepModel
from router.planner.pool import Fleet, PoolState, WorkerKind

MODEL = StepModel(fixed_s=4e-3, floor_s=8e-3, token_s=4e-5, pair_s=1.5e-9, row_s=3e-5, context_s=2.5e-8, num_steps=1000)
PREFILL = WorkerKind(MODEL, num_blocks=25_000, block_size=16, max_num_seqs=64, step_tokens=2048)
DECODE = WorkerKind(MODEL, num_blocks=25_000, block_size=16, max_num_seqs=128, step_tokens=512)


@pytest.fixture
def kinds() -> dict[str, WorkerKind]:
    return {"prefill": PREFILL, "decode": DECODE}


@pytest.fixture
def fleet() -> Callable[..., Fleet]:
    """Both pools with so many ready workers; `prefill` and `decode` are further fields of their states."""

    def make(num_prefill: int = 1, num_decode: int = 1, **more: dict[str, Any]) -> Fleet:
        return Fleet(
            {
                "prefill": PoolState(**{"kind": PREFILL, "num_ready": num_prefill, **more.get("prefill", {})}),
                "decode": PoolState(**{"kind": DECODE, "num_ready": num_decode, **more.get("decode", {})}),
            },
            start_s={"prefill": 30.0, "decode": 30.0},
            num_held=more.get("held", {}),
        )

    return make
