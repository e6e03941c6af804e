"""All models of a router as one client of the pools, for what concerns each of them: load, caches, readiness."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from common.errors import ModelNotFound
from router.dispatch import ANYONE, Caller, ClassLoad, DispatchLoad, GenerationRequest, TokenEvent
from router.generation import ServingClient

K = TypeVar("K")


class EveryModel:
    """A `ServingClient` over the `clients` of all models, by name. It generates nothing: each model does that."""

    def __init__(self, clients: Mapping[str, ServingClient], lengths: Mapping[str, int]) -> None:
        """`lengths`: the most tokens that each model takes while no worker of it is known."""
        self._clients, self._lengths = clients, lengths

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        raise ModelNotFound("a request is for one of the models")

    def check_room(self, is_longer: Callable[[int], bool], caller: Caller = ANYONE) -> None:
        """Whether there is room depends on the model, which only the body names."""

    @property
    def ready(self) -> tuple[bool, str]:
        """Ready with one model that is; `detail` names what others lack."""
        found = {name: client.ready for name, client in self._clients.items()}
        lacking = "; ".join(f"{name}: {why}" for name, (_, why) in found.items() if why)
        return any(is_ready for is_ready, _ in found.values()), lacking

    @property
    def max_model_len(self) -> int:
        """The longest sequence that some model takes."""
        return max(client.max_model_len or self._lengths[name] for name, client in self._clients.items())

    def reset_prefix_cache(self) -> None:
        for client in self._clients.values():
            client.reset_prefix_cache()

    def passed_on(self) -> None:
        """Each model hears of its own requests."""

    def load(self) -> DispatchLoad:
        return joined([client.load() for client in self._clients.values()])


def joined(loads: Sequence[DispatchLoad]) -> DispatchLoad:
    """The loads of several models as one: counts add up, workers stand one after the other."""
    return DispatchLoad(
        stages=_sum(load.stages for load in loads),
        workers=tuple(worker for load in loads for worker in load.workers),
        num_retries=_sum(load.num_retries for load in loads),
        num_failures=_sum(load.num_failures for load in loads),
        num_choices=_sum(load.num_choices for load in loads),
        num_stale_deltas=sum(load.num_stale_deltas for load in loads),
        num_handovers=_sum(load.num_handovers for load in loads),
        num_balanced=_sum(load.num_balanced for load in loads),
        wait_limit_s=min(load.wait_limit_s for load in loads),
        classes=tuple(_joined_class(of_class) for of_class in zip(*(load.classes for load in loads), strict=True)),
        num_taken_back=sum(load.num_taken_back for load in loads),
        num_policy_errors=sum(load.num_policy_errors for load in loads),
        role_changes=_sum(load.role_changes for load in loads),
        events=tuple(sorted((event for load in loads for event in load.events), key=lambda event: event.age_s)),
    )


def _joined_class(loads: Sequence[ClassLoad]) -> ClassLoad:
    """A class in all models: the tightest of their goals, and the one that it met least, count."""
    goals = dict.fromkeys(goal for load in loads for goal in load.attainment)
    return replace(
        loads[0],
        ttft_ms=_tightest(load.ttft_ms for load in loads),
        tpot_ms=_tightest(load.tpot_ms for load in loads),
        num_in_flight=sum(load.num_in_flight for load in loads),
        num_waiting=sum(load.num_waiting for load in loads),
        num_held=sum(load.num_held for load in loads),
        oldest_wait_s=max(load.oldest_wait_s for load in loads),
        wait_limit_s=min(load.wait_limit_s for load in loads),
        num_refused=sum(load.num_refused for load in loads),
        attainment={goal: min(load.attainment[goal] for load in loads if goal in load.attainment) for goal in goals},
    )


def _tightest(goals_ms: Iterable[float]) -> float:
    """The least of goals, of which 0 is none."""
    return min(filter(None, goals_ms), default=0.0)


def _sum(counts: Iterable[Mapping[K, int]]) -> dict[K, int]:
    total: Counter[K] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)
