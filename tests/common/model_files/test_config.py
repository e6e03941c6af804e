"""What a config.json leaves out means what transformers' configuration class of that model makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelError
from common.model_files.config import ModelConfig, from_hf
from common.model_files.families import FAMILIES, WRAPPERS

from ...families import CASES
from ..engine.models.generation import SIZES

OF_OTHER_NAME = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers does not have, and the one whose configuration they share."""
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3}
NEEDED = {"dots1": EXPERTS, "deepseek_v2": EXPERTS}
"""Sizes that have no default."""


def transformers_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the language model with every field filled in by transformers."""
    from transformers import CONFIG_MAPPING

    name = fields["model_type"]
    kind = CONFIG_MAPPING[OF_OTHER_NAME.get(name, name)]
    whole = json.loads(json.dumps(kind.from_dict(json.loads(json.dumps(fields))).to_dict()))
    text: dict[str, Any] = whole.get("text_config", whole) if name in WRAPPERS else whole
    return text if name not in OF_OTHER_NAME else text | {"model_type": name}


def published(model_type: str) -> Iterator[dict[str, Any]]:
    """Configurations of a model type: the least there can be, and tiny ones, in the layouts of transformers 5 and 4."""
    from transformers import CONFIG_MAPPING

    yield {"model_type": model_type} | NEEDED.get(model_type, {})
    kind = CONFIG_MAPPING[OF_OTHER_NAME.get(model_type, model_type)]
    of_type = [options for family, options in CASES.values() if kind.__name__ == f"{family}Config"]
    for options in of_type or [{}]:
        fields = json.loads(json.dumps(kind(**SIZES | options).to_dict())) | {"model_type": model_type}
        yield fields
        rope = fields["rope_parameters"]
        if "rope_theta" in rope:  # as transformers 4 wrote it
            flat = {name: value for name, value in fields.items() if name != "rope_parameters"}
            scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
            yield flat | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def read(fields: dict[str, Any], path: Path) -> ModelConfig | str:
    path.write_text(json.dumps(fields))
    try:
        config = from_hf(path)
    except ModelError as error:
        return str(error)
    # Names only which layers of the file are left out; transformers' classes count one where none is named.
    return replace(config, extra_layers=0)


def without_one(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The configuration as it is, without each of its fields, and with each of them null."""
    yield "as it is", fields
    for name in sorted(fields.keys() - {"model_type"}):
        yield f"without {name}", {key: value for key, value in fields.items() if key != name}
        yield f"{name} null", fields | {name: None}


@pytest.mark.slow_except("qwen3", "gpt_oss")
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_field_that_is_left_out_or_null_means_what_transformers_makes_of_it(tmp_path: Path, model_type: str) -> None:
    compared = 0
    least, first, *others = published(model_type)
    for what, given in (("least", least), *without_one(first), *(("other", one) for one in others)):
        try:
            whole = transformers_fields(given)
        except Exception:  # transformers accepts no such configuration
            continue
        assert read(given, tmp_path / "a.json") == read(whole, tmp_path / "a.json"), what
        compared += 1
    assert compared > 40


@pytest.mark.parametrize(
    ("wrapper", "text"),
    [
        ("gemma3", {"model_type": "gemma3_text"}),
        ("mistral3", {"model_type": "ministral3"}),
        ("mistral3", {"model_type": "mistral"}),
        ("qwen2_vl", {}),
        ("qwen2_5_vl", {}),
        ("qwen3_vl", {}),
        ("qwen3_vl_moe", {}),
        ("internvl", {"model_type": "qwen3"}),
    ],
)
def test_the_language_model_of_one_that_sees_has_the_defaults_of_its_own_class(
    tmp_path: Path, wrapper: str, text: dict[str, Any]
) -> None:
    """Without sizes, with one, and in one object with the whole as transformers 4 wrote it."""
    from transformers import CONFIG_MAPPING

    layouts: list[dict[str, Any]] = [{"text_config": text}, {"text_config": text | {"num_hidden_layers": 3}}]
    if wrapper in ("qwen2_vl", "qwen2_5_vl"):
        layouts += [{}, {"num_hidden_layers": 3, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}]
    for layout in layouts:
        fields = {"model_type": wrapper} | layout
        whole = CONFIG_MAPPING[wrapper].from_dict(json.loads(json.dumps(fields))).text_config.to_dict()
        found, wanted = (read(one, tmp_path / "config.json") for one in (fields, {**fields, "text_config": whole}))
        assert isinstance(found, ModelConfig) and isinstance(wanted, ModelConfig)
        assert replace(found, model_type="", tie_embeddings=None) == replace(wanted, model_type="", tie_embeddings=None)


GEMMA3 = {
    "4b": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    "12b": {
        **{"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48},
        **{"num_attention_heads": 16, "num_key_value_heads": 8},
    },
    "27b": {
        **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "head_dim": 128},
        **{"num_attention_heads": 32, "num_key_value_heads": 16, "query_pre_attn_scalar": 168},
    },
}


@pytest.mark.parametrize("size", GEMMA3)
def test_gemma_3_as_published_names_neither_vocabulary_nor_context(tmp_path: Path, size: str) -> None:
    text = {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text | GEMMA3[size]}))
    config = from_hf(path)
    assert (config.vocab_size, config.max_model_len) == (262208, 131072)
    assert config.num_heads == GEMMA3[size].get("num_attention_heads", 8)
    assert config.layer_windows[:6] == (1024,) * 5 + (0,) and config.layer_ropes[5].factor == 8.0
