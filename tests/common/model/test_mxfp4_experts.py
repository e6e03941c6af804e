"""gpt-oss as it is published, with experts of 4-bit floats, beside transformers and the same numbers in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from common.weight_formats.mxfp4 import decode_mxfp4

from ...families import CASES
from .generation import Pool, load, prompt, random_checkpoint, transformers_greedy, transformers_model


def test_tokens_equal_those_of_the_dense_model(tmp_path: Path) -> None:
    family, options = CASES["gpt-oss"]
    dense = random_checkpoint(tmp_path / "dense", family, **options)
    held = shutil.copytree(dense, tmp_path / "held")
    source, plain, packed = torch.Generator().manual_seed(5), {}, {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            plain[name] = packed[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=source, dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts, outputs, inputs // 32), generator=source, dtype=torch.uint8)
        plain[name] = decode_mxfp4(blocks, scales).transpose(1, 2).contiguous()
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    save_file(packed, held / "model.safetensors", {"format": "pt"})
    config = json.loads((held / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (held / "config.json").write_text(json.dumps(config))
    tokens, _ = transformers_greedy(transformers_model(dense), prompt(60), 20)
    assert len(set(tokens)) > 4
    assert Pool(load(held)).greedy(prompt(60), 20, chunk=16) == tokens
