"""Loads a model with its draft head."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from common.engine.kv import torch_dtype
from common.engine.models.draft_heads.draft_head import DraftHead
from common.engine.models.draft_heads.drafting_model import DraftingModel
from common.engine.models.draft_heads.eagle3_config import Eagle3Config
from common.engine.models.draft_heads.eagle3_head import Eagle3Head, Eagle3Reader, Eagle3Tensors
from common.engine.models.draft_heads.head_files import EAGLE_NORMS, MTP, HeadFiles, find_head, has_plain_logits
from common.engine.models.draft_heads.merging_head import HeadWeights, MergingHead
from common.engine.models.llama import Llama
from common.engine.models.load import DECODERS, effective_quantization, log_treated, open_model, reading, torch_device
from common.engine.models.weights import Assembler, ModelWeights
from common.engine.weights import SafetensorsWeights
from common.errors import ConfigError
from common.model_files import ModelFiles
from kernels import Linear

log = logging.getLogger(__name__)


def load_drafting_model(
    files: ModelFiles,
    name: str,
    *,
    num_places: int,
    dtype: str = "float32",
    device: str = "cpu",
    quantization: str = "none",
) -> DraftingModel:
    """Load a model and the head given by `--draft-head`. `num_places`: see `DraftingModel`.

    Raises ConfigError if the head does not fit the model, and otherwise like `load_model`.
    """
    kind, place = torch_dtype(dtype), torch_device(device)
    config, source = open_model(files)
    found = find_head(name, files, config)
    wanted = effective_quantization(quantization, source, place)
    assembler = Assembler(config, source, kind, place, wanted)
    with reading(files, assembler, source, config):
        weights = assembler.assemble()
    log_treated(files, assembler)
    lm_head = weights.lm_head
    assert lm_head is not None  # with_head is the default
    body = DECODERS[config.family.decoder](config, replace(weights, lm_head=None))
    head = _load_head(found, assembler, weights, lm_head)
    body.keep_states(head.reads_layers)
    log.info("draft head: %s", found.name if found.weights else f"layer {config.num_layers} of the checkpoint (MTP)")
    return DraftingModel(body, lm_head, head, found.whole, num_places)


def _load_head(found: HeadFiles, served: Assembler, weights: ModelWeights, lm_head: Linear) -> DraftHead:
    """Load the head for a model that `served` loaded as `weights` and `lm_head`."""
    if found.form is not None:
        return _eagle3(found, found.form, served, weights, lm_head)
    source = served.source
    if found.weights:
        source, weights = SafetensorsWeights(found.weights), replace(weights, rope_factors=None)
    of_head = Assembler(found.layer, source, served.dtype, served.device, served.quantization)
    parts = _eagle(of_head, lm_head) if found.weights else _mtp(of_head, lm_head)
    decoder = DECODERS[served.config.family.decoder]
    return MergingHead(decoder(found.layer, replace(weights, layers=(parts.layer,))), parts)


def _eagle3(
    found: HeadFiles, form: Eagle3Config, served: Assembler, weights: ModelWeights, lm_head: Linear
) -> Eagle3Head:
    source = Eagle3Tensors(found.weights)
    of_head = Assembler(found.layer, source, served.dtype, served.device, served.quantization)
    reader = Eagle3Reader(of_head, form, served.config.hidden_size)
    own = reader.weights(lm_head if has_plain_logits(served.config) else None)
    embedding = reader.embedding(served.source, weights.embedding)
    decoder = Llama(found.layer, replace(weights, embedding=embedding, layers=(own.layer,), rope_factors=None))
    return Eagle3Head(decoder, own, form)


def _mtp(reader: Assembler, lm_head: Linear) -> HeadWeights:
    """Read layer `num_layers` of the file, with DeepSeek-V3's names. Only the first of several MTP layers is used."""
    config = reader.config
    prefix, hidden = f"model.layers.{config.num_layers - 1}.", config.hidden_size
    if not reader.source.has(f"{prefix}enorm.weight"):
        allowed = f"empty, or the folder of an EAGLE head: {reader.source.label} has no tensor {prefix}enorm.weight"
        raise ConfigError("draft_head", MTP, allowed)
    own = f"{prefix}shared_head.head.weight"
    if reader.source.has(own) and not _is_same(reader, own):
        lm_head = Linear(reader.weight({own: config.vocab_size}, hidden, reader.quantization.head), dtype=reader.dtype)
    return HeadWeights(
        layer=reader.layer(config.num_layers - 1),
        merge=reader.linear(Linear, prefix, {"eh_proj": hidden}, 2 * hidden, False),
        embedding_norm=reader.norm(f"{prefix}enorm.weight", hidden),
        hidden_norm=reader.norm(f"{prefix}hnorm.weight", hidden),
        norm=reader.norm(f"{prefix}shared_head.norm.weight", hidden),
        lm_head=lm_head,
    )


def _is_same(reader: Assembler, name: str) -> bool:
    """Return whether the file repeats the model's head under another name, like DeepSeek's. It is then shared."""
    source = reader.source
    return source.has("lm_head.weight") and torch.equal(source.read(name), source.read("lm_head.weight"))


def _eagle(reader: Assembler, lm_head: Linear) -> HeadWeights:
    """Read one layer without its first norm, and `fc`. The embedding and lm_head are the model's."""
    hidden, source = reader.config.hidden_size, reader.source
    if not source.has("fc.weight"):
        raise ConfigError("draft_head", source.label, "the folder of an EAGLE head: it has no tensor fc.weight")
    if (width := source.read("fc.weight").shape[1]) != 2 * hidden:
        allowed = f"an EAGLE or EAGLE-2 head, whose fc has {2 * hidden} inputs: this one has {width}"
        raise ConfigError("draft_head", source.label, allowed)
    return HeadWeights(
        layer=reader.layer(reader.config.num_layers - 1, number=0, norms=EAGLE_NORMS),
        merge=reader.linear(Linear, "", {"fc": hidden}, 2 * hidden, source.has("fc.bias")),
        embedding_norm=None,
        hidden_norm=None,
        norm=None,
        lm_head=lm_head,
    )
