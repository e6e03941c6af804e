"""Helm values of a pick: what `helm install diptych helm/ -f FILE` starts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.plan.candidate import Candidate
from benchmarks.plan.spec import PlanSpec
from common.config.worker import BLOCK_SIZES
from common.errors import ConfigError

NAME_LENGTH = 40
PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
"""What YAML takes for something else than text."""


def values_of(spec: PlanSpec, candidate: Candidate, model: str) -> dict[str, Any]:
    """`model` is a built-in name or a Hugging Face id. Raises ConfigError for a block size that no worker has."""
    if spec.model.block_size not in BLOCK_SIZES:
        allowed = ", ".join(map(str, BLOCK_SIZES))
        raise ConfigError("model.block_size", spec.model.block_size, f"one of {allowed}")
    flags, goals = candidate.flags, spec.goals
    router = {
        **spec.settings,
        "local_prefill_threshold": flags.local_prefill_threshold,
        "slo_quantile": goals.quantile,
    }
    decode = {
        "max_num_seqs": flags.max_num_seqs,
        "local_prefill_chunk": flags.local_prefill_chunk,
        "num_blocks": spec.decode.num_blocks,
        "watermark": spec.decode.watermark,
    }
    prefill = {
        "max_num_batched_tokens": flags.max_num_batched_tokens,
        "num_blocks": spec.prefill.num_blocks,
        **({"max_num_seqs": spec.prefill.max_num_seqs} if spec.prefill.max_num_seqs else {}),
    }
    slo = {"ttftMs": goals.ttft_ms, "tpotMs": goals.tpot_ms}
    return {
        "models": {name_of(model): {"source": {"id": model}, "slo": slo}},
        "router": {"replicas": spec.routers, "settings": router},
        "workers": {"settings": {"block_size": spec.model.block_size}, "autoscaling": {"type": "none"}},
        "prefill": {"pools": {"default": _pool(candidate.num_prefill, prefill)}},
        "decode": {"pools": {"default": _pool(candidate.num_decode, decode)}},
    }


def name_of(model: str) -> str:
    """A name for objects of Kubernetes: the last part of a model's id, in small letters."""
    short = re.sub(r"[^a-z0-9]+", "-", model.rstrip("/").rpartition("/")[2].lower())[:NAME_LENGTH].strip("-")
    return short or "model"


def _pool(replicas: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """No pods are no pool."""
    return {"replicas": replicas, "settings": dict(settings)} if replicas else {"enabled": False}


def render(values: Mapping[str, Any], comments: Sequence[str]) -> str:
    """The values as YAML behind comments."""
    return "\n".join([*(f"# {line}" for line in comments), *_lines(values, ""), ""])


def _lines(value: Any, indent: str) -> list[str]:
    """Block style; what is empty, and text that YAML would misread, as JSON, which YAML contains."""
    found: list[str] = []
    pairs = value.items() if isinstance(value, Mapping) else ((None, item) for item in value)
    for key, item in pairs:
        head = f"{indent}{key}:" if key is not None else f"{indent}-"
        if isinstance(item, Mapping | list) and item:
            inner = _lines(item, indent + "  ")
            if key is None:
                found += [f"{head} {inner[0].lstrip()}", *inner[1:]]
            else:
                found += [head, *inner]
        else:
            found.append(f"{head} {_scalar(item)}")
    return found


def _scalar(value: Any) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in WORDS:
        return value
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)
