"""Writes dashboards/*.json: `make docs`. A dashboard is a list of rows, a row a list of panels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("dashboards")
ONE = 'namespace="$namespace",diptych_release="$release"'
MODEL = ONE + ',diptych_model=~"$model"'
ROUTER = MODEL + ',diptych_role="router"'
GENERATION = 'path=~"/v1/(chat/completions|completions|responses|messages|embeddings|score|rerank)|/invocations"'
KV_USE = f'vllm:kv_cache_usage_perc{{{MODEL},diptych_role=~"prefill|decode"}}'
WIDTH, HEIGHT = 24, 8


@dataclass(frozen=True)
class Panel:
    """A graph: what it is called and means, its unit in Grafana's words, and (legend, expression) pairs."""

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
            "Waiting for a worker of a role; wakes pools that are scaled to zero.",
            "short",
            summed("diptych_requests_held", ROUTER, "role"),
        ),
    ),
    (
        Panel(
            "Time to first token",
            "From the request's head.",
            "s",
            quantiles("vllm:time_to_first_token_seconds", ROUTER, "0.5", "0.95", "0.99"),
        ),
        Panel(
            "Time of a token",
            "Mean of each request after its first token.",
            "s",
            quantiles("vllm:request_time_per_output_token_seconds", ROUTER, "0.5", "0.95", "0.99"),
        ),
        Panel(
            "Whole request",
            "From the request's head to its last token.",
            "s",
            quantiles("vllm:e2e_request_latency_seconds", ROUTER, "0.5", "0.95", "0.99"),
        ),
    ),
    (
        Panel(
            "Goals met",
            "Share of requests that met the TTFT and the TPOT goal, on the worst router.",
            "percentunit",
            (("{{slo}}", f"min by (slo) (diptych_slo_attainment_ratio{{{ROUTER}}})"),),
        ),
        Panel(
            "Tokens",
            "Prompt tokens that were served, of them cached, and generated tokens.",
            "short",
            (
                ("prompt", f"sum(rate(vllm:prompt_tokens_total{{{ROUTER}}}[5m]))"),
                ("of them cached", f"sum(rate(diptych_cached_prompt_tokens_total{{{ROUTER}}}[5m]))"),
                ("generated", f"sum(rate(vllm:generation_tokens_total{{{ROUTER}}}[5m]))"),
            ),
        ),
        Panel(
            "Workers",
            "As the routers see them.",
            "short",
            (("{{role}} {{state}}", f"max by (role, state) (diptych_pool_workers{{{ROUTER}}}) > 0"),),
        ),
    ),
    (
        Panel(
            "In flight by class",
            "Sequences in the routers, by class of requests.",
            "short",
            summed("diptych_class_requests", ROUTER, "class"),
        ),
        Panel(
            "Waiting by class",
            "Those of them on no worker.",
            "short",
            summed("diptych_class_waiting_requests", ROUTER, "class"),
        ),
        Panel(
            "Refused by class",
            "They would have missed a goal of their class, or waited too long.",
            "reqps",
            summed("diptych_class_refusals_total", ROUTER, "class", over="5m"),
        ),
        Panel(
            "Goals met by class",
            "Share of requests that met the goals of their own class, on the worst router.",
            "percentunit",
            (("{{class}} {{slo}}", f"min by (class, slo) (diptych_class_attainment_ratio{{{ROUTER}}})"),),
        ),
    ),
    (
        Panel(
            "Workers planned",
            "By the router's plan, where one is made: wanted within the bounds, and needed without them.",
            "short",
            (
                ("{{role}} wanted", f"max by (role) (diptych_pool_wanted_workers{{{ROUTER}}})"),
                ("{{role}} needed", f"max by (role) (diptych_pool_needed_workers{{{ROUTER}}})"),
            ),
        ),
        Panel(
            "Requests offered",
            "Of the last minute, refused ones included.",
            "reqps",
            (("offered", f"max(diptych_offered_requests_per_second{{{ROUTER}}})"),),
        ),
        Panel(
            "Tails, predicted and measured",
            "TTFT and TPOT at the quantile of the goals.",
            "s",
            (("{{slo}} {{kind}}", f"max by (slo, kind) (diptych_plan_tail_seconds{{{ROUTER}}})"),),
        ),
    ),
    (
        Panel(
            "Where prompts run",
            "remote: both pools; local: a decode worker alone; prefill: one token only.",
            "reqps",
            summed("diptych_placements_total", ROUTER, "kind", over="5m"),
        ),
        Panel(
            "Moves to another worker",
            "A worker failed, or drained.",
            "reqps",
            summed("diptych_retries_total", ROUTER, "role", over="5m"),
        ),
        Panel("Given up", "By error class.", "reqps", summed("diptych_failures_total", ROUTER, "reason", over="5m")),
    ),
)


def by_pool(metric: str, role: str = "", over: str = "") -> tuple[tuple[str, str], ...]:
    matchers = MODEL + (f',diptych_role="{role}"' if role else ',diptych_role=~"prefill|decode"')
    return summed(metric, matchers, "diptych_role", "diptych_pool", over=over)


