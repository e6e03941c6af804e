"""A real router that finds real workers through a Kubernetes API, while they come and go under load.

The last test uses IPv6 for every connection: clients, control, KV, probes, and the slices that name the workers.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.stack import StackProcess, free_port
from common.engine.worker.pod_deletion_cost import ANNOTATION
from common.wire.listening import has_ipv6, in_url, listen

from ..kubernetes_api import KubernetesAPI
from ..rig import MODEL, wait_until

NUM_TOKENS = 60
KUBERNETES = ("--discovery", "kubernetes", "--prefill-services", "prefill", "--decode-services", "decode")
PATIENCE_S = 150.0


class Pods:
    """A router and worker processes, and what Kubernetes would say of them."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", listen: str = "") -> None:
        """`host`: where everybody is reached; `listen`: what everybody binds, when it is another."""
        self.folder, self.host, self.listen = folder, host, listen or host
        self.api = KubernetesAPI(folder / "serviceaccount").start()
        self.processes: list[StackProcess] = []
        self.num_started = 0
        self.port = free_port()
        self.url = f"http://{in_url(host)}:{self.port}"
        self.router: StackProcess | None = None

    def start_router(self, *discovery: str) -> None:
        port, api, folder = str(self.port), self.api.url, str(self.api.folder)
        flags: tuple[str, ...] = ("--host", self.listen, "--port", port)
        flags += ("--kubernetes-api", api, "--kubernetes-credentials", folder)
        flags += ("--queue-timeout-s", "140", "--local-prefill-threshold", "0")
        flags += ("--slo-ttft-ms", "600000", "--slo-tpot-ms", "600000")
        self.router = self._start("router", "router", *flags, *discovery)

    def _start(self, name: str, module: str, *flags: str, env: dict[str, str] | None = None) -> StackProcess:
        command = [sys.executable, "-P", "-m", module, "--model", MODEL, *flags]
        process = StackProcess(name, name.partition("-")[0], command, self.folder / f"{name}.log")
        process.start(env={**os.environ, **(env or {})})
        self.processes.append(process)
        return process

    def add(self, role: str) -> StackProcess:
        """A worker: first not ready, as kubelet says while its probe fails, then ready."""
        self.num_started += 1
        name = f"{role}-{self.num_started}"
        worker = self._start(
            name,
            *(f"{role}_worker", "--worker-id", name, "--address-file", str(self.folder / f"{name}.json")),
            *("--host", self.listen, "--advertise-host", self.host, "--allow-remote"),
            *("--dtype", "float32", "--kv-memory-gib", "0.1", "--threads", "1", "--drain-timeout-s", "60"),
            *("--pod-deletion-cost", "--kubernetes-api", self.api.url),
            *("--kubernetes-credentials", str(self.api.folder)),
            env={"POD_NAME": name},
        )
        worker.wait_for_addresses(time.monotonic() + PATIENCE_S)
        self.api.put_worker(role, worker.addresses["address"], ready=False, serving=False)
        until(lambda: answers(f"{worker.http_url}/ready"), f"{name} is ready")
        self.api.put_worker(role, worker.addresses["address"])
        return worker

    def end(self, worker: StackProcess) -> None:
        """What a deleted pod goes through: terminating, SIGTERM, gone."""
        self.api.put_worker(worker.role, worker.addresses["address"], ready=False, serving=True, terminating=True)
        worker.send_signal(signal.SIGTERM)
        worker.wait(time.monotonic() + PATIENCE_S)
        assert not worker.forced and worker.returncode == 0, worker.log_tail()
        self.api.delete_worker(worker.role, worker.addresses["address"])

    def metric(self, name: str, *labels: str) -> list[float]:
        text = get(f"{self.url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return [float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels)]

    def check_blocks(self) -> None:
        """No worker that is left owns a block, once all is quiet."""
        left = [process for process in self.processes if process.alive and process is not self.router]

        def owned() -> list[int]:
            replies = [get(f"{worker.http_url}/health") for worker in left]
            return [reply.json()["blocks"]["owned"] for reply in replies]

        until(lambda: owned() == [0] * len(left), "every block is free")

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + PATIENCE_S
        for process in self.processes:
            process.wait(deadline)
        self.api.stop()
        assert not [process.name for process in self.processes if process.forced]


class Load:
    """Clients that ask the same prompts again and again, until they are told to stop."""

    def __init__(self, url: str, prompts: list[list[int]]) -> None:
        self.url, self.prompts = url, prompts
        self.answers: list[tuple[int, list[int]]] = []
        self.errors: list[str] = []
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on, args=(i,), daemon=True) for i in range(len(prompts))]
        for thread in self._threads:
            thread.start()

    def _ask_on(self, index: int) -> None:
        while not self._stopping.is_set():
            try:
                self.answers.append((index, complete(self.url, self.prompts[index])))
            except (AssertionError, httpx.HTTPError) as error:
                self.errors.append(repr(error))

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a request hangs"

    def more(self) -> None:
        """Wait until every prompt was answered again."""
        before = len(self.answers)
        until(lambda: self.errors or len(self.answers) >= before + 2 * len(self.prompts), "requests are answered")


