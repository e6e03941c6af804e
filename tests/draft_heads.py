"""Checkpoints with draft heads, and a plain forward pass of one, in float64, of transformers' own layers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.model_files.resolve import resolve_model
from common.model_files.tiny import make_tiny_model

from .common.engine.models.generation import SIZES, random_checkpoint
from .families import CASES

NUM_LAYERS = SIZES["num_hidden_layers"]
HIDDEN, VOCAB = SIZES["hidden_size"], SIZES["vocab_size"]


def mtp_checkpoint(folder: Path, case: str, **options: Any) -> Path:
    """A model of `NUM_LAYERS` layers; the one that transformers writes behind them becomes the MTP layer's."""
    family, fields = CASES[case]
    random_checkpoint(folder, family, **(fields | options | {"num_hidden_layers": NUM_LAYERS + 1}))
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights, random = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(21)
    prefix = f"model.layers.{NUM_LAYERS}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{prefix}{name}.weight"] = 1.0 + 0.3 * torch.randn(HIDDEN, generator=random)
    weights[f"{prefix}eh_proj.weight"] = 0.1 * torch.randn(HIDDEN, 2 * HIDDEN, generator=random)
    weights[f"{prefix}shared_head.head.weight"] = 0.15 * torch.randn(VOCAB, HIDDEN, generator=random)
    weights[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def eagle_folder(folder: Path, served: Path, *, biased: bool = False, seed: int = 22, **fields: Any) -> Path:
    """A random EAGLE head for a model in the form of Llama; `fields` of its config.json differ from the model's."""
    config = json.loads((served / "config.json").read_text()) | {"num_hidden_layers": 1} | fields
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    random, hidden = torch.Generator().manual_seed(seed), config["hidden_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv, inner = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim, config["intermediate_size"]
    shapes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    weights = {f"layers.0.self_attn.{name}.weight": shape for name, shape in shapes.items()}
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    weights |= {f"layers.0.mlp.{name}.weight": shape for name, shape in shapes.items()}
    weights |= {"fc.weight": (hidden, 2 * hidden), "embed_tokens.weight": (config["vocab_size"], hidden)}
    made = {name: torch.randn(shape, generator=random) / shape[1] ** 0.5 for name, shape in weights.items()}
    made["layers.0.post_attention_layernorm.weight"] = 1.0 + 0.3 * torch.randn(hidden, generator=random)
    if biased:
        made["fc.bias"] = 0.3 * torch.randn(hidden, generator=random)
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_tokenizer(folder: Path) -> Path:
    """The folder with the tokenizer of the tiny model, for a worker to serve it."""
    for file in resolve_model("tiny-random").tokenizer.parent.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


class PlainHead:
    """A head by its formula, over whole texts. `layer` is transformers', of the model `model` that has it behind it."""

    def __init__(self, model: Any, layer: Any, tensors: dict[str, Tensor]) -> None:
        """`tensors`: merge, and bias, enorm, hnorm, norm, head where the head has its own."""
        self.model, self.layer = model.double(), layer.double()
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.eps = model.config.rms_norm_eps

    @torch.inference_mode()
    def states(self, token_ids: Sequence[int]) -> Tensor:
        """The model's hidden states behind each token, normed: [n, hidden_size]."""
        states: Tensor = self.model.model(torch.tensor([token_ids])).last_hidden_state[0]
        return states

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], before: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of each next token and hidden states, from the hidden state before each token: [n, ...] each."""
        inner, tensors, count = self.model.model, self.tensors, len(token_ids)
        embedded = inner.embed_tokens(torch.tensor(token_ids))
        if "enorm" in tensors:
            embedded, before = self._norm(embedded, tensors["enorm"]), self._norm(before, tensors["hnorm"])
        x = torch.cat((embedded, before), 1) @ tensors["merge"].T + tensors.get("bias", 0.0)
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        angles = inner.rotary_emb(x[None], positions)
        out = self.layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=angles)
        states = (out[0] if isinstance(out, tuple) else out)[0]
        normed = self._norm(states, tensors["norm"]) if "norm" in tensors else states
        return normed @ tensors.get("head", self.model.lm_head.weight).T, states

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * weight


def plain_mtp(folder: Path) -> PlainHead:
    """The MTP head of such a checkpoint."""
    import transformers

    tensors, prefix = load_file(folder / "model.safetensors"), f"model.layers.{NUM_LAYERS}."
    own = {
        "merge": "eh_proj",
        "enorm": "enorm",
        "hnorm": "hnorm",
        "norm": "shared_head.norm",
        "head": "shared_head.head",
    }
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = NUM_LAYERS + 1
    config.mlp_layer_types = None
    model = getattr(transformers, config.architectures[0]).from_pretrained(
        folder, config=config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    layer = model.model.layers[NUM_LAYERS]
    model.model.layers = model.model.layers[:NUM_LAYERS]
    config.num_hidden_layers = NUM_LAYERS
    return PlainHead(model.eval(), layer, {name: tensors[f"{prefix}{part}.weight"] for name, part in own.items()})


def plain_eagle(folder: Path, served: Path) -> PlainHead:
    """An EAGLE head: the layer of a Llama without its first norm."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model = transformers.AutoModelForCausalLM.from_pretrained(
        served, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    tensors = load_file(folder / "model.safetensors")
    layer = LlamaDecoderLayer(model.config, 0).eval()
    layer.input_layernorm = torch.nn.Identity()
    own = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items() if name.startswith("layers.0.")}
    layer.load_state_dict(own)
    given = {"merge": "fc.weight", "bias": "fc.bias"}
    return PlainHead(model, layer, {name: tensors[part] for name, part in given.items() if part in tensors})


