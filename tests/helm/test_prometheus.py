"""A real Prometheus scrapes a real stack under load: every expression of the chart says something, and one thing."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from common.machine.child_process import ChildProcess

from .chart import NAMESPACE, Rendered, render
from .cluster import Cluster, loopback_address, running, small_values
from .test_rules import dashboard_expressions

pytestmark = [pytest.mark.helm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_REQUESTS, AT_ONCE, MOST_LOADS = 40, 8, 5
READY_TIMEOUT_S, LOAD_TIMEOUT_S = 180.0, 30.0
SCRAPE_S = 3
"""Time between two scrapes, and the longest that one may take: on a busy machine that is more than a second."""
# Panels of what does not happen in a healthy system: they may show nothing.
RARE = {
    "overview: Moves to another worker",
    "overview: Failed requests",
    "overview: Workers lost",
    "overview: Requests that end workers",
    # Without --tls-cert there is none.
    "overview: Certificate expires in",
    # Without --planner there are none.
    "overview: Workers planned",
    "overview: Requests offered",
    "overview: Tail latency, predicted and measured",
    "transfer: Failed",
    "transfer: Streams handed over",
}
KEDA = {"type": "keda", "minReplicas": 0}
SLO = {"ttftMs": 60000, "tpotMs": 60000}


def values(trigger: str) -> dict[str, Any]:
    base = small_values()
    base["models"]["tiny"]["slo"] = SLO
    base["workers"]["autoscaling"] = KEDA | {"kedaTrigger": trigger, "slo": trigger == "prometheus"}
    return base


@pytest.fixture(scope="module")
def rendered(helm4: Path) -> Rendered:
    return render(helm4, "laptop", over=values("prometheus"))


def scrape_config(cluster: Cluster) -> list[dict[str, Any]]:
    """What the operator would make of the PodMonitors: the same relabelings over the same pod labels."""
    jobs = []
    for monitor in cluster.rendered.of("PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        wanted = monitor["spec"]["selector"]["matchLabels"]
        targets = []
        for name, container in cluster.containers.items():
            labels = cluster.rendered.named("Deployment", name)["spec"]["template"]["metadata"]["labels"]
            if not wanted.items() <= labels.items():
                continue
            ports = {port["name"]: port["containerPort"] for port in container.spec["containers"][0]["ports"]}
            meta = {"__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", key): str(labels[key]) for key in labels}
            meta |= {"namespace": NAMESPACE, "pod": f"{name}-0"}
            targets.append({"targets": [f"{container.address}:{ports[endpoint['port']]}"], "labels": meta})
        relabelings = [
            {"source_labels": each["sourceLabels"], "target_label": each["targetLabel"]}
            for each in endpoint["relabelings"]
        ]
        jobs.append(
            {
                "job_name": monitor["metadata"]["name"],
                "metrics_path": endpoint["path"],
                "static_configs": targets,
                "relabel_configs": relabelings,
            }
        )
    return jobs


class Prometheus:
    """A Prometheus of our own with a client to ask it."""

    def __init__(self, program: str, cluster: Cluster, folder: Path) -> None:
        (rules,) = cluster.rendered.of("PrometheusRule")
        (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": rules["spec"]["groups"]}))
        times = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s", "evaluation_interval": "1s"}
        config = {"global": times, "rule_files": ["rules.yaml"], "scrape_configs": scrape_config(cluster)}
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self.url = f"http://{loopback_address()}:9090"
        flags = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
        self.process = ChildProcess("prometheus", folder / "log")
        self.process.launch([program, *flags, f"--web.listen-address={self.url.removeprefix('http://')}"])

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        reply = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30, trust_env=False)
        assert reply.status_code == 200, f"{expression}: {reply.text}"
        return [(each["metric"], float(each["value"][1])) for each in reply.json()["data"]["result"]]

    def wait(self, expression: str) -> None:
        assert self.comes_true(expression, READY_TIMEOUT_S), expression

    def is_counting(self, cluster: Cluster) -> bool:
        """Whether a load changed the rate of requests; some scrapes are left out on a busy machine."""
        load(cluster)
        return self.comes_true("diptych:requests:rate5m > 0", LOAD_TIMEOUT_S)

    def comes_true(self, expression: str, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if self.query(expression):
                    return True
            except httpx.TransportError:
                assert self.process.alive, self.process.describe_end()
            time.sleep(0.5)
        return False


@pytest.fixture(scope="module")
def cluster(rendered: Rendered, prometheus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(rendered, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def scraped(cluster: Cluster, prometheus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    server = Prometheus(prometheus, cluster, tmp_path_factory.mktemp("prometheus"))
    try:
        server.wait(f'count(up{{diptych_release="demo"}} == 1) == {len(cluster.containers)}')
        # A counter that Prometheus sees for the first time at the end of a load has not grown yet.
        assert any(server.is_counting(cluster) for _ in range(MOST_LOADS)), "no rate of requests"
        yield server
    finally:
        server.process.stop(30)


def load(cluster: Cluster) -> None:
    """Prompts long enough for both pools, some of them with a prefix in common."""
    (router,) = cluster.of("router")

    def ask(number: int) -> int:
        prompt = "a common beginning that is longer than a block " * 3 + f"{number:03d} " * (20 + number % 5)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        url = f"http://{router.address}:8000/v1/completions"
        return httpx.post(url, json=body, timeout=120, trust_env=False).status_code

    with ThreadPoolExecutor(AT_ONCE) as pool:
        assert set(pool.map(ask, range(NUM_REQUESTS))) == {200}


def lasting(problems: Callable[[], list[str]]) -> list[str]:
    """What is wrong after enough scrapes: a busy machine misses some, and rates need two."""
    deadline = time.monotonic() + LOAD_TIMEOUT_S
    while (found := problems()) and time.monotonic() < deadline:
        time.sleep(SCRAPE_S)
    return found


def test_every_panel_shows_finite_numbers(scraped: Prometheus) -> None:
    def problems() -> list[str]:
        wrong = []
        for panel, expression in dashboard_expressions():
            found = scraped.query(expression)
            if not found and panel not in RARE:
                wrong.append(f"{panel} is empty: {expression}")
            wrong += [f"{panel}: {value} of {labels}" for labels, value in found if not math.isfinite(value)]
        return wrong

    wrong = lasting(problems)
    assert not wrong, "\n".join(wrong)


def test_every_autoscaler_expression_is_one_finite_number(scraped: Prometheus, rendered: Rendered) -> None:
    triggers = [trigger for item in rendered.of("ScaledObject") for trigger in item["spec"]["triggers"]]
    assert len(triggers) == 8

    def problems() -> list[str]:
        answers = [(trigger["name"], scraped.query(trigger["metadata"]["query"])) for trigger in triggers]
        return [f"{name}: {found}" for name, found in answers if len(found) != 1 or not math.isfinite(found[0][1])]

    assert lasting(problems) == []


def test_every_record_is_there_and_no_alert_fires(scraped: Prometheus, rendered: Rendered) -> None:
    (rules,) = rendered.of("PrometheusRule")
    # No request has failed or was turned away: a ratio of nothing is nothing.
    nothing = ("diptych:errors", "diptych:rejected")
    records = {rule["record"] for rule in rules["spec"]["groups"][0]["rules"]}
    wanted = sorted(record for record in records if not record.startswith(nothing))

    def problems() -> list[str]:
        answers = {record: scraped.query(record) for record in wanted}
        good = {name for name, found in answers.items() if found and all(math.isfinite(each) for _, each in found)}
        return sorted(answers.keys() - good)

    assert lasting(problems) == []
    assert scraped.query('ALERTS{alertstate="firing"}') == []


def test_every_metrics_api_trigger_finds_its_value(cluster: Cluster, helm4: Path) -> None:
    """KEDA takes the first sample whose labels have the given values, over plain HTTP."""
    (router,) = cluster.of("router")
    text = httpx.get(f"http://{router.address}:8000/metrics", timeout=30, trust_env=False).text
    scaled = render(helm4, "laptop", over=values("metrics-api")).of("ScaledObject")
    triggers = [trigger["metadata"] for item in scaled for trigger in item["spec"]["triggers"]]
    assert len(triggers) == 4
    for trigger in triggers:
        name, _, selector = trigger["valueLocation"].partition("{")
        labels = selector.rstrip("}").split(",")
        lines = [
            line for line in text.splitlines() if line.startswith(name + "{") and all(each in line for each in labels)
        ]
        assert len(lines) == 1 and math.isfinite(float(lines[0].rsplit(" ", 1)[1])), trigger["valueLocation"]


def test_a_pool_that_nobody_reports_is_an_error_unless_it_is_empty(scraped: Prometheus, rendered: Rendered) -> None:
    """Lost series: no answer, so nothing scales. A pool that the routers know to be empty: zero."""
    (load_trigger,) = [
        trigger["metadata"]["query"]
        for item in rendered.of("ScaledObject")
        for trigger in item["spec"]["triggers"]
        if trigger["name"] == "load" and "decode" in item["metadata"]["name"]
    ]
    assert scraped.query(load_trigger.replace("diptych_decode_pressure", "diptych_lost_metric")) == []
    emptied = load_trigger.replace("diptych_decode_pressure", "diptych_lost_metric")
    emptied = emptied.replace('role="decode"}', 'role="decode",state="dead"}')
    assert [value for _, value in scraped.query(emptied)] == [0.0]
