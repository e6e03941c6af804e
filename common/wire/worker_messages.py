"""Messages from a worker to a router."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from common.latency import Links, StepModel
from common.wire.adapter_messages import MAX_ADAPTERS, AdapterState
from common.wire.message_fields import (
    MAX_TOKENS,
    UNSTATED_PROTOCOL_VERSION,
    AddressOrNone,
    Count,
    Finite,
    Message,
    Name,
    Protocol,
    Reason,
    Seconds,
    Text,
    since,
)
from common.wire.sampling_params import TokenLogprobs
from common.wire.serving_messages import ServingState, WeightsRequest, WeightVersion

MAX_OUTPUTS = 16_384
"""Maximum number of sequences in a message: more than any batch has."""
MAX_POOLED_VALUES = 65_536
"""Maximum size of a pooled vector: more than any hidden state has."""
SHORT_HASH_BYTES = 8
"""Size of shortened block hashes for routers. Collisions cause a wrong estimate of hits, not a wrong answer."""
MAX_SHORT_HASHES = 8192
"""Maximum number in one message: 64 KiB."""
MAX_LAYOUT = 32
"""Maximum number of settings in `WorkerHello.layout`."""
ShortHashes = Annotated[bytes, Meta(max_length=SHORT_HASH_BYTES * MAX_SHORT_HASHES)]
"""Concatenated first bytes of block hashes."""


class WorkerHello(Message, frozen=True, kw_only=True, tag=20):
    """Identity and model of a worker. `epoch` differs after every start.

    - Only workers with equal `fingerprint` are paired. It covers model, weights, dtype and KV layout.
    - An answer that has begun continues only on workers with equal `weights`, which covers the model and its weight
      format.
    - `lost_router`: the worker has dropped the receiving router's requests, because the router was silent for too long.
      This includes the case that the worker itself was suspended. The router must say hello again.
    - `max_step_tokens`: maximum prompt tokens per step.
    - `home` is the role with which the process was started, `role` its current one. With `changes_role`, a router may
      change it, which begins a new epoch.
    - `max_loras`: number of adapter slots.
    - `lend_address`: where it lends cached blocks to workers of equal `fingerprint`; "" if it neither lends nor pulls.
    - `window`: maximum context of all layers in tokens, so that sequences own no earlier blocks; 0 for no limit.
    - The worker speaks the protocol versions from `oldest_protocol` to `protocol`.
    - `layout`: names and values of settings that `fingerprint` covers, to explain why workers are not paired.
    - `memory_bytes`: size of weights and KV cache; 0 if unknown.
    - `weight_version`: name of the weights after an update; "" for those with which the worker was started.
    - `hands_over`: whether `HandOver` moves running requests with their KV. Otherwise, it fails them.
    """

    worker_id: Name
    role: Name
    epoch: Count
    fingerprint: Name
    model: Name
    block_size: Count
    num_blocks: Count
    max_model_len: Count
    max_num_seqs: Count
    kv_address: Annotated[str, Meta(max_length=256)]
    version: Text
    lost_router: bool = False
    weights: Annotated[str, Meta(max_length=256)]
    max_step_tokens: Count
    home: Text
    changes_role: bool = False
    max_loras: Count = 0
    lend_address: AddressOrNone = ""
    window: Count = 0
    oldest_protocol: Protocol = UNSTATED_PROTOCOL_VERSION
    protocol: Protocol = UNSTATED_PROTOCOL_VERSION
    layout: Annotated[tuple[tuple[Name, Text], ...], Meta(max_length=MAX_LAYOUT), since(13)] = ()
    memory_bytes: Annotated[Count, since(13)] = 0
    weight_version: Annotated[WeightVersion, since(13)] = ""
    hands_over: Annotated[bool, since(13)] = True


class WorkerHeartbeat(Message, frozen=True, tag=21):
    """Load and liveness of one worker, sent several times a second.

    - `step` increases with the iterations of the engine loop, busy or not. An iteration longer than `turn_limit_s` is
      stuck.
    - `full_tokens_per_s` is the rate of full steps, 0 before the first. `tokens_per_s` is that of all recent steps.
    - `step_model` is fitted to the worker's steps. It predicts `waiting_s` for the prompts queued here.
    - `num_context_tokens` is the total context of the running sequences.
    - All counts include the receiving router's requests up to `serial`.
    - `block_sequence` is the number of the last `BlockEvents`; 0 if the prefix cache has always been empty.
    - `batch_cap` and `step_tokens` are the current limits of the batch size and of prompt tokens per step; 0: as in the
      hello.
    - `planner` is the id of the router that may change roles: the lowest of those that announced it; "" if none did.
    - `links` is fitted to KV transfers to this worker, reads of its tier, and its pulls from peers.
    - `adapters` are all adapters of which it was notified.
    - `serving` is the state of the last `SetServing`; None before the first.
    """

    worker_id: Name
    epoch: Count
    step: Count
    ready: bool
    draining: bool
    num_running: Count
    num_waiting: Count
    num_transferring: Count
    num_waiting_tokens: Count
    num_free_blocks: Count
    num_cached_blocks: Count
    num_owned_blocks: Count
    tokens_per_s: Finite = 0.0
    step_time_s: Finite = 0.0
    full_tokens_per_s: Finite = 0.0
    turn_limit_s: Seconds = 60.0
    waiting_s: Seconds = 0.0
    num_context_tokens: Count = 0
    step_model: StepModel = StepModel()
    serial: Count = 0
    block_sequence: Count = 0
    batch_cap: Count = 0
    step_tokens: Count = 0
    planner: Text = ""
    links: Links = Links()
    adapters: Annotated[tuple[AdapterState, ...], Meta(max_length=MAX_ADAPTERS)] = ()
    serving: Annotated[ServingState | None, since(13)] = None


class BlockEvents(Message, frozen=True, tag=25):
    """Changes of a worker's prefix cache since the last events, sent to every router before a heartbeat.

    `sequence` increases by one per event of an epoch: after a gap the router requests a snapshot. With `cleared`, the
    worker dropped all blocks before it `stored` these. `stored` and `removed` are disjoint. `below` are those blocks,
    removed or in neither list, that are in a tier below the prefix cache.
    """

    epoch: Count
    sequence: Count
    stored: ShortHashes = b""
    removed: ShortHashes = b""
    cleared: bool = False
    below: ShortHashes = b""


class BlockSnapshot(Message, frozen=True, tag=26):
    """One of `num_pieces` pieces of a snapshot of a worker's prefix cache, sent in order from piece 0.

    It includes all events up to `sequence`, and possibly some later ones, which are harmless when applied again.
    `below` are blocks that are only in a tier below the prefix cache.
    """

    epoch: Count
    sequence: Count
    piece: Count
    num_pieces: Count
    hashes: ShortHashes = b""
    below: ShortHashes = b""


class Timeline(msgspec.Struct, frozen=True, array_like=True):
    """Latency breakdown of one request on one worker, in seconds. A phase that did not happen is 0.

    `transfer_bytes` is the size of its KV on the wire. Tokens were drafted `num_drafts` times, `num_draft_tokens` in
    total; `accepted_places[i]` drafts had their token `i` accepted.
    """

    queue_s: Finite = 0.0
    prefill_s: Finite = 0.0
    grant_wait_s: Finite = 0.0
    transfer_s: Finite = 0.0
    exposed_transfer_s: Finite = 0.0
    decode_s: Finite = 0.0
    num_preemptions: Count = 0
    transfer_bytes: Count = 0
    num_drafts: Count = 0
    num_draft_tokens: Count = 0
    accepted_places: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request. `index` is the output position of the first one.

    The first delta of a decode worker repeats the prefill worker's first token, so that the router gets all tokens
    whichever message arrives first. The router drops duplicates. `finish_reason` is "", "stop", "length", "abort", or
    "moved" if the sequence continues at the target of a hand-over. A delta without tokens and reason reports progress,
    about once a second. `logprobs` is empty or as long as `token_ids`.
    """

    request_id: Name
    attempt: Count
    index: Count
    token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_TOKENS)]
    finish_reason: Reason = ""
    num_cached_tokens: Count = 0
    logprobs: Annotated[tuple[TokenLogprobs, ...], Meta(max_length=MAX_TOKENS)] = ()
    timeline: Timeline | None = None


