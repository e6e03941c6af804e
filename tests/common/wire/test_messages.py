"""The wire's only encode/decode pair: what goes in comes out, and nothing hostile gets past it but as a WireError."""

from __future__ import annotations

import typing
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import WireError
from common.latency.link_model import LinkModel, Links
from common.wire.codec import CHECKSUM_BYTES, decode, encode, seal, unpack
from common.wire.message_fields import MAX_MESSAGE_BYTES, pack_tokens, unpack_tokens
from common.wire.messages import (
    MAX_BLOCKS_PER_FRAME,
    AbortRequest,
    AdapterState,
    AnyMessage,
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
    RouterHello,
    ServingState,
    SetAdapter,
    SetServing,
    Timeline,
    TokenDelta,
    TokenOutput,
    WeightsPart,
    WeightsRequest,
    WorkerHeartbeat,
    WorkerHello,
)
from common.wire.sampling_params import SamplingParams, TokenLogprobs

from ...examples import examples

PARAMS = SamplingParams(
    max_tokens=9, min_tokens=2, temperature=0.5, seed=-(2**63), logit_bias=((3, -1.5),), logprobs=2,
    stop_token_ids=(7,), prompt_logprobs=20,
)  # fmt: skip
UNBIASED = (1, 0, 1.0, 1.0, 0, 0.0, 0, 0.0, 0.0, 1.0)  # the fields of SamplingParams before logit_bias
LOGPROBS = TokenLogprobs(-0.25, ((5, -0.25), (6, -9999.0)))
MESSAGES: list[Message] = [
    RouterHello(router_id="r", epoch=2**62),
    RouterHeartbeat(router_id="ü" * 256),
    PrefillRequest(
        request_id="a", attempt=3, prompt=pack_tokens([1, 2**32 - 1]), params=PARAMS, decode=KVTarget("d", 7, "tcp://h")
    ),
    PrefillRequest(
        request_id="a", attempt=0, prompt=b"", params=PARAMS, cache_salt="s", deadline_s=0.0, adapter="0f" * 16,
        peer=KVPeer("p", 2**62, "tcp://[::1]:7004", 9),
    ),
    DecodeRequest(request_id="a", attempt=0, prompt=b"1234", params=PARAMS, prefill_worker="p", num_output_tokens=1),
    AbortRequest(request_id="a", attempt=1),
    ResetPrefixCache(request_id="a"),
    ChangeRole(role="prefill", reason="prompts wait 3 s"),
    SetAdapter(name="a", version=2**62, path="/adapters/a"),
    SetServing(
        version=2**62, mode="hold", weights="/w", weights_number=3, weight_version="ü", staged="/s", staged_number=4,
        aborts=True, lease_s=0.5,
    ),
    WeightsPart(sha256="0f" * 32, offset=2**62, data=b"x" * 1024 * 1024),
    HandOver(
        request_id="a", attempt=1, new_attempt=2, target=KVTarget("d", 7, "tcp://h:1"), num_output_tokens=3,
        num_reserved_tokens=4,
    ),
    WorkerHello(
        worker_id="w", role="decode", epoch=1, fingerprint="f", model="m", block_size=16, num_blocks=9,
        max_model_len=99, max_num_seqs=4, kv_address="tcp://h:2", version="1.0", weights="w", max_step_tokens=8,
        home="prefill", changes_role=True, lend_address="tcp://h:3",
    ),
    WorkerHeartbeat(
        worker_id="w", epoch=1, step=2, ready=True, draining=False, num_running=1, num_waiting=2, num_transferring=3,
        num_waiting_tokens=4, num_free_blocks=5, num_cached_blocks=6, num_owned_blocks=7, tokens_per_s=1.5,
        links=Links(shm=LinkModel(latency_s=1e-4, byte_s=1e-9, block_bytes=2**40, error=0.1, num_transfers=5)),
        adapters=(
            AdapterState("a", 7, "loaded", "/a", "0f" * 16, "", 8, 2**30),
            AdapterState("b", 1, "failed", "/b", "", "why"),
        ),
        serving=ServingState(9, "sleep", "failed", "/w", 3, "v", 2, True, "why"),
    ),
    TokenOutput(
        worker_id="w", epoch=1,
        outputs=(TokenDelta("a", 0, 0, (1, 2), "stop", 16, (LOGPROBS, LOGPROBS), Timeline(queue_s=0.5)),),
    ),
    PromptLogprobs(worker_id="w", epoch=1, request_id="a", attempt=2, start=4_194_304, logprobs=(LOGPROBS,) * 3),
    PooledOutput(worker_id="w", epoch=1, request_id="a", attempt=2, values=b"\0\0\x80?" * 65_536),
    RequestFailed(worker_id="w", request_id="a", attempt=0, phase="grant", message="why", retryable=True),
    WeightsRequest(sha256="0f" * 32, offset=2**62),
    BlockSnapshotRequest(epoch=1),
    BlockEvents(epoch=1, sequence=2**62, stored=b"12345678" * 2, removed=b"abcdefgh", cleared=True),
    BlockSnapshot(epoch=1, sequence=3, piece=0, num_pieces=2, hashes=b"12345678"),
    KVOpen(request_id="a", attempt=0, worker_id="p", epoch=1, decode_epoch=2, fingerprint="f", num_blocks=1),
    KVOpen(
        request_id="a", attempt=0, worker_id="p", epoch=1, decode_epoch=2, fingerprint="f", num_blocks=1,
        offer=KVOffer("shm", b"d" * 40 * 1024),
    ),
    KVBlocks(request_id="a", attempt=0, first_block=5, checksums=(0, 2**64 - 1)),
    KVBlocks(request_id="a", attempt=0, first_block=5, checksums=(0, 1), sources=(2**40, 3)),
    KVDone(request_id="a", attempt=0, first_token=3, logprobs=LOGPROBS, prefill_s=0.1, computed_at=0.2),
    KVDone(
        request_id="a", attempt=0, first_token=3, logprobs=LOGPROBS, num_blocks=4, more_tokens=pack_tokens([4, 5]),
        more_logprobs=(LOGPROBS, LOGPROBS),
    ),
    KVGrant(request_id="a", attempt=0, first_block=0),
    KVGrant(request_id="a", attempt=0, first_block=0, shared=True),
    KVPull(request_id="a", attempt=0, epoch=1, fingerprint="f", first_block=9, hashes=b"h" * 16 * 256, token=2**62),
    KVWait(request_id="a", attempt=0),
    KVTaken(request_id="a", attempt=0, places=(0, 7)),
    KVAck(request_id="a", attempt=0),
    KVFailed(request_id="a", attempt=0, reason="x" * 4096),
]  # fmt: skip
FUZZ = settings(derandomize=True, deadline=None, max_examples=examples(300))


