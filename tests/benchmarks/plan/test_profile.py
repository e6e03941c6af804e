"""Profiling: which loads workers are given, and what real ones say afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.plan.__main__ import main
from benchmarks.plan.profile import batch_phases, prompt_phases
from common.model_files.resolve import resolve_model


def test_phases_fill_the_time_with_prompts_then_batches() -> None:
    prompts, batches = prompt_phases(2048, 100.0), batch_phases(2048, 20, 100.0)
    assert sum(phase.seconds for phase in (*prompts, *batches)) == pytest.approx(100.0)
    assert {phase.output_len for phase in prompts} == {1}
    assert {phase.concurrency for phase in batches} == {1, 2, 4, 8, 16}
    assert {phase.input_len for phase in batches} < {phase.input_len for phase in prompts}
    assert max(phase.input_len for phase in prompts) == 2048
    assert [phase.input_len for phase in prompts] == sorted(phase.input_len for phase in prompts)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_profile_of_real_workers_is_planned_with(tmp_path: Path) -> None:
    """A worker of each kind is started and driven for ten seconds: minutes on a busy machine."""
    from common.engine.kv.cache import block_bytes
    from common.model_files.config import from_hf

    file = tmp_path / "plan.json"
    flags = ["--profile", "tiny-random", "--profile-s", "10", "--dtype", "float32", "--kv-memory-gib", "0.05"]
    flags += ["--rate", "4", "--duration-s", "4", "--slo-ttft-ms", "2000", "--slo-tpot-ms", "200", "--max-workers", "2"]
    assert main([*flags, "--no-progress", "--jobs", "1", "--seeds", "1", "--json", str(file)]) == 0
    plan = json.loads(file.read_text())["plan"]
    for role in ("prefill", "decode"):
        coefficients = plan[role]["coefficients"]
        assert coefficients["num_steps"] >= 64 and coefficients["token_s"] + coefficients["pair_s"] > 0.0
    decode = plan["decode"]["coefficients"]
    assert 0.0 < decode["fixed_s"] + decode["row_s"] < 1.0
    config = resolve_model("tiny-random").config
    assert config is not None
    kv_bytes = block_bytes(from_hf(config), 16, "float32") / 16
    assert plan["model"]["kv_bytes_per_token"] == pytest.approx(kv_bytes, rel=0.01)
