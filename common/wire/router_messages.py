"""Messages from a router to a worker."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from common.wire.adapter_messages import Digest, SetAdapter
from common.wire.message_fields import (
    OLDEST_PROTOCOL_VERSION,
    Address,
    Count,
    Message,
    Name,
    Priority,
    Protocol,
    Role,
    Seconds,
    Text,
    TokenBytes,
)
from common.wire.sampling_params import SamplingParams
from common.wire.serving_messages import SetServing, WeightsPart


class RouterHello(Message, frozen=True, tag=1):
    """First message on a connection, with the router's identity. The worker replies with `WorkerHello`.

    The router speaks the protocol versions from `oldest_protocol` to `protocol`, or only the first if `protocol` is 0.
    `changes_roles`: the router changes roles of workers if it is the `WorkerHeartbeat.planner`.
    """

    router_id: Name
    epoch: Count
    oldest_protocol: Count = OLDEST_PROTOCOL_VERSION
    changes_roles: bool = False
    protocol: Protocol = 0


class RouterHeartbeat(Message, frozen=True, tag=2):
    """The router is alive. A worker that receives nothing for too long aborts the router's requests."""

    router_id: Name


class KVTarget(msgspec.Struct, frozen=True, array_like=True):
    """The decode worker to which a prefill worker sends KV, with the epoch it must have."""

    worker_id: Name
    epoch: Count
    address: Address


class KVPeer(msgspec.Struct, frozen=True, array_like=True):
    """A lender at `address` with the epoch it must have. It reported the prompt's first `num_blocks` blocks as cached.

    They may have been evicted since.
    """

    worker_id: Name
    epoch: Count
    address: Address
    num_blocks: Count


class PrefillRequest(Message, frozen=True, tag=3):
    """Compute this prompt. The worker owns its blocks until `KVAck`, abort or lease expiry.

    `decode` is None if no worker needs the KV, as for an answer of one token. The last `num_output_tokens` of the
    prompt are output of an earlier attempt. `deadline_s` and `ttft_s` are the remaining times until the request's
    deadline and until its first token is due; `tpot_s` is the goal for each later token; 0 for no goal. Higher
    `priority` is served first. The worker acknowledges `serial` in its heartbeats. `adapter` is the adapter's digest,
    "" for the base model. The worker may pull blocks of the prompt from `peer` instead of computing them.
    """

    request_id: Name
    attempt: Count
    prompt: TokenBytes
    params: SamplingParams
    decode: KVTarget | None = None
    num_output_tokens: Count = 0
    cache_salt: Text = ""
    deadline_s: Seconds = 600.0
    traceparent: Text = ""
    ttft_s: Seconds = 0.0
    serial: Count = 0
    tpot_s: Seconds = 0.0
    priority: Priority = 0
    adapter: Digest = ""
    peer: KVPeer | None = None


class DecodeRequest(Message, frozen=True, tag=4):
    """Reserve capacity for this prompt, then decode it. Blocks are allocated at `KVOpen` and owned by the request.

    `prefill_worker` sends the KV; if empty, the worker computes the prompt. In a hand-over it is another decode worker,
    which decodes up to `num_reserved_tokens` more tokens in the meantime; blocks for these are allocated until the
    hand-over completes. The last six fields are as in `PrefillRequest`.
    """

    request_id: Name
    attempt: Count
    prompt: TokenBytes
    params: SamplingParams
    prefill_worker: Annotated[str, Meta(max_length=256)] = ""
    num_output_tokens: Count = 0
    cache_salt: Text = ""
    deadline_s: Seconds = 600.0
    traceparent: Text = ""
    num_reserved_tokens: Count = 0
    ttft_s: Seconds = 0.0
    serial: Count = 0
    tpot_s: Seconds = 0.0
    priority: Priority = 0
    adapter: Digest = ""
    peer: KVPeer | None = None


class AbortRequest(Message, frozen=True, tag=5):
    """Drop all attempts of this request up to this one, and release its blocks immediately."""

    request_id: Name
    attempt: Count


class ResetPrefixCache(Message, frozen=True, tag=6):
    """Drop all cached blocks that are not owned."""

    request_id: Name


class HandOver(Message, frozen=True, tag=7):
    """Copy the KV of this running sequence to decode worker `target` while decoding it, then hand it over.

    The sender owns its blocks until `KVAck`. It decodes under `attempt`; `new_attempt` is that of the `DecodeRequest`
    at the target, whose prompt ends with the first `num_output_tokens` output tokens and has capacity for
    `num_reserved_tokens` more. At the end it finishes `attempt` with reason "moved", or fails `new_attempt` and
    continues to decode.
    """

    request_id: Name
    attempt: Count
    new_attempt: Count
    target: KVTarget
    num_output_tokens: Count
    num_reserved_tokens: Count


class BlockSnapshotRequest(Message, frozen=True, tag=8):
    """Report all blocks of the prefix cache with the next heartbeat: the router missed `BlockEvents` or is new."""

    epoch: Count


class ChangeRole(Message, frozen=True, tag=9):
    """Drain and return in `role`. The worker replies with a `WorkerHello` with a new epoch, and owns no blocks then.

    A worker that cannot drain, or not in time, keeps its role and stops reporting that it drains. It ignores an order
    for its current role, and further orders while one is in progress.
    """

    role: Role
    reason: Text


ToWorker = (
    RouterHello
    | RouterHeartbeat
    | PrefillRequest
    | DecodeRequest
    | AbortRequest
    | ResetPrefixCache
    | HandOver
    | BlockSnapshotRequest
    | ChangeRole
    | SetAdapter
    | SetServing
    | WeightsPart
)
