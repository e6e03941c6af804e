"""EAGLE-3 heads of random weights, their formula in float64, and heads that are always right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Linear

from .draft_heads import certain_model

STATES = 3


def eagle3_folder(
    folder: Path,
    served: Path,
    *,
    draft_vocab_size: int = 0,
    own_embedding: bool = False,
    state_norms: str = "",
    layer: str = "midlayer.",
    seed: int = 23,
    **fields: Any,
) -> Path:
    """A random head; `fields` of its config.json differ from a Llama of the model's sizes.

    `draft_vocab_size` 0: all of the model's tokens. `state_norms`: "", input_norm or fc_norm. `layer`: how the names
    of its layer's tensors begin.
    """
    of_model, random = json.loads((served / "config.json").read_text()), torch.Generator().manual_seed(seed)
    of_model = of_model.get("text_config", of_model)
    vocab = of_model["vocab_size"]
    config = config_of(of_model) | {"draft_vocab_size": draft_vocab_size or vocab} | fields
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = _shapes(config, of_model["hidden_size"] * STATES, layer)
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocab, config["hidden_size"])
    made = {name: torch.randn(shape, generator=random) / shape[1] ** 0.5 for name, shape in shapes.items()}
    for name, size in _norms(config, of_model["hidden_size"], layer, state_norms).items():
        made[name] = 1.0 + 0.3 * torch.randn(size, generator=random)
    if draft_vocab_size:
        token_ids = torch.randperm(vocab, generator=random)[:draft_vocab_size].sort().values
        made |= vocabulary(token_ids, vocab)
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    return folder


def config_of(served: dict[str, Any]) -> dict[str, Any]:
    """The config.json that SpecForge writes for a head of the model."""
    heads, hidden = served["num_attention_heads"], served["hidden_size"]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "intermediate_size": served["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": served["num_key_value_heads"],
        "head_dim": served.get("head_dim") or hidden // heads,
        "vocab_size": served["vocab_size"],
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def vocabulary(token_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Both maps between a head's tokens and the model's."""
    knows = torch.zeros(vocab_size, dtype=torch.bool)
    knows[token_ids] = True
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": knows}


