"""Engine of a decode worker: receives KV blocks and requests, and returns tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.blocks import BlockHasher
from common.engine.kv import BlockCounts
from common.engine.sampling import UNSAMPLED, separate
from common.engine.sequences import NO_PARTS, EngineParts, RequestEngine
from common.engine.transfer import (
    TransferAdvanced,
    TransferCompleted,
    TransferEnded,
    TransferEndpoints,
    TransferFailed,
    TransferOpened,
)
from common.engine.worker import EngineConfig, EngineStatus, RequestReceived, Send, WorkerMetrics
from common.grammar import sampling_failure
from common.latency import Links, StepShape
from common.wire import SampledToken
from common.wire.messages import DecodeRequest, HandOver, Message, ResetPrefixCache
from decode_worker.drafting.model_drafts import DraftLimits
from decode_worker.handover import HANDOVER_TIMEOUT_S, Handovers
from decode_worker.pace import StepPace, TokenGaps
from decode_worker.pipeline import DecodeModel, Pipeline, StepInFlight, by_chunk
from decode_worker.remote_prefill import RemotePrefills
from decode_worker.reporting import DecodeCounters, DecodeReports
from decode_worker.rules import DecodeRules, StepMasks
from decode_worker.scheduler import DecodeChunk, DecodeScheduler, shape_of
from decode_worker.sequence import DecodeSequence, RequestStatus
from decode_worker.speculation import Speculation

FEW_SEQUENCES = 4
"""Steps of fewer sequences are nearly as fast on one core as on two (docs/decisions/0007-shared-cores.md)."""
EXPIRE_INTERVAL_S = 0.05
"""Interval between checks of deadlines. Each check visits all requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """Timeouts, in seconds, of the waits for blocks, for the rest of a request's KV, and for a hand-over.

    `max_draft_tokens` limits the draft tokens per sequence and step.
    """

    grant_timeout_s: float
    transfer_timeout_s: float
    handover_timeout_s: float = HANDOVER_TIMEOUT_S
    max_draft_tokens: int = 0


