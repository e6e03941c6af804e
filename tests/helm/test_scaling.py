"""The autoscaling loop, closed on one machine: the chart's triggers, the real metrics of real processes under load, and
real workers started and drained as Kubernetes would."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..kubernetes_api import KubernetesAPI, endpoint
from ..waiting import wait_until
from .autoscaler import Scaler
from .chart import NAMESPACE, Rendered, render
from .cluster import Container, small_values

pytestmark = pytest.mark.slow

PHASE_TIMEOUT_S = 240.0
REQUEST_TIMEOUT_S = 300.0
TICK_S = 0.5
COOLDOWN_S = 60
CLIENTS = 24
PREFILL_TOKENS, DECODE_TOKENS = 1500, 400


def values() -> dict[str, Any]:
    """The chart's autoscaling with short times: seconds instead of minutes."""
    speed = {
        "scaleUp": {"pods": 1, "percent": 100, "periodSeconds": 4, "stabilizationSeconds": 0},
        "scaleDown": {"pods": 1, "periodSeconds": 4, "stabilizationSeconds": 12},
    }
    keda = {"type": "keda", "kedaTrigger": "metrics-api", "minReplicas": 0, "maxReplicas": 3}
    base = small_values()
    base["workers"]["autoscaling"] = keda | speed | {"cooldownSeconds": COOLDOWN_S, "pollingSeconds": 1}
    base["prefill"]["defaults"]["autoscaling"] = {"target": 0.3}
    # A pool that fills quickly: pressure is that of the KV cache.
    base["decode"] = {"defaults": {"settings": {"num_blocks": 128}, "autoscaling": {"target": 0.9}}}
    base["router"]["settings"] = {"queue_timeout_s": 240, "max_wait_s": 240, "request_timeout_s": 300}
    return base


@dataclass
class Pool:
    """A Deployment's pods, started and ended one by one."""

    rendered: Rendered
    name: str
    folder: Path
    api: KubernetesAPI
    access: dict[str, str]
    scaler: Scaler
    threads: ThreadPoolExecutor
    pods: list[Container] = field(default_factory=list)
    ended: list[Future[int]] = field(default_factory=list)
    history: list[tuple[float, int]] = field(default_factory=list)
    num_made: int = 0

    def scale(self, wanted: int, now: float) -> None:
        while len(self.pods) < wanted:
            self.num_made += 1
            pod = Container(
                self.rendered, self.name, self.folder / f"{self.name}-{self.num_made}", self.access, index=self.num_made
            )
            self.pods.append(pod)
            self.threads.submit(pod.start)
            self._publish()
        while len(self.pods) > wanted:
            pod = self.pods.pop()
            self._publish(terminating=pod)
            self.ended.append(self.threads.submit(self._end, pod))
        self.history.append((now, wanted))

    def most_since(self, began: float) -> int:
        return max(num for at, num in self.history if at > began)

    def _end(self, pod: Container) -> int:
        while pod.process.started_at == 0.0:
            time.sleep(0.05)
        status = pod.end()
        self._publish()
        return status

    def _publish(self, terminating: Container | None = None) -> None:
        """The Service's slice, as its controller writes it."""
        service = self.rendered.named("Service", self.name)
        ports = [{"name": port["name"], "port": port["port"], "protocol": "TCP"} for port in service["spec"]["ports"]]
        endpoints = [endpoint(pod.address) for pod in self.pods]
        if terminating is not None:
            endpoints.append(endpoint(terminating.address, terminating=True))
        self.api.put(f"{self.name}-slice", self.name, endpoints, ports=ports)


@dataclass(frozen=True)
class Answer:
    """Seconds on the monotonic clock: asked at, to the first token, of each further token, complete at."""

    began: float
    ttft_s: float
    tpot_s: float
    ended: float


