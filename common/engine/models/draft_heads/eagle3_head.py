"""EAGLE-3: states of several layers of the model folded into one, and logits of a part of its vocabulary.

    f_t = W [input of a low, a middle and a high layer, of token t]       some heads normalise these first
    [norm(embedding of token t), norm(f_{t-1})] -> attention, twice as wide -> + f_{t-1} -> MLP -> g_t
    norm(g_t) -> logits of token t + 1                                     g_t stands for f_t where that is not known

(arXiv 2503.01840, section 3.1.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.models.batch import ForwardBatch
from common.engine.models.decoder import Decoder
from common.engine.models.draft_heads.draft_head import DraftHead
from common.engine.models.draft_heads.eagle3_form import Eagle3Form
from common.engine.models.weights import LayerWeights
from kernels import Linear, add_rms_norm, rms_norm


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """fold: [hidden_size, numbers of all states that are read]. Norms are float32.

    state_norms: of each state that is folded, or one of all together, or none.
    token_ids: int64 [draft vocabulary], which tokens of the model the rows of lm_head are; None: all, in order.
    """

    layer: LayerWeights
    fold: Linear
    state_norms: tuple[Tensor, ...]
    embedding_norm: Tensor
    hidden_norm: Tensor
    norm: Tensor
    lm_head: Linear
    token_ids: Tensor | None


class Eagle3Head(DraftHead):
    """A state is folded in the step that makes it: what is kept and read again is a third as wide."""

    def __init__(self, decoder: Decoder, weights: Eagle3Weights, form: Eagle3Form) -> None:
        super().__init__(decoder, weights.layer)
        self._weights, self._form = weights, form
        self.reads_layers = form.reads

    @property
    def reads_last(self) -> bool:
        return self.config.num_layers - 1 in self.reads_layers

    def states(self, hidden: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        norms = self._weights.state_norms
        if len(norms) == len(inputs) > 1:
            inputs = [rms_norm(each, norm, self._eps) for each, norm in zip(inputs, norms, strict=True)]
        together = torch.cat(tuple(inputs), dim=1)
        if len(norms) == 1:
            together = rms_norm(together, norms[0], self._eps)
        return self._weights.fold(together)

    def _merged(self, batch: ForwardBatch, before: Tensor) -> tuple[Tensor, Tensor]:
        weights = self._weights
        embedded = rms_norm(self._decoder.weights.embedding(batch.token_ids), weights.embedding_norm, self._eps)
        normed = rms_norm(before, weights.hidden_norm, self._eps)
        return torch.cat((embedded, normed), dim=1), normed if self._form.adds_to_normed else before

    def _drafted(self, hidden: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        weights = self._weights
        hidden, normed = add_rms_norm(hidden, change, weights.norm, self._eps)
        return self._of_model(weights.lm_head(normed, wide=True)), normed if self._form.passes_on_normed else hidden

    def _of_model(self, logits: Tensor) -> Tensor:
        """Logits of the model's vocabulary: tokens that the head does not know are never drawn."""
        token_ids = self._weights.token_ids
        if token_ids is None:
            return logits
        whole = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, token_ids, logits)
