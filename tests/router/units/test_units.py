"""What `diptych units` writes: good to systemd and to compose, and its commands find each other."""

from __future__ import annotations

import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from router.units.command import main

from ...program import Program

DIPTYCH = str(Path(sys.executable).with_name("diptych"))
START_TIMEOUT_S = 240.0


def loopback_addresses() -> list[str]:
    """Three addresses of this machine, each for a machine of the service: ports are those that are written."""
    a, b = random.randrange(64, 255), random.randrange(256)
    return [f"127.{a}.{b}.{last}" for last in random.sample(range(1, 255), 3)]


def write(form: str, out: Path, hosts: list[str], *further: str) -> None:
    router, prefill, decode = hosts
    places = ("--router", router, "--prefill", prefill, "--decode", decode)
    options = ("--program", DIPTYCH, "--registry", "registry.example.com", "--out", str(out))
    assert main([form, "--model", "tiny-random", *places, *options, *further]) == 0


def services_of(folder: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    return found


@pytest.fixture
def hosts() -> list[str]:
    return ["10.0.0.6", "node-b", "node-b*2"]


@pytest.mark.parametrize("accelerator", ("cpu", "cuda"))
def test_systemd_takes_the_units(accelerator: str, tmp_path: Path, hosts: list[str]) -> None:
    write("systemd", tmp_path / "out", hosts, "--accelerator", accelerator)
    units = sorted(map(str, (tmp_path / "out").glob("*/*.service")))
    assert len(units) == 4
    analyze = shutil.which("systemd-analyze") or pytest.skip("systemd is not installed")
    done = subprocess.run([analyze, "verify", *units], capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if "diptych" in line]  # the machine's own units may have faults
    assert not said, said


def test_the_script_that_installs_is_a_script(tmp_path: Path, hosts: list[str]) -> None:
    write("systemd", tmp_path / "out", hosts, "--accelerator", "rocm")
    for script in (tmp_path / "out").glob("*/install.sh"):
        subprocess.run(["sh", "-n", str(script)], check=True, timeout=60)
        text = script.read_text()
        units = [unit.name for unit in script.parent.glob("*.service")]
        assert units and all(text.count(unit) == 3 for unit in units), "installed, enabled, started"
        assert "usermod -aG" in text


@pytest.mark.parametrize("accelerator", ("cpu", "cuda", "rocm"))
def test_compose_takes_the_file(accelerator: str, tmp_path: Path, hosts: list[str]) -> None:
    write("compose", tmp_path / "out", hosts, "--accelerator", accelerator)
    services = services_of(tmp_path / "out" / "node-b")
    assert list(services) == ["prefill-worker-0", "decode-worker-0", "decode-worker-1"]
    assert {each["image"] for each in services.values()} == {f"registry.example.com/diptych-worker:0.1.0-{accelerator}"}
    if accelerator == "cuda":
        gpus = [each["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for each in services.values()]
        assert gpus == [["0"], ["1"], ["2"]]
    spec = pytest.importorskip("compose_spec", reason="the extra `dev` of this checkout is not installed")
    for file in (tmp_path / "out").glob("*/compose.yaml"):
        spec.PyCompose.from_yaml(file.read_text()).validate()


def test_all_machines_have_one_key_and_nobody_else(tmp_path: Path, hosts: list[str]) -> None:
    write("compose", tmp_path / "out", hosts)
    keys = list((tmp_path / "out").glob("*/curve.key"))
    assert len(keys) == 2 and len({key.read_text() for key in keys}) == 1
    assert {key.stat().st_mode & 0o777 for key in keys} == {0o600}


def test_what_is_there_is_not_overwritten(tmp_path: Path, hosts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    write("systemd", tmp_path / "out", hosts)
    places = ("--model", "m", "--router", "a", "--decode", "b", "--out", str(tmp_path / "out"))
    assert main(["systemd", *places]) == 2
    assert "is there already: take another --out" in capsys.readouterr().err


def test_images_need_a_registry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ("--model", "m", "--router", "a", "--decode", "b", "--out", str(tmp_path / "out"))
    assert main(["compose", *places]) == 2
    assert "registry='' is refused: where your images were pushed to" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def commands(form: str, out: Path) -> list[list[str]]:
    """Every process's command, with the folders of its machine in place of those that systemd or docker makes."""
    found = []
    for folder in out.iterdir():
        if form == "systemd":
            lines = [unit.read_text().partition("ExecStart=")[2].splitlines()[0] for unit in folder.glob("*.service")]
            parts = [shlex.split(line) for line in lines]
        else:
            parts = [[DIPTYCH, *service["command"]] for service in services_of(folder).values()]
        places = {
            "/etc/diptych/": f"{folder}/",
            "${CREDENTIALS_DIRECTORY}/": f"{folder}/",
            "/run/secrets/": f"{folder}/",
        }
        for command in parts:
            for place, here in places.items():
                command = [part.replace(place, here) for part in command]
            found.append(command)
    return found


@pytest.mark.e2e
@pytest.mark.parametrize("form", ("systemd", "compose"))
def test_the_processes_find_each_other(
    form: str, tmp_path: Path, repository: Path, launch: Callable[..., Program]
) -> None:
    """On three addresses, as three machines, over encrypted sockets: a request goes by way of both pools."""
    router, prefill, decode = hosts = loopback_addresses()
    write(form, tmp_path / "out", hosts)
    programs = [launch(*command) for command in commands(form, tmp_path / "out")]
    assert len(programs) == 3
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
    assert "by way of both pools" in done.stdout
