"""The figures of an accuracy run: one row a format, its ratios to the model in float32 and to llama.cpp, as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from benchmarks.accuracy import Scores, perplexity
from benchmarks.compare.formats.likelihoods import PeerScores

PEER: Final = "llama.cpp"
COLUMNS: Final = (
    "format",
    "bits a weight",
    "perplexity, exact",
    "served",
    "to float32",
    "agreement, exact",
    "served",
    "divergence, exact",
    "served",
    "llama.cpp: perplexity",
    "agreement",
    "ours to its perplexity",
)


def ratio(logprobs: Tensor, others: Tensor) -> dict[str, float]:
    """Perplexity over another one of the same tokens, and the standard error of that ratio over tokens."""
    differences = others - logprobs
    value = math.exp(float(differences.mean()))
    return {"ratio": round(value, 5), "error": round(value * float(differences.std()) / math.sqrt(len(differences)), 5)}


def figures(scores: Scores | PeerScores, floats: Tensor) -> dict[str, Any]:
    """A model's perplexity, its ratio to that of `floats`, the likelihoods of the model in float32, and the rest."""
    found: dict[str, Any] = {
        "perplexity": round(perplexity(scores.logprobs), 4),
        "to_float": ratio(scores.logprobs, floats),
        "agreement": round(scores.agreement, 5),
    }
    return found | ({"divergence": round(scores.divergence, 6)} if isinstance(scores, Scores) else {})


def cells(rows: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A line for each format, under COLUMNS."""
    return [_line(row) for row in rows.values()]


def _line(row: Mapping[str, Any]) -> list[str]:
    exact, served, peer = row["exact"], row["served"], row.get(PEER)
    return [
        *(row["about"], f"{row['bits_a_weight']:.2f}"),
        *(f"{exact['perplexity']:.2f}", f"{served['perplexity']:.2f}", with_error(served["to_float"])),
        *(f"{exact['agreement']:.1%}", f"{served['agreement']:.1%}"),
        *(f"{exact['divergence']:.4f}", f"{served['divergence']:.4f}"),
        *((f"{peer['perplexity']:.2f}", f"{peer['agreement']:.1%}") if peer else ("-", "-")),
        with_error(row["to_peer"]) if peer else "-",
    ]


def with_error(found: Mapping[str, float]) -> str:
    return f"{found['ratio']:.3f} ± {found['error']:.3f}"


def markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The same as a table of a page."""
    rule = ["---"] * len(COLUMNS)
    return "\n".join(f"| {' | '.join(line)} |" for line in (COLUMNS, rule, *cells(rows)))
