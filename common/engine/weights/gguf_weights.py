"""Tensors of a GGUF file under Hugging Face names. Reverts llama.cpp's changes to the weights."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import torch
from torch import Tensor

from common.engine.weights.formats.mxfp4 import microscaled
from common.engine.weights.formats.stored import StoredForm, StoredTensor
from common.model_files import ModelConfig
from common.model_files.gguf import BITS, GROUP, GGUFFile, unpack_mxfp4
from kernels import QuantisedWeight

TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_factors": "rope_freqs.weight",
}
LAYER = {
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
EXPERT_PARTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


class Stored(NamedTuple):
    """Name of a tensor in the file, and the index within a stack of experts' tensors."""

    name: str
    part: int | None = None


class GGUFWeights:
    """A `WeightSource` over one GGUF file. Gemma's norm weights are stored with one already added."""

    norm_offset = 0.0

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.file, self.config = file, config
        self.label = str(file.path)
        family = config.family
        assert family.gguf is not None
        self._interleaves, experts = family.gguf.interleaves, family.experts
        norms = {name: family.gguf.norms[place] for place, name in family.norms.items()}
        self._layer = LAYER | {experts.router: "ffn_gate_inp"} | norms
        self._expert = re.compile(rf"{re.escape(experts.module)}\.(\d+)\.(\w+)")
        self._expert_parts = dict(zip((*experts.gates, experts.down), EXPERT_PARTS, strict=True))
        self._others = {  # names without GGUF's suffixes
            "self_attn.sinks": "attn_sinks.weight",
            f"{experts.correction or experts.router}.e_score_correction_bias": "exp_probs_b.bias",
        }

    def has(self, name: str) -> bool:
        stored = self._stored(name)
        return stored is not None and stored.name in self.file

    def read(self, name: str) -> Tensor:
        stored = self._place(name)
        if name.endswith("kv_b_proj.weight") and stored.name not in self.file:
            return self._joined_latents(stored.name)
        tensor = torch.from_numpy(self.file.read(*stored))
        if name.endswith("shared_expert_gate.weight"):
            return tensor.view(1, -1)
        heads = self._interleaved_heads(name)
        return tensor[_from_interleaved(tensor.shape[0], heads)] if heads else tensor

    def read_quantised(self, name: str, *, floats: bool = False) -> QuantisedWeight | None:
        stored = self._place(name)
        if self.file.is_mxfp4(stored.name):
            if not floats:
                return None
            codes, exponents = unpack_mxfp4(self.file.raw(*stored))
            return microscaled(torch.from_numpy(codes), torch.from_numpy(exponents))
        blocks = self.file.quantised(*stored)
        if blocks is None:
            return None
        arrays = (blocks.numbers, blocks.scale, blocks.offset, blocks.steps, blocks.offset_steps)
        numbers, scale, *rest = (None if array is None else torch.from_numpy(array) for array in arrays)
        assert numbers is not None and scale is not None
        weight = QuantisedWeight(blocks.bits, blocks.group, numbers, scale, *rest)
        heads = self._interleaved_heads(name)
        return weight.rows(_from_interleaved(weight.shape[0], heads)) if heads else weight

    def is_quantised(self, name: str) -> bool:
        stored = self._stored(name)
        return stored is not None and stored.name in self.file and self.file.is_quantised(stored.name)

    @property
    def has_quantised(self) -> bool:
        return self.file.has_quantised

    def stored(self) -> list[StoredTensor]:
        return [self._as_stored(name) for name in self.file.names]

    def stored_bytes(self, name: str) -> int:
        stored = self._stored(name)
        if stored is None or stored.name not in self.file:
            return 0
        num_parts = 1 if stored.part is None else self.file.shape(stored.name)[0]
        return self.file.num_bytes(stored.name) // num_parts

    def _as_stored(self, name: str) -> StoredTensor:
        """Describe a tensor. Floats are read as a float32 copy, whatever their type in the file."""
        kind, shape, size = self.file.kind(name), self.file.shape(name), self.file.num_bytes(name)
        count, is_matrix = math.prod(shape), len(shape) > 1
        if kind in BITS:
            group = 0 if kind.name.endswith("K") else GROUP
            return StoredTensor(name, size, count, BITS[kind], StoredForm.INTEGERS, group, is_matrix=is_matrix)
        bits = 8 * size // count
        if self.file.is_mxfp4(name):
            return StoredTensor(name, size, count, bits, StoredForm.SMALL_FLOATS, is_matrix=is_matrix)
        form = StoredForm.OTHER if self.file.is_quantised(name) else StoredForm.FLOATS
        return StoredTensor(name, size, count, bits, form, is_matrix=is_matrix)

    def _joined_latents(self, name: str) -> Tensor:
        """Join the key and value projections of latents, [heads * (nope + value), rank], stored separately.

        The key part is stored as [heads, rank, nope], the value part as [heads, value, rank].
        """
        keys, values = (
            torch.from_numpy(self.file.read(name.replace("attn_kv_b", part))) for part in ("attn_k_b", "attn_v_b")
        )
        return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)

    def _interleaved_heads(self, name: str) -> int:
        """Return the number of heads whose rows llama.cpp has reordered; 0 for none."""
        if not self._interleaves or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return 0
        return self.config.num_heads if "q_proj" in name else self.config.num_kv_heads

    def _place(self, name: str) -> Stored:
        """Return where the tensor is stored. Unknown names are kept, so that errors report them."""
        return self._stored(name) or Stored(name)

    def _stored(self, name: str) -> Stored | None:
        """Return where the tensor is stored; None if GGUF files do not have it."""
        if name in TOP:
            return Stored(TOP[name])
        _, _, index, rest = name.split(".", 3)
        if rest in self._others:
            return Stored(f"blk.{index}.{self._others[rest]}")
        part, _, suffix = rest.rpartition(".")
        if (expert := self._expert.fullmatch(part)) is not None:
            return Stored(f"blk.{index}.{self._expert_parts[expert[2]]}.{suffix}", int(expert[1]))
        found = self._layer.get(part)
        return None if found is None else Stored(f"blk.{index}.{found}.{suffix}")


def _from_interleaved(rows: int, heads: int) -> Tensor:
    """Return the row order, int64 [rows], from llama.cpp's order (adjacent pairs) to rotated halves."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
