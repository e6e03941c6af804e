"""One more decoder layer, which drafts the token after the next from a hidden state of the model and the next token.

    embedding of token t, state behind token t - 1 -> decoder layer -> a state of its own -> logits of token t + 1

Its keys and values of token t are those of that pair, in slot t of one more layer of the served model's blocks. Its own
state takes the place of the model's where that is not known yet: for tokens behind a draft token.
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
    """Steps run operation by operation: there are few of them in one layer.

    States are rows of `config.hidden_size` numbers: what a head keeps of the model's hidden states, and its own.
    """

    reads_layers: tuple[int, ...] = ()
    """Layers of the model whose inputs `states` reads, see `LayerStates`."""

    def __init__(self, decoder: Decoder, layer: LayerWeights) -> None:
        """`decoder` computes attention and MLP: the head is the last layer of its configuration."""
        self._decoder, self._layer = decoder, layer
        self._index, self._eps = decoder.config.num_layers - 1, decoder.config.rms_norm_eps
        decoder.run_by_operation()

    @property
    def config(self) -> ModelConfig:
        """As that of the model with this layer behind its own, with the head's own sizes."""
        return self._decoder.config

    @property
    @abstractmethod
    def reads_last(self) -> bool:
        """Whether `states` reads what follows the model's last layer, which then runs all rows of a step."""

    @abstractmethod
    def states(self, hidden: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """The rows' states that are kept: the normed hidden states, or made of the `inputs` of `reads_layers`."""

    def write(self, batch: ForwardBatch, before: Tensor, kv: KVCache) -> None:
        """Writes keys and values of the batch's tokens. `before` [T, hidden_size]: the states of the tokens before."""
        normed, _ = self._merged(batch, before)
        self._decoder.write_kv(self._index, self._layer, normed, self._decoder.step(batch, kv))

    def forward(self, batch: ForwardBatch, before: Tensor, kv: KVCache) -> tuple[Tensor, Tensor]:
        """The same; returns logits float32 and states of its own, [num sampled, vocab_size and hidden_size]."""
        decoder, layer, step = self._decoder, self._layer, self._decoder.step(batch, kv)
        normed, merged = self._merged(batch, before)
        mixed = decoder.attention(self._index, layer, normed, step)
        merged = decoder.wanted(self._index, merged, step)
        hidden, normed = add_rms_norm(merged, mixed, layer.norms["before_mlp"], self._eps)
        return self._drafted(hidden, decoder.mlp(self._index, layer, normed, step))

    @abstractmethod
    def _merged(self, batch: ForwardBatch, before: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and what it is added to."""

    @abstractmethod
    def _drafted(self, hidden: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the head's states, from the layer's hidden states and what its MLP adds to them."""
