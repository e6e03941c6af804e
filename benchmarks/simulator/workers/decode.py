"""A decode worker in virtual time: production's scheduler, steps that are alike taken at once, modelled transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import msgspec

from benchmarks.simulator.workers.coalesced import CoalescedGaps, CoalescedScheduler, StepRun
from benchmarks.simulator.workers.first_come import FirstComeDecode
from benchmarks.simulator.workers.incoming import IncomingTransfers
from benchmarks.simulator.workers.outgoing import LookAgain, SimulatedSender, event_of, handovers_of
from benchmarks.simulator.workers.transfer import Acknowledged, Advanced, Announced, Arrived, Failed
from benchmarks.simulator.workers.worker import Received, SimulatedProcess, SimulatedWorker
from benchmarks.simulator.world.scenario import PoolSpec
from benchmarks.simulator.world.tokens import CountedTokens, InjectedHasher
from common.config import DecodeWorkerConfig
from common.engine.kv.block_pool import BlockPool
from common.latency.step_model import StepShape
from common.wire.messages import AbortRequest, DecodeRequest, HandOver, Timeline, TokenDelta
from decode_worker.scheduler import DecodeChunk, shape_of
from decode_worker.sequence import DecodeSequence, RequestStatus

MOST_STEPS = 512
"""Steps that are taken at once at most."""
GRANT_TIMEOUT_S = 30.0
"""How long a prompt may wait for blocks, as the setting's default."""
REPORT_S = 1.0
"""How often a router hears of tokens between a request's first and its last: in life it does at each step, but nothing
depends on these."""
WATCHED_STEPS, WATCHED_S = 16, 4.0
"""Steps that are taken at once at most, and reported, by workers from which routers may move streams: those that miss
the goal for tokens or have blocks for fewer seconds."""


