"""What a Diptych router says of itself during a run: its workers over time, how good its predictions were, and how
many draft tokens were accepted.

Other servers have no `/load` of this shape; then nothing is watched and nothing is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load.client import auth_headers
from benchmarks.load.prediction import PredictionError, errors_between

INTERVAL_S, ANSWER_S = 1.0, 5.0
NOT_RUNNING = ("unknown", "dead")
HOUR_S = 3600.0
DRAFTS = "vllm:spec_decode_num_"


@dataclass(frozen=True, slots=True)
class WorkersAt:
    """Workers by role at a moment, in seconds after the run's begin."""

    at_s: float
    running: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """Worker-seconds by role, and their price in the units of the prices given; 0 without prices."""

    worker_s: Mapping[str, float]
    cost: float = 0.0

    def per_million(self, num_tokens: int) -> float:
        """The price of a million tokens, of which there were so many."""
        return self.cost / num_tokens * 1e6 if num_tokens else 0.0


def workers_in(load: Any) -> dict[str, int]:
    """Running workers by role in an answer of `/load`. Raises ValueError for another shape."""
    try:
        return dict(Counter(each["role"] for each in load["workers"] if each["state"] not in NOT_RUNNING))
    except (KeyError, TypeError) as error:
        raise ValueError("this is no answer of a Diptych router's /load") from error


def cost_of(samples: Sequence[WorkersAt], end_s: float, prices: Mapping[str, float]) -> WorkerCost:
    """Worker-seconds until `end_s`; a worker counts from the sample that shows it to the one that does not.

    `prices` are those of an hour of one worker, by role.
    """
    worker_s: dict[str, float] = {}
    ends = [sample.at_s for sample in samples[1:]] + [end_s]
    for sample, end in zip(samples, ends, strict=True):
        for role, num in sample.running.items():
            worker_s[role] = worker_s.get(role, 0.0) + num * max(0.0, end - sample.at_s)
    cost = sum(seconds * prices.get(role, 0.0) / HOUR_S for role, seconds in worker_s.items())
    return WorkerCost(worker_s, cost)


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
    """Draft tokens made between two readings of `/metrics`; None if there were none."""
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
            if sample.name.startswith(DRAFTS) and sample.name.endswith("_total"):
                key = (sample.name.removeprefix(DRAFTS).removesuffix("_total"), int(sample.labels.get("position", -1)))
                found[key] = found.get(key, 0.0) + sample.value
    return found


class ServerWatch:
    """Asks one router each second while a run goes on: not again where the first answer is not a Diptych router's."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.samples: list[WorkersAt] = []
        self.seconds = 0.0
        self.errors: dict[str, PredictionError] = {}
        self.drafts: DraftsMade | None = None
        self._url, self._headers = url, auth_headers(api_key)

    @contextlib.asynccontextmanager
    async def during(self) -> AsyncIterator[None]:
        """Watch while the body runs."""
        async with httpx.AsyncClient(
            base_url=self._url, headers=self._headers, timeout=ANSWER_S, trust_env=False
        ) as client:
            before = await self._metrics(client)
            begun_at = time.perf_counter()
            asking = asyncio.create_task(self._ask(client, begun_at))
            try:
                yield
            finally:
                self.seconds = time.perf_counter() - begun_at
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                if before:
                    after = await self._metrics(client)
                    self.errors, self.drafts = errors_between(before, after), drafts_between(before, after)

    def cost(self, prices: Mapping[str, float]) -> WorkerCost | None:
        """None for a server that does not say what workers it has."""
        return cost_of(self.samples, self.seconds, prices) if self.samples else None

    async def _ask(self, client: httpx.AsyncClient, begun_at: float) -> None:
        while True:
            try:
                answer = await client.get("/load")
                running = workers_in(answer.raise_for_status().json())
            except (httpx.HTTPError, ValueError):
                if not self.samples:
                    return
            else:
                at_s = 0.0 if not self.samples else time.perf_counter() - begun_at
                self.samples.append(WorkersAt(at_s, running))
            await asyncio.sleep(INTERVAL_S)

    @staticmethod
    async def _metrics(client: httpx.AsyncClient) -> str:
        """What `/metrics` says, or "" where there is none."""
        try:
            return (await client.get("/metrics")).raise_for_status().text
        except httpx.HTTPError:
            return ""
