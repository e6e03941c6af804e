"""What a decode worker computes next, by example."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.blocks.block_hash import BlockHasher
from common.engine.kv.block_pool import BlockPool
from common.errors import BlockError
from common.latency.step_model import StepModel
from common.wire.message_fields import pack_tokens
from common.wire.messages import DecodeRequest
from common.wire.sampling_params import SampledToken, SamplingParams
from decode_worker.scheduler import DecodeScheduler, SchedulerOutput
from decode_worker.sequence import PRIORITY_LEVEL_S, DecodeSequence, RequestStatus

SIZE = 4
MODEL = StepModel()


def scheduler(num_blocks: int = 32, *, seqs: int = 8, chunk: int = 8, watermark: float = 0.0) -> DecodeScheduler:
    return DecodeScheduler(
        BlockPool(num_blocks, SIZE), max_num_seqs=seqs, local_prefill_chunk=chunk, watermark=watermark
    )


def request(
    name: str, tokens: list[int], at: float = 0.0, *, remote: bool = False, priority: int = 0
) -> DecodeSequence:
    status = RequestStatus.EXPECTING if remote else RequestStatus.WAITING
    wire = DecodeRequest(
        request_id=name, attempt=0, prompt=pack_tokens(tokens), params=SamplingParams(max_tokens=99),
        prefill_worker="p" if remote else "", priority=priority,
    )  # fmt: skip
    return DecodeSequence(b"r", wire, list(tokens), BlockHasher(SIZE), at, at + 60.0, status=status)


def run(plan: DecodeScheduler) -> SchedulerOutput:
    """Compute one step; every sampled token is 7."""
    output = plan.schedule(1.0, MODEL)
    for chunk in output.chunks:
        plan.advance(chunk)
        if chunk.num_tokens and chunk.sequence.num_remaining == 0:
            chunk.sequence.append(SampledToken(7))
    return output


def shape(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.request_id, chunk.start, chunk.num_tokens) for chunk in output.chunks]


def decoding(plan: DecodeScheduler, name: str, num_tokens: int, at: float) -> DecodeSequence:
    """A sequence that has come to decoding through a local prefill."""
    sequence = request(name, [ord(name)] * num_tokens, at)
    plan.add(sequence)
    while sequence.num_remaining != 1 or sequence.status is not RequestStatus.RUNNING:
        run(plan)
    return sequence


def granted(plan: DecodeScheduler, name: str, num_tokens: int, at: float) -> DecodeSequence:
    sequence = request(name, [ord(name)] * num_tokens, at, remote=True)
    plan.add(sequence)
    plan.open(sequence)
    assert list(plan.schedule(1.0, MODEL).granted) == [sequence]
    return sequence


def test_a_local_prefill_goes_in_chunks_beside_decoding() -> None:
    plan = scheduler(chunk=8)
    decoding(plan, "a", 3, 1.0)
    plan.add(request("b", list(range(12)), 2.0))
    assert shape(run(plan)) == [("a", 3, 1), ("b", 0, 8)]
    assert shape(run(plan)) == [("a", 4, 1), ("b", 8, 4)]
    assert shape(run(plan)) == [("a", 5, 1), ("b", 12, 1)]


def test_a_short_local_prefill_passes_a_long_one() -> None:
    plan = scheduler(chunk=8)
    plan.add(request("a", list(range(20)), 1.0))
    assert shape(run(plan)) == [("a", 0, 8)]
    plan.add(request("b", [1] * 3, 2.0))
    assert shape(run(plan)) == [("b", 0, 3), ("a", 8, 5)]


def test_an_expected_request_owns_nothing_and_waits_for_nothing() -> None:
    plan = scheduler()
    plan.add(request("a", [1] * 8, remote=True))
    assert not plan.has_work and plan.check_integrity().owned == 0


def test_a_grant_reserves_the_whole_prompt() -> None:
    plan = scheduler()
    sequence = granted(plan, "a", 10, 1.0)
    assert sequence.status is RequestStatus.TRANSFERRING and plan.num_transferring == 1
    assert plan.check_integrity().owned == 3


def test_reservations_count_against_admission() -> None:
    plan = scheduler(num_blocks=4)
    first = granted(plan, "a", 12, 1.0)
    second = request("b", [2] * 8, 2.0, remote=True)
    plan.add(second)
    plan.open(second)
    assert not plan.has_work and not plan.schedule(1.0, MODEL).granted
    plan.remove(first)
    assert list(plan.schedule(1.0, MODEL).granted) == [second]


def test_reservations_count_against_the_batch() -> None:
    plan = scheduler(seqs=1)
    granted(plan, "a", 4, 1.0)
    plan.add(request("b", [2] * 4, 2.0))
    assert not plan.has_work


def test_headroom_is_kept_for_those_already_here_but_not_from_the_only_one() -> None:
    plan = scheduler(num_blocks=10, watermark=0.2)
    granted(plan, "a", 36, 1.0)
    plan.add(request("b", [2] * 4, 2.0))
    assert not plan.has_work  # a block is free, two must stay so


def test_a_request_whose_grammar_is_compiled_may_be_announced_again() -> None:
    plan = scheduler()
    sequence = request("a", [1] * 9, remote=True)
    sequence.request = structs.replace(sequence.request, params=SamplingParams(max_tokens=4, grammar="g"))
    plan.add(sequence)
    plan.open(sequence)
    assert plan.unready == [sequence]
    plan.expect_again(sequence)
    assert not plan.unready and sequence.status is RequestStatus.EXPECTING
    plan.open(sequence)
    plan.remove(sequence)
    assert not plan.unready and not plan.queue and plan.check_integrity().owned == 0


def test_younger_requests_pass_one_that_does_not_fit_until_they_have_as_many_blocks_as_it_needs() -> None:
    plan = scheduler(num_blocks=16)
    first = request("first", [1] * 36, 0.0)  # 9 of 16 blocks, and one more as it decodes
    plan.add(first)
    run(plan)
    large = request("large", [2] * 32, 1.0)
    plan.add(large)
    for at in range(2, 7):
        plan.add(request(f"small{at}", [at] * 11, float(at)))  # 3 blocks each
    assert plan.has_work
    run(plan)
    assert [s.request_id for s in plan.running] == ["first", "small2", "small3"]
    assert large.num_passing_blocks == 6
    for small in plan.running[1:]:
        plan.remove(small)
    run(plan)  # there is room for two more, but then nine blocks would have passed one that needs eight
    assert [s.request_id for s in plan.running] == ["first"]
    plan.remove(first)
    run(plan)
    assert [s.request_id for s in plan.running] == ["large", "small4", "small5"]
    assert large.num_passing_blocks == 0, "it waits no longer"
    assert plan.check_integrity().owned == 8 + 2 * 3


def test_nothing_passes_a_preempted_sequence() -> None:
    plan = scheduler(num_blocks=9)
    for at, name in enumerate("ab"):
        decoding(plan, name, 14, float(at))
    while not (preempted := run(plan).preempted):
        assert all(sequence.num_tokens < 20 for sequence in plan.running)
    assert [s.request_id for s in preempted] == ["b"]
    plan.add(request("small", [3], 2.0))
    run(plan)
    assert [s.request_id for s in plan.running] == ["a"]


def test_a_received_sequence_decodes_in_the_next_step_and_shares_its_prefix() -> None:
    plan = scheduler()
    sequence = granted(plan, "a", 8, 1.0)
    plan.start_decoding(sequence)
    sequence.append(SampledToken(5))
    assert shape(run(plan)) == [("a", 8, 1)]
    assert plan.num_transferring == 0
    assert plan.pool.match(sequence.hasher.hashes) == sequence.blocks[:2]


def test_a_full_hit_is_granted_with_nothing_missing() -> None:
    plan = scheduler()
    plan.remove(decoding(plan, "a", 8, 1.0))
    assert granted(plan, "a", 8, 2.0).num_computed == 8


def test_a_local_prefill_of_a_full_hit_still_computes_the_last_token() -> None:
    plan = scheduler()
    plan.remove(decoding(plan, "a", 8, 1.0))
    plan.add(request("b", [ord("a")] * 8, 2.0))
    assert shape(run(plan)) == [("b", 4, 4)]


def test_the_youngest_loses_its_blocks_and_is_recomputed_in_chunks() -> None:
    plan = scheduler(num_blocks=6, chunk=4)
    old, young = decoding(plan, "a", 10, 1.0), decoding(plan, "b", 9, 2.0)
    while not young.num_preemptions:
        output = run(plan)
    assert list(output.preempted) == [young] and plan.queue == [young]
    assert plan.running == [old] and young.blocks == []
    plan.remove(old)
    sizes = [chunk.num_tokens for _ in range(4) for chunk in run(plan).chunks]
    assert max(sizes) <= 4
    assert plan.running == [young] and young.num_preemptions == 1


def test_a_preempted_sequence_goes_before_younger_ones() -> None:
    plan = scheduler(num_blocks=6, chunk=8)
    old, young = decoding(plan, "a", 10, 1.0), decoding(plan, "b", 9, 2.0)
    plan.add(request("c", [3], 3.0))
    while young.status is not RequestStatus.PREEMPTED:
        run(plan)
    assert [sequence.request_id for sequence in plan.queue][:1] == ["b"]
    plan.remove(old)
    plan.schedule(1.0, MODEL)
    assert [sequence.request_id for sequence in plan.running] == ["b", "c"]


def test_received_blocks_survive_the_loss_of_the_prefill_worker() -> None:
    plan = scheduler()
    sequence = granted(plan, "a", 12, 1.0)
    plan.prefill_locally(sequence, num_received=2)
    assert plan.num_transferring == 0
    assert shape(run(plan)) == [("a", 8, 4)]


def test_all_received_but_no_first_token_computes_the_last_block() -> None:
    plan = scheduler()
    sequence = granted(plan, "a", 12, 1.0)
    plan.prefill_locally(sequence, num_received=3)
    assert shape(run(plan)) == [("a", 8, 4)]


def test_what_has_arrived_of_known_tokens_stays_cached_when_its_request_ends() -> None:
    plan = scheduler()
    sequence = request("a", [1] * 10, remote=True)
    sequence.request = structs.replace(sequence.request, num_reserved_tokens=6)
    plan.add(sequence)
    plan.open(sequence)
    plan.schedule(1.0, MODEL)
    assert len(sequence.blocks) == 4
    plan.remove(sequence, num_received=3)  # the third holds tokens that are not known here
    assert (plan.check_integrity().cached, plan.num_transferring) == (2, 0)
    plan.add(request("b", [1] * 10, 2.0))
    assert shape(run(plan)) == [("b", 8, 2)]


def test_waiting_tokens_are_those_to_be_computed_here() -> None:
    plan = scheduler(chunk=8)
    plan.add(request("a", [1] * 20, 1.0))
    remote = request("b", [2] * 20, 2.0, remote=True)
    plan.add(remote)
    assert plan.num_waiting_tokens == 20
    run(plan)
    plan.open(remote)
    assert plan.num_waiting_tokens == 12  # all that is left of the prompt; a decoding sequence has none


# ---------------------------------------------------------------- steps in flight


def launch(plan: DecodeScheduler) -> SchedulerOutput:
    """Schedule a step and leave it in flight."""
    output = plan.schedule(1.0, MODEL)
    for chunk in output.chunks:
        plan.launched(chunk)
    return output


def test_a_step_is_scheduled_while_the_one_before_is_in_flight() -> None:
    plan = scheduler()
    sequence = decoding(plan, "a", 7, 0.0)  # 8 tokens, the last one sampled
    first = launch(plan)
    assert shape(first) == [("a", 7, 1)]
    assert shape(launch(plan)) == [("a", 8, 1)]
    assert (len(sequence.blocks), sequence.num_pending, sequence.num_remaining) == (3, 2, 1)
    assert plan.completed(first.chunks[0])
    sequence.append(SampledToken(7))
    assert (sequence.num_published, sequence.num_pending) == (2, 1)


def test_a_block_is_published_when_its_last_step_has_ended() -> None:
    plan = scheduler()
    sequence = decoding(plan, "a", 7, 0.0)
    chunks = launch(plan).chunks
    assert (sequence.num_computed, sequence.num_published) == (8, 1)
    plan.completed(chunks[0])
    assert sequence.num_published == 2


def test_a_block_whose_step_failed_is_not_published() -> None:
    plan = scheduler()
    sequence = decoding(plan, "a", 7, 0.0)
    failed, later = launch(plan).chunks[0], launch(plan).chunks[0]
    plan.failed(failed)
    assert (sequence.num_pending, sequence.num_published) == (1, 1)
    with pytest.raises(BlockError, match="written from slot 0|only 3 of 4 slots"):
        plan.completed(later)  # had the engine not removed the sequence


def test_lent_blocks_cannot_be_released() -> None:
    plan = scheduler()
    sequence = decoding(plan, "a", 7, 0.0)
    sequence.lent = True
    with pytest.raises(BlockError, match="a transfer or disk read uses"):
        plan.remove(sequence)


def test_a_sequence_is_withdrawn_from_transfers_before_it_loses_its_blocks() -> None:
    plan = scheduler(num_blocks=4)
    for at, name in enumerate("ab"):
        decoding(plan, name, 7, float(at)).lent = name == "b"
    for sequence in plan.running:
        sequence.append(SampledToken(7))
    seen: list[tuple[str, int]] = []

    def withdraw(sequence: DecodeSequence) -> None:
        seen.append((sequence.request_id, len(sequence.blocks)))
        sequence.lent = False

    assert [s.request_id for s in plan.schedule(1.0, MODEL, withdraw).preempted] == ["b"]
    assert seen == [("b", 2)]


def test_a_removed_sequence_keeps_its_blocks_until_every_step_of_it_has_ended() -> None:
    plan = scheduler()
    sequence = decoding(plan, "a", 7, 0.0)
    chunks = [launch(plan).chunks[0] for _ in range(2)]
    plan.remove(sequence)
    assert len(plan) == 0 and not plan.running and plan.check_integrity().owned == 3
    assert not plan.completed(chunks[0])
    assert plan.check_integrity().owned == 3
    assert not plan.completed(chunks[1])
    assert plan.check_integrity().owned == 0


def test_who_is_in_flight_is_not_preempted() -> None:
    plan = scheduler(num_blocks=5)
    for at, name in enumerate("ab"):
        decoding(plan, name, 7, float(at))
    assert not plan.lacks_blocks
    launch(plan)
    assert plan.lacks_blocks
    with pytest.raises(BlockError, match="in flight"):
        plan.schedule(1.0, MODEL)


def test_guesses_leave_a_block_for_everybodys_next_token() -> None:
    plan = scheduler(num_blocks=6)
    first, second = (decoding(plan, name, 2, at=0.0) for name in "ab")  # three or four tokens each, in one block
    assert [len(one.blocks) for one in (first, second)] == [1, 1]
    left = SIZE - first.num_planned
    assert plan.room_for(first, left) == left and len(first.blocks) == 1
    assert plan.room_for(first, left + 3) == left + 3 and len(first.blocks) == 2  # of four free ones
    assert plan.room_for(second, 20) == SIZE - second.num_planned  # five blocks are not there
    assert plan.room_for(second, SIZE) == SIZE and len(second.blocks) == 2
    assert plan.pool.num_available == 2
    assert plan.room_for(first, 3 * SIZE) == 2 * SIZE - first.num_planned  # one for each of them stays
    plan.check_integrity()


# ---------------------------------------------------------------- priority


def test_a_level_of_priority_counts_as_some_seconds_of_waiting() -> None:
    plan = scheduler(seqs=1)
    decoding(plan, "r", 3, 0.0)
    later = {"batch": -1, "urgent": 2}
    for name, priority in later.items():
        plan.add(request(name, [1] * 4, 1.0, priority=priority))
    plan.add(request("aged", [1] * 4, 1.0 - 2 * PRIORITY_LEVEL_S - 0.1))
    assert [sequence.request_id for sequence in plan.queue] == ["aged", "urgent", "batch"]


def test_the_lowest_priority_is_preempted_first_and_then_the_youngest() -> None:
    plan = scheduler(num_blocks=4)
    for name, at, priority in (("a", 1.0, 0), ("b", 2.0, 1), ("c", 3.0, 1)):
        plan.add(request(name, [ord(name)] * 3, at, priority=priority))
    lost = [sequence.request_id for _ in range(8) for sequence in run(plan).preempted]
    assert lost[:2] == ["a", "c"]
