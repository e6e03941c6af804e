"""Any malformed file of a model is refused in a sentence that names the file, or loads; no other error leaves it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf.constants import GGMLQuantizationType

from common.engine.models.load import load_model
from common.engine.weights.formats.registry import read_weight_format
from common.errors import ModelError
from common.model_files.config import from_hf
from common.model_files.families import FAMILIES
from common.model_files.resolve import resolve_model
from common.model_files.task import served_task
from common.model_files.template import ChatTemplate
from common.model_files.tiny import make_tiny_model
from common.model_files.weight_scheme import read_kv_scheme
from kernels import prepare

from ...model_files.test_config import published
from .generation import random_checkpoint
from .gguf_checkpoint import write_gguf

WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 1.5, 2**31, 10**400, float("nan"), float("inf")),
    *("", "x", [], [1], ["x"], [None], {}, {"a": 1}, [[]]),
)
QUANTISED: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq", "pack_dtype": "int32"},
    "awq": {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"},
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "compressed": {
        **{"quant_method": "compressed-tensors", "format": "float-quantized", "sparsity_config": {"format": "dense"}},
        "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "block"}}},
        **{"transform_config": {"config_groups": {}}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    },
}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 12345\n"


def changed(document: dict[str, Any], *, levels: int = 4) -> Iterator[tuple[str, dict[str, Any]]]:
    """The document with each of its values wrong in turn, also inside of objects."""
    for name, value in document.items():
        for wrong in WRONG:
            yield f"{name}: {wrong!r:.30}", document | {name: wrong}
        if isinstance(value, dict) and levels:
            for what, inner in changed(value, levels=levels - 1):
                yield f"{name}.{what}", document | {name: inner}


def refused(folder: Path, *uses: Callable[[], object], what: str) -> int:
    """How many of the uses are refused, each in a sentence that names a file of the folder."""
    count = 0
    for use in uses:
        try:
            use()
        except ModelError as error:
            assert str(folder) in str(error) or folder.name in str(error), what
            count += 1
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    return count


@pytest.mark.slow_except("qwen3")
@pytest.mark.parametrize("model_type", FAMILIES)
def test_wrong_values_in_a_configuration(tmp_path: Path, model_type: str) -> None:
    _, fields, *_ = published(model_type)
    path, count = tmp_path / "config.json", 0
    for what, document in changed(fields):
        path.write_text(json.dumps(document))
        count += refused(tmp_path, lambda: from_hf(path), what=what)
    assert count > 50


@pytest.mark.parametrize("method", QUANTISED)
def test_wrong_values_in_a_quantization_config(tmp_path: Path, method: str) -> None:
    path, count = tmp_path / "config.json", 0
    for what, document in changed({"model_type": "llama", "quantization_config": QUANTISED[method]}):
        path.write_text(json.dumps(document))
        count += refused(tmp_path, lambda: read_weight_format(path), lambda: read_kv_scheme(path), what=what)
    assert count > 10


@pytest.fixture(scope="module", autouse=True)
def kernels_built() -> None:
    """In the usual cache, before tests have caches of their own, in which they would be compiled again."""
    prepare("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    return make_tiny_model(tmp_path / "model")


def as_router(path: Path) -> None:
    files = resolve_model(str(path), weights=False, progress=False)
    _ = ChatTemplate.from_files(files).content_forms
    served_task(files)


def as_worker(path: Path) -> None:
    files = resolve_model(str(path), progress=False)
    served_task(files)
    load_model(files)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("generation_config.json", {}),
        ("tokenizer_config.json", {"eos_token": {"content": "<|eos|>"}}),
        ("config.json", {"num_labels": 1, "id2label": {"0": "a"}, "architectures": ["LlamaForSequenceClassification"]}),
        ("model.safetensors.index.json", {"weight_map": {"model.norm.weight": "model.safetensors"}}),
    ],
)
def test_wrong_values_in_the_files_of_a_folder(folder: Path, name: str, more: dict[str, Any]) -> None:
    path = folder / name
    document = (json.loads(path.read_text()) if path.exists() else {}) | more
    if name == "config.json":  # the numbers have tests of their own
        document = {key: document[key] for key in (*more, "model_type", "eos_token_id")} | {"text_config": {}}
    for what, wrong in changed(document):
        path.write_text(json.dumps(wrong))
        refused(folder, lambda: as_router(folder), lambda: as_worker(folder), what=f"{name} {what}")


ODD: dict[str, Callable[[Path], object]] = {
    "a pointer of Git LFS": lambda path: path.write_text(LFS),
    "empty": lambda path: path.write_bytes(b""),
    "no JSON": lambda path: path.write_text("{"),
    "a list": lambda path: path.write_text("[]"),
    "a number": lambda path: path.write_text("3"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "latin-1": lambda path: path.write_bytes('{"é": 1}'.encode("latin-1")),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "a folder": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to(path.with_name("nowhere")),
    "a pipe": os.mkfifo,
}
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")


@pytest.mark.slow_except("config.json-a pointer of Git LFS", "tokenizer.json-a pointer of Git LFS")
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", [*FILES, "chat_template.jinja", "modules.json", "model.safetensors.index.json"])
def test_odd_files(folder: Path, name: str, odd: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    ODD[odd](path)
    as_json = name != "chat_template.jinja" and odd not in ("a folder", "a pipe")
    weighs = name.startswith("model.safetensors")
    count = refused(folder, lambda: as_router(folder), lambda: as_worker(folder), what=f"{name} is {odd}")
    if as_json or name in FILES:
        assert count == (1 if weighs else 2) or odd in ("a list", "a link to nothing")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.json", "x.safetensors", "x.jinja"])
@pytest.mark.parametrize("odd", ODD)
def test_odd_files_that_are_not_the_models_are_left_alone(folder: Path, name: str, odd: str) -> None:
    ODD[odd](folder / name)
    as_router(folder)
    as_worker(folder)


def test_a_byte_order_mark_is_no_part_of_a_file(folder: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    as_worker(folder)


def test_a_null_text_config_is_none(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "text_config": None}))
    as_worker(folder)


def test_end_tokens_beyond_the_vocabulary_are_left_out(folder: Path) -> None:
    """Workers mask the logits of end tokens, which have no place for others."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, -1, 999_999, 2**70]}))
    assert resolve_model(str(folder), progress=False).eos_token_ids == (259, 257)


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    checkpoint = random_checkpoint(folder / "checkpoint", "Llama", num_hidden_layers=1, tie_word_embeddings=True)
    return write_gguf(checkpoint, folder / "small.gguf", "llama", GGMLQuantizationType.F32)


