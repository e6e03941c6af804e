"""Worker kinds of a running service: what its router's `/load` says of them."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import httpx

from benchmarks.load.client import auth_headers
from common.errors import ConfigError

ASK_TIMEOUT_S = 10.0
FEWEST_STEPS = 64
"""Before so many steps a worker's model says little of other loads than the one it saw."""
FEWEST_TRANSFERS = 16
"""Before so many transfers a worker's link is taken for the plan's."""
COEFFICIENTS = ("fixed_s", "floor_s", "token_s", "pair_s", "row_s", "context_s", "error")


def ask_load(url: str, api_key: str = "") -> Mapping[str, Any]:
    """The router's `/load`. Raises ConfigError when there is no answer, or none of that kind."""
    options: dict[str, Any] = {"verify": ssl.create_default_context()} if url.startswith("https:") else {}
    try:
        answer = httpx.get(
            f"{url.rstrip('/')}/load",
            headers=auth_headers(api_key),
            timeout=ASK_TIMEOUT_S,
            trust_env=False,
            **options,
        )
        answer.raise_for_status()
        found = answer.json()
        if not isinstance(found, dict) or not isinstance(found.get("workers"), list):
            raise ValueError("there are no workers in it")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError("from", url, f"a Diptych router with a readable /load ({error})") from error
    return found


def kinds_in(load: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The plan's `prefill`, `decode`, `model` and `goals`, as a file would have them, of the mean worker of a role.

    A role that has no worker which knows its steps is taken for one like the other role's, if that has computed such
    steps. Raises ConfigError when coefficients are missing.
    """
    known = {role: [worker for worker in load["workers"] if _knows(worker, role)] for role in ("prefill", "decode")}
    if not known["decode"]:
        raise ConfigError(
            "from",
            source,
            f"a router whose decode workers have computed {FEWEST_STEPS} steps; send it short and long requests first",
        )
    found: dict[str, Any] = {"decode": _kind(known["decode"])}
    if known["prefill"]:
        found["prefill"] = _kind(known["prefill"])
    elif found["decode"]["coefficients"]["token_s"]:
        found["prefill"] = dict(found["decode"]) | {"max_num_seqs": 0, "max_step_tokens": 0}
    else:
        raise ConfigError("from", source, "a router with a worker that has computed prompts; send it some first")
    if size := max(int(worker.get("block_size", 0)) for worker in known["decode"]):
        found["model"] = {"block_size": size}
        if window := min(int(worker.get("window", 0)) for worker in known["decode"]):
            found["model"]["window"] = window
    links = [worker.get("link_model") or {} for worker in known["decode"]]
    links = [link for link in links if link.get("num_transfers", 0) >= FEWEST_TRANSFERS and link.get("byte_s")]
    if links:
        rate = 1.0 / fmean(link["byte_s"] for link in links)
        for role in ("prefill", "decode"):
            found[role]["link_rate"] = rate
        if size and (block_bytes := max(int(link.get("block_bytes", 0)) for link in links)):
            found["model"]["kv_bytes_per_token"] = max(1, block_bytes // size)
    default: Mapping[str, Any] = next((one for one in load.get("classes", ()) if one.get("name") == "default"), {})
    if goals := {name: default[name] for name in ("ttft_ms", "tpot_ms") if default.get(name)}:
        found["goals"] = goals
    return found


def _knows(worker: Mapping[str, Any], role: str) -> bool:
    model = worker.get("step_model") or {}
    is_known = model.get("num_steps", 0) >= FEWEST_STEPS
    return bool(worker.get("role") == role and worker.get("num_blocks") and is_known)


def _kind(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    models = [worker["step_model"] for worker in workers]
    coefficients: dict[str, Any] = {name: fmean(model.get(name, 0.0) for model in models) for name in COEFFICIENTS}
    coefficients["num_steps"] = min(int(model["num_steps"]) for model in models)
    return {
        "coefficients": coefficients,
        "num_blocks": round(fmean(worker["num_blocks"] for worker in workers)),
        "max_num_seqs": round(fmean(worker.get("max_num_seqs", 0) for worker in workers)),
        "max_step_tokens": round(fmean(worker.get("max_step_tokens", 0) for worker in workers)),
    }
