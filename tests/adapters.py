"""Random adapters in PEFT's layout, and the base model with one merged into its weights: what each must answer like."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
ALL = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SPREAD = 0.5
"""Of an adapter's change beside the weights: large enough that answers differ."""


def make_adapter(
    folder: Path,
    base: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    modules: Sequence[str] = ALL,
    layers: Sequence[int] | None = None,
    spread: float = SPREAD,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """Writes an adapter of random weights for the model in `base`; `fields` are others of its configuration."""
    folder.mkdir(parents=True)
    weights = _weights(base)
    config = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base", "bias": "none"},
        **{"r": rank, "lora_alpha": 2 * rank, "use_rslora": False, "use_dora": False, "modules_to_save": None},
        **{"target_modules": sorted({module.rpartition(".")[2] for module in modules})},
        **{"rank_pattern": {}, "alpha_pattern": {}, "fan_in_fan_out": False, "init_lora_weights": True},
        **fields,
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        layer, _, part = module.removeprefix("model.layers.").partition(".")
        if part not in modules or (layers is not None and int(layer) not in layers):
            continue
        rows, columns = weight.shape
        of_module = rank_of(config, module)
        size = spread * float(weight.std()) / (of_module**0.5 * scale_of(config, module))
        for which, shape, factor in (("A", (of_module, columns), 1.0), ("B", (rows, of_module), size)):
            values = torch.randn(shape, generator=generator) * factor
            tensors[f"base_model.model.{module}.lora_{which}.weight"] = values.to(dtype).contiguous()
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge(folder: Path, base: Path, adapter: Path) -> Path:
    """Writes the base model with W + scale * B A in place of each W that the adapter changes."""
    shutil.copytree(base, folder)
    weights, changes = _weights(base), load_file(str(adapter / "adapter_model.safetensors"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name in [name for name in changes if ".lora_A." in name]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        product = changes[name.replace(".lora_A.", ".lora_B.")].double() @ changes[name].double()
        key = f"{module}.weight"
        weights[key] = (weights[key].double() + scale_of(config, module) * product).to(weights[key].dtype)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def rank_of(config: Mapping[str, Any], module: str) -> int:
    """By names without regular expressions: the module's last name, or all of it."""
    return int(_of(config["rank_pattern"], module, config["r"]))


def scale_of(config: Mapping[str, Any], module: str) -> float:
    rank, alpha = rank_of(config, module), _of(config["alpha_pattern"], module, config["lora_alpha"])
    return float(alpha / (math.sqrt(rank) if config["use_rslora"] else rank))


def _of(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for name, value in pattern.items() if module == name or module.endswith(f".{name}")), default)


def _weights(base: Path) -> dict[str, Tensor]:
    return {
        name: tensor for path in sorted(base.glob("*.safetensors")) for name, tensor in load_file(str(path)).items()
    }