def certain_model(folder: Path, *, num_layers: int = 4) -> Path:
    """The tiny model, of whose layers the first alone adds something, with embeddings that norms leave as they are.

    A head with a copy of that layer, which reads nothing but the token, says what the model says.
    """
    make_tiny_model(folder)
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    embedding = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = embedding / embedding.square().mean(1, keepdim=True).sqrt()
    first = {name: tensor for name, tensor in weights.items() if name.startswith("model.layers.0.")}
    for name, tensor in first.items():
        adds = "o_proj" in name or "down_proj" in name
        for layer in range(1, num_layers):
            weights[name.replace(".0.", f".{layer}.")] = torch.zeros_like(tensor) if adds else tensor.clone()
    kept = {name: tensor for name, tensor in weights.items() if _layer_of(name) < num_layers}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    return folder


def right_eagle(folder: Path, served: Path) -> Path:
    """The head that says what a `certain_model` says: of its states the length differs, which greedy tokens ignore."""
    eagle_folder(folder, served)
    weights, head = load_file(served / "model.safetensors"), load_file(folder / "model.safetensors")
    for name in [name for name in head if name.startswith("layers.0.")]:
        head[name] = weights[f"model.{name}"].clone()
    size = len(head["fc.weight"])
    head["fc.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
    save_file(head, folder / "model.safetensors", {"format": "pt"})
    return folder


def right_mtp(folder: Path, case: str, *, num_layers: int) -> Path:
    """A checkpoint with an MTP layer that says what the model says: as `right_eagle` of a `certain_model`."""
    mtp_checkpoint(folder, case, first_k_dense_replace=0)
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    embedding, made = weights["model.embed_tokens.weight"], {}
    for name, tensor in weights.items():
        if name.startswith("model.layers.0."):
            adds = "o_proj" in name or "down_proj" in name
            for layer in range(num_layers + 1):
                is_copy = layer in (0, num_layers) or not adds
                made[name.replace(".0.", f".{layer}.", 1)] = tensor.clone() if is_copy else torch.zeros_like(tensor)
        elif not name.startswith("model.layers."):
            made[name] = tensor
    made["model.embed_tokens.weight"] = embedding / embedding.square().mean(1, keepdim=True).sqrt()
    prefix, ones = f"model.layers.{num_layers}.", torch.ones(HIDDEN)
    made |= {f"{prefix}enorm.weight": ones, f"{prefix}hnorm.weight": ones.clone()}
    made[f"{prefix}eh_proj.weight"] = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), 1)
    made[f"{prefix}shared_head.norm.weight"] = made["model.norm.weight"].clone()
    made[f"{prefix}shared_head.head.weight"] = made["lm_head.weight"].clone()
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    return folder


def _layer_of(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1
