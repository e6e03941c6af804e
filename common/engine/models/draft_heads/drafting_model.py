"""The served model with its draft head: the model's logits, with the head's KV stored alongside the model's.

Each step writes the head's keys and values for all its tokens, so a block is complete in all layers at once and is
transferred, cached and found like any other. The hidden state before a chunk's first token comes from the step that ran
that token and is kept in a slot until then (`HiddenStateSlots`). If it is unknown, zeros are used: after a cached
prefix, and for the first token on a decode worker. That only affects the quality of draft tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from common.engine.kv import KVCache
from common.engine.models.batch import ROW_BEFORE, ForwardBatch, HiddenRows
from common.engine.models.decoder import Decoder
from common.engine.models.draft_heads.draft_head import DraftHead
from common.engine.models.weights import ModelWeights
from common.model_files import ModelConfig
from kernels import Linear


class DraftingModel:
    """Implements `RunnableModel`. `config` includes the head as its last layer."""

    def __init__(
        self, body: Decoder, lm_head: Linear, draft_head: DraftHead, config: ModelConfig, num_places: int
    ) -> None:
        """`body` is the model without `lm_head`. There are slots for the states of `num_places` tokens."""
        self.config, self.num_places = config, num_places
        self._body, self._lm_head, self._draft_head = body, lm_head, draft_head
        # After the slots: a row of zeros, and a row for states that are not kept.
        width = draft_head.config.hidden_size
        self._states = torch.zeros(num_places + 2, width, dtype=body.dtype, device=body.device)

    @property
    def dtype(self) -> torch.dtype:
        return self._body.dtype

    @property
    def device(self) -> torch.device:
        return self._body.device

    @property
    def quantization(self) -> str:
        return self._body.quantization

    @property
    def weights(self) -> ModelWeights:
        """Weights of the model without the head."""
        return self._body.weights

    @property
    def draft_config(self) -> ModelConfig:
        """Configuration for batches of draft steps: `config` with the head's sizes."""
        return self._draft_head.config

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Write the KV of the batch's tokens, including the head's, and return the model's logits, float32."""
        head = self._draft_head
        hidden, inputs = self._body.rows_and_states(replace(batch, sampled=None) if head.reads_last else batch, kv)
        if batch.hidden is not None:
            states = head.states(hidden, inputs)
            before = self._before(batch.hidden, states)
            self._keep(batch.hidden, states)
            head.write(batch, before, kv)
        if head.reads_last and batch.sampled is not None:
            hidden = hidden.index_select(0, batch.sampled)
        return self._body.capped(self._lm_head(hidden, wide=True))

    def draft(self, batch: ForwardBatch, kv: KVCache, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits of the tokens after those of the batch, and the head's states, [T, ...] each.

        Without `before`, the input states are read from the batch's slots.
        """
        assert batch.hidden is not None  # built with `draft_config`
        if before is None:
            before = self._states[self._places(batch.hidden.before)]
        return self._draft_head.forward(batch, before, kv)

    def _before(self, places: HiddenRows, states: Tensor) -> Tensor:
        """Return the state before each row, [T, the head's hidden_size]."""
        kept = self._states[self._places(places.before)]
        return torch.where((places.before == ROW_BEFORE)[:, None], states.roll(1, dims=0), kept)

    def _keep(self, places: HiddenRows, states: Tensor) -> None:
        rows = torch.where(places.kept < 0, self.num_places + 1, places.kept)
        self._states.index_copy_(0, rows, states)

    def _places(self, before: Tensor) -> Tensor:
        return torch.where(before < 0, self.num_places, before)