def raw(*fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_round_trip(message: Message) -> None:
    assert decode(encode(message)) == message


def test_round_trip_covers_the_union() -> None:
    assert {type(message) for message in MESSAGES} == set(typing.get_args(AnyMessage))


@pytest.mark.slow_cases("PooledOutput", "WeightsPart")  # whose data is long
@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_truncation_is_refused(message: Message) -> None:
    data = encode(message)
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:length])


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="a byte that msgpack never uses"),
        pytest.param(encode(MESSAGES[0]) + b"\x00", id="extra data"),
        pytest.param(b"\x91" * 100_000, id="deep nesting of arrays"),
        pytest.param(b"\x81\x01" * 100_000, id="deep nesting of maps"),
        pytest.param(raw(22, "w", 1)[:-1] + b"\x01" + b"\x91" * 100_000, id="deep nesting in a field"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="array of 4 billion"),
        pytest.param(b"\x94\x16\xa1w\x01\xdd\xff\xff\xff\xff", id="field of 4 billion items"),
        pytest.param(b"\x93\x01\xdb\xff\xff\xff\xffr\x01", id="string of 4 GB"),
        pytest.param(b"\x93\x01\xa2\xff\xfe\x01", id="string that is not UTF-8"),
        pytest.param(b"\x93\x01\xc7\x01\x05r\x01", id="extension type"),
        pytest.param(raw(99, "r", 1), id="unknown tag"),
        pytest.param(raw("1", "r", 1), id="tag of a wrong type"),
        pytest.param(raw(-1, "r", 1), id="negative tag"),
        pytest.param(raw(1), id="missing fields"),
        pytest.param(raw(1, "r", -1), id="negative number"),
        pytest.param(raw(1, "r", 2**63), id="number out of range"),
        pytest.param(raw(1, "r", 1.5), id="fraction"),
        pytest.param(raw(1, "r", True), id="boolean for a number"),
        pytest.param(raw(1, b"r", 1), id="bytes for a string"),
        pytest.param(raw(1, "", 1), id="empty name"),
        pytest.param(raw(1, "r" * 257, 1), id="name too long"),
        pytest.param(raw(46, "a", 0, "x" * 4097), id="text too long"),
        pytest.param(raw(4, "a", 0, b"", [5], "", 0, "", float("nan")), id="deadline that is not a number"),
        pytest.param(raw(4, "a", 0, b"", [5], "", 0, "", float("inf")), id="deadline without end"),
        pytest.param(raw(3, "a", 0, b"", [5], None, 0, "", float("inf")), id="deadline without end for prefill"),
        *(
            pytest.param(raw(4, "a", 0, b"", [*UNBIASED, [[7, bias]]]), id=f"bias {bias}")
            for bias in (float("inf"), float("-inf"), float("nan"), 100.5)
        ),
        *(
            pytest.param(raw(22, "w", 1, [["a", 0, 0, [5], "", 0, [], [0.0, value]]]), id=f"prefill time {value}")
            for value in (float("inf"), float("nan"))
        ),
        pytest.param(raw(22, "w", 1, [["a", 0, 0, [5], "tired"]]), id="unknown finish reason"),
        pytest.param(raw(22, "w", 1, [["a", 0, 0, [5], "stop\n"]]), id="finish reason and more"),
        pytest.param(raw(21, "w", 1, 1, True, False, *[0] * 7, float("nan")), id="throughput that is not a number"),
        pytest.param(raw(40, "a", 0, "p", 1, 2, "f", 1, float("inf")), id="clock without end"),
        pytest.param(raw(42, "a", 0, 3, None, 0, 0.0, float("nan")), id="clock that is not a number"),
        pytest.param(raw(4, "a", 0, b"", [0]), id="max_tokens of zero"),
        pytest.param(raw(4, "a", 0, b"", [1, 0, float("nan")]), id="temperature that is not a number"),
        pytest.param(raw(41, "a", 0, 0, []), id="no blocks"),
        pytest.param(raw(41, "a", 0, 0, [1] * (MAX_BLOCKS_PER_FRAME + 1)), id="too many blocks"),
        pytest.param(raw(40, "a", 0, "p", 1, 2, "f", 0), id="transfer of no blocks"),
        pytest.param(b"\xc6" + b"\xff" * MAX_MESSAGE_BYTES, id="message too long"),
        pytest.param(b"\x80", id="a map"),
    ],
)  # fmt: skip
def test_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(seal(data))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_flipped_bit_is_refused(message: Message) -> None:
    data = bytearray(encode(message))
    for position in range(min(len(data), 300)):
        data[position] ^= 1 << position % 8
        with pytest.raises(WireError, match="checksum"):
            decode(bytes(data))
        data[position] ^= 1 << position % 8


