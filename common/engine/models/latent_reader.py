"""The matrices of latent attention, from the tensors of DeepSeek's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.models.tensor_reader import TensorReader
from common.model_files.architecture import LatentConfig
from kernels import HeadLinear, Linear


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Beside the queries' matrix, `LayerWeights.qkv`.

    query_down and query_norm: hidden states to the latents that queries are made of; both None where there are none.
    down: hidden states to rank + rope_dim; norm: of the first `rank`. absorb: each head's `nope_dim` numbers of a query
    to `rank`, by the transpose of what makes keys of latents; expand: `rank` sums to `value_dim`.
    """

    query_down: Linear | None
    query_norm: Tensor | None
    down: Linear
    norm: Tensor
    absorb: HeadLinear
    expand: HeadLinear


class LatentReader:
    """Reads the attention of one layer, whose tensors' names begin with `prefix`.

    Rows of rotated elements are put in the order in which kernels rotate them: element i with i + rope_dim / 2.
    """

    def __init__(self, reader: TensorReader, latent: LatentConfig, prefix: str) -> None:
        self.reader, self.latent, self.prefix = reader, latent, prefix
        self.heads, self.hidden = reader.config.num_heads, reader.config.hidden_size
        places = torch.arange(latent.rope_dim)
        self.order = torch.cat((places[0::2], places[1::2])) if latent.interleaved else places

    def queries(self) -> Linear:
        """To num_heads * query_dim, of hidden states or of latents."""
        latent = self.latent
        each = torch.cat((torch.arange(latent.nope_dim), latent.nope_dim + self.order))
        rows = (torch.arange(self.heads)[:, None] * latent.query_dim + each).flatten()
        name, width = ("q_b_proj", latent.query_rank) if latent.query_rank else ("q_proj", self.hidden)
        return self.reader.linear(Linear, self.prefix, {name: len(rows)}, width, False, rows)

    def read(self) -> LatentWeights:
        latent, source = self.latent, self.reader
        query_down: Linear | None = None
        query_norm: Tensor | None = None
        biased = source.config.output_bias
        if latent.query_rank:
            query_down = source.linear(Linear, self.prefix, {"q_a_proj": latent.query_rank}, self.hidden, biased)
            query_norm = source.norm(f"{self.prefix}q_a_layernorm.weight", latent.query_rank)
        rows = torch.cat((torch.arange(latent.rank), latent.rank + self.order))
        down = source.linear(
            Linear, self.prefix, {"kv_a_proj_with_mqa": latent.key_dim}, self.hidden, biased, order=rows
        )
        norm = source.norm(f"{self.prefix}kv_a_layernorm.weight", latent.rank)
        return LatentWeights(query_down, query_norm, down, norm, *self._heads())

    def _heads(self) -> tuple[HeadLinear, HeadLinear]:
        """`absorb` and `expand`, which the file holds as one matrix; in the model's type, whatever the file's is."""
        latent, each = self.latent, self.latent.nope_dim + self.latent.value_dim
        whole = self.reader.matrix(f"{self.prefix}kv_b_proj.weight", self.heads * each, latent.rank)
        whole = whole.view(self.heads, each, latent.rank)
        keys, values = whole[:, : latent.nope_dim], whole[:, latent.nope_dim :]
        parts, invariant = (keys.transpose(1, 2).contiguous(), values.contiguous()), self.reader.batch_invariant
        return HeadLinear(parts[0], batch_invariant=invariant), HeadLinear(parts[1], batch_invariant=invariant)
