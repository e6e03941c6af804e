from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from router.cli.size import (
    Accelerator,
    Estimate,
    Infeasible,
    ModelSize,
    RequestLoad,
    kv_bytes_of,
    main,
    size,
)

LLAMA_8B = ModelSize(parameters=8e9, weight_bytes=2, kv_bytes=128 * 1024)
# NVIDIA's data sheet of the H200: 989 TFLOP/s dense bf16, 141 GB, 4.8 TB/s.
H200 = Accelerator(flops=989e12, memory_bytes=141e9, bandwidth=4.8e12, compute_share=0.66, bandwidth_share=0.7)
LOAD = RequestLoad(rate=20, prompt=3000, output=300, cached=0.0, ttft_s=0.5, tpot_s=0.02)


def sized(**load: float) -> Estimate:
    return size(LLAMA_8B, H200, dataclasses.replace(LOAD, **load))


def test_the_link_of_a_prefill_worker_is_what_others_have_computed() -> None:
    """8B on one H200: about 43 Gb/s keep the transfer hidden."""
    assert sized().link_bits == pytest.approx(43e9, rel=0.02)


def test_no_goal_is_missed_with_what_is_recommended_and_one_prefill_worker_less_misses_it() -> None:
    found = sized()
    assert found.prompt_s + found.wait_s <= LOAD.ttft_s
    assert found.step_s <= LOAD.tpot_s
    assert LOAD.rate * LOAD.output <= found.decode_workers * found.batch / found.step_s
    used = LOAD.rate * found.prompt_s / (found.prefill_workers - 1)
    assert used >= 1 or used > 0.9 or used * found.prompt_s / (2 * (1 - used)) > 0.65 * (LOAD.ttft_s - found.prompt_s)


def test_each_side_follows_its_own_load() -> None:
    base, longer_prompts, longer_answers = sized(), sized(prompt=6000), sized(output=1200)
    assert longer_prompts.prefill_workers > base.prefill_workers
    assert longer_answers.prefill_workers == base.prefill_workers
    assert longer_answers.decode_workers > base.decode_workers
    assert sized(cached=0.5).prefill_workers < base.prefill_workers


@pytest.mark.parametrize("load", ({"ttft_s": 0.05}, {"tpot_s": 0.004}, {"prompt": 2e6, "ttft_s": 1e6}))
def test_goals_that_cannot_be_met_are_refused(load: dict[str, float]) -> None:
    with pytest.raises(Infeasible):
        sized(**load)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    device = ["--tflops", "989", "--memory-gb", "141", "--bandwidth-gbs", "4800"]
    load = ["--rate", "20", "--prompt", "3000", "--output", "300", "--tpot-ms", "20"]
    line = ["--parameters", "8e9", "--kv-bytes", "131072", *device, *load]
    assert main([*line, "--ttft-ms", "500"]) == 0
    assert "prefill workers" in capsys.readouterr().out
    assert main([*line, "--ttft-ms", "10"]) == 1
    assert "cannot meet the goals: TTFT of 10 ms" in capsys.readouterr().err


SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 1000, "max_position_embeddings": 4096}
DEEPSEEK_V3 = {
    **{"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512},
    **{"qk_rope_head_dim": 64, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
}
LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}


@pytest.mark.parametrize(("fields", "num_bytes"), [(LLAMA, 131072), (DEEPSEEK_V3, 70272)])
def test_the_kv_of_a_token_by_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, object], num_bytes: int
) -> None:
    """The same estimate as with the bytes given; a file that is not one is named."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SIZES | fields))
    assert kv_bytes_of(str(path)) == num_bytes
    rest = ["--tflops", "989", "--memory-gb", "141", "--bandwidth-gbs", "4800", "--rate", "20", "--prompt", "3000"]
    rest += ["--output", "300", "--tpot-ms", "20", "--ttft-ms", "500", "--parameters", "8e9"]
    assert main([*rest, "--config", str(path)]) == 0
    known = capsys.readouterr().out
    assert main([*rest, "--kv-bytes", str(num_bytes)]) == 0
    assert capsys.readouterr().out == known
    with pytest.raises(SystemExit):
        main([*rest, "--config", str(tmp_path / "none.json")])
    assert "none.json is missing" in capsys.readouterr().err


def test_a_window_bounds_what_a_sequence_takes_and_sends() -> None:
    """Prompts of 16,000 tokens through a window of 4,096: as much KV as a quarter of each."""
    load = dataclasses.replace(LOAD, prompt=16_000, ttft_s=3.0, rate=5)
    windowed = dataclasses.replace(LLAMA_8B, window=4096)
    full, less = size(LLAMA_8B, H200, load), size(windowed, H200, load)
    assert less.batch > full.batch and less.decode_workers <= full.decode_workers
    assert less.traffic_bits == pytest.approx(full.traffic_bits * 4096 / 16_000)
    assert less.link_bits == pytest.approx(full.link_bits * 4096 / 16_000)
    assert size(windowed, H200, LOAD) == sized()  # no sequence is longer
