"""What every endpoint uses: the client of the pools, the text pipeline, metrics, limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from common.config import RouterConfig
from common.errors import RETRY_AFTER_S, InvalidRequest, RequestError, Unavailable
from common.model_files import ModelFiles, ServedTask, Task, served_task
from router.access import ApiKey, Gate, Pace, Visit
from router.dispatch import DispatchLoad, GenerationClient
from router.generation.adapters import NO_ADAPTERS, ServedAdapters
from router.generation.logprob_budget import LogprobBudget
from router.generation.models import Models
from router.generation.request_log import RequestLog
from router.generation.tracing import Tracing
from router.generation.turn_budget import TurnBudget
from router.generation.unread import UnreadBudget
from router.models import Catalog, ModelEntry, ModelTable
from router.observe import RouterMetrics
from router.planner import Outlook
from router.request import BodyBudget, BodyLease, LargeBodies, is_large, parse, read_body
from router.text import CLOSE, MAX_NUMBERS, OPEN, TextPipeline, thinks
from router.text.calls import Dialect, dialect_of

if TYPE_CHECKING:  # only routers of several processes need its HTTP client
    from router.siblings import Siblings

M = TypeVar("M", bound=BaseModel)

# Bounds of texts that are only tokenised, and of ids that are only made into text.
MIN_TOKENIZE_BYTES = 1024 * 1024
BYTES_PER_TOKEN = 16
"""Four times those of most texts, so that a text of four times the model's length can be counted."""
BYTES_PER_ID = 4
"""What a token id and the comma behind it take in JSON at least."""
TASKS_IN_WORDS: Mapping[Task, str] = {
    "generate": "generates text",
    "embed": "embeds texts",
    "score": "scores pairs of texts",
}


class ServingClient(GenerationClient, Protocol):
    """A `GenerationClient` that can also tell its load."""

    def load(self) -> DispatchLoad:
        """Where requests are and how the workers are."""
        ...

    def reset_prefix_cache(self) -> None:
        """Have every worker forget what it cached."""
        ...

    def passed_on(self) -> None:
        """Count a request of this model that another one answers: what scales this model's pools must know of it."""
        ...


