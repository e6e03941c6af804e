"""The Dockerfile as it stands, built by buildah on a Debian root of debootstrap's, and run as the chart says."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest

from common import __version__
from kernels.cpu.instruction_sets import InstructionSet, features_here, that_run

from ..chart import render
from ..cluster import running, small_values
from .runc import Image, RuncContainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
BASE = "localhost/python-of-debian"
STEP_TIMEOUT_S = 3000
SUITE = "bookworm"


@dataclass(frozen=True)
class Buildah:
    """buildah with storage of its own, without overlays or namespaces, which not every machine allows."""

    folder: Path

    def __call__(self, *arguments: str, cwd: Path | None = None) -> str:
        places = ("--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run"))
        environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}
        done = subprocess.run(
            ("buildah", "--storage-driver", "vfs", *places, *arguments),
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=STEP_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout.strip()


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    for program in ("buildah", "debootstrap"):
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed (Debian: apt-get install buildah crun debootstrap)")
    if os.geteuid() != 0:
        pytest.skip("debootstrap needs root")
    folder = tmp_path_factory.mktemp("buildah")
    made = Buildah(folder)
    made_base(made, folder / "root")
    yield made
    shutil.rmtree(folder, ignore_errors=True)


def made_base(buildah: Buildah, root: Path) -> None:
    """What stands for the Python image: Debian with its own Python, called `python`, and pip that may install."""
    packages = "python3,python3-pip,python3-venv,ca-certificates"
    command = ("debootstrap", "--variant=minbase", f"--include={packages}", SUITE, str(root))
    done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    (root / "usr" / "bin" / "python").symlink_to("python3")
    for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()
    if bundle := os.environ.get("SSL_CERT_FILE"):
        shutil.copy(bundle, root / "etc" / "ssl" / "certs" / "ca-certificates.crt")
    container = buildah("from", "scratch")
    buildah("copy", "-q", container, str(root), "/")
    buildah("commit", "-q", container, BASE)


def pip_settings(folder: Path) -> list[str]:
    """Flags that give the build this machine's settings of pip, with the folders that they name."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60, check=True
    )
    pairs = [line.partition("=") for line in done.stdout.splitlines()]
    known = {key.rpartition(".")[2]: value.strip("'") for key, _, value in pairs}
    kept = {key: known[key] for key in ("index-url", "extra-index-url", "find-links", "trusted-host") if key in known}
    lines = [f"{key} = " + " ".join(value.replace("\\n", " ").split()) for key, value in kept.items()]
    file = folder / "pip.conf"
    file.write_text("\n".join(("[global]", *lines, "")))
    words = [word for value in kept.values() for word in value.replace("\\n", " ").split()]
    # The pages of an index in files name what lies beside them.
    named = {word for word in words if word.startswith("/")}
    named |= {str(Path(word.removeprefix("file://")).parent) for word in words if word.startswith("file:///")}
    folders = sorted(word for word in named if Path(word).is_dir())
    return ["--secret", f"id=pip,src={file}", *(flag for each in folders for flag in ("-v", f"{each}:{each}:ro"))]


@pytest.fixture(scope="module")
def best() -> InstructionSet:
    found, *_ = that_run(platform.machine(), features_here()) or pytest.skip("a CPU for which no wheel has a library")
    return found


@pytest.fixture(scope="module")
def containers(
    buildah: Buildah, best: InstructionSet, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """A container of each image, by the Dockerfile's target."""
    settings = pip_settings(tmp_path_factory.mktemp("pip"))
    arguments = {"PYTHON_IMAGE": BASE, "KERNELS": best.name, "ACCELERATOR": "cpu", "VERSION": __version__}
    flags = [part for key, value in arguments.items() for part in ("--build-arg", f"{key}={value}")]
    made = {}
    for target in ("router", "worker"):  # without --layers: buildah 1.28 mounts nothing of a stage that it has cached
        buildah("bud", *settings, *flags, "--target", target, "-t", target, ".", cwd=pytestconfig.rootpath)
        made[target] = buildah("from", target)
    return made


def test_the_images_run(buildah: Buildah, containers: dict[str, str], best: InstructionSet) -> None:
    for container in containers.values():
        run = ("run", "--isolation", "chroot", container, "--")
        assert buildah(*run, "diptych", "--version") == f"diptych {__version__}"
        assert buildah(*run, "id", "-u") == "10001"
        assert "tiny-random" in buildah(*run, "diptych", "fetch", "tiny-random")
        compilers = "command -v c++ cc gcc g++ clang || echo none"
        assert buildah(*run, "sh", "-c", compilers) == "none"
    loads = "from kernels.cpu.build import load_native; print(load_native()._name)"
    run = ("run", "--isolation", "chroot", containers["worker"], "--")
    assert buildah(*run, "python", "-c", loads).endswith(f"/kernels/native/built/{best.name}.so")


@pytest.mark.helm
def test_the_images_run_as_the_chart_says(
    buildah: Buildah, containers: dict[str, str], helm4: Path, tmp_path: Path
) -> None:
    """Init containers, then a router and two workers by runc: uid 10001, a read-only root, the chart's probes."""
    if not shutil.which("runc"):
        pytest.skip("runc is not installed (Debian: apt-get install runc)")
    images = {
        f"diptych-{target}": Image(
            Path(buildah("mount", container)),
            json.loads(buildah("inspect", "--type", "image", target))["OCIv1"]["config"],
        )
        for target, container in containers.items()
    }
    rendered = render(helm4, "laptop", over=small_values())
    with running(rendered, tmp_path, kind=partial(RuncContainer, images=images)) as cluster:
        (router,) = cluster.of("router")
        body = {"model": "tiny", "prompt": "word " * 100, "max_tokens": 4}
        answer = httpx.post(f"http://{router.address}:8000/v1/completions", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        for container in cluster.containers.values():
            assert isinstance(container, RuncContainer) and container.probe("liveness")
            assert container.inside("id -u; touch /x 2>/dev/null || echo read-only").split() == ["10001", "read-only"]
            assert container.inside("diptych --version").strip() == f"diptych {__version__}"
        for container in cluster.containers.values():
            assert container.end() == 0, container.log.read_text()[-3000:]
