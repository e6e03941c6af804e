"""A random gpt-oss as it is published, with experts of 4-bit floats, and the same numbers in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from common.engine.weights.formats.mxfp4 import MicroscaledFloats

from ....families import CASES
from .generation import random_checkpoint


def write_mxfp4(folder: Path, **more: int) -> tuple[Path, Path]:
    """The folders of the model in floats, and in blocks and scales."""
    family, options = CASES["gpt-oss"]
    dense = random_checkpoint(folder / "dense", family, **options | more)
    held = shutil.copytree(dense, folder / "held")
    source, plain, packed = torch.Generator().manual_seed(5), {}, {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            plain[name] = packed[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=source, dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts, outputs, inputs // 32), generator=source, dtype=torch.uint8)
        plain[name] = MicroscaledFloats(blocks, scales).dense().transpose(1, 2).contiguous()
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    save_file(packed, held / "model.safetensors", {"format": "pt"})
    config = json.loads((held / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (held / "config.json").write_text(json.dumps(config))
    return dense, held
