"""Draft head: an additional decoder layer that drafts the token after next from a hidden state and the next token.

    embedding of token t, state after token t - 1 -> decoder layer -> its own state -> logits of token t + 1

The keys and values for token t are computed from that pair and stored in slot t of an additional layer of the served
model's blocks. After a draft token, where the model's state is unknown, the head's own state replaces it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from common.engine.kv import KVCache
from common.engine.models.batch import ForwardBatch
from common.engine.models.decoder import Decoder
from common.engine.models.weights import LayerWeights
from common.model_files import ModelConfig
from kernels import add_rms_norm


class DraftHead(ABC):
    """A draft head. Its steps run operation by operation, because one layer has few operations.

    States are rows of `config.hidden_size` elements: those kept from the model's hidden states, and the head's own.
    """

    reads_layers: tuple[int, ...] = ()
    """Layers of the model whose inputs `states` reads; see `LayerStates`."""

    def __init__(self, decoder: Decoder, layer: LayerWeights) -> None:
        """`decoder` computes attention and MLP. The head is the last layer of its configuration."""
        self._decoder, self._layer = decoder, layer
        self._index, self._eps = decoder.config.num_layers - 1, decoder.config.rms_norm_eps
        decoder.run_by_operation()

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model plus this layer, with the sizes of the head."""
        return self._decoder.config

    @property
    @abstractmethod
    def reads_last(self) -> bool:
        """Whether `states` reads the last layer's output, so that the layer must run all rows of a step."""

    @abstractmethod
    def states(self, hidden: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return the states to keep: the normed hidden states, or derived from the `inputs` of `reads_layers`."""

    def write(self, batch: ForwardBatch, before: Tensor, kv: KVCache) -> None:
        """Write keys and values of the batch's tokens. `before` [T, hidden_size]: states of the preceding tokens."""
        normed, _ = self._merged(batch, before)
        self._decoder.write_kv(self._index, self._layer, normed, self._decoder.step(batch, kv))

    def forward(self, batch: ForwardBatch, before: Tensor, kv: KVCache) -> tuple[Tensor, Tensor]:
        """Write KV and return logits, float32, and the head's states, [num sampled, vocab_size and hidden_size]."""
        decoder, layer, step = self._decoder, self._layer, self._decoder.step(batch, kv)
        normed, merged = self._merged(batch, before)
        mixed = decoder.attention(self._index, layer, normed, step)
        merged = decoder.wanted(self._index, merged, step)
        hidden, normed = add_rms_norm(merged, mixed, layer.norms["before_mlp"], self._eps)
        return self._drafted(hidden, decoder.mlp(self._index, layer, normed, step))

    @abstractmethod
    def _merged(self, batch: ForwardBatch, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention and the tensor to which its output is added."""

    @abstractmethod
    def _drafted(self, hidden: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and the head's states, given the layer's hidden states and the MLP's change."""