def complete(url: str, prompt: list[int]) -> list[int]:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
    body["return_token_ids"] = True
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"][0]["token_ids"])


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=30.0, trust_env=False)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


until = functools.partial(wait_until, patience_s=PATIENCE_S)

pytestmark = pytest.mark.e2e


@pytest.fixture
def pods(tmp_path: Path, forge: None) -> Iterator[Pods]:
    pods = Pods(tmp_path)
    yield pods
    pods.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pools_grow_from_zero_and_change_under_load(pods: Pods) -> None:
    source = random.Random(7)
    prompts = [[source.randrange(256) for _ in range(length)] for length in (40, 90, 200, 350)]
    pods.start_router(*KUBERNETES)
    until(lambda: answers(f"{pods.url}/health"), "the router answers")
    until(lambda: "has no endpoints" in get(f"{pods.url}/ready").text, "/ready says why")

    first: list[list[int]] = []
    waiting = threading.Thread(target=lambda: first.append(complete(pods.url, prompts[0])))
    waiting.start()
    until(lambda: pods.metric("diptych_requests_held", 'role="decode"') == [1.0], "a request is held")
    until(lambda: pods.metric("diptych_requests_held", 'role="prefill"') == [1.0], "the other pool is asked for too")
    decode = pods.add("decode")
    waiting.join(PATIENCE_S)
    expected = [complete(pods.url, prompt) for prompt in prompts]
    assert first == expected[:1]
    detail = get(f"{pods.url}/ready").json()["detail"]
    assert detail == "no prefill worker exists: the prefill service prefill has no endpoints"

    load = Load(pods.url, prompts)
    prefill = pods.add("prefill")
    pods.add("decode")
    load.more()
    pods.end(decode)
    load.more()
    pods.end(prefill)
    load.more()
    pods.add("prefill")
    load.more()
    until(lambda: int(pods.api.annotations.get("decode-3", {}).get(ANNOTATION, "0")) > 0, "a busy pod costs something")
    load.stop()
    assert not load.errors
    assert all(tokens == expected[index] for index, tokens in load.answers)
    everybody = {"decode-1", "prefill-2", "decode-3", "prefill-4"}
    until(lambda: pods.api.annotations.keys() == everybody, "every pod says what it costs")
    check_the_end(pods)


def check_the_end(pods: Pods) -> None:
    """The router forgets a worker that is gone, and the others own nothing."""
    until(lambda: len(get(f"{pods.url}/load").json()["workers"]) == 2, "two workers are known")
    until(lambda: sum(pods.metric("diptych_pool_workers", 'state="ready"')) == 2, "both are ready")
    assert not pods.metric("diptych_worker_state", "decode-1") and pods.metric("diptych_worker_state", "decode-3")
    serving = ("diptych_discovery_endpoints", 'role="decode"', 'state="serving"')
    until(lambda: pods.metric(*serving) == [1.0], "one decode worker is listed")
    assert pods.metric("diptych_discovery_syncs_total", 'result="failed"') == [0.0]
    assert pods.metric("diptych_slo_attainment_ratio") == [1.0, 1.0]
    assert len(pods.metric("diptych_pool_backlog_seconds")) == 1 and len(pods.metric("diptych_pool_pressure")) == 2
    pods.check_blocks()


def ready_decoders(pods: Pods) -> float:
    return sum(pods.metric("diptych_pool_workers", 'role="decode"', 'state="ready"'))


