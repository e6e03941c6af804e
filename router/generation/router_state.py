"""State of a router that its models share: keys, limits, memory budgets and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from common.config import RouterConfig
from common.errors import RETRY_AFTER_S, RequestError, Unavailable
from router.access import AccessControl, ApiKey, ClientRequest, CompletionRate
from router.dispatch import Caller
from router.generation.budgets import LogprobBudget, LoopTimeBudget, UnreadBudget
from router.generation.models import Models
from router.generation.request_history import RequestHistory
from router.generation.request_log import RequestLog
from router.generation.tracing import Tracing
from router.observe import LoadHistory, RouterMetrics
from router.request import BodyBudget, BodyReader

if TYPE_CHECKING:  # only routers of several processes need its HTTP client
    from router.siblings import Siblings

MAX_UNKNOWN_LEN = 1 << 20
"""Maximum number of tokens in a body before the model that it names is loaded."""
SHUTTING_DOWN = "This router is shutting down."


@dataclass
class RouterState:
    """Shared state of a router. Each of its `models` is a `ServedModel`.

    `config` and `metrics` are the router's; with a single model they are also that model's. While `draining`, requests
    are served, but every answer closes its connection. When it is also `refusing`, new generation requests get 503.
    `num_active` counts HTTP requests that are being answered. `is_loopback`: clients connect to a
    loopback address. `failure` returns why this process must be restarted; "" while it is healthy. `siblings` are the
    other processes that serve the port; None for a router of one process.
    """

    models: Models
    config: RouterConfig
    metrics: RouterMetrics
    access: AccessControl
    failure: Callable[[], str] = str
    tracing: Tracing | None = None
    siblings: Siblings | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    refusing: bool = False
    is_loopback: bool = False
    num_active: int = 0
    completion_rate: CompletionRate = field(default_factory=CompletionRate)
    bodies: BodyBudget = field(init=False)
    reader: BodyReader = field(init=False)
    prompt_logprobs: LogprobBudget = field(default_factory=LogprobBudget)
    unread: UnreadBudget = field(default_factory=UnreadBudget)
    logprob_time: LoopTimeBudget = field(default_factory=LoopTimeBudget)
    history: RequestHistory = field(default_factory=RequestHistory)
    load_history: LoadHistory = field(default_factory=lambda: LoadHistory(time.time()))

    def __post_init__(self) -> None:
        self.bodies = BodyBudget(self.config.max_body_bytes)
        served = self.models.served.values()
        unknown = 0 if self.models.loader is None else MAX_UNKNOWN_LEN
        self.reader = BodyReader(
            self.models.threads,
            lambda: max([unknown, *(model.max_model_len for model in served)]),
            lambda: max([unknown, *(model.max_detokenize_ids for model in served)]),
        )

    def begin(self, client_request: ClientRequest, headers: Mapping[str, str]) -> tuple[RequestLog, str]:
        """Create the log of a generation request, and return it with the `traceparent` for its workers."""
        log = RequestLog(self.metrics, client_request, self.history)
        if self.tracing is None:
            return log, headers.get("traceparent", "")
        trace = log.trace = self.tracing.begin(client_request.path, headers, client_request.began)
        return log, trace.traceparent

    def check_open(self) -> None:
        """Raise Unavailable when an answer might not be complete before the process ends."""
        if self.refusing:
            raise _shutting_down()

    def check_stays(self) -> None:
        """Raise Unavailable while the process is shutting down. For work that takes longer than its request."""
        if self.draining:
            raise _shutting_down()

    def check_capacity(self, is_longer: Callable[[int], bool], caller: Caller) -> None:
        """Raise RequestError if the only model has no capacity. With several, the body must be read first."""
        if self.models.loader is None and len(self.models.served) == 1:
            self.models.default.client.check_room(is_longer, caller)

    def add_retry_after(self, error: RequestError) -> None:
        """Add a `Retry-After` estimate to a capacity error that has none."""
        unknown = error.retry_after_s is None or error.retry_after_s <= RETRY_AFTER_S
        if error.status in (429, 503) and unknown and not self.draining:
            seconds = self.completion_rate.drain_s(self.num_active, time.monotonic())
            error.retry_after_s = error.retry_after_s if seconds is None else max(RETRY_AFTER_S, seconds)

    @property
    def has_workers(self) -> tuple[bool, str]:
        """Whether any model has workers for a request now, or can be loaded, and which models have none."""
        if self.models.loader is not None:
            return True, ""
        found = {name: model.availability for name, model in self.models.served.items()}
        if len(found) == 1:
            return next(iter(found.values()))
        lacking = "; ".join(f"{name}: {why}" for name, (_, why) in found.items() if why)
        return any(is_ready for is_ready, _ in found.values()), lacking

    @property
    def ready(self) -> tuple[bool, str]:
        """Whether this router serves requests, and the reason if not."""
        return (False, SHUTTING_DOWN) if self.draining else self.has_workers


def _shutting_down() -> Unavailable:
    return Unavailable(SHUTTING_DOWN, retry_after_s=RETRY_AFTER_S)


def key_of(request: Request) -> ApiKey:
    """Return the API key of the request."""
    client_request: ClientRequest = request.state.client_request
    return client_request.key


def router_state_of(request: Request) -> RouterState:
    """Return the `RouterState` of the application that received the request. All applications share the endpoints."""
    router_state: RouterState = request.app.state.router_state
    return router_state
