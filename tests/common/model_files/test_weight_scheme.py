"""Quantisation configurations as vendors write them: what is read, and what is refused, by name.

The fields are quoted from the publishers' files on Hugging Face.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelError
from common.model_files import KVScheme, WeightScheme, read_kv_scheme, read_weight_scheme

from .test_published import Fields, written


def compressed(format: str, *, ignore: list[str] | None = None, kv: Fields | None = None, **weights: Any) -> Fields:
    """A configuration of llm-compressor."""
    given = {
        **{"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "observer": "minmax"},
        **{"observer_kwargs": {}, "symmetric": True, **weights},
    }
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": given}
    return {
        **{
            "config_groups": {"group_0": group},
            "format": format,
            "global_compression_ratio": None,
            "sparsity_config": {},
        },
        **{"ignore": ignore or ["lm_head"], "kv_cache_scheme": kv, "quant_method": "compressed-tensors"},
        **{"quantization_status": "compressed", "transform_config": {}, "version": "0.12.3"},
    }


def modelopt(algorithm: str, bits: int, **more: Any) -> Fields:
    """A `quantization_config` of ModelOpt."""
    numbers = {"dynamic": False, "num_bits": bits, "type": "float"}
    group = {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}
    return {
        **{"config_groups": {"group_0": group}, "ignore": ["lm_head", "model.layers.0.self_attn*"]},
        **{"quant_algo": algorithm, "producer": {"name": "modelopt", "version": "0.41.0"}, **more},
    }


FP8 = {"num_bits": 8, "type": "float"}
BLOCKS = {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [128, 128]}
STATIC = {"activation_scheme": "static", "quant_method": "fp8"}
KV_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
BY_BLOCK = WeightScheme("fp8", block=(128, 128))
GPTQ = {"bits": 4, "desc_act": False, "group_size": 128, "quant_method": "gptq", "sym": True, "true_sequential": True}
AWQ = {"bits": 4, "group_size": 128, "quant_method": "awq", "zero_point": True}

QUANTISED: Mapping[str, tuple[Fields, WeightScheme]] = {
    "DeepSeek-V3": (BLOCKS | {"fmt": "e4m3"}, BY_BLOCK),
    "DeepSeek-V3.1": (BLOCKS | {"fmt": "e4m3", "scale_fmt": "ue8m0"}, BY_BLOCK),
    "MiniMax-M2": (
        BLOCKS | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        BY_BLOCK,
    ),
    "Qwen3-30B-A3B-FP8": (BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}, BY_BLOCK),
    "Devstral-Small-2-24B": (
        STATIC | {"dequantize": False, "modules_to_not_convert": ["lm_head"], "weight_block_size": None},
        WeightScheme("fp8"),
    ),
    "AutoFP8": (STATIC | {"ignored_layers": ["lm_head"], "kv_cache_scheme": "static"}, WeightScheme("fp8")),
    "Llama-3.1-405B-Instruct-FP8": (
        {"activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"], "quant_method": "fbgemm_fp8"},
        WeightScheme("fp8"),
    ),
    "FP8-dynamic": (
        compressed("float-quantized", **FP8, strategy="channel", ignore=["re:.*lm_head", "re:vision_tower.*"]),
        WeightScheme("compressed-tensors"),
    ),
    "FP8-block": (
        compressed("float-quantized", **FP8, strategy="block") | {"ignore": ["re:.*mlp.gate$"]},
        WeightScheme("compressed-tensors", block=(128, 128)),
    ),
    "Kimi-K2.5": (
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", ignore=["re:.*self_attn.*"]),
        WeightScheme("compressed-tensors"),
    ),
    "quantized.w8a8": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        WeightScheme("compressed-tensors"),
    ),
    "Qwen2.5-72B-Instruct-AWQ": (AWQ | {"modules_to_not_convert": None, "version": "gemm"}, WeightScheme("awq")),
    "Mixtral-8x7B-AWQ": (AWQ | {"modules_to_not_convert": ["gate"], "version": "gemm"}, WeightScheme("awq")),
    "Qwen2.5-7B-Instruct-GPTQ-Int4": (
        GPTQ | {"exllama_config": {"version": 1}, "modules_in_block_to_quantize": None, "use_exllama": True},
        WeightScheme("gptq", zero_shift=1),
    ),
    "GPTQModel": (
        GPTQ | {"checkpoint_format": "gptq", "dynamic": {"-:.*gate$": {}}, "lm_head": False, "pack_dtype": "int32"},
        WeightScheme("gptq", zero_shift=1),
    ),
    "GPTQModel v2": (GPTQ | {"format": "gptq_v2", "meta": {"v2": True}}, WeightScheme("gptq")),
    "gpt-oss-20b": (
        {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"], "quant_method": "mxfp4"},
        WeightScheme("mxfp4"),
    ),
    "Qwen3-32B-FP8-Static-PerTensor": (modelopt("FP8", 8, kv_cache_scheme="FP8"), WeightScheme("fp8")),
    "ModelOpt FP8": (modelopt("FP8", 8, kv_cache_scheme=KV_FP8, quant_method="modelopt"), WeightScheme("fp8")),
}
QUANTISED["FP8-block"][0]["config_groups"]["group_0"]["weights"]["block_structure"] = [128, 128]


@pytest.mark.parametrize("name", QUANTISED)
def test_a_published_quantization_config(tmp_path: Path, name: str) -> None:
    fields, expected = QUANTISED[name]
    assert read_weight_scheme(written(tmp_path, {"quantization_config": fields})) == expected
    assert read_weight_scheme(written(tmp_path, {"text_config": {"quantization_config": fields}})) == expected


METHODS = "gptq, awq, compressed-tensors, fp8, fbgemm_fp8, modelopt, mxfp4"
REFUSED: Mapping[str, tuple[Fields, str]] = {
    "Kimi-K2.5-NVFP4": (modelopt("NVFP4", 4, quant_method="modelopt"), "quant_algo is 'NVFP4'.*FP8, FP8_PER_CHANNEL"),
    "MiniMax-M3-NVFP4": (
        {"quant_algo": "MIXED_PRECISION", "exclude_modules": ["lm_head"], "quant_method": "modelopt"}
        | {"quantized_layers": {"language_model.model.layers.0.mlp.down_proj": {"quant_algo": "MXFP8"}}},
        "quant_algo is 'MIXED_PRECISION'",
    ),
    "ModelOpt block-wise": (modelopt("fp8_pb_wo", 8, quant_method="modelopt"), "quant_algo is 'fp8_pb_wo'"),
    "MiniMax-M3-MXFP8": (
        {"activation_scheme": "dynamic", "quant_method": "mxfp8", "weight_block_size": [1, 32]}
        | {"ignored_layers": ["lm_head", "model.embed_tokens"]},
        f"quant_method is 'mxfp8'.*{METHODS}",
    ),
    "llm-compressor NVFP4": (
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group"),
        "format is 'nvfp4-pack-quantized'.*pack-quantized",
    ),
    "Kimi-K3": (
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group"),
        "format is 'mxfp4-pack-quantized'",
    ),
    "bnb-4bit": (
        {"bnb_4bit_quant_type": "nf4", "load_in_4bit": True, "quant_method": "bitsandbytes"}
        | {"llm_int8_skip_modules": ["lm_head"], "bnb_4bit_compute_dtype": "bfloat16"},
        f"quant_method is 'bitsandbytes'.*{METHODS}",
    ),
    "int4-AutoRound": (
        {"bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq", "quant_method": "auto-round"},
        "quant_method is 'auto-round'",
    ),
    "Quark": (
        {"quant_method": "quark", "exclude": ["lm_head"], "export": {"pack_method": "reorder"}}
        | {"global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}},
        "quant_method is 'quark'",
    ),
    "TorchAO": ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, "'torchao'"),
    "MLX": ({"group_size": 64, "bits": 4}, "quant_method is None"),
    "AWQ of transformers 5": (AWQ | {"format": "gemv"}, "format is 'gemv'.*gemm"),
    "GPTQ of transformers 5": (GPTQ | {"format": "marlin"}, "format is 'marlin'.*gptq, gptq_v2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_format_is_refused_by_name(tmp_path: Path, name: str) -> None:
    fields, message = REFUSED[name]
    holder = "quantization" if name == "MLX" else "quantization_config"
    with pytest.raises(ModelError, match=f"config.json: {holder}.*{message}"):
        read_weight_scheme(written(tmp_path, {holder: fields}))


def sidecar(**fields: Any) -> Fields:
    return {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": fields}


def test_modelopt_describes_its_format_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Llama-3.1-70B-Instruct-FP8 and DeepSeek-V3.1-NVFP4 of NVIDIA have no `quantization_config`."""
    fp8 = sidecar(quant_algo="FP8", kv_cache_quant_algo="FP8", exclude_modules=["lm_head"])
    path = written(tmp_path, {}, hf_quant_config=fp8)
    assert read_weight_scheme(path) == WeightScheme("fp8") and read_kv_scheme(path) == KVScheme(needs_scales=False)
    path = written(tmp_path, {}, hf_quant_config=sidecar(quant_algo=None, kv_cache_quant_algo="FP8"))
    assert read_weight_scheme(path) is None and read_kv_scheme(path) == KVScheme(needs_scales=False)
    nvfp4 = sidecar(quant_algo="NVFP4", kv_cache_quant_algo="FP8", group_size=16, exclude_modules=["lm_head"])
    for fields in ({}, {"quantization_config": BLOCKS}):
        with pytest.raises(ModelError, match="hf_quant_config.json: quantization.quant_algo is 'NVFP4'"):
            read_weight_scheme(written(tmp_path, fields, hf_quant_config=nvfp4))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (compressed("float-quantized", **FP8, strategy="tensor", kv={**KV_FP8, "strategy": "tensor"}), KVScheme()),
        (compressed("float-quantized", **FP8, strategy="tensor"), None),
        (STATIC | {"kv_cache_scheme": "static"}, None),
        (modelopt("FP8", 8, kv_cache_scheme="FP8"), KVScheme(needs_scales=False)),
        (modelopt("FP8", 8, kv_cache_scheme=KV_FP8, quant_method="modelopt"), KVScheme(needs_scales=False)),
        (modelopt("FP8", 8, kv_cache_quant_algo="NVFP4"), KVScheme("algorithm 'NVFP4'", needs_scales=False)),
        (modelopt("FP8", 8, kv_cache_quant_algo=None), None),
    ],
)
def test_a_published_kv_scheme(tmp_path: Path, fields: Fields, expected: KVScheme | None) -> None:
    assert read_kv_scheme(written(tmp_path, {"quantization_config": fields})) == expected


@pytest.mark.slow
def test_configurations_that_transformers_writes_are_read(tmp_path: Path) -> None:
    from transformers import AwqConfig, FbgemmFp8Config, FineGrainedFP8Config, GPTQConfig, Mxfp4Config

    configs = [
        *((AwqConfig(bits=4), WeightScheme("awq")), (GPTQConfig(bits=4), WeightScheme("gptq", zero_shift=1))),
        *((GPTQConfig(bits=8, format="gptq_v2"), WeightScheme("gptq")), (FineGrainedFP8Config(), BY_BLOCK)),
        *((FbgemmFp8Config(), WeightScheme("fp8")), (Mxfp4Config(), WeightScheme("mxfp4"))),
    ]
    for config, expected in configs:
        fields = json.loads(config.to_json_string(use_diff=False))
        assert read_weight_scheme(written(tmp_path, {"quantization_config": fields})) == expected
