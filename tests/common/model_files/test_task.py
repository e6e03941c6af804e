"""What a model is served for, by its files and by --task."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from common.errors import ModelError
from common.model_files.files import ModelFiles
from common.model_files.resolve import resolve_model
from common.model_files.task import GENERATES, ServedTask, served_task

from ...pooling_models import MODULES, write_modules

Change = Callable[[Path], object]
WIDTH = 64


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    """The tiny model, with a configuration of the test's own."""
    found = resolve_model("tiny-random")
    assert found.config is not None
    config = tmp_path / "config.json"
    config.write_text(found.config.read_text())
    return replace(found, config=config)


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def reranker(folder: Path, **fields: Any) -> None:
    change(folder, architectures=["Qwen3ForSequenceClassification"], **({"id2label": {"0": "LABEL_0"}} | fields))


def newer_pooling(folder: Path) -> None:
    write_modules(folder, "lasttoken", normalise=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"embedding_dimension": 64, "pooling_mode": "mean"}))


SERVED: list[tuple[str, Change, ServedTask]] = [
    ("auto", lambda folder: None, GENERATES),
    ("generate", lambda folder: write_modules(folder, "cls_token", normalise=True), GENERATES),
    ("embed", lambda folder: None, ServedTask("embed", "last", WIDTH, normalise=True)),
    (
        "auto",
        lambda folder: write_modules(folder, "lasttoken", normalise=True),
        ServedTask("embed", "last", WIDTH, True),
    ),
    ("auto", lambda folder: write_modules(folder, "mean_tokens", normalise=False), ServedTask("embed", "mean", WIDTH)),
    ("auto", newer_pooling, ServedTask("embed", "mean", WIDTH, normalise=True)),
    ("auto", reranker, ServedTask("score", "last", 1, sigmoid=True)),
    ("score", lambda folder: reranker(folder, num_labels=1), ServedTask("score", "last", 1, sigmoid=True)),
    (
        "auto",
        lambda folder: reranker(folder, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"}),
        ServedTask("score", "last", 1),
    ),
    ("embed", reranker, ServedTask("embed", "last", WIDTH, normalise=True)),
]


@pytest.mark.parametrize(("wanted", "prepare", "expected"), SERVED)
def test_what_files_and_flag_say(
    files: ModelFiles, tmp_path: Path, wanted: str, prepare: Change, expected: Any
) -> None:
    prepare(tmp_path)
    assert served_task(files, wanted) == expected


def outside(folder: Path) -> None:
    write_modules(folder, "lasttoken", normalise=True)
    path = folder / "modules.json"
    path.write_text(path.read_text().replace('"1_Pooling"', '"../1_Pooling"'))


REFUSED: list[tuple[str, Change, str]] = [
    (
        "auto",
        lambda folder: write_modules(folder, "cls_token", normalise=True),
        "pooling mode cls_token is not supported",
    ),
    ("auto", lambda folder: write_modules(folder, "none", normalise=True), "pooling mode none is not supported"),
    (
        "auto",
        lambda folder: write_modules(folder, "lasttoken", normalise=True, kinds=(*MODULES, "x.Dense")),
        "module Dense is not supported",
    ),
    ("embed", lambda folder: write_modules(folder, "", normalise=True, kinds=MODULES[:1]), "0 Pooling modules"),
    ("auto", outside, "outside of the model folder"),
    ("auto", lambda folder: (folder / "modules.json").write_text("{}"), "a JSON list of objects"),
    ("auto", lambda folder: (folder / "modules.json").write_text("["), "is not valid JSON"),
    ("embed", lambda folder: change(folder, is_causal=False), "is_causal=false is not supported"),
    ("score", lambda folder: None, "has neither a scoring head"),
    ("auto", lambda folder: reranker(folder, id2label={"0": "no", "1": "yes"}), "2 labels are not supported"),
    (
        "auto",
        lambda folder: reranker(folder, sbert_ce_default_activation_function="torch.nn.Tanh"),
        "activation 'torch.nn.Tanh' is not supported",
    ),
]


@pytest.mark.parametrize(("wanted", "prepare", "why"), REFUSED)
def test_what_cannot_be_served(files: ModelFiles, tmp_path: Path, wanted: str, prepare: Change, why: str) -> None:
    prepare(tmp_path)
    with pytest.raises(ModelError, match=why):
        served_task(files, wanted)
