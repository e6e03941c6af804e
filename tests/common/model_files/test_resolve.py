from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelError
from common.model_files import describe
from common.model_files.files import ModelFiles
from common.model_files.resolve import resolve_model
from common.model_files.tokenizer import Tokenizer


def edit(path: Path, **changes: Any) -> None:
    """Change or (with None) remove keys of a JSON file."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path, cache: Path) -> Path:
    """A Hugging Face folder that the test may change."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "my-model"))


@pytest.fixture
def gguf_copy(smollm2_files: ModelFiles, tmp_path: Path, cache: Path) -> Path:
    """The real file under another name, outside the cache."""
    return Path(shutil.copy(smollm2_files.weights[0], tmp_path / "copy.gguf"))


def test_smollm2(smollm2_files: ModelFiles) -> None:
    assert smollm2_files.model_id == "smollm2-135m" and smollm2_files.format == "gguf"
    assert smollm2_files.eos_token_ids == (2, 0) and smollm2_files.eos_token == "<|im_end|>"
    assert (smollm2_files.max_model_len, smollm2_files.vocab_size) == (8192, 49152)
    assert "SmolLM" in (smollm2_files.chat_template or "") and smollm2_files.weights_hash == "b8951aa641e75aa1"


@pytest.mark.slow
def test_gemma3(gemma3_files: ModelFiles) -> None:
    assert gemma3_files.eos_token_ids == (1, 106) and gemma3_files.bos_token == "<bos>"
    assert (gemma3_files.max_model_len, gemma3_files.vocab_size) == (32768, 262144)
    assert gemma3_files.chat_template is None and gemma3_files.weights_hash == "9334a390523ab4e2"


def test_a_folder(folder: Path) -> None:
    files = resolve_model(str(folder))
    assert files.model_id == "my-model" and files.format == "hf" and files.config == folder / "config.json"
    assert files.weights == (folder / "model.safetensors",) and files.tokenizer == folder / "tokenizer.json"
    assert files.eos_token_ids == (259, 257) and len(files.weights_hash) == 16


@pytest.mark.slow
def test_a_gguf_file_gets_its_tokenizer_converted(gguf_copy: Path, smollm2_files: ModelFiles) -> None:
    files = resolve_model(str(gguf_copy))
    assert files.model_id == "copy" and files.weights == (gguf_copy,)
    assert files.weights_hash == smollm2_files.weights_hash
    assert Tokenizer.from_file(files.tokenizer).encode("Hello") == [19556]
    assert resolve_model(str(gguf_copy.parent)) == files  # a folder with one .gguf file names it


def test_the_second_time_nothing_is_described(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve_model(str(folder))
    monkeypatch.delattr(describe, "describe_folder")
    assert resolve_model(str(folder)) == first


def test_a_changed_file_is_described_again(folder: Path) -> None:
    first = resolve_model(str(folder))
    weights = bytearray(first.weights[0].read_bytes())
    weights[-1] ^= 1
    first.weights[0].write_bytes(weights)
    edit(folder / "config.json", max_position_embeddings=128)
    second = resolve_model(str(folder))
    assert second.weights_hash != first.weights_hash and second.max_model_len == 128


def test_other_angles_make_another_model_of_the_same_weights(folder: Path) -> None:
    """Its KV means something else, so it must not be mixed with that of the first."""
    first, before = resolve_model(str(folder)), (folder / "config.json").read_text()
    edit(folder / "config.json", rope_theta=20000.0)
    assert resolve_model(str(folder)).weights_hash != first.weights_hash
    edit(folder / "config.json", rope_theta=json.loads(before)["rope_theta"], transformers_version="99")
    assert resolve_model(str(folder)).weights_hash == first.weights_hash


@pytest.mark.slow
def test_a_damaged_conversion_is_made_again(gguf_copy: Path) -> None:
    files = resolve_model(str(gguf_copy))
    whole = files.tokenizer.read_bytes()
    files.tokenizer.write_bytes(whole[:1000])
    assert resolve_model(str(gguf_copy)).tokenizer.read_bytes() == whole
    (files.tokenizer.parent / "files.json").write_text("{")
    assert resolve_model(str(gguf_copy)) == files


@pytest.mark.slow
def test_a_damaged_cached_model_is_refused(smollm2_files: ModelFiles, cache: Path) -> None:
    file = cache / "models" / "smollm2-135m" / smollm2_files.weights[0].name
    file.parent.mkdir(parents=True)
    shutil.copy(smollm2_files.weights[0], file)
    resolve_model("smollm2-135m", download=False)
    about = file.stat()
    with file.open("r+b") as damaged:
        damaged.write(b"GGUG")
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))  # as a bad disk would: same size, same time
    with pytest.raises(ModelError, match="is damaged: its SHA-256 .* Download it again: .* smollm2-135m --force"):
        resolve_model("smollm2-135m", download=False)
    os.truncate(file, 1000)
    with pytest.raises(ModelError, match="it has 1,000 bytes, not 98,362,432"):
        resolve_model("smollm2-135m", download=False)


def test_without_download_a_missing_model_is_an_error(cache: Path) -> None:
    with pytest.raises(ModelError, match="diptych pull smollm2-135m"):
        resolve_model("smollm2-135m", download=False)


