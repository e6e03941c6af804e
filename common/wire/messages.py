"""Every message that crosses a process border, grouped by receiver, in one closed union.

`codec.py` packs them. Each message that moves memory says who owns the blocks before and after it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from common.latency.link_model import Links
from common.latency.step_model import StepModel
from common.wire.message_fields import (
    MAX_TOKENS,
    Address,
    Count,
    Finite,
    Name,
    Priority,
    Reason,
    Role,
    Seconds,
    Text,
    TokenBytes,
)
from common.wire.sampling_params import SamplingParams, TokenLogprobs

PROTOCOL_VERSION = 8
MAX_BLOCKS_PER_FRAME = 256
MAX_OUTPUTS = 16_384
"""More sequences than any batch has."""
NONCE_BYTES = 16
SHORT_HASH_BYTES = 8
"""Block hashes are shortened for routers: two that collide make a wrong estimate of hits, never a wrong answer."""
MAX_SHORT_HASHES = 8192
"""In one message: 64 KiB."""
ShortHashes = Annotated[bytes, Meta(max_length=SHORT_HASH_BYTES * MAX_SHORT_HASHES)]
"""The first bytes of block hashes, one after the other."""


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Base of the union: immutable, positional on the wire, tagged by number."""


# ---------------------------------------------------------------- router -> worker


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


class PrefillRequest(Message, frozen=True, tag=3):
    """Compute this prompt. The worker owns the blocks it allocates until `KVAck`, abort or lease expiry.

    `decode` is None when no worker needs the KV, as for an answer of one token. The last `num_output_tokens` of the
    prompt are output of an earlier attempt. `deadline_s` is what is left of the request's time when sent, `ttft_s` what
    is left until its first token is due, `tpot_s` what each later token may take; 0 for no goal. Requests of higher
    `priority` have their turn first. The worker acknowledges `serial` in its heartbeats.
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


class DecodeRequest(Message, frozen=True, tag=4):
    """Reserve for, and then decode, this prompt. Blocks are allocated at `KVOpen`, owned by the request from then on.

    `prefill_worker` names the worker that sends the KV; empty: prefill locally. In a hand-over it is another decode
    worker, which decodes on meanwhile, by at most `num_reserved_tokens` beyond this prompt: the worker allocates blocks
    for these too until the hand-over is done. The last four fields are as in `PrefillRequest`.
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


# ---------------------------------------------------------------- worker -> router


class WorkerHello(Message, frozen=True, tag=20):
    """Identity and model of the worker. `epoch` differs after every start: a restarted worker is a new worker.

    Only workers with equal `fingerprint` are paired: it covers protocol, model, weights, dtype and KV layout. An answer
    that has begun goes on only on workers with equal `weights`, which covers the model and how its weights are kept.
    `lost_router`: the receiving router was silent for too long, which also a frozen worker finds when it wakes up. Its
    requests here are gone, and it must say hello again. `max_step_tokens` prompt tokens are computed in one step.
    `home` is the role that the process was started with, `role` the one that it has now; with `changes_role` a router
    may change it, which begins a new epoch.
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
    kv_address: Annotated[str, Meta(max_length=256)] = ""
    version: Text = ""
    lost_router: bool = False
    weights: Annotated[str, Meta(max_length=256)] = ""
    max_step_tokens: Count = 0
    home: Text = ""
    changes_role: bool = False


class WorkerHeartbeat(Message, frozen=True, tag=21):
    """Load and life of one worker, a few times a second. `step` grows while the engine loop turns, busy or not.

    A turn that takes longer than `turn_limit_s` must be stuck. `full_tokens_per_s` is the rate of full steps, 0 before
    the first; `tokens_per_s` is that of all recent steps. `step_model` is fitted to the worker's steps; by it, the
    prompts that wait here take `waiting_s` seconds. The running sequences have `num_context_tokens` tokens. All of it
    counts the requests of the receiving router with a serial of at most `serial`. The last `BlockEvents` had the number
    `block_sequence`; 0: the prefix cache has always been empty. At present `batch_cap` requests run side by side at
    most, and a step computes at most `step_tokens` prompt tokens; 0: as the hello says. `planner` is the id of the
    router that may change roles: the least of those that said they would; "" if none did. `links` is fitted to the KV
    transfers that came to this worker.
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


class BlockEvents(Message, frozen=True, tag=25):
    """What changed in a worker's prefix cache since the events before, sent to every router before a heartbeat.

    `sequence` grows by one from event to event of a worker's life: after a gap the router asks for a snapshot.
    With `cleared` the worker forgot all blocks before it `stored` these. No block is in both lists.
    """

    epoch: Count
    sequence: Count
    stored: ShortHashes = b""
    removed: ShortHashes = b""
    cleared: bool = False


class BlockSnapshot(Message, frozen=True, tag=26):
    """One of `num_pieces` pieces of all that is in a worker's prefix cache, in order, from piece 0.

    It holds all events up to `sequence`, and maybe some of the next ones, which do no harm when they come again.
    """

    epoch: Count
    sequence: Count
    piece: Count
    num_pieces: Count
    hashes: ShortHashes = b""