def _shapes(config: dict[str, Any], columns: int, layer: str) -> dict[str, tuple[int, int]]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    of_layer = {
        **{"self_attn.q_proj": (q, 2 * hidden), "self_attn.k_proj": (kv, 2 * hidden)},
        **{"self_attn.v_proj": (kv, 2 * hidden), "self_attn.o_proj": (hidden, q)},
        **{"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)},
    }
    others = {"fc.weight": (hidden, columns), "lm_head.weight": (config["draft_vocab_size"], hidden)}
    return {f"{layer}{name}.weight": shape for name, shape in of_layer.items()} | others


def _norms(config: dict[str, Any], width: int, layer: str, state_norms: str) -> dict[str, int]:
    of_layer = (f"{layer}{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))
    norms = dict.fromkeys((*of_layer, "norm.weight"), config["hidden_size"])
    if state_norms == "input_norm":
        return norms | {"input_norm.weight": STATES * width}
    return norms | {f"fc_norm.{i}.weight": width for i in range(STATES) if state_norms}


class PlainEagle3:
    """A head by its formula, over whole texts, with attention and MLP of transformers."""

    def __init__(self, folder: Path, served: Path) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            served, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        self.fields = json.loads((folder / "config.json").read_text())
        of_layer = self.fields.get("transformer_layer_config") or self.fields
        given = {name: value for name, value in of_layer.items() if name not in ("architectures", "model_type")}
        self.config = transformers.LlamaConfig(**given)
        self.config._attn_implementation = "eager"
        names = ((name.removeprefix("model."), each) for name, each in load_file(folder / "model.safetensors").items())
        self.tensors = {
            name.replace("midlayer.", "layers.0."): each.double() if each.is_floating_point() else each
            for name, each in names
        }
        self._make_layer()

    def _make_layer(self) -> None:
        from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding

        self.attention, self.mlp = LlamaAttention(self.config, 0), LlamaMLP(self.config)
        self.rotary = LlamaRotaryEmbedding(self.config)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = len(self.tensors[f"layers.0.self_attn.{name}.weight"])
            setattr(self.attention, name, Linear(2 * self.config.hidden_size, rows, bias=False))
        for module, prefix in ((self.attention, "layers.0.self_attn."), (self.mlp, "layers.0.mlp.")):
            own = {name.removeprefix(prefix): each for name, each in self.tensors.items() if name.startswith(prefix)}
            module.double().load_state_dict(own)

    @torch.inference_mode()
    def states(self, token_ids: Sequence[int]) -> Tensor:
        """What the head makes of the model's hidden states behind each token: [n, its hidden_size]."""
        found: list[Any] = []
        decoder = self.model.model
        hook = decoder.layers[-1].register_forward_hook(lambda _, given, out: found.append(out))
        inputs = decoder(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        hook.remove()
        last = found[0][0] if isinstance(found[0], tuple) else found[0]
        inputs = [*inputs[:-1], last]  # transformers gives the last one normed
        folded = [inputs[layer].reshape(len(token_ids), -1) for layer in self._reads(len(inputs) - 1)]
        if "fc_norm.0.weight" in self.tensors:
            folded = [self._norm(each, f"fc_norm.{i}.weight") for i, each in enumerate(folded)]
        together = torch.cat(folded, 1)
        if "input_norm.weight" in self.tensors:
            together = self._norm(together, "input_norm.weight")
        return together @ self.tensors["fc.weight"].T

    def _reads(self, num_layers: int) -> Sequence[int]:
        named: list[int] = self.fields.get("eagle_aux_hidden_state_layer_ids") or []
        if "eagle_config" in self.fields:
            named = [each + 1 for each in self.fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        return named or (2, num_layers // 2, num_layers - 3)

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], before: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of each next token, and states of its own, from the state before each token: [n, ...] each."""
        tokens, count = torch.tensor(token_ids), len(token_ids)
        table = self.tensors.get("embed_tokens.weight", self.model.model.embed_tokens.weight)
        normed = self._norm(before, "layers.0.hidden_norm.weight")
        x = torch.cat((self._norm(table[tokens], "layers.0.input_layernorm.weight"), normed), 1)
        mask = torch.full((count, count), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        angles = self.rotary(x[None], torch.arange(count)[None])
        by_default = "transformer_layer_config" in self.fields
        added_to = normed if self.fields.get("norm_before_residual", by_default) else before
        hidden = added_to + self.attention(x[None], position_embeddings=angles, attention_mask=mask)[0][0]
        hidden = hidden + self.mlp(self._norm(hidden, "layers.0.post_attention_layernorm.weight"))
        normed = self._norm(hidden, "norm.weight")
        logits = normed @ self.tensors.get("lm_head.weight", self.model.lm_head.weight).T
        if "t2d" in self.tensors:
            whole = torch.full((count, len(self.tensors["t2d"])), -torch.inf, dtype=logits.dtype)
            whole[:, self.tensors["t2d"]] = logits
            logits = whole
        return logits, normed if self.fields.get("norm_output") else hidden

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.tensors[name]


def far_model(folder: Path, *, num_layers: int = 4) -> Path:
    """A `certain_model` whose first layer adds so much that what it is added to is lost in rounding.

    That is the embedding of a token here, and in an EAGLE-3 head the state before it.
    """
    certain_model(folder, num_layers=num_layers)
    weights = load_file(folder / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.0.{name}.weight"] *= 2.0**27
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def right_eagle3(folder: Path, served: Path) -> Path:
    """The head that says what a `far_model` says, its tokens in another order. States are normed, so they are lost."""
    vocab = json.loads((served / "config.json").read_text())["vocab_size"]
    eagle3_folder(folder, served, draft_vocab_size=vocab, state_norms="fc_norm", norm_output=True)
    weights, head = load_file(served / "model.safetensors"), load_file(folder / "model.safetensors")
    for name in [name for name in head if name.startswith("midlayer.") and "hidden_norm" not in name]:
        copied = weights[name.replace("midlayer.", "model.layers.0.")].clone()
        if name.removeprefix("midlayer.self_attn.")[0] in "qkv":
            copied = torch.cat((copied, torch.zeros_like(copied)), 1)
        head[name] = copied
    token_ids = torch.arange(vocab).flip(0)
    head |= vocabulary(token_ids, vocab)
    head["norm.weight"] = weights["model.norm.weight"].clone()
    head["lm_head.weight"] = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])[token_ids].clone()
    save_file(head, folder / "model.safetensors", {"format": "pt"})
    return folder