def rewritten(source: Path, target: Path, key: str, value: Any) -> bool:
    """The file with one value of its metadata changed (None: left out). False where GGUF has no such value."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(str(target), "llama")
    found: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items() if "." in name}
    found = {name: one for name, one in found.items() if not name.startswith("GGUF.")} | {key: value}
    for name, one in found.items():
        if one is None or name == "general.architecture" != key:
            continue
        try:
            kind = gguf.GGUFValueType.get_type(one[0] if isinstance(one, list) else one)
        except (ValueError, IndexError):
            return False
        if isinstance(one, list):
            writer.add_key_value(name, one, gguf.GGUFValueType.ARRAY, kind)
        elif isinstance(one, int) and not isinstance(one, bool):
            writer.add_key_value(name, one, gguf.GGUFValueType.INT64)
        else:
            writer.add_key_value(name, one, kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return True


GGUF_KEYS = (
    *("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.model"),
    *("tokenizer.ggml.pre", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id", "tokenizer.chat_template"),
    *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.scores", "general.alignment", "llama.block_count"),
    "tokenizer.chat_template.tool_use",
    *("llama.context_length", "llama.embedding_length", "llama.attention.head_count", "llama.rope.freq_base"),
    *("llama.attention.layer_norm_rms_epsilon", "llama.expert_count", "llama.rope.scaling.type"),
)


def test_a_gguf_file_with_a_template_for_tools(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    assert rewritten(small_gguf, tmp_path / "named.gguf", "tokenizer.chat_template.tool_use", "{{ tools }}")
    assert resolve_model(str(tmp_path / "named.gguf"), progress=False).tool_template == "{{ tools }}"


GGUF_WRONG: tuple[Any, ...] = (None, True, -1, 0, 3, 2**31, 2**62, 1.5, "", "x", [1], ["x"], ["x", "x"], [True])


@pytest.mark.slow_except("tokenizer.ggml.eos_token_id")
@pytest.mark.parametrize("key", GGUF_KEYS)
def test_wrong_values_in_the_metadata_of_a_gguf_file(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    path, count = tmp_path / "wrong.gguf", 0
    assert rewritten(small_gguf, path, "general.comment", "nothing is wrong")
    as_worker(path)
    for wrong in GGUF_WRONG:
        if rewritten(small_gguf, path, key, wrong):
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
            count += refused(path, lambda: as_router(path), lambda: as_worker(path), what=f"{key}: {wrong!r}")
    assert count > 0


def test_two_tensors_of_one_name_in_the_parts_of_a_gguf_model_are_refused(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    for number in (1, 2):
        shutil.copy(small_gguf, tmp_path / f"small-0000{number}-of-00002.gguf")
    with pytest.raises(ModelError, match="occurs twice in the model's files"):
        as_worker(tmp_path / "small-00001-of-00002.gguf")