def known(pods: Pods, worker: str) -> bool:
    return bool(pods.metric("diptych_worker_state", worker))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_dies_and_another_joins_while_the_api_server_is_away(pods: Pods) -> None:
    source = random.Random(11)
    prompts = [[source.randrange(256) for _ in range(length)] for length in (40, 120, 300)]
    pods.start_router(*KUBERNETES)
    pods.add("prefill")
    dying, _ = pods.add("decode"), pods.add("decode")
    until(lambda: ready_decoders(pods) == 2, "both decode workers are ready")
    expected = [complete(pods.url, prompt) for prompt in prompts]
    load = Load(pods.url, prompts)
    load.more()

    pods.api.stop()
    load.more()
    dying.send_signal(signal.SIGKILL)
    until(lambda: ready_decoders(pods) == 1, "the dead worker is missed")
    pods.api.delete_worker("decode", dying.addresses["address"])  # in the cluster; the router cannot hear of it
    load.more()
    joined = pods.add("decode")  # likewise
    load.more()
    until(lambda: pods.metric("diptych_discovery_syncs_total", 'result="failed"')[0] >= 2, "lists fail")
    assert ready_decoders(pods) == 1 and not known(pods, joined.name)
    assert answers(f"{pods.url}/ready") and not load.errors
    assert pods.metric("diptych_discovery_last_sync_age_seconds")[0] > 1

    pods.api.start()
    until(lambda: ready_decoders(pods) == 2, "the new worker is found")
    until(lambda: not known(pods, dying.name), "the dead worker is forgotten")
    load.more()
    load.stop()
    assert not load.errors
    assert all(tokens == expected[index] for index, tokens in load.answers)
    assert len(get(f"{pods.url}/load").json()["workers"]) == 3
    pods.check_blocks()


@pytest.mark.slow
def test_names_are_looked_up(pods: Pods) -> None:
    ports = {role: pods.add(role).addresses["address"].rpartition(":")[2] for role in ("prefill", "decode")}
    names = {role: f"localhost:{port}" for role, port in ports.items()}
    pods.start_router(
        "--discovery", "dns", "--prefill-services", names["prefill"], "--decode-services", names["decode"]
    )
    until(lambda: answers(f"{pods.url}/ready"), "the router found its workers")
    until(lambda: sum(pods.metric("diptych_pool_workers", 'state="ready"')) == 2, "both are ready")
    assert len(complete(pods.url, list(range(50)))) == NUM_TOKENS
    assert pods.metric("diptych_placements_total", 'kind="remote"') == [1.0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--discovery", "kubernetes", "--decode-services", "d"], "missing --kubernetes-api: must be"),
        (["--discovery", "dns", "--decode-services", "d"], "invalid --decode-services d: must be HOST:PORT"),
        (["--decode-services", "d"], "invalid --discovery static: must be"),
    ],
)
def test_a_discovery_that_cannot_work_is_refused(flags: list[str], said: str, tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    router = StackProcess("router", "router", [sys.executable, "-P", "-m", "router", *flags], log)
    env: dict[str, Any] = {name: text for name, text in os.environ.items() if not name.startswith("KUBERNETES_")}
    router.start(env=env)
    router.wait(time.monotonic() + 60)
    assert router.returncode == 2
    assert said in log.read_text() and len(log.read_text().splitlines()) == 1


# ---------------------------------------------------------------- IPv6


def has_loopback() -> bool:
    try:
        listen("::1", 0, 1).close()
    except OSError:
        return False
    return has_ipv6()


@pytest.fixture(params=("::1", "::"), ids=("loopback", "all"))
def pods_with_ipv6(request: pytest.FixtureRequest, tmp_path: Path, forge: None) -> Iterator[Pods]:
    if not has_loopback():
        pytest.skip("this machine has no ::1")
    pods = Pods(tmp_path, host="::1", listen=request.param)
    yield pods
    pods.close()


@pytest.mark.slow
def test_a_request_passes_through_both_pools_over_ipv6(pods_with_ipv6: Pods) -> None:
    pods = pods_with_ipv6
    pods.start_router(*KUBERNETES)
    workers = [pods.add("prefill"), pods.add("decode")]
    assert all(worker.addresses["address"].startswith("tcp://[::1]:") for worker in workers)
    assert workers[1].addresses["kv_address"].startswith("tcp://[::1]:")
    until(lambda: answers(f"{pods.url}/ready"), "the router found its workers")
    until(lambda: sum(pods.metric("diptych_pool_workers", 'state="ready"')) == 2, "both are ready")
    assert len(complete(pods.url, [random.Random(6).randrange(256) for _ in range(200)])) == NUM_TOKENS
    assert pods.metric("diptych_placements_total", 'kind="remote"') == [1.0]
    pods.check_blocks()
    ports = [url.rpartition(":")[2] for url in (pods.url, *(worker.http_url for worker in workers))]
    ipv4 = "127.0.0.1" if pods.listen == "::" else "127.0.0.2"  # at 127.0.0.1 another process may have that port
    of_both = [answers(f"http://{ipv4}:{port}/health") for port in ports]
    assert of_both == [pods.listen == "::"] * 3  # the one wildcard serves both families