class Timeline(msgspec.Struct, frozen=True, array_like=True):
    """Durations of one request on one worker, in seconds; a phase that did not happen is 0."""

    queue_s: Finite = 0.0
    prefill_s: Finite = 0.0
    grant_wait_s: Finite = 0.0
    transfer_s: Finite = 0.0
    exposed_transfer_s: Finite = 0.0
    decode_s: Finite = 0.0
    num_preemptions: Count = 0


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


# ---------------------------------------------------------------- prefill worker (P) -> decode worker (D)
# In a hand-over P is a decode worker too.


class KVMemory(msgspec.Struct, frozen=True, array_like=True):
    """Where a process of the same host finds P's blocks: file descriptor `fd` of process `pid`.

    The memory holds `num_bytes` of blocks and then the secret `nonce`: D trusts the memory once it has read the same
    nonce there.
    """

    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    fd: Annotated[int, Meta(ge=0, lt=2**31)]
    num_bytes: Annotated[int, Meta(ge=1, le=2**50)]
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class KVOpen(Message, frozen=True, tag=40):
    """P announces the KV of a prompt. P owns its blocks; D owns none yet. `sent_at` is P's clock, in seconds.

    With `memory` P offers that D copies the blocks itself, which works on the same host only. With `quantised` P
    offers frames of 8-bit numbers, in the format of `kernels.blocks`.
    """

    request_id: Name
    attempt: Count
    worker_id: Name
    epoch: Count
    decode_epoch: Count
    fingerprint: Name
    num_blocks: Annotated[int, Meta(ge=1, le=2**31)]
    sent_at: Seconds = 0.0
    memory: KVMemory | None = None
    quantised: bool = False


class KVBlocks(Message, frozen=True, tag=41):
    """Header of the raw frames that follow it in the same multipart message, one frame a block.

    They are the prompt's blocks from `first_block` on, as many as there are checksums, each xxh3-64 of one frame.
    P and D go on owning their own copies. With `sources` no frames follow: these are the numbers of P's blocks in
    shared memory, one for each checksum, and P holds them until `KVAck`. `token` is the grant's.
    """

    request_id: Name
    attempt: Count
    first_block: Count
    checksums: Annotated[tuple[int, ...], Meta(min_length=1, max_length=MAX_BLOCKS_PER_FRAME)]
    sources: Annotated[tuple[Count, ...], Meta(max_length=MAX_BLOCKS_PER_FRAME)] = ()
    token: Count = 0


class KVDone(Message, frozen=True, tag=42):
    """All granted blocks were sent and the first token is sampled. P still holds its blocks, until `KVAck`.

    `computed_at` is when the prompt was computed, by P's clock: D finds the difference of the clocks by
    `KVOpen.sent_at`. `token` is the grant's.

    In a hand-over `num_blocks` says how many of the announced blocks were sent in the end, and `more_tokens` are the
    tokens behind `first_token`, each with its logprobs if the request wants any. P sent the KV of all but the last.
    """

    request_id: Name
    attempt: Count
    first_token: Count
    logprobs: TokenLogprobs | None = None
    num_cached_tokens: Count = 0
    prefill_s: Finite = 0.0
    computed_at: Seconds = 0.0
    num_blocks: Count = 0
    more_tokens: TokenBytes = b""
    more_logprobs: Annotated[tuple[TokenLogprobs, ...], Meta(max_length=MAX_TOKENS)] = ()
    token: Count = 0


# ---------------------------------------------------------------- decode worker -> prefill worker


class KVGrant(Message, frozen=True, tag=43):
    """D owns blocks for all that was announced and has the KV of those before `first_block`: ship from there on.

    `first_block` equal to the prompt's number of blocks means that nothing needs shipping. `shared`: D can read the
    memory that P offered, so P sends numbers of blocks instead of frames. `quantised`: D takes the frames of 8-bit
    numbers that P offered; never both. `token` is a secret of this grant: D accepts `KVBlocks` and `KVDone` that repeat
    it, over any connection.
    """

    request_id: Name
    attempt: Count
    first_block: Count
    shared: bool = False
    token: Count = 0
    quantised: bool = False


class KVWait(Message, frozen=True, tag=44):
    """D has the request, but no room for it yet, and owns nothing: P's lease is renewed.

    In a hand-over D also answers a repeated `KVOpen` like this: all blocks that were sent before it have arrived.
    """

    request_id: Name
    attempt: Count


class KVAck(Message, frozen=True, tag=45):
    """D has all blocks, received and verified or computed itself: P's hold ends, even while P computes."""

    request_id: Name
    attempt: Count


class KVFailed(Message, frozen=True, tag=46):
    """Either side gave the transfer up: the sender of this owns nothing of it, and the receiver releases its blocks."""

    request_id: Name
    attempt: Count
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
)
ToRouter = WorkerHello | WorkerHeartbeat | TokenOutput | PromptLogprobs | RequestFailed | BlockEvents | BlockSnapshot
ToDecode = KVOpen | KVBlocks | KVDone | KVFailed
ToPrefill = KVGrant | KVWait | KVAck | KVFailed
AnyMessage = ToWorker | ToRouter | ToDecode | ToPrefill
