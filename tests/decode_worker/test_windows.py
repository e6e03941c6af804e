"""Sequences of a model that looks back through a window: the blocks that they own, get and give back."""

from __future__ import annotations

import pytest

from common.blocks.block_hash import BlockHasher
from common.blocks.window import HOLE, Window
from common.engine.kv.block_pool import BlockPool
from common.errors import WireError
from common.latency.step_model import StepModel
from common.wire.message_fields import pack_tokens
from common.wire.messages import DecodeRequest, KVDone, KVOpen
from common.wire.sampling_params import SampledToken, SamplingParams
from decode_worker.rules import DecodeRules
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence, RequestStatus

SIZE, WINDOW, CHUNK = 4, 10, 8
MODEL = StepModel()
VIEW = Window(WINDOW, SIZE)
MOST = VIEW.span_blocks(1)


def scheduler(num_blocks: int = 32, *, window: int = WINDOW, seqs: int = 16) -> DecodeScheduler:
    pool = BlockPool(num_blocks, SIZE)
    return DecodeScheduler(pool, max_num_seqs=seqs, local_prefill_chunk=CHUNK, watermark=0.0, window=window)


def request(name: str, tokens: list[int], *, remote: bool = False, reserved: int = 0) -> DecodeSequence:
    wire = DecodeRequest(
        request_id=name, attempt=0, prompt=pack_tokens(tokens), params=SamplingParams(max_tokens=999),
        prefill_worker="p" if remote else "", num_reserved_tokens=reserved,
    )  # fmt: skip
    status = RequestStatus.EXPECTING if remote else RequestStatus.WAITING
    return DecodeSequence(b"r", wire, list(tokens), BlockHasher(SIZE), 0.0, 60.0, status=status)


