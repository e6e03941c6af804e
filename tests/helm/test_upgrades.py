"""What an upgrade does to Deployments that run, asked of an API server as helm asks it."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from .chart import CHART, NEEDED, Object, render

pytestmark = pytest.mark.helm

PREFILL, DECODE = "demo-diptych-prefill-default", "demo-diptych-decode-default"
ROUTER = "demo-diptych-router-smollm2-135m"
AUTOSCALED = {
    "workers": {"autoscaling": {"type": "hpa", "minReplicas": 1}},
    "router": {"autoscaling": {"enabled": True}},
}


# What helm 4 looks up before it renders; helm 3 asks for apps/v1 alone.
KINDS = {
    "v1": ("ConfigMap", "Service", "ServiceAccount", "Pod"),
    "apps/v1": ("Deployment",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
    "gateway.networking.k8s.io/v1": ("HTTPRoute",),
    "leaderworkerset.x-k8s.io/v1": ("LeaderWorkerSet",),
}


def discovery() -> dict[str, dict[str, Any]]:
    """What an API server says of itself, by path."""
    found: dict[str, dict[str, Any]] = {
        "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    groups = []
    for version, kinds in KINDS.items():
        resources = [
            {"name": f"{kind.lower()}s", "kind": kind, "namespaced": True, "verbs": ["get"], "singularName": ""}
            for kind in kinds
        ]
        listed = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        found[f"/apis/{version}" if "/" in version else f"/api/{version}"] = listed
        if "/" in version:
            one = {"groupVersion": version, "version": version.partition("/")[2]}
            groups.append({"name": version.partition("/")[0], "versions": [one], "preferredVersion": one})
    found["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    return found


@contextmanager
def api_server(replicas: dict[str, int]) -> Iterator[str]:
    """The address of an API server whose Deployments have these replicas."""
    known = discovery()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, name = self.path.partition("?")[0].rpartition("/")
            answer: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}
            answer |= {"reason": "NotFound", "message": f"{name} not found"}
            if f"{path}/{name}" in known:
                answer = known[f"{path}/{name}"]
            elif path == "/apis/apps/v1/namespaces/llm/deployments" and name in replicas:
                answer = {"kind": "Deployment", "apiVersion": "apps/v1", "metadata": {"name": name, "namespace": "llm"}}
                answer |= {"spec": {"replicas": replicas[name]}}
            body = json.dumps(answer).encode()
            self.send_response(answer.get("code", 200))
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing to the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def replicas_of(objects: list[Object]) -> dict[str, int | None]:
    return {
        item["metadata"]["name"]: item["spec"].get("replicas")
        for item in objects
        if item and item["kind"] == "Deployment"
    }


def upgraded(helm: Path, server: str, home: Path, over: dict[str, Any]) -> dict[str, int | None]:
    """The replicas of a rendering that may look at the cluster."""
    line = [
        str(helm),
        "template",
        "demo",
        str(CHART),
        "--namespace",
        "llm",
        "--is-upgrade",
        "--dry-run=server",
        "-f",
        "-",
    ]
    done = subprocess.run(
        [*line, "--disable-openapi-validation", "-f", "-", "--kube-apiserver", server],
        input=json.dumps(NEEDED | over),
        capture_output=True,
        text=True,
        timeout=60,
        env={"HOME": str(home), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    return replicas_of(list(yaml.safe_load_all(done.stdout)))


@pytest.mark.slow_cases("helm3")
def test_turning_autoscaling_on_keeps_the_pods_that_run(either_helm: Path, tmp_path: Path) -> None:
    """Eight replicas of a manifest that has none the next time were set to 1 by the API server."""
    with api_server({PREFILL: 3, DECODE: 8, ROUTER: 4}) as server:
        assert upgraded(either_helm, server, tmp_path, AUTOSCALED) == {PREFILL: 3, DECODE: 8, ROUTER: 4}
        fixed = {"workers": {"replicas": 2}}
        assert upgraded(either_helm, server, tmp_path, fixed) == {PREFILL: 2, DECODE: 2, ROUTER: 1}


@pytest.mark.slow
def test_what_does_not_run_yet_is_left_to_the_autoscaler(helm4: Path, tmp_path: Path) -> None:
    with api_server({DECODE: 0}) as server:
        assert upgraded(helm4, server, tmp_path, AUTOSCALED) == {PREFILL: None, DECODE: 0, ROUTER: None}
    assert set(replicas_of(render(helm4, over=AUTOSCALED).objects).values()) == {None}
