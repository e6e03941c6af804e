"""`make images`: what it tells the engine, what it refuses, and the digests that it brings back."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from helm.images.build import (
    IMAGES,
    Options,
    ReleaseError,
    build,
    build_command,
    checked_registry,
    chosen_engine,
    chosen_images,
    revision_and_epoch,
    tag_of,
)

DIGEST = "sha256:" + "d" * 64
ENGINE = """#!/bin/sh
echo "$(basename "$0") $*" >> {calls}
case "$1 $2" in
  "image inspect") printf '["registry.example.com/other@sha256:{other}", "registry.example.com/llm/%s@{digest}"]' \
    "$(expr "$5" : '.*/\\(.*\\):')";;
  "push --digestfile") printf '{digest}' > "$3";;
esac
"""


def repository_at(folder: Path) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(("git", "init", "-q", str(folder)), check=True)
    subprocess.run(("git", "-C", str(folder), *who, "commit", "-q", "--allow-empty", "-m", "one"), check=True)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which three engines, alone on the path besides the system's programs, note how they are called."""
    calls = tmp_path / "calls"
    for name in ("docker", "podman", "buildah"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(ENGINE.format(calls=calls, digest=DIGEST, other="0" * 64))
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return calls


@pytest.mark.parametrize("given", ("ghcr.io/acme", "registry.example.com:5000/a/b/", "localhost", "10.0.0.7:5000"))
def test_a_registry_begins_with_a_host(given: str) -> None:
    assert checked_registry(given) == given.removesuffix("/")


@pytest.mark.parametrize(
    ("given", "said"),
    (("", "REGISTRY: it is not set"), ("acme", "'acme' names no host"), ("acme/llm", "'acme/llm' names no host")),
)
def test_without_a_host_nothing_is_built(given: str, said: str) -> None:
    with pytest.raises(ReleaseError, match=rf"{said}.*for example REGISTRY=ghcr\.io/acme"):
        checked_registry(given)


def test_a_name_that_is_no_image_is_refused() -> None:
    assert chosen_images("") == IMAGES
    assert [image.name for image in chosen_images("worker-cpu, router")] == ["worker-cpu", "router"]
    workers = ("cpu", "cuda", "rocm", "cpu-nixl", "cuda-nixl", "cuda-12.8", "cuda-vllm")
    available = ", ".join(("router", *(f"worker-{name}" for name in workers)))
    with pytest.raises(ReleaseError, match=f"'worker' is unknown; available: {available}"):
        chosen_images("worker")


def test_an_engine_that_is_there_is_taken(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_engine("") == "docker" and chosen_engine("buildah") == "buildah"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ReleaseError, match="ENGINE: none of docker, podman, buildah is not installed"):
        chosen_engine("")


def test_each_worker_has_the_torch_of_its_accelerator() -> None:
    options = Options("ghcr.io/acme", "podman", torch_index=(("rocm", "https://index/rocm"),), cuda_version="12.8")
    commands = {image.name: build_command(image, options, revision="abc", epoch="7", version="1.2") for image in IMAGES}
    tags = {name: command[command.index("--tag") + 1] for name, command in commands.items()}
    tag = tag_of("1.2")
    assert tags == {
        "router": f"ghcr.io/acme/diptych-router:{tag}",
        "worker-cpu": f"ghcr.io/acme/diptych-worker:{tag}-cpu",
        "worker-cuda": f"ghcr.io/acme/diptych-worker:{tag}-cuda",
        "worker-rocm": f"ghcr.io/acme/diptych-worker:{tag}-rocm",
    }
    assert "TORCH_INDEX=https://index/rocm" in commands["worker-rocm"]
    assert not any("TORCH_INDEX" in part for part in commands["worker-cuda"])
    assert [name for name, command in commands.items() if "CUDA_VERSION=12.8" in command] == ["worker-cuda"]
    assert all({"REVISION=abc", "SOURCE_DATE_EPOCH=7", "VERSION=1.2"} <= set(command) for command in commands.values())


def test_variants_are_built_with_their_arguments() -> None:
    nixl, older, vllm = chosen_images("worker-cuda-nixl,worker-cuda-12.8,worker-cuda-vllm")
    options = Options("ghcr.io/acme", "podman", torch_index=(("cuda-12.8", "https://index/12.8"),))
    commands = [build_command(image, options, revision="abc", epoch="7", version="1.2") for image in (nixl, older)]
    tags = [command[command.index("--tag") + 1].partition(":")[2] for command in commands]
    assert tags == [f"{tag_of('1.2')}-cuda-nixl", f"{tag_of('1.2')}-cuda-12.8"]
    assert {"ACCELERATOR=cuda", "NIXL=yes"} <= set(commands[0]) and "TORCH_INDEX" not in " ".join(commands[0])
    assert {"ACCELERATOR=cuda", "CUDA_VERSION=12.8", "TORCH_INDEX=https://index/12.8"} <= set(commands[1])
    command = build_command(vllm, options, revision="abc", epoch="7", version="1.2")
    assert command[command.index("--tag") + 1].endswith("-cuda-vllm") and "ENGINE=vllm" in command
    with pytest.raises(ReleaseError, match=r"worker-cuda-12.8 needs cuda-12.8=ADDRESS"):
        build_command(older, Options("ghcr.io/acme", "podman"), revision="abc", epoch="7")


@pytest.mark.parametrize("engine", ("docker", "podman", "buildah"))
def test_what_is_pushed_is_known_by_its_digest(engine: str, calls: Path) -> None:
    images = chosen_images("router,worker-cpu")
    options = Options("registry.example.com/llm", engine, push=True)
    assert build(images, options) == {"router": DIGEST, "worker-cpu": DIGEST}
    done = [line.split()[1] for line in calls.read_text().splitlines() if "inspect" not in line]
    assert done == ["build", "build", "push", "push"], "something was published before all could be built"


def test_nothing_is_pushed_unless_told(calls: Path) -> None:
    assert build(chosen_images("router"), Options("registry.example.com", "docker")) == {"router": ""}
    assert "push" not in calls.read_text()


def test_an_engine_that_fails_stops_it(calls: Path, tmp_path: Path) -> None:
    (tmp_path / "bin" / "docker").write_text("#!/bin/sh\necho no room on the disk; exit 3\n")
    with pytest.raises(ReleaseError, match="docker build exited with 3: no room on the disk"):
        build(chosen_images("router"), Options("registry.example.com", "docker"))


def test_a_tag_names_the_commit_and_whether_it_has_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helm.images.build.ROOT", tmp_path)
    repository_at(tmp_path)
    if os.geteuid() == 0:  # a container that builds the checkout of a user
        os.chown(tmp_path, 12345, 12345)
    assert tag_of("0.1.0+g1a2b3c4d5e6f") == "0.1.0-g1a2b3c4d5e6f"
    (tmp_path / "changed.py").touch()
    assert tag_of("0.1.0+g1a2b3c4d5e6f") == "0.1.0-g1a2b3c4d5e6f-dirty"
    revision, epoch = revision_and_epoch()
    assert len(revision) == 40 and int(epoch) > 1_000_000_000


def test_a_source_archive_is_not_part_of_a_repository_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helm.images.build.ROOT", tmp_path / "unpacked")
    (tmp_path / "unpacked").mkdir()
    (tmp_path / "unpacked" / "file").touch()
    repository_at(tmp_path)
    assert tag_of("0.1.0") == "0.1.0" and revision_and_epoch() == ("unknown", "0")
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    assert tag_of("0.1.0") == "0.1.0" and revision_and_epoch() == ("unknown", "0")
