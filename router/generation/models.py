"""Model selection: maps the requested model name to the models that may serve it, and checks their capacity.

requested name ── Catalog ──> models that may answer ── ready? ──> candidates, best first ── capacity? ──> plan
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol, TypeVar

from common.errors import RETRY_AFTER_S, ModelNotFound, Overloaded, Unavailable
from common.model_files import Task
from router.access import ANONYMOUS, AccessControl, ApiKey, ClientRequest, Forbidden, RateLimited
from router.dispatch import Caller
from router.generation.context import RequestContext
from router.generation.plan import AnswerPlan
from router.generation.request_log import RequestLog
from router.generation.served_model import ServedModel
from router.models import Catalog, ModelEntry, ModelTable
from router.text import TextPipeline

Result = TypeVar("Result")


Release = Callable[[], None]
"""Ends a use of a model. Further calls have no effect."""


@dataclass(frozen=True, slots=True)
class LoadState:
    """State of a model that is loaded on demand: idle, loading or loaded.

    `expires_in_s`: time until it is unloaded if no request arrives; infinity while it has requests, and if it is kept.
    `num_bytes`: size of its weights, 0 if unknown. `loading_s`: how long it has been loading.
    """

    name: Literal["idle", "loading", "loaded"]
    expires_in_s: float = math.inf
    num_bytes: int = 0
    loading_s: float = 0.0


class ModelLoader(Protocol):
    """Loads models on demand. Model names are those of the catalog."""

    async def refresh(self) -> None:
        """Find the models that have been added or removed."""
        ...

    async def open(self, name: str) -> ServedModel:
        """Return a model with its tokenizer, but not necessarily with workers. Raises Unavailable."""
        ...

    async def use(self, name: str, keep_s: float | None = None) -> Release:
        """Load the workers of a model, and keep them until the use ends. `keep_s`: its keep-alive afterwards.

        Raises Unavailable if it cannot be loaded, or not in time.
        """
        ...

    def unload(self, name: str) -> None:
        """Unload a model as soon as it has no requests."""
        ...

    def state(self, name: str) -> LoadState: ...

    async def apart(self, job: Callable[[], Result], size: int = ...) -> Result:
        """Run a job in a thread for texts. See `TextPipeline.apart`."""
        ...


@dataclass(frozen=True, slots=True)
class ModelCandidates:
    """The requested model, and the usable models among it and its fallbacks, best first.

    `adapter` is the name of an adapter of the model if the request names one, else "".
    """

    first: ServedModel
    usable: tuple[ServedModel, ...]
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class ShownModel:
    """An entry of the model list. `model` is the model with this name or alias; None for a split.

    `ready`: whether a worker can serve it now. `max_model_len`: the smallest limit, in tokens, of the models that the
    name resolves to. `parent`: the base model of an adapter, else "". `state` is None unless models are loaded on
    demand; a model that has not been used yet then has no `model`, and a `max_model_len` of 0.
    """

    name: str
    model: ServedModel | None
    ready: bool
    max_model_len: int
    parent: str = ""
    state: LoadState | None = None


class Models:
    """All models of a router by name, the default model first. The `catalog` may be replaced.

    With a `loader`, `served` are the models that have been opened; more may be added.
    """

    def __init__(self, catalog: Catalog, served: Mapping[str, ServedModel], loader: ModelLoader | None = None) -> None:
        self.catalog, self.served, self.loader = catalog, served, loader

    @classmethod
    def of_one(cls, model: ServedModel) -> Models:
        """Create the models of a router with one model, which has no aliases."""
        entry = ModelEntry(model.config.model, model.config.served_model_name)
        return cls(Catalog(ModelTable((entry,)), (model.files.model_id,)), {model.name: model})

    @property
    def default(self) -> ServedModel:
        """The model for requests that name none."""
        return next(iter(self.served.values()))

    @property
    def threads(self) -> ModelLoader | TextPipeline:
        """Runs jobs `apart` from the event loop."""
        return self.default.text if self.loader is None else self.loader

    async def refresh(self) -> None:
        """Find models that have been added, if they are loaded on demand."""
        if self.loader is not None:
            await self.loader.refresh()

    async def use(
        self, requested: str | None, key: ApiKey, requester: str = "", keep_s: float | None = None
    ) -> Release | None:
        """Load a model if models are loaded on demand. Returns a function that ends the use; otherwise None.

        Raises ModelNotFound, Forbidden, and Unavailable if the model cannot be loaded.
        """
        if self.loader is None:
            return None
        return await self.loader.use(await self._found(requested, key, requester), keep_s)

    async def open(self, requested: str | None, key: ApiKey = ANONYMOUS) -> ServedModel:
        """Return `one`. A model that is loaded on demand gets a tokenizer, but no workers. Raises Unavailable."""
        if self.loader is None:
            return self.one(requested, key)
        return await self.loader.open(await self._found(requested, key))

    async def availability(self, requested: str, *, with_key: bool) -> tuple[bool, str]:
        """Return whether a request for a model would be answered now or after loading it, and what is missing.

        Raises ModelNotFound, which lists no models if the client has shown no key. It cannot cause a search either.
        """
        if not with_key and not self.catalog.has(requested) and self.base_of(requested) is None:
            raise self.catalog.not_found(requested, None)
        if self.loader is None:
            return self.one(requested).availability
        state = self.loader.state(await self._found(requested, ANONYMOUS))
        return True, "" if state.name == "loaded" else f"the model is {state.name}"

    async def unload(self, requested: str | None, key: ApiKey = ANONYMOUS) -> str:
        """Unload a model that was loaded on demand after its last request. Returns its name."""
        name = await self._found(requested, key)
        if self.loader is not None:
            self.loader.unload(name)
        return name

    async def _found(self, requested: str | None, key: ApiKey, requester: str = "") -> str:
        """Return the model that serves a request. An unknown name is searched among new models too."""
        try:
            base = self.base_of(requested, key)
            return self.catalog.chain(requested, key, requester)[0] if base is None else base
        except ModelNotFound:
            await self.refresh()
            return self.catalog.chain(requested, key, requester)[0]

    def candidates(self, requested: str | None, key: ApiKey = ANONYMOUS, requester: str = "") -> ModelCandidates:
        """Return the models to try: those with ready workers, then one that may wait for workers.

        `requester` is the identity that splits draw a model for. Raises ModelNotFound, Forbidden, and Unavailable when
        no model has a worker or may wait for one.
        """
        base = self.base_of(requested, key)  # an adapter has no fallbacks
        adapter = "" if base is None else requested or ""
        chain = (base,) if base is not None else self.catalog.chain(requested, key, requester)
        chain = chain if self.loader is None else chain[:1]  # which is loaded; a fallback may not be
        if len(chain) == 1 and (self.loader is not None or self.catalog.entries[chain[0]].holds):
            return ModelCandidates(only := self.served[chain[0]], (only,), adapter)
        found = {name: self.served[name].availability for name in chain}
        ready = [name for name in chain if found[name][0]]
        holding = [name for name in chain if not found[name][0] and self.catalog.entries[name].holds]
        first = chain[0]
        if usable := tuple(self.served[name] for name in (*ready, *holding[:1])):
            return ModelCandidates(self.served[first], usable, adapter)
        raise Unavailable(f"Model {first!r}: {found[first][1]}", param="model", retry_after_s=RETRY_AFTER_S)

    def model_without_workers(self, requested: str | None) -> str:
        """Return a model whose workers a request for this name may have to wait for; "" if there is none.

        Always "" for a router with one model, and if models are loaded on demand. Raises ModelNotFound.
        """
        if self.loader is not None:
            return ""
        self.catalog.chain(requested)
        if len(self.served) == 1:
            return ""
        names = self.catalog.models[:1] if requested is None else self.catalog.targets(requested)
        available = set(self.available)
        return next((name for name in names if available.isdisjoint(self.catalog.with_fallbacks(name))), "")

    @property
    def available(self) -> list[str]:
        """The models that have workers for a request now."""
        return [name for name, model in self.served.items() if model.availability[0]]

    def one(self, requested: str | None, key: ApiKey = ANONYMOUS) -> ServedModel:
        """Return the model for work without workers, such as tokenizing. Raises ModelNotFound, Forbidden."""
        base = self.base_of(requested, key)
        return self.served[self.catalog.chain(requested, key)[0] if base is None else base]

    def base_of(self, requested: str | None, key: ApiKey = ANONYMOUS) -> str | None:
        """Return the base model of the adapter `requested`; None if there is no such adapter. Raises Forbidden.

        A key may use the adapters on its list and all adapters of the models that it may use.
        """
        if requested is None or requested in self.served or self.catalog.has(requested):
            return None
        base = next((name for name, model in self.served.items() if model.adapters.has(requested)), None)
        if base is not None and requested not in key.models and not self.catalog.may_use(key, base):
            raise Forbidden(f"key {key.name!r} may not use adapter {requested!r} of model {base!r}", param="model")
        return base

    def checked_name(self, requested: str | None, key: ApiKey) -> str:
        """Return the model name that a batch reports for a line; "" if its key may use no model.

        Raises ModelNotFound. A name that exists but that the key may not use is left to the endpoint.
        """
        if requested is None:
            return next((one.name for one in self.catalog.listed(key)), "")
        if self.loader is not None:
            return requested
        if not self.catalog.has(requested) and self.base_of(requested) is None:
            raise self.catalog.not_found(requested, key)
        return self.name_of(requested, self.default.name) if len(self.served) == 1 else requested

    def name_of(self, requested: str | None, own: str) -> str:
        """Return the model name in an answer of model `own`: the requested name if it denotes `own`, else `own`.

        Raises ModelNotFound.
        """
        if requested is None or requested == own:
            return own
        if self.base_of(requested) == own:
            return requested
        self.catalog.chain(requested)
        return requested if requested in self.catalog.own_names(own) else own

    def listed(self, key: ApiKey = ANONYMOUS) -> list[ShownModel]:
        """List the names that clients with this key may request now. Unready models are listed if requests may wait."""
        available = {name: model.availability[0] for name, model in self.served.items()}
        shown = [self._shown(name, available) for name in (one.name for one in self.catalog.listed(key))]
        found = [one for one in shown if one.ready or one.state is not None or self._holds(one.name)]
        return [*found, *(one for name in self.served for one in self._adapters(name, key))]

    def shown(self, requested: str, key: ApiKey = ANONYMOUS) -> ShownModel:
        """Return one entry of the model list. Raises ModelNotFound, Forbidden."""
        if (base := self.base_of(requested, key)) is not None:
            if (one := next((one for one in self._adapters(base, key) if one.name == requested), None)) is not None:
                return one
            raise ModelNotFound(f"Adapter {requested!r} is being loaded.", param="model")
        self.catalog.chain(requested, key)
        return self._shown(
            requested,
            {
                name: self.served[name].availability[0]
                for name in self.catalog.targets(requested)
                if name in self.served
            },
        )

    def _adapters(self, base: str, key: ApiKey) -> Iterator[ShownModel]:
        """Yield the adapters of a model that clients with this key may request."""
        model, may_use = self.served[base], self.catalog.may_use(key, base)
        for known in model.adapters.names():
            if (may_use or known.name in key.models) and not self.catalog.has(known.name):
                yield ShownModel(known.name, model, known.ready, model.max_model_len, base)

    def _holds(self, name: str) -> bool:
        return any(self.catalog.entries[model].holds for model in self.catalog.targets(name))

    def _shown(self, name: str, available: Mapping[str, bool]) -> ShownModel:
        targets = self.catalog.targets(name)
        models = [self.served[one] for one in targets if one in self.served]
        shortest = min((model.max_model_len for model in models), default=0)
        ready = any(available[model.name] for model in models)
        state = self.loader.state(targets[0]) if self.loader is not None else None
        return ShownModel(
            name, models[0] if models and self.catalog.is_model(name) else None, ready, shortest, "", state
        )


class SelectionFields(Protocol):
    """Fields of a request body that model selection reads."""

    @property
    def model(self) -> str | None: ...
    @property
    def end_user(self) -> str: ...
    @property
    def request_class(self) -> str | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def tier(self) -> str | None: ...
    def longest_text(self) -> str | list[int]: ...


F = TypeVar("F", bound=SelectionFields)
Plan = Callable[[ServedModel, F, RequestContext], Awaitable[AnswerPlan]]
"""Plans the answer of a model to a request body."""


async def choose_model(
    models: Models,
    access: AccessControl,
    log: RequestLog,
    requested: F,
    context: RequestContext,
    plan: Plan[F],
    tasks: Collection[Task],
) -> tuple[ServedModel, AnswerPlan]:
    """Choose the model that answers, and plan its answer. Tries the next candidate when one has no capacity.

    The model must be served for one of `tasks`. `log.metrics` become those of the requested model, and then those of
    the model that answers. Raises RequestError; if several candidates have no capacity, the error of the first.
    """
    client_request = log.client_request
    candidates = models.candidates(
        requested.model, client_request.key, requester_of(client_request, requested.end_user)
    )
    log.metrics = candidates.first.metrics
    refusals: list[Overloaded | Unavailable] = []
    for model in candidates.usable:
        try:
            _check_capacity(model, partial(_is_longer, model, requested), context)
            access.models.enter(client_request, model.name)
            model.check_task(*tasks)
            name = candidates.adapter or models.name_of(requested.model, model.name)
            planned = await plan(model, requested, replace(context, model_name=name, adapter=candidates.adapter))
            access.take_prompt(client_request, planned.num_prompt_tokens)
            if len(candidates.usable) > 1:
                _check_length(model, access, client_request, planned, context)
            break
        except (Overloaded, Unavailable) as refusal:
            if len(candidates.usable) == 1:
                raise
            access.models.leave(client_request)
            if isinstance(refusal, RateLimited) and refusal.of_key:
                raise
            refusals.append(refusal)
    else:
        raise refusals[0]
    if model is not candidates.first:
        candidates.first.metrics.count_fallback(model.name)
        candidates.first.client.passed_on()
        log.metrics = model.metrics
    return model, planned


def requester_of(client_request: ClientRequest, end_user: str) -> str:
    """Return the identity that a split draws a model for: the user in the body, or else this request."""
    return f"user:{client_request.key.name}:{end_user}" if end_user else f"request:{client_request.request_id}"


def _check_length(
    model: ServedModel,
    access: AccessControl,
    client_request: ClientRequest,
    planned: AnswerPlan,
    context: RequestContext,
) -> None:
    """Check the capacity again with the exact length of the prompts."""
    try:
        _check_capacity(model, max(len(prompt.token_ids) for prompt in planned.prompts).__gt__, context)
    except (Overloaded, Unavailable):
        access.spend(client_request, -planned.num_prompt_tokens)
        raise


def _is_longer(model: ServedModel, requested: SelectionFields, num_tokens: int) -> bool:
    return model.text.exceeds(requested.longest_text(), num_tokens)


def _check_capacity(model: ServedModel, is_longer: Callable[[int], bool], context: RequestContext) -> None:
    model.client.check_room(is_longer, Caller(context.key.name, (context.request_class,)))
