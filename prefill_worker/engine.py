"""Engine of a prefill worker: receives prompts, and returns KV blocks and first tokens, or a vector per prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from common.blocks import BlockHasher
from common.engine.sampling import UNSAMPLED, SamplingRow
from common.engine.sequences import NO_PARTS, EngineParts, Reports, RequestEngine, RequestRules
from common.engine.transfer import KVSender, TransferEnded
from common.engine.worker import EngineConfig, EngineStatus, RequestReceived, Send, WorkerMetrics
from common.grammar import sampling_failure
from common.latency import StepShape
from common.wire import SampledToken
from common.wire.messages import KVDone, PrefillRequest, Timeline, TokenDelta
from prefill_worker.launcher import ChunkOutput, PromptLauncher
from prefill_worker.pipeline import PromptPipeline, PromptStep
from prefill_worker.scheduler import PrefillChunk, PrefillScheduler, PrefillSequence


class PrefillEngine(RequestEngine[PrefillRequest, PrefillSequence]):
    """Prefill engine. Owns the model, and the block pool through its scheduler. The KV sender only reads blocks."""

    role = "prefill"
    scheduler: PrefillScheduler

    def __init__(
        self,
        send: Send,
        config: EngineConfig,
        scheduler: PrefillScheduler,
        launcher: PromptLauncher,
        sender: KVSender,
        metrics: WorkerMetrics,
        parts: EngineParts = NO_PARTS,
    ) -> None:
        """If the `launcher` pools prompts, all requests are for vectors, otherwise for tokens."""
        rules = RequestRules(
            config.eos_token_ids,
            vocab_size=launcher.vocab_size,
            max_model_len=config.max_model_len,
            max_prompt_len=scheduler.window.longest(scheduler.pool.num_blocks, config.max_model_len),
            grammars=parts.grammars,
            pooling=launcher.pooling,
        )
        super().__init__(send, config, scheduler, rules, metrics, parts)
        self._reports = Reports(config.identity, self.emit)
        self._launcher, self._sender = launcher, sender
        self._device_failure = launcher.device_failure
        self._pipeline = PromptPipeline(scheduler, launcher)

    @property
    def is_prefill(self) -> bool:
        return True

    @property
    def has_work(self) -> bool:
        return self._pipeline.in_flight is not None or super().has_work

    @property
    def is_empty(self) -> bool:
        return super().is_empty and self._pipeline.in_flight is None

    def hold_s(self, now: float) -> float:
        """While a step runs, wait for more prompts until shortly before its end."""
        return self._pipeline.hold_s(now, self.step_fit.model)

    def apply(self, command: object) -> None:
        match command:
            case RequestReceived(router, PrefillRequest() as request):
                self._accept(router, request)
            case TransferEnded():
                self._on_transfer_ended(command)
            case _:
                super().apply(command)

    def step(self, now: float) -> None:
        if self._has_unused_adapters:
            self._drain()  # a step in flight may read them
            self._free_adapters()
        output = self.scheduler.schedule(now, self.step_fit.model, lambda each: self._read_tiers(each, now))
        for sequence in output.admitted:
            self._on_admitted(sequence, now)
        before, chunks = self._pipeline.in_flight, output.chunks
        self._in_step = [chunk.sequence for chunk in chunks]
        shape = StepShape.sum(chunk.shape for chunk in chunks)
        self.planned(shape if before is None else before.shape + shape)
        if chunks:
            self._launch(chunks, shape, now)
        if before is not None:
            self._complete(before)
        if not self._pipeline.runs_ahead:
            self._drain()
        self._in_step = ()

    def _launch(self, chunks: Sequence[PrefillChunk], shape: StepShape, now: float) -> None:
        if self._sender.quantises:
            self._clear_unused(chunks)
        rows = [self._row(chunk.sequence) for chunk in chunks if chunk.sample] if not self._launcher.pooling else []
        self._pipeline.launch(chunks, shape, rows, now)

    def _complete(self, step: PromptStep) -> None:
        """Wait for a launched step, and process its outputs. Others may read its blocks only afterwards."""
        self._in_step = [*(chunk.sequence for chunk in step.chunks), *self._in_step]
        computed, ended_at, step_s = self._pipeline.complete(step, time.monotonic)
        for chunk, output in computed:
            self._on_computed(chunk, output, ended_at)
        self._rate.add(step.shape.num_tokens, step_s)
        self.took(step.shape, step_s)
        self.metrics.steps.inc()
        self.metrics.step_seconds.observe(step_s)
        self._note_knobs({}, ended_at)

    def _drain(self) -> None:
        """Complete the step in flight, if any."""
        if self._pipeline.in_flight is not None:
            self._complete(self._pipeline.in_flight)

    def expire(self, now: float) -> None:
        if self._sender.failure is not None:
            raise RuntimeError("the KV sender thread has died") from self._sender.failure
        self._expire_requests(now)
        if self._pipeline.in_flight is None:
            self._free_adapters()

    def report_progress(self, *, has_stepped: bool) -> None:
        if not has_stepped:
            return  # no prompt has advanced: they wait for decode workers or blocks
        for sequence in self.scheduler:
            if not sequence.computed:
                delta = TokenDelta(sequence.request_id, sequence.attempt, sequence.request.num_output_tokens, ())
                self._reports.add_delta(sequence.router, delta)
        self._reports.flush()

    def snapshot(self) -> EngineStatus:
        """Return the status. The completed part of the step in flight is subtracted from the waiting time."""
        status = super().snapshot()
        elapsed_s = self._pipeline.elapsed_s(time.monotonic(), status.step_model)
        return replace(status, waiting_s=max(0.0, status.waiting_s - elapsed_s))

    def close(self) -> None:
        try:
            self._pipeline.close()
        finally:  # even if a step failed, otherwise their threads would keep the process alive
            self._sender.stop()
            self._grammars.close()
            self._restores.close()

    @property
    def _num_dropped_frames(self) -> int:
        return self._sender.num_dropped_frames

    def _overload(self) -> str:
        is_full = self.scheduler.num_waiting >= self._max_waiting
        return f"the queue of this worker is full ({self._max_waiting} prompts)" if is_full else ""

    def _add(
        self, router: bytes, request: PrefillRequest, token_ids: list[int], hasher: BlockHasher, now: float
    ) -> PrefillSequence:
        sequence = PrefillSequence(router, request, token_ids, hasher, now, now + request.deadline_s)
        self.scheduler.add(sequence)
        return sequence

    def _phase_of(self, sequence: PrefillSequence) -> str:
        return "transfer" if sequence.computed else "prefill" if sequence.blocks else "queue"

    def _on_admitted(self, sequence: PrefillSequence, now: float) -> None:
        request = sequence.request
        if request.decode is not None:
            size = self.scheduler.block_size
            first_block = self.scheduler.window.first_block(sequence.num_tokens)
            table, num_ready = self.scheduler.whole_table(sequence), sequence.num_computed // size
            key, target = (request.request_id, request.attempt), request.decode
            self._sender.open(*key, target, table, num_ready, first_block=first_block)
            sequence.lent = True
        self.metrics.queue_seconds.observe(now - sequence.accepted_at)
        self.metrics.prefix_queries.inc(sequence.num_tokens)
        self.metrics.prefix_hits.inc(sequence.num_cached)
        self.metrics.count_hits(sequence.num_cached)

    def _on_restored(self, sequence: PrefillSequence, num_blocks: int) -> None:
        self.metrics.prefix_hits.inc(num_blocks * self.scheduler.block_size)
        if sequence.request.decode is not None:
            self._progress(sequence, sequence.num_computed // self.scheduler.block_size)

    def _progress(self, sequence: PrefillSequence, num_ready: int, done: KVDone | None = None) -> None:
        """Let the sender send the computed blocks. With a window, pass the table, which has new blocks."""
        table = self.scheduler.whole_table(sequence) if self.scheduler.window else None
        self._sender.progress(sequence.request_id, sequence.attempt, num_ready, done, table)

    def _clear_unused(self, chunks: Sequence[PrefillChunk]) -> None:
        """Clear unused slots of last blocks: the scale of an 8-bit block covers all slots, including stale ones."""
        for chunk in chunks:
            num_used = chunk.sequence.num_tokens % self.scheduler.block_size
            if chunk.sample and num_used and chunk.sequence.request.decode is not None:
                self._launcher.clear_slots(chunk.sequence.blocks[-1], num_used)

    def _on_computed(self, chunk: PrefillChunk, output: ChunkOutput, now: float) -> None:
        sequence = chunk.sequence
        num_ready = self.scheduler.advance(chunk, now)
        if output.logprobs:
            self._reports.report_prompt_logprobs(sequence, chunk.start, output.logprobs)
        if output.sampled is not None:
            self._on_sampled(sequence, output.sampled, num_ready)
        elif output.vector is not None:
            self._on_pooled(sequence, output.vector)
        elif sequence.request.decode is not None:
            self._progress(sequence, num_ready)

    def _on_pooled(self, sequence: PrefillSequence, values: bytes) -> None:
        if not values:
            why = "the model's hidden states are not finite, no vector can be computed"
            self._fail(sequence, "prefill", why, retryable=False)
            return
        self._reports.report_pooled(sequence, values)
        self._report_result(sequence, None, "stop")
        self._drop(sequence, "finished")
        self.metrics.count_finished("stop")
        self.metrics.prefill_seconds.observe(sequence.prefill_s)
        self.metrics.prompt_tokens.inc(sequence.num_tokens)
        self.metrics.count_computed(sequence.num_tokens - sequence.num_cached)

    def _on_sampled(self, sequence: PrefillSequence, sampled: SampledToken, num_ready: int) -> None:
        if sequence.problems:
            self._fail(sequence, "sampling", sequence.problems[0], retryable=False)
            return
        if sampled.token_id >= self._launcher.vocab_size:
            self._fail(sequence, *sampling_failure(sequence.params, sequence.constraint, "prefill"), retryable=False)
            return
        reason = self._rules.finish_reason(sequence, sampled.token_id, num_more=1)
        self._report_result(sequence, sampled, reason)
        if sequence.request.decode is not None:
            # Also for a finished request: the decode worker finishes it by the same rule, and reports no failure.
            done = KVDone(
                request_id=sequence.request_id,
                attempt=sequence.attempt,
                first_token=sampled.token_id,
                logprobs=sampled.logprobs,
                num_cached_tokens=sequence.num_cached,
                prefill_s=sequence.prefill_s,
                computed_at=sequence.computed_at,
            )
            self._progress(sequence, num_ready, done)
        else:
            self._drop(sequence, "finished")
            self.metrics.count_finished(reason or "length")
        self.metrics.prefill_seconds.observe(sequence.prefill_s)
        self.metrics.prompt_tokens.inc(sequence.num_tokens)
        self.metrics.count_computed(sequence.num_tokens - sequence.num_cached)
        self.metrics.generation_tokens.inc()

    def _on_transfer_ended(self, event: TransferEnded) -> None:
        sequence = self.scheduler.find(event.request_id)
        if sequence is None or sequence.attempt != event.attempt:
            return
        if event.reason:
            self._fail(sequence, "transfer", event.reason, retryable=True)
            return
        metrics = self.metrics
        metrics.grant_wait_seconds.observe(event.grant_wait_s)
        metrics.transfer_seconds.observe(event.transfer_s)
        metrics.exposed_seconds.observe(event.exposed_s)
        metrics.transfer_bytes.inc(event.num_bytes)
        metrics.skipped_blocks.inc(event.num_skipped)
        metrics.count_transfer(event.transport)
        metrics.count_finished("transferred")
        # Even if it is still computing, because the decode worker needs nothing more.
        self._drop(sequence, "acknowledged")

    def _report_result(self, sequence: PrefillSequence, sampled: SampledToken | None, reason: str) -> None:
        """Report the first token, if any, and the end of a request without further tokens."""
        delta = TokenDelta(
            sequence.request_id,
            sequence.attempt,
            sequence.request.num_output_tokens,
            (sampled.token_id,) if sampled is not None else (),
            reason,
            sequence.num_cached,
            (sampled.logprobs,) if sampled is not None and sampled.logprobs is not None else (),
            Timeline(queue_s=sequence.admitted_at - sequence.accepted_at, prefill_s=sequence.prefill_s),
        )
        self._reports.add_delta(sequence.router, delta)
        self._reports.flush()

    def _row(self, sequence: PrefillSequence) -> SamplingRow:
        try:
            limits = self._rules.limits(sequence)
        except Exception as error:  # a request's parameters must not fail the step of others
            sequence.note_problem(error)
            return UNSAMPLED
        return SamplingRow(
            sequence.params,
            position=sequence.num_tokens,
            output_token_ids=sequence.output_token_ids,
            prompt_token_ids=sequence.token_ids[: sequence.num_prompt_tokens],
            limits=limits,
            constraint=sequence.constraint,
            problems=sequence.problems,
        )

    def _fail(self, sequence: PrefillSequence, phase: str, why: str, *, retryable: bool) -> None:
        if sequence.lent and not retryable:  # the decode worker must not request a retry
            self._sender.cancel(sequence.request_id, sequence.attempt, why, phase)
            sequence.lent = False
        super()._fail(sequence, phase, why, retryable=retryable)

    def _drop(self, sequence: PrefillSequence, reason: str) -> None:
        self._restores.drop(sequence)
        if sequence.lent:
            self._sender.cancel(sequence.request_id, sequence.attempt, reason)
            sequence.lent = False
        self.scheduler.remove(sequence)
