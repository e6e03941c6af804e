"""The served model with its draft head: logits as those of the model alone, and the head's KV beside the model's.

Each step writes the head's keys and values of all its tokens, so a block is complete in all layers at once, and moves,
is cached and found like any other. The hidden state before a chunk's first token comes from the step that ran that
token: it is kept in a place until then (`HiddenPlaces`). Where it is not known, zeros stand for
it: behind a cached prefix, and for the first token that a decode worker runs. That can cost a draft token, and no more.
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
    """Implements `RunnableModel`. `config` counts the head as its last layer."""

    def __init__(
        self, body: Decoder, lm_head: Linear, draft_head: DraftHead, config: ModelConfig, num_places: int
    ) -> None:
        """`body` is the model without `lm_head`. It keeps the states of `num_places` tokens."""
        self.config, self.num_places = config, num_places
        self._body, self._lm_head, self._draft_head = body, lm_head, draft_head
        # Behind the places, a row of zeros, and one for what is not kept.
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
        """Those of the model alone."""
        return self._body.weights

    @property
    def draft_config(self) -> ModelConfig:
        """What batches of draft steps are built by: as `config`, with the head's own sizes."""
        return self._draft_head.config

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Writes the KV of the batch's tokens, the head's as well; returns the model's logits, float32."""
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
        """Logits of the tokens behind those of the batch, and the head's own states, [T, ...] each.

        Without `before` the states that it reads are those in the batch's places.
        """
        assert batch.hidden is not None  # as `config` asks for
        if before is None:
            before = self._states[self._places(batch.hidden.before)]
        return self._draft_head.forward(batch, before, kv)

    def _before(self, places: HiddenRows, states: Tensor) -> Tensor:
        """The state before each row, [T, the head's hidden_size]."""
        kept = self._states[self._places(places.before)]
        return torch.where((places.before == ROW_BEFORE)[:, None], states.roll(1, dims=0), kept)

    def _keep(self, places: HiddenRows, states: Tensor) -> None:
        rows = torch.where(places.kept < 0, self.num_places + 1, places.kept)
        self._states.index_copy_(0, rows, states)

    def _places(self, before: Tensor) -> Tensor:
        return torch.where(before < 0, self.num_places, before)
