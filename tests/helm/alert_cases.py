"""For every alert: series that make it fire, and series close by that must not. Values are promtool's, one a minute."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    "DiptychWorkerDown": Case({f"up{{{DECODE}}}": "0x60"}, {f"up{{{DECODE}}}": "1 0 0 0 1x60"}, labels=OF_MODEL | POD),
    "DiptychNobodyServes": Case(
        workers("decode", "0x60", "2x60") | held("decode", "0x60"),
        workers("decode", "0x60") | held("decode", "0x60"),  # scaled to zero, and no request waits
        labels=OF_MODEL | {"role": "decode"},
        severity="critical",
    ),
    "DiptychNoPrefillWorkers": Case(
        workers("prefill", "0x60") | held("prefill", "3x60"),
        workers("prefill", "1x60") | held("prefill", "3x60"),
        labels=OF_MODEL | {"role": "prefill"},
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
        {f'diptych_unpaired_workers{{{ROUTER},role="prefill"}}': "1x60"},
        {f'diptych_unpaired_workers{{{ROUTER},role="prefill"}}': "1x20 0x40"},
        labels=OF_MODEL | {"role": "prefill"},
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
