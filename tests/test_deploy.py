"""The templates in `deploy/`: accepted by systemd and compose, with settings that exist, and processes that connect."""

from __future__ import annotations

import random
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from common.config import DecodeWorkerConfig, PrefillWorkerConfig, RouterConfig
from common.config.field import Config, fields_of
from common.config.sources import read
from common.wire.curve import KeyPair, write_key_pair

from .rig import Program

CONFIGS: dict[str, type[Config]] = {
    "router": RouterConfig,
    "prefill-worker": PrefillWorkerConfig,
    "decode-worker": DecodeWorkerConfig,
}
HOSTS = ("10.0.0.6", "10.0.0.7", "10.0.0.8")
MARGIN_S = 15
"""Seconds between the end of a drain and SIGKILL."""
START_TIMEOUT_S = 240.0


@pytest.fixture
def deploy(repository: Path) -> Path:
    return repository / "deploy"


def compose_file(deploy: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((deploy / "compose.yaml").read_text())
    return found


def unit_command(deploy: Path, kind: str) -> list[str]:
    """Command of a unit, without the path of the program."""
    text = (deploy / "diptych@.service").read_text().replace("%i", kind)
    return shlex.split(text.partition("ExecStart=")[2].splitlines()[0])[1:]


def commands(deploy: Path, form: str) -> dict[str, list[str]]:
    """Arguments of `diptych` for each kind of process."""
    if form == "systemd":
        return {kind: unit_command(deploy, kind) for kind in CONFIGS}
    return {kind: service["command"] for kind, service in compose_file(deploy)["services"].items()}


def in_folder(command: Sequence[str], folder: Path) -> list[str]:
    """The command with `folder` in place of the folders that systemd and Docker make."""
    return [re.sub(r"/etc/diptych/|\$\{CREDENTIALS_DIRECTORY\}/|/run/secrets/", f"{folder}/", one) for one in command]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("form", ("systemd", "compose"))
def test_every_setting_exists_and_is_accepted(deploy: Path, tmp_path: Path, form: str, kind: str) -> None:
    shutil.copy(deploy / "diptych.toml", tmp_path)
    write_key_pair(str(tmp_path / "curve.key"), KeyPair.generate())
    name, *arguments = in_folder(commands(deploy, form)[kind], tmp_path)
    config: Any = read(CONFIGS[kind], arguments, environ={})
    section = tomllib.loads((deploy / "diptych.toml").read_text())[kind.replace("-", "_")]
    assert name == kind and config.model == "smollm2-135m"
    for key, value in section.items():
        assert getattr(config, key) == (tuple(value) if isinstance(value, list) else value), key


def test_the_router_knows_the_addresses_of_the_workers(deploy: Path) -> None:
    settings = tomllib.loads((deploy / "diptych.toml").read_text())
    for role in ("prefill", "decode"):
        worker = settings[f"{role}_worker"]
        assert settings["router"][role] == [f"tcp://{worker['host']}:{worker['port']}"]


def test_processes_have_time_to_drain(deploy: Path) -> None:
    fields = [field for config in CONFIGS.values() for field in fields_of(config)]
    (drain_s,) = {field.default for field in fields if field.name == "drain_timeout_s"}
    assert f"TimeoutStopSec={drain_s + MARGIN_S:g}\n" in (deploy / "diptych@.service").read_text()
    services = compose_file(deploy)["services"].values()
    assert {one["stop_grace_period"] for one in services} == {f"{drain_s + MARGIN_S:g}s"}


def test_systemd_takes_the_unit(deploy: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze") or pytest.skip("systemd is not installed")
    text = (deploy / "diptych@.service").read_text().replace("/opt/diptych/bin/diptych", sys.executable)
    units = [tmp_path / f"diptych@{kind}.service" for kind in CONFIGS]
    for unit in units:
        unit.write_text(text)
    done = subprocess.run([analyze, "verify", *map(str, units)], capture_output=True, text=True, timeout=60)
    assert not [
        line for line in done.stderr.splitlines() if "diptych" in line
    ]  # the machine's own units may have faults


def test_compose_takes_the_file(deploy: Path) -> None:
    content = compose_file(deploy)
    assert content["services"].keys() == CONFIGS.keys()
    for kind, service in content["services"].items():
        image, _, tag = service["image"].rpartition(":")
        assert image.endswith("router" if kind == "router" else "worker") and tag.startswith("${DIPTYCH_TAG}")
    spec = pytest.importorskip("compose_spec", reason="the extra `dev` of this checkout is not installed")
    text = (
        yaml.safe_dump(content)
        .replace("${DIPTYCH_IMAGES}", "registry.example.com/acme")
        .replace("${DIPTYCH_TAG}", "1.2")
    )
    spec.PyCompose.from_yaml(text).validate()


def test_health_is_asked_where_it_is_served(deploy: Path) -> None:
    settings = tomllib.loads((deploy / "diptych.toml").read_text())
    for kind, service in compose_file(deploy)["services"].items():
        section = settings[kind.replace("-", "_")]
        port = section.get("http_port", section["port"])
        assert service["environment"]["HEALTH_URL"] == f"http://{section['host']}:{port}/health"


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("form", ("systemd", "compose"))
def test_the_processes_find_each_other(
    deploy: Path, form: str, tmp_path: Path, repository: Path, launch: Callable[..., Program]
) -> None:
    """On three addresses, as three machines, over encrypted sockets: a request uses both pools."""
    a, b = random.randrange(64, 255), random.randrange(256)
    here = [f"127.{a}.{b}.{last}" for last in random.sample(range(1, 255), 3)]
    text = (deploy / "diptych.toml").read_text().replace("smollm2-135m", "tiny-random")
    for host, address in zip(HOSTS, here, strict=True):
        text = text.replace(host, address)
    (tmp_path / "diptych.toml").write_text(text)
    write_key_pair(str(tmp_path / "curve.key"), KeyPair.generate())
    programs = []
    for command in commands(deploy, form).values():
        arguments = ["cpu" if one == "cuda:0" else one for one in in_folder(command, tmp_path)]
        programs.append(launch(sys.executable, "-m", "common.cli", *arguments))
    router, prefill, decode = here
    until = time.monotonic() + START_TIMEOUT_S
    while True:
        assert all(program.alive for program in programs), "\n".join(program.output()[-2000:] for program in programs)
        assert time.monotonic() < until
        try:
            if httpx.get(f"http://{router}:8000/ready", timeout=5).status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    check = [sys.executable, "-P", str(repository / "helm" / "files" / "check_request.py"), "--model", "tiny-random"]
    check += ["--url", f"http://{router}:8000", "--timeout-s", "60"]
    check += ["--prefill", f"{prefill}:7003", "--decode", f"{decode}:7003"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "through both pools" in done.stdout
