"""What the config.json of an EAGLE-3 head says: its layer, and which states of the model it reads. No torch.

Three forms are published: that of the paper's authors and of SpecForge (`LlamaForCausalLMEagle3`), that of vLLM
(`Eagle3LlamaForCausalLM`), and that of its speculators, whose layer is described in `transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from common.model_files import ModelConfig

LIKE_LLAMA = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Architectures whose layer is Llama's, whatever their `model_type` says of the model that they were made for."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Eagle3Form:
    """`reads`: the layers whose inputs are folded, in this order; the number of layers is the final norm's input.

    `vocab_size`: of its own logits. `adds_to_normed`: attention is added to the normed state, not to the state;
    `passes_on_normed`: the next draft step reads the normed state that logits are made of.
    """

    reads: tuple[int, ...]
    vocab_size: int
    adds_to_normed: bool
    passes_on_normed: bool


def is_eagle3(fields: Mapping[str, Any]) -> bool:
    """Whether a head's config.json is that of an EAGLE-3 head."""
    said = (*_architectures(fields), str(fields.get("speculators_model_type")))
    return "draft_vocab_size" in fields or any("eagle3" in each.lower() for each in said)


def layer_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The part that describes the head's decoder layer as a model's config.json would."""
    layer = dict(fields.get("transformer_layer_config") or fields)
    if any(each in LIKE_LLAMA for each in _architectures(fields)):
        layer["model_type"] = "llama"
    return layer


def read_form(name: str, fields: Mapping[str, Any], served: ModelConfig) -> Eagle3Form:
    """The form of the head in folder `name`, for the `served` model. ConfigError for what is not served."""
    more = fields.get("eagle_config") or {}
    if more.get("use_aux_hidden_state") is False or fields.get("use_aux_hidden_state") is False:
        allowed = (
            "a head that reads hidden states between layers: with use_aux_hidden_state false it reads the last ones"
        )
        raise ConfigError("draft_head", name, allowed)
    of_model = fields.get("target_hidden_size") or served.hidden_size
    if of_model != served.hidden_size:
        allowed = f"a head for models of hidden_size {served.hidden_size}: its target_hidden_size is {of_model}"
        raise ConfigError("draft_head", name, allowed)
    by_default = "transformer_layer_config" in fields  # speculators
    return Eagle3Form(
        reads=_layers_read(name, fields.get(LAYER_IDS) or more.get(LAYER_IDS), served.num_layers),
        vocab_size=fields.get("draft_vocab_size") or served.vocab_size,
        adds_to_normed=bool(fields.get("norm_before_residual", by_default)),
        passes_on_normed=bool(fields.get("norm_output", False)),
    )


def _architectures(fields: Mapping[str, Any]) -> Sequence[str]:
    named: Sequence[str] = fields.get("architectures") or ()
    return named


def _layers_read(name: str, ids: Sequence[Any] | None, num_layers: int) -> tuple[int, ...]:
    """Layers by their inputs, as vLLM numbers them. Heads trained with SpecForge name the layers before, by outputs.

    A file does not say which. No head reads the input of layer 1, and all read its output, so a list that begins with 1
    is of outputs (github.com/sgl-project/sglang/pull/25454). A wrong choice would cost draft tokens alone.
    """
    read: Sequence[Any] = (2, num_layers // 2, num_layers - 3) if ids is None else ids
    if read and read[0] == 1:
        read = [each + 1 if isinstance(each, int) else each for each in read]
    if not read or not all(isinstance(each, int) and 0 <= each <= num_layers for each in read):
        allowed = f"a head for models of {num_layers} layers: it reads the inputs of layers {list(read)}"
        raise ConfigError("draft_head", name, allowed)
    return tuple(read)
