"""Every message that crosses a process border, grouped by who receives it, in one closed union.

`codec.py` makes bytes of them. Each message that moves memory says who owns the blocks before and after it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from common.wire.message_fields import (
    MAX_TOKENS,
    Address,
    Count,
    Finite,
    Name,
    Reason,
    Seconds,
    Text,
    TokenBytes,
)
from common.wire.sampling_params import SamplingParams, TokenLogprobs

PROTOCOL_VERSION = 5
MAX_BLOCKS_PER_FRAME = 256
MAX_OUTPUTS = 16_384
"""More than any batch has sequences."""
NONCE_BYTES = 16


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Base of the union: immutable, positional on the wire, tagged by number."""


# ---------------------------------------------------------------- router -> worker


class RouterHello(Message, frozen=True, tag=1):
    """First message on a connection: who the router is. The worker answers `WorkerHello`."""

    router_id: Name
    epoch: Count
    protocol: Count = PROTOCOL_VERSION


class RouterHeartbeat(Message, frozen=True, tag=2):
    """The router lives. A worker that misses it for too long aborts that router's requests."""

    router_id: Name


class KVTarget(msgspec.Struct, frozen=True, array_like=True):
    """The decode worker a prefill worker must ship to, and the boot epoch it must still have."""

    worker_id: Name
    epoch: Count
    address: Address


class PrefillRequest(Message, frozen=True, tag=3):
    """Compute this prompt. The worker owns the blocks it allocates until `KVAck`, abort or lease expiry.

    `decode` is None when nobody needs the KV (one token wanted). `num_output_tokens` of the prompt's last tokens are
    output of an earlier attempt. `deadline_s` is what is left of the request's time when sent.
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


class DecodeRequest(Message, frozen=True, tag=4):
    """Reserve for, and then decode, this prompt. Blocks are allocated at `KVOpen`, owned by the request from then on.

    `prefill_worker` names the worker whose KV to expect; empty means: prefill locally. In a hand-over that is another
    decode worker, which goes on decoding meanwhile: `num_reserved_tokens` is how far it may get beyond this prompt, and
    blocks are allocated for these too until it is done.
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


class AbortRequest(Message, frozen=True, tag=5):
    """Forget this request (every attempt up to and including this one) and release its blocks at once."""

    request_id: Name
    attempt: Count


class ResetPrefixCache(Message, frozen=True, tag=6):
    """Forget all cached (unowned) blocks."""

    request_id: Name


class HandOver(Message, frozen=True, tag=7):
    """Copy the KV of this running sequence to decode worker `target` while decoding it, then leave it to that one.

    The worker owns its blocks until `KVAck`. `attempt` is the one it decodes under, `new_attempt` that of the
    `DecodeRequest` at the target, whose prompt ends with the first `num_output_tokens` output tokens and has room for
    `num_reserved_tokens` more. The worker ends its own attempt with the reason "moved", or fails `new_attempt` and goes
    on with its own.
    """

    request_id: Name
    attempt: Count
    new_attempt: Count
    target: KVTarget
    num_output_tokens: Count
    num_reserved_tokens: Count


# ---------------------------------------------------------------- worker -> router


