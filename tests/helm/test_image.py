"""The Dockerfile: linted, and its pip steps run as they stand, in environments that did not exist before."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from common.config.vllm import TESTED
from common.packages import PACKAGES

INSTALL_TIMEOUT_S = 900


@pytest.fixture(scope="module")
def stages(pytestconfig: pytest.Config) -> dict[str, list[tuple[str, str]]]:
    """Stage -> (instruction, rest), continued lines joined and comments dropped."""
    text = (pytestconfig.rootpath / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in joined:
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            name = rest.rpartition(" AS ")[2]
        found.setdefault(name, []).append((instruction, rest.strip()))
    return found


def common(project: dict[str, Any]) -> list[str]:
    """What every process needs: the dependencies without the extras that an installation has by default."""
    return [line for line in project["dependencies"] if not line.startswith("diptych[")]


def pins(repository: Path, name: str = "constraints") -> dict[str, Version]:
    """Package -> version of a file of helm/images/."""
    text = (repository / "helm" / "images" / f"{name}.txt").read_text(encoding="utf-8")
    pairs = re.findall(r"(?m)^([\w-]+)==([\w.]+)", text)
    return {name.lower().replace("_", "-"): Version(version) for name, version in pairs}


@pytest.mark.slow
def test_the_linter_finds_nothing(repository: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed")
    done = subprocess.run([str(hadolint), "Dockerfile"], cwd=repository, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_both_images_run_as_nobody_in_particular(stages: dict[str, list[tuple[str, str]]]) -> None:
    for target in ("router", "worker"):
        instructions = dict(stages[target])
        assert instructions["FROM"].startswith({"router": "base", "worker": "worker-${ENGINE}"}[target])
        assert instructions["USER"] == "10001:10001"
        assert instructions["ENTRYPOINT"] == '["diptych"]'
        assert "/health" in instructions["HEALTHCHECK"]
        assert instructions["VOLUME"] == "/var/cache/diptych"
        order = [instruction for instruction, _ in stages[target]]
        assert order.index("USER") > max((i for i, each in enumerate(order) if each == "RUN"), default=0)
    for stage in ("base", "worker-vllm"):
        labels = dict(stages[stage])["LABEL"]
        for label in ("title", "version", "revision", "licenses"):
            assert f"org.opencontainers.image.{label}=" in labels
    bases = {rest for name in stages for instruction, rest in stages[name] if instruction == "FROM"}
    ours = {"${PYTHON_IMAGE}", "base", "system-${ACCELERATOR}", "worker-${ENGINE}"}
    assert {base.partition(" ")[0] for base in bases} == {*ours, "${VLLM_IMAGE}"}
    assert {f"system-{variant}" for variant in ("cpu", "cuda", "rocm")} <= stages.keys()


def test_one_release_of_vllm_is_named_everywhere(stages: dict[str, list[tuple[str, str]]], repository: Path) -> None:
    (image,) = (rest for instruction, rest in stages[""] if rest.startswith("VLLM_IMAGE="))
    assert image.partition(":v")[2].startswith(f"{TESTED}.")
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = (Requirement(one) for one in project["optional-dependencies"]["vllm"] if one.startswith("vllm"))
    major, minor = map(int, TESTED.split("."))
    found = [wanted.specifier.contains(f"{major}.{number}.9") for number in (minor - 1, minor, minor + 1)]
    assert found == [False, True, False]


def test_the_image_with_vllm_has_every_transport_that_its_workers_accept(
    stages: dict[str, list[tuple[str, str]]],
) -> None:
    (command,) = (rest for instruction, rest in stages["worker-vllm"] if instruction == "RUN")
    assert '"$1[worker,hub,nixl]"' in command and "check_nixl()" in command


def test_only_where_triton_compiles_is_a_compiler(stages: dict[str, list[tuple[str, str]]]) -> None:
    installs = {name: " ".join(rest for each, rest in stages[name] if each == "RUN") for name in stages}
    assert {name for name, text in installs.items() if "gcc" in text} == {"system-cuda", "system-rocm"}
    assert {name for name, text in installs.items() if "g++" in text} == {"wheel"}
    assert ("ENV", "DIPTYCH_KERNELS=${KERNELS}") in stages["wheel"] and ("ARG", "KERNELS=all") in stages["wheel"]


def test_a_driver_that_is_too_old_is_refused(stages: dict[str, list[tuple[str, str]]]) -> None:
    (line,) = [rest for instruction, rest in stages["system-cuda"] if instruction == "ENV"]
    assert 'NVIDIA_REQUIRE_CUDA="cuda>=${CUDA_VERSION}"' in line


def test_the_build_sees_all_code_and_nothing_else(repository: Path) -> None:
    lines = (repository / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert allowed == {*PACKAGES, "pyproject.toml", "setup.py", "helm/images/*.txt", "README.md", "LICENSE"}


def test_every_dependency_is_pinned_within_its_range(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [
        line for name in ("router", "worker", "tracing", "hub") for line in project["optional-dependencies"][name]
    ]
    held = pins(repository)
    for line in (*common(project), *extras):
        requirement = Requirement(line)
        name = requirement.name.lower().replace("_", "-")
        assert name in held, f"{name} is not in helm/images/constraints.txt"
        assert requirement.specifier.contains(held[name]), f"{line} does not allow {held[name]}"
    tested = (repository / "constraints.txt").read_text(encoding="utf-8")
    assert f"torch=={held['torch']}" in tested


@pytest.mark.parametrize("image", ("router", "worker"))
def test_what_an_image_installs_is_pinned_by_hash(repository: Path, image: str) -> None:
    """Every file of the versions in constraints.txt, and of no others; `make lock` writes them."""
    held, known = pins(repository, image), pins(repository)
    assert held and held == {name: known[name] for name in held}
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*common(project), *project["optional-dependencies"][image]]
    wanted = {Requirement(line).name.lower().replace("_", "-") for line in lines} - {"torch"}
    assert wanted <= held.keys()
    entries = re.split(r"\n(?=\w)", (repository / "helm" / "images" / f"{image}.txt").read_text(encoding="utf-8"))[1:]
    assert len(entries) == len(held)
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    assert "://" not in "".join(entries)  # no index is named


def test_libraries_of_cuda_and_nixl_are_pinned_by_hash(repository: Path) -> None:
    """The CUDA build of the same torch, and NIXL within its range; neither repeats a package of worker.txt."""
    known, worker = pins(repository), pins(repository, "worker")
    cuda, nixl = pins(repository, "cuda"), pins(repository, "nixl")
    assert cuda["torch"] == known["torch"] and "triton" in cuda and "nvidia-cublas" in cuda
    assert nixl == {name: known[name] for name in ("nixl", "nixl-cu12", "nixl-cu13")}
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = project["optional-dependencies"]["nixl"]
    assert Requirement(wanted).specifier.contains(nixl["nixl"])
    assert not worker.keys() & (cuda.keys() | nixl.keys())
    for name in ("cuda", "nixl"):
        text = (repository / "helm" / "images" / f"{name}.txt").read_text(encoding="utf-8")
        entries = re.split(r"\n(?=\w)", text)[1:]
        assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries) and "://" not in text


def pip_command(stages: dict[str, list[tuple[str, str]]], target: str) -> str:
    """The shell command of the stage that calls pip, without what BuildKit mounts."""
    (command,) = [rest for instruction, rest in stages[target] if instruction == "RUN" and "pip " in rest]
    return re.sub(r"--mount=\S+\s*", "", command)


def build(command: str, environment: Path, source: Path, wheels: Path) -> None:
    """Run a stage's command with this environment's python, and its paths turned into ours."""
    python = str(environment / "bin" / "python")
    places = {
        "/wheels": str(wheels),
        "/etc/diptych/": f"{source / 'helm' / 'images'}/",
        "python -m pip": f"{python} -m pip --disable-pip-version-check --quiet",
        "python -c": f"{python} -c",
    }
    for place, here in places.items():
        command = command.replace(place, here)
    settings = os.environ | {"ACCELERATOR": "cpu", "TORCH_INDEX": "", "DIPTYCH_KERNELS": "", "NIXL": "no"}
    done = subprocess.run(
        ["sh", "-ec", command],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
        env=settings,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ("router", "worker"))
def test_the_pip_steps_bring_exactly_the_pinned_versions(
    stages: dict[str, list[tuple[str, str]]], repository: Path, tmp_path: Path, target: str
) -> None:
    source, wheels, environment = tmp_path / "source", tmp_path / "wheels", tmp_path / "venv"
    source.mkdir()
    for line in (repository / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if line.startswith("!"):
            for here in repository.glob(line[1:]):
                place = source / here.relative_to(repository)
                place.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if here.is_dir() else shutil.copy
                copy(here, place)
    venv.create(environment, with_pip=True)
    build(pip_command(stages, "wheel"), environment, source, wheels)
    stage = "worker-diptych" if target == "worker" else target  # the one with vLLM needs vLLM's image
    build(pip_command(stages, stage), environment, source, wheels)

    python = str(environment / "bin" / "python")
    freeze = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, timeout=120, check=True)
    held = pins(repository)
    for line in freeze.stdout.splitlines():
        name, _, version = line.partition("==")
        if version and not name.startswith(("nvidia", "triton", "cuda")):  # torch pins those itself
            assert held[name.lower().replace("_", "-")] == Version(Version(version).public)
    has_torch = subprocess.run([python, "-c", "import torch"], capture_output=True, timeout=120).returncode == 0
    assert has_torch == (target == "worker")
    command = {"router": ["router"], "worker": ["decode-worker"]}[target]
    diptych = str(environment / "bin" / "diptych")
    subprocess.run([diptych, *command, "--help"], capture_output=True, timeout=120, check=True)
    subprocess.run([diptych, "fetch", "tiny-random"], capture_output=True, timeout=120, check=True)
