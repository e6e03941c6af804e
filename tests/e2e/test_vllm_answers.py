"""Answers of prefill and decode workers with `--engine vllm`: in float32 those of vLLM without Diptych."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common.model_files.resolve import resolve_model

from ..common.engine.vllm.engines import write_model
from ..common.engine.vllm.test_models import COMMON
from ..common.engine.vllm.test_models import MODELS as KINDS
from ..rig import ENGINE_SETTINGS, System, make_stack, samples
from ..vllm_alone import NUM_TOKENS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
BLOCK = 128
NUM_BLOCKS: Mapping[str, int] = {"llama": 24, "qwen3": 24, "mixtral": 24, "gemma3": 64, "deepseek-v3": 192}
"""Enough for the longest prompt, and too few for all requests at once.

Each group of windowed layers has its own blocks. Blocks of latent attention have 16 tokens.
"""
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {}),
    **{name: KINDS[name][:2] for name in ("qwen3", "gemma3", "mixtral", "deepseek-v3", "qwen3-next")},
}
MOST_DIFFERENT = {"float32": 0.0, "bfloat16": 0.25}
"""Share of answers that may differ. In bfloat16 vLLM's own do with the batch and the chunks: 4 of these 60."""
TOKENS = {"eos_token_id": 257, "bos_token_id": 256, "pad_token_id": 260}
"""Of the tokenizer of the tiny model."""
RECURRENT = ("qwen3-next",)
"""Models whose recurrent state vLLM does not cache, and whose kernels for CPUs need bfloat16."""

BATCH_DEPENDENT = ("deepseek-v3",)
"""Models whose answers depend on the batch also in float32: vLLM's latent attention on CPUs.

None of the first 20 prompts has the same answer alone and with the other 59, so only requests that run alone are
compared.
"""


def write_served_model(folder: Path, name: str) -> Path:
    """Write a random model with the tokenizer of the tiny one."""
    kind, fields = MODELS[name]
    write_model(folder, kind, {**COMMON, **TOKENS, **fields})
    for file in resolve_model("tiny-random").tokenizer.parent.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


def prompts_by_case() -> dict[str, list[list[int]]]:
    """60 prompts of the sizes at which blocks, chunks and windows end."""
    source = random.Random(48)

    def tokens(length: int) -> list[int]:
        return [source.randrange(256) for _ in range(length)]

    shared = tokens(3 * BLOCK)
    return {
        "lengths": [tokens(length) for length in (1, 2, 3, 17, 127, 129, 255, 257, 300, 511, 700, 1000, 1501, 2000)],
        "whole blocks": [tokens(BLOCK * number) for number in (1, 2, 3, 4, 5, 8, 12, 15)],
        "cached prefixes": [[*shared, *tokens(length)] for length in (1, 5, 100, 127, 128, 129, 200, 300, 600, 900)],
        "at once": [tokens(100 + 41 * number) for number in range(16)],
        "at once, cached": [[*shared, *tokens(30 + 37 * number)] for number in range(12)],
    }


def answers_of(system: System, cases: Mapping[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    return {
        case: system.generate(prompts, at_once=16 if "at once" in case else 1, max_tokens=NUM_TOKENS)
        for case, prompts in cases.items()
    }


@pytest.fixture
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    given = os.environ.get("VLLM_TEST_MODEL")
    return Path(given) if given else write_served_model(tmp_path / request.param, request.param)


@pytest.mark.parametrize(
    ("model", "dtype", "flags"),
    [
        pytest.param(
            name,
            "bfloat16" if name in RECURRENT else "float32",
            ("--no-enable-prefix-caching",) if name in RECURRENT else ("--num-blocks", str(NUM_BLOCKS[name])),
            id=name,
        )
        for name in MODELS
    ],
    indirect=["model"],
)
def test_answers_equal_those_of_vllm_alone(tmp_path: Path, model: Path, dtype: str, flags: tuple[str, ...]) -> None:
    """Prompts are computed in chunks. There are few blocks, so requests wait for them or are preempted."""
    cases = prompts_by_case()
    flat = [prompt for prompts in cases.values() for prompt in prompts]
    given, found, log = tmp_path / "prompts.json", tmp_path / "answers.json", tmp_path / "alone.log"
    runs_alone = model.name in BATCH_DEPENDENT
    given.write_text(json.dumps([[prompt] for prompt in flat] if runs_alone else [flat]))
    arguments = {"max_model_len": 2304, "kv_cache_memory_bytes": 2**28, "enable_prefix_caching": False}
    program = Path(__file__).parents[1] / "vllm_alone.py"
    command = [sys.executable, "-P", str(program), str(model), str(given), str(found), dtype, json.dumps(arguments)]
    settings = ENGINE_SETTINGS["vllm"]
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    stack = make_stack(
        tmp_path / "logs",
        model=str(model),
        dtype=dtype,
        worker_flags=("--max-model-len", "2304", "--kv-memory-gib", "0.25", *flags),
        prefill_flags=("--max-num-batched-tokens", "256"),
        router_flags=("--local-prefill-threshold", "0"),
        **settings,
    )
    with log.open("w") as output:
        alone = subprocess.Popen(
            command, env=os.environ | variables, stdout=output, stderr=output, start_new_session=True
        )
    try:
        with stack:
            system = System(stack)
            system.wait_for_workers()
            answers = answers_of(system, cases)
            again = answers_of(system, cases)
            system.settle()
            received = system.metric("diptych_kv_transfers", "decode")
            preempted = sum(value for each in stack.workers() for value in samples(each, "vllm:num_preemptions"))
        assert alone.wait(300) == 0, log.read_text()[-3000:]
    finally:
        if alone.poll() is None:
            os.killpg(alone.pid, signal.SIGKILL)  # with vLLM's processes, which would not notice
            alone.wait()
    expected = iter(json.loads(found.read_text()))
    different: Counter[str] = Counter()
    for case, prompts in cases.items():
        for number, _ in enumerate(prompts):
            right = next(expected)
            if "at once" in case and runs_alone:
                continue
            different[case] += answers[case][number] != right
            different[f"{case}, again"] += again[case][number] != right
    print(f"{model.name}: {received:g} transfers, {preempted:g} preemptions, different: {dict(different)}")
    assert received >= 2 * len(flat)
    assert sum(different.values()) <= MOST_DIFFERENT[dtype] * 2 * len(flat)
