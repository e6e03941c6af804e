"""Keys, TLS and the audit log of a real router process in front of real workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from benchmarks.stack import StackProcess, free_port
from router.cli.serve.probe import ready_reason

from ..rig import MODEL, PROMPT, wait_until

pytestmark = pytest.mark.e2e

CA = trustme.CA()
SECRETS = {"flag": "the-one-of-the-environment", "alice": "alices-own-secret-key", "bob": "bobs-own-secret-key-2",
           "carol": "carols-own-secret-key", "slow": "the-key-with-few-tokens"}  # fmt: skip
KEYS = "".join(
    f'[[key]]\nname = "{name}"\nkey = "{SECRETS[name]}"\n{more}\n'
    for name, more in (
        ("alice", ""),
        ("bob", 'cache_group = "team"'),
        ("carol", 'cache_group = "team"'),
        ("slow", "tokens_per_minute = 300"),
    )
)


def write_certificate(folder: Path) -> str:
    """A new pair signed by CA in the files of the router; its serial number."""
    issued = CA.issue_cert("127.0.0.1", "localhost")
    for name, data in (
        ("tls.key", issued.private_key_pem.bytes()),
        ("tls.crt", b"".join(pem.bytes() for pem in issued.cert_chain_pems)),
    ):
        fresh = folder / f"{name}.new"
        fresh.write_bytes(data)
        fresh.rename(folder / name)
    decoded: Any = ssl._ssl._test_decode_cert(str(folder / "tls.crt"))  # type: ignore[attr-defined]
    return str(decoded["serialNumber"])


@dataclass
class Guarded:
    """The router and its files."""

    process: StackProcess
    folder: Path
    port: int
    system: Any

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def trust(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        CA.configure_trust(context)
        return context

    def client(self, name: str = "") -> httpx.Client:
        headers = {"authorization": f"Bearer {SECRETS[name]}"} if name else {}
        return httpx.Client(base_url=self.url, verify=self.trust, headers=headers, timeout=60, trust_env=False)

    def shown_serial(self) -> str:
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=30) as plain,
            self.trust.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
        ):
            certificate: Any = wrapped.getpeercert()
            return str(certificate["serialNumber"])

    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "audit.log").read_text().splitlines()]


@pytest.fixture(scope="module")
def router(systems: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    system = systems(router_flags=("--local-prefill-threshold", "0"))
    folder, port = tmp_path_factory.mktemp("router"), free_port()
    write_certificate(folder)
    (folder / "keys.toml").write_text(KEYS)
    CA.cert_pem.write_to_path(folder / "ca.pem")
    flags = ["--model", MODEL, "--port", str(port), "--local-prefill-threshold", "0", "--log-level", "debug"]
    for role in ("prefill", "decode"):
        flags += [f"--{role}", ",".join(worker.addresses["address"] for worker in system.stack.workers(role))]
    for flag, name in (("api-key-file", "keys.toml"), ("tls-cert", "tls.crt"), ("tls-key", "tls.key")):
        flags += [f"--{flag}", str(folder / name)]
    flags += ["--audit-log", str(folder / "audit.log")]
    command = [sys.executable, "-P", "-m", "router", *flags]  # in the form that the forge accepts
    process = StackProcess("router", "router", command, folder / "router.log")
    process.start(env={**os.environ, "DIPTYCH_API_KEY": SECRETS["flag"]})
    guarded = Guarded(process, folder, port, system)
    try:
        wait_until(lambda: is_ready(guarded), "the router is ready", 120)
        yield guarded
    finally:
        process.stop()


@pytest.fixture
def guarded(router: Guarded) -> Iterator[Guarded]:
    yield router
    router.system.settle()


def is_ready(guarded: Guarded) -> bool:
    assert guarded.process.alive, guarded.process.log_tail()
    with contextlib.suppress(httpx.TransportError), guarded.client() as client:
        return client.get("/ready").status_code == 200
    return False


def cached(client: httpx.Client, prompt: str, **fields: Any) -> int:
    """Cached tokens of a request's prompt, by the answer's own account."""
    reply = client.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 4, **fields})
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.slow
def test_a_tenant_finds_nothing_of_another_in_the_cache(guarded: Guarded) -> None:
    """Neither by asking for the same text nor by naming a salt; keys of one group share on purpose."""
    prompt = "Only alice knows this. " * 8
    with guarded.client("alice") as alice, guarded.client("bob") as bob, guarded.client("carol") as carol:
        assert cached(alice, prompt) == 0
        assert cached(alice, prompt) >= 160
        assert [cached(bob, prompt), cached(bob, prompt, cache_salt="alice")] == [0, 0]
        assert cached(carol, prompt) >= 160  # bob's
        assert cached(alice, prompt, cache_salt="private") == 0
        assert cached(alice, prompt, cache_salt="private") >= 160
        assert cached(alice, prompt) >= 160


@pytest.mark.slow
def test_tokens_of_a_stream_count_as_they_come(guarded: Guarded) -> None:
    with guarded.client("slow") as client:
        body = {"model": MODEL, "prompt": "x" * 50, "max_tokens": 400, "ignore_eos": True, "stream": True}
        reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")  # overdrawn, not cut
        refused = client.post("/v1/completions", json={**body, "stream": False})
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.slow
def test_the_probe_of_the_supervisor_speaks_https(guarded: Guarded) -> None:
    assert asyncio.run(ready_reason("127.0.0.1", guarded.port, tls=True)) == ""
    assert "does not answer" in asyncio.run(ready_reason("127.0.0.1", guarded.port))


def test_old_tls_and_plain_http_are_refused(guarded: Guarded) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(guarded.url.replace("https", "http") + "/health", trust_env=False, timeout=30)
    old = guarded.trust
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.TransportError):
        httpx.get(guarded.url + "/health", verify=old, trust_env=False, timeout=30)


@pytest.mark.slow
def test_a_renewed_certificate_is_shown_and_cuts_nobody(guarded: Guarded) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with guarded.client("alice") as client, client.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        assert next(line for line in lines if line.startswith("data: "))  # behind comments, if it took long
        serial = write_certificate(guarded.folder)
        wait_until(lambda: guarded.shown_serial() == serial, "the new certificate is shown")
        (guarded.folder / "tls.crt").write_text("torn")
        wait_until(lambda: "tls_cert=" in guarded.process.log.read_text(), "the torn one is complained of")
        assert guarded.shown_serial() == serial
        serial = write_certificate(guarded.folder)
        guarded.process.send_signal(signal.SIGHUP)
        wait_until(lambda: guarded.shown_serial() == serial, "and the next one")
        assert list(filter(None, lines))[-1] == "data: [DONE]"


@pytest.mark.slow
def test_the_load_generator_speaks_https(guarded: Guarded, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "benchmarks.load.command", "--url", guarded.url]
    command += ["--num-requests", "3", "--concurrency", "2", "--input-len", "20", "--output-len", "4"]
    environ = {**os.environ, "SSL_CERT_FILE": str(guarded.folder / "ca.pem"), "DIPTYCH_BENCH_API_KEY": SECRETS["alice"]}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert SECRETS["alice"] not in done.stdout + done.stderr


def lines_with(guarded: Guarded, request_id: str) -> list[str]:
    return [line for line in guarded.process.log.read_text().splitlines() if f"request_id={request_id}" in line]


def test_a_stop_string_leaves_a_whole_line_in_the_log(guarded: Guarded) -> None:
    with guarded.client("alice") as client:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        headers = {"x-request-id": "stopped-by-a-string"}
        reply = client.post("/v1/completions", json={**body, "max_tokens": 900, "stop": text[8:11]}, headers=headers)
        assert reply.json()["choices"][0]["finish_reason"] == "stop"
    wait_until(lambda: lines_with(guarded, "stopped-by-a-string"), "the line is written")
    (line,) = lines_with(guarded, "stopped-by-a-string")
    for part in ("key=alice", "prefill_worker=prefill-0", "decode_worker=decode-0", "prefill_ms=", "finish=stop"):
        assert part in line


@pytest.mark.slow
def test_the_audit_log_is_rotated(guarded: Guarded) -> None:
    with guarded.client("alice") as client:
        client.get("/v1/models", headers={"x-request-id": "before"})
        wait_until(lambda: "before" in [line["request_id"] for line in guarded.audit()], "the line is written")
        (guarded.folder / "audit.log").rename(guarded.folder / "audit.log.1")
        guarded.process.send_signal(signal.SIGHUP)
        client.get("/v1/models", headers={"x-request-id": "after"})
    wait_until((guarded.folder / "audit.log").exists, "there is a new file")
    wait_until(lambda: [line["request_id"] for line in guarded.audit()] == ["after"], "with the later line")


@pytest.mark.slow
def test_no_secret_is_told_to_anybody(guarded: Guarded) -> None:
    """With everything logged, after every kind of request, good and bad; the last test of this router."""
    shown = []
    with guarded.client("flag") as admin, guarded.client() as nobody:
        for client in (admin, nobody):
            for path in ("/", "/load", "/metrics", "/openapi.json", "/health", "/ready", "/version", "/nope"):
                shown.append(client.get(path).text)
        for name in SECRETS:
            with guarded.client(name) as client:
                fields = {"model": SECRETS[name], "prompt": SECRETS[name]}
                shown.append(client.get("/v1/models").text)
                client.post("/v1/completions", json={**fields, "temperature": SECRETS[name]})
                client.post("/v1/completions", json=fields)
                client.post("/v1/completions", json={**fields, "model": MODEL, "logit_bias": {SECRETS[name]: 1}})
                client.post("/v1/chat/completions", json={"messages": [{"role": SECRETS[name]}]})
                headers = {"content-type": "application/json"}
                client.post("/v1/completions", content=SECRETS[name].encode(), headers=headers)
        nobody.get("/v1/models", headers={"authorization": "Bearer not-one-of-the-keys"})
        (guarded.folder / "keys.toml").write_text(KEYS.replace("tokens_per_minute", "tokens_per_hour"))
        wait_until(lambda: "api_key_file=" in guarded.process.log.read_text(), "the bad file is complained of")
        assert admin.get("/v1/models").status_code == 200
    # What the system itself shows of the process, and all that it wrote.
    shown.append(Path(f"/proc/{guarded.process.pid}/cmdline").read_text())
    guarded.process.terminate()
    guarded.process.wait(time.monotonic() + 60)
    assert guarded.process.returncode == 0, guarded.process.log_tail()
    shown += [
        path.read_text() for path in (*guarded.folder.glob("*.log*"), *guarded.system.stack.log_dir.glob("*.log"))
    ]
    secrets = [*SECRETS.values(), "not-one-of-the-keys", *(guarded.folder / "tls.key").read_text().splitlines()[1:-1]]
    assert len(shown) > 20 and not [secret for secret in secrets for text in shown if secret in text]
    assert "Traceback" not in guarded.process.log.read_text()


# ---------------------------------------------------------------- refusals to start

# tests/router/access has the others.
BAD_FLAGS = {
    "the wrong way round": (("--tls-cert", "tls.key", "--tls-key", "tls.crt"), "--tls-cert tls.key"),
    "no keys": (("--api-key-file", "tls.crt"), "--api-key-file tls.crt"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_FLAGS)
def test_files_that_cannot_be_used_are_one_line(name: str, tmp_path: Path) -> None:
    flags, said = BAD_FLAGS[name]
    write_certificate(tmp_path)
    command = [sys.executable, "-P", "-m", "router", "--model", MODEL, "--decode", "tcp://127.0.0.1:1"]
    began = time.monotonic()
    done = subprocess.run([*command, "--port", "0", *flags], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), (done.stderr, time.monotonic() - began)
    assert said in done.stderr
