"""A cache of fp8 with the checkpoint's scales gives the tokens of a plain loop that divides and rounds by the same."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.config import PrefillWorkerConfig
from common.engine.kv.cache import SMALL_DTYPES, KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.run.loaded import LoadedModel
from common.errors import ConfigError, ModelError
from common.model_files.resolve import resolve_model
from common.model_files.tiny import make_tiny_model
from common.wire.sampling_params import SamplingParams
from kernels import KVScales, dispatch
from kernels.cpu.backend import native_backend
from kernels.plain import backend as torch_backend

from ....oracle import Oracle, generate
from ....rank_rig import worker
from ..weights.formats.kv_scaled import scale_tensors, scales_of_layers, with_kv_scales
from .generation import Pool, load, prompt

FP8 = SMALL_DTYPES["fp8"]
SCALES, OTHERS = scales_of_layers(4), scales_of_layers(4, times=0.7)
PROMPTS = [prompt(length, seed=length) for length in (5, 33, 70, 97)]
COUNT = 16
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / request.param, architecture=request.param)


@functools.cache
def expected_of(folder: Path, scales: tuple[KVScales, ...]) -> list[list[int]]:
    model = load(folder)
    return [generate(model, one, GREEDY, kv_dtype=FP8, kv_scales=scales) for one in PROMPTS]


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("way", ["program", "operations", "plain torch"])
def test_tokens_of_the_plain_loop(folder: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and in batches and chunks; Gemma's prompts leave its window."""
    expected = expected_of(folder, SCALES)
    assert expected != expected_of(folder, ()), "scales would not be seen"
    model = load(folder)
    if way == "plain torch":
        monkeypatch.setattr(dispatch, "backend", lambda kind: torch_backend)
    if way != "program":
        model.run_by_operation()
    pool = Pool(model, kv_dtype=FP8, kv_scales=SCALES)
    assert pool.greedy_batch(PROMPTS, COUNT, chunk=24) == expected
    assert [pool.greedy(one, COUNT) for one in PROMPTS] == expected
    assert (model.program is not None) == (way == "program" and native_backend() is not None)


def test_logits_are_near_those_of_the_plain_loop(folder: Path) -> None:
    """But for the few numbers that lie so near to a border that the last bit of what is rounded decides."""
    model, tokens = load(folder), prompt(60)
    oracles = (Oracle(model), Oracle(model, kv_dtype=FP8, kv_scales=SCALES))
    exact, expected = (one.forward(tokens, one.empty_cache())[-1] for one in oracles)
    pool = Pool(model, kv_dtype=FP8, kv_scales=SCALES)
    found = pool.runner.forward([SequenceChunk(tokens, 0, pool.table(60))])[0]
    assert (found - expected).norm() < 0.1 * (exact - expected).norm()


def test_a_program_is_not_used_for_a_cache_of_other_scales(folder: Path) -> None:
    model = load(folder)
    first, other, again = (Pool(model, kv_dtype=FP8, kv_scales=scales) for scales in (SCALES, OTHERS, SCALES))
    tokens = [pool.greedy(PROMPTS[2], COUNT) for pool in (first, other, again, first)]
    expected = [generate(model, PROMPTS[2], GREEDY, kv_dtype=FP8, kv_scales=scales) for scales in (SCALES, OTHERS)]
    assert tokens == [expected[0], expected[1], expected[0], expected[0]]


def test_scales_are_of_each_layer_and_for_fp8_alone(tiny_folder: Path) -> None:
    config = load(tiny_folder).config
    with pytest.raises(ModelError, match="KV scales require kv_cache_dtype fp8, not bfloat16"):
        KVCache(config, 5, 16, "bfloat16", scales=SCALES)
    with pytest.raises(ModelError, match="has 4 layers but scales for 3"):
        KVCache(config, 5, 16, "fp8", scales=SCALES[:3])
    assert not KVCache(config, 5, 16, "fp8").is_scaled


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in Llama's form with `SCALES` and a scheme that asks for them."""
    root = tmp_path_factory.mktemp("scaled")
    return with_kv_scales(make_tiny_model(root / "plain"), root / "model", scale_tensors(SCALES))


def loaded(folder: Path, **settings: Any) -> LoadedModel:
    """As if all folders held the same weights, so that nothing but the cache tells their blocks apart."""
    files = msgspec.structs.replace(resolve_model(str(folder)), model_id="m", weights_hash="0" * 16)
    return LoadedModel.load(files, PrefillWorkerConfig(model=str(folder), dtype="float32", num_blocks=32, **settings))


def test_a_worker_takes_what_the_checkpoint_asks_for(
    scaled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so; its kernels are checked with the scales. Layouts differ with each scale."""
    with caplog.at_level(logging.INFO):
        model = loaded(scaled)
    assert model.kv_dtype == "fp8" and model.kv.scales == SCALES and "KV in fp8" in model.precision
    assert "in fp8 with the checkpoint's scales: keys 0.0031 to 0.0124, values 0.0017 to 0.0051" in caplog.text
    assert "kernels agree" in caplog.text
    table = range(8)
    logits = model.runner.forward([SequenceChunk(PROMPTS[2], 0, table)])
    oracle = Oracle(load(scaled), kv_dtype=FP8, kv_scales=SCALES)
    assert int(logits.argmax()) == int(oracle.forward(PROMPTS[2], oracle.empty_cache())[-1].argmax())
    other = with_kv_scales(scaled, tmp_path / "other", scale_tensors((*SCALES[:3], OTHERS[3])))
    again = loaded(with_kv_scales(scaled, tmp_path / "again", {}))
    layouts = [model, loaded(other), loaded(scaled, kv_cache_dtype="native"), loaded(scaled, kv_cache_dtype="int8")]
    assert len({each.fingerprint for each in layouts}) == 4
    assert again.fingerprint == model.fingerprint and layouts[2].kv_dtype == "float32"


def test_a_worker_says_that_there_are_no_scales(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model = loaded(tiny_folder, kv_cache_dtype="fp8")
    assert not model.kv.is_scaled and "KV cache is in fp8 without scales" in caplog.text


def test_frames_are_not_made_smaller_again(scaled: Path) -> None:
    with pytest.raises(
        ConfigError, match="kv_wire_dtype='fp8': must be native, because the checkpoint's kv_cache_scheme"
    ):
        loaded(scaled, kv_wire_dtype="fp8")
    assert loaded(scaled, kv_wire_dtype="fp8", kv_cache_dtype="native").kv_dtype == "float32"


@pytest.mark.slow
def test_every_rank_has_the_scales(scaled: Path) -> None:
    model = load(scaled)
    expected = generate(model, PROMPTS[2], GREEDY, kv_dtype=FP8, kv_scales=SCALES)
    with worker(scaled, 2) as two, worker(scaled, 1) as one:
        assert two.fingerprint == one.fingerprint and two.kv.scales == SCALES
        tokens, table = list(PROMPTS[2]), range(8)
        logits = two.runner.forward([SequenceChunk(tokens, 0, table)])
        found = [int(logits.argmax())]
        while len(found) < 8:
            place = len(tokens) + len(found) - 1
            found.append(int(two.runner.forward([SequenceChunk(found[-1:], place, table)]).argmax()))
    assert found == expected[:8]
