"""Models on this machine: both caches, a folder of models, and the lock of a service."""

from __future__ import annotations

import fcntl
import shutil
import threading
from pathlib import Path

import msgspec
import pytest

from common.errors import ModelError
from common.model_files import library
from common.model_files.builtin import builtin_name
from common.model_files.library import (
    find_model,
    hold_model,
    is_in_use,
    local_models,
    release_models,
    remove_model,
    tiny_folder,
)
from common.model_files.resolve import resolve_model
from common.model_files.summary import summary_of


@pytest.fixture(autouse=True)
def released() -> object:
    """Locks that a test takes end with it."""
    yield
    for file in library.HELD.values():
        file.close()
    library.HELD.clear()


def put(path: Path, num_bytes: int = 10) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(num_bytes))
    return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in the layout of `huggingface_hub`: files are links to blobs."""
    hub = tmp_path / "hf" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)

    def link(repository: str, name: str, num_bytes: int) -> None:
        blob = put(hub / repository / "blobs" / name.replace("/", "-"), num_bytes)
        (snapshot := hub / repository / "snapshots" / "c0ffee" / name).parent.mkdir(parents=True, exist_ok=True)
        snapshot.symlink_to(blob)
        put(hub / repository / "refs" / "main").write_text("c0ffee")

    for name in ("config.json", "model.safetensors"):
        link("models--org--chat", name, 100)
    for name in ("chat-Q4_K_M.gguf", "chat-q8_0.gguf", "mmproj-F16.gguf", "bf16/chat-bf16-00001-of-00002.gguf"):
        link("models--org--chat-GGUF", name, 1000)
    link("datasets--org--texts", "model.safetensors", 1)
    return hub


def test_models_of_every_place_are_listed(cache: Path, hub: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        put(tiny_folder("tiny-random") / name)
    put(cache / "models" / "smollm2-135m" / ".download" / "part.whl")  # an interrupted download is no model
    put(tmp_path / "own" / "large" / "config.json")
    put(tmp_path / "own" / "large" / "model-00001-of-00002.safetensors", 5)
    put(tmp_path / "own" / "large" / "model-00002-of-00002.safetensors", 6)
    put(tmp_path / "own" / "one.Q4_1.gguf")
    found = {model.name: model for model in local_models(tmp_path / "own")}
    own = str(tmp_path / "own")
    of_hub = ["org/chat", "org/chat-GGUF:Q4_K_M", "org/chat-GGUF:bf16", "org/chat-GGUF:q8_0"]
    assert list(found) == ["tiny-random", *of_hub, f"{own}/large", f"{own}/one.Q4_1.gguf"]
    assert [found[name].num_bytes for name in (of_hub[0], of_hub[1], f"{own}/large")] == [100, 1000, 11]
    assert find_model("one.Q4_1", list(found.values())).name == f"{own}/one.Q4_1.gguf", "by the name for clients"
    with pytest.raises(ModelError, match="the models folder .* does not exist"):
        local_models(tmp_path / "absent")


def test_a_model_is_found_by_its_last_part(cache: Path, hub: Path) -> None:
    put(cache / "models" / "smollm2-135m" / "model.gguf")
    models = local_models()
    assert find_model("smollm2:135m", models).place == "cache"
    assert find_model("Chat", models).name == "org/chat"
    assert find_model("chat-GGUF:q8_0", models).name == "org/chat-GGUF:q8_0"
    with pytest.raises(ModelError, match=r"'org/chatt' is not on this machine. Did you mean org/chat\?"):
        find_model("org/chatt", models)
    with pytest.raises(ModelError, match="'chat' is ambiguous: use one of a/chat, org/chat"):
        find_model("chat", [library.LocalModel("a/chat", "hub", "gguf", (hub,), (), 0, 0.0), *models])


def test_deleting_frees_the_content_of_one_model_only(cache: Path, hub: Path) -> None:
    models = local_models()
    assert remove_model(find_model("org/chat-GGUF:Q4_K_M", models)) == 1000
    blobs = {path.name for path in (hub / "models--org--chat-GGUF" / "blobs").iterdir()}
    assert blobs == {"chat-q8_0.gguf", "mmproj-F16.gguf", "bf16-chat-bf16-00001-of-00002.gguf"}
    remove_model(find_model("org/chat", models))
    assert not (hub / "models--org--chat").exists()
    assert [model.name for model in local_models()] == ["org/chat-GGUF:bf16", "org/chat-GGUF:q8_0"]


def test_a_model_in_use_is_not_deleted_and_remembers_its_use(cache: Path) -> None:
    files = resolve_model("tiny-random")
    assert [model.used for model in local_models()] == [0.0]
    hold_model(files.weights)
    (model,) = local_models()
    assert model.in_use and model.used > 0
    with pytest.raises(ModelError, match="tiny-random is used by a running service: stop it first"):
        remove_model(model)
    library.HELD.popitem()[1].close()  # as when the process ends
    size = sum(path.stat().st_size for path in files.weights[0].parent.iterdir())
    assert not model.in_use and remove_model(model) == size >= model.num_bytes and local_models() == []


def test_models_are_in_use_until_they_are_released(cache: Path) -> None:
    (first,) = resolve_model("tiny-random").weights
    hold_model([first])
    release_models([first])
    assert is_in_use(first)
    release_models([])
    assert not is_in_use(first) and not library.HELD


def test_a_lock_for_an_instant_is_waited_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that checks whether the model is in use locks its usage file alone."""
    (first,) = resolve_model("tiny-random").weights
    hold_model([first])
    library.HELD.popitem()[1].close()

    def check() -> None:
        other = library.usage_file(first).open("rb")
        fcntl.flock(other, fcntl.LOCK_EX)
        threading.Timer(0.02, other.close).start()

    with monkeypatch.context() as patient:
        patient.setattr(library, "CHECK_S", 60.0)
        check()
        assert not is_in_use(first)
    check()
    hold_model([first])
    assert is_in_use(first)