class WorkerHello(Message, frozen=True, tag=20):
    """Who the worker is. `epoch` differs after every start: a restarted worker is a new worker.

    Only workers with equal `fingerprint` are paired: it covers protocol, model, weights, dtype and KV layout. An answer
    that has begun goes on only on workers with equal `weights`, which covers the model and how its weights are kept.
    `lost_router` says that the router it goes to was silent for too long, as a frozen worker finds when it wakes up:
    what it had here is gone, and it must say hello again.
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


class WorkerHeartbeat(Message, frozen=True, tag=21):
    """Load and life of one worker, a few times a second. `step` grows while the engine loop turns, busy or not.

    `turn_limit_s` is how long the present turn of that loop may take before it must be stuck. `full_tokens_per_s` is
    the rate of full steps, 0 while none was seen; `tokens_per_s` that of recent steps, whatever was in them.
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

    The first delta a decode worker sends starts at 0 again (it repeats the prefill worker's first token), so that the
    router has every token whichever message arrives first; the router drops what it already has.
    `finish_reason` is "", "stop", "length", "abort", or "moved" when the sequence goes on at the target of a hand-over.
    Without tokens and reason it says that the request makes progress here, though no token yet: about once a second.
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

    In order, and all of them before the first token: a request with `params.prompt_logprobs` has one worker that
    computes its prompt and samples. Position 0 has none. A new attempt begins anew.
    """

    worker_id: Name
    epoch: Count
    request_id: Name
    attempt: Count
    start: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    logprobs: Annotated[tuple[TokenLogprobs, ...], Meta(min_length=1, max_length=MAX_OUTPUTS)]


class RequestFailed(Message, frozen=True, tag=23):
    """The worker gave this request up and owns nothing of it any more. `retryable`: another worker may succeed.

    `phase` is one of queue, grant, prefill, transfer, decode, handover, grammar (which the answer must match, and is
    at fault).
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

    The object holds `num_bytes` of blocks and then `nonce`, which nobody else can know: D trusts nothing before it has
    read the same there.
    """

    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    fd: Annotated[int, Meta(ge=0, lt=2**31)]
    num_bytes: Annotated[int, Meta(ge=1, le=2**50)]
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class KVOpen(Message, frozen=True, tag=40):
    """P announces the KV of a prompt. P owns its blocks; D owns none yet. `sent_at` is P's clock, in seconds.

    `memory` is P's offer to let D copy the blocks itself, which works on the same host only. `quantised` is its offer
    to send frames of 8-bit numbers, in the format of `kernels.blocks`.
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

    Blocks `first_block .. first_block + len(checksums) - 1` of the prompt; each checksum is xxh3-64 of one frame.
    Each side goes on owning its own copy. With `sources`, one for each checksum, no frames follow: they are the numbers
    of P's blocks in the shared memory, which P holds until `KVAck`. `token` is the grant's.
    """

    request_id: Name
    attempt: Count
    first_block: Count
    checksums: Annotated[tuple[int, ...], Meta(min_length=1, max_length=MAX_BLOCKS_PER_FRAME)]
    sources: Annotated[tuple[Count, ...], Meta(max_length=MAX_BLOCKS_PER_FRAME)] = ()
    token: Count = 0


class KVDone(Message, frozen=True, tag=42):
    """All granted blocks were sent and the first token is sampled. P still holds its blocks, until `KVAck`.

    `computed_at` is when the prompt was computed, by P's clock: `KVOpen.sent_at` tells D how the clocks differ. `token`
    is the grant's.

    In a hand-over `num_blocks` says how many of the announced blocks there are in the end, and `more_tokens` are the
    tokens behind `first_token`, each with its logprobs if the request wants any: the KV of all but the last was sent.
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
    """D owns blocks for all that was announced and holds blocks before `first_block` already: ship from there on.

    `first_block` equal to the prompt's number of blocks means that nothing needs shipping. `shared`: D can read the
    memory that P offered, so names of blocks do instead of frames. `quantised`: D takes the frames of 8-bit numbers
    that P offered; never both. `token` is a secret of this grant: who repeats it in `KVBlocks` and `KVDone`, over
    whatever connection, is the one that D granted.
    """

    request_id: Name
    attempt: Count
    first_block: Count
    shared: bool = False
    token: Count = 0
    quantised: bool = False


class KVWait(Message, frozen=True, tag=44):
    """D knows the request, but has no room for it yet, and owns nothing: P's lease is renewed.

    In a hand-over D also answers so to a repeated `KVOpen`: the blocks that were sent before it are here.
    """

    request_id: Name
    attempt: Count


class KVAck(Message, frozen=True, tag=45):
    """D has all it needs, received and verified or computed itself: P's hold ends, whatever P was doing."""

    request_id: Name
    attempt: Count


class KVFailed(Message, frozen=True, tag=46):
    """Either side gave the transfer up. The sender of this message owns nothing of it, nor may its receiver."""

    request_id: Name
    attempt: Count
    reason: Text


ToWorker = RouterHello | RouterHeartbeat | PrefillRequest | DecodeRequest | AbortRequest | ResetPrefixCache | HandOver
ToRouter = WorkerHello | WorkerHeartbeat | TokenOutput | PromptLogprobs | RequestFailed
ToDecode = KVOpen | KVBlocks | KVDone | KVFailed
ToPrefill = KVGrant | KVWait | KVAck | KVFailed
AnyMessage = ToWorker | ToRouter | ToDecode | ToPrefill
