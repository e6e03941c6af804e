"""The messages that a worker sends to a router."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from common.latency import Links, StepModel
from common.wire.adapter_messages import MAX_ADAPTERS, AdapterState
from common.wire.message_fields import MAX_TOKENS, AddressOrNone, Count, Finite, Message, Name, Reason, Seconds, Text
from common.wire.sampling_params import TokenLogprobs

MAX_OUTPUTS = 16_384
"""More sequences than any batch has."""
MAX_POOLED_VALUES = 65_536
"""Numbers in a pooled output: more than any model's hidden state has."""
SHORT_HASH_BYTES = 8
"""Block hashes are shortened for routers: two that collide make a wrong estimate of hits, never a wrong answer."""
MAX_SHORT_HASHES = 8192
"""In one message: 64 KiB."""
ShortHashes = Annotated[bytes, Meta(max_length=SHORT_HASH_BYTES * MAX_SHORT_HASHES)]
"""The first bytes of block hashes, one after the other."""


class WorkerHello(Message, frozen=True, kw_only=True, tag=20):
    """Identity and model of the worker. `epoch` differs after every start: a restarted worker is a new worker.

    Only workers with equal `fingerprint` are paired: it covers protocol, model, weights, dtype and KV layout. An answer
    that has begun goes on only on workers with equal `weights`, which covers the model and how its weights are kept.
    `lost_router`: the receiving router was silent for too long, which also a frozen worker finds when it wakes up. Its
    requests here are gone, and it must say hello again. `max_step_tokens` prompt tokens are computed in one step.
    `home` is the role that the process was started with, `role` the one that it has now; with `changes_role` a router
    may change it, which begins a new epoch. The worker has places for `max_loras` adapters. At `lend_address` it lends
    cached blocks to workers of equal `fingerprint`; "": it does not, and takes none. No layer of the model looks back
    further than `window` tokens, 0: some do; so a sequence owns no blocks beyond.
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


class WorkerHeartbeat(Message, frozen=True, tag=21):
    """Load and life of one worker, a few times a second. `step` grows while the engine loop turns, busy or not.

    A turn that takes longer than `turn_limit_s` must be stuck. `full_tokens_per_s` is the rate of full steps, 0 before
    the first; `tokens_per_s` is that of all recent steps. `step_model` is fitted to the worker's steps; by it, the
    prompts that wait here take `waiting_s` seconds. The running sequences have `num_context_tokens` tokens. All of it
    counts the requests of the receiving router with a serial of at most `serial`. The last `BlockEvents` had the number
    `block_sequence`; 0: the prefix cache has always been empty. At present `batch_cap` requests run side by side at
    most, and a step computes at most `step_tokens` prompt tokens; 0: as the hello says. `planner` is the id of the
    router that may change roles: the least of those that said they would; "" if none did. `links` is fitted to the KV
    transfers that came to this worker, to reads of its tier, and to its pulls from peers. `adapters` are all that it
    was told of.
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


class BlockEvents(Message, frozen=True, tag=25):
    """What changed in a worker's prefix cache since the events before, sent to every router before a heartbeat.

    `sequence` grows by one from event to event of a worker's life: after a gap the router asks for a snapshot.
    With `cleared` the worker forgot all blocks before it `stored` these. No block is in both lists. Of the `removed`
    blocks, and of those that were in neither, `below` are in a tier below the prefix cache.
    """

    epoch: Count
    sequence: Count
    stored: ShortHashes = b""
    removed: ShortHashes = b""
    cleared: bool = False
    below: ShortHashes = b""


class BlockSnapshot(Message, frozen=True, tag=26):
    """One of `num_pieces` pieces of all that is in a worker's prefix cache, in order, from piece 0.

    It holds all events up to `sequence`, and maybe some of the next ones, which do no harm when they come again. Blocks
    that are only in a tier below the prefix cache are `below`.
    """

    epoch: Count
    sequence: Count
    piece: Count
    num_pieces: Count
    hashes: ShortHashes = b""
    below: ShortHashes = b""


class Timeline(msgspec.Struct, frozen=True, array_like=True):
    """Durations of one request on one worker, in seconds; a phase that did not happen is 0.

    Its KV came in `transfer_bytes` bytes, as they crossed. Tokens were drafted for it `num_drafts` times,
    `num_draft_tokens` in all; `accepted_places[i]` of the drafts had an accepted token in place i.
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
    """New tokens of one request. `index` is the output position of the first (0 is the first token ever sampled).

    The first delta of a decode worker repeats the prefill worker's first token, so that the router has every token
    whichever message arrives first. The router drops tokens that it has.
    `finish_reason` is "", "stop", "length", "abort", or "moved" when the sequence goes on at the target of a hand-over.
    A delta without tokens and reason reports progress of a request that has no new token, about once a second.
    `logprobs` is empty or as long as `token_ids`.
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
    """One message an engine step to each router that has requests in the batch."""

    worker_id: Name
    epoch: Count
    outputs: Annotated[tuple[TokenDelta, ...], Meta(max_length=MAX_OUTPUTS)]


class PromptLogprobs(Message, frozen=True, tag=24):
    """Log-probabilities of the prompt's tokens from position `start` on, each given the tokens before it.

    They come in order, all before the first token: one worker computes the prompt of a request with
    `params.prompt_logprobs`, and samples. Position 0 has none. A new attempt starts from the beginning.
    """

    worker_id: Name
    epoch: Count
    request_id: Name
    attempt: Count
    start: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    logprobs: Annotated[tuple[TokenLogprobs, ...], Meta(min_length=1, max_length=MAX_OUTPUTS)]


class PooledOutput(Message, frozen=True, tag=27):
    """A prompt's hidden states as one vector, for a request with `params.pooling`: float32, little-endian.

    It comes before the `TokenDelta` that ends the request, which has no token.
    """

    worker_id: Name
    epoch: Count
    request_id: Name
    attempt: Count
    values: Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_POOLED_VALUES)]


PromptResult = PromptLogprobs | PooledOutput
"""What a worker tells of a prompt beside tokens."""


class RequestFailed(Message, frozen=True, tag=23):
    """The worker gave this request up and owns nothing of it any more. `retryable`: another worker may succeed.

    `phase` is one of queue, grammar, grant, prefill, transfer, decode, handover.
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
)
