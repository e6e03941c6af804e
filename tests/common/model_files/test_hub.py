"""Models by Hugging Face id, from a hub on this machine that serves a tiny model in two shards."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from common.errors import ModelError
from common.model_files.hub import hub_gguf
from common.model_files.resolve import resolve_model

pytest.importorskip("huggingface_hub")

MODEL, COMMIT = "example/tiny", "c" * 40
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class Hub(ThreadingHTTPServer):
    """What `snapshot_download` asks for: the list of files, and each of them. `broken` ones are refused."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = files
        self.broken: set[str] = set()
        self.sent: list[str] = []


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        name = self.path.rpartition("/")[2]
        if self.path.startswith(f"/api/models/{MODEL}/tree/"):
            tree = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(content),
                    "oid": hashlib.sha1(name.encode() + content).hexdigest(),
                }
                for name, content in self.server.files.items()
            ]
            content = json.dumps(tree).encode()
        elif self.path.startswith(f"/api/models/{MODEL}"):
            siblings = [{"rfilename": name} for name in self.server.files]
            content = json.dumps({"id": MODEL, "sha": COMMIT, "siblings": siblings}).encode()
        elif name in self.server.broken or name not in self.server.files:
            self.send_error(404)
            return
        else:
            content = self.server.files[name]
            if body:
                self.server.sent.append(name)
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(name.encode() + content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    tiny = resolve_model("tiny-random")
    assert tiny.config is not None
    files = {path.name: path.read_bytes() for path in tiny.config.parent.glob("*.json")}
    (weights,) = tiny.weights
    files |= dict.fromkeys(SHARDS, weights.read_bytes())
    files["model.safetensors.index.json"] = json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode()
    hub = Hub(files)
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    yield hub
    hub.shutdown()
    thread.join(10)
    hub.server_close()


def fetch(hub: Hub, cache: Path, *flags: str, name: str = MODEL) -> subprocess.CompletedProcess[str]:
    host = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    environment = {**os.environ, **host, "HF_HOME": str(cache / "hub"), "DIPTYCH_CACHE": str(cache)}
    command = [sys.executable, "-P", "-m", "common.model_files.pull", name, *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_router_fetches_no_weights_and_a_worker_the_rest(hub: Hub, tmp_path: Path) -> None:
    text = fetch(hub, tmp_path, "--no-weights")
    assert text.returncode == 0, text.stderr
    assert text.stdout.rstrip().endswith("tokenizer.json")
    assert "config.json" in hub.sent and not set(SHARDS) & set(hub.sent)
    hub.sent.clear()
    whole = fetch(hub, tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert sorted(set(hub.sent)) == sorted(SHARDS)
    assert all(shard in whole.stdout for shard in SHARDS)


@pytest.mark.slow
def test_what_was_interrupted_is_fetched_to_its_end(hub: Hub, tmp_path: Path) -> None:
    hub.broken = {SHARDS[1]}
    assert fetch(hub, tmp_path).returncode == 1
    hub.broken.clear()
    again = fetch(hub, tmp_path)
    assert again.returncode == 0, again.stderr
    hub.sent.clear()
    assert fetch(hub, tmp_path).returncode == 0
    assert not hub.sent


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files are what the hub has, and which is there already."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("Q4_K_M", "tiny-Q4_K_M.gguf"),
        ("q8_0", "tiny.Q8_0.gguf"),
        ("Q6_K", "Q6_K/tiny-Q6_K-00001-of-00002.gguf"),
        ("BF16", "BF16.gguf"),
    ],
)
def test_a_kind_names_its_files_and_no_other_ones(snapshot: Path, kind: str, first: str) -> None:
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q4_K.gguf", "tiny.Q8_0.gguf", "mmproj-Q8_0.gguf", "BF16.gguf", "a.json"):
        (snapshot / name).touch()
    (snapshot / "Q6_K").mkdir()
    for part in (1, 2):
        (snapshot / "Q6_K" / f"tiny-Q6_K-0000{part}-of-00002.gguf").touch()
    assert hub_gguf(MODEL, kind) == snapshot / first


@pytest.mark.parametrize(
    ("kind", "message"),
    [("Q5_K", "no .gguf file of quantisation 'Q5_K'"), ("Q8_0", "several GGUF models"), ("Q6_K", "one of 2 files")],
)
def test_a_kind_that_names_no_one_model_is_refused(snapshot: Path, kind: str, message: str) -> None:
    for name in ("a-Q8_0.gguf", "b-Q8_0.gguf", "a-Q6_K-00001-of-00002.gguf"):
        (snapshot / name).touch()
    with pytest.raises(ModelError, match=message):
        hub_gguf(MODEL, kind)


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def snapshot_download(*_: object, allow_patterns: list[str], **__: object) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}')
    with pytest.raises(ModelError, match="quant_method is 'hqq'"):
        resolve_model(MODEL)
    assert asked and "*.safetensors" not in asked


def test_a_model_of_gguf_files_needs_a_kind() -> None:
    with pytest.raises(ModelError, match="select one, such as org/Tiny-GGUF:Q4_K_M"):
        resolve_model("org/Tiny-GGUF")


@pytest.mark.slow
def test_gguf_files_of_a_kind_are_fetched(hub: Hub, tmp_path: Path) -> None:
    (file,) = resolve_model("smollm2-135m").weights
    hub.files |= {"tiny-Q4_1.gguf": file.read_bytes(), "tiny-Q8_0.gguf": b"another"}
    done = fetch(hub, tmp_path, name=f"{MODEL}:Q4_1")
    assert done.returncode == 0, done.stderr
    assert set(hub.sent) == {"tiny-Q4_1.gguf"}
    assert done.stdout.startswith(f"{MODEL}:Q4_1: ") and done.stdout.rstrip().endswith("tiny-Q4_1.gguf")
