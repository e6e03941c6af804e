"""The interface between the HTTP front and the dispatcher.

    front ── GenerationRequest ──> GenerationClient.generate ── TokenEvent, ... (the last has finish_reason) ──> front

The front owns text: it tokenises, detokenises, finds stop strings and speaks HTTP. The dispatcher owns tokens: it
chooses workers, retries, and joins what they send into one ordered stream in which no token is missing or repeated.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from common.config import COMMON_SHARE, DEFAULT, NO_LANE, RequestClass
from common.wire import SamplingParams, TokenLogprobs
from router.dispatch.prompt import Prompt
from router.policy import Forecast

Sink = Callable[["TokenEvent"], bool]
"""Takes an event at once, in the turn of the event loop in which a worker sent it, or says False: then `generate`
brings it. Called while the reader of `generate` waits for an event, so all earlier ones were taken. Without it each
token would cost a turn of one more task."""


class GenerationRequest(msgspec.Struct, frozen=True):
    """One sequence to generate. The router makes `request_id`: it is unique and never a client's text.

    `deadline_s` is how long the request may take from now until its last token, `ttft_s` how long until its first one
    should come and `tpot_s` how long each later one should take; 0: no goal. These goals and the `priority` are those
    of the class of requests that `request_class` names, as is the `share` of places among classes of this priority,
    0 for none of its own. Keys, by name, share places fairly. `params.seed` is always set.
    `cache_salt` keeps prefix cache entries of different tenants apart. `traceparent` is W3C's, or empty. Requests that
    answer the same prompt share `prompt`, which has the same tokens and salt. With `params.pooling` the answer is one
    vector of `pooled_width` numbers. `adapter` is the digest of the LoRA weights that it uses, "" for the base model.
    `sink` is offered events in the middle of the answer: see `Sink`. A request that `continues` is a later step of an
    admitted answer, so admission does not judge it again. The first step announces that up to `num_at_once` follow
    concurrently.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    cache_salt: str = ""
    deadline_s: float = 600.0
    traceparent: str = ""
    prompt: Prompt | None = None
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    priority: int = 0
    request_class: str = DEFAULT
    key: str = ""
    share: float = 0.0
    pooled_width: int = 0
    adapter: str = ""
    sink: Sink | None = None
    continues: bool = False
    num_at_once: int = 1

    @property
    def lane(self) -> str:
        """See `RequestClass.lane`."""
        return self.request_class if self.share else NO_LANE

    @property
    def weight(self) -> float:
        """The share of its lane."""
        return self.share or COMMON_SHARE


class Caller(msgspec.Struct, frozen=True):
    """The client, as far as its request's head tells: the name of its key, and the classes that a request may be of.

    The first of them is that of a request that names none. Without classes it is of the class `default`.
    """

    key: str = ""
    classes: tuple[RequestClass, ...] = ()


ANYONE = Caller()


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Tokens were drafted `num_drafts` times, `num_tokens` in all; `accepted[i]` drafts had place i accepted."""

    num_drafts: int = 0
    num_tokens: int = 0
    accepted: tuple[int, ...] = ()

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)


class RequestTimeline(msgspec.Struct, frozen=True, gc=False):
    """A request's life inside the pools; durations in seconds, 0 for a phase that did not happen.

        dispatched ─ queue_s ─ prefill_s ─ first token ─ decode_s ─ last token
                                 └ grant_wait_s, transfer_s; only exposed_transfer_s of it delayed the second token

    `num_attempts` is 1 when nothing failed. A local prefill has an empty `prefill_worker`; a request that never
    needed a decode worker an empty `decode_worker`. `forecast` is that of its latest place. The KV that came
    to the decode worker crossed in `transfer_bytes` bytes. `drafts` are those of all its decode workers.
    """

    prefill_worker: str = ""
    decode_worker: str = ""
    num_attempts: int = 1
    num_preemptions: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    grant_wait_s: float = 0.0
    transfer_s: float = 0.0
    exposed_transfer_s: float = 0.0
    decode_s: float = 0.0
    forecast: Forecast = Forecast()
    transfer_bytes: int = 0
    drafts: DraftCounts = DraftCounts()


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """The next tokens of a sequence, in order, each exactly once whatever happened to the workers.

    `logprobs` is empty, or as long as `token_ids` when `params.logprobs >= 0`. `finish_reason` is "" until the last
    event, then "stop" or "length"; the last token of a "stop" event is the end token itself and is not text.
    `num_cached_tokens` counts prompt tokens that a prefix cache held. `timeline` grows: an early event has the workers
    and the prefill, the last one everything. `prompt_logprobs`, in the first event, are those of the prompt's tokens
    but the first, if the request asks for them. `pooled`, in the only event of a request with `params.pooling`, is the
    prompt's vector, float32 in little-endian bytes.
    """

    token_ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str = ""
    num_cached_tokens: int = 0
    timeline: RequestTimeline | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""


class TokenSource(Protocol):
    """Serves token streams. One event loop owns it and calls all methods."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """The token stream of one request; ends after the event that carries a finish reason.

        Closing it early (`aclose`, or cancelling the consumer and then closing) aborts on every worker at once.
        Raises a RequestError subclass: Overloaded or Unavailable before the first event when the request cannot be
        admitted, DeadlineExceeded when its time is over, InvalidRequest when a worker refuses it for good.
        """
        ...


class GenerationClient(TokenSource, Protocol):
    """Serves token streams from the pools, and says whether there is room for one."""

    def check_room(self, is_longer: Callable[[int], bool], caller: Caller = ANYONE) -> None:
        """Refuse, before it is read, a request that `generate` would refuse now whatever it asks for.

        `is_longer` says whether the prompt surely has more than so many tokens, `caller` which classes it may be of.
        Raises Overloaded or Unavailable. A request that passes may still be refused by `generate`.
        """
        ...

    @property
    def ready(self) -> tuple[bool, str]:
        """Whether a request would be served now, and if not, why in one line."""
        ...

    @property
    def max_model_len(self) -> int:
        """The longest sequence (prompt and output, in tokens) that all ready workers take; 0 while none is known."""
        ...
