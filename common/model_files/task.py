"""Task that a model is served for: generate text, embed texts, or score pairs. Does not load torch.

The folder determines the task: a `modules.json` of sentence-transformers describes an embedding, and an architecture
such as `Qwen3ForSequenceClassification` has a scoring head. All other models generate text. With --task, they also
embed (the normalised hidden state of the last token, as in Qwen3-Embedding) or score (how much likelier "yes" is as
the next token than "no", as in Qwen3-Reranker).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from common.errors import ModelError, shown
from common.model_files import config as configuration
from common.model_files.architecture.fields import FieldReader
from common.model_files.files import ModelFiles
from common.model_files.gguf.metadata import read_gguf_head
from common.model_files.json_file import parse_json, read_json, read_text
from common.wire import Pooling, Role

Task = Literal["generate", "embed", "score"]
CLASSIFIER = "ForSequenceClassification"
MODES: Mapping[str, Pooling] = {"mean": "mean", "mean_tokens": "mean", "lasttoken": "last"}
"""Pooling modes of sentence-transformers: values of `pooling_mode`, and suffixes of `pooling_mode_*`."""
HEADLESS_MODULES = ("Transformer", "Normalize")


@dataclass(frozen=True, slots=True)
class ServedTask:
    """Task of a served model.

    `pooling` turns the hidden states of a prompt into one vector of `width` numbers; "" for text generation. Embeddings
    are normalised if `normalise`. Scores are the head's output, or its sigmoid if `sigmoid`. With `answers`, that
    output is the logit of the first of these tokens minus that of the second.
    """

    name: Task = "generate"
    pooling: Pooling = ""
    width: int = 0
    normalise: bool = False
    sigmoid: bool = False
    answers: tuple[int, int] | None = None

    @property
    def generates(self) -> bool:
        return self.name == "generate"

    @property
    def needed(self) -> Role:
        """Role of the worker that serving requires. Decode workers can prefill, but only they generate text."""
        return "decode" if self.generates else "prefill"


GENERATES = ServedTask()


def served_task(files: ModelFiles, wanted: str = "auto") -> ServedTask:
    """Return the task of a model: --task, or with `auto` the one that its files describe.

    Raises ModelError if the model does not support the task.
    """
    if wanted == "generate":
        return GENERATES
    fields = read_json(files.config) if files.config is not None else {}
    meant = _meant_for(fields, files.config)
    task: Task = meant if wanted == "auto" else "score" if wanted == "score" else "embed"
    if task == "generate":
        return GENERATES
    if fields.get("is_causal") is False:
        raise ModelError(f"{files.config}: is_causal=false is not supported: use a model with causal attention")
    if task == "score":
        by_answers = ServedTask("score", "last", 1, sigmoid=True)
        return _score(fields, files) if meant == "score" else replace(by_answers, answers=_answers(files))
    width = _hidden_size(files)
    modules = files.config.with_name("modules.json") if files.config is not None else None
    last = ServedTask("embed", "last", width, normalise=True)
    return last if modules is None or not modules.exists() else _of_modules(modules, last)


def _meant_for(fields: Mapping[str, Any], path: Path | None) -> Task:
    """Return the task that the folder describes."""
    named = fields.get("architectures")
    if isinstance(named, list) and any(str(name).endswith(CLASSIFIER) for name in named):
        return "score"
    return "embed" if path is not None and path.with_name("modules.json").exists() else "generate"


def _answers(files: ModelFiles) -> tuple[int, int]:
    """Return the tokens "yes" and "no", with which a model such as Qwen3-Reranker scores a document."""
    # Imported here, so that other tasks do not load it.
    from common.model_files.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_file(files.tokenizer)
    yes, no = (tokenizer.token_to_id(word) for word in ("yes", "no"))
    if yes is None or no is None:
        raise ModelError(
            f"{files.model_id} cannot be served with --task score: it has neither a scoring head (architecture "
            f'*{CLASSIFIER}) nor the tokens "yes" and "no"'
        )
    return yes, no


def _score(fields: Mapping[str, Any], files: ModelFiles) -> ServedTask:
    reader = FieldReader(fields, files.config or files.tokenizer)
    labels = fields.get("num_labels") or len(reader.mapping("id2label")) or 2  # 2: transformers' default
    if labels != 1:
        raise ModelError(f"{files.config}: {shown(labels)} labels are not supported: use a reranker with 1 label")
    own = reader.mapping("sentence_transformers")
    activation = str(own.get("activation_fn") or fields.get("sbert_ce_default_activation_function") or "Sigmoid")
    kind = activation.rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise ModelError(
            f"{files.config}: activation {shown(activation)} is not supported: must be Sigmoid or Identity"
        )
    return ServedTask("score", "last", 1, sigmoid=kind == "Sigmoid")


def _of_modules(path: Path, task: ServedTask) -> ServedTask:
    """Return the embedding task that the modules of sentence-transformers describe."""
    modules = _modules(path)
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    for kind in kinds:
        if kind not in (*HEADLESS_MODULES, "Pooling"):
            raise ModelError(f"{path}: module {kind} is not supported: must be Transformer, Pooling or Normalize")
    if kinds.count("Pooling") != 1:
        raise ModelError(f"{path} has {kinds.count('Pooling')} Pooling modules: must be 1")
    place = PurePosixPath(str(modules[kinds.index("Pooling")].get("path")))
    if place.is_absolute() or ".." in place.parts:
        raise ModelError(f"{path}: module path {str(place)!r} is outside of the model folder")
    pooling = path.parent / place / "config.json"
    return replace(task, pooling=_pooling(pooling), normalise="Normalize" in kinds)


def _modules(path: Path) -> list[dict[str, Any]]:
    modules = parse_json(read_text(path) or "", path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path} must contain a JSON list of objects: fetch it again")
    return modules


def _pooling(path: Path) -> Pooling:
    fields = read_json(path, required=True)
    named = fields.get("pooling_mode")
    modes = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    prefix = "pooling_mode_"
    modes += [name.removeprefix(prefix) for name, on in fields.items() if name.startswith(prefix) and on is True]
    if len(modes) != 1 or modes[0] not in MODES:
        shown = " and ".join(map(str, modes)) or "none"
        raise ModelError(f"{path}: pooling mode {shown} is not supported: must be mean or lasttoken")
    return MODES[modes[0]]


def _hidden_size(files: ModelFiles) -> int:
    if files.config is not None:
        return configuration.from_hf(files.config).hidden_size
    head = read_gguf_head(files.weights[0])
    size = head.metadata.get(f"{head.architecture}.embedding_length")
    if not isinstance(size, int) or size < 1:
        raise ModelError(
            f"{files.weights[0]} has embedding_length={size!r}, expected a positive number: fetch the model again"
        )
    return size
