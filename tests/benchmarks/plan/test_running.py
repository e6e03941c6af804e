"""Worker kinds as a running router says them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.plan.options import with_prompts
from benchmarks.plan.running import ask_load, kinds_in
from common.errors import ConfigError

from .conftest import DECODE, PREFILL


def worker(role: str, num_steps: int = 500, **more: Any) -> dict[str, Any]:
    model = dict(PREFILL if role == "prefill" else DECODE) | {"error": 0.05, "num_steps": num_steps}
    sizes = {"num_blocks": 1000, "block_size": 32, "max_num_seqs": 24, "max_step_tokens": 256}
    return {"role": role, "step_model": model} | sizes | more


def test_kinds_are_the_mean_of_workers_that_know_their_steps() -> None:
    unknown = worker("decode", num_steps=3, num_blocks=9)
    classes = [{"name": "batch", "ttft_ms": 1.0}, {"name": "default", "ttft_ms": 700.0, "tpot_ms": 0.0}]
    workers = [worker("prefill"), worker("decode"), worker("decode", num_blocks=3000), unknown]
    found = kinds_in({"workers": workers, "classes": classes}, "URL")
    assert found["decode"]["num_blocks"] == 2000
    assert found["decode"]["coefficients"]["row_s"] == pytest.approx(DECODE["row_s"])
    assert found["prefill"]["max_step_tokens"] == 256
    assert found["model"] == {"block_size": 32} and found["goals"] == {"ttft_ms": 700.0}


def test_a_measured_link_is_that_of_the_plan() -> None:
    link = {"byte_s": 1e-9, "block_bytes": 32 * 1024, "num_transfers": 16}
    found = kinds_in({"workers": [worker("prefill"), worker("decode", link_model=link)]}, "URL")
    assert found["prefill"]["link_rate"] == found["decode"]["link_rate"] == pytest.approx(1e9)
    assert found["model"] == {"block_size": 32, "kv_bytes_per_token": 1024}
    few = kinds_in({"workers": [worker("decode", link_model=link | {"num_transfers": 15})]}, "URL")
    assert "link_rate" not in few["decode"]


def test_without_prefill_workers_they_are_taken_for_decode_workers() -> None:
    found = kinds_in({"workers": [worker("decode")]}, "URL")
    assert found["prefill"]["coefficients"] == found["decode"]["coefficients"]
    assert found["prefill"]["max_step_tokens"] == 0


@pytest.mark.parametrize("workers", ([], [worker("prefill")], [worker("decode", num_steps=5)]))
def test_a_router_whose_workers_know_too_little_is_refused(workers: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match="send it"):
        kinds_in({"workers": workers}, "URL")


@pytest.mark.parametrize("url", ("http://127.0.0.1:9", "no url", "ftp://x"))
def test_a_url_that_does_not_answer_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="from="):
        ask_load(url)


def test_decode_workers_that_never_saw_prompts_compute_them_like_prefill_workers() -> None:
    rows_only = {name: value for name, value in DECODE.items() if name not in ("token_s", "pair_s")}
    found = with_prompts({"prefill": {"coefficients": PREFILL}, "decode": {"coefficients": rows_only}})
    assert found["decode"]["coefficients"]["token_s"] == PREFILL["token_s"]
    assert found["decode"]["coefficients"]["row_s"] == DECODE["row_s"]
