"""Every PromQL expression parses, every alert fires when it must and only then, and every alert has its runbook."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from router.request.paths import GENERATING

from .chart import CHART, EXAMPLES, render

pytestmark = pytest.mark.helm


# For every alert: series that make it fire, and series close by that must not. Values are promtool's, one a minute.

MODEL = 'namespace="llm",diptych_release="demo",diptych_model="m"'
ROUTER = MODEL + ',diptych_role="router",pod="r-0"'
PREFILL = MODEL + ',diptych_role="prefill",diptych_pool="p",pod="p-0"'
DECODE = MODEL + ',diptych_role="decode",diptych_pool="d",pod="d-0"'
CHAT = ROUTER + ',path="/v1/chat/completions"'
OF_MODEL = {"namespace": "llm", "diptych_release": "demo", "diptych_model": "m"}

Series = dict[str, str]


@dataclass(frozen=True)
class Case:
    """`fires` makes the alert fire at `at` minutes, with `labels`; `quiet` does not."""

    fires: Series
    quiet: Series
    labels: dict[str, str] = field(default_factory=lambda: dict(OF_MODEL))
    at: int = 30
    severity: str = "warning"


def workers(role: str, ready: str, dead: str = "0x60") -> Series:
    return {
        f'diptych_pool_workers{{{ROUTER},role="{role}",state="ready"}}': ready,
        f'diptych_pool_workers{{{ROUTER},role="{role}",state="dead"}}': dead,
    }


def requests(status: str, values: str, good: str = "0+600x60") -> Series:
    return {
        f'diptych_http_requests_total{{{CHAT},status="200"}}': good,
        f'diptych_http_requests_total{{{CHAT},status="{status}"}}': values,
        # A probe that fails is no request.
        f'diptych_http_requests_total{{{ROUTER},path="/ready",status="503"}}': "0+600x60",
    }


def held(role: str, values: str) -> Series:
    return {f'diptych_requests_held{{{ROUTER},role="{role}"}}': values}


def tails(measured: str, predicted: str) -> Series:
    return {
        f'diptych_plan_tail_seconds{{{ROUTER},kind="measured",slo="ttft"}}': measured,
        f'diptych_plan_tail_seconds{{{ROUTER},kind="predicted",slo="ttft"}}': predicted,
        # Nothing is predicted while nothing is asked for.
        f'diptych_plan_tail_seconds{{{ROUTER},kind="measured",slo="tpot"}}': "0.1x60",
        f'diptych_plan_tail_seconds{{{ROUTER},kind="predicted",slo="tpot"}}': "0x60",
    }


def attained(batch: str, everyone: str) -> Series:
    return {
        f'diptych_class_attainment_ratio{{{ROUTER},class="batch",slo="ttft"}}': batch,
        f'diptych_class_attainment_ratio{{{ROUTER},class="default",slo="ttft"}}': "1x60",
        f'diptych_slo_attainment_ratio{{{ROUTER},slo="ttft"}}': everyone,
        f'diptych_slo_attainment_ratio{{{ROUTER},slo="tpot"}}': "0.5x60",
    }


def exposed(below: str, above: str) -> Series:
    name = "diptych_exposed_transfer_seconds_bucket"
    return {
        f'{name}{{{ROUTER},le="0.25"}}': below,
        f'{name}{{{ROUTER},le="1.0"}}': above,
        f'{name}{{{ROUTER},le="+Inf"}}': above,
    }


POOL_P = {"namespace": "llm", "diptych_release": "demo", "diptych_pool": "p"}
POOL_D = {"namespace": "llm", "diptych_release": "demo", "diptych_pool": "d"}
POD = {"pod": "d-0", "diptych_role": "decode", "diptych_pool": "d"}

CASES = {
    "DiptychRouterDown": Case(
        {f"up{{{ROUTER}}}": "0x60"},
        {f"up{{{ROUTER}}}": "0x60", f"up{{{ROUTER.replace('r-0', 'r-1')}}}": "1x60"},
        severity="critical",
    ),
    "DiptychWorkerDown": Case(
        {f"up{{{DECODE}}}": "1x10 0x50"},
        {f"up{{{DECODE}}}": "1 0 0 0 1x60", f"up{{{PREFILL}}}": "0x60"},  # the second was never reachable
        labels=OF_MODEL | POD,
    ),
    "DiptychNobodyServes": Case(
        workers("decode", "0x60", "2x60") | held("decode", "0x60"),
        {  # scaled to zero, and no request waits
            name.replace('diptych_model="m"', 'diptych_model="asleep"'): values
            for name, values in (workers("decode", "0x60") | held("decode", "0x60")).items()
        },
        labels=OF_MODEL | {"role": "decode"},
        severity="critical",
    ),
    "DiptychNoPrefillWorkers": Case(
        workers("prefill", "0x60") | held("prefill", "3x60"),
        workers("prefill", "1x60") | held("prefill", "3x60"),
        labels=OF_MODEL | {"role": "prefill"},
    ),
    "DiptychTooFewWorkers": Case(
        workers("decode", "2x10 1x50"),  # the chart that the tests render has a minimum of 2
        workers("decode", "2x10 1x10 2x40"),
        labels=OF_MODEL | {"role": "decode"},
    ),
    "DiptychErrors": Case(requests("500", "0+12x60"), requests("500", "0+3x60"), severity="critical"),
    "DiptychRequestsRejected": Case(requests("429", "0+60x60"), requests("503", "0+12x60")),
    "DiptychTTFTMissed": Case(
        {f'diptych_slo_attainment_ratio{{{ROUTER},slo="ttft"}}': "0.8x60"},
        {f'diptych_slo_attainment_ratio{{{ROUTER},slo="ttft"}}': "0.95x60"},
    ),
    "DiptychTPOTMissed": Case(
        {f'diptych_slo_attainment_ratio{{{ROUTER},slo="tpot"}}': "0.8x60"},
        {f'diptych_slo_attainment_ratio{{{ROUTER},slo="tpot"}}': "0.95x60"},
    ),
    "DiptychClassMissed": Case(
        attained("0.7x60", "0.95x60"),
        attained("0.7x60", "0.8x60"),  # all of them miss it: that is another alert
        labels=OF_MODEL | {"class": "batch", "slo": "ttft"},
    ),
    "DiptychGoalsInfeasible": Case(
        {f"diptych_plan_feasible{{{ROUTER}}}": "0x60"},
        {f"diptych_plan_feasible{{{ROUTER}}}": "0x5 1x60"},
    ),
    "DiptychPlanWrong": Case(tails("0.9x60", "0.4x60"), tails("0.7x60", "0.4x60"), labels=OF_MODEL | {"slo": "ttft"}),
    "DiptychPrefillBacklog": Case(
        {
            f"diptych_prefill_backlog_seconds{{{PREFILL}}}": "25x60",
            f"diptych_prefill_backlog_seconds{{{PREFILL.replace('p-0', 'p-1')}}}": "1x60",
        },
        {
            f"diptych_prefill_backlog_seconds{{{PREFILL}}}": "15x60",
            f"diptych_prefill_backlog_seconds{{{PREFILL.replace('p-0', 'p-1')}}}": "1x60",
        },
        labels=OF_MODEL | POOL_P,
    ),
    "DiptychDecodeFull": Case(
        {f"vllm:kv_cache_usage_perc{{{DECODE}}}": "0.97x60"},
        {f"vllm:kv_cache_usage_perc{{{DECODE}}}": "0.9x60", f"vllm:kv_cache_usage_perc{{{PREFILL}}}": "1x60"},
        labels=POOL_D,
    ),
    "DiptychPreemptions": Case(
        {f"vllm:num_preemptions_total{{{DECODE}}}": "0+12x60"},
        {f"vllm:num_preemptions_total{{{DECODE}}}": "0+3x60"},
        labels=POOL_D,
    ),
    "DiptychTransferSlow": Case(exposed("0+10x60", "0+60x60"), exposed("0+60x60", "0+60x60"), at=40),
    "DiptychTransfersFail": Case(
        {f'diptych_requests_failed_total{{{DECODE},phase="grant"}}': "0+6x60"},
        {f'diptych_requests_failed_total{{{DECODE},phase="prefill"}}': "0+6x60"},
        labels=OF_MODEL | {"phase": "grant"},
    ),
    "DiptychRetries": Case(
        {f'diptych_retries_total{{{ROUTER},role="decode"}}': "0+20x60"},
        {f'diptych_retries_total{{{ROUTER},role="decode"}}': "0+5x60"},
        labels=OF_MODEL | {"role": "decode"},
    ),
    "DiptychWorkerFlapping": Case(
        {f'diptych_worker_cuts_total{{{ROUTER},worker="d-0",role="decode"}}': "0+1x60"},
        {f'diptych_worker_cuts_total{{{ROUTER},worker="d-0",role="decode"}}': "0 1 2x60"},
        labels={"namespace": "llm", "diptych_release": "demo", "worker": "d-0"},
    ),
    "DiptychUnpairedWorkers": Case(
        {f'diptych_unpaired_workers{{{ROUTER},role="prefill",reason="dtype"}}': "1x60"},
        {f'diptych_unpaired_workers{{{ROUTER},role="prefill",reason="dtype"}}': "1x20 0x40"},
        labels=OF_MODEL | {"role": "prefill", "reason": "dtype"},
        at=45,
    ),
    "DiptychDiscoveryStale": Case(
        {f"diptych_discovery_last_sync_age_seconds{{{ROUTER}}}": "0+60x60"},
        {f"diptych_discovery_last_sync_age_seconds{{{ROUTER}}}": "60x60"},
        labels=OF_MODEL | {"diptych_role": "router", "pod": "r-0"},
    ),
}
CASES |= {
    "DiptychConnectionsRefused": Case(
        {f"diptych_connections_refused_total{{{DECODE}}}": "0+1x60"},
        {f"diptych_connections_refused_total{{{DECODE}}}": "0 1 2x60"},
        labels={"namespace": "llm", "diptych_release": "demo", "diptych_role": "decode", "pod": "d-0"},
    ),
    "DiptychReloadRefused": Case(
        {f'diptych_reloads_total{{{ROUTER},setting="api_key_file",result="refused"}}': "_x25 1x35"},
        {f'diptych_reloads_total{{{ROUTER},setting="api_key_file",result="ok"}}': "0x25 1x35"},
        labels=OF_MODEL | {"setting": "api_key_file"},
    ),
    "DiptychCertificateExpires": Case(
        {
            f"diptych_tls_certificate_expiry_seconds{{{ROUTER}}}": "2592000x60",
            f"diptych_tls_certificate_expiry_seconds{{{ROUTER.replace('r-0', 'r-1')}}}": "1210200-60x60",
        },
        {f"diptych_tls_certificate_expiry_seconds{{{ROUTER}}}": "1000000-60x10 7776000-60x50"},  # renewed
    ),
    "DiptychAuditLost": Case(
        {f"diptych_audit_dropped_total{{{ROUTER}}}": "0x25 7x35"},
        {f"diptych_audit_dropped_total{{{ROUTER}}}": "7x60"},
        labels={"namespace": "llm", "diptych_release": "demo", "pod": "r-0"},
    ),
}

# Recording rule -> (input series, what it must say at 20 minutes, the labels it says it with).
RECORDS: dict[str, tuple[Series, float, dict[str, str]]] = {
    "diptych:prefill_backlog_seconds:sum": (
        {
            f"diptych_prefill_backlog_seconds{{{PREFILL}}}": "2x30",
            f"diptych_prefill_backlog_seconds{{{PREFILL.replace('p-0', 'p-1')}}}": "3x30",
        },
        5,
        OF_MODEL | {"diptych_pool": "p"},
    ),
    "diptych:decode_pressure:sum": (
        {f"diptych_decode_pressure{{{DECODE}}}": "0.5x30"},
        0.5,
        OF_MODEL | {"diptych_pool": "d"},
    ),
    "diptych:ready_workers:max": (workers("decode", "3x30"), 3, OF_MODEL | {"role": "decode"}),
    "diptych:requests:rate5m": (requests("500", "0+60x30"), 11, OF_MODEL),
    "diptych:errors:ratio_rate5m": (requests("504", "0+600x30"), 0.5, OF_MODEL),
    "diptych:rejected:ratio_rate5m": (requests("429", "0+200x30"), 0.25, OF_MODEL),
    "diptych:ttft_seconds:p95_5m": (
        {
            f'vllm:time_to_first_token_seconds_bucket{{{ROUTER},le="1.0"}}': "0+95x30",
            f'vllm:time_to_first_token_seconds_bucket{{{ROUTER},le="+Inf"}}': "0+100x30",
        },
        1,
        OF_MODEL,
    ),
    "diptych:tpot_seconds:p95_5m": (
        {
            f'vllm:request_time_per_output_token_seconds_bucket{{{ROUTER},le="0.04"}}': "0+95x30",
            f'vllm:request_time_per_output_token_seconds_bucket{{{ROUTER},le="+Inf"}}': "0+100x30",
        },
        0.04,
        OF_MODEL,
    ),
    "diptych:exposed_transfer_seconds:p95_5m": (exposed("0+95x30", "0+100x30"), 0.25, OF_MODEL),
}


def cluster(ready: dict[str, str], others: str = "0x60") -> Series:
    """Routers of `m` and `asleep`, reachable, with ready workers by role; `others` in every other state."""
    series: Series = {}
    for router, counts in ((ROUTER, {"prefill": "1x60", "decode": "2x60"} | ready), (ASLEEP, {})):
        series[f"up{{{router}}}"] = "1x60"
        for role in ("prefill", "decode"):
            series[f'diptych_pool_workers{{{router},role="{role}",state="ready"}}'] = counts.get(role, "0x60")
            series[f'diptych_pool_workers{{{router},role="{role}",state="dead"}}'] = others if counts else "0x60"
            series[f'diptych_requests_held{{{router},role="{role}"}}'] = "0x60"
    return series


ASLEEP = ROUTER.replace('diptych_model="m"', 'diptych_model="asleep"')
WAITS = f'diptych_requests_held{{{ASLEEP},role="decode"}}'

# State of a cluster -> (series, the alerts that fire after 50 minutes; no others may).
STATES: dict[str, tuple[Series, set[str]]] = {
    "healthy": (cluster({}), set()),
    "all decode pods pending": (cluster({"decode": "0x60"}), {"DiptychNobodyServes"}),
    "all decode workers crash at start": (cluster({"decode": "0x60"}, "2x60"), {"DiptychNobodyServes"}),
    "all prefill pods pending": (cluster({"prefill": "0x60"}), {"DiptychNoPrefillWorkers"}),
    "one of two decode pods pending": (cluster({"decode": "1x60"}), {"DiptychTooFewWorkers"}),
    "a sleeping pool that nothing wakes": (cluster({}) | {WAITS: "3x60"}, {"DiptychNobodyServes"}),
    "no router": ({name: "0x60" for name in cluster({}) if name.startswith("up{")}, {"DiptychRouterDown"}),
    "the router of one model is gone": (
        {name: value for name, value in cluster({}).items() if ASLEEP not in name} | {f"up{{{ASLEEP}}}": "0x60"},
        {"DiptychRouterDown"},
    ),
    "a third pod downloads its model": (cluster({}) | {f"up{{{DECODE}}}": "0x60"}, set()),
    "a pod stopped": (
        cluster({"decode": "2x20 1x40"}) | {f"up{{{DECODE}}}": "1x20 0x40"},
        {"DiptychTooFewWorkers", "DiptychWorkerDown"},
    ),
    "a pod was replaced": (cluster({"decode": "2x20 1x8 2x40"}) | {f"up{{{DECODE}}}": "1x20 _x40"}, set()),
    "a router restarts": (cluster({"decode": "2x40 0x2 2x20", "prefill": "1x40 0x2 1x20"}), set()),
    "a certificate that nobody renews": (
        cluster({}) | {f"diptych_tls_certificate_expiry_seconds{{{ROUTER}}}": "86400-60x60"},
        {"DiptychCertificateExpires"},
    ),
    "a half-done upgrade": (
        cluster({}) | {f'diptych_unpaired_workers{{{ROUTER},role="decode"}}': "1x60"},
        {"DiptychUnpairedWorkers"},
    ),
    "the API server is away": (
        cluster({}) | {f"diptych_discovery_last_sync_age_seconds{{{ROUTER}}}": "0x5 0+60x60"},
        {"DiptychDiscoveryStale"},
    ),
}

QUICK_STATES = ("healthy", "all decode pods pending", "a pod stopped")
"""States in which no alert fires, one, and two."""

MINIMUM = "diptych:min_workers"
VARIABLES = {"$namespace": "llm", "$release": "demo", "$model": ".*"}
Rule = dict[str, Any]


MODELS: dict[str, Any] = {
    "models": {"m": {"source": {"id": "a/b"}}, "asleep": {"source": {"id": "c/d"}}},
    "prefill": {"pools": {"default": {"enabled": False}, "p": {"model": "m"}}},
    "decode": {
        "pools": {
            "default": {"enabled": False},
            "d": {"model": "m", "replicas": 2},
            "z": {"model": "asleep", "autoscaling": {"type": "planner", "minReplicas": 0}},
        }
    },
}
"""Model `m` has at least one prefill and two decode workers. The pool of `asleep` may sleep."""


CHANGING: dict[str, Any] = {
    **MODELS,
    "router": {"settings": {"role_change": True}},
    "workers": {"replicas": 2, "settings": {"role_change": True}},
}
"""Model `m` starts with two workers of each role, between which its router moves them."""
UNMONITORED: dict[str, Any] = {**MODELS, "monitoring": {"podMonitor": {"enabled": False}}}


def groups_of(helm: Path, over: dict[str, Any] = MODELS) -> list[dict[str, Any]]:
    (rules,) = render(helm, over=over).of("PrometheusRule")
    found: list[dict[str, Any]] = copy.deepcopy(rules["spec"]["groups"])
    return found


def rules_of(helm: Path, over: dict[str, Any] = MODELS) -> list[Rule]:
    return [rule for group in groups_of(helm, over) for rule in group["rules"]]


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    """(panel, expression) of every dashboard, its variables filled in."""
    for file in sorted(CHART.glob("dashboards/*.json")):
        for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                expression = target["expr"]
                for name, value in VARIABLES.items():
                    expression = expression.replace(name, value)
                yield f"{file.stem}: {panel['title']}", expression


def scaling_expressions(helm: Path) -> Iterator[tuple[str, str]]:
    """(ScaledObject and trigger, query) of every KEDA trigger that asks Prometheus."""
    for example in EXAMPLES:
        for item in render(helm, example).of("ScaledObject"):
            for trigger in item["spec"]["triggers"]:
                if trigger["type"] == "prometheus":
                    yield f"{item['metadata']['name']}: {trigger['name']}", trigger["metadata"]["query"]


@pytest.mark.slow
def test_every_expression_parses(helm4: Path) -> None:
    expressions = [rule["expr"] for rule in rules_of(helm4)]
    expressions += [expression for _, expression in (*dashboard_expressions(), *scaling_expressions(helm4))]
    assert len(expressions) > 60
    for expression in expressions:
        promql_parser.parse(expression)


@pytest.mark.slow
def test_every_expression_uses_metrics_that_exist(helm4: Path, repository: Path) -> None:
    documented = (repository / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    records = {rule["record"] for rule in rules_of(helm4) if "record" in rule}
    expressions = [rule["expr"] for rule in rules_of(helm4)]
    expressions += [expression for _, expression in (*dashboard_expressions(), *scaling_expressions(helm4))]
    triggers = [t for e in EXAMPLES for i in render(helm4, e).of("ScaledObject") for t in i["spec"]["triggers"]]
    expressions += [trigger["metadata"].get("valueLocation", "") for trigger in triggers]
    names = {name for text in expressions for name in re.findall(r"(?<![\w$])((?:vllm|diptych)[:_][\w:]+)(?=\{)", text)}
    assert len(names) > 25
    for name in names - records:
        assert f"`{name.removesuffix('_bucket')}`" in documented, name


def test_every_alert_has_a_runbook_and_a_case(helm4: Path, repository: Path) -> None:
    alerts = {rule["alert"]: rule for rule in rules_of(helm4) if "alert" in rule}
    runbook = (repository / "docs" / "guides" / "operate.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", runbook, flags=re.M)
    anchors = {heading.strip().lower().replace(" ", "-") for heading in headings}
    for name, rule in alerts.items():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert "runbook_url" not in rule["annotations"], "a link that leads nowhere"
        assert page == "docs/guides/operate.md" and anchor in anchors, f"{name} has no section in {page}"
        assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(CASES) == set(alerts)
    assert set(RECORDS) | {MINIMUM} == {rule["record"] for rule in rules_of(helm4) if "record" in rule}


def test_every_expression_counts_requests_of_all_apis(helm4: Path) -> None:
    expressions = [rule["expr"] for rule in rules_of(helm4)] + [each for _, each in dashboard_expressions()]
    patterns = {
        found
        for text in expressions
        for found in re.findall(r'diptych_http_requests_total\{[^}]*path=~"([^"]*)"', text)
    }
    for pattern in patterns:
        assert all(re.fullmatch(pattern, path) for path in GENERATING)
        assert not any(
            re.fullmatch(pattern, path) for path in ("/ready", "/metrics", "/v1/models", "/v1/responses/{response_id}")
        )
    assert len(patterns) == 1


@pytest.mark.slow
def test_two_releases_have_dashboards_of_their_own(helm4: Path) -> None:
    pages: dict[str, Any] = {}
    for name in ("demo", "other"):
        rendered = yaml.safe_load_all(template(helm4, name))
        maps = [
            item
            for item in rendered
            if item and item["kind"] == "ConfigMap" and "-dashboard-" in item["metadata"]["name"]
        ]
        assert len(maps) == 3
        for item in maps:
            ((file, text),) = item["data"].items()
            page = json.loads(text)
            assert file not in pages and f"({name}, llm)" in page["title"] and len(page["uid"]) <= 40
            assert [one["current"]["value"] for one in page["templating"]["list"][1:3]] == ["llm", name]
            assert not re.search(r"@(id|release|namespace|name)\b", text)
            pages[file] = page["uid"]
    assert len(set(pages.values())) == 6


def template(helm: Path, release: str) -> str:
    line = [
        str(helm),
        "template",
        release,
        str(CHART),
        "--namespace",
        "llm",
        "-f",
        str(CHART / "examples" / "laptop.yaml"),
    ]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.slow
def test_an_alert_can_be_left_out_and_labelled(helm4: Path) -> None:
    over = {"disabled": ["DiptychRetries"], "alertLabels": {"team": "ml"}, "runbookURL": "https://example.com/runs"}
    (rules,) = render(helm4, over={"monitoring": {"rules": over}}).of("PrometheusRule")
    alerts = {rule["alert"]: rule for rule in rules["spec"]["groups"][1]["rules"]}
    assert "DiptychRetries" not in alerts and len(alerts) == len(CASES) - 1
    assert alerts["DiptychErrors"]["labels"] == {"severity": "critical", "team": "ml"}
    assert alerts["DiptychErrors"]["annotations"]["runbook_url"] == "https://example.com/runs#diptycherrors"


def input_series(series: dict[str, str]) -> list[dict[str, str]]:
    return [{"series": name, "values": values} for name, values in series.items()]


def promtool_tests() -> dict[str, list[dict[str, Any]]]:
    """promtool's own tests of each alert and record: each case alone, so that nothing of one leaks into another."""
    tests: dict[str, list[dict[str, Any]]] = {}
    for name, case in CASES.items():
        fired = [{"exp_labels": case.labels | {"severity": case.severity}}]
        tests[name] = []
        for series, expected in ((case.fires, fired), (case.quiet, [])):
            check = {"eval_time": f"{case.at}m", "alertname": name, "exp_alerts": expected}
            tests[name].append({"interval": "1m", "input_series": input_series(series), "alert_rule_test": [check]})
    for name, (series, value, labels) in RECORDS.items():
        shown = ", ".join(f'{key}="{labels[key]}"' for key in sorted(labels))
        sample = {"labels": f"{{{shown}}}", "value": value}
        expected = {"expr": f"round({name}, 0.001)", "eval_time": "20m", "exp_samples": [sample]}
        tests[name] = [{"interval": "1m", "input_series": input_series(series), "promql_expr_test": [expected]}]
    return tests


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_promtool_finds_nothing_wrong(promtool: str, helm4: Path, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": groups_of(helm4)}), encoding="utf-8")
    minimums = sum(rule.get("record") == MINIMUM for rule in rules_of(helm4))
    assert f"{len(CASES) + len(RECORDS) + minimums} rules found" in run(promtool, "check", "rules", str(file))


def needed_by(name: str, rules: list[Rule]) -> list[Rule]:
    """The rule of an alert or record and all records that it reads, in their order."""
    needed, num_before = {name}, 0
    while len(needed) > num_before:
        num_before = len(needed)
        read = " ".join(rule["expr"] for rule in rules if needed & {rule.get("alert"), rule.get("record")})
        needed |= {rule["record"] for rule in rules if rule.get("record", "no record") in read}
    return [rule for rule in rules if needed & {rule.get("alert"), rule.get("record")}]


def test_every_alert_fires_and_keeps_quiet_and_every_record_is_right(
    promtool: str, helm4: Path, tmp_path: Path
) -> None:
    """Each with the records that it reads: promtool computes every rule of a file at every minute."""
    rules = rules_of(helm4)
    for rule in rules:
        rule.pop("annotations", None)  # promtool would want their text repeated here
    names = []
    for name, tests in promtool_tests().items():
        group = {"name": "a", "rules": needed_by(name, rules)}
        file = {"rule_files": [f"{name}.rules.yaml"], "evaluation_interval": "1m", "tests": tests}
        (tmp_path / f"{name}.rules.yaml").write_text(yaml.safe_dump({"groups": [group]}), encoding="utf-8")
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(file), encoding="utf-8")
        names.append(str(tmp_path / f"{name}.yaml"))
    assert {Path(name).stem for name in names} | {MINIMUM} == {rule.get("alert") or rule["record"] for rule in rules}
    run(promtool, "test", "rules", *names)


