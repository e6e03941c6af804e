"""A Llama of random weights whose rows 256 divides, so that llama.cpp's tool gives every matrix a K-quant.

It has the tokenizer of a real GGUF file, which it is written beside. Its answers mean nothing, and its speed is that of
a trained model of the same shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, LlamaFileType
from gguf.quants import quantize
from numpy.typing import NDArray

from benchmarks.compare.peer import PeerError
from benchmarks.compare.weights import EMBEDDING, begin_copy, end_copy, written_once
from common.model_files.files import ModelFiles
from common.model_files.model_cache import cache_folder

SEED: Final = 1
DEVIATION: Final = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama."""

    hidden: int = 1024
    inner: int = 2816
    layers: int = 12
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64

    def metadata(self) -> dict[str, Any]:
        """By the names of GGUF files; those that a file lacks follow from the others."""
        return {
            "general.name": f"random {self}",
            "llama.block_count": self.layers,
            "llama.embedding_length": self.hidden,
            "llama.feed_forward_length": self.inner,
            "llama.attention.head_count": self.heads,
            "llama.attention.head_count_kv": self.kv_heads,
            "llama.attention.key_length": self.head_dim,
            "llama.attention.value_length": self.head_dim,
            "llama.rope.dimension_count": self.head_dim,
        }

    def tensors(self, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and sizes, matrices as [rows, columns]; the embedding is the head."""
        heads, kv_heads = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield EMBEDDING, (vocab_size, self.hidden)
        yield "output_norm.weight", (self.hidden,)
        for layer in range(self.layers):
            for name, size in (
                ("attn_norm", (self.hidden,)),
                ("attn_q", (heads, self.hidden)),
                ("attn_k", (kv_heads, self.hidden)),
                ("attn_v", (kv_heads, self.hidden)),
                ("attn_output", (self.hidden, heads)),
                ("ffn_norm", (self.hidden,)),
                ("ffn_gate", (self.inner, self.hidden)),
                ("ffn_up", (self.inner, self.hidden)),
                ("ffn_down", (self.hidden, self.inner)),
            ):
                yield f"blk.{layer}.{name}.weight", size

    def __str__(self) -> str:
        return f"{self.layers} x {self.hidden}, {self.inner}"


def random_file(files: ModelFiles, shape: Shape) -> Path:
    """The file in the cache, written unless it exists. Raises PeerError if `files` are no Llama's GGUF file."""
    path = cache_folder() / "peers" / "random-k" / f"{files.model_id}-{shape.layers}x{shape.hidden}x{shape.inner}.gguf"
    with written_once(path) as unfinished:
        if unfinished is not None:
            write_random(files, unfinished, shape)
    return path


def write_random(files: ModelFiles, path: Path, shape: Shape) -> None:
    """A file in bfloat16 with the tokenizer of `files`. Raises PeerError as `random_file` does."""
    reader = GGUFReader(files.weights[0]) if files.format == "gguf" else None
    if reader is None or reader.fields["general.architecture"].contents() != "llama":
        raise PeerError(f"{files.model_id} is no GGUF file of a Llama, and a random one is made of its metadata")
    writer = begin_copy(reader, path, LlamaFileType.MOSTLY_BF16, shape.metadata())
    numbers = np.random.default_rng(SEED)
    for name, size in shape.tensors(len(reader.fields["tokenizer.ggml.tokens"].data)):
        if len(size) == 1:
            writer.add_tensor(name, np.ones(size, np.float32))
        else:
            values: NDArray[np.float32] = numbers.standard_normal(size, np.float32) * np.float32(DEVIATION)
            kind = GGMLQuantizationType.BF16
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    end_copy(writer)
