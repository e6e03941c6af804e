"""Counters of speculative decoding, under vLLM's names: on decode workers, and on routers of what ended there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter

KIND, POSITION = "kind", "position"


class DraftMetrics:
    """With `kinds`, the first three counters have a label that says where draft tokens came from."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str], kinds: Sequence[str] = ()) -> None:
        self._labels = labels
        names = [*labels, *((KIND,) if kinds else ())]
        self.drafts = Counter(
            "vllm:spec_decode_num_drafts", "Times that an answer's next tokens were drafted", names, registry=registry
        )
        self.tokens = Counter(
            "vllm:spec_decode_num_draft_tokens", "Tokens drafted and checked", names, registry=registry
        )
        self.accepted = Counter(
            "vllm:spec_decode_num_accepted_tokens", "Tokens drafted and accepted", names, registry=registry
        )
        self._by_place = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Tokens drafted and accepted, by their position in the draft",
            [*labels, POSITION],
            registry=registry,
        )
        for kind in kinds or ("",):  # so that each series begins at 0
            self.count(0, 0, (0,), kind)

    def count(self, num_drafts: int, num_tokens: int, accepted: Sequence[int], kind: str = "") -> None:
        """`num_drafts` drafts of `num_tokens` were checked; `accepted[i]` of them had an accepted token in place i."""
        values = [*self._labels.values(), *((kind,) if kind else ())]
        self.drafts.labels(*values).inc(num_drafts)
        self.tokens.labels(*values).inc(num_tokens)
        self.accepted.labels(*values).inc(sum(accepted))
        for place, num_accepted in enumerate(accepted):
            self._by_place.labels(*self._labels.values(), str(place)).inc(num_accepted)
