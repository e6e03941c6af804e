"""The messages that a router sends to a worker."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from common.wire.adapter_messages import Digest, SetAdapter
from common.wire.message_fields import (
    PROTOCOL_VERSION,
    Address,
    Count,
    Message,
    Name,
    Priority,
    Role,
    Seconds,
    Text,
    TokenBytes,
)
from common.wire.sampling_params import SamplingParams


class RouterHello(Message, frozen=True, tag=1):
    """The first message on a connection names the router. The worker answers `WorkerHello`.

    `changes_roles`: the router changes the roles of workers, if it is the `WorkerHeartbeat.planner`.
    """

    router_id: Name
    epoch: Count
    protocol: Count = PROTOCOL_VERSION
    changes_roles: bool = False


class RouterHeartbeat(Message, frozen=True, tag=2):
    """The router is alive. A worker that hears nothing for too long aborts that router's requests."""

    router_id: Name


class KVTarget(msgspec.Struct, frozen=True, array_like=True):
    """The decode worker a prefill worker must ship to, and the boot epoch it must still have."""

    worker_id: Name
    epoch: Count
    address: Address


class KVPeer(msgspec.Struct, frozen=True, array_like=True):
    """A worker that lends, at `address` and in boot epoch `epoch`, and of whose cache the prompt's first `num_blocks`
    blocks were reported. They may be gone by now.
    """

    worker_id: Name
    epoch: Count
    address: Address
    num_blocks: Count


class PrefillRequest(Message, frozen=True, tag=3):
    """Compute this prompt. The worker owns the blocks it allocates until `KVAck`, abort or lease expiry.

    `decode` is None when no worker needs the KV, as for an answer of one token. The last `num_output_tokens` of the
    prompt are output of an earlier attempt. `deadline_s` is what is left of the request's time when sent, `ttft_s` what
    is left until its first token is due, `tpot_s` what each later token may take; 0 for no goal. Requests of higher
    `priority` have their turn first. The worker acknowledges `serial` in its heartbeats. `adapter` is the digest of the
    one that the prompt uses; "": the base model. The worker may take blocks of the prompt from `peer` instead of
    computing them.
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
    """Reserve for, and then decode, this prompt. Blocks are allocated at `KVOpen`, owned by the request from then on.

    `prefill_worker` names the worker that sends the KV; empty: prefill locally. In a hand-over it is another decode
    worker, which decodes on meanwhile, by at most `num_reserved_tokens` beyond this prompt: the worker allocates blocks
    for these too until the hand-over is done. The last five fields are as in `PrefillRequest`.
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
    """Forget this request (every attempt up to and including this one) and release its blocks at once."""

    request_id: Name
    attempt: Count


class ResetPrefixCache(Message, frozen=True, tag=6):
    """Forget all cached (unowned) blocks."""

    request_id: Name


class HandOver(Message, frozen=True, tag=7):
    """Copy the KV of this running sequence to decode worker `target` while decoding it, then leave it to that worker.

    The sender of the KV owns its blocks until `KVAck`. It decodes under `attempt`; `new_attempt` is that of the
    `DecodeRequest` at the target, whose prompt ends with the first `num_output_tokens` output tokens and has room for
    `num_reserved_tokens` more. In the end it finishes `attempt` with the reason "moved", or fails `new_attempt` and
    decodes on.
    """

    request_id: Name
    attempt: Count
    new_attempt: Count
    target: KVTarget
    num_output_tokens: Count
    num_reserved_tokens: Count


class BlockSnapshotRequest(Message, frozen=True, tag=8):
    """Tell all blocks of the prefix cache with the next heartbeat: the router has missed `BlockEvents`, or is new."""

    epoch: Count


class ChangeRole(Message, frozen=True, tag=9):
    """Drain, and come back in `role`: the worker answers with a `WorkerHello` of a new epoch, and owns no block then.

    A worker that is not drained in time, or cannot, stays what it is, and its heartbeats stop saying that it drains. It
    ignores an order for the role that it has, and a second one while it carries out the first.
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
)