def run(plan: DecodeScheduler) -> None:
    """Compute one step; every sampled token is 7."""
    for chunk in plan.schedule(1.0, MODEL).chunks:
        sequence = chunk.sequence
        first, end = VIEW.first_block(chunk.start), -(-(chunk.start + chunk.num_tokens) // SIZE)
        assert HOLE not in sequence.blocks[first:end] and len(sequence.blocks) >= end
        plan.advance(chunk)
        if sequence.num_remaining == 0:
            sequence.append(SampledToken(7))


def granted(
    plan: DecodeScheduler, name: str, tokens: list[int], *, reserved: int = 0, first: int = 0
) -> DecodeSequence:
    sequence = request(name, tokens, remote=True, reserved=reserved)
    plan.add(sequence)
    plan.open(sequence, max(first, VIEW.first_block(len(tokens))))
    assert list(plan.schedule(1.0, MODEL).granted) == [sequence]
    sequence.num_received_blocks = sequence.num_computed // SIZE
    return sequence


def test_a_long_answer_owns_the_blocks_of_its_window() -> None:
    plan, sequence = scheduler(MOST + 2), request("a", [1] * 3)
    plan.add(sequence)
    for _ in range(300):
        run(plan)
        assert plan.check_integrity().owned == sequence.num_owned <= MOST
    assert sequence.num_tokens == 303 and sequence.blocks[: sequence.num_gone] == [HOLE] * sequence.num_gone


def test_a_prompt_is_computed_here_in_the_blocks_of_a_step() -> None:
    plan, sequence = scheduler(VIEW.span_blocks(CHUNK)), request("a", list(range(200)))
    plan.add(sequence)
    while sequence.num_remaining != 1:
        run(plan)
        assert plan.check_integrity().owned <= VIEW.span_blocks(CHUNK)
    assert sequence.num_owned <= MOST


def test_more_sequences_fit_in_the_same_blocks() -> None:
    running = {}
    for window in (0, WINDOW):
        plan = scheduler(40, window=window)
        for number in range(16):
            sequence = request(str(number), [number] * 60, remote=True)
            plan.add(sequence)
            plan.open(sequence, plan.window.first_block(60))
        running[window] = len(plan.schedule(1.0, MODEL).granted)
    assert running == {0: 2, WINDOW: 13}


def test_only_the_blocks_of_the_window_are_asked_for() -> None:
    plan = scheduler()
    sequence = granted(plan, "a", list(range(60)))
    first = VIEW.first_block(60)
    assert sequence.num_received_blocks == first == sequence.num_gone == 12
    assert sequence.num_owned == 15 - first
    plan.start_decoding(sequence)
    plan.remove(sequence)
    assert plan.check_integrity().cached == 15 - first
    again = granted(plan, "b", list(range(60)))
    assert again.num_received_blocks == 15  # all of the window is here
    plan.remove(again, 15)


def test_blocks_that_a_transfer_reads_are_kept() -> None:
    plan, sequence = scheduler(), request("a", [1] * 8)
    plan.add(sequence)
    run(plan)
    sequence.lent = True
    for _ in range(20):
        run(plan)
    assert sequence.num_gone == 0 and sequence.num_owned == 7
    sequence.lent = False
    run(plan)
    assert sequence.num_owned <= MOST
    plan.check_integrity()


def test_blocks_that_a_step_in_flight_reads_are_kept() -> None:
    plan, sequence = scheduler(), request("a", [1] * 8)
    plan.add(sequence)
    run(plan)
    for _ in range(40):
        (chunk,) = plan.schedule(1.0, MODEL).chunks
        plan.launched(chunk)
        (ahead,) = plan.schedule(1.0, MODEL).chunks
        plan.launched(ahead)
        assert sequence.num_gone <= VIEW.first_block(chunk.start)
        assert plan.completed(chunk)
        sequence.append(SampledToken(7))
        assert sequence.num_gone == VIEW.first_block(ahead.start)
        assert plan.completed(ahead)
        sequence.append(SampledToken(7))
    plan.remove(sequence)
    assert plan.check_integrity().owned == 0


def test_a_sequence_is_recomputed_behind_its_last_window_alone() -> None:
    plan, sequence = scheduler(), request("a", list(range(60)))
    plan.add(sequence)
    while sequence.num_remaining != 1:
        run(plan)
    plan._preempt(sequence)
    (chunk,) = plan.schedule(1.0, MODEL).chunks
    assert (chunk.start, chunk.num_tokens) == (60, 1) and sequence.num_owned <= MOST
    plan.remove(sequence)
    plan.check_integrity()


def test_a_second_sender_may_begin_further_on_than_blocks_have_come() -> None:
    """In a hand-over that is tried again: what lies between never comes, is not needed, and is never published."""
    plan = scheduler()
    sequence = granted(plan, "a", list(range(30)), reserved=40)
    assert sequence.num_received_blocks == VIEW.first_block(30) == 5
    sequence.num_received_blocks = 6
    later = VIEW.first_block(50)
    plan.skip_to(sequence, later)
    assert sequence.num_received_blocks == sequence.num_gone == later == 10
    for token in range(21):
        sequence.append(SampledToken(token))
    plan.start_decoding(sequence)
    hashes = sequence.hasher.extend(sequence.token_ids)
    assert [bool(plan.pool.match([one])) for one in hashes] == [False] * later + [True] * (51 // SIZE - later)
    plan.remove(sequence)
    assert plan.check_integrity().owned == 0


def test_tokens_of_a_hand_over_may_be_fewer_than_the_blocks_that_are_gone() -> None:
    """The sender is far beyond what the receiver knows; then the transfer fails, and nothing is published."""
    plan = scheduler()
    sequence = granted(plan, "a", list(range(9)), reserved=80, first=12)
    plan.prefill_locally(sequence, 14)
    assert plan.check_integrity().cached == 0
    run(plan)
    assert sequence.num_gone == 0 and sequence.num_computed == 8


def opened(first: int, blocks: int) -> KVOpen:
    fields = {"worker_id": "p", "epoch": 1, "decode_epoch": 1, "fingerprint": "f", "first_block": first}
    return KVOpen(request_id="a", attempt=0, num_blocks=blocks, **fields)  # type: ignore[arg-type]


def test_kv_that_lacks_blocks_of_the_window_is_refused() -> None:
    prompt, moved = request("a", [1] * 60, remote=True), request("a", [1] * 60, remote=True, reserved=20)
    assert not prompt.mismatch(opened(12, 15), VIEW) and not prompt.mismatch(opened(0, 15), VIEW)
    assert "from 13 on, but the window begins in block 12" in prompt.mismatch(opened(13, 15), VIEW)
    assert not moved.mismatch(opened(13, 20), VIEW)  # by then it may have more tokens
    assert prompt.mismatch(opened(1, 15), Window(0, SIZE))


@pytest.mark.parametrize(("first", "fits"), [(12, True), (14, False)])
def test_a_hand_over_that_ends_before_its_window_is_refused(first: int, fits: bool) -> None:
    rules = DecodeRules((), vocab_size=256, max_model_len=999, max_prompt_len=999)
    sequence = request("a", [1] * 60, remote=True, reserved=20)
    sequence.first_block = first
    done = KVDone(request_id="a", attempt=0, first_token=5, num_blocks=15)
    if fits:
        assert rules.received_tokens(sequence, done, num_blocks=15, window=VIEW) == [SampledToken(5)]
        return
    with pytest.raises(WireError, match="from 14 on, but the window begins in block 12"):
        rules.received_tokens(sequence, done, num_blocks=15, window=VIEW)
