"""DeepSeek's models: one program's bits, Kimi's name, block-wise fp8, layers that are not read, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.config import PrefillWorkerConfig
from common.engine.kv.cache import KVCache, block_bytes
from common.engine.models.batch import SequenceChunk
from common.engine.models.decoder import Decoder
from common.engine.models.load import load_model
from common.engine.run.loaded import LoadedModel
from common.engine.run.runner import ModelRunner
from common.errors import ConfigError, ModelError
from common.model_files.config import from_hf
from kernels import KVScales, Routing, route
from kernels.backends import FOUND
from kernels.cpu.backend import native_backend
from kernels.plain import backend as torch_backend

from ....families import CASES
from ..weights.formats.checkpoints import Format, float8, write_checkpoint
from .generation import Pool, files_of, load, logits_along, prompt, random_checkpoint, transformers_greedy
from .generation import transformers_model as reference_of

KINDS = [("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int4")]
V3_FP8 = Format(
    {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    lambda weight: float8(weight, (128, 128), "weight_scale_inv"),
)


@pytest.fixture(scope="module")
def third(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, options = CASES["deepseek-v3"]
    return random_checkpoint(tmp_path_factory.mktemp("deepseek") / "v3", family, **options)


def configured(folder: Path, copy: Path, **fields: Any) -> Path:
    """The same weights with other fields; those that are ... are left out."""
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).symlink_to(file)
    (copy / "config.json").unlink()
    config = json.loads((folder / "config.json").read_text()) | fields
    (copy / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return copy


def steps(model: Decoder) -> Tensor:
    """Logits of a prefill of two prompts, and of a step of both."""
    runner = ModelRunner(model, KVCache(model.config, 24, 16, model.dtype))
    first, second = list(range(9)), list(range(10, 14))
    prefill = runner.forward([SequenceChunk(prompt(120), 0, first), SequenceChunk((9, 8, 7), 0, second)])
    return torch.cat((prefill, runner.forward([SequenceChunk((3,), 120, first), SequenceChunk((4,), 3, second)])))


@pytest.mark.slow_cases("float32-*")
@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_one_program_is_bit_for_bit_the_operations(third: Path, dtype: str, quantization: str) -> None:
    """In chunks of any length too, and with two threads."""
    native = native_backend()
    if native is None or (dtype == "bfloat16" and not native.multiplies_bf16):
        pytest.skip("no program runs here")
    model, single = (load_model(files_of(third), dtype=dtype, quantization=quantization) for _ in range(2))
    single.run_by_operation()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        replayed = steps(model)
        assert model.program is not None and torch.isfinite(replayed).all()
        assert torch.equal(steps(single), replayed)
        torch.set_num_threads(1)
        assert torch.equal(steps(model), replayed)
    finally:
        torch.set_num_threads(before)
    runner, table = ModelRunner(model, KVCache(model.config, 24, 16, model.dtype)), list(range(9))
    for start in range(0, 120, 7):
        part = prompt(120)[start : start + 7]
        last = runner.forward([SequenceChunk(part, start, table, sample=start + 7 >= 120)])
    assert torch.equal(last[0], replayed[0])


def test_the_cache_holds_latents_alone(third: Path) -> None:
    config = from_hf(third / "config.json")
    assert config.kv_numbers == 3 * (32 + 16) and block_bytes(config, 16, "float32") == 16 * 4 * config.kv_numbers
    kv = KVCache(config, 5, 16, "bfloat16")
    assert kv.tensor.shape == (5, 3, 1, 16, 1, 48) and kv.block_bytes == len(kv.block(0)) == 16 * 2 * config.kv_numbers
    kv.tensor.fill_(1.0)
    kv.clear_slots(2, 5)
    assert kv.tensor.sum() == (5 * 16 - 11) * config.kv_numbers
    with pytest.raises(ModelError, match="int8 is not supported for models with latent attention: use auto or fp8"):
        KVCache(config, 5, 16, "int8")


@pytest.mark.slow
def test_kimi_is_a_third_deepseek(third: Path, tmp_path: Path) -> None:
    tokens, _ = transformers_greedy(reference_of(third), prompt(50), 12)
    assert Pool(load(configured(third, tmp_path / "k2", model_type="kimi_k2"))).greedy(prompt(50), 12) == tokens


@pytest.mark.parametrize("scales", [(), (KVScales(0.0371, 9.0), KVScales(0.3, 5.0), KVScales(3.1, 0.01))])
def test_a_float8_cache_is_nearly_right(third: Path, scales: tuple[KVScales, ...]) -> None:
    """Latents are divided by the scale of keys, whatever that of values is; operation by operation as in a program."""
    model = load(third)
    tokens = Pool(model).greedy(prompt(60), 8)
    exact = logits_along(Pool(model), prompt(60), tokens)
    near = logits_along(Pool(model, kv_dtype=torch.float8_e4m3fn, kv_scales=scales), prompt(60), tokens)
    assert 1e-4 < float((near - exact).abs().mean()) < 0.25 * float(exact.std())
    model.run_by_operation()
    again = logits_along(Pool(model, kv_dtype=torch.float8_e4m3fn, kv_scales=scales), prompt(60), tokens)
    assert torch.equal(near, again)


@pytest.mark.slow
def test_block_wise_float8(third: Path, tmp_path: Path) -> None:
    """V3's own format: tokens are those of the floats that the file stands for."""
    write_checkpoint(third, tmp_path / "fp8", V3_FP8)
    tokens, logits = transformers_greedy(reference_of(tmp_path / "fp8-dense"), prompt(60), 12)
    pool = Pool(load(tmp_path / "fp8"))
    assert pool.greedy(prompt(60), 12) == tokens
    assert float((logits_along(pool, prompt(60), tokens) - logits).abs().max()) < 1e-3


