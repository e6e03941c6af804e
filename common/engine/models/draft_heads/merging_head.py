"""MTP layers, EAGLE and EAGLE-2: a matrix merges embedding and hidden state into the input of a full decoder layer.

x_t = W [embedding of token t, hidden state of token t - 1]      each normalised first in MTP layers
x_t -> decoder layer -> its own hidden state -> (norm) -> logits of token t + 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.models.batch import ForwardBatch
from common.engine.models.decoder import Decoder
from common.engine.models.draft_heads.draft_head import DraftHead
from common.engine.models.weights import LayerWeights
from kernels import Linear, add_rms_norm, rms_norm


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """merge: [hidden_size, 2 * hidden_size]. Norms that a kind of head does not have are None (EAGLE has none)."""

    layer: LayerWeights
    merge: Linear
    embedding_norm: Tensor | None
    hidden_norm: Tensor | None
    norm: Tensor | None
    lm_head: Linear


class MergingHead(DraftHead):
    """Reads the model's normed hidden states without change."""

    reads_last = True

    def __init__(self, decoder: Decoder, weights: HeadWeights) -> None:
        super().__init__(decoder, weights.layer)
        self._weights = weights

    def states(self, hidden: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        return hidden

    def _merged(self, batch: ForwardBatch, before: Tensor) -> tuple[Tensor, Tensor]:
        weights = self._weights
        embedded = self._decoder.weights.embedding(batch.token_ids)
        if weights.embedding_norm is not None and weights.hidden_norm is not None:
            embedded = rms_norm(embedded, weights.embedding_norm, self._eps)
            before = rms_norm(before, weights.hidden_norm, self._eps)
        merged = weights.merge(torch.cat((embedded, before), dim=1))
        norm = weights.layer.norms.get("before_attention")
        return merged if norm is None else rms_norm(merged, norm, self._eps), merged

    def _drafted(self, hidden: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        weights = self._weights
        if weights.norm is None:
            hidden = normed = hidden + change
        else:
            hidden, normed = add_rms_norm(hidden, change, weights.norm, self._eps)
        return weights.lm_head(normed, wide=True), hidden