@pytest.mark.parametrize("names", [pytest.param(tuple(STATES), marks=pytest.mark.slow), QUICK_STATES], ids=len)
def test_each_state_of_a_cluster_fires_its_alerts_and_no_others(
    promtool: str, helm4: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    check_states(promtool, rules_of(helm4), {name: STATES[name] for name in names}, tmp_path)


def test_workers_that_change_their_role_are_not_missing(promtool: str, helm4: Path, tmp_path: Path) -> None:
    states: dict[str, tuple[Series, set[str]]] = {
        "both decode": (cluster({"prefill": "2x20 0x40", "decode": "2x20 4x40"}), set()),
        "one is gone": (cluster({"prefill": "2x20 1x40", "decode": "2x60"}), {"DiptychTooFewWorkers"}),
    }
    check_states(promtool, rules_of(helm4, CHANGING), states, tmp_path)


def test_routers_that_the_chart_does_not_monitor_are_not_down(promtool: str, helm4: Path, tmp_path: Path) -> None:
    series = {name: values for name, values in cluster({}).items() if not name.startswith("up{")}
    check_states(promtool, rules_of(helm4, UNMONITORED), {"no monitor": (series, set())}, tmp_path)


def check_states(promtool: str, rules: list[Rule], states: dict[str, tuple[Series, set[str]]], tmp_path: Path) -> None:
    rules = [rule for rule in rules if rule.pop("annotations", None) or "record" in rule]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "a", "rules": rules}]}), encoding="utf-8")
    tests = []
    for name, (series, alerts) in states.items():
        expected = "group by (alertname) (ALERTS{alertstate='firing'})"
        samples = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(alerts)]
        check = {"expr": expected, "eval_time": "50m", "exp_samples": samples}
        tests.append(
            {"name": name, "interval": "1m", "input_series": input_series(series), "promql_expr_test": [check]}
        )
    file = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "states.yaml").write_text(yaml.safe_dump(file), encoding="utf-8")
    run(promtool, "test", "rules", str(tmp_path / "states.yaml"))


