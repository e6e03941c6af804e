"""The Dockerfile as it stands, built by buildah on a Debian root of debootstrap's, and the images' own commands run."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernels.cpu.instruction_sets import features_here, that_run

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


def test_the_images_are_built_and_run(buildah: Buildah, repository: Path, tmp_path: Path) -> None:
    best, *_ = that_run(platform.machine(), features_here()) or pytest.skip("a CPU for which no wheel has a library")
    settings = pip_settings(tmp_path)
    arguments = {"PYTHON_IMAGE": BASE, "KERNELS": best.name, "ACCELERATOR": "cpu"}
    flags = [part for key, value in arguments.items() for part in ("--build-arg", f"{key}={value}")]
    for target in ("router", "worker"):  # without --layers: buildah 1.28 mounts nothing of a stage that it has cached
        buildah("bud", *settings, *flags, "--target", target, "-t", target, ".", cwd=repository)
        container = buildah("from", target)
        run = ("run", "--isolation", "chroot", container, "--")
        assert buildah(*run, "diptych", "--version").startswith("diptych ")
        assert buildah(*run, "id", "-u") == "10001"
        assert "tiny-random" in buildah(*run, "diptych", "fetch", "tiny-random")
        compilers = "command -v c++ cc gcc g++ clang || echo none"
        assert buildah(*run, "sh", "-c", compilers) == "none"
    loads = "from kernels.cpu.build import load_native; print(load_native()._name)"
    assert buildah(*run, "python", "-c", loads).endswith(f"/kernels/native/built/{best.name}.so")
