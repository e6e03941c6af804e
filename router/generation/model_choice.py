"""Gives a request to the first of its models that has room for it, and plans its answer there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from common.errors import Overloaded, Unavailable
from router.access import RateLimited, Visit
from router.dispatch import Caller
from router.generation.origin import Origin
from router.generation.plan import AnswerPlan
from router.generation.request_log import RequestLog
from router.generation.service import Service

Plan = Callable[[Service], Awaitable[AnswerPlan]]
"""Plans the answer at a model."""


class Asked(Protocol):
    """What the choice of a model reads of a request's body."""

    @property
    def model(self) -> str | None: ...
    @property
    def end_user(self) -> str: ...
    def longest_text(self) -> str | list[int]: ...


async def choose_model(
    service: Service, log: RequestLog, asked: Asked, plan: Plan, origin: Origin
) -> tuple[Service, AnswerPlan]:
    """The model that answers, and its plan. When it has no room the next candidate is asked, if there is one.

    The request counts in the metrics of the model that it is for, and once that is known of the one that answers.
    Raises RequestError: with several candidates without room, what the first says.
    """
    visit = log.visit
    candidates = service.models.candidates(asked.model, visit.key, requester_of(visit, asked.end_user))
    log.metrics = candidates.first.metrics
    if len(candidates.usable) == 1:
        (chosen,) = candidates.usable
        planned = await _planned(chosen, visit, asked, plan, origin)
    else:
        chosen, planned = await _first_with_room(candidates.usable, visit, asked, plan, origin)
    if chosen is not candidates.first:
        candidates.first.metrics.count_fallback(chosen.model_name)
        candidates.first.client.passed_on()
        log.metrics = chosen.metrics
    return chosen, planned


def requester_of(visit: Visit, end_user: str) -> str:
    """For whom a split draws one of its models: the user that the body names, else this one request."""
    return f"user:{visit.key.name}:{end_user}" if end_user else f"request:{visit.request_id}"


async def _first_with_room(
    services: tuple[Service, ...], visit: Visit, asked: Asked, plan: Plan, origin: Origin
) -> tuple[Service, AnswerPlan]:
    refusals: list[Overloaded | Unavailable] = []
    for service in services:
        try:
            planned = await _planned(service, visit, asked, plan, origin)
            try:  # only now the length of the prompt is known
                _check_room(service, max(len(prompt.token_ids) for prompt in planned.prompts).__gt__, origin)
            except (Overloaded, Unavailable):
                service.gate.models.spend(visit, -planned.num_prompt_tokens)
                raise
            return service, planned
        except (Overloaded, Unavailable) as refusal:
            service.gate.models.leave(visit)
            if isinstance(refusal, RateLimited) and refusal.of_key:
                raise
            refusals.append(refusal)
    raise refusals[0]


async def _planned(service: Service, visit: Visit, asked: Asked, plan: Plan, origin: Origin) -> AnswerPlan:
    """The answer's plan at one model. Raises RequestError, such as Overloaded or Unavailable for lack of room."""
    _check_room(service, partial(service.text.exceeds, asked.longest_text()), origin)
    service.gate.models.enter(visit, service.model_name)
    planned = await plan(service)
    service.gate.models.take_prompt(visit, planned.num_prompt_tokens)
    return planned


def _check_room(service: Service, is_longer: Callable[[int], bool], origin: Origin) -> None:
    service.client.check_room(is_longer, Caller(origin.key.name, (origin.request_class,)))