READY = 'diptych_pool_workers{namespace="llm",diptych_release="demo",diptych_role="router",diptych_model="qwen3-8b"'
TIMES = READY.replace("diptych_pool_workers", "vllm:time_to_first_token_seconds_bucket")


def first_tokens(low: float, high: float, a_minute: int = 60) -> dict[str, str]:
    """Requests whose TTFT is spread evenly between two bucket limits, in seconds; p90 is nine tenths of the way."""
    return {f'{TIMES},le="{low}"}}': "0x20", **{f'{TIMES},le="{le}"}}': f"0+{a_minute}x20" for le in (high, "+Inf")}}


@pytest.mark.parametrize(
    ("series", "wanted"),
    (
        (first_tokens(0.5, 0.7), 0.68 * 3 / 0.55),
        (first_tokens(2.0, 4.0), 3.8 * 3 / 0.55),
        (first_tokens(0.4, 0.5), 3),
        (first_tokens(0.1, 0.2), 0.19 * 3 / 0.4),
        (first_tokens(0.5, 0.7, a_minute=0), 0),
        ({}, 0),
    ),
    ids=("above", "far above", "between", "below", "idle", "new"),
)
def test_the_goal_moves_a_pool(
    promtool: str, helm4: Path, tmp_path: Path, series: dict[str, str], wanted: float
) -> None:
    """n s / 0.55 pods above 0.55, n s / 0.4 below 0.4; s: p90 TTFT over its goal of 1 s, n: 3 ready workers."""
    (scaled,) = [
        item for item in render(helm4, "many-nodes").of("ScaledObject") if "prefill" in item["metadata"]["name"]
    ]
    (query,) = [each["metadata"]["query"] for each in scaled["spec"]["triggers"] if each["name"] == "slo"]
    ready = {
        f'{READY},role="prefill",state="ready",pod="{pod}"}}': f"{count}x20" for pod, count in (("a", 3), ("b", 2))
    }
    sample = {"labels": "{}", "value": round(wanted, 3)}
    checks = [{"expr": f"round({query}, 0.001)", "eval_time": "15m", "exp_samples": [sample]}]
    lost = [{"expr": query, "eval_time": "15m", "exp_samples": []}]  # without the routers nothing is known
    tests = [
        {"interval": "1m", "input_series": input_series({**series, **ready}), "promql_expr_test": checks},
        {"interval": "1m", "input_series": input_series(series), "promql_expr_test": lost},
    ]
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": tests}))
    run(promtool, "test", "rules", str(tmp_path / "tests.yaml"))
