"""Generates dashboards/*.json: `make docs`.

A dashboard is a list of rows, and a row a list of panels, or the title of the rows that follow.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("dashboards")
ONE = 'namespace="$namespace",diptych_release="$release"'
MODEL = ONE + ',diptych_model=~"$model"'
DECODE = MODEL + ',diptych_role="decode"'
ROUTER = MODEL + ',diptych_role="router"'
GENERATION = (
    'path=~"/v1/(chat/completions|completions|responses|messages|embeddings|score|rerank)'
    '|/api/(chat|generate|embed|embeddings)|/invocations"'
)
KV_USE = f'vllm:kv_cache_usage_perc{{{MODEL},diptych_role=~"prefill|decode"}}'
WIDTH, HEIGHT = 24, 8


@dataclass(frozen=True)
class Panel:
    """A graph: title, description, Grafana unit, and (legend, expression) pairs."""

    title: str
    about: str
    unit: str
    lines: tuple[tuple[str, str], ...]


def quantiles(metric: str, matchers: str, *wanted: str) -> tuple[tuple[str, str], ...]:
    rate = f"sum by (le) (rate({metric}_bucket{{{matchers}}}[5m]))"
    return tuple((f"p{float(q) * 100:g}", f"histogram_quantile({q}, {rate})") for q in wanted)


def summed(metric: str, matchers: str, *by: str, over: str = "") -> tuple[tuple[str, str], ...]:
    inner = f"rate({metric}{{{matchers}}}[{over}])" if over else f"{metric}{{{matchers}}}"
    legend = " ".join(f"{{{{{label}}}}}" for label in by) or "all"
    return ((legend, f"sum by ({', '.join(by)}) ({inner})" if by else f"sum({inner})"),)


INCIDENTS = (
    "Incidents",
    (
        Panel(
            "Workers lost",
            "Connections to a worker that broke, in five minutes.",
            "short",
            (("{{worker}}", f"sum by (worker) (increase(diptych_worker_cuts_total{{{ROUTER}}}[5m])) > 0"),),
        ),
        Panel(
            "Workers without partner",
            "Ready workers that cannot exchange KV with any worker of the other role.",
            "short",
            (("{{role}}", f"max by (role) (diptych_unpaired_workers{{{ROUTER}}})"),),
        ),
        Panel(
            "Requests that end workers",
            "Ended because every worker that ran them died, in an hour.",
            "short",
            (("all", f'sum(increase(diptych_failures_total{{{ROUTER},reason="FatalRequest"}}[1h]))'),),
        ),
    ),
    (
        Panel(
            "Requests by key",
            "By name of the API key and status. 401 without a name: invalid keys.",
            "reqps",
            summed("diptych_key_requests_total", ROUTER, "key", "status", over="5m"),
        ),
        Panel(
            "Certificate expires in",
            "Least over the routers.",
            "s",
            (("{{pod}}", f"min by (pod) (diptych_tls_certificate_expiry_seconds{{{ROUTER}}})"),),
        ),
    ),
)
OVERVIEW = (
    (
        Panel(
            "Requests",
            "By status.",
            "reqps",
            summed("diptych_http_requests_total", f"{ROUTER},{GENERATION}", "status", over="5m"),
        ),
        Panel("Requests in the routers", "By stage.", "short", summed("diptych_requests_in_flight", ROUTER, "stage")),
        Panel(
            "Requests held",
            "Requests that wait for a worker of a role. They wake pools that are scaled to zero.",
            "short",
            summed("diptych_requests_held", ROUTER, "role"),
        ),
    ),
    (
        Panel(
            "Time to first token",
            "Measured from the request's headers.",
            "s",
            quantiles("vllm:time_to_first_token_seconds", ROUTER, "0.5", "0.95", "0.99"),
        ),
        Panel(
            "Time per output token",
            "Mean of each request after its first token.",
            "s",
            quantiles("vllm:request_time_per_output_token_seconds", ROUTER, "0.5", "0.95", "0.99"),
        ),
        Panel(
            "Whole request",
            "From the request's headers to its last token.",
            "s",
            quantiles("vllm:e2e_request_latency_seconds", ROUTER, "0.5", "0.95", "0.99"),
        ),
    ),
    (
        Panel(
            "Goals met",
            "Share of requests that met the TTFT and the TPOT goal. Minimum over the routers.",
            "percentunit",
            (("{{slo}}", f"min by (slo) (diptych_slo_attainment_ratio{{{ROUTER}}})"),),
        ),
        Panel(
            "Goals predicted and met",
            "Admitted requests by goal: predicted at admission, and measured.",
            "reqps",
            summed("diptych_goal_predictions_total", ROUTER, "slo", "predicted", "measured", over="5m"),
        ),
        Panel(
            "Tokens",
            "Prompt tokens, the cached ones among them, and generated tokens.",
            "short",
            (
                ("prompt", f"sum(rate(vllm:prompt_tokens_total{{{ROUTER}}}[5m]))"),
                ("cached prompt", f"sum(rate(diptych_cached_prompt_tokens_total{{{ROUTER}}}[5m]))"),
                ("generated", f"sum(rate(vllm:generation_tokens_total{{{ROUTER}}}[5m]))"),
            ),
        ),
        Panel(
            "Workers",
            "As reported by the routers.",
            "short",
            (("{{role}} {{state}}", f"max by (role, state) (diptych_pool_workers{{{ROUTER}}}) > 0"),),
        ),
    ),
    (
        Panel(
            "In flight by class",
            "Sequences in the routers, by request class.",
            "short",
            summed("diptych_class_requests", ROUTER, "class"),
        ),
        Panel(
            "Waiting by class",
            "Sequences that are not on a worker yet.",
            "short",
            summed("diptych_class_waiting_requests", ROUTER, "class"),
        ),
        Panel(
            "Refused by class",
            "Requests that would have waited too long, or missed a goal of a class with refuse=predicted.",
            "reqps",
            summed("diptych_class_refusals_total", ROUTER, "class", over="5m"),
        ),
        Panel(
            "Goals met by class",
            "Share of requests that met the goals of their class. Minimum over the routers.",
            "percentunit",
            (("{{class}} {{slo}}", f"min by (class, slo) (diptych_class_attainment_ratio{{{ROUTER}}})"),),
        ),
    ),
    (
        Panel(
            "Workers planned",
            "Workers in the router's plan: wanted within the bounds, and needed without them.",
            "short",
            (
                ("{{role}} wanted", f"max by (role) (diptych_pool_wanted_workers{{{ROUTER}}})"),
                ("{{role}} needed", f"max by (role) (diptych_pool_needed_workers{{{ROUTER}}})"),
            ),
        ),
        Panel(
            "Requests offered",
            "Over the last minute, including refused requests.",
            "reqps",
            (("offered", f"max(diptych_offered_requests_per_second{{{ROUTER}}})"),),
        ),
        Panel(
            "Tail latency, predicted and measured",
            "TTFT and TPOT at the quantile of the goals.",
            "s",
            (("{{slo}} {{kind}}", f"max by (slo, kind) (diptych_plan_tail_seconds{{{ROUTER}}})"),),
        ),
    ),
    (
        Panel(
            "Where prompts run",
            "remote: both pools; local: only a decode worker; prefill: one token only.",
            "reqps",
            summed("diptych_placements_total", ROUTER, "kind", over="5m"),
        ),
        Panel(
            "Moves to another worker",
            "Because a worker failed or is draining.",
            "reqps",
            summed("diptych_retries_total", ROUTER, "role", over="5m"),
        ),
        Panel(
            "Failed requests", "By error class.", "reqps", summed("diptych_failures_total", ROUTER, "reason", over="5m")
        ),
    ),
    *INCIDENTS,
)


def by_pool(metric: str, role: str = "", over: str = "") -> tuple[tuple[str, str], ...]:
    matchers = MODEL + (f',diptych_role="{role}"' if role else ',diptych_role=~"prefill|decode"')
    return summed(metric, matchers, "diptych_role", "diptych_pool", over=over)


POOLS = (
    (
        Panel(
            "Prefill backlog",
            "Seconds of queued prompts, summed over a pool. Autoscaling uses this metric.",
            "s",
            by_pool("diptych_prefill_backlog_seconds"),
        ),
        Panel(
            "Decode pressure",
            "Summed over a pool, 1 for each full worker. Autoscaling uses this metric.",
            "short",
            by_pool("diptych_decode_pressure"),
        ),
        Panel("Reachable pods", "Scraped pods, by pool.", "short", by_pool("up")),
    ),
    (
        Panel("Running", "Requests in the running batches.", "short", by_pool("vllm:num_requests_running")),
        Panel("Waiting", "Requests that wait to be scheduled.", "short", by_pool("vllm:num_requests_waiting")),
        Panel(
            "Active",
            "Requests that would be interrupted if the pool ended now.",
            "short",
            by_pool("diptych_active_requests"),
        ),
    ),
    (
        Panel(
            "KV cache in use",
            "Share of blocks that requests own, averaged over a pool.",
            "percentunit",
            (("{{diptych_role}} {{diptych_pool}}", f"avg by (diptych_role, diptych_pool) ({KV_USE})"),),
        ),
        Panel("Tokens computed", "Recent rate.", "short", by_pool("diptych_tokens_per_second")),
        Panel(
            "Prefix cache hits",
            "Share of prompt tokens that were found in the cache.",
            "percentunit",
            (
                (
                    "{{diptych_role}}",
                    f"sum by (diptych_role) (rate(vllm:prefix_cache_hits_total{{{MODEL}}}[5m]))"
                    f" / (sum by (diptych_role) (rate(vllm:prefix_cache_queries_total{{{MODEL}}}[5m])) > 0)",
                ),
            ),
        ),
        Panel(
            "Prompt tokens by source",
            "Source of the KV of prompts: memory, host memory, disk, a peer, or computed.",
            "short",
            (
                ("{{tier}}", f"sum by (tier) (rate(diptych_prefix_hit_tokens_total{{{MODEL}}}[5m]))"),
                ("computed", f"sum(rate(diptych_prompt_tokens_computed_total{{{MODEL}}}[5m]))"),
            ),
        ),
    ),
    (
        Panel(
            "Prefill step",
            "Duration of an engine step.",
            "s",
            quantiles("diptych_engine_step_seconds", MODEL + ',diptych_role="prefill"', "0.5", "0.99"),
        ),
        Panel(
            "Decode step",
            "Duration of an engine step.",
            "s",
            quantiles("diptych_engine_step_seconds", MODEL + ',diptych_role="decode"', "0.5", "0.99"),
        ),
        Panel(
            "Preemptions",
            "Sequences that lost their blocks and are recomputed.",
            "reqps",
            by_pool("vllm:num_preemptions_total", over="5m"),
        ),
        Panel(
            "Draft tokens accepted",
            "Share of draft tokens that decode steps accepted, by source.",
            "percentunit",
            (
                (
                    "{{diptych_pool}} {{kind}}",
                    f"sum by (diptych_pool, kind) (rate(vllm:spec_decode_num_accepted_tokens_total{{{DECODE}}}[5m]))"
                    " / (sum by (diptych_pool, kind)"
                    f" (rate(vllm:spec_decode_num_draft_tokens_total{{{DECODE}}}[5m])) > 0)",
                ),
            ),
        ),
    ),
)
TRANSFER = (
    (
        Panel(
            "KV received",
            "Bytes of KV blocks that decode workers received.",
            "Bps",
            summed("diptych_kv_transfer_bytes_total", DECODE, "diptych_pool", over="5m"),
        ),
        Panel(
            "KV transfers",
            "Prompts by transport of their blocks.",
            "reqps",
            summed("diptych_kv_transfers_total", DECODE, "transport", over="5m"),
        ),
        Panel(
            "In transfer",
            "Requests whose KV is being transferred.",
            "short",
            by_pool("diptych_num_requests_transferring"),
        ),
    ),
    (
        Panel(
            "Exposed transfer",
            "The part of the transfer that does not overlap prefill and delays the client.",
            "s",
            quantiles("diptych_exposed_transfer_seconds", ROUTER, "0.5", "0.95", "0.99"),
        ),
        Panel(
            "Waiting for free blocks",
            "From KVOpen to KVGrant.",
            "s",
            quantiles("diptych_kv_grant_wait_seconds", DECODE, "0.5", "0.95", "0.99"),
        ),
        Panel(
            "Transfer rate",
            "Bytes divided by the busy time of a transfer.",
            "Bps",
            quantiles("diptych_kv_transfer_bytes_per_second", DECODE, "0.05", "0.5", "0.95"),
        ),
    ),
    (
        Panel(
            "Blocks not sent",
            "Blocks that the decode worker already had.",
            "short",
            summed("diptych_kv_blocks_skipped_total", MODEL, "diptych_role", over="5m"),
        ),
        Panel(
            "Failed",
            "Requests that failed on workers, by phase.",
            "reqps",
            summed("diptych_requests_failed_total", MODEL, "phase", over="5m"),
        ),
        Panel(
            "Streams handed over",
            "Running responses of draining decode workers.",
            "reqps",
            summed("diptych_handovers_total", ROUTER, "outcome", over="5m"),
        ),
    ),
)
DASHBOARDS: dict[str, tuple[str, tuple[str | tuple[Panel, ...], ...]]] = {
    "overview": ("Diptych: service", OVERVIEW),
    "pools": ("Diptych: pools", POOLS),
    "transfer": ("Diptych: KV transfer", TRANSFER),
}


def graph(panel: Panel, number: int, x: int, y: int, width: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {"refId": chr(65 + i), "datasource": source, "expr": expression, "legendFormat": legend}
        for i, (legend, expression) in enumerate(panel.lines)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": width, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def heading(title: str, number: int, y: int) -> dict[str, Any]:
    where = {"x": 0, "y": y, "w": WIDTH, "h": 1}
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": where,
        "panels": [],
        "targets": [],
    }


def choice(name: str, query: str, *, all_of_them: bool = False, first: str = "") -> dict[str, Any]:
    """A dashboard variable. Initially all values are selected, or `first`."""
    current = {"text": "All", "value": "$__all"} if all_of_them else {"text": first, "value": first}
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "includeAll": all_of_them,
        "allValue": ".*" if all_of_them else None,
        "current": current,
    }


def dashboard(name: str) -> dict[str, Any]:
    """Return a dashboard as Grafana JSON."""
    title, rows = DASHBOARDS[name]
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        if isinstance(row, str):
            panels.append(heading(row, len(panels) + 1, y))
            y += 1
            continue
        width = WIDTH // len(row)
        panels += [graph(panel, len(panels) + j + 1, j * width, y, width) for j, panel in enumerate(row)]
        y += HEIGHT
    datasource = {"name": "datasource", "type": "datasource", "query": "prometheus", "current": {}}
    up = 'up{namespace="$namespace",diptych_release="$release"}'
    releases = 'up{namespace="$namespace",diptych_release!=""}'
    variables = [
        datasource,
        choice("namespace", 'label_values(up{diptych_release!=""}, namespace)', first="@namespace"),
        choice("release", f"label_values({releases}, diptych_release)", first="@name"),
        choice("model", f"label_values({up}, diptych_model)", all_of_them=True),
    ]
    return {
        # The chart inserts the release, so that the dashboards of two releases do not replace each other.
        "uid": f"diptych-{name}-@id",
        "title": f"{title} (@release)",
        "tags": ["diptych"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def render(name: str) -> str:
    return json.dumps(dashboard(name), indent=1) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        (FOLDER / f"{each}.json").write_text(render(each), encoding="utf-8")
