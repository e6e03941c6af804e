"""The decode scheduler under any interleaving of what can happen to its requests."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.blocks.block_hash import BlockHasher
from common.engine.kv.block_pool import BlockPool
from common.latency.step_model import StepModel
from common.wire.message_fields import pack_tokens
from common.wire.messages import DecodeRequest
from common.wire.sampling_params import SampledToken, SamplingParams
from decode_worker.scheduler import DecodeScheduler, SchedulerOutput
from decode_worker.sequence import DecodeSequence, RequestStatus

from ..examples import examples

SIZE, BLOCKS, MAX_SEQS, CHUNK = 4, 12, 4, 6


class SchedulerMachine(RuleBasedStateMachine):
    """`cells` models the KV cache: the history that each slot was computed from, here or at a prefill worker."""

    WINDOW = 0

    def __init__(self) -> None:
        super().__init__()
        self.plan = DecodeScheduler(
            BlockPool(BLOCKS, SIZE), max_num_seqs=MAX_SEQS, local_prefill_chunk=CHUNK, watermark=0.1,
            window=self.WINDOW,
        )  # fmt: skip
        self.cells: dict[tuple[int, int], tuple[int, ...]] = {}
        self.count = 0

    # ------------------------------------------------------------ what can happen

    @rule(
        family=st.integers(0, 2), shared=st.integers(0, 12), own=st.integers(1, 8), output=st.integers(1, 20),
        remote=st.booleans(), reserved=st.sampled_from([0, 0, 3, 9]),
    )  # fmt: skip
    def add(self, family: int, shared: int, own: int, output: int, remote: bool, reserved: int) -> None:
        self.count += 1
        tokens = [family] * shared + [100 + self.count] * own
        wire = DecodeRequest(
            request_id=f"r{self.count}", attempt=0, prompt=pack_tokens(tokens),
            params=SamplingParams(max_tokens=min(output, SIZE * BLOCKS - len(tokens))),
            num_reserved_tokens=min(reserved, output - 1, SIZE * BLOCKS - len(tokens) - 1) if remote else 0,
        )  # fmt: skip
        status = RequestStatus.EXPECTING if remote else RequestStatus.WAITING
        at = float(self.count)
        self.plan.add(DecodeSequence(b"r", wire, tokens, BlockHasher(SIZE), at, at + 60.0, status=status))

    @precondition(lambda self: self.any_in(RequestStatus.EXPECTING))
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        self.announce(self.pick(data, RequestStatus.EXPECTING))

    @precondition(lambda self: self.any_in(RequestStatus.TRANSFERRING))
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        sequence = self.pick(data, RequestStatus.TRANSFERRING)
        self.arrive(sequence, data.draw(st.integers(0, sequence.request.num_reserved_tokens)))

    @precondition(lambda self: self.decoding())
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        self.plan.pause(data.draw(st.sampled_from(self.decoding())))

    @precondition(lambda self: self.any_in(RequestStatus.LEAVING))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.plan.resume(self.pick(data, RequestStatus.LEAVING))

    @precondition(lambda self: self.any_in(RequestStatus.EXPECTING, RequestStatus.OPENED, RequestStatus.TRANSFERRING))
    @rule(data=st.data(), num_received=st.integers(0, 5))
    def prefill_locally(self, data: st.DataObject, num_received: int) -> None:
        sequence = self.pick(data, RequestStatus.EXPECTING, RequestStatus.OPENED, RequestStatus.TRANSFERRING)
        self.plan.prefill_locally(sequence, self.arrive_in_part(sequence, num_received))

    @precondition(lambda self: len(self.plan) > 0)
    @rule(data=st.data(), num_received=st.integers(0, 5))
    def abort(self, data: st.DataObject, num_received: int) -> None:
        sequence = self.pick(data, *RequestStatus)
        is_coming = sequence.status is RequestStatus.TRANSFERRING
        self.plan.remove(sequence, self.arrive_in_part(sequence, num_received) if is_coming else 0)

    @rule()
    def reset(self) -> None:
        self.plan.pool.reset_cache()

    @rule(fails=st.sampled_from([False, False, False, True]))
    def step(self, fails: bool) -> None:
        running = list(self.plan.running)
        queue = list(self.plan.queue)
        output = self.plan.schedule(0.0, StepModel())
        self.check(output, running, queue)
        for chunk in output.chunks:
            sequence = chunk.sequence
            if fails:
                self.plan.remove(sequence)
                continue
            self.compute(sequence, chunk.start, chunk.start + chunk.num_tokens)
            sample = chunk.sample
            self.plan.advance(chunk)
            if sample:
                self.append(sequence)

    # ------------------------------------------------------------ what must hold

    def check(self, output: SchedulerOutput, running: list[DecodeSequence], queue: list[DecodeSequence]) -> None:
        decoding = [chunk for chunk in output.chunks if chunk.sequence.num_remaining == 1]
        prefill = [chunk for chunk in output.chunks if chunk.sequence.num_remaining > 1]
        assert sum(chunk.num_tokens for chunk in prefill) <= CHUNK
        assert [chunk.sequence for chunk in decoding] == [s for s in self.plan.running if s.num_remaining == 1]
        kept = [s.accepted_at for s in running if s not in output.preempted]
        assert all(s.accepted_at > age for s in output.preempted for age in kept)
        left = [s for s in queue if s.status is not RequestStatus.RUNNING and s not in output.granted]
        admitted = [s for s in queue if s not in left]
        for waiting in left:
            passing = [s for s in admitted if s.accepted_at > waiting.accepted_at]
            assert not passing or waiting.status is not RequestStatus.PREEMPTED
            assert waiting.num_passing_blocks <= -(-waiting.num_room_tokens // SIZE)

    @invariant()
    def every_block_has_its_owner(self) -> None:
        self.plan.check_integrity()
        assert len(self.plan.running) + self.plan.num_transferring + self.plan.num_leaving <= MAX_SEQS
        assert self.plan.num_transferring == len(self.having(RequestStatus.TRANSFERRING))
        assert self.plan.num_leaving == len(self.having(RequestStatus.LEAVING))
        assert [s.accepted_at for s in self.plan.queue] == sorted(s.accepted_at for s in self.plan.queue)

    @invariant()
    def what_counts_as_computed_was_computed_from_this_history(self) -> None:
        for sequence in self.plan:
            gone, computed = sequence.num_gone, sequence.num_computed
            if sequence.status in (RequestStatus.RUNNING, RequestStatus.LEAVING):
                assert gone == self.plan.window.first_block(computed)
            for position in range(max(gone * SIZE, computed + 1 - (self.WINDOW or computed + 1)), computed):
                assert self.cells[self.cell(sequence, position)] == tuple(sequence.token_ids[: position + 1])

    def teardown(self) -> None:
        for _ in range(2000):
            for sequence in self.having(RequestStatus.EXPECTING):
                self.announce(sequence)
            for sequence in self.having(RequestStatus.TRANSFERRING):
                self.arrive(sequence)
            for sequence in self.having(RequestStatus.LEAVING):
                self.plan.resume(sequence)
            if not len(self.plan):
                break
            assert self.plan.has_work
            self.step(fails=False)
        assert len(self.plan) == 0
        assert self.plan.check_integrity().owned == 0

    # ------------------------------------------------------------ inside

    def having(self, *statuses: RequestStatus) -> list[DecodeSequence]:
        return [sequence for sequence in self.plan if sequence.status in statuses]

    def decoding(self) -> list[DecodeSequence]:
        return [sequence for sequence in self.having(RequestStatus.RUNNING) if sequence.num_remaining == 1]

    def any_in(self, *statuses: RequestStatus) -> bool:
        return bool(self.having(*statuses))

    def pick(self, data: st.DataObject, *statuses: RequestStatus) -> DecodeSequence:
        return data.draw(st.sampled_from(self.having(*statuses)))

    def announce(self, sequence: DecodeSequence) -> None:
        self.plan.open(sequence, self.plan.window.first_block(sequence.num_request_tokens))

    def arrive(self, sequence: DecodeSequence, num_more: int = 0) -> None:
        """In a hand-over with tokens beyond the request's."""
        for _ in range(num_more):
            sequence.append(SampledToken(len(sequence.token_ids) % 3))
        self.compute(sequence, sequence.num_computed, sequence.num_tokens)
        self.plan.start_decoding(sequence)
        self.append(sequence)

    def arrive_in_part(self, sequence: DecodeSequence, num_more: int) -> int:
        """The blocks that are here once `num_more` have come, some of them for tokens still unknown here."""
        first = sequence.num_computed // SIZE
        num_received = min(first + num_more, len(sequence.blocks))
        self.compute(sequence, first * SIZE, min(num_received * SIZE, sequence.num_tokens))
        return num_received

    def append(self, sequence: DecodeSequence) -> None:
        sequence.append(SampledToken(len(sequence.token_ids) % 3))
        if sequence.num_output_tokens >= sequence.params.max_tokens:
            self.plan.remove(sequence)

    def compute(self, sequence: DecodeSequence, start: int, end: int) -> None:
        for position in range(start, end):
            self.cells[self.cell(sequence, position)] = tuple(sequence.token_ids[: position + 1])

    @staticmethod
    def cell(sequence: DecodeSequence, position: int) -> tuple[int, int]:
        return sequence.blocks[position // SIZE], position % SIZE


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    derandomize=True, deadline=None, max_examples=examples(80), stateful_step_count=60
)


class WindowedMachine(SchedulerMachine):
    """The model looks back at few tokens, so blocks go back while a sequence runs."""

    WINDOW = 7


TestWindowedMachine = WindowedMachine.TestCase
TestWindowedMachine.settings = TestSchedulerMachine.settings