class TokenOutput(Message, frozen=True, tag=22):
    """Tokens of one engine step, for each router that has requests in the batch."""

    worker_id: Name
    epoch: Count
    outputs: Annotated[tuple[TokenDelta, ...], Meta(max_length=MAX_OUTPUTS)]


class PromptLogprobs(Message, frozen=True, tag=24):
    """Log-probabilities of the prompt's tokens from position `start` on.

    They arrive in order and before the first token, from the one worker that computes the prompt of a request with
    `params.prompt_logprobs`. Position 0 has none. A new attempt starts from the beginning.
    """

    worker_id: Name
    epoch: Count
    request_id: Name
    attempt: Count
    start: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    logprobs: Annotated[tuple[TokenLogprobs, ...], Meta(min_length=1, max_length=MAX_OUTPUTS)]


class PooledOutput(Message, frozen=True, tag=27):
    """Pooled hidden states of a prompt, for a request with `params.pooling`: float32, little-endian.

    Sent before the `TokenDelta` that ends the request, which has no token.
    """

    worker_id: Name
    epoch: Count
    request_id: Name
    attempt: Count
    values: Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_POOLED_VALUES)]


PromptResult = PromptLogprobs | PooledOutput
"""Results of a prompt in addition to tokens."""


class RequestFailed(Message, frozen=True, tag=23):
    """The worker has failed this request and owns nothing of it any more. `retryable`: another worker may succeed.

    `phase` is one of queue, grammar, grant, prefill, sampling, transfer, decode, handover.
    """

    worker_id: Name
    request_id: Name
    attempt: Count
    phase: Name
    message: Text
    retryable: bool


ToRouter = (
    WorkerHello
    | WorkerHeartbeat
    | TokenOutput
    | PromptLogprobs
    | PooledOutput
    | RequestFailed
    | BlockEvents
    | BlockSnapshot
    | WeightsRequest
)
