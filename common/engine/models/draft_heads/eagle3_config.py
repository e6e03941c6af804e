"""Configuration of an EAGLE-3 head: its layer, and the model states that it reads. Does not import torch.

Three formats are published: that of the paper's authors and SpecForge (`LlamaForCausalLMEagle3`), that of vLLM
(`Eagle3LlamaForCausalLM`), and that of vLLM's speculators, with the layer in `transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from common.model_files import ModelConfig

LIKE_LLAMA = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Architectures with Llama layers. Their `model_type` may be that of the target model."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Format of a head. `reads`: layers whose inputs are combined, in order; `num_layers` is the final norm's input.

    `vocab_size`: size of its logits. `adds_to_normed`: attention is added to the normed state instead of the state.
    `passes_on_normed`: the next draft step reads the normed state from which logits are computed.
    """

    reads: tuple[int, ...]
    vocab_size: int
    adds_to_normed: bool
    passes_on_normed: bool


def is_eagle3(fields: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes an EAGLE-3 head."""
    said = (*_architectures(fields), str(fields.get("speculators_model_type")))
    return "draft_vocab_size" in fields or any("eagle3" in each.lower() for each in said)


def layer_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part that describes the head's decoder layer, in the format of a model's config.json."""
    layer = dict(fields.get("transformer_layer_config") or fields)
    if any(each in LIKE_LLAMA for each in _architectures(fields)):
        layer["model_type"] = "llama"
    return layer


def read_eagle3_config(name: str, fields: Mapping[str, Any], served: ModelConfig) -> Eagle3Config:
    """Return the format of the head in folder `name`, for model `served`. Raises ConfigError if not supported."""
    more = fields.get("eagle_config") or {}
    if more.get("use_aux_hidden_state") is False or fields.get("use_aux_hidden_state") is False:
        allowed = "a head that reads hidden states between layers (use_aux_hidden_state false is not supported)"
        raise ConfigError("draft_head", name, allowed)
    of_model = fields.get("target_hidden_size") or served.hidden_size
    if of_model != served.hidden_size:
        allowed = f"a head for models of hidden_size {served.hidden_size}: its target_hidden_size is {of_model}"
        raise ConfigError("draft_head", name, allowed)
    by_default = "transformer_layer_config" in fields  # speculators
    return Eagle3Config(
        reads=_layers_read(name, fields.get(LAYER_IDS) or more.get(LAYER_IDS), served.num_layers),
        vocab_size=fields.get("draft_vocab_size") or served.vocab_size,
        adds_to_normed=bool(fields.get("norm_before_residual", by_default)),
        passes_on_normed=bool(fields.get("norm_output", False)),
    )


def _architectures(fields: Mapping[str, Any]) -> Sequence[str]:
    named: Sequence[str] = fields.get("architectures") or ()
    return named


def _layers_read(name: str, ids: Sequence[Any] | None, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs are read, in vLLM's numbering. SpecForge lists layers whose outputs are read.

    The file does not specify which. No head reads the input of layer 1, and all read its output, so a list that starts
    with 1 refers to outputs (github.com/sgl-project/sglang/pull/25454). A wrong choice would only cost draft tokens.
    """
    read: Sequence[Any] = (2, num_layers // 2, num_layers - 3) if ids is None else ids
    if read and read[0] == 1:
        read = [each + 1 if isinstance(each, int) else each for each in read]
    if not read or not all(isinstance(each, int) and 0 <= each <= num_layers for each in read):
        allowed = f"a head for models of {num_layers} layers: it reads the inputs of layers {list(read)}"
        raise ConfigError("draft_head", name, allowed)
    return tuple(read)