def test_layers_for_further_tokens_are_not_read(third: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are behind the others in V3's file; the log names them."""
    folder = configured(third, tmp_path / "mtp", num_nextn_predict_layers=1)
    tensors = load_file(third / "model.safetensors")
    (folder / "model.safetensors").unlink()
    extra = {"model.layers.3.eh_proj.weight": torch.full((96, 192), float("nan"))}
    save_file(tensors | extra, folder / "model.safetensors", {"format": "pt"})
    with caplog.at_level("INFO"):
        model = load(folder)
    assert "layers 3 to 3 of the file" in caplog.text and "are not loaded" in caplog.text
    assert Pool(model).greedy(prompt(30), 5) == Pool(load(third)).greedy(prompt(30), 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topk_method": "greedy"}, "topk_method 'greedy' of deepseek_v3 is not supported: .* topk_method 'noaux_tc'"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' of deepseek_v3 .* scoring_func 'sigmoid'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 of deepseek_v3 .* moe_layer_freq 1"),
        ({"n_group": 3}, "n_group 3 of 8 experts .* groups of 2 experts or more"),
        ({"n_group": 8}, "n_group 8 of 8 experts .* groups of 2 experts or more"),
        ({"topk_group": 5}, "topk_group 5 of 4 groups .* topk_group 4 or less"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 of 4 experts in 2 groups .* at most 4"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 of 4 heads with latents .* num_key_value_heads 4"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim 15 .* an even qk_rope_head_dim"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 of deepseek_v3 .* partial_rotary_factor 1"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0.0, expected a positive whole number"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"model_type": "deepseek_v2"}, "topk_method 'noaux_tc' of deepseek_v2 .* 'greedy' or 'group_limited_greedy'"),
        (
            {"model_type": "deepseek_v2", "topk_method": "greedy", "scoring_func": "softmax"},
            "norm_topk_prob True of deepseek_v2 .* norm_topk_prob False",
        ),
        (
            {
                "model_type": "deepseek_v2",
                "topk_method": "group_limited_greedy",
                "scoring_func": "softmax",
                "norm_topk_prob": False,
                "n_group": ...,
            },
            "n_group is None, expected a number",
        ),
        ({"model_type": "deepseek_v32"}, "model_type 'deepseek_v32' is not supported"),
    ],
)
def test_what_is_not_supported_is_refused(third: Path, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    known = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    folder = configured(third, tmp_path / "other", **known | fields)
    with pytest.raises(ModelError, match=message) as error:
        from_hf(folder / "config.json")
    assert "config.json" in str(error.value)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("normalised", [True, False])
def test_routing(monkeypatch: pytest.MonkeyPatch, backend: str, sigmoid: bool, normalised: bool) -> None:
    """Against one plain loop a row, with corrections and without; the first of equals wins."""
    if backend == "torch":
        monkeypatch.setitem(FOUND, "cpu", torch_backend)
    correction = torch.randn(12) if sigmoid else None
    routing = Routing(3, normalised, sigmoid, correction, groups=4, kept_groups=2, scale=2.5)
    logits = torch.randn(40, 12)
    chosen, shares = route(logits, routing)
    for row in range(40):
        scores = torch.sigmoid(logits[row]) if sigmoid else torch.softmax(logits[row], -1)
        wanted = scores if correction is None else scores + correction
        groups = wanted.view(4, 3).sort(descending=True).values
        worth = groups[:, 0] if correction is None else groups[:, 0] + groups[:, 1]
        kept = sorted(range(4), key=lambda g: -float(worth[g]))[:2]
        best = sorted((i for i in range(12) if i // 3 in kept), key=lambda i: -float(wanted[i]))[:3]
        assert chosen[row].tolist() == best
        expected = scores[best] / scores[best].sum() if normalised else scores[best]
        torch.testing.assert_close(shares[row], expected * 2.5)
    empty = route(logits[:0], routing)
    assert empty[0].shape == empty[1].shape == (0, 3)


def test_int8_caches_are_refused_before_weights_are_read(third: Path) -> None:
    config = PrefillWorkerConfig(model="m", kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="auto or fp8 for a model with latent attention"):
        LoadedModel.load(files_of(third), config)
