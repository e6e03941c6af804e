"""Interface between the HTTP API and the dispatcher.

    API ── GenerationRequest ──> GenerationClient.generate ── TokenEvent, ... (the last has finish_reason) ──> API

The API layer handles text: tokenisation, detokenisation, stop strings, HTTP. The dispatcher handles tokens: it selects
workers, retries, and merges their output into one ordered stream without gaps or duplicates.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from common.config import COMMON_SHARE, DEFAULT, NO_LANE, RequestClass
from common.wire import SamplingParams, TokenLogprobs
from router.dispatch.prompt import Prompt
from router.dispatch.trail import Trail
from router.policy import Forecast

Sink = Callable[["TokenEvent"], bool]
"""Consumes an event synchronously when it arrives from a worker, or returns False to have `generate` deliver it.

Called only while the consumer of `generate` waits for an event, so order is preserved. Saves one task switch per token.
"""


class GenerationRequest(msgspec.Struct, frozen=True):
    """One sequence to generate.

    - `request_id` is created by the router: unique, and never text from a client.
    - `deadline_s` bounds the whole request. `ttft_s` and `tpot_s` are goals for the first and for each later token, 0
      for none. Together with `priority` and `share` they come from the class `request_class`. A `share` of 0 means that
      the class has no separate lane.
    - `key` is the name of the API key. Keys share capacity fairly.
    - `params.seed` is always set.
    - `cache_salt` separates the prefix caches of tenants.
    - `traceparent` is a W3C trace context or "".
    - `prompt` is shared by requests with the same tokens and salt.
    - `pooled_width` is the vector size for `params.pooling`.
    - `adapter` is the digest of the LoRA weights, "" for the base model. `adapter_name` is the name they had.
    - `sink`: see `Sink`.
    - `continues` marks a later step of an admitted answer, which skips admission. The first step reserves capacity for
      up to `num_at_once` concurrent steps.
    - `trail` records the steps of the request in the dispatcher; None to record nothing.
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
    adapter_name: str = ""
    sink: Sink | None = None
    continues: bool = False
    num_at_once: int = 1
    trail: Trail | None = None

    @property
    def is_representative(self) -> bool:
        """Whether the model chooses the length of the answer, so that it predicts the lengths of others."""
        return not self.continues and self.params.max_tokens > 1

    @property
    def lane(self) -> str:
        """See `RequestClass.lane`."""
        return self.request_class if self.share else NO_LANE

    @property
    def weight(self) -> float:
        """Weight of the lane in fair sharing."""
        return self.share or COMMON_SHARE


class Caller(msgspec.Struct, frozen=True):
    """The client as known from the HTTP headers: the name of its API key, and the classes that its request may have.

    A request that does not name a class has the first of them, or `default` if there are none.
    """

    key: str = ""
    classes: tuple[RequestClass, ...] = ()


ANYONE = Caller()


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Speculative decoding statistics. `accepted[i]` is the number of drafts whose token `i` was accepted."""

    num_drafts: int = 0
    num_tokens: int = 0
    accepted: tuple[int, ...] = ()

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)


class Prediction(msgspec.Struct, frozen=True, gc=False):
    """Times predicted when a request was admitted, in seconds: to the first token, and per later token.

    0 if unknown, or if its class has no such goal.
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0


class RequestTimeline(msgspec.Struct, frozen=True, gc=False):
    """Latency breakdown of a request in the worker pools. Durations are in seconds, 0 for phases that did not happen.

        dispatched ─ queue_s ─ prefill_s ─ first token ─ decode_s ─ last token
                                 └ grant_wait_s, transfer_s; only exposed_transfer_s of it delayed the second token

    `num_attempts` is 1 without failures. `prefill_worker` is "" for a local prefill, `decode_worker` is "" if none was
    needed. `forecast` belongs to the last placement, `admitted` to the admission. `transfer_bytes` is the size of the
    KV transfer to the decode worker. `drafts` is the total over all decode workers.
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
    admitted: Prediction = Prediction()
    transfer_bytes: int = 0
    drafts: DraftCounts = DraftCounts()


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """The next tokens of a sequence. Tokens arrive in order and exactly once, whatever happens to the workers.

    `logprobs` has one entry per token if `params.logprobs >= 0`, else it is empty. `finish_reason` is "" except in the
    last event, where it is "stop", "length", or "abort" if an operator ended it. The last token of a "stop" event is
    the end token, which is not text.
    `num_cached_tokens` is the number of prompt tokens found in a prefix cache. `timeline` is complete in the last
    event. `prompt_logprobs`, in the first event, covers all prompt tokens except the first. `pooled`, in the only event
    of a request with `params.pooling`, is the prompt's vector: float32, little-endian. `weight_version` names the
    weights that computed the answer; "" for those with which the workers were started.
    """

    token_ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str = ""
    num_cached_tokens: int = 0
    timeline: RequestTimeline | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""
    weight_version: str = ""


class TokenSource(Protocol):
    """Source of token streams. Not thread-safe: use only from its event loop."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yield the tokens of one request. Ends after the event with a finish reason.

        Closing the generator early aborts the request on every worker.

        Raises Overloaded or Unavailable before the first event if the request is not admitted, DeadlineExceeded when
        its deadline passes, InvalidRequest when a worker rejects it permanently.
        """
        ...


class GenerationClient(TokenSource, Protocol):
    """Token source over the worker pools, with an early capacity check."""

    def check_room(self, is_longer: Callable[[int], bool], caller: Caller = ANYONE) -> None:
        """Raise Overloaded or Unavailable if `generate` would reject any request of this caller now.

        Called before the body is parsed. `is_longer(n)` returns whether the prompt certainly has more than `n` tokens.
        A request that passes may still be rejected by `generate`.
        """
        ...

    @property
    def ready(self) -> tuple[bool, str]:
        """Whether requests would be served now, and if not, the reason in one line."""
        ...

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and output that all ready workers accept; 0 if unknown."""
        ...
