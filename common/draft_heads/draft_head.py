"""One more decoder layer, which guesses the token after the next from a hidden state of the model and the next token.

    x_t = W [embedding of token t, hidden state of token t - 1]      each normalised first in MTP layers
    x_t -> decoder layer -> hidden state of its own -> (norm) -> logits of token t + 1

Its keys and values of token t are those of x_t, in slot t of one more layer of the served model's blocks. Its own
hidden state takes the place of the model's where that is not known yet: for tokens behind a draft token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.kv.cache import KVCache
from common.model.batch import ForwardBatch
from common.model.decoder import Decoder
from common.model.weights import LayerWeights
from kernels import Linear, add_rms_norm, rms_norm


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """merge: [hidden_size, 2 * hidden_size]. Norms that a kind of heads lacks are None: EAGLE has none of these."""

    layer: LayerWeights
    merge: Linear
    embedding_norm: Tensor | None
    hidden_norm: Tensor | None
    norm: Tensor | None
    lm_head: Linear


class DraftHead:
    """Steps run operation by operation: there are few of them in one layer."""

    def __init__(self, decoder: Decoder, weights: HeadWeights) -> None:
        """`decoder` computes attention and MLP: the head is the last layer of its configuration."""
        self._decoder, self._weights = decoder, weights
        self._index, self._eps = decoder.config.num_layers - 1, decoder.config.rms_norm_eps
        decoder.run_by_operation()

    def write(self, batch: ForwardBatch, before: Tensor, kv: KVCache) -> None:
        """Writes keys and values of the batch's tokens. `before` [T, hidden_size]: hidden states of those before."""
        normed, _ = self._merged(batch, before)
        self._decoder.write_kv(self._index, self._weights.layer, normed, self._decoder.step(batch, kv))

    def forward(self, batch: ForwardBatch, before: Tensor, kv: KVCache) -> tuple[Tensor, Tensor]:
        """The same; returns logits float32 and hidden states of its own, [num sampled, vocab_size and hidden_size]."""
        decoder, weights, step = self._decoder, self._weights, self._decoder.step(batch, kv)
        normed, merged = self._merged(batch, before)
        mixed = decoder.attention(self._index, weights.layer, normed, step)
        merged = decoder.wanted(self._index, merged, step)
        hidden, normed = add_rms_norm(merged, mixed, weights.layer.norms["before_mlp"], self._eps)
        change = decoder.mlp(self._index, weights.layer, normed, step)
        if weights.norm is None:
            hidden = normed = hidden + change
        else:
            hidden, normed = add_rms_norm(hidden, change, weights.norm, self._eps)
        return weights.lm_head(normed, wide=True), hidden

    def _merged(self, batch: ForwardBatch, before: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and what it is added to."""
        weights = self._weights
        embedded = self._decoder.weights.embedding(batch.token_ids)
        if weights.embedding_norm is not None and weights.hidden_norm is not None:
            embedded = rms_norm(embedded, weights.embedding_norm, self._eps)
            before = rms_norm(before, weights.hidden_norm, self._eps)
        merged = weights.merge(torch.cat((embedded, before), dim=1))
        norm = weights.layer.norms.get("before_attention")
        return merged if norm is None else rms_norm(merged, norm, self._eps), merged
