"""A Llama as GPTQ, AWQ, compressed-tensors and fp8 checkpoints, rounded to nearest without calibration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.compare.weights import MATRICES, NORMS, hf_config
from common.engine.models.load import open_model
from common.errors import ModelError
from common.model_files.files import ModelFiles
from common.model_files.resolve import resolve_model

GROUP: Final = 64
BLOCK: Final = 128
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
Parts = dict[str, Tensor]


def pack(numbers: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """0 .. 15 [rows, columns] to int32 [rows, columns / 8]; field i of a word holds the number `order[i]`."""
    eights = numbers.long().view(numbers.shape[0], -1, 8)[..., list(order)]
    words = (eights << (4 * torch.arange(8))).sum(-1)
    return (words - (words >= 2**31) * 2**32).to(torch.int32)


def rounded(weight: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers 0 .. 15 [out, in], float16 scales and zero points [out, in / GROUP]. ModelError without whole groups."""
    if weight.shape[1] % GROUP:
        raise ModelError(f"a matrix has {weight.shape[1]} inputs; these checkpoints have groups of {GROUP}")
    parts = weight.view(weight.shape[0], -1, GROUP)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = (torch.maximum(high / 7, -low / 8) if symmetric else (high - low) / 15).clamp(min=1e-6).half()
    wide = scale.float()
    zero = torch.full_like(wide, 8) if symmetric else (-low / wide).round().clamp(0, 15)
    numbers = (parts / wide.unsqueeze(-1)).round().add_(zero.unsqueeze(-1)).clamp_(0, 15)
    return numbers.view(weight.shape), scale, zero


def gptq(weight: Tensor) -> Parts:
    numbers, scale, zero = rounded(weight, symmetric=True)
    order = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    packed, zeros = pack(numbers).t().contiguous(), pack(zero.t() - 1)
    return {"qweight": packed, "qzeros": zeros, "scales": scale.t().contiguous(), "g_idx": order}


def awq(weight: Tensor) -> Parts:
    numbers, scale, zero = rounded(weight, symmetric=False)
    packed, zeros = pack(numbers.t().contiguous(), AWQ_ORDER), pack(zero.t().contiguous(), AWQ_ORDER)
    return {"qweight": packed, "qzeros": zeros, "scales": scale.t().contiguous()}


def w4a16(weight: Tensor) -> Parts:
    numbers, scale, _ = rounded(weight, symmetric=True)
    return {"weight_packed": pack(numbers), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def w8a8(weight: Tensor) -> Parts:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    return {"weight": (weight / scale.float()).round().clamp(-127, 127).to(torch.int8), "weight_scale": scale}


def fp8_whole(weight: Tensor) -> Parts:
    scale = weight.abs().amax().reshape(1) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def fp8_rows(weight: Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def fp8_blocks(weight: Tensor) -> Parts:
    rows, columns = weight.shape
    whole = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
    whole[:rows, :columns] = weight
    tiles = whole.view(-1, BLOCK, whole.shape[1] // BLOCK, BLOCK)
    scale = tiles.abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return {"weight": (weight / spread).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


FORMATS: Final[dict[str, tuple[Callable[[Tensor], Parts], dict[str, Any]]]] = {
    "GPTQ int4, groups of 64": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "AWQ int4, groups of 64": (awq, {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}),
    "W4A16, groups of 64": (w4a16, compressed("pack-quantized", num_bits=4, type="int", strategy="group")),
    "W8A8 by channel": (w8a8, compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "fp8 by tensor": (fp8_whole, compressed("float-quantized", num_bits=8, type="float", strategy="tensor")),
    "fp8 by channel": (fp8_rows, compressed("float-quantized", num_bits=8, type="float", strategy="channel")),
    "fp8 by block of 128": (fp8_blocks, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}),
}


def write_checkpoint(files: ModelFiles, folder: Path, format: str) -> ModelFiles:
    """The model's layers in one of FORMATS, the rest in bfloat16. ModelError for a model that is not a Llama."""
    config, source = open_model(files)
    if config.model_type != "llama":
        raise ModelError(
            f"{files.model_id} is a {config.model_type} model; these checkpoints are written of llama models"
        )
    write, described = FORMATS[format]
    folder.mkdir(parents=True)
    top = ("model.embed_tokens", "model.norm", *(() if config.tie_embeddings else ("lm_head",)))
    stored = {f"{part}.weight": source.read(f"{part}.weight").bfloat16() for part in top}
    for index in range(config.num_layers):
        for part in NORMS:
            name = f"model.layers.{index}.{part}.weight"
            stored[name] = source.read(name).bfloat16()
        for part in MATRICES:
            module = f"model.layers.{index}.{part}"
            parts = write(source.read(f"{module}.weight").float())
            stored |= {f"{module}.{name}": tensor.contiguous() for name, tensor in parts.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(config) | {"quantization_config": described}))
    shutil.copyfile(files.tokenizer, folder / "tokenizer.json")
    return resolve_model(str(folder), progress=False)
