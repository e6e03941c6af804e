"""Speculative decoding during a run, from a server's counters under vLLM's names before it and after it."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

NAME = "vllm:spec_decode_num_"


@dataclass(frozen=True, slots=True)
class DraftsMade:
    """`num_drafts` drafts of `num_tokens` in all; `accepted[i]` of them had an accepted token in place i."""

    num_drafts: int
    num_tokens: int
    accepted: tuple[int, ...]

    @property
    def share(self) -> float:
        """Of the draft tokens, those that were accepted."""
        return sum(self.accepted) / self.num_tokens

    @property
    def mean_length(self) -> float:
        """Tokens that a step with a draft brought on average."""
        return 1.0 + sum(self.accepted) / self.num_drafts


def drafts_between(before: str, after: str) -> DraftsMade | None:
    """What was drafted between two readings of `/metrics`; None if nothing was."""
    old, new = _counters(before), _counters(after)
    grown = {key: value - old.get(key, 0.0) for key, value in new.items()}
    num_drafts, num_tokens = (int(grown.get((name, -1), 0)) for name in ("drafts", "draft_tokens"))
    if not num_drafts or not num_tokens:
        return None
    places = sorted(place for name, place in grown if name == "accepted_tokens_per_pos")
    return DraftsMade(num_drafts, num_tokens, tuple(int(grown["accepted_tokens_per_pos", place]) for place in places))


def _counters(text: str) -> dict[tuple[str, int], float]:
    """Values by name and position, -1 for none, summed over other labels."""
    found: dict[tuple[str, int], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(NAME) and sample.name.endswith("_total"):
                key = (sample.name.removeprefix(NAME).removesuffix("_total"), int(sample.labels.get("position", -1)))
                found[key] = found.get(key, 0.0) + sample.value
    return found
