"""Messages of KV transfers from a prefill worker (P) to a decode worker (D) and back.

In a hand-over P is also a decode worker. Messages that move memory document who owns the blocks before and after. A
pull is not a transfer: any worker (the puller) copies cached blocks of any other worker (the lender).
"""

from __future__ import annotations

from typing import Annotated, Self, TypeVar

import msgspec
from msgspec import Meta

from common.errors import WireError
from common.wire.message_fields import MAX_TOKENS, Count, Finite, Message, Name, Seconds, Text, TokenBytes
from common.wire.sampling_params import TokenLogprobs

MAX_BLOCKS_PER_FRAME = 256
"""Limits the lists in a message, which have a checksum and a source per block."""
MAX_OFFER_BYTES = 40 * 1024
"""Maximum size of an offer's details."""
BLOCK_HASH_BYTES = 16
"""128 bits. Prompts with equal hashes share KV, so even malicious clients must not be able to find collisions."""

Details = TypeVar("Details", bound=msgspec.Struct)


class KVOffer(msgspec.Struct, frozen=True, array_like=True):
    """Offer that D may copy P's blocks directly instead of receiving frames.

    `transport` is the name of the KV transport, `details` its own struct, packed with msgpack. A receiver that does not
    use the transport ignores the offer and requests frames.
    """

    transport: Name
    details: Annotated[bytes, Meta(max_length=MAX_OFFER_BYTES)]

    @classmethod
    def of(cls, transport: str, details: msgspec.Struct) -> Self:
        return cls(transport, msgspec.msgpack.encode(details))

    def read(self, type_of_details: type[Details]) -> Details:
        """Unpack `details`. Raises WireError unless they are exactly one valid struct of this type."""
        try:
            return msgspec.msgpack.decode(self.details, type=type_of_details)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(f"invalid offer of transport {self.transport}: {error}") from error


# ---------------------------------------------------------------- P -> D


class KVOpen(Message, frozen=True, tag=40):
    """P announces the KV of a prompt. P owns its blocks; D owns none yet. `sent_at` is P's clock in seconds.

    With `offer`, D may copy the blocks from P's cache, or from slots to which P copies them. With `quantised`, P offers
    frames of 8-bit numbers in the format of `kernels.blocks`. The blocks before `first_block` are outside the model's
    window: P releases them and does not send them.
    """

    request_id: Name
    attempt: Count
    worker_id: Name
    epoch: Count
    decode_epoch: Count
    fingerprint: Name
    num_blocks: Annotated[int, Meta(ge=1, le=2**31)]
    sent_at: Seconds = 0.0
    offer: KVOffer | None = None
    quantised: bool = False
    first_block: Count = 0


class KVBlocks(Message, frozen=True, tag=41):
    """Header of the raw frames that follow in the same multipart message, one frame per block.

    The blocks are those of the prompt from `first_block` on, one per checksum. Each checksum is the xxh3-64 of one
    frame, block or slot, unless the transport defines another one. P and D still own their own copies.

    With `sources` no frames follow. They are the numbers of P's blocks in the offered memory, one per checksum, and P
    holds them until `KVAck`. If P offered a ring, they are slot numbers, lent to this transfer until `KVTaken` or its
    end. `token` is that of the grant.
    """

    request_id: Name
    attempt: Count
    first_block: Count
    checksums: Annotated[tuple[int, ...], Meta(min_length=1, max_length=MAX_BLOCKS_PER_FRAME)]
    sources: Annotated[tuple[Count, ...], Meta(max_length=MAX_BLOCKS_PER_FRAME)] = ()
    token: Count = 0


class KVDone(Message, frozen=True, tag=42):
    """All granted blocks were sent, and the first token was sampled. P holds its blocks until `KVAck`.

    `computed_at` is the time when the prompt was computed, by P's clock. D determines the clock difference by
    `KVOpen.sent_at`. `token` is that of the grant.

    In a hand-over, `num_blocks` is the number of announced blocks that were sent in the end, and `more_tokens` are the
    tokens after `first_token`, with logprobs if requested. P has sent the KV of all tokens except the last.
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


# ---------------------------------------------------------------- D -> P


class KVGrant(Message, frozen=True, tag=43):
    """D owns blocks for all that was announced and has the KV before `first_block`: send the blocks from there on.

    `first_block` is at least that of `KVOpen`, because D does not need or own earlier blocks. If it equals the
    announced number of blocks, nothing is sent. `shared`: D can read the offered memory, so P sends numbers of blocks
    or slots instead of frames; unquantised frames are still accepted. `quantised`: D accepts the offered 8-bit frames.
    Not both.
    `token` is a secret: D accepts only `KVBlocks` and `KVDone` that repeat it, over any connection.
    """

    request_id: Name
    attempt: Count
    first_block: Count
    shared: bool = False
    token: Count = 0
    quantised: bool = False


class KVWait(Message, frozen=True, tag=44):
    """D has the request but no free blocks yet, and owns nothing. P renews its lease.

    In a hand-over, D also sends this in reply to a repeated `KVOpen`: all blocks sent before it have arrived.
    """

    request_id: Name
    attempt: Count


class KVTaken(Message, frozen=True, tag=48):
    """D has copied and verified the blocks in these `places` of P's ring, or drops them. P owns the slots again.

    P holds its blocks until `KVAck`.
    """

    request_id: Name
    attempt: Count
    places: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_BLOCKS_PER_FRAME)]


class KVAck(Message, frozen=True, tag=45):
    """D has received and verified, or computed, all blocks. P's hold ends, even while P still computes."""

    request_id: Name
    attempt: Count


class KVFailed(Message, frozen=True, tag=46):
    """Either side aborts the transfer. The sender of this owns nothing of it; the receiver releases its blocks.

    `phase` is that of a permanent failure, as reported to the router. "": another worker may succeed.
    """

    request_id: Name
    attempt: Count
    reason: Text
    phase: Text = ""


# ---------------------------------------------------------------- puller -> lender


class KVPull(Message, frozen=True, tag=47):
    """Request for copies of cached blocks by their `hashes`, which are consecutive in a chain.

    The puller owns its own blocks for the copies. The lender's blocks are unaffected: cached or owned. The lender
    replies with `KVBlocks` of all blocks in order, in one or more messages, or with `KVFailed` for the first missing
    one. Numbers start at `first_block`, and the secret `token` is repeated. Without `hashes`, the lender replies with
    `KVOpen` that offers its memory. `shared`: the puller can read that memory, so block numbers are sent instead of
    frames. `KVAck` ends the pull. `epoch` and `fingerprint` must match those of the lender.
    """

    request_id: Name
    attempt: Count
    epoch: Count
    fingerprint: Name
    first_block: Count = 0
    hashes: Annotated[bytes, Meta(max_length=MAX_BLOCKS_PER_FRAME * BLOCK_HASH_BYTES)] = b""
    token: Count = 0
    shared: bool = False


ToLender = KVPull | KVAck
ToDecode = KVOpen | KVBlocks | KVDone | KVFailed
ToPrefill = KVGrant | KVWait | KVTaken | KVAck | KVFailed