@dataclass
class World:
    """The router, both pools under their autoscalers, and clients."""

    router: Container
    pools: dict[str, Pool]
    answers: list[Answer] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.router.address}:8000"

    def control(self, stop: threading.Event) -> None:
        """One look at the routers' metrics a tick, for every pool."""
        with httpx.Client(trust_env=False, timeout=30) as client:
            while not stop.is_set():
                page, now = client.get(f"{self.url}/metrics").text, time.monotonic()
                for pool in self.pools.values():
                    pool.scale(pool.scaler.step(page, now), now)
                stop.wait(TICK_S)

    def ask(self, num_prompt: int, num_output: int) -> None:
        """One streamed request; anything but a whole answer fails the test."""
        prompt = [random.randrange(32, 127) for _ in range(num_prompt)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": num_output, "ignore_eos": True, "stream": True}
        url, began, arrivals, lines = f"{self.url}/v1/completions", time.monotonic(), [], []
        with httpx.stream("POST", url, json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False) as reply:
            refusal = "" if reply.is_success else reply.read().decode()
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    arrivals.append(time.monotonic())
                    lines.append(line)
        assert reply.status_code == 200 and lines[-1] == "data: [DONE]", refusal or lines[-3:]
        assert not any('"error"' in line for line in lines), lines[-3:]
        spread = (arrivals[-1] - arrivals[0]) / (num_output - 1) if num_output > 1 else 0.0
        self.answers.append(Answer(began, arrivals[0] - began, spread, arrivals[-1]))

    @contextmanager
    def load(self, num_prompt: int, num_output: int) -> Iterator[None]:
        """`CLIENTS` clients that ask again as soon as they are answered."""
        stop = threading.Event()

        def client() -> None:
            while not stop.is_set():
                self.ask(num_prompt, num_output)

        with ThreadPoolExecutor(CLIENTS) as threads:
            clients = [threads.submit(client) for _ in range(CLIENTS)]
            try:
                yield
            finally:
                stop.set()
            for each in clients:
                each.result()

    def pods(self, role: str) -> int:
        return len(self.pools[role].pods)


def until(true: Callable[[], bool], what: str) -> None:
    wait_until(true, what, PHASE_TIMEOUT_S, meanwhile=lambda: time.sleep(0.2))


@pytest.fixture
def world(helm4: Path, tmp_path: Path) -> Iterator[World]:
    rendered = render(helm4, "laptop", over=values())
    api = KubernetesAPI(tmp_path / "serviceaccount")
    api.namespace = NAMESPACE
    api.start()
    access = {"DIPTYCH_KUBERNETES_API": api.url, "DIPTYCH_KUBERNETES_CREDENTIALS": str(api.folder)}
    router = Container(rendered, "demo-diptych-router-tiny", tmp_path / "router", access)
    with ThreadPoolExecutor(16) as threads:
        pools = {}
        for item in rendered.of("ScaledObject"):
            role, name = item["metadata"]["labels"]["app.kubernetes.io/component"], item["metadata"]["name"]
            pools[role] = Pool(rendered, name, tmp_path, api, access, Scaler(item["spec"]), threads)
        made = World(router, pools)
        stop = threading.Event()
        controller: Future[None] | None = None
        try:
            router.start()
            router.wait("readiness")
            controller = threads.submit(made.control, stop)
            yield made
        finally:
            stop.set()
            if controller is not None:
                controller.result()
            pods = [pod for pool in pools.values() for pod in pool.pods]
            for pod in (*pods, router):
                pod.process.kill()
            api.stop()


@pytest.mark.helm
@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_each_pool_follows_its_own_load_from_zero_and_back(world: World) -> None:
    prefill, decode = world.pools["prefill"], world.pools["decode"]
    assert (world.pods("prefill"), world.pods("decode")) == (0, 0)
    world.ask(PREFILL_TOKENS, 4)  # held by the router until both pools are awake
    assert prefill.num_made >= 1 and decode.num_made >= 1

    until(lambda: world.pods("prefill") <= 1, "one request is no reason for more than one worker")
    began = time.monotonic()
    with world.load(PREFILL_TOKENS, 1):  # one token: no decode worker is needed for it
        until(lambda: world.pods("prefill") == 3, "prompts alone make the prefill pool grow")
        time.sleep(10)
        assert world.pods("prefill") == 3, "and it stays"
    assert decode.most_since(began) <= 1, "the decode pool did not grow"

    until(lambda: world.pods("prefill") <= 1, "the prefill pool shrinks again")
    began = time.monotonic()
    with world.load(20, DECODE_TOKENS):  # short prompts are computed on the decode workers themselves
        until(lambda: world.pods("decode") >= 2, "answers alone make the decode pool grow")
        time.sleep(10)
        assert world.pods("decode") >= 2, "and it stays"
    assert prefill.most_since(began) <= 1, "the prefill pool did not grow"

    until(lambda: (world.pods("prefill"), world.pods("decode")) == (0, 0), "both pools go back to zero")
    # No request failed, whatever started and ended meanwhile: a client that is not answered has raised by now.
    assert len(world.answers) > 2 * CLIENTS
    assert all(each.result() == 0 for pool in (prefill, decode) for each in pool.ended), "every worker ended well"
    # Up, down to the one pod of the next phase, and at the end to zero: no turns beyond those of the load itself.
    assert prefill.scaler.turns() <= 4 and decode.scaler.turns() <= 4
    if os.environ.get("SCALING_PLOT"):
        plot(world, Path(os.environ["SCALING_PLOT"]))


def plot(world: World, file: Path) -> None:
    """Requests under way, pods, TTFT and TPOT over time."""
    from matplotlib.figure import Figure

    answers = sorted(world.answers, key=lambda answer: answer.began)
    start = answers[0].began
    figure = Figure(figsize=(9, 8), layout="constrained")
    load, pods, ttft, tpot = figure.subplots(4, 1, sharex=True)
    steps = sorted([(each.began, 1) for each in answers] + [(each.ended, -1) for each in answers])
    under_way, num = [], 0
    for _, by in steps:
        num += by
        under_way.append(num)
    load.step([at - start for at, _ in steps], under_way, where="post")
    for role, pool in world.pools.items():
        pods.step([at - start for at, _ in pool.history], [num for _, num in pool.history], where="post", label=role)
    pods.legend()
    ttft.plot([each.began - start for each in answers], [each.ttft_s for each in answers], ".", markersize=3)
    streams = [each for each in answers if each.tpot_s]
    tpot.plot([each.began - start for each in streams], [1e3 * each.tpot_s for each in streams], ".", markersize=3)
    labels = ("requests under way", "pods", "TTFT (s)", "TPOT (ms)")
    for axes, label in zip((load, pods, ttft, tpot), labels, strict=True):
        axes.set_ylabel(label)
    tpot.set_xlabel("seconds")
    figure.savefig(file, dpi=100)
