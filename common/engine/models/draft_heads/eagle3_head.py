"""EAGLE-3: combines states of several model layers into one, and computes logits over part of the vocabulary.

    f_t = W [input of a low, a middle and a high layer, of token t]       some heads normalise these first
    [norm(embedding of token t), norm(f_{t-1})] -> attention, twice as wide -> + f_{t-1} -> MLP -> g_t
    norm(g_t) -> logits of token t + 1                                     g_t replaces f_t where that is unknown

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
from common.engine.models.draft_heads.eagle3_config import Eagle3Config
from common.engine.models.draft_heads.head_files import EAGLE_NORMS
from common.engine.models.tensor_reader import WeightSource
from common.engine.models.weights import Assembler, LayerWeights
from common.engine.weights import SafetensorsWeights
from common.errors import ConfigError, ModelError
from kernels import Embedding, Linear, add_rms_norm, rms_norm

EMBEDDING = "model.embed_tokens.weight"
LAYER = "model.layers.0."


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """Weights of the head. fold: [hidden_size, size of all states read]. Norms are float32.

    state_norms: one per state read, or one over all of them, or none.
    token_ids: int64 [draft vocabulary], the model's token for each row of lm_head; None if identical.
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
    """EAGLE-3 head. States are combined in the step that computes them, so that the kept state is a third as wide."""

    def __init__(self, decoder: Decoder, weights: Eagle3Weights, form: Eagle3Config) -> None:
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
        """Map logits to the model's vocabulary. Tokens outside the draft vocabulary are never drawn."""
        token_ids = self._weights.token_ids
        if token_ids is None:
            return logits
        whole = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, token_ids, logits)


class Eagle3Tensors(SafetensorsWeights):
    """A head's tensors, under the names of a one-layer model. Some files use `midlayer` or the prefix `model.`."""

    @staticmethod
    def _plain(name: str) -> str:
        name = name.removeprefix("model.")
        if name.startswith("midlayer."):
            name = f"layers.0.{name.removeprefix('midlayer.')}"
        return SafetensorsWeights._plain(name)


class Eagle3Reader:
    """Reads the parts of a head. `reader` has the head's configuration and tensors, `width` is the model's."""

    def __init__(self, reader: Assembler, form: Eagle3Config, width: int) -> None:
        self._reader, self._form, self._width = reader, form, width

    def weights(self, lm_head: Linear | None) -> Eagle3Weights:
        """Read the weights. `lm_head`: the model's, if usable. Raises ConfigError or ModelError if they do not fit."""
        reader, form = self._reader, self._form
        hidden, columns = reader.config.hidden_size, len(form.reads) * self._width
        if not reader.source.has("fc.weight"):
            raise ConfigError(
                "draft_head", reader.source.label, "the folder of an EAGLE-3 head: it has no tensor fc.weight"
            )
        return Eagle3Weights(
            layer=reader.layer(reader.config.num_layers - 1, number=0, columns=2 * hidden, norms=EAGLE_NORMS),
            fold=reader.linear(Linear, "", {"fc": hidden}, columns, reader.source.has("fc.bias")),
            state_norms=self._state_norms(columns),
            embedding_norm=reader.norm(f"{LAYER}input_layernorm.weight", hidden),
            hidden_norm=reader.norm(f"{LAYER}hidden_norm.weight", hidden),
            norm=reader.norm("model.norm.weight", hidden),
            lm_head=self._lm_head(lm_head),
            token_ids=self._token_ids(),
        )

    def embedding(self, served: WeightSource, of_model: Embedding) -> Embedding:
        """Return the head's own embedding if its file has one that differs from the model's."""
        reader, config = self._reader, self._reader.config
        if not reader.source.has(EMBEDDING):
            if config.hidden_size != self._width:
                raise ModelError(
                    f"{reader.source.label}: missing tensor {EMBEDDING}, and the model's embeddings have width "
                    f"{self._width} instead of {config.hidden_size}: download the head again"
                )
            return of_model
        own = reader.source.read(EMBEDDING)
        if served.has(EMBEDDING) and not served.is_quantised(EMBEDDING) and _is_same(own, served.read(EMBEDDING)):
            return of_model
        return Embedding(reader.matrix(EMBEDDING, config.vocab_size, config.hidden_size))

    def _state_norms(self, columns: int) -> tuple[Tensor, ...]:
        """Read `fc_norm` (per state) or `input_norm` (over all states). Most heads have neither."""
        reader, each = self._reader, range(len(self._form.reads))
        if reader.source.has("input_norm.weight"):
            return (reader.norm("input_norm.weight", columns),)
        if reader.source.has("fc_norm.0.weight"):
            return tuple(reader.norm(f"fc_norm.{i}.weight", self._width) for i in each)
        return ()

    def _lm_head(self, of_model: Linear | None) -> Linear:
        reader, rows, hidden = self._reader, self._form.vocab_size, self._reader.config.hidden_size
        if reader.source.has("lm_head.weight"):
            return reader.product(Linear, reader.weight({"lm_head.weight": rows}, hidden, reader.quantization.head))
        if of_model is None or (of_model.out_features, of_model.in_features) != (rows, hidden):
            raise ModelError(
                f"{reader.source.label}: missing tensor lm_head.weight, and the model's is not "
                f"[{rows}, {hidden}]: download the head again"
            )
        return of_model

    def _token_ids(self) -> Tensor | None:
        """Read d2t, the offset of each token's ID in the model's vocabulary. (t2d is the inverse mapping.)"""
        reader, count, vocab_size = self._reader, self._form.vocab_size, self._reader.config.vocab_size
        if not reader.source.has("d2t"):
            if count != vocab_size:
                raise ModelError(
                    f"{reader.source.label}: missing tensor d2t, which maps its {count} tokens to the {vocab_size} of "
                    f"the model: download the head again"
                )
            return None
        offsets = reader.source.read("d2t")
        if offsets.shape != (count,) or offsets.is_floating_point():
            raise ModelError(
                f"{reader.source.label}: tensor d2t is {offsets.dtype} {list(offsets.shape)}, the configuration "
                f"requires integers [{count}]: download the head again"
            )
        token_ids = torch.arange(count) + offsets.long()
        num_tokens = len(set(token_ids.tolist()))
        if token_ids.min() < 0 or token_ids.max() >= vocab_size or num_tokens < count:
            raise ModelError(
                f"{reader.source.label}: invalid d2t: {num_tokens} distinct tokens instead of {count}, from "
                f"{int(token_ids.min())} to {int(token_ids.max())}, vocabulary {vocab_size}: download the head again"
            )
        return None if _is_whole(token_ids, vocab_size) else token_ids.to(reader.device)


def _is_whole(token_ids: Tensor, vocab_size: int) -> bool:
    return len(token_ids) == vocab_size and torch.equal(token_ids, torch.arange(vocab_size))


def _is_same(own: Tensor, other: Tensor) -> bool:
    return own.dtype == other.dtype and own.shape == other.shape and torch.equal(own, other)