def test_a_model_by_hub_id_needs_the_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    with pytest.raises(ModelError, match="no-one/no-such-model is not in the Hugging Face cache"):
        resolve_model("no-one/no-such-model", download=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install 'diptych\[hub\]'"):
        resolve_model("no-one/no-such-model")


@pytest.mark.parametrize("name", ["", "smollm", "no/such/file.gguf", "org/name/more", "missing.gguf"])
def test_an_unknown_name_lists_the_known_ones(name: str, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"no built-in model \(smollm2-135m, gemma3-270m, tiny-random"):
        resolve_model(name)


def test_a_near_miss_is_suggested(cache: Path) -> None:
    with pytest.raises(ModelError, match=r"Did you mean smollm2-135m\?"):
        resolve_model("smollm2-135")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "not a model folder: config.json is missing"),
        ("tokenizer.json", "has no tokenizer.json: create it"),
        ("model.safetensors", "no .safetensors weights"),
    ],
)
def test_a_folder_with_a_file_missing(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))


@pytest.mark.parametrize("weights", [True, False])
def test_an_unknown_architecture_is_for_other_engines(folder: Path, weights: bool) -> None:
    """The router and workers of other engines read it; workers of ours refuse it, also if it was described before."""
    known = resolve_model(str(folder), weights=weights)
    edit(folder / "config.json", model_type="new_model", max_position_embeddings=None, n_positions=777)
    with pytest.raises(ModelError, match="model_type 'new_model'"):
        resolve_model(str(folder), weights=weights)
    found = resolve_model(str(folder), weights=weights, supported=False)
    assert "model_type 'new_model'" in found.unsupported and not known.unsupported
    assert (found.max_model_len, found.vocab_size) == (777, known.vocab_size)
    assert (found.eos_token_ids, found.chat_template) == (known.eos_token_ids, known.chat_template)
    assert (found.weights, bool(found.weights_hash)) == (known.weights, weights)
    with pytest.raises(ModelError, match="model_type 'new_model'"):
        resolve_model(str(folder), weights=weights)


def test_facts_of_an_unknown_architecture_may_be_nested_or_missing(folder: Path) -> None:
    text = {"vocab_size": 5000, "max_position_embeddings": 640, "eos_token_id": [258, 99999]}
    (folder / "config.json").write_text(json.dumps({"model_type": "new_vision", "text_config": text}))
    (folder / "generation_config.json").unlink()
    found = resolve_model(str(folder), supported=False)
    assert (found.max_model_len, found.vocab_size, found.eos_token_ids) == (640, 5000, (259, 258))
    (folder / "config.json").write_text(json.dumps({"model_type": "new_model"}))
    found = resolve_model(str(folder), supported=False)
    assert found.max_model_len == describe.UNKNOWN_CONTEXT and found.vocab_size > 259


def test_a_damaged_folder_is_refused_for_every_engine(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError):
        resolve_model(str(folder), supported=False)


def test_weights_cut_short_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(ModelError, match="is damaged: it has"):
        resolve_model(str(folder))
    weights.write_bytes(b"not weights at all")
    with pytest.raises(ModelError, match="is not a safetensors file"):
        resolve_model(str(folder))


def test_shards_come_from_the_index(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "b.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model.safetensors", "y": "b.safetensors"}}))
    assert [path.name for path in resolve_model(str(folder)).weights] == ["b.safetensors", "model.safetensors"]
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lists 2 shards, of which \['b.safetensors'\] are missing"):
        resolve_model(str(folder))


def test_end_tokens_without_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=257)
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|eos|>"})
    assert resolve_model(str(folder)).eos_token_ids == (257,)


def test_where_chat_templates_come_from(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=[{"name": "default", "template": "named"}])
    assert resolve_model(str(folder)).chat_template == "named"
    (folder / "chat_template.jinja").write_text("file")
    assert resolve_model(str(folder)).chat_template == "file"
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=None)
    assert resolve_model(str(folder)).chat_template is None


def test_named_chat_templates(folder: Path) -> None:
    """As transformers reads them: files instead of tokenizer_config.json, which only adds a default."""

    def found() -> tuple[str | None, str | None]:
        files = resolve_model(str(folder))
        return files.chat_template, files.tool_template

    named = [{"name": name, "template": f"{name} of the list"} for name in ("default", "tool_use", "rag")]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert found() == ("default of the list", "tool_use of the list")
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("tool_use of a file")
    assert found() == ("default of the list", "tool_use of a file")
    (folder / "chat_template.jinja").write_text("default of a file")
    assert found() == ("default of a file", "tool_use of a file")
    (more / "tool_use.jinja").write_text("tool_use of a changed file")
    assert found() == ("default of a file", "tool_use of a changed file")
    (more / "tool_use.jinja").unlink()
    assert found() == ("default of a file", None)
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=[{"name": ["odd"], "template": 3}, *named[1:]])
    assert found() == (None, "tool_use of the list")
    edit(folder / "tokenizer_config.json", chat_template=[{"name": "tool_use", "template": 3}])
    with pytest.raises(ModelError, match="tokenizer_config.json: chat_template is 3, expected a string"):
        found()


def test_a_cache_that_cannot_be_written_is_named(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", "/dev/null/cache")
    with pytest.raises(ModelError, match="set DIPTYCH_CACHE to a writable folder"):
        resolve_model(str(tiny_folder))


@pytest.mark.slow
def test_neither_torch_nor_transformers_is_loaded() -> None:
    code = (
        "import sys; from common.model_files import resolve, template, tokenizer, tiny, download, describe\n"
        "resolve.resolve_model('smollm2-135m')\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'triton', 'transformers', 'gguf')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_router_reads_no_weights(folder: Path) -> None:
    whole = resolve_model(str(folder))
    for shard in whole.weights:
        shard.unlink()
    text = resolve_model(str(folder), weights=False)
    assert (text.weights, text.weights_hash) == ((), "")
    assert text.tokenizer == whole.tokenizer and text.eos_token_ids == whole.eos_token_ids
    with pytest.raises(ModelError, match="has no .safetensors weights"):
        resolve_model(str(folder))
