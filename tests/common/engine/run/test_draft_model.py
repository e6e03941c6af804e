"""Which models may draft for which, and what of the memory their KV takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.config import DecodeWorkerConfig
from common.engine.run.draft_model import check_vocabulary
from common.engine.run.loaded import LoadedModel
from common.errors import ConfigError
from common.model_files.resolve import resolve_model
from common.model_files.tiny import make_tiny_model


def config(draft: Path | str, **more: object) -> DecodeWorkerConfig:
    values = {
        "model": "tiny-random",
        "kv_memory_gib": 0.01,
        "threads": 1,
        "dtype": "float32",
        "draft_model": str(draft),
    }
    return DecodeWorkerConfig(**values | more)  # type: ignore[arg-type]


def renamed(folder: Path, change: dict[str, str]) -> Path:
    """Another tiny model in whose vocabulary some tokens have other names."""
    make_tiny_model(folder, seed=2)
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    vocab = document["model"]["vocab"]
    document["model"]["vocab"] = {change.get(token, token): token_id for token, token_id in vocab.items()}
    path.write_text(json.dumps(document))
    return folder


def test_its_kv_takes_a_part_of_the_memory(tmp_path: Path) -> None:
    files = resolve_model("tiny-random")
    alone = LoadedModel.load(files, config(""))
    loaded = LoadedModel.load(files, config(make_tiny_model(tmp_path / "draft", seed=1)))
    assert alone.draft is None and loaded.draft is not None
    kv = loaded.draft.runner.kv
    assert kv.num_blocks == loaded.kv.num_blocks == alone.kv.num_blocks // 2
    assert loaded.fingerprint == alone.fingerprint and loaded.weights == alone.weights
    assert loaded.draft.step_s > 0 and loaded.draft.token_s > 0
    assert loaded.draft.runner.model.quantization == "int8"


def test_another_vocabulary_is_refused_with_the_token(tmp_path: Path) -> None:
    folder = renamed(tmp_path / "renamed", {"A": "another"})
    with pytest.raises(ConfigError, match="draft_model.*1 tokens differ, first token 65 is 'another' instead of 'A'"):
        LoadedModel.load(resolve_model("tiny-random"), config(folder))


def test_a_few_tokens_more_are_no_other_vocabulary(tmp_path: Path) -> None:
    served, draft = resolve_model("tiny-random"), resolve_model(str(renamed(tmp_path / "same", {})))
    check_vocabulary(served, draft, "same")
    path = tmp_path / "same" / "tokenizer.json"
    document = json.loads(path.read_text())
    for size, refused in ((2, False), (40, True)):
        document["model"]["vocab"] |= {f"more {place}": 261 + place for place in range(size)}
        path.write_text(json.dumps(document))
        if refused:
            with pytest.raises(ConfigError, match="it has 301 tokens instead of 261"):
                check_vocabulary(served, draft, "same")
        else:
            check_vocabulary(served, draft, "same")


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="draft_model"):
        config("tiny-random", max_draft_tokens=0)
    with pytest.raises(ConfigError, match="draft_quantization"):
        config("tiny-random", device="cuda", draft_quantization="int8")
