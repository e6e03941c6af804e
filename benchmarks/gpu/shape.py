"""Model shapes and loads of the GPU benchmark, including DeepSeek V3's latents and Qwen3-30B-A3B's experts.

Lengths are in tokens unless noted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from common.model_files.architecture.rope import RopeConfig
from common.model_files.config import ModelConfig
from kernels import KVLayout


@dataclass(frozen=True, slots=True)
class GPUShape:
    """A Llama's sizes and the workloads to run it with."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    block_size: int
    dtype: torch.dtype
    decode_batches: tuple[int, ...]  # of single kernels
    decode_context: int
    prefill_lengths: tuple[int, ...]
    engine_steps: tuple[tuple[int, int], ...]  # rows and context of decode steps of the whole model
    engine_prompts: tuple[int, ...]
    prefill_chunk: int
    small_chunk: tuple[int, int]  # rows of a chunk, and tokens before it
    rotate_bytes: int  # of inputs between two uses of the same memory: several times the L2 cache
    copy_bytes: int
    matmul_size: int
    decode_steps: int
    moved_blocks: int
    serving: tuple[int, int, int]  # prompt, answer, requests in flight
    latent_sizes: tuple[int, int, int]  # heads, rank and rotary dimension of attention over latents
    dense_experts: tuple[int, int, int, int]  # experts, experts per token, width, inner width

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            model_type="llama",
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            rms_norm_eps=1e-5,
            layer_windows=(0,) * self.num_layers,
            layer_ropes=(RopeConfig(500_000.0),) * self.num_layers,
            attention_scale=self.head_dim**-0.5,
        )

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def token_bytes(self) -> int:
        """KV of one token in one layer."""
        return self.num_kv_heads * 2 * self.head_dim * self.dtype.itemsize

    @property
    def matrix_elements(self) -> int:
        """Numbers of all weight matrices that a decode step multiplies with."""
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden * (heads + self.num_heads * self.head_dim + 3 * self.intermediate)
        return self.num_layers * layer + self.vocab_size * self.hidden

    def layout(self, num_blocks: int, num_layers: int) -> KVLayout:
        return KVLayout(num_blocks, num_layers, self.num_kv_heads, self.block_size, self.head_dim)

    def hugging_face(self) -> dict[str, Any]:
        """The config.json of `config`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_model_len,
        }


LLAMA_8B = GPUShape(
    name="llama-8b",
    num_layers=32,
    hidden=4096,
    intermediate=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    max_model_len=40_960,
    block_size=64,
    dtype=torch.bfloat16,
    decode_batches=(1, 8, 32),
    decode_context=4096,
    prefill_lengths=(1024, 4096, 8192),
    engine_steps=((1, 4096), (8, 4096), (32, 4096), (64, 4096), (256, 1024)),
    engine_prompts=(1024, 8192, 32_768),
    prefill_chunk=8192,
    small_chunk=(64, 32_768),
    rotate_bytes=512 * 2**20,
    copy_bytes=2 * 2**30,
    matmul_size=8192,
    decode_steps=64,
    moved_blocks=16,
    serving=(1024, 128, 32),
    latent_sizes=(128, 512, 64),
    dense_experts=(128, 8, 2048, 768),
)
DRY = GPUShape(
    name="dry",
    num_layers=2,
    hidden=64,
    intermediate=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=300,
    max_model_len=256,
    block_size=16,
    dtype=torch.float32,
    decode_batches=(1, 4),
    decode_context=20,
    prefill_lengths=(9,),
    engine_steps=((1, 20), (4, 20)),
    engine_prompts=(9,),
    prefill_chunk=8,
    small_chunk=(4, 40),
    rotate_bytes=1,
    copy_bytes=2**16,
    matmul_size=64,
    decode_steps=2,
    moved_blocks=2,
    serving=(48, 4, 2),
    latent_sizes=(4, 32, 16),
    dense_experts=(4, 2, 32, 24),
)
SHAPES = {shape.name: shape for shape in (LLAMA_8B, DRY)}
