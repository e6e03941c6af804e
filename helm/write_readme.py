"""Generates README.md: `make docs`. The table contains values.yaml with its comments; every value needs one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
TARGET = FOLDER / "README.md"
INTRODUCTION = """\
# Diptych on Kubernetes

A Helm chart for routers, prefill pools and decode pools that scale independently. `make docs` writes this page from
`values.yaml`. [docs/guides/kubernetes.md](../docs/guides/kubernetes.md) explains how to install, scale and upgrade,
[docs/guides/operate.md](../docs/guides/operate.md) describes what to do when an alert fires.

    make images REGISTRY=ghcr.io/acme PUSH=yes
    helm install demo helm --set images.registry=ghcr.io/acme --set images.tag=TAG \\
      --set models.smollm2-135m.source.id=smollm2-135m
    helm test demo --logs

The chart needs Kubernetes 1.27; everything else is optional. Example values are in [examples/](examples).

| feature | needs at least | otherwise |
|---|---|---|
| an OCI image as a model | Kubernetes 1.33 (before 1.35 the feature gate `ImageVolume`) | refused |
| `podDeletionCost.admissionPolicy` | Kubernetes 1.30 | refused |
| `autoscaling.type: keda` | KEDA 2.17 (`fallback.behavior`) | absent: refused; older: a lost metric scales down |
| the same, `metrics-api`, several routers | KEDA 2.20, pods with IPv4 | 2.18 may scale down under load |
| `httpRoute` | Gateway API 1.2 (`timeouts`); 1.0 with an empty `requestTimeout` | absent: refused |
| `inferencePool` | Gateway API Inference Extension 1.0 (`inference.networking.k8s.io/v1`) | refused |
| monitors, alerts, recording rules | Prometheus operator (`monitoring.coreos.com/v1`) | left out |
| `tls.certManager` | cert-manager (`cert-manager.io/v1`) | refused |

`helm` sees the APIs of a cluster, not their versions: check those of KEDA and the Gateway API yourself.

A pool under `prefill.pools` or `decode.pools` takes its `model` and everything under `workers`; missing
values come from `prefill.defaults` or `decode.defaults`, and then from `workers`. A router Deployment serves one model:
each entry of `models` gets its own, whose `router` overrides the chart's `router`; with `sharedRouter` one serves all.
In a pool or a model's `router` null drops a value that it would inherit.

| value | default | meaning |
|---|---|---|
"""


def comments_above(lines: list[str], line: int) -> str:
    """Return the comment lines directly above a line, joined. Comments separated by an empty line do not count."""
    found: list[str] = []
    while line > 0 and lines[line - 1].strip().startswith("#"):
        line -= 1
        found.insert(0, lines[line].strip().lstrip("#").strip())
    return " ".join(found)


def rows(node: yaml.MappingNode, lines: list[str], path: tuple[str, ...] = ()) -> Iterator[tuple[str, str, str]]:
    """Yield (path, default, comment) for every value. Descends into mappings with comments on their keys."""
    for key, value in node.value:
        here = (*path, key.value)
        comment = comments_above(lines, key.start_mark.line)
        inside = value.value if isinstance(value, yaml.MappingNode) and not value.flow_style else []
        if inside and (len(here) == 1 or is_described(value, lines)):
            if comment:
                yield ".".join(here), "", comment
            yield from rows(value, lines, here)
            continue
        if not comment:
            raise SystemExit(f"values.yaml: {'.'.join(here)} has no comment")
        yield ".".join(here), json.dumps(yaml.safe_load(yaml.serialize(value))), comment


def is_described(node: yaml.MappingNode, lines: list[str]) -> bool:
    """Whether a key of the mapping, or a nested one, has a comment."""
    return any(
        comments_above(lines, key.start_mark.line)
        or (isinstance(value, yaml.MappingNode) and is_described(value, lines))
        for key, value in node.value
    )


def render() -> str:
    source = (FOLDER / "values.yaml").read_text(encoding="utf-8")
    root = yaml.compose(source)
    assert isinstance(root, yaml.MappingNode)
    table = [
        f"| `{path}` | {f'`{default}`' if default else ''} | {comment} |".replace("||", "|&#124;")
        for path, default, comment in rows(root, source.splitlines())
    ]
    return INTRODUCTION + "\n".join(table) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
