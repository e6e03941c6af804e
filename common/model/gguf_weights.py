"""Tensors of a GGUF file under Hugging Face's names; undoes llama.cpp's changes to the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from common.gguf_format.tensors import GGUFFile
from common.model_files.config import ModelConfig
from kernels import QuantisedWeight

TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_factors": "rope_freqs.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


class GGUFWeights:
    """A `WeightSource` over one GGUF file. Gemma's norm weights are stored with the one already added."""

    norm_offset = 0.0

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.file, self.config = file, config
        self.label = str(file.path)

    def has(self, name: str) -> bool:
        return self._stored(name) in self.file

    def read(self, name: str) -> Tensor:
        tensor = torch.from_numpy(self.file.read(self._stored(name)))
        heads = self._interleaved_heads(name)
        return tensor[_from_interleaved(tensor.shape[0], heads)] if heads else tensor

    def read_quantised(self, name: str, *, floats: bool = False) -> QuantisedWeight | None:
        blocks = self.file.quantised(self._stored(name))
        if blocks is None:
            return None
        arrays = (blocks.numbers, blocks.scale, blocks.offset, blocks.steps, blocks.offset_steps)
        numbers, scale, *rest = (None if array is None else torch.from_numpy(array) for array in arrays)
        assert numbers is not None and scale is not None
        weight = QuantisedWeight(blocks.bits, blocks.group, numbers, scale, *rest)
        heads = self._interleaved_heads(name)
        return weight.rows(_from_interleaved(weight.shape[0], heads)) if heads else weight

    def is_quantised(self, name: str) -> bool:
        return self.file.is_quantised(self._stored(name))

    @property
    def has_quantised(self) -> bool:
        return self.file.has_quantised

    def _interleaved_heads(self, name: str) -> int:
        """How many heads llama.cpp has reordered the rows of; 0 for none."""
        if self.config.model_type != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return 0
        return self.config.num_heads if "q_proj" in name else self.config.num_kv_heads

    def _stored(self, name: str) -> str:
        if name in TOP:
            return TOP[name]
        _, _, index, rest = name.split(".", 3)
        part, _, suffix = rest.rpartition(".")
        norms = GEMMA_NORMS if self.config.family == "gemma" else LLAMA_NORMS
        return f"blk.{index}.{norms.get(part) or LAYER[part]}.{suffix}"


def _from_interleaved(rows: int, heads: int) -> Tensor:
    """The rows of each head, int64 [rows], from llama.cpp's order (pairs adjacent) to that of rotated halves."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