class SimulatedDecodeWorker(SimulatedWorker[DecodeSequence]):
    """See `DecodeEngine`. It takes each step by itself with a `most_steps` of 1."""

    scheduler: CoalescedScheduler
    most_steps = MOST_STEPS

    def __init__(self, process: SimulatedProcess, pool: PoolSpec) -> None:
        super().__init__(process, pool)
        self.world.receivers[self.name] = self

    def _reset(self) -> None:
        super()._reset()
        self._incoming = IncomingTransfers(self.world, self.scheduler)
        self._sender = SimulatedSender(self)
        self._handovers = handovers_of(self, self._sender)
        self._chunks: Sequence[DecodeChunk] = ()
        self._run: StepRun | None = None
        self._told_at = 0.0
        self._are_known, self._tells_all, self._left = False, False, list[int]()
        self._shape, self._is_plain = StepShape(), False
        self._chosen: set[DecodeSequence] = set()  # for the next step, while one that was launched ahead is computed
        self._gaps = CoalescedGaps(self.scheduler.goal)

    @cached_property
    def settings(self) -> DecodeWorkerConfig:
        """With the goal by which it turns its knobs."""
        own = 0.0 if self.pool.fixed else self.pool.slo_tpot_ms
        return self.pool.of_decode(self.world.scenario.goals.tpot_ms if own is None else own)

    def _new_scheduler(self, pool: BlockPool) -> CoalescedScheduler:
        settings = self.settings
        return CoalescedScheduler(
            pool,
            max_num_seqs=settings.places,
            local_prefill_chunk=settings.step_tokens,
            watermark=self.pool.watermark,
            slo_tpot_s=settings.slo_tpot_ms / 1000,
            usual_num_seqs=settings.usual_places,
            usual_chunk=settings.usual_step_tokens,
            window=self.world.scenario.model.window,
        )

    @property
    def block_bytes(self) -> int:
        return self.scheduler.block_size * self.world.scenario.model.kv_bytes_per_token

    # ------------------------------------------------------------ commands

    def _apply(self, command: object) -> None:
        match command:
            case Received(router, DecodeRequest() as request):
                self._accept(router, request)
            case Received(router, AbortRequest(request_id=request_id, attempt=attempt)):
                sequence = self.scheduler.find(request_id)
                if sequence is not None and sequence.attempt <= attempt and sequence.router == router:
                    self._drop(sequence, "aborted")
            case Received(router, HandOver() as order):
                if (without_kv := self._handovers.take(router, order, self.world.clock.now)) is not None:
                    self._fail(without_kv, "handover", "its KV is not computed yet and cannot be moved")
            case Announced(transfer):
                self._incoming.on_announced(transfer)
            case Arrived(transfer):
                if (joined := self._incoming.on_arrived(transfer)) is not None:
                    self._on_joined(joined)
            case Failed(transfer, why) if transfer.receiver is self:
                if (failed := self._incoming.on_failed(transfer)) is not None:
                    self._fail(failed, "transfer", f"KV transfer failed: {why}")
            case Advanced() | Acknowledged() | Failed():
                self._handovers.on_event(event_of(command), self.world.clock.now)
            case LookAgain():
                pass
            case _:
                raise TypeError(f"a decode worker takes no {command!r}")

    def _accept(self, router: bytes, request: DecodeRequest) -> None:
        self._serials[router] = max(request.serial, self._serials.get(router, 0))
        known = self.scheduler.find(request.request_id)
        if known is not None:
            if known.attempt >= request.attempt or self._continue(known, request):
                return
            self._drop(known, "superseded by a new attempt")
        content, now = self.world.requests[request.request_id].content, self.world.clock.now
        tokens = CountedTokens(content.num_prompt_tokens + request.num_output_tokens)
        status = RequestStatus.EXPECTING if request.prefill_worker else RequestStatus.WAITING
        hasher = InjectedHasher(content, self.scheduler.block_size)
        kind = FirstComeDecode if self.world.scenario.prompt_order == "first-come" else DecodeSequence
        sequence = kind(router, request, tokens, hasher, now, now + request.deadline_s, status=status)
        self.scheduler.add(sequence)
        self.scheduler.expect_hits(sequence)
        self._incoming.expect(sequence)

    def _continue(self, known: DecodeSequence, request: DecodeRequest) -> bool:
        """Go on with a sequence under a new attempt, with the blocks that have arrived."""
        if not known.is_continued_by(request):
            return False
        self._handovers.cancel(known, "superseded by a new attempt")
        if known.is_incoming:
            self._incoming.release(known, "superseded by a new attempt")
            self.scheduler.expect_again(known)
        known.restart_reporting(request)
        if not known.is_incoming:
            if known.has_first_token:
                self.report(known)
        elif not request.prefill_worker:
            self.scheduler.prefill_locally(known, known.num_received_blocks)
        self._incoming.expect(known)
        return True

    def _on_joined(self, sequence: DecodeSequence) -> None:
        """Report the tokens that came in a hand-over: until then its router listens to the former worker."""
        if not self._end_if_over(sequence) and sequence.request.num_reserved_tokens:
            self.report(sequence)

    # ------------------------------------------------------------ steps

    def _begin(self, now: float) -> float | None:
        self._expire(now)
        self._handovers.pause_due(now)
        output = self.scheduler.schedule(now, self.model, self._handovers.withdraw)
        for sequence in output.granted:
            sequence.num_received_blocks = sequence.num_computed // self.scheduler.block_size
            self._incoming.grant(sequence, sequence.num_received_blocks)
        self._chunks = self._launchable(output.chunks)
        if not self._chunks:
            return None
        self._shape = shape_of(self._chunks)
        self._is_plain = _are_rows(self._chunks) and len(self._chunks) == len(self.scheduler.running)
        num_steps = self._num_alike()
        growth_s = self._known_model.context_s * self._shape.num_rows
        noise = self._noise(num_steps)
        self._run = StepRun(now, num_steps, noise * self.step_s(self._shape), noise * growth_s)
        return self._run.ends_at - now

    def _launchable(self, chunks: Sequence[DecodeChunk]) -> Sequence[DecodeChunk]:
        """Of these chunks, those of the step that begins now.

        It was chosen when the step before it began. So what joins waits for the next one, which is chosen now.
        """
        present = [chunk for chunk in chunks if chunk.sequence in self._chosen] or chunks
        ahead = self.pool.ahead and _are_rows(present)
        self._chosen = {chunk.sequence for chunk in chunks} if ahead else set()
        return present

    def _num_alike(self) -> int:
        """How many steps are like the one that begins: no sequence joins, ends or speaks for the first time."""
        sequences = [chunk.sequence for chunk in self._chunks]
        self._are_known = self._is_plain and all(map(self._has_spoken, sequences))
        self._left = [self._num_left(sequence) for sequence in sequences] if self._are_known else []
        least = min(self.most_steps, *self._left) if self._are_known else 1
        self._tells_all = self._may_lose_streams
        if self._tells_all:
            least = min(least, 1 if len(self._handovers) or self.drains_since is not None else WATCHED_STEPS)
        if self.scheduler.queue and self.scheduler.goal.is_set:  # the cap changes, and patience ends
            return 1
        return self.scheduler.num_steps_with_room(least) if least > 1 else 1

    @property
    def _may_lose_streams(self) -> bool:
        """Whether routers may move streams away, and thus must know of each token, or do so now."""
        if len(self._handovers) or self.drains_since is not None:
            return True
        step_s, pool = self.step_s(self._shape), self.scheduler.pool
        goal_s = self.world.scenario.goals.tpot_ms / 1000
        growing = self._shape.num_rows * WATCHED_S
        return 0.0 < goal_s < step_s or pool.num_available * self.scheduler.block_size * step_s < growing

    def drain(self) -> None:
        super().drain()
        self._interrupt()

    def _interrupt(self) -> None:
        """The run ends with the step that is being computed: then commands are carried out."""
        run, timer = self._run, self._step_timer
        if run is None or timer is None or run.num_steps == 1:
            return
        now = self.world.clock.now
        if (num_begun := run.num_begun(now)) < run.num_steps:
            timer.cancel()
            self._run = replace(run, num_steps=num_begun)
            self._set_step_timer(self._run.ends_at - now)

    def _complete(self, now: float) -> None:
        if self._run is not None:
            self._advance(self._run.num_steps, now)
            self._run = None

    def _settle(self) -> None:
        if self._run is not None and (num_ended := self._run.num_ended(self.world.clock.now)):
            self._advance(num_ended, self.world.clock.now)
            self._run = None
        for sequence in self.scheduler.running:  # in life its tokens were sent at once
            if sequence.num_output_tokens > sequence.num_reported:
                self.report(sequence)

    def _advance(self, num_steps: int, now: float) -> None:
        """So many steps of the run have been computed."""
        run, chunks = self._run, self._chunks
        if run is None:
            return
        sampled = [chunk.sequence for chunk in chunks if chunk.sample]
        self._observe_gaps(run, num_steps)
        if self._is_plain:
            self.scheduler.advance_steps(num_steps)
        else:
            for chunk in chunks:
                self.scheduler.advance(chunk)
            for sequence in sampled:
                sequence.token_ids.append(0)
        self.num_prompt_tokens += self._shape.num_tokens
        self.num_output_tokens += num_steps * len(sampled)
        tells_all = not self._are_known or self._tells_all or now - self._told_at >= REPORT_S
        if tells_all:
            self._told_at = now
        else:  # of sequences that are known there is only news when they end
            sampled = [sequence for sequence, left in zip(sampled, self._left, strict=True) if left == num_steps]
        for sequence in sampled:
            if not sequence.first_token_at:
                sequence.first_token_at = now
                sequence.prefill_s = now - sequence.admitted_at
            if not self._end_if_over(sequence):
                self.report(sequence)
        self._handovers.stepped()
        step_s = run.seconds(num_steps) / num_steps
        more = (num_steps - 1) * self._shape.num_rows // 2
        self._stepped(msgspec.structs.replace(self._shape, context=self._shape.context + more), step_s, num_steps)

    def _observe_gaps(self, run: StepRun, num_steps: int) -> None:
        """Correct the share of the goal by the gaps between tokens, as after each single step."""
        if not self.scheduler.goal.is_set:
            return
        decoding = [chunk.sequence for chunk in self._chunks if chunk.num_tokens == 1]
        self._gaps.ran(decoding, run, num_steps, self.model.seconds(self._shape))

    # ------------------------------------------------------------ reports and ends

    def _has_spoken(self, sequence: DecodeSequence) -> bool:
        """Whether its router has had tokens from here under the present attempt."""
        return sequence.num_reported > sequence.request.num_output_tokens

    def _num_left(self, sequence: DecodeSequence) -> int:
        """Tokens that its answer still lacks."""
        return self.world.requests[sequence.request_id].output_len - sequence.num_output_tokens

    def _end_if_over(self, sequence: DecodeSequence) -> bool:
        if self._num_left(sequence) > 0:
            return False
        now = self.world.clock.now
        queue_s = 0.0 if sequence.opened_at else max(0.0, sequence.admitted_at - sequence.accepted_at)
        timeline = Timeline(
            queue_s=queue_s,
            prefill_s=sequence.prefill_s,
            transfer_s=sequence.transfer_s,
            decode_s=now - sequence.first_token_at,
            num_preemptions=sequence.num_preemptions,
        )
        reason = "length" if sequence.num_output_tokens >= sequence.params.max_tokens else "stop"
        self._handovers.cancel(sequence, "it has ended")
        self.report(sequence, reason, timeline)
        self.scheduler.remove(sequence)
        return True

    def report(self, sequence: DecodeSequence, reason: str = "", timeline: Timeline | None = None) -> None:
        num_new = sequence.num_output_tokens - sequence.num_reported
        delta = TokenDelta(
            sequence.request_id,
            sequence.attempt,
            sequence.num_reported,
            (0,) * num_new,
            reason,
            sequence.num_cached,
            (),
            timeline,
        )
        sequence.num_reported += num_new
        self._deltas[sequence.router].append(delta)

    def _expire(self, now: float) -> None:
        """Fail prompts that have waited for room for too long, and end hand-overs that take too long."""
        for sequence in list(self.scheduler.queue):
            if sequence.status is RequestStatus.OPENED and sequence.opened_at < now - GRANT_TIMEOUT_S:
                why = f"no room for {sequence.num_tokens} tokens within {GRANT_TIMEOUT_S:g} s"
                self._fail(sequence, "grant", why)
        self._handovers.expire(now)

    def _drop(self, sequence: DecodeSequence, why: str) -> None:
        self._handovers.cancel(sequence, why)
        self._incoming.release(sequence, why)
        self.scheduler.remove(sequence, sequence.num_received_blocks)

    def transfers(self) -> list[Callable[[], None]]:
        return [*self._incoming.drops, *self._sender.drops]

    # ------------------------------------------------------------ for heartbeats

    def grown(self) -> tuple[int, int]:
        run = self._run
        if run is None or run.num_steps == 1:
            return 0, 0
        num_tokens = run.num_ended(self.world.clock.now) * len(self._chunks)
        return num_tokens // self.scheduler.block_size, num_tokens

    def beside(self) -> StepShape:
        num_rows = sum(sequence.num_remaining == 1 for sequence in self.scheduler.running)
        return StepShape.of_rows(num_rows, self.scheduler.num_context_tokens)


def _are_rows(chunks: Sequence[DecodeChunk]) -> bool:
    """Whether each chunk decodes one token: only such steps are launched ahead."""
    return all(chunk.num_tokens == 1 and chunk.sample for chunk in chunks)
