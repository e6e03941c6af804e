"""Tiny random models that embed and score, as sentence-transformers and transformers save them, and what they give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch

from common.model_files.resolve import resolve_model

WIDTH = 64
MODULES = ("sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling")
NORMALIZE = "sentence_transformers.models.Normalize"


def write_modules(folder: Path, mode: str, *, normalise: bool, kinds: Sequence[str] = MODULES) -> None:
    """The files by which sentence-transformers pools by `mode`, such as "mean_tokens"."""
    kinds = (*kinds, *((NORMALIZE,) if normalise else ()))
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind.rpartition('.')[2]}" if i else "", "type": kind}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = ("cls_token", "mean_tokens", "lasttoken")
    pooling = {"word_embedding_dimension": WIDTH, **{f"pooling_mode_{name}": name == mode for name in modes}}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def make_model(folder: Path, kind: str = "embed", *, mode: str = "lasttoken", normalise: bool = True) -> Path:
    """A Qwen3 of two layers in float32, with the tokenizer of the tiny model and the tokens "yes" and "no".

    `kind` is "embed", "score" (with a head) or "answer" (without: it generates).
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification, Qwen3Model

    tokenizer = tokenizers.Tokenizer.from_file(str(resolve_model("tiny-random").tokenizer))
    tokenizer.add_tokens(["yes", "no"])
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest of vLLM's kernels for CPUs
        max_position_embeddings=512,
        num_labels=1,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    model = {"embed": Qwen3Model, "score": Qwen3ForSequenceClassification, "answer": Qwen3ForCausalLM}[kind](config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    if kind == "embed":
        write_modules(folder, mode, normalise=normalise)
    return folder


class PoolingOracle:
    """What transformers makes of prompts, one at a time."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModel

        self.model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def hidden(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The normed hidden states [tokens, WIDTH]."""
        with torch.inference_mode():
            states: torch.Tensor = self.model(torch.tensor([list(token_ids)])).last_hidden_state[0]
        return states

    def embedding(self, token_ids: Sequence[int], mode: str, *, normalise: bool) -> torch.Tensor:
        states = self.hidden(token_ids)
        pooled = states.mean(0) if mode == "mean_tokens" else states[-1]
        return torch.nn.functional.normalize(pooled, dim=0) if normalise else pooled


def score_of(folder: Path, kind: str, token_ids: Sequence[int]) -> float:
    """The probability that transformers gives a pair's tokens: by its head, or of "yes" against "no"."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    family = AutoModelForSequenceClassification if kind == "score" else AutoModelForCausalLM
    model = family.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([list(token_ids)])).logits[0]
    if kind == "score":
        return float(torch.sigmoid(logits[0]))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return float(torch.softmax(logits[-1, [tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")]], 0)[0])
