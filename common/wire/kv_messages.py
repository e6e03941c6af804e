"""The messages of a KV transfer, from a prefill worker (P) to a decode worker (D) and back.

In a hand-over P is a decode worker too. Each message that moves memory says who owns the blocks before and after it.
A pull is no transfer: any worker (the puller) takes copies of cached blocks from any other (the lender).
"""

from __future__ import annotations

from typing import Annotated, Self, TypeVar

import msgspec
from msgspec import Meta

from common.errors import WireError
from common.wire.message_fields import MAX_TOKENS, Count, Finite, Message, Name, Seconds, Text, TokenBytes
from common.wire.sampling_params import TokenLogprobs

MAX_BLOCKS_PER_FRAME = 256
"""Bounds the lists that a message may bring: a checksum and a source for each block."""
MAX_OFFER_BYTES = 40 * 1024
"""Maximum size of an offer's details."""
BLOCK_HASH_BYTES = 16
"""128 bits: two prompts with one hash would share KV, so even hostile clients must find no such pair."""

Details = TypeVar("Details", bound=msgspec.Struct)


class KVOffer(msgspec.Struct, frozen=True, array_like=True):
    """How D may copy P's blocks itself, instead of receiving frames.

    `transport` names the KV transport, `details` is that transport's own struct, packed with msgpack. A receiver that
    does not use the transport ignores the offer and asks for frames.
    """

    transport: Name
    details: Annotated[bytes, Meta(max_length=MAX_OFFER_BYTES)]

    @classmethod
    def of(cls, transport: str, details: msgspec.Struct) -> Self:
        return cls(transport, msgspec.msgpack.encode(details))

    def read(self, type_of_details: type[Details]) -> Details:
        """Unpack `details`. Raises WireError for anything that is not exactly one valid struct of this type."""
        try:
            return msgspec.msgpack.decode(self.details, type=type_of_details)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(f"not an offer of {self.transport}: {error}") from error


# ---------------------------------------------------------------- P -> D


class KVOpen(Message, frozen=True, tag=40):
    """P announces the KV of a prompt. P owns its blocks; D owns none yet. `sent_at` is P's clock, in seconds.

    With `offer` P lets D copy the blocks itself, out of P's cache or out of places that P copies them to. With
    `quantised` P offers frames of 8-bit numbers, in the format of `kernels.blocks`. The blocks before `first_block` are
    out of the model's window: P has given them back, or will, and ships none of them.
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
    """Header of the raw frames that follow it in the same multipart message, one frame a block.

    They are the prompt's blocks from `first_block` on, as many as there are checksums, each xxh3-64 of one frame, or of
    one block or place, unless the transport that was granted defines another checksum.
    P and D go on owning their own copies. With `sources` no frames follow: these are the numbers of P's blocks in the
    memory that it offered, one for each checksum, and P holds them until `KVAck`. If P offered a ring, they are the
    numbers of places, which are lent to this transfer until `KVTaken` names them, or the transfer ends. `token` is the
    grant's.
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


# ---------------------------------------------------------------- D -> P


class KVGrant(Message, frozen=True, tag=43):
    """D owns blocks for all that was announced and has the KV of those before `first_block`: ship from there on.

    It is at least the `first_block` of `KVOpen`: D needs none before that, and owns none.
    `first_block` equal to the prompt's number of blocks means that nothing needs shipping. `shared`: D can read the
    memory that P offered, so P sends numbers of blocks, or of places, instead of frames; frames of native numbers are
    still accepted. `quantised`: D takes the frames of 8-bit numbers that P offered; never both. `token` is a secret of
    this grant: D accepts `KVBlocks` and `KVDone` that repeat it, over any connection.
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


class KVTaken(Message, frozen=True, tag=48):
    """D has copied and verified the blocks in these `places` of P's ring, or drops them: P owns the places again.

    P's blocks stay held until `KVAck`.
    """

    request_id: Name
    attempt: Count
    places: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_BLOCKS_PER_FRAME)]


class KVAck(Message, frozen=True, tag=45):
    """D has all blocks, received and verified or computed itself: P's hold ends, even while P computes."""

    request_id: Name
    attempt: Count


class KVFailed(Message, frozen=True, tag=46):
    """Either side gave the transfer up: the sender of this owns nothing of it, and the receiver releases its blocks.

    `phase` is that in which the request failed for good, as its router is told; "": another worker may succeed.
    """

    request_id: Name
    attempt: Count
    reason: Text
    phase: Text = ""


# ---------------------------------------------------------------- puller -> lender


class KVPull(Message, frozen=True, tag=47):
    """The puller asks for copies of cached blocks by their `hashes`, one after the other in a chain.

    The puller owns blocks of its own for them, the lender's stay as they are: cached, or anyone's. The lender answers
    with `KVBlocks` of all of them, in order, in one message or several, or with `KVFailed` from the first on that it
    lacks. It numbers them from `first_block` on, and repeats the secret `token`. Without `hashes` it answers `KVOpen`,
    which offers its memory; `shared`: the puller can read that, so numbers of blocks do instead of frames. `KVAck` ends
    the pull. `epoch` and `fingerprint` are those that the lender must have.
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
