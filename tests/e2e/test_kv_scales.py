"""Checkpoints that ask for a cache of fp8 with their scales, through both pools: the plain loop's tokens."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from common.engine.kv.cache import SMALL_DTYPES
from common.engine.models.decoder import Decoder
from common.engine.models.load import load_model
from common.model_files.resolve import resolve_model
from common.wire.sampling_params import SamplingParams

from ..common.engine.weights.formats.kv_scaled import scale_tensors, scales_of_layers, with_kv_scales
from ..oracle import generate
from ..rig import wait_until
from .test_failures import ALL_REMOTE
from .test_small_cache import metrics_of, unpaired

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(os.environ.get("DIPTYCH_DEVICE", "cpu") != "cpu", reason="the plain loop is a CPU's"),
]
LENGTHS = (5, 16, 33, 100, 250)
SCALES = scales_of_layers(4)


@pytest.fixture(scope="module")
def scaled(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_kv_scales(tiny_folder, tmp_path_factory.mktemp("scaled") / "model", scale_tensors(SCALES))


@functools.cache
def model() -> Decoder:
    return load_model(resolve_model("tiny-random"))


def plain_answer(prompt: list[int], count: int, **cache: Any) -> list[int]:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return generate(model(), prompt, params, **cache)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_the_same_answer_everywhere(system_of: Any, random_prompts: Any, scaled: Path, transport: str) -> None:
    """Computed in one pool, shipped, and gone on with in the other; alone and at once, from caches too."""
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=41)
    cache = {"kv_dtype": SMALL_DTYPES["fp8"], "kv_scales": SCALES}
    expected = [plain_answer(prompt, 16, **cache) for prompt in prompts]
    assert expected != [plain_answer(prompt, 16, kv_dtype=SMALL_DTYPES["fp8"]) for prompt in prompts]
    system = system_of(model=str(scaled), router_flags=ALL_REMOTE, worker_flags=("--kv-transport", transport))
    assert system.generate(prompts, max_tokens=16, at_once=1) == expected
    assert system.generate(prompts, max_tokens=16, at_once=5) == expected
    assert system.transfers(transport) == 2 * len(prompts)
    assert 'cache_dtype="fp8"' in metrics_of(system, "prefill")


def test_a_pool_with_other_scales_is_not_paired(
    system_of: Any, random_prompts: Any, scaled: Path, tmp_path: Path
) -> None:
    """A prefill worker comes back with other scales in its checkpoint: it ships nothing more."""
    folder = with_kv_scales(scaled, tmp_path / "model", {})
    other = with_kv_scales(scaled, tmp_path / "other", scale_tensors(scales_of_layers(4, times=0.5)[:1]))
    system = system_of(model=str(folder), router_flags=ALL_REMOTE)
    prompts = random_prompts(LENGTHS[:3], vocab_size=256, seed=42)
    cache = {"kv_dtype": SMALL_DTYPES["fp8"], "kv_scales": SCALES}
    expected = [plain_answer(prompt, 8, **cache) for prompt in prompts]
    assert system.generate(prompts, max_tokens=8) == expected
    (worker,) = system.stack.workers("prefill")
    worker.kill()
    (other / "model.safetensors").replace(folder / "model.safetensors")
    system.stack.restart(worker)
    wait_until(lambda: unpaired(system) == 2, "the router says that both have no partner")
    assert system.generate(prompts, max_tokens=8, cache_salt="anew") == expected
    assert system.transfers("tcp") + system.transfers("shm") == len(prompts)
