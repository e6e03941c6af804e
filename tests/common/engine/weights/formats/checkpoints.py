"""Writes the tiny model's matrices as quantised checkpoints do, rounded to nearest, one plain loop a format.

Each format is one function: a matrix [out, in] becomes the tensors that stand for it, and what they stand for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Array = npt.NDArray[Any]
Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each field of a word holds


def pack_words(numbers: Array, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """[rows, columns] of small numbers to int32 [rows, words], the first in the lowest bits."""
    count = 32 // bits
    words = np.zeros((numbers.shape[0], -(-numbers.shape[1] // count)), dtype=np.uint32)
    for column in range(numbers.shape[1]):
        field = order.index(column % count) if order else column % count
        words[:, column // count] |= numbers[:, column].astype(np.uint32) << np.uint32(bits * field)
    return torch.from_numpy(words.view(np.int32).copy())


@dataclass(frozen=True)
class Rounded:
    """numbers 0 .. 2^bits - 1 [out, in], scale float32 and zero [out, groups], each input's group; their values."""

    numbers: Array
    scale: Array
    zero: Array
    group_of: Array

    @property
    def dense(self) -> torch.Tensor:
        shifted = self.numbers.astype(np.float32) - self.zero[:, self.group_of].astype(np.float32)
        return torch.from_numpy(shifted * self.scale[:, self.group_of])


