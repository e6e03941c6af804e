"""`make release`: the chart that it packs needs no registry, and what it pushes is signed by digest."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from common import __version__
from helm.images import release as module
from helm.images.build import IMAGES, VARIANTS, Options, ReleaseError
from helm.images.release import BILLS, bill_of, make_bill, make_chart, pinned, references, release

from ..chart import CHART
from ..programs import NotAvailable, helm

DIGESTS = {image.name: "sha256:" + letter * 64 for image, letter in zip(IMAGES, "abcd", strict=True)}
REGISTRY = "registry.example.com/llm"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which cosign, docker and `helm push` note their calls; all else is the real helm."""
    try:
        real = helm(4)
    except NotAvailable as error:
        pytest.skip(str(error))
    calls, folder = tmp_path / "calls", tmp_path / "bin"
    folder.mkdir()
    note = f'#!/bin/sh\necho "$(basename "$0") $*" >> {calls}\n'
    inspect = f"printf '[\"{REGISTRY}/diptych-router@{DIGESTS['router']}\"]'"
    texts = {
        "helm": f'[ "$1" = push ] || exec {real} "$@"\necho "Digest: sha256:{"e" * 64}"\n',
        "docker": f'case "$2" in inspect) {inspect};; esac\n',
        "cosign": "",
    }
    for name, text in texts.items():
        (folder / name).write_text(note + text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return calls


def test_values_keep_their_comments_and_get_the_digests() -> None:
    text = (CHART / "values.yaml").read_text()
    changed = pinned(text, REGISTRY, DIGESTS)
    assert len(changed.splitlines()) == len(text.splitlines())
    before, after = yaml.safe_load(text), yaml.safe_load(changed)
    images = after.pop("images")
    assert before.pop("images") != images and before == after
    assert images["registry"] == REGISTRY and images["router"]["digest"] == DIGESTS["router"]
    assert images["worker"]["digests"] == {name: DIGESTS[f"worker-{name}"] for name in ("cpu", "cuda", "rocm")}
    assert images["worker"]["digest"] == ""
    with pytest.raises(ReleaseError, match="update helm/images/release.py"):
        pinned(text.replace("digests:", "hashes:"), REGISTRY, DIGESTS)


def test_the_packed_chart_names_the_images_itself(programs: Path, tmp_path: Path) -> None:
    archive = make_chart(REGISTRY, DIGESTS, tmp_path)
    with tarfile.open(archive) as files:
        names = {name.removeprefix("diptych/") for name in files.getnames()}
    assert {"Chart.yaml", "values.schema.json", "templates/workers.yaml", "files/rules.yaml"} <= names
    assert not [name for name in names if name.endswith(".py") and not name.startswith("files/")]
    command = ("helm", "template", "demo", str(archive), "--set", "models.tiny.source.id=tiny-random")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    used = {line.strip() for line in done.stdout.splitlines() if line.strip().startswith("image: ")}
    assert used == {
        f'image: "{REGISTRY}/diptych-router@{DIGESTS["router"]}"',
        f'image: "{REGISTRY}/diptych-worker@{DIGESTS["worker-cpu"]}"',
    }


def test_what_was_pushed_is_named_by_digest() -> None:
    some = {name: digest for name, digest in DIGESTS.items() if name != "worker-rocm"}
    assert [(name, image.name) for name, image in references(IMAGES, some, REGISTRY).items()] == [
        (f"{REGISTRY}/diptych-router@{DIGESTS['router']}", "router"),
        (f"{REGISTRY}/diptych-worker@{DIGESTS['worker-cpu']}", "worker-cpu"),
        (f"{REGISTRY}/diptych-worker@{DIGESTS['worker-cuda']}", "worker-cuda"),
    ]


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages and bills that take no time: their own tests make real ones."""

    def packages(dist: Path, kernels: str) -> None:
        (dist / f"diptych-{__version__}-py3-none-any.whl").write_text(kernels)

    def bill(image: str, dist: Path) -> Path:
        (target := dist / f"diptych-{image}-{__version__}.cdx.json").write_text("{}")
        return target

    monkeypatch.setattr(module, "make_packages", packages)
    monkeypatch.setattr(module, "make_bill", bill)


def test_a_release_is_pushed_signed_and_summed(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    monkeypatch.setenv("COSIGN_KEY", "cosign.key")
    dist = tmp_path / "dist"
    release(IMAGES[:1], Options(REGISTRY, "docker", push=True), REGISTRY, "all", dist)
    image, chart = f"{REGISTRY}/diptych-router@{DIGESTS['router']}", f"{REGISTRY}/charts/diptych@sha256:{'e' * 64}"
    calls = programs.read_text().splitlines()
    bill = f"--type cyclonedx --predicate {dist / f'diptych-router-{__version__}.cdx.json'}"
    assert [call for call in calls if call.startswith("cosign")] == [
        f"cosign sign --yes --key cosign.key {image}",
        f"cosign attest --yes --key cosign.key {bill} {image}",
        f"cosign sign --yes --key cosign.key {chart}",
    ]
    assert f"helm push {dist / f'diptych-{__version__}.tgz'} oci://{REGISTRY}/charts" in calls
    assert (dist / "images.txt").read_text() == f"{image}\n"
    sums = dict(reversed(line.split("  ")) for line in (dist / "SHA256SUMS").read_text().splitlines())
    assert sums == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in dist.iterdir() if file.name != "SHA256SUMS"
    }
    assert {f"diptych-{__version__}.tgz", "images.txt"} < set(sums)


def test_without_an_engine_all_else_is_made(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    release((), None, REGISTRY, "all", tmp_path / "dist")
    calls = programs.read_text()
    assert "docker" not in calls and "push" not in calls and "cosign" not in calls
    assert (tmp_path / "dist" / f"diptych-{__version__}.tgz").exists()


@pytest.mark.slow
@pytest.mark.parametrize("image", BILLS)
def test_a_bill_of_materials_names_every_package_with_its_hashes(image: str, tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx_py", reason="the extra `release` is not installed")
    bill: dict[str, Any] = json.loads(make_bill(image, tmp_path).read_text())
    assert bill["bomFormat"] == "CycloneDX" and bill["metadata"]["component"]["name"] == "diptych"
    found = {one["name"]: one for one in bill["components"]}
    assert found["pyzmq"]["purl"].startswith("pkg:pypi/pyzmq@")
    assert found["pyzmq"]["externalReferences"][0]["hashes"]
    assert ("torch" in found) == (image != "router")
    assert ("nvidia-cublas" in found) == ("triton" in found) == image.startswith("worker-cuda")
    assert ("nixl-cu13" in found) == image.endswith("nixl")


def test_an_image_has_the_bill_of_what_it_installs() -> None:
    """With another index the Dockerfile installs other libraries than cuda.txt."""
    images = (*IMAGES, *VARIANTS)
    indexes = (("cuda", "https://index/cuda"), ("cuda-12.8", "https://index/12.8"))
    plain = {image.name: bill_of(image, Options(REGISTRY, "docker", torch_index=indexes[1:])) for image in images}
    assert plain == {
        "router": "router",
        **dict.fromkeys(("worker-cpu", "worker-rocm", "worker-cpu-nixl", "worker-cuda-12.8"), "worker"),
        "worker-cuda": "worker-cuda",
        "worker-cuda-nixl": "worker-cuda-nixl",
        "worker-cuda-vllm": "",
    }
    assert bill_of(IMAGES[2], Options(REGISTRY, "docker", torch_index=indexes)) == "worker"


@pytest.mark.parametrize(
    ("name", "said"), (("helm.images.build", "make images: "), ("helm.images.release", "make release: "))
)
def test_the_commands_say_what_is_missing(name: str, said: str, repository: Path) -> None:
    command = (sys.executable, "-m", name, "--registry", "acme")
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith(f"{said}REGISTRY: 'acme' names no host")
    assert "Traceback" not in done.stderr