@dataclass
class Service:
    """One served model. `draining` refuses new work; `num_active` counts HTTP requests that are being answered.
    `is_loopback`: clients connect to a loopback address.

    `failure` says why this process must be restarted; "" while it is sound. `outlook`: the planner's latest look.
    `siblings` are the other processes that serve the port; None for a router of one process.
    `dialect` is how the model calls functions, `marks` are the special tokens of its form, and `thought_marks`
    those around its thoughts. Its `task` is what it is served for. Raises ModelError for a task that it cannot do.

    Of several models each has a service of its own, and requests come in through another, the `front`, which stands for
    all: its `models` are the others, its client is for what concerns all of them. Bounds and counts are the front's.
    """

    client: ServingClient
    text: TextPipeline
    files: ModelFiles
    config: RouterConfig
    metrics: RouterMetrics
    gate: Gate
    failure: Callable[[], str] = str
    tracing: Tracing | None = None
    siblings: Siblings | None = None
    front: Service | None = None
    outlook: Callable[[], Outlook | None] = lambda: None
    adapters: ServedAdapters = NO_ADAPTERS
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    is_loopback: bool = False
    num_active: int = 0
    pace: Pace = field(default_factory=Pace)
    bodies: BodyBudget = field(init=False)
    large: LargeBodies = field(init=False)
    prompt_logprob_budget: LogprobBudget = field(default_factory=LogprobBudget)
    unread: UnreadBudget = field(default_factory=UnreadBudget)
    logprob_turns: TurnBudget = field(default_factory=TurnBudget)
    dialect: Dialect = field(init=False)
    marks: frozenset[int] = field(init=False)
    thought_marks: frozenset[int] = field(init=False)
    task: ServedTask = field(init=False)
    models: Models[Service] = field(init=False)

    def __post_init__(self) -> None:
        self.task = served_task(self.files, self.config.task)
        self.bodies = BodyBudget(self.config.max_body_bytes)
        if self.front is None:
            entry = ModelEntry(self.config.model, self.config.served_model_name)
            catalog = Catalog(ModelTable((entry,)), (self.files.model_id,))
            self.models = Models(catalog, {self.model_name: self})
        else:
            self.pace, self.bodies = self.front.pace, self.front.bodies
            self.prompt_logprob_budget, self.unread = self.front.prompt_logprob_budget, self.front.unread
            self.logprob_turns = self.front.logprob_turns
        self.dialect = dialect_of(self.text.template, self.config.tool_parser)
        self.marks = self.text.mark_tokens(self.dialect.format.marks)
        self.thought_marks = self.text.mark_tokens((OPEN, CLOSE))
        self.large = LargeBodies(self.text, lambda: self.max_model_len, lambda: self.max_detokenize_ids)

    @property
    def model_name(self) -> str:
        """The name under which the model is listed."""
        return self.config.served_model_name or self.files.model_id

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have: as the workers take, or the model while none is known."""
        return self.client.max_model_len or self.files.max_model_len

    @property
    def max_tokenize_bytes(self) -> int:
        """The most bytes of a text that is only tokenised, whether it fits the model or not."""
        return max(MIN_TOKENIZE_BYTES, BYTES_PER_TOKEN * self.max_model_len)

    @property
    def max_detokenize_ids(self) -> int:
        """The most token ids that are only made into text."""
        return max(1, self.max_tokenize_bytes // BYTES_PER_ID)

    @property
    def shows_thoughts(self) -> bool:
        """Whether thoughts are shown apart from the answer."""
        return self.config.reasoning == "auto"

    @property
    def thinks(self) -> bool:
        """Whether answers may begin with a thought between `<think>` and `</think>` that is shown separately."""
        return self.shows_thoughts and thinks(self.text.chat_template)

    @property
    def spelled_thought(self) -> tuple[str, str] | None:
        """The marks of thoughts as grammars name them; None unless both are special tokens, which text never has."""
        if not self.thinks or len(self.thought_marks) < 2:
            return None
        return self.text.spell(OPEN), self.text.spell(CLOSE)

    @property
    def fingerprint(self) -> str | None:
        """OpenAI's `system_fingerprint`: it changes when the same seed may give another answer. None while the router
        has not read the weights."""
        return f"fp_{self.files.weights_hash}" if self.files.weights_hash else None

    def num_alternatives(self, wanted: int, param: str) -> int:
        """The alternatives that a request gets which asks for so many; -1: all tokens. Raises InvalidRequest."""
        most, size = self.config.max_logprobs, self.text.vocab_size
        number = size if wanted < 0 else wanted
        if 0 <= most < number:
            whole = ", the whole vocabulary," if wanted < 0 else ""
            raise InvalidRequest(
                f"{param}: {number:,} alternatives{whole} are more than the {most:,} that this server gives "
                "(--max-logprobs)",
                param=param,
            )
        return min(number, size)

    def check_model(self, name: str | None) -> str:
        """The name for the answer. Raises ModelNotFound for the name of no model here."""
        return self.models.name_of(name, self.model_name)

    def adapter_of(self, name: str | None) -> str:
        """The digest of the adapter that a name stands for; "" for a model's name. Raises Unavailable."""
        return "" if name is None or self.models.base_of(name) is None else self.adapters.digest_of(name)

    def check_task(self, *tasks: Task) -> None:
        """Raises InvalidRequest for an endpoint that serves `tasks`, where the model is served for another one."""
        if self.task.name not in tasks:
            wanted, does = " or ".join(f"--task {task}" for task in tasks), TASKS_IN_WORDS[self.task.name]
            raise InvalidRequest(
                f"the model {self.model_name!r} {does}: this endpoint is for models served with {wanted}", param="model"
            )

    async def read(self, request: Request, model: type[M], lease: BodyLease) -> M:
        """The body as a checked `model`. Raises RequestError, or ClientDisconnect when the client leaves meanwhile."""
        data = await read_body(request, lease, max(MAX_NUMBERS, self.max_model_len))
        return await self.large.model(data, model, lease) if is_large(data) else parse(data, model)

    def check_open(self) -> None:
        """Raises Unavailable while the process is about to end."""
        if self.draining:
            raise Unavailable("this router is shutting down", retry_after_s=RETRY_AFTER_S)

    def begin(self, visit: Visit, headers: Mapping[str, str]) -> tuple[RequestLog, str]:
        """The log of a request to a generation endpoint, and the `traceparent` for its workers."""
        log = RequestLog(self.metrics, visit)
        if self.tracing is None:
            return log, headers.get("traceparent", "")
        trace = log.trace = self.tracing.begin(visit.path, headers, visit.began)
        return log, trace.traceparent

    def hint(self, error: RequestError) -> None:
        """Let a refusal for lack of room say when there will be some, unless it says so already."""
        front = self.front or self
        unknown = error.retry_after_s is None or error.retry_after_s <= RETRY_AFTER_S
        if error.status in (429, 503) and unknown and not front.draining:
            seconds = self.pace.drain_s(front.num_active, time.monotonic())
            error.retry_after_s = error.retry_after_s if seconds is None else max(RETRY_AFTER_S, seconds)

    @property
    def availability(self) -> tuple[bool, str]:
        """Whether workers would answer a request now, and what is missing."""
        return self.client.ready

    @property
    def ready(self) -> tuple[bool, str]:
        """Whether this router serves requests, and if not, why."""
        return (False, "this router is shutting down") if self.draining else self.client.ready


def key_of(request: Request) -> ApiKey:
    """The key that the request came with."""
    visit: Visit = request.state.visit
    return visit.key


def service_of(request: Request) -> Service:
    """The service of the application that got the request: endpoints are made once for all applications."""
    service: Service = request.app.state.service
    return service