def rounded(weight: Array, bits: int, group: int, *, symmetric: bool, shuffled: bool = False) -> Rounded:
    rows, columns = weight.shape
    group_of = np.arange(columns) // group
    if shuffled:
        group_of = np.random.default_rng(5).permutation(group_of)
    groups, top = int(group_of.max()) + 1, 2**bits - 1
    scale, zero = np.zeros((rows, groups), np.float32), np.zeros((rows, groups), np.int64)
    numbers = np.zeros((rows, columns), np.int64)
    for g in range(groups):
        part = weight[:, group_of == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        span = np.maximum(high, -low) / (2 ** (bits - 1) - 1) if symmetric else (high - low) / top
        scale[:, g] = span.astype(np.float16)
        step = scale[:, g : g + 1]
        zero[:, g] = 2 ** (bits - 1) if symmetric else np.clip(np.round(-low / step[:, 0]), 1, top)
        numbers[:, group_of == g] = np.clip(np.round(part / step) + zero[:, g : g + 1], 0, top)
    return Rounded(numbers, scale, zero, group_of)


def half(values: Array) -> torch.Tensor:
    return torch.from_numpy(values).half()


def gptq(weight: Array, bits: int, group: int, *, symmetric: bool, shuffled: bool = False, v2: bool = False) -> Any:
    made = rounded(weight, bits, group, symmetric=symmetric, shuffled=shuffled)
    tensors = {
        "qweight": torch.from_numpy(pack_words(made.numbers, bits).numpy().T.copy()),
        "qzeros": pack_words((made.zero - (0 if v2 else 1)).T, bits),
        "scales": half(made.scale.T.copy()),
        "g_idx": torch.from_numpy(made.group_of.astype(np.int32)),
    }
    return tensors, made.dense


def awq(weight: Array, group: int) -> Any:
    made = rounded(weight, 4, group, symmetric=False)
    tensors = {
        "qweight": pack_words(made.numbers.T, 4, AWQ_ORDER),
        "qzeros": pack_words(made.zero.T, 4, AWQ_ORDER),
        "scales": half(made.scale.T.copy()),
    }
    return tensors, made.dense


def packed(weight: Array, bits: int, group: int, *, symmetric: bool = True, shuffled: bool = False) -> Any:
    made = rounded(weight, bits, group or weight.shape[1], symmetric=symmetric, shuffled=shuffled)
    tensors = {
        "weight_packed": pack_words(made.numbers, bits),
        "weight_scale": half(made.scale),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy(pack_words(made.zero.T, bits).numpy().T.copy())
    if shuffled:
        tensors["weight_g_idx"] = torch.from_numpy(made.group_of.astype(np.int32))
    return tensors, made.dense


def int8(weight: Array, *, by_row: bool) -> Any:
    made = rounded(weight if by_row else weight.reshape(1, -1), 8, weight.size, symmetric=True)
    numbers = torch.from_numpy((made.numbers - 128).astype(np.int8)).view(weight.shape)
    scale = torch.from_numpy(made.scale if by_row else made.scale[0])
    return {"weight": numbers, "weight_scale": scale}, made.dense.view(weight.shape)


def float8(weight: Array, block: tuple[int, int], scale_name: str, scale_shape: str = "") -> Any:
    """A scale for each block; of size 0 a block goes from end to end."""
    rows, columns = weight.shape
    down, across = block[0] or rows, block[1] or columns
    dense, stored = np.zeros_like(weight), torch.zeros(rows, columns).to(torch.float8_e4m3fn)
    scale = torch.zeros(-(-rows // down), -(-columns // across))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = (slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across))
            scale[i, j] = float(np.abs(weight[place]).max()) / 448
            stored[place] = (torch.from_numpy(weight[place]) / scale[i, j]).to(torch.float8_e4m3fn)
            dense[place] = (stored[place].float() * scale[i, j]).numpy()
    shaped = {"scalar": scale.flatten()[0], "one": scale.flatten()}.get(scale_shape, scale)
    return {"weight": stored, scale_name: shaped}, torch.from_numpy(dense)


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"dynamic": False, "symmetric": True, **weights},
        "input_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def gptq_config(bits: int, group: int, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True, "desc_act": False, **fields}


@dataclass(frozen=True)
class Format:
    """`kept`: bits that the kernels keep as they are; 0 where they are rounded anew, to 8."""

    config: Mapping[str, Any]
    write: Callable[[Array], tuple[Tensors, torch.Tensor]]
    kept: int = 0


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float"}

FORMATS: dict[str, Format] = {
    "gptq int4": Format(gptq_config(4, 32), lambda w: gptq(w, 4, 32, symmetric=True), 4),
    "gptq int4 with zero points": Format(gptq_config(4, 32, sym=False), lambda w: gptq(w, 4, 32, symmetric=False), 4),
    "gptq int8": Format(gptq_config(8, 32), lambda w: gptq(w, 8, 32, symmetric=True), 8),
    "gptq int8 with zero points": Format(gptq_config(8, 32, sym=False), lambda w: gptq(w, 8, 32, symmetric=False)),
    "gptq v2": Format(
        gptq_config(4, 32, sym=False, checkpoint_format="gptq_v2"),
        lambda w: gptq(w, 4, 32, symmetric=False, v2=True),
        4,
    ),
    "gptq whole rows": Format(gptq_config(4, -1), lambda w: gptq(w, 4, w.shape[1], symmetric=True), 4),
    "gptq act order": Format(
        gptq_config(4, 32, desc_act=True), lambda w: gptq(w, 4, 32, symmetric=True, shuffled=True)
    ),
    "gptq cut group": Format(gptq_config(4, 48), lambda w: gptq(w, 4, 48, symmetric=True)),
    "awq": Format(AWQ_CONFIG, lambda w: awq(w, 32), 4),
    "w4a16": Format(compressed("pack-quantized", **INT4, group_size=32), lambda w: packed(w, 4, 32), 4),
    "w4a16 by channel": Format(
        compressed("pack-quantized", **INT4 | {"strategy": "channel"}), lambda w: packed(w, 4, 0), 4
    ),
    "w4a16 with zero points": Format(
        compressed("pack-quantized", **INT4, group_size=32, symmetric=False),
        lambda w: packed(w, 4, 32, symmetric=False),
        4,
    ),
    "w4a16 act order": Format(
        compressed("pack-quantized", **INT4, group_size=32, actorder="group"), lambda w: packed(w, 4, 32, shuffled=True)
    ),
    "w8a16": Format(
        compressed("pack-quantized", **INT4 | {"num_bits": 8}, group_size=32), lambda w: packed(w, 8, 32), 8
    ),
    "w8a8 by channel": Format(compressed("int-quantized", **INT8), lambda w: int8(w, by_row=True), 8),
    "w8a8 by tensor": Format(
        compressed("int-quantized", **INT8 | {"strategy": "tensor"}), lambda w: int8(w, by_row=False), 8
    ),
    "fp8 by channel": Format(
        compressed("float-quantized", **FP8, strategy="channel"), lambda w: float8(w, (1, 0), "weight_scale")
    ),
    "fp8 by tensor": Format(
        compressed("float-quantized", **FP8, strategy="tensor"), lambda w: float8(w, (0, 0), "weight_scale", "one")
    ),
    "fp8 by block": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [48, 32]},
        lambda w: float8(w, (48, 32), "weight_scale_inv"),
    ),
    "fp8 of old": Format(
        {"quant_method": "fp8", "activation_scheme": "static"}, lambda w: float8(w, (0, 0), "weight_scale", "scalar")
    ),
}


def write_checkpoint(tiny: Path, folder: Path, format: Format, *, ignored: str = "lm_head") -> Path:
    """Copies the tiny model with its layers' matrices in a format, and to FOLDER-dense with what they stand for.

    Returns the copy of floats. Modules whose names hold `ignored` stay floats.
    """
    dense = folder.with_name(f"{folder.name}-dense")
    shutil.copytree(tiny, folder)
    shutil.copytree(tiny, dense)
    stored, floats = Tensors(), Tensors()
    for name, tensor in load_file(tiny / "model.safetensors").items():
        if tensor.dim() < 2 or "embed_tokens" in name or ignored in name:
            stored[name] = floats[name] = tensor
            continue
        tensors, floats[name] = format.write(tensor.numpy())
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": value.contiguous() for part, value in tensors.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, dense / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(format.config)}))
    return dense
