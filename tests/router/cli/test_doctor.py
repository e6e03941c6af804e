"""`diptych doctor`: findings are sentences, and its bundle has no secrets and no names of hosts, users or keys."""

from __future__ import annotations

import asyncio
import logging
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.observe import recent_warnings
from router.cli import doctor
from router.cli.doctor import Doctor, main
from router.cli.router_client import LoadSource
from router.cli.scrub import Scrubber
from router.dispatch.load import WorkerLoad

PLANTED = {
    "the API key of the command": "key-of-the-command-line",
    "an API key of the key file": "alices-key-in-the-file",
    "a CURVE key": "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",
    "a Hugging Face token": "hf_QwErTyUiOpAsDfGh",
    "a prompt": "my-private-prompt",
    "a password in a URL": "pass-in-a-url",
    "a host": "decode.internal.example",
    "an address": "10.20.30.40",
    "the name of a key": "alice-of-acme",
    "a bearer token in a log": "token-in-a-log",
    "a token in a query": "signature-in-a-query",
}


def bundle(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {Path(one.name).name: archive.extractfile(one).read().decode() for one in archive}


async def test_the_bundle_has_none_of_the_planted_secrets(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "keys.toml").write_text(
        f'[[key]]\nname = "{PLANTED["the name of a key"]}"\nkey = "{PLANTED["an API key of the key file"]}"\n'
    )
    (tmp_path / "curve.key").write_text(f'secret-key = "{PLANTED["a CURVE key"]}"\n')
    (tmp_path / "d.toml").write_text(
        f'api_key = "{PLANTED["the API key of the command"]}"\ncurve_key = "{tmp_path}/curve.key"\n'
        f'[router]\notlp_traces_endpoint = "https://me:{PLANTED["a password in a URL"]}@c/v1/traces"\n'
    )
    monkeypatch.setenv("HF_TOKEN", PLANTED["a Hugging Face token"])
    running = await start(api_key_file=str(tmp_path / "keys.toml"), api_key=PLANTED["the API key of the command"])
    worker = WorkerLoad(
        f"tcp://{PLANTED['a host']}:1", "decode", "d-1\x1b[2J", "dead", 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0
    )
    load = running.engine.load()
    monkeypatch.setattr(running.engine, "load", lambda: replace(load, workers=(worker,)))
    body = {"prompt": PLANTED["a prompt"], "max_tokens": 1}
    own = {"authorization": f"Bearer {PLANTED['an API key of the key file']}"}
    assert (await running.http.post("/v1/completions", json=body, headers=own)).status_code == 200
    for text in (
        f"cannot reach {PLANTED['an address']} with Authorization: Bearer {PLANTED['a bearer token in a log']}",
        f"cannot get https://x/?sig={PLANTED['a token in a query']} as {PLANTED['a Hugging Face token']}",
        f'curve "{PLANTED["a CURVE key"]}" refused',
    ):
        recent_warnings.emit(logging.makeLogRecord({"levelno": 30, "levelname": "WARNING", "msg": text}))
    output = tmp_path / "bundle.tar.gz"
    output.touch(0o644)
    arguments = ["--url", running.url, "--api-key", PLANTED["the API key of the command"], "-o", str(output)]
    status = await asyncio.to_thread(main, [*arguments, "--config", str(tmp_path / "d.toml")])
    shown, files = capsys.readouterr().out, bundle(output)
    assert status == 1 and "The decode worker d-1?[2J is dead" in shown
    assert set(files) == {"report.txt", "packages.txt", "settings.toml", "metrics.txt", "load.json"}
    found = {what: name for what, secret in PLANTED.items() for name, text in files.items() if secret in text}
    assert found == {} and not [what for what, secret in PLANTED.items() if secret in shown]
    assert shown.startswith(files["report.txt"])
    assert 'key="key-' in files["metrics.txt"] and "The router logged" in files["report.txt"]
    assert "otlp_traces_endpoint = https://***@c/v1/traces" in files["settings.toml"]
    assert output.stat().st_mode & 0o077 == 0


def test_a_machine_without_a_service_is_well_and_a_named_one_must_answer(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(doctor, "DEFAULT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(Doctor, "_no_service", lambda *_: iter(()))
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(line.split()[0] in ("ok", "warning") and line.endswith(".") for line in shown.splitlines())
    monkeypatch.undo()
    assert main(["--url", "http://127.0.0.1:1"]) == 1
    text = "failure  The router does not answer: Connection refused. Start the router, or check --url and the network."
    assert text in capsys.readouterr().out


def test_no_workers_are_a_failure_unless_models_are_loaded_on_demand() -> None:
    models = [{"id": "a", "state": "idle"}, {"id": "b", "state": "idle"}]
    of_all = doctor.Finding(doctor.OK, "No model is loaded. 2 can be loaded on demand.")
    assert doctor.readiness({"workers": [], "models": models}) == of_all
    none = doctor.Finding(doctor.FAILURE, "0 of 0 workers are ready.")
    for state in ("loading", None):
        assert doctor.readiness({"workers": [], "models": [{"id": "a", "state": state}]}) == none
    found = doctor.readiness({"workers": [{"state": "ready"}], "models": models})
    assert found == doctor.Finding(doctor.OK, "1 of 1 workers are ready.")


def test_invalid_settings_are_named(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "d.toml").write_text("prot = 1\n")
    assert main(["--config", str(tmp_path / "d.toml"), "--url", "http://127.0.0.1:1"]) == 1
    assert "failure  The settings are invalid: unknown setting prot in" in capsys.readouterr().out


def settings(text: str, tmp_path: Path, **environ: str) -> list[tuple[str, str]]:
    (tmp_path / "d.toml").write_text(text)
    one = Doctor(LoadSource("127.0.0.1", 1), given=False, config=str(tmp_path / "d.toml"), environ=environ)
    return [(finding.level, finding.text.replace(f"{tmp_path}/", "")) for finding in one._settings()]


def test_values_are_checked_as_by_the_processes(tmp_path: Path) -> None:
    assert settings("[router]\nport = 8001\n", tmp_path) == [
        (doctor.OK, "Valid settings from d.toml and the environment: 1.")
    ]
    said = settings("[router]\nqueue_timeout_s = 999999\n[decode_worker]\nblock_size = 17\n", tmp_path)
    assert [level for level, _ in said] == [doctor.FAILURE] * 2
    assert "diptych router: invalid queue_timeout_s = 999999.0 under [router] in d.toml: must be" in said[0][1]
    assert "diptych decode-worker: invalid block_size = 17 under [decode_worker] in d.toml: must be" in said[1][1]
    ((level, text),) = settings('tls_cert = "c.pem"\n', tmp_path)
    assert level == doctor.FAILURE and "missing --tls-key: must be a file" in text
    ((level, text),) = settings("", tmp_path, DIPTYCH_PORT="99999")
    assert level == doctor.FAILURE
    assert "diptych router, prefill-worker, decode-worker: invalid DIPTYCH_PORT=99999: must be 0 to 65535" in text


def test_a_shared_value_that_some_processes_accept_is_a_warning(tmp_path: Path) -> None:
    ((level, text),) = settings('host = "0.0.0.0"\n', tmp_path)
    assert level == doctor.WARNING and "for diptych prefill-worker, decode-worker: invalid host" in text
    section = '[router]\nhost = "0.0.0.0"\n[decode_worker]\nhost = "0.0.0.0"\n'
    assert [level for level, _ in settings(section, tmp_path)] == [doctor.FAILURE]


@pytest.mark.parametrize("key", ["", "wrong"])
async def test_a_router_that_requires_a_key_is_a_router(start: Any, key: str) -> None:
    running = await start(api_key="right")
    one = Doctor(LoadSource.of(running.url, key), given=True, config="", environ={})
    found = await asyncio.to_thread(lambda: list(one._service()))
    needs_key = "The router requires an API key: set --api-key or DIPTYCH_API_KEY."
    assert doctor.Finding(doctor.WARNING, needs_key) in found
    assert doctor.Finding(doctor.OK, "The router is healthy.") in found
    assert not [finding for finding in found if finding.level == doctor.FAILURE] and "metrics.txt" in one.files


@pytest.mark.parametrize(("named", "said"), [("sh", "compiles them with sh."), ("absent++", "Correct or unset CXX.")])
def test_the_compiler_is_that_of_cxx(named: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))
    monkeypatch.setattr(Path, "rglob", lambda *_: iter(()))  # as in a source checkout
    one = Doctor(LoadSource("127.0.0.1", 1), given=False, config="", environ={"CXX": named})
    assert [finding.text.endswith(said) for finding in one._kernels()] == [True]


@pytest.mark.parametrize(
    "text", ["max_tokens=16 tokens_total 5", "127.0.0.1:8000 and version 1.2.3", "prefix_cache_hits=3"]
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Scrubber().text(text) == text