class DecodeEngine(RequestEngine[DecodeRequest, DecodeSequence]):
    """Decode engine. Owns the model, and the block pool through its scheduler. The KV receiver borrows blocks."""

    role = "decode"
    scheduler: DecodeScheduler
    _rules: DecodeRules
    _reports: DecodeReports

    def __init__(
        self,
        send: Send,
        config: EngineConfig,
        limits: DecodeLimits,
        scheduler: DecodeScheduler,
        model: DecodeModel,
        transfers: TransferEndpoints,
        metrics: WorkerMetrics,
        parts: EngineParts = NO_PARTS,
    ) -> None:
        longest = scheduler.window.longest(scheduler.pool.num_blocks, config.max_model_len)
        rules = DecodeRules(
            config.eos_token_ids,
            vocab_size=model.sampler.vocab_size,
            max_model_len=longest,
            max_prompt_len=longest - 1,
            grammars=parts.grammars,
        )
        super().__init__(send, config, scheduler, rules, metrics, parts)
        self._runner, self._sampler, self._transfers = model.runner, model.sampler, transfers
        self._reports = DecodeReports(config.identity, self.emit)
        self._device_failure = model.runner.device_failure
        self._counters = DecodeCounters(metrics, block_size=scheduler.block_size)
        self._handovers = Handovers(
            transfers.outgoing, scheduler, self._reports, metrics, timeout_s=limits.handover_timeout_s
        )
        self._remote_prefills = RemotePrefills(
            transfers.incoming,
            scheduler,
            rules,
            self._counters,
            self._fail,
            grant_timeout_s=limits.grant_timeout_s,
            transfer_timeout_s=limits.transfer_timeout_s,
        )
        self._pipeline = Pipeline(scheduler, model.launcher, parts.hidden)
        self._masks = StepMasks(rules, self._grammars)
        bounds = DraftLimits(limits.max_draft_tokens, scheduler.max_num_seqs, scheduler.goal)
        self._speculation = Speculation(rules, bounds, model.drafter)
        self._pace, self._gaps = StepPace(scheduler.goal), TokenGaps(scheduler.goal)
        self._completed_at = 0.0
        self._num_rows = 0
        self._expire_at = 0.0

    @property
    def has_work(self) -> bool:
        return super().has_work or self._pipeline.in_flight is not None or self._idle_work is not None

    @property
    def _idle_work(self) -> DecodeSequence | None:
        """Sequence whose draft KV to compute while this worker, and others on the same cores, are idle."""
        return None if self._cores.has_prompts_elsewhere else self._speculation.next_idle(self.scheduler)

    @property
    def is_light(self) -> bool:
        return (
            max(self._num_rows, len(self.scheduler.running)) < FEW_SEQUENCES and not self.scheduler.num_waiting_tokens
        )

    def hold_s(self, now: float) -> float:
        """Keep a pace while prompts are computed on the same cores. Tokens of a completed step are sent at once."""
        if not self._cores.has_prompts_elsewhere:
            return 0.0
        self._drain()
        return self._pace.wait_s(time.monotonic()) if super().has_work else 0.0

    @property
    def is_empty(self) -> bool:
        return super().is_empty and self._pipeline.in_flight is None

    def apply(self, command: object) -> None:
        match command:
            case RequestReceived(router, DecodeRequest() as request):
                self._accept(router, request)
            case RequestReceived(router, HandOver() as order):
                if (without_kv := self._handovers.take(router, order, time.monotonic())) is not None:
                    self._fail(without_kv, "handover", "its KV is not computed yet and cannot be moved", retryable=True)
            case RequestReceived(_, ResetPrefixCache()):
                self._speculation.reset_cache()
                super().apply(command)
            case TransferOpened():
                self._remote_prefills.on_opened(command)
            case TransferCompleted():
                if (sequence := self._remote_prefills.on_completed(command)) is not None:
                    self._on_joined(sequence)
            case TransferAdvanced() | TransferEnded():
                self._handovers.on_event(command, time.monotonic())
            case TransferFailed():
                self._remote_prefills.on_failed(command)
            case _:
                super().apply(command)

    def step(self, now: float) -> None:
        self._pace.began(now)
        in_flight, drafts_next = self._pipeline.in_flight, self._speculation.wants_tokens(self.scheduler.running)
        if in_flight is not None and (in_flight.has_drafts or self.scheduler.lacks_blocks or drafts_next):
            self._drain()  # drafts need final positions, and preemption frees blocks that a step in flight may write to
        if self._has_unused_adapters:
            self._drain()
            self._free_adapters()
        self._pause_due(now)
        self._masks.ask_slow(self.scheduler.running)
        output = self.scheduler.schedule(
            now, self.step_fit.model, self._withdraw, lambda each: self._read_tiers(each, now)
        )
        self._remote_prefills.grant(output.granted, now)
        self._counters.scheduled(output, now)
        certain = [chunk for chunk in output.chunks if not self._rules.ends_in_flight(chunk.sequence)]
        self._in_step = [chunk.sequence for chunk in certain]
        is_alone, idle = self._pipeline.in_flight is None, None if certain else self._idle_work
        if is_alone and self._speculation.has_model:
            self._flush()  # send the tokens of the previous step before the draft model computes
        chunks = self._speculation.extend(certain, self._room, may_compute=is_alone, idle=idle)
        now += self._speculation.drafting_s
        if chunks:
            shape = shape_of(chunks)
            self._num_rows = shape.num_tokens + shape.num_rows
            self.planned(shape)
        if prepared := self._pipeline.prepare(chunks):
            self._pipeline.launch(chunks, prepared, self._masks, now, self._complete_step)
        else:
            self._drain()
            self._flush()  # send the tokens of the completed step before the next, which may take long
            left = [chunk for chunk in chunks if self.scheduler.has(chunk.sequence)]
            self._compute(left, max(now, self._completed_at))  # excludes the wait for the step in flight
        self._handovers.stepped()
        self._in_step = ()

    def _compute(self, chunks: Sequence[DecodeChunk], now: float) -> None:
        """Run a step to completion. No step may be in flight."""
        if not chunks:
            return
        prepared = self._pipeline.chunks(chunks)
        logits, prompt_logits = separate(self._runner.forward(prepared), prepared)
        spans = by_chunk(prompt_logits, [chunk.num_spans for chunk in chunks])
        with self._runner.waiting():  # reading device memory waits for the step
            for chunk, (of_prompt, *_) in zip(chunks, spans, strict=True):
                if of_prompt is not None:  # such chunks have no draft
                    num_sent = max(chunk.sequence.num_logprobs_sent, chunk.start + chunk.num_tokens)
                    chunk.sequence.num_logprobs_sent = num_sent
                    self._reports.report_prompt_logits(chunk.sequence, chunk.start, of_prompt)
            made = iter(self._masks.rows([chunk for chunk in chunks if chunk.sample]))
            rows_of = [(next(made) or [UNSAMPLED] * chunk.num_spans) if chunk.sample else [] for chunk in chunks]
            sampled = self._sampler.sample(logits, [row for rows in rows_of for row in rows])
            self._runner.wait()  # blocks of sequences that end now are reused
        done_at = time.monotonic()
        tokens_of = by_chunk(sampled, [len(rows) for rows in rows_of])
        wanted = [self.scheduler.advance(chunk) for chunk in chunks]
        tokens_of = [tokens if is_wanted else [] for tokens, is_wanted in zip(tokens_of, wanted, strict=True)]
        self._process_outputs(chunks, tokens_of, done_at, done_at - now)

    def _complete_step(self, step: StepInFlight) -> None:
        """Wait for a launched step, and process its tokens."""
        following = self._in_step
        self._in_step = [*(chunk.sequence for chunk in step.chunks), *following]
        sampled = self._pipeline.complete(step)
        done_at = time.monotonic()
        step_s, self._completed_at = done_at - max(step.launched_at, self._completed_at), done_at
        self._process_outputs(step.chunks, sampled, done_at, step_s)
        self._in_step = following  # a later error of the following step does not concern this one

    def _drain(self) -> None:
        """Complete the step in flight, if any."""
        if (step := self._pipeline.in_flight) is not None:
            self.planned(shape_of(step.chunks))
            self._complete_step(step)

    def _process_outputs(
        self, chunks: Sequence[DecodeChunk], sampled: Sequence[Sequence[SampledToken]], now: float, step_s: float
    ) -> None:
        """Append the tokens of a step. `sampled` has those of each chunk's rows, and none for an ended sequence."""
        num_tokens, drafting_s = 0, self._speculation.drafting_s
        accepted: dict[DecodeSequence, int] = {}
        for chunk, tokens in zip(chunks, sampled, strict=True):
            if tokens:
                count = 0
                if chunk.draft.token_ids:
                    count = self._speculation.learn(chunk, [token.token_id for token in tokens])
                    accepted[chunk.sequence] = count
                num_tokens += self._on_tokens(chunk.sequence, tokens[: count + 1], now)
        self._reports.flush()
        self._speculation.stepped(chunks, step_s)
        self._counters.stepped(chunks, num_tokens, accepted, step_s)
        num_accepted = sum(accepted.values())
        self._rate.add(sum(chunk.num_tokens for chunk in chunks) + num_accepted, step_s + drafting_s)
        shape = shape_of(chunks)
        decoding = [chunk.sequence for chunk in chunks if chunk.num_tokens == 1]
        tokens_each = 1.0 + num_accepted / max(1, len(decoding))
        predicted_s = self.step_fit.model.seconds(shape) + drafting_s
        self._gaps.stepped(decoding, now, predicted_s=predicted_s, tokens_each=tokens_each)
        self.took(shape, step_s)
        self._pace.took(step_s + drafting_s)
        self._note_knobs(self._speculation.knobs, now)

    @property
    def _decode_rows(self) -> StepShape:
        num_rows = sum(sequence.num_remaining == 1 for sequence in self.scheduler.running)
        return StepShape.of_rows(num_rows, self.scheduler.num_context_tokens)

    def _room(self, sequence: DecodeSequence, num_tokens: int) -> int:
        """Return how many of `num_tokens` draft tokens fit. None do in a hand-over, whose blocks are fixed."""
        return 0 if sequence in self._handovers else self.scheduler.room_for(sequence, num_tokens)

    def _withdraw(self, sequence: DecodeSequence) -> None:
        self._handovers.withdraw(sequence)
        self._restores.drop(sequence)

    def _pause_due(self, now: float) -> None:
        """Pause sequences whose last blocks must be sent, after the step in flight."""
        if self._handovers.wants_pause:
            self._drain()
            self._handovers.pause_due(now)

    def snapshot(self) -> EngineStatus:
        links, own = self._remote_prefills.link_fits.links, self._restores.links
        links = Links(tcp=links.tcp, shm=links.shm, disk=own.disk, peer=own.peer)
        blocks, seconds = self._speculation.draft_blocks, self._speculation.total_drafting_s
        return replace(super().snapshot(), links=links, draft_blocks=blocks, draft_seconds=seconds)

    def check_integrity(self) -> BlockCounts:
        self._speculation.check_integrity(self.scheduler.has)
        return super().check_integrity()

    def expire(self, now: float) -> None:
        self._speculation.retain(self.scheduler.has)
        self._transfers.check()
        if now < self._expire_at:
            return
        self._expire_at = now + EXPIRE_INTERVAL_S
        self._expire_requests(now)
        if self._pipeline.in_flight is None:
            self._free_adapters()
        self._remote_prefills.expire(now, is_held=self._is_held)
        self._handovers.expire(now)

    def report_progress(self, *, has_stepped: bool) -> None:
        for sequence in self.scheduler:
            is_suspended = self._is_held and (sequence.runs or sequence.status is RequestStatus.OPENED)
            is_due = is_suspended or (has_stepped and sequence.awaits_turn)
            receives = sequence.status is RequestStatus.TRANSFERRING and sequence.lent
            if is_due or receives or sequence.awaits_mask:
                self._reports.add(sequence)
        self._reports.flush()

    def close(self) -> None:
        try:
            self._pipeline.close()
        finally:  # even if the step failed, otherwise their threads would keep the process alive
            self._transfers.stop()
            self._grammars.close()
            self._restores.close()

    @property
    def _num_dropped_frames(self) -> int:
        return self._transfers.num_dropped_frames

    def _overload(self) -> str:
        is_full = len(self.scheduler) >= self._max_waiting + self.scheduler.max_num_seqs
        return f"this worker already has {len(self.scheduler)} requests" if is_full else ""

    def _add(
        self, router: bytes, request: DecodeRequest, token_ids: list[int], hasher: BlockHasher, now: float
    ) -> DecodeSequence:
        status = RequestStatus.EXPECTING if request.prefill_worker else RequestStatus.WAITING
        sequence = DecodeSequence(router, request, token_ids, hasher, now, now + request.deadline_s, status=status)
        self.scheduler.add(sequence)
        self._remote_prefills.expect(sequence)
        return sequence

    def _phase_of(self, sequence: DecodeSequence) -> str:
        match sequence.status:
            case RequestStatus.EXPECTING | RequestStatus.WAITING:
                return "queue"
            case RequestStatus.OPENED:
                return "grant"
            case RequestStatus.TRANSFERRING | RequestStatus.LEAVING:
                return "transfer"
            case _:
                return "decode" if sequence.has_first_token else "prefill"

    def _continue(self, known: DecodeSequence, request: DecodeRequest) -> bool:
        """Keep the blocks that have arrived. The rest comes from the new attempt's prefill worker, if any."""
        if not known.is_continued_by(request):
            return False
        self._handovers.cancel(known, "superseded by a new attempt")
        if known.is_incoming:
            self._remote_prefills.release(known, "superseded by a new attempt")
            self.scheduler.expect_again(known)
        known.restart_reporting(request)
        if not known.is_incoming:
            if known.has_first_token:
                self._reports.add(known)
                self._reports.flush()
        elif not request.prefill_worker:
            self.scheduler.prefill_locally(known, known.num_received_blocks)
        else:
            known.opened_at = time.monotonic()  # it keeps its blocks for some time, for the next announcement
        self._remote_prefills.expect(known)
        return True

    def _on_joined(self, sequence: DecodeSequence) -> None:
        """Process the tokens that came with a sequence's KV."""
        reason = self._rules.finish_reason(sequence, sequence.token_ids[-1])
        if reason:
            self._finish(sequence, reason, sequence.first_token_at)
        elif sequence.request.num_reserved_tokens:
            self._reports.add(sequence)  # its router reads from the previous worker until then
        self._reports.flush()

    def _on_tokens(self, sequence: DecodeSequence, sampled: Sequence[SampledToken], now: float) -> int:
        """Append the sampled tokens, of which all but the last were drafted. Return how many the sequence takes."""
        if sequence.problems:
            self._fail(sequence, "sampling", sequence.problems[0], retryable=False)
            return 0
        for place, token in enumerate(sampled):
            if token.token_id >= self._rules.vocab_size:  # not a token, would fail the next step for the whole batch
                if place:  # report the preceding tokens first
                    self._reports.add(sequence)
                    self._reports.flush()
                self._fail(sequence, *sampling_failure(sequence.params, sequence.constraint, "decode"), retryable=False)
                return place
            if place:
                self.scheduler.accept(sequence)
            elif not sequence.first_token_at:
                sequence.first_token_at = now
                sequence.prefill_s = now - sequence.admitted_at
                self._counters.prefilled(sequence)
            sequence.append(token)
            if reason := self._rules.finish_reason(sequence, token.token_id):
                self._finish(sequence, reason, now)
                return place + 1
        self._reports.add(sequence)
        return len(sampled)

    def _finish(self, sequence: DecodeSequence, reason: str, now: float) -> None:
        self._handovers.cancel(sequence, f"the request finished: {reason}")
        self._reports.finish(sequence, reason, now)
        self.metrics.decode_seconds.observe(now - sequence.first_token_at)
        self.metrics.count_finished(reason)
        self._speculation.answered(sequence)
        self.scheduler.remove(sequence)

    def _drop(self, sequence: DecodeSequence, reason: str) -> None:
        self._restores.drop(sequence)
        self._handovers.cancel(sequence, reason)
        self._remote_prefills.release(sequence, reason)
        self.scheduler.remove(sequence, sequence.num_received_blocks)

    def _refuse(self, router: bytes, message: Message, why: str, *, retryable: bool = False) -> None:
        self._remote_prefills.refuse(getattr(message, "request_id", ""), getattr(message, "attempt", 0), why)
        super()._refuse(router, message, why, retryable=retryable)