POOLS = (
    (
        Panel(
            "Prefill backlog",
            "Seconds of queued prompts, summed over a pool: what it scales by.",
            "s",
            by_pool("diptych_prefill_backlog_seconds"),
        ),
        Panel(
            "Decode pressure",
            "Summed over a pool, 1 for each full worker: what it scales by.",
            "short",
            by_pool("diptych_decode_pressure"),
        ),
        Panel("Pods that answer", "Scraped, by pool.", "short", by_pool("up")),
    ),
    (
        Panel("Running", "Requests in the running batches.", "short", by_pool("vllm:num_requests_running")),
        Panel("Waiting", "Requests that wait to be scheduled.", "short", by_pool("vllm:num_requests_waiting")),
        Panel(
            "Active", "Requests that would be cut if the pool ended now.", "short", by_pool("diptych_active_requests")
        ),
    ),
    (
        Panel(
            "KV cache in use",
            "Share of blocks that requests own; the mean of a pool.",
            "percentunit",
            (("{{diptych_role}} {{diptych_pool}}", f"avg by (diptych_role, diptych_pool) ({KV_USE})"),),
        ),
        Panel("Tokens computed", "Recent rate.", "short", by_pool("diptych_tokens_per_second")),
        Panel(
            "Prefix cache hits",
            "Share of looked-up prompt tokens that were there.",
            "percentunit",
            (
                (
                    "{{diptych_role}}",
                    f"sum by (diptych_role) (rate(vllm:prefix_cache_hits_total{{{MODEL}}}[5m]))"
                    f" / (sum by (diptych_role) (rate(vllm:prefix_cache_queries_total{{{MODEL}}}[5m])) > 0)",
                ),
            ),
        ),
    ),
    (
        Panel(
            "Step of prefill",
            "Duration of an engine step.",
            "s",
            quantiles("diptych_engine_step_seconds", MODEL + ',diptych_role="prefill"', "0.5", "0.99"),
        ),
        Panel(
            "Step of decode",
            "Duration of an engine step.",
            "s",
            quantiles("diptych_engine_step_seconds", MODEL + ',diptych_role="decode"', "0.5", "0.99"),
        ),
        Panel(
            "Preemptions",
            "Sequences that lost their blocks and are computed again.",
            "reqps",
            by_pool("vllm:num_preemptions_total", over="5m"),
        ),
        Panel(
            "Draft tokens accepted",
            "Share of the draft tokens that decode steps accepted.",
            "percentunit",
            (
                (
                    "{{diptych_pool}}",
                    f"sum by (diptych_pool) (rate(vllm:spec_decode_num_accepted_tokens_total{{{MODEL}}}[5m]))"
                    f" / (sum by (diptych_pool) (rate(vllm:spec_decode_num_draft_tokens_total{{{MODEL}}}[5m])) > 0)",
                ),
            ),
        ),
    ),
)
DECODE = MODEL + ',diptych_role="decode"'
TRANSFER = (
    (
        Panel(
            "KV received",
            "Bytes of KV blocks that decode workers received.",
            "Bps",
            summed("diptych_kv_transfer_bytes_total", DECODE, "diptych_pool", over="5m"),
        ),
        Panel(
            "Hand-overs",
            "Prompts by the way their blocks took.",
            "reqps",
            summed("diptych_kv_transfers_total", DECODE, "transport", over="5m"),
        ),
        Panel("Under way", "Requests whose KV is under way.", "short", by_pool("diptych_num_requests_transferring")),
    ),
    (
        Panel(
            "Exposed transfer",
            "What prefill does not hide and a client waits for.",
            "s",
            quantiles("diptych_exposed_transfer_seconds", ROUTER, "0.5", "0.95", "0.99"),
        ),
        Panel(
            "Waiting for room",
            "From KVOpen to KVGrant.",
            "s",
            quantiles("diptych_kv_grant_wait_seconds", DECODE, "0.5", "0.95", "0.99"),
        ),
        Panel(
            "Speed of a transfer",
            "Bytes over its busy time.",
            "Bps",
            quantiles("diptych_kv_transfer_bytes_per_second", DECODE, "0.05", "0.5", "0.95"),
        ),
    ),
    (
        Panel(
            "Blocks not shipped",
            "The decode worker held them.",
            "short",
            summed("diptych_kv_blocks_skipped_total", MODEL, "diptych_role", over="5m"),
        ),
        Panel(
            "Failed",
            "Requests that workers gave up, by phase.",
            "reqps",
            summed("diptych_requests_failed_total", MODEL, "phase", over="5m"),
        ),
        Panel(
            "Streams handed over",
            "Running answers of draining decode workers.",
            "reqps",
            summed("diptych_handovers_total", ROUTER, "outcome", over="5m"),
        ),
    ),
)
DASHBOARDS = {
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


def choice(name: str, query: str, *, all_of_them: bool = False, first: str = "") -> dict[str, Any]:
    """A variable of the page; it begins with all of them, or with `first`."""
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
    """One dashboard as Grafana takes it."""
    title, rows = DASHBOARDS[name]
    panels = []
    for i, row in enumerate(rows):
        width = WIDTH // len(row)
        panels += [graph(panel, len(panels) + j + 1, j * width, i * HEIGHT, width) for j, panel in enumerate(row)]
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
        # The chart fills in which release this is, so that two of them do not take each other's place.
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
    """The file's text."""
    return json.dumps(dashboard(name), indent=1) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        (FOLDER / f"{each}.json").write_text(render(each), encoding="utf-8")