@given(st.binary(max_size=200))
@FUZZ
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)
    with suppress(WireError):
        unpack(data)


@given(st.sampled_from(MESSAGES), st.data())
@FUZZ
def test_mutated_messages_never_raise_anything_else(message: Message, data: st.DataObject) -> None:
    mutated = bytearray(encode(message)[:-CHECKSUM_BYTES])
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    with suppress(WireError):
        assert encode(unpack(bytes(mutated)))


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()


@given(st.integers(0, 50), st.lists(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4)), max_size=14))
@FUZZ
def test_wrong_fields_never_raise_anything_else(tag: int, fields: list[object]) -> None:
    with suppress(WireError):
        unpack(raw(tag, *fields))


def test_the_hostile_bytes_are_a_field_away_from_a_message() -> None:
    """What `test_hostile_bytes_are_refused` spoils is taken when it is whole."""
    bias = raw(4, "a", 0, b"", [*UNBIASED, [[7, -100.0]]], "", 0, "", 86400.0)
    output = raw(22, "w", 1, [["a", 0, 0, [5], "stop", 0, [], [0.0, 0.5]]])
    beat = raw(21, "w", 1, 1, True, False, *[0] * 7, 0.5)
    opened, done = raw(40, "a", 0, "p", 1, 2, "f", 1, 1e8), raw(42, "a", 0, 3, None, 0, 0.0, 1e8)
    assert [type(unpack(data)) for data in (bias, output, beat, opened, done)] == [
        DecodeRequest, TokenOutput, WorkerHeartbeat, KVOpen, KVDone,
    ]  # fmt: skip


def test_a_later_version_may_append_fields() -> None:
    grant = KVGrant(request_id="a", attempt=0, first_block=5)
    assert unpack(raw(43, "a", 0, 5, False, 0, False, "what we do not know yet")) == grant


def test_memoryview_is_decoded() -> None:
    assert decode(memoryview(encode(MESSAGES[0]))) == MESSAGES[0]


def test_tokens_travel_as_little_endian_uint32() -> None:
    assert pack_tokens([1, 256]) == bytes([1, 0, 0, 0, 0, 1, 0, 0])
    assert unpack_tokens(pack_tokens([0, 2**32 - 1])) == [0, 2**32 - 1]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_tokens_cut_short_are_refused(size: int) -> None:
    with pytest.raises(WireError, match=f"{size} bytes"):
        unpack_tokens(b"x" * size)
