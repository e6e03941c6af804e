"""A prefill worker in virtual time: production's scheduler, modelled steps and transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from benchmarks.simulator.workers.first_come import FirstComePrefill
from benchmarks.simulator.workers.transfer import Acknowledged, Failed, Transfer
from benchmarks.simulator.workers.worker import Received, SimulatedWorker
from benchmarks.simulator.world.load import SimulatedRequest
from benchmarks.simulator.world.tokens import CountedTokens, InjectedHasher
from common.config import PrefillWorkerConfig
from common.engine.kv.block_pool import BlockPool
from common.engine.sequences.step_budget import Knob
from common.latency.step_model import StepModel, StepShape
from common.wire.messages import AbortRequest, PrefillRequest, Timeline, TokenDelta
from prefill_worker.scheduler import PrefillChunk, PrefillScheduler, PrefillSequence


class FixedPrefillScheduler(PrefillScheduler):
    """Production's scheduler, whose steps are as large as the flag allows."""

    def _step_size(self, prompts: Sequence[PrefillSequence], model: StepModel) -> Knob:
        return Knob(self.most_step_tokens, "bound")


class SimulatedPrefillWorker(SimulatedWorker[PrefillSequence]):
    """See `PrefillEngine`."""

    scheduler: PrefillScheduler

    def _reset(self) -> None:
        super()._reset()
        self._open: dict[str, Transfer] = {}
        self._chunks: Sequence[PrefillChunk] = ()
        self._step_shape, self._began_step_at = StepShape(), 0.0

    @cached_property
    def settings(self) -> PrefillWorkerConfig:
        return self.pool.of_prefill

    def _new_scheduler(self, pool: BlockPool) -> PrefillScheduler:
        kind = FixedPrefillScheduler if self.pool.fixed else PrefillScheduler
        return kind(
            pool,
            max_num_batched_tokens=self.settings.step_tokens,
            max_num_seqs=self.settings.places,
            window=self.world.scenario.model.window,
        )

    def _apply(self, command: object) -> None:
        match command:
            case Received(router, PrefillRequest() as request):
                self._accept(router, request)
            case Received(router, AbortRequest(request_id=request_id, attempt=attempt)):
                sequence = self.scheduler.find(request_id)
                if sequence is not None and sequence.attempt <= attempt and sequence.router == router:
                    self._drop(sequence, "aborted")
            case Acknowledged(transfer):
                if (sequence := self._sequence_of(transfer)) is not None:
                    self._forget(sequence)
            case Failed(transfer, why):
                if (sequence := self._sequence_of(transfer)) is not None:
                    self._fail(sequence, "transfer", why)
            case _:
                raise TypeError(f"a prefill worker takes no {command!r}")

    def _begin(self, now: float) -> float | None:
        output = self.scheduler.schedule(now, self.model)
        for sequence in output.admitted:
            self._admitted(sequence)
        if not output.chunks:
            return None
        self._chunks, self._began_step_at = output.chunks, now
        shapes = (StepShape.of_prompt(chunk.start, chunk.start + chunk.num_tokens) for chunk in output.chunks)
        self._step_shape = StepShape.sum(shapes)
        return self.step_s(self._step_shape) * self._noise()

    def _complete(self, now: float) -> None:
        self.num_prompt_tokens += self._step_shape.num_tokens
        for chunk in self._chunks:
            self._computed(chunk, now)
        self._chunks = ()
        self._stepped(self._step_shape, now - self._began_step_at)

    # ------------------------------------------------------------ inside

    def _accept(self, router: bytes, request: PrefillRequest) -> None:
        self._serials[router] = max(request.serial, self._serials.get(router, 0))
        known = self.scheduler.find(request.request_id)
        if known is not None:
            if known.attempt >= request.attempt:
                return
            self._drop(known, "superseded by a new attempt")
        asked, now = self._asked(request), self.world.clock.now
        tokens = CountedTokens(asked.content.num_prompt_tokens + request.num_output_tokens)
        hasher = InjectedHasher(asked.content, self.scheduler.block_size)
        kind = FirstComePrefill if self.world.scenario.prompt_order == "first-come" else PrefillSequence
        sequence = kind(router, request, tokens, hasher, now, now + request.deadline_s)
        self.scheduler.add(sequence)
        self.scheduler.expect_hits(sequence)

    def _asked(self, request: PrefillRequest) -> SimulatedRequest:
        return self.world.requests[request.request_id]

    def _admitted(self, sequence: PrefillSequence) -> None:
        target = sequence.request.decode
        if target is None:
            return
        size = self.scheduler.block_size
        transfer = Transfer(
            self.world,
            self,
            self.world.receivers[target.worker_id],
            sequence.request_id,
            sequence.attempt,
            self.scheduler.blocks_for(sequence.num_tokens),
            size * self.world.scenario.model.kv_bytes_per_token,
            num_ready=sequence.num_computed // size,
            first_kept=self.scheduler.window.first_block(sequence.num_tokens),
        )
        self._open[sequence.request_id] = transfer
        sequence.lent = True
        transfer.announce()

    def _computed(self, chunk: PrefillChunk, now: float) -> None:
        sequence, sampled = chunk.sequence, chunk.sample
        num_ready = self.scheduler.advance(chunk, now)
        transfer = self._open.get(sequence.request_id)
        if sampled:
            self._report_first_token(sequence)
        if transfer is not None:
            transfer.progress(num_ready, computed=sampled)
        elif sampled:
            self._forget(sequence)

    def _report_first_token(self, sequence: PrefillSequence) -> None:
        self.num_output_tokens += 1
        num_output = sequence.request.num_output_tokens + 1
        reason = ""
        if num_output >= self._asked(sequence.request).output_len:
            reason = "length" if num_output >= sequence.params.max_tokens else "stop"
        delta = TokenDelta(
            sequence.request_id,
            sequence.attempt,
            sequence.request.num_output_tokens,
            (0,),
            reason,
            sequence.num_cached,
            (),
            Timeline(queue_s=sequence.admitted_at - sequence.accepted_at, prefill_s=sequence.prefill_s),
        )
        self._deltas[sequence.router].append(delta)

    def _sequence_of(self, transfer: Transfer) -> PrefillSequence | None:
        """The sequence of a transfer that is still the present one."""
        if self._open.get(transfer.request_id) is not transfer:
            return None
        return self.scheduler.find(transfer.request_id)

    def _drop(self, sequence: PrefillSequence, why: str) -> None:
        if (transfer := self._open.get(sequence.request_id)) is not None:
            transfer.fail(by_sender=True, why=why)
        self._forget(sequence)

    def _forget(self, sequence: PrefillSequence) -> None:
        self._open.pop(sequence.request_id, None)
        sequence.lent = False
        self.scheduler.remove(sequence)

    def transfers(self) -> list[Callable[[], None]]:
        return [transfer.drop for transfer in self._open.values()]