def test_a_model_that_is_being_deleted_cannot_be_held(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, rmtree = resolve_model("tiny-random"), shutil.rmtree
    refused: list[bool] = []

    def delete(folder: Path, **more: bool) -> None:
        with library.usage_file(files.weights[0]).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                refused.append(True)
        rmtree(folder, **more)

    monkeypatch.setattr(shutil, "rmtree", delete)
    remove_model(local_models()[0])
    assert refused and not files.weights[0].exists() and not is_in_use(files.weights[0])
    resolve_model("tiny-random")
    assert [model.used for model in local_models()] == [0.0]


def test_gguf_files_are_parts_of_one_model_only(cache: Path, tmp_path: Path) -> None:
    """At the top of a folder of models and below, also if a name begins like another or has special characters."""
    for folder in (tmp_path / "own", tmp_path / "own" / "more"):
        for stem, count in (("llama", 2), ("llama", 3), ("llama-chat", 2), ("a[1]", 2)):
            for number in range(1, count + 1):
                put(folder / f"{stem}-{number:05}-of-{count:05}.gguf")
        put(folder / "llama.gguf")
    models = local_models(tmp_path / "own")
    assert sorted(len(model.files) for model in models) == sorted([2, 3, 2, 2, 1] * 2)
    for name in ("llama-00001-of-00002.gguf", "more/llama-00001-of-00002.gguf"):
        assert remove_model(find_model(str(tmp_path / "own" / name), models)) == 20
    left = [path.name for path in (tmp_path / "own").rglob("*.gguf")]
    assert len(left) == 16 and left.count("llama-chat-00002-of-00002.gguf") == left.count("llama.gguf") == 2


def test_files_that_are_not_of_the_model_stay(cache: Path, tmp_path: Path) -> None:
    """In the layouts of LM Studio and of a folder with a model, its adapter and notes."""
    own, tiny = tmp_path / "own", resolve_model("tiny-random").weights[0].parent
    nested = put(own / "pub" / "model-a" / "m-Q4_K_M.gguf", 7)
    thesis = put(own / "pub" / "thesis.txt")
    vision = [put(own / "vision" / name, 5).name for name in ("v-Q4_0.gguf", "mmproj-F16.gguf")]
    shutil.copytree(tiny, own / "mine", ignore=shutil.ignore_patterns(".complete"))
    kept = [put(own / "mine" / name) for name in ("README.md", "adapter_model.safetensors", "results.json")]
    models = local_models(own)
    assert [model.name for model in models[1:]] == [str(own / "mine"), str(nested), str(own / "vision")]
    assert remove_model(find_model("m-Q4_K_M", models)) == 7
    assert thesis.exists() and not nested.parent.exists()
    assert remove_model(find_model("vision", models)) == 5 * len(vision) and not (own / "vision").exists()
    assert remove_model(find_model("mine", models)) > models[1].num_bytes
    assert sorted((own / "mine").iterdir()) == sorted(kept) and own.is_dir()


def test_a_link_in_a_folder_of_models_is_deleted_without_its_content(cache: Path, tmp_path: Path) -> None:
    blob, elsewhere = put(tmp_path / "blobs" / "sha256"), put(tmp_path / "elsewhere" / "b.gguf")
    (own := tmp_path / "own").mkdir()
    (own / "a.gguf").symlink_to(blob)
    (own / "linked").symlink_to(elsewhere.parent)
    for model in local_models(own):
        assert remove_model(model) == 0
    assert blob.exists() and elsewhere.exists() and not any(own.iterdir())


def test_every_listed_name_can_be_loaded(
    cache: Path, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also next to adapters, image projectors, a config.json without weights, and files of one quantisation."""
    own, tiny = tmp_path / "own", resolve_model("tiny-random")
    monkeypatch.setattr(
        "common.model_files.describe.describe_gguf",
        lambda parts, *_, **__: msgspec.structs.replace(tiny, weights=tuple(parts)),
    )
    shutil.copytree(tiny.weights[0].parent, own / "mixed")
    for name in ("mixed/m.gguf", "deep/er/m.gguf", "alone/m.gguf", "alone/mmproj-F16.gguf", "converted/m-F32.gguf"):
        put(own / name)
    put(own / "mmproj-F16.gguf")
    put(own / "converted" / "config.json").write_text("{}")
    put(own / "adapter" / "adapter_model.safetensors")
    shutil.rmtree(hub)
    put(hub / "models--org--more" / "refs" / "main").write_text("c0ffee")
    snapshot = hub / "models--org--more" / "snapshots" / "c0ffee"
    for name in ("m-Q4_K.gguf", "m-UD-Q4_K.gguf", "m-Q8_0.gguf"):
        put(snapshot / name)
    monkeypatch.setattr("common.model_files.hub._snapshot", lambda *_, **__: snapshot)
    names = [model.name for model in local_models(own)]
    of_hub = [f"{snapshot}/m-Q4_K.gguf", f"{snapshot}/m-UD-Q4_K.gguf", "org/more:Q8_0"]
    of_folder = ("alone", "converted/m-F32.gguf", "deep/er/m.gguf", "mixed", "mixed/m.gguf")
    assert names == ["tiny-random", *of_hub, *(f"{own}/{name}" for name in of_folder)]
    for name in names:
        assert resolve_model(name, download=False).weights


def test_conversions_of_a_file_are_deleted_with_it(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    tiny = resolve_model("tiny-random").weights[0].parent
    shutil.copytree(tiny, folder / "mine", ignore=shutil.ignore_patterns(".complete"))
    resolve_model(str(folder / "mine"))
    assert any((cache / "local").glob("mine-*"))
    remove_model(find_model("mine", local_models(folder)))
    assert not any((cache / "local").glob("mine-*")) and not (folder / "mine").exists()


@pytest.mark.parametrize("name", ["smollm2:135m", "SmolLM2:135M", "smollm2-135m:latest", "smollm2-135m"])
def test_built_in_models_may_be_named_as_in_ollama(name: str) -> None:
    assert builtin_name(name) == "smollm2-135m"
    assert builtin_name("org/name:Q4_K_M") == "org/name:Q4_K_M"


def test_a_summary_counts_parameters_and_kv(cache: Path) -> None:
    files = resolve_model("tiny-random", weights=False)  # as a router resolves it
    summary = summary_of(files)
    assert (summary.architecture, summary.quantisation, summary.licence) == ("llama", "F32", "")
    assert 0 < summary.num_bytes - 4 * summary.num_parameters < 8192 and summary.kv_numbers == 256
    assert files.config is not None
    files.config.with_name("README.md").write_text("---\ntags: []\nlicense: mit\n---\n# Tiny\n")
    assert summary_of(files).licence == "mit"


def test_a_summary_of_a_gguf_file(smollm2_files: object) -> None:
    summary = summary_of(resolve_model("smollm2-135m"))
    assert (summary.num_parameters, summary.quantisation, summary.licence) == (134_515_008, "Q4_1", "apache-2.0")
