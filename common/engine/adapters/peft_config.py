"""Reader of PEFT's `adapter_config.json`: ranks, scales and unsupported features. Does not import torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from common.engine.adapters.module_patterns import ModulePatterns
from common.errors import ModelError
from common.machine import read_regular_file

V = TypeVar("V")
CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1024 * 1024
"""Maximum size of a configuration, which usually has a few KiB."""
MAX_PATTERNS = 1024
"""Maximum number of module names with a separate rank or alpha."""
SUPPORTED = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj"
UNCHANGED_BASE = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that do not change the base model's weights."""
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "bias": ((None, "none"), "biases of adapters are not supported: train with bias none"),
    "lora_bias": ((None, False), "biases of adapters are not supported: train without lora_bias"),
    "use_dora": ((None, False), "DoRA is not supported: train without use_dora"),
    "modules_to_save": ((None, []), "modules that are trained whole are not supported: train without modules_to_save"),
    "trainable_token_indices": ((None, [], {}), "trained embeddings are not supported"),
    "fan_in_fan_out": ((None, False), "transposed weights are not supported"),
    "use_qalora": ((None, False), "QALoRA is not supported"),
    "alora_invocation_tokens": ((None,), "adapters that an invocation turns on (aLoRA) are not supported"),
    "layer_replication": ((None,), "replicated layers are not supported"),
    "target_parameters": ((None, []), "adapters of individual parameters, such as experts, are not supported"),
    "init_lora_weights": (
        UNCHANGED_BASE,
        "adapters that modify the base model's weights at initialisation are not supported: convert it with PEFT's "
        "path_initial_model_for_weight_conversion",
    ),
}
"""Supported values by field, and the error message for other values."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Ranks and scales of an adapter's modules."""

    path: Path
    rank: int
    alpha: float
    rank_stabilised: bool = False
    rank_pattern: ModulePatterns[int] = field(default_factory=lambda: ModulePatterns({}))
    alpha_pattern: ModulePatterns[float] = field(default_factory=lambda: ModulePatterns({}))

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return the rank and the scale of a module such as "model.layers.0.self_attn.q_proj".

        The scale is alpha / r, or alpha / sqrt(r) if rank-stabilised (Kalajdzievski 2023). Raises ModelError.
        """
        try:
            rank = self.rank_pattern.value(module, self.rank)
            alpha = self.alpha_pattern.value(module, self.alpha)
        except ValueError as error:
            raise ModelError(f"{self.path}: rank_pattern or alpha_pattern: {error}") from error
        return rank, alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def read_peft_config(folder: Path, max_rank: int) -> PeftConfig:
    """Read and check the file in `folder`. Raises ModelError, with the field and supported values, if not supported."""
    path = folder / CONFIG_NAME
    fields = _fields(path)
    if (kind := fields.get("peft_type", "LORA")) != "LORA":
        raise ModelError(f"{path}: unsupported peft_type {kind!r}: must be LORA")
    for name, (taken, why) in REFUSED.items():
        if name in fields and not any(fields[name] is one or fields[name] == one for one in taken):
            raise ModelError(f"{path}: {name} is {_shown(fields[name])}: {why}")
    config = PeftConfig(
        path,
        _rank(path, "r", fields.get("r"), max_rank),
        _alpha(path, "lora_alpha", fields.get("lora_alpha", fields.get("r"))),
        fields.get("use_rslora") is True,
        _patterns(path, fields, "rank_pattern", lambda value: _rank(path, "rank_pattern", value, max_rank)),
        _patterns(path, fields, "alpha_pattern", lambda value: _alpha(path, "alpha_pattern", value)),
    )
    targets = fields.get("target_modules")
    for target in targets if isinstance(targets, list) else ():
        if str(target).rpartition(".")[2] in ("embed_tokens", "lm_head"):
            raise ModelError(f"{path}: target_modules has {_shown(target)}: only {SUPPORTED} are supported")
    return config


def _fields(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(read_regular_file(path, MAX_CONFIG_BYTES))
    except OSError as error:
        raise ModelError(f"cannot read {path} ({error.strerror}): must be in a folder in PEFT's layout") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{path} must contain a JSON object")
    return fields


def _patterns(path: Path, fields: Mapping[str, Any], name: str, checked: Callable[[Any], V]) -> ModulePatterns[V]:
    patterns = fields.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise ModelError(f"{path}: {name} must be an object of at most {MAX_PATTERNS:,} names")
    try:
        return ModulePatterns({pattern: checked(value) for pattern, value in patterns.items()})
    except ValueError as error:
        raise ModelError(f"{path}: {name}: {error}") from error


def _rank(path: Path, name: str, value: object, max_rank: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{path}: invalid {name} {_shown(value)}: must be a positive integer")
    if value > max_rank:
        shown = _shown(value)
        raise ModelError(f"{path}: invalid {name} {shown}: the maximum is {max_rank} (--max-lora-rank)")
    return value


def _alpha(path: Path, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ModelError(f"{path}: invalid {name} {_shown(value)}: must be a finite number")
    return float(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
