"""Reads the weights of an EAGLE-3 head."""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.models.draft_heads.eagle3_form import Eagle3Form
from common.engine.models.draft_heads.eagle3_head import Eagle3Weights
from common.engine.models.draft_heads.head_files import EAGLE_NORMS
from common.engine.models.tensor_reader import WeightSource
from common.engine.models.weights import Assembler
from common.engine.weights import SafetensorsWeights
from common.errors import ConfigError, ModelError
from kernels import Embedding, Linear

EMBEDDING = "model.embed_tokens.weight"
LAYER = "model.layers.0."


class Eagle3Tensors(SafetensorsWeights):
    """A head's tensors by the names of a model of one layer. Some files say `midlayer`, some `model.` before all."""

    @staticmethod
    def _plain(name: str) -> str:
        name = name.removeprefix("model.")
        if name.startswith("midlayer."):
            name = f"layers.0.{name.removeprefix('midlayer.')}"
        return SafetensorsWeights._plain(name)


class Eagle3Reader:
    """Reads what one head is made of. `reader` has the head's configuration and tensors, `width` is the model's."""

    def __init__(self, reader: Assembler, form: Eagle3Form, width: int) -> None:
        self._reader, self._form, self._width = reader, form, width

    def weights(self, lm_head: Linear | None) -> Eagle3Weights:
        """`lm_head`: the model's, where the head could use it. ConfigError, ModelError for what does not fit."""
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
        """The head's own, where its file has another than the model's."""
        reader, config = self._reader, self._reader.config
        if not reader.source.has(EMBEDDING):
            if config.hidden_size != self._width:
                raise ModelError(
                    f"{reader.source.label}: no tensor {EMBEDDING}, and the model's embeddings have {self._width} "
                    f"numbers, the head's {config.hidden_size}: fetch the head again"
                )
            return of_model
        own = reader.source.read(EMBEDDING)
        if served.has(EMBEDDING) and not served.is_quantised(EMBEDDING) and _is_same(own, served.read(EMBEDDING)):
            return of_model
        return Embedding(reader.matrix(EMBEDDING, config.vocab_size, config.hidden_size))

    def _state_norms(self, columns: int) -> tuple[Tensor, ...]:
        """`fc_norm` of each state, `input_norm` of all together; most heads have neither."""
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
                f"{reader.source.label}: no tensor lm_head.weight, and the model's cannot stand for "
                f"[{rows}, {hidden}]: fetch the head again"
            )
        return of_model

    def _token_ids(self) -> Tensor | None:
        """d2t: how much larger each token's id is in the model's vocabulary. t2d says the same the other way round."""
        reader, count, vocab_size = self._reader, self._form.vocab_size, self._reader.config.vocab_size
        if not reader.source.has("d2t"):
            if count != vocab_size:
                raise ModelError(
                    f"{reader.source.label}: no tensor d2t, which says what its {count} tokens are among "
                    f"{vocab_size}: fetch the head again"
                )
            return None
        offsets = reader.source.read("d2t")
        if offsets.shape != (count,) or offsets.is_floating_point():
            raise ModelError(
                f"{reader.source.label}: tensor d2t is {offsets.dtype} {list(offsets.shape)}, the configuration wants "
                f"whole numbers [{count}]: fetch the head again"
            )
        token_ids = torch.arange(count) + offsets.long()
        num_tokens = len(set(token_ids.tolist()))
        if token_ids.min() < 0 or token_ids.max() >= vocab_size or num_tokens < count:
            raise ModelError(
                f"{reader.source.label}: d2t makes {num_tokens} tokens of {count}, from "
                f"{int(token_ids.min())} to {int(token_ids.max())}, of {vocab_size}: fetch the head again"
            )
        return None if _is_whole(token_ids, vocab_size) else token_ids.to(reader.device)


def _is_whole(token_ids: Tensor, vocab_size: int) -> bool:
    return len(token_ids) == vocab_size and torch.equal(token_ids, torch.arange(vocab_size))


def _is_same(own: Tensor, other: Tensor) -> bool:
    return own.dtype == other.dtype and own.shape == other.shape and torch.equal(own, other)
