"""What a hostile peer sends: every message there is, about another's request, and all that is no message."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from common.engine.kv.shared_memory import KVMemory
from common.wire.codec import encode, seal
from common.wire.message_fields import MAX_MESSAGE_BYTES, pack_tokens
from common.wire.messages import (
    AbortRequest,
    BlockEvents,
    BlockSnapshot,
    BlockSnapshotRequest,
    ChangeRole,
    DecodeRequest,
    HandOver,
    KVAck,
    KVBlocks,
    KVDone,
    KVFailed,
    KVGrant,
    KVOffer,
    KVOpen,
    KVPeer,
    KVPull,
    KVTaken,
    KVTarget,
    KVWait,
    Message,
    PooledOutput,
    PrefillRequest,
    PromptLogprobs,
    RequestFailed,
    ResetPrefixCache,
    RouterHeartbeat,
    SetAdapter,
    TokenDelta,
    TokenOutput,
    WeightsPart,
    WeightsRequest,
    WorkerHeartbeat,
    WorkerHello,
)
from common.wire.sampling_params import SamplingParams, TokenLogprobs

PARAMS = SamplingParams(max_tokens=4, temperature=0.0)
TARGET = KVTarget("mallory", 1, "tcp://127.0.0.1:1")
BIG = 2**62
PEER = KVPeer("mallory", BIG, "tcp://127.0.0.1:1", BIG)


def forged(request_id: str, attempt: int = 0, *, worker_id: str = "mallory", epoch: int = 1) -> list[Message]:
    """One message of every type about `request_id`, with numbers at their bounds where they may be."""
    name = {"request_id": request_id, "attempt": attempt}
    beat = ("num_running", "num_waiting", "num_transferring", "num_waiting_tokens", "num_free_blocks")
    return [
        RouterHeartbeat(router_id="mallory"),
        PrefillRequest(**name, prompt=pack_tokens([1, 2, 3]), params=PARAMS, decode=TARGET, peer=PEER),
        DecodeRequest(**name, prompt=pack_tokens([BIG % 2**32] * 3), params=PARAMS, num_output_tokens=BIG),
        DecodeRequest(request_id=request_id, attempt=BIG, prompt=b"123", params=PARAMS, num_reserved_tokens=BIG),
        AbortRequest(request_id=request_id, attempt=BIG),
        HandOver(**name, new_attempt=BIG, target=TARGET, num_output_tokens=BIG, num_reserved_tokens=BIG),
        ResetPrefixCache(request_id=request_id),
        ChangeRole(role="prefill", reason=request_id),
        BlockSnapshotRequest(epoch=BIG),
        SetAdapter(name=request_id, version=BIG, path="/nowhere"),
        WeightsPart(sha256="0f" * 32, offset=BIG, data=b"x"),
        WeightsRequest(sha256="0f" * 32, offset=BIG),
        BlockEvents(epoch=epoch, sequence=BIG, stored=b"x" * 8_000, removed=b"12345", cleared=True),
        BlockSnapshot(epoch=epoch, sequence=BIG, piece=BIG, num_pieces=BIG, hashes=b"x" * 8_000),
        WorkerHello(
            worker_id=worker_id, role="decode", epoch=BIG, fingerprint="f", model="m", block_size=BIG, num_blocks=BIG,
            max_model_len=BIG, max_num_seqs=BIG, kv_address="tcp://127.0.0.1:1", version="", weights="",
            max_step_tokens=BIG, home="decode",
        ),
        WorkerHeartbeat(
            worker_id=worker_id, epoch=BIG, step=BIG, ready=True, draining=False, num_cached_blocks=BIG,
            num_owned_blocks=BIG, tokens_per_s=-1e15, **dict.fromkeys(beat, BIG),
        ),
        TokenOutput(worker_id=worker_id, epoch=epoch, outputs=(TokenDelta(request_id, attempt, 0, (7,), "stop"),)),
        TokenOutput(worker_id=worker_id, epoch=epoch, outputs=(TokenDelta(request_id, attempt, 0, (-1, 2**62), ""),)),
        PromptLogprobs(
            worker_id=worker_id, epoch=epoch, **name, start=1, logprobs=(TokenLogprobs(1e15, ((-1, 0.0),)),)
        ),
        PooledOutput(worker_id=worker_id, epoch=epoch, **name, values=b"\xff" * 8_000),
        RequestFailed(worker_id=worker_id, **name, phase="queue", message="forged", retryable=False),
        KVPull(**name, epoch=BIG, fingerprint="layout", first_block=BIG, hashes=b"x" * 16 * 256, token=BIG),
        KVPull(**name, epoch=epoch, fingerprint="layout", hashes=b"x" * 17, shared=True),
        KVOpen(
            **name, worker_id=worker_id, epoch=epoch, decode_epoch=7, fingerprint="layout", num_blocks=3,
            offer=KVOffer.of("shm", KVMemory(1, 1, 2**50, b"n" * 16)),
        ),
        KVOpen(
            **name, worker_id=worker_id, epoch=epoch, decode_epoch=7, fingerprint="layout", num_blocks=3,
            offer=KVOffer.of("shm", KVMemory(1, 1, 2**50, b"n" * 16, True)),
        ),
        KVBlocks(**name, first_block=0, checksums=(0, 0, 0), sources=(BIG, BIG, BIG)),
        KVBlocks(**name, first_block=BIG, checksums=(-1,) * 256),
        KVDone(**name, first_token=5, num_blocks=BIG),
        KVDone(**name, first_token=BIG, more_tokens=b"1"),
        KVGrant(**name, first_block=BIG),
        KVGrant(**name, first_block=0, shared=True),
        KVWait(**name),
        KVTaken(**name, places=(0, BIG)),
        KVAck(**name),
        KVFailed(**name, reason="forged"),
    ]  # fmt: skip


def garbage(request_id: str, seed: int = 0) -> Iterator[list[bytes]]:
    """Multipart messages that are none of ours: cut, bent, deep, huge, of the wrong number of parts."""
    rng = random.Random(seed)
    yield from ([b""], [b"", b""], [b""] * 300, [b"\xc1"], [b"\x91" * 100_000], [b"\xdd\xff\xff\xff\xff" * 1000])
    yield from ([seal(b"\x91" * 100_000)], [seal(b"\xdd\x00\xff\xff\xff" * 1000)], [seal(b"")], [seal(b"\xc1")])
    yield [seal(b"\xdd\x00\xf0\x00\x00" + b"\x90" * (MAX_MESSAGE_BYTES - 20))]
    yield [rng.randbytes(MAX_MESSAGE_BYTES + 1)]
    for message in forged(request_id):
        data = encode(message)
        yield [data[: rng.randrange(len(data))]]
        yield [data, b"more"]
        yield [b"", data]
        bent = bytearray(data)
        bent[rng.randrange(len(bent))] ^= 1 << rng.randrange(8)
        yield [bytes(bent)]
        fields = msgspec.msgpack.decode(data[:-8])
        fields[rng.randrange(len(fields))] = rng.choice([None, -1, 2**64 - 1, 1.5, "x" * 5000, [], [[[]]], b"b", True])
        yield [seal(msgspec.msgpack.encode(fields))]
        other_tag = (type(message).__struct_config__.tag + rng.randrange(1, 256)) % 256
        yield [seal(msgspec.msgpack.encode([other_tag, *fields[1:]]))]
