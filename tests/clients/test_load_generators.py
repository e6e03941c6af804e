"""Programs that measure servers: what they report is what they asked for, and every request of theirs succeeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import PROGRAMS, Client, Service

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(2400)]

MODEL = "tiny-random"
NUM_REQUESTS, AT_ONCE, PROMPT, ANSWER = 12, 4, 64, 48


@pytest.fixture
def service(serve: Callable[[str], Service]) -> Service:
    return serve(MODEL)


@pytest.fixture
def tokenizer(service: Service) -> str:
    from common.model_files.resolve import resolve_model

    return str(resolve_model(MODEL).weights[0].parent)


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllm_bench_serve(
    service: Service, tokenizer: str, client_of: Callable[..., Client], backend: str, endpoint: str
) -> None:
    client, before = client_of("vllm", VLLM_NO_USAGE_STATS="1"), service.answered()
    client.run(
        *("python", str(PROGRAMS / "vllm_bench_serve.py"), "--backend", backend, "--endpoint", endpoint),
        *("--base-url", service.url, "--model", MODEL, "--tokenizer", tokenizer, "--dataset-name", "random"),
        *("--random-input-len", str(PROMPT), "--random-output-len", str(ANSWER), "--num-prompts", str(NUM_REQUESTS)),
        *("--max-concurrency", str(AT_ONCE), "--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"),
        *("--result-filename", "result.json", "--percentile-metrics", "ttft,tpot,itl,e2el"),
    )
    found = json.loads((client.home / "result.json").read_text())
    assert (found["completed"], found["failed"]) == (NUM_REQUESTS, 0), list(filter(None, found["errors"]))
    assert found["total_output_tokens"] == NUM_REQUESTS * ANSWER
    assert found["median_ttft_ms"] > 0 and found["median_tpot_ms"] > 0 and found["p99_e2el_ms"] > found["p99_ttft_ms"]
    assert service.answered() - before >= NUM_REQUESTS  # it asks once more to see whether the server is ready


@pytest.mark.parametrize("request_format", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(service: Service, tokenizer: str, client_of: Callable[..., Client], request_format: str) -> None:
    client = client_of("guidellm")
    client.run(
        *("guidellm", "run", "--disable-progress", "--output", "kind=json,path=result.json"),
        *("--backend", f"kind=openai_http,target={service.url},model={MODEL},request_format={request_format}"),
        *("--profile", f"kind=concurrent,streams={AT_ONCE}", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}"),
    )
    (benchmark,) = json.loads((client.home / "result.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {
        "successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS,
    }  # fmt: skip
    assert metrics["output_token_count"]["successful"]["mean"] == ANSWER
    assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 0
    assert metrics["time_per_output_token_ms"]["successful"]["mean"] > 0


@pytest.mark.parametrize("kind", ["chat", "completions", "responses"])
def test_aiperf(service: Service, tokenizer: str, client_of: Callable[..., Client], kind: str) -> None:
    client = client_of("aiperf", HF_HUB_OFFLINE="", TRANSFORMERS_OFFLINE="")  # with them it takes no folder
    client.run(
        *("aiperf", "profile", "--model", MODEL, "--tokenizer", tokenizer, "--url", service.url, "--streaming"),
        *("--endpoint-type", kind, "--request-count", str(NUM_REQUESTS), "--concurrency", str(AT_ONCE)),
        *("--isl", str(PROMPT), "--isl-stddev", "0", "--osl", str(ANSWER), "--osl-stddev", "0", "--ui", "none"),
        *("--extra-inputs", "ignore_eos:true", "--no-gpu-telemetry", "--workers-max", "2", "--artifact-dir", "result"),
        *(() if kind == "responses" else ("--use-server-token-count",)),
    )
    found = json.loads((client.home / "result" / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS and not found["error_summary"] and not found["was_cancelled"]
    if kind != "responses":  # there it reads no `usage` from the event of an answer that was cut off
        assert found["usage_completion_tokens"]["avg"] == ANSWER == found["output_sequence_length"]["avg"]
    assert found["time_to_first_token"]["avg"] > 0 and found["inter_token_latency"]["avg"] > 0
    scraped = json.loads((client.home / "result" / "server_metrics_export.json").read_text())
    assert "vllm:request_success" in json.dumps(scraped)


LENGTHS = {"min": PROMPT, "max": PROMPT, "mean": PROMPT, "std_dev": 0, "total_count": 40}


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("completion", {"type": "random", "input_distribution": LENGTHS, "output_distribution": LENGTHS}),
        ("chat", {"type": "mock"}),
        ("anthropic_messages", {"type": "mock"}),
    ],
    ids=["completion", "chat", "anthropic_messages"],
)
def test_inference_perf(
    service: Service, tokenizer: str, client_of: Callable[..., Client], kind: str, data: dict[str, Any]
) -> None:
    client = client_of("inference-perf")
    config = {
        "load": {"type": "constant", "interval": 0, "stages": [{"rate": 4, "duration": 4}], "num_workers": 1},
        "api": {"type": kind, "streaming": True},
        "server": {"type": "vllm", "model_name": MODEL, "base_url": service.url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": tokenizer},
        "data": data,
        "storage": {"local_storage": {"path": "result"}},
    }
    (client.home / "config.yml").write_text(json.dumps(config))  # JSON is YAML
    client.run("inference-perf", "--config_file", "config.yml")
    found = json.loads((client.home / "result" / "summary_lifecycle_metrics.json").read_text())
    done = found["successes"]
    assert found["failures"]["count"] == 0 and done["count"] == found["load_summary"]["count"] >= 4
    assert done["output_tokens"]["min"] > 0 and done["latency"]["request_latency"]["mean"] > 0
    if kind == "anthropic_messages":  # of which it takes no times of tokens
        return
    if kind == "completion":
        assert done["output_tokens"]["min"] == done["output_tokens"]["max"] == PROMPT
    assert done["latency"]["time_to_first_token"]["mean"] > 0 and done["latency"]["time_per_output_token"]["mean"] > 0
