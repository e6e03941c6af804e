"""Engine of a worker whose model vLLM computes: requests of routers in, tokens out, KV between ranks arranged.

Commands and all state belong to the engine thread, whose event loop also runs vLLM's client and the link to its ranks.

    prefill   accept ─> vLLM (one token; ranks send its KV) ─> report, Done ─> Sent by all ranks
    decode    accept ─> Expect ─> Announced, Admit ─> Arrived at each rank ─> vLLM (ranks load KV) ─> report ...
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.blocks import BlockHasher
from common.engine.kv import BlockCounts
from common.engine.sequences import MAX_ALTERNATIVES, Reports
from common.engine.vllm.client import Added, CoreDied, Logprobs, Output
from common.engine.vllm.link import (
    Admit,
    Announced,
    Arrived,
    Cancel,
    Done,
    Expect,
    Forget,
    LinkEvent,
    Load,
    Order,
    RankFailed,
    Sent,
    StepsDone,
    TransferLost,
    TransferParams,
)
from common.engine.vllm.link import Send as SendKV
from common.engine.vllm.model import VllmModel
from common.engine.vllm.requests import checked_prompt, token_logprobs, unsupported
from common.engine.vllm.sequence import Phase, VllmSequence
from common.engine.worker import (
    INBOX_BOUND,
    PROGRESS_INTERVAL_S,
    EngineStatus,
    RequestReceived,
    RouterLost,
    Send,
    StepRate,
    StepTimes,
    WorkerMetrics,
)
from common.errors import BlockError, WireError
from common.grammar import finish_reason
from common.latency import StepFit, StepShape
from common.wire import LOGPROB_FLOOR, Role, TokenLogprobs, unpack_tokens
from common.wire.messages import (
    MAX_OUTPUTS,
    AbortRequest,
    DecodeRequest,
    HandOver,
    KVDone,
    Message,
    PrefillRequest,
    ResetPrefixCache,
)

log = logging.getLogger(__name__)
TICK_S = 0.1
"""Interval, in seconds, of deadlines, status and liveness."""
RESET_S = 1.0
"""Interval, in seconds, of attempts to reset the prefix cache."""
STALE_TICK_S = 10.0
"""Time, in seconds, without a tick after which the engine thread counts as stuck."""
SETTLE_S = 2.0
"""Time, in seconds, until vLLM has reported that the blocks of the last request are free."""
FLOOR_S = 20.0
"""Minimum limit of a step, in seconds: vLLM may compile kernels during any step."""
FINISHED = {"stop": "stop", "length": "length", "repetition": "stop"}
"""Finish reasons of vLLM, and ours."""


class VllmEngine:
    """Implements `common.engine.worker.Engine`. `submit`, `notify` and `stop` are for other threads.

    `role` determines which requests are accepted.
    """

    def __init__(
        self,
        role: Role,
        model: VllmModel,
        send: Send,
        identity: tuple[str, int],
        metrics: WorkerMetrics,
        *,
        max_waiting: int,
        stall_timeout_s: float = 0.0,
    ) -> None:
        """`identity`: worker ID and epoch. `stall_timeout_s`: limit of a step; 0 derives it from recent steps."""
        self.role, self.metrics = role, metrics
        self._model, self._send, self._max_waiting = model, send, max_waiting
        self._loop = model.thread.loop
        self._inbox: deque[object] = deque()
        self._outbox: list[tuple[bytes, Message]] = []
        self._reports = Reports(identity, self._emit)
        self._sequences: dict[str, VllmSequence] = {}
        self._serials: Mapping[bytes, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._has_told_too_long = False
        self._flush_is_due = self._is_stopped = self._reset_is_due = self._has_changed = False
        self._rate, self._step_fit = StepRate(), StepFit()
        self._step_times = StepTimes(fixed_s=stall_timeout_s, floor_s=FLOOR_S)
        self._last: StepsDone | None = None
        self._last_at = self._emptied_at = 0.0
        self._worked_at = self._ticked_at = time.monotonic()
        self._limit_s = self._step_times.idle_limit_s
        self._progress_told_at, self._has_stepped = 0.0, False
        self.status = EngineStatus(blocks=BlockCounts(model.facts.num_blocks, 0, 0), at=time.monotonic())
        self.num_steps = 0
        self.failure: BaseException | None = None

    # ------------------------------------------------------------ contract, for other threads

    def start(self) -> None:
        self._model.on_event = lambda rank, event: self._guard(self._on_link_event, rank, event)
        self._loop.call_soon_threadsafe(self._begin)

    def submit(self, command: object) -> bool:
        if len(self._inbox) >= INBOX_BOUND:
            return False
        self.notify(command)
        return True

    def notify(self, event: object) -> None:
        self._inbox.append(event)
        if not self._is_stopped:
            self._loop.call_soon_threadsafe(self._take_commands)

    @property
    def has_commands(self) -> bool:
        return bool(self._inbox)

    @property
    def is_empty(self) -> bool:
        return not self._sequences

    @property
    def alive(self) -> bool:
        return self.failure is None and not self._is_stopped

    @property
    def turn_limit_s(self) -> float:
        return self._limit_s

    def is_stuck(self, now: float) -> bool:
        return now - self._worked_at > self._limit_s or now - self._ticked_at > STALE_TICK_S

    def stop(self, timeout_s: float = 10.0) -> bool:
        stopping = self._model.thread.submit(self._stop())
        try:
            stopping.result(timeout_s)
        except TimeoutError:
            return False
        return True

    def check_integrity(self) -> BlockCounts:
        if self._sequences or self._tasks:
            raise BlockError(f"{len(self._sequences)} requests and {len(self._tasks)} tasks are left")
        return self.status.blocks

    # ------------------------------------------------------------ commands

    def _begin(self) -> None:
        self._ticking = self._loop.create_task(self._tick(), name="engine tick")
        self._take_commands()

    def _take_commands(self) -> None:
        while self._inbox and self._ticking is not None and self.failure is None:
            self._guard(self._apply, self._inbox.popleft())

    def _apply(self, command: object) -> None:
        self._has_changed = True
        match command:
            case RequestReceived(router, PrefillRequest() as request) if self.role == "prefill":
                self._accept(router, request)
            case RequestReceived(router, DecodeRequest() as request) if self.role == "decode":
                self._accept(router, request)
            case RequestReceived(router, AbortRequest(request_id=request_id, attempt=attempt)):
                sequence = self._sequences.get(request_id)
                if sequence is not None and sequence.attempt <= attempt and sequence.router == router:
                    self._drop(sequence, "aborted")
            case RequestReceived(router, HandOver() as order):
                self._hand_over(router, order)
            case RequestReceived(_, ResetPrefixCache()):
                self._reset_is_due = True
                if self._sequences:
                    log.info("the prefix cache is reset once no request runs: %d do", len(self._sequences))
            case RequestReceived(router, message):
                why = f"a {self.role} worker does not accept {type(message).__name__}"
                self._refuse(router, message, why, retryable=False)
            case RouterLost(router):
                self._serials = {name: serial for name, serial in self._serials.items() if name != router}
                for sequence in [each for each in self._sequences.values() if each.router == router]:
                    self._drop(sequence, "router lost")
            case _:
                raise TypeError(f"unknown command {command!r}")
        self._flush_soon()

    def _accept(self, router: bytes, request: PrefillRequest | DecodeRequest) -> None:
        """Accept or reject a request. Duplicates are ignored."""
        self._serials = {**self._serials, router: max(request.serial, self._serials.get(router, 0))}
        if (known := self._sequences.get(request.request_id)) is not None:
            if known.router != router:
                why = f"request id {request.request_id} is already in use by another router"
                # Without `Forget`, which would name the KV of the other router's request.
                self._report_failed(router, request, "queue", why, retryable=False)
                return
            if known.attempt >= request.attempt:
                return
            self._drop(known, "superseded by a new attempt")
        problem, is_retryable, token_ids = self._checked(request)
        if problem:
            self._refuse(router, request, problem, retryable=is_retryable)
            return
        now = time.monotonic()
        hasher = BlockHasher(self._model.facts.block_size, request.cache_salt, request.adapter)
        num_hits = self._model.cached.num_leading(hasher.extend(token_ids))
        first_block = self._model.num_skipped(num_hits)
        is_incoming = isinstance(request, DecodeRequest) and bool(request.prefill_worker)
        if is_incoming and not self._model.fits(len(token_ids), first_block):
            self._tell_too_long(len(token_ids))
            self._tell_ranks(Forget(request_id=request.request_id, attempt=request.attempt))
            is_incoming = False
        phase = Phase.EXPECTING if is_incoming else Phase.WAITING
        sequence = VllmSequence(router, request, token_ids, hasher, now, now + request.deadline_s, phase)
        sequence.num_expected_hits, sequence.is_incoming = num_hits * self._model.facts.block_size, is_incoming
        self._sequences[sequence.request_id] = sequence
        if is_incoming:
            sequence.first_block, sequence.waits_for = first_block, set(range(self._model.world_size))
            expected = Expect(
                request_id=request.request_id,
                attempt=request.attempt,
                num_tokens=len(token_ids),
                first_block=first_block,
            )
            self._tell_ranks(expected)
        else:
            self._add(sequence)

    def _tell_too_long(self, num_tokens: int) -> None:
        """Log once that prompts are computed here because their KV cannot arrive."""
        if not self._has_told_too_long:
            self._has_told_too_long = True
            log.warning(
                "a prompt of %d tokens is computed here: its KV does not fit into the staging memory, which the host's "
                "free memory limited at the start; later ones are not logged",
                num_tokens,
            )

    def _checked(self, request: PrefillRequest | DecodeRequest) -> tuple[str, bool, list[int]]:
        """Return why a request must be rejected, or "", whether that is retryable, and the tokens of its prompt."""
        model = self._model
        longest = model.facts.max_model_len - (0 if model.pooling else 1)
        try:
            token_ids = checked_prompt(
                request.prompt, request.num_output_tokens, vocab_size=model.vocab_size, max_prompt_len=longest
            )
        except WireError as error:
            return str(error), False, []
        if why := unsupported(
            request.params,
            speculates=model.speculates,
            pooling=model.pooling,
            has_first_runner=model.has_first_runner,
        ):
            return why, False, []
        if model.pooling and isinstance(request, PrefillRequest) and request.decode is not None:
            return "a pooled prompt must not have a decode worker", False, []
        if isinstance(request, DecodeRequest) and request.num_reserved_tokens:
            return "workers with --engine vllm do not take over running requests with their KV", True, []
        if request.adapter and (model.adapters is None or model.adapters.request(request.adapter) is None):
            return f"adapter {request.adapter} is not loaded on this worker", True, []
        if too_many := self._overload():
            return too_many, True, []
        return "", False, token_ids

    def _overload(self) -> str:
        if self.role == "prefill":
            num_waiting = sum(each.phase is Phase.WAITING for each in self._sequences.values())
            is_full = num_waiting >= self._max_waiting + self._model.facts.max_num_seqs
            return f"the queue of this worker is full ({self._max_waiting} prompts)" if is_full else ""
        is_full = len(self._sequences) >= self._max_waiting + self._model.facts.max_num_seqs
        return f"this worker already has {len(self._sequences)} requests" if is_full else ""

    def _hand_over(self, router: bytes, order: HandOver) -> None:
        """Fail the request: its router dispatches the prompt with the tokens so far to another worker."""
        sequence = self._sequences.get(order.request_id)
        if sequence is not None and sequence.router == router and sequence.attempt == order.attempt:
            self._fail(sequence, "handover", "workers with --engine vllm do not move KV of answers", retryable=True)

    # ------------------------------------------------------------ vLLM

    def _add(self, sequence: VllmSequence) -> None:
        sequence.added_at = time.monotonic()
        if not any(each.answer is not None for each in self._sequences.values()):
            self._worked_at = sequence.added_at  # it was idle
        sequence.task = self._spawn(self._compute(sequence), f"request {sequence.request_id}")

    async def _compute(self, sequence: VllmSequence) -> None:
        """Add a request to vLLM, and process its outputs."""
        try:
            answer = sequence.answer = await self._model.client.add(self._added(sequence))
            if sequence.is_dropped:
                await answer.abort()
            while not sequence.is_dropped:
                output = await answer.next()
                if not sequence.is_dropped:
                    self._on_output(sequence, output)
                    self._flush_soon()
                if output.reason:
                    return
        except CoreDied:
            self._die(CoreDied(self._model.core_problem()))
        except WireError as error:
            self._fail(sequence, "queue", str(error), retryable=False)
        except Exception as error:
            log.exception("request %s: vLLM failed", sequence.request_id)
            why = f"vLLM failed: {type(error).__name__}: {' '.join(str(error).split())}"
            self._fail(sequence, self.role, why, retryable=True)

    def _added(self, sequence: VllmSequence) -> Added:
        request, adapters = sequence.request, self._model.adapters
        earlier = sequence.num_output_tokens
        return Added(
            f"{request.request_id}/{request.attempt}",
            list(sequence.token_ids),
            request.params,
            self._model.eos_token_ids,
            self._transfer_params(sequence, earlier),
            earlier=earlier,
            most_tokens=1 if self.role == "prefill" else 0,
            priority=-request.priority,
            cache_salt=request.cache_salt,
            lora=adapters.request(request.adapter) if adapters is not None and request.adapter else None,
        )

    def _transfer_params(self, sequence: VllmSequence, earlier: int) -> TransferParams:
        request, key = sequence.request, (sequence.request_id, sequence.attempt)
        if isinstance(request, PrefillRequest) and request.decode is not None:
            sequence.is_lent, sequence.waits_for = True, set(range(self._model.world_size))
            send = SendKV(request_id=key[0], attempt=key[1], target=request.decode)
            return TransferParams(send=send, earlier=earlier)
        if sequence.is_incoming:
            load = Load(
                request_id=key[0],
                attempt=key[1],
                num_tokens=sequence.num_request_tokens,
                first_block=sequence.first_block,
            )
            return TransferParams(load=load, earlier=earlier)
        return TransferParams(earlier=earlier)

    def _on_output(self, sequence: VllmSequence, output: Output) -> None:
        """Process tokens of vLLM, or the end of a request."""
        now = time.monotonic()
        self._worked_at = now
        sequence.drafts, sequence.num_preemptions = output.drafts, output.num_preemptions
        if output.prompt_logprobs and sequence.params.prompt_logprobs >= 0:
            self._report_prompt_logprobs(sequence, output.prompt_logprobs)
        if output.token_ids and output.reason == "error" and sequence.params.grammar:
            *before, rejected = output.token_ids
            if before:
                self._on_tokens(sequence, replace(output, token_ids=before, reason=""), now)
            why = sequence.conflict(rejected)
            why = why or "the answer's format has no token that the other rules allow next"
            self._fail(sequence, "grammar", why, retryable=False)
            return
        if output.token_ids:
            self._on_tokens(sequence, output, now)
        if not output.reason or sequence.is_dropped:
            return
        if output.vector is not None:
            self._on_pooled(sequence, output, output.vector, now)
        elif output.reason not in FINISHED or not sequence.has_first_token:
            self._fail(sequence, self.role, f"vLLM ended the request: {output.reason}", retryable=True)
        elif self.role == "prefill":
            self._on_prefilled(sequence, now)
        else:
            self._finish(sequence, FINISHED[output.reason], now)

    def _on_tokens(self, sequence: VllmSequence, output: Output, now: float) -> None:
        params = sequence.params
        if not sequence.first_token_at:
            self._on_first_token(sequence, output, now)
        positions = output.logprobs if output.logprobs is not None and params.logprobs >= 0 else ()
        for number, token_id in enumerate(output.token_ids):
            if sequence.allowed and (why := sequence.conflict(token_id)):
                self._report_tokens(sequence)
                self._fail(sequence, "sampling", why, retryable=False)
                return
            found = positions[number] if positions else None
            logprobs = (
                token_logprobs(token_id, found, params.logprobs, params.logprob_token_ids)
                if found is not None
                else None
            )
            sequence.append(token_id, logprobs)
        self.metrics.generation_tokens.inc(len(output.token_ids))
        if not output.reason:
            self._report_tokens(sequence)

    def _report_tokens(self, sequence: VllmSequence) -> None:
        if self.role == "decode":
            self._reports.add_delta(sequence.router, sequence.delta())

    def _on_first_token(self, sequence: VllmSequence, output: Output, now: float) -> None:
        """Record the times of a prompt that was computed here."""
        sequence.first_token_at, metrics, self._has_changed = now, self.metrics, True
        sequence.num_cached = min(output.num_cached_tokens, sequence.num_request_tokens - 1)
        sequence.queue_s = output.queue_s or 0.0
        sequence.prefill_s = max(0.0, now - sequence.added_at - sequence.queue_s)
        if self.role == "decode":
            sequence.phase = Phase.RUNNING
        metrics.queue_seconds.observe(sequence.queue_s)
        metrics.prefill_seconds.observe(sequence.prefill_s)
        self._count_prompt(sequence, sequence.num_cached)
        metrics.count_computed(sequence.num_request_tokens - sequence.num_cached)

    def _on_pooled(self, sequence: VllmSequence, output: Output, values: bytes, now: float) -> None:
        """Report the vector of a prompt."""
        if not values:
            why = "the model's hidden states are not finite, no vector can be computed"
            self._fail(sequence, "prefill", why, retryable=False)
            return
        self._on_first_token(sequence, output, now)
        self._reports.report_pooled(sequence, values)
        self._reports.add_delta(sequence.router, sequence.delta("stop", sequence.timeline(now)))
        self.metrics.count_finished("stop")
        self._remove(sequence)

    def _count_prompt(self, sequence: VllmSequence, num_hits: int) -> None:
        self.metrics.prompt_tokens.inc(sequence.num_request_tokens)
        self.metrics.prefix_queries.inc(sequence.num_request_tokens)
        self.metrics.prefix_hits.inc(num_hits)
        self.metrics.count_hits(num_hits)

    def _on_prefilled(self, sequence: VllmSequence, now: float) -> None:
        """Report the first token, and let the ranks send the rest of the KV."""
        token_id = sequence.token_ids[-1]
        logprobs = sequence.logprobs[-1] if sequence.logprobs else None
        reason = self._finish_reason(sequence, token_id)
        self._reports.add_delta(sequence.router, sequence.delta(reason, sequence.timeline(now)))
        request = sequence.request
        if not sequence.is_lent:
            self._remove(sequence)
            self.metrics.count_finished(reason or "length")
            return
        sequence.phase, self._has_changed = Phase.SENDING, True
        done = KVDone(
            request_id=request.request_id,
            attempt=request.attempt,
            first_token=token_id,
            logprobs=logprobs,
            num_cached_tokens=sequence.num_cached,
            prefill_s=sequence.prefill_s,
            computed_at=now,
        )
        self._tell_ranks(Done(request_id=request.request_id, attempt=request.attempt, done=done))

    def _finish_reason(self, sequence: VllmSequence, token_id: int) -> str:
        return finish_reason(
            sequence.params,
            self._model.eos_token_ids,
            num_output_tokens=sequence.num_output_tokens,
            token_id=token_id,
            num_tokens=len(sequence.token_ids),
            max_model_len=self._model.facts.max_model_len,
        )

    def _finish(self, sequence: VllmSequence, reason: str, now: float) -> None:
        self._reports.add_delta(sequence.router, sequence.delta(reason, sequence.timeline(now)))
        self.metrics.decode_seconds.observe(max(0.0, now - sequence.first_token_at))
        self.metrics.count_finished(reason)
        self._remove(sequence)

    def _report_prompt_logprobs(self, sequence: VllmSequence, positions: Sequence[Logprobs | None]) -> None:
        """Report the log probabilities of the prompt's tokens. vLLM returns them once, after all chunks."""
        count = sequence.params.prompt_logprobs
        found = [
            token_logprobs(token_id, one, count) if one else TokenLogprobs(LOGPROB_FLOOR)
            for token_id, one in zip(sequence.token_ids[1:], positions[1:], strict=False)
        ]
        size = max(1, min(MAX_OUTPUTS, MAX_ALTERNATIVES // max(1, count)))
        for first in range(0, len(found), size):
            self._reports.report_prompt_logprobs(sequence, first, found[first : first + size])

    # ------------------------------------------------------------ KV of other workers

    def _on_link_event(self, rank: int, event: LinkEvent) -> None:
        if isinstance(event, StepsDone):
            self._on_steps(event)
            return
        if isinstance(event, RankFailed):
            self._die(CoreDied(f"rank {rank} has failed: {event.reason}"))
            return
        sequence = self._sequences.get(event.request_id)
        if sequence is None or sequence.attempt != event.attempt:
            return
        self._has_changed = True
        match event:
            case Announced() if sequence.phase is Phase.EXPECTING:
                self._tell_ranks(Admit(request_id=event.request_id, attempt=event.attempt))
            case Arrived() if sequence.phase is Phase.EXPECTING:
                self._on_arrived(sequence, rank, event)
            case TransferLost() if sequence.phase is Phase.EXPECTING:
                if event.phase:  # the prefill worker reports the same to the router
                    self._fail(sequence, event.phase, event.reason, retryable=False)
                else:
                    self._fail(sequence, "transfer", f"KV transfer failed: {event.reason}", retryable=True)
            case Sent() if sequence.is_lent:
                self._on_sent(sequence, rank, event)
        self._flush_soon()

    def _on_arrived(self, sequence: VllmSequence, rank: int, event: Arrived) -> None:
        sequence.waits_for.discard(rank)
        sequence.transfer_bytes += event.num_bytes
        sequence.transfer_s = max(sequence.transfer_s, event.transfer_s)
        sequence.transport = event.transport
        if event.num_bytes and event.busy_s:
            self.metrics.transfer_rate.observe(event.num_bytes / event.busy_s)
        if sequence.waits_for:
            return
        done, now = event.done, time.monotonic()
        try:
            tokens = [done.first_token, *unpack_tokens(done.more_tokens)]
        except WireError as error:
            self._fail(sequence, "transfer", str(error), retryable=True)
            return
        if max(tokens) >= self._model.vocab_size:
            self._fail(sequence, "transfer", f"invalid first token {max(tokens)}", retryable=True)
            return
        wants_logprobs = sequence.params.logprobs >= 0
        if wants_logprobs and (done.logprobs is None or len(done.more_logprobs) != len(tokens) - 1):
            self._fail(sequence, "transfer", "the logprobs of the first token are missing", retryable=True)
            return
        logprobs = [done.logprobs, *done.more_logprobs] if wants_logprobs else [None] * len(tokens)
        for token_id, each in zip(tokens, logprobs, strict=True):
            sequence.append(token_id, each)
        sequence.prefill_s, sequence.num_cached = done.prefill_s, done.num_cached_tokens
        sequence.first_token_at, sequence.phase = now, Phase.RUNNING
        metrics = self.metrics
        metrics.transfer_seconds.observe(sequence.transfer_s)
        metrics.transfer_bytes.inc(sequence.transfer_bytes)
        metrics.skipped_blocks.inc(sequence.first_block)
        metrics.count_transfer(sequence.transport)
        self._count_prompt(sequence, sequence.first_block * self._model.facts.block_size)
        if reason := self._finish_reason(sequence, tokens[-1]):
            self._forget(sequence, "")
            self._finish(sequence, reason, now)
        else:
            self._add(sequence)

    def _on_sent(self, sequence: VllmSequence, rank: int, event: Sent) -> None:
        if event.reason:
            self._fail(sequence, "transfer", event.reason, retryable=True)
            return
        sequence.waits_for.discard(rank)
        sequence.transfer_bytes += event.num_bytes
        sequence.num_skipped = max(sequence.num_skipped, event.num_skipped)
        sequence.grant_wait_s = max(sequence.grant_wait_s, event.grant_wait_s)
        sequence.transfer_s = max(sequence.transfer_s, event.transfer_s)
        sequence.exposed_s = max(sequence.exposed_s, event.exposed_s)
        sequence.transport = event.transport
        if sequence.waits_for:
            return
        metrics, sequence.is_lent = self.metrics, False
        metrics.grant_wait_seconds.observe(sequence.grant_wait_s)
        metrics.transfer_seconds.observe(sequence.transfer_s)
        metrics.exposed_seconds.observe(sequence.exposed_s)
        metrics.transfer_bytes.inc(sequence.transfer_bytes)
        metrics.skipped_blocks.inc(sequence.num_skipped)
        metrics.count_transfer(sequence.transport)
        metrics.count_finished("transferred")
        # Even if it is still computing, because the decode worker needs nothing more.
        self._drop(sequence, "acknowledged")

    def _tell_ranks(self, message: Order) -> None:
        if not self._model.link.send(None, message) and self.failure is None:
            has_died = self._model.client.has_died
            self._die(CoreDied(self._model.core_problem() if has_died else "a rank does not read its orders"))

    def _forget(self, sequence: VllmSequence, reason: str) -> None:
        self._tell_ranks(Forget(request_id=sequence.request_id, attempt=sequence.attempt, reason=reason))

    # ------------------------------------------------------------ end of a request

    def _fail(self, sequence: VllmSequence, phase: str, why: str, *, retryable: bool) -> None:
        if self._sequences.get(sequence.request_id) is not sequence:
            return
        self._drop(sequence, why, "" if retryable else phase)
        self._report_failed(sequence.router, sequence.request, phase, why, retryable=retryable)
        self._flush_soon()

    def _drop(self, sequence: VllmSequence, reason: str, phase: str = "") -> None:
        """Drop a sequence without notifying its router. `phase`: that of a permanent failure, for the other worker."""
        request = sequence.request
        if sequence.is_lent:
            sequence.is_lent = False
            self._tell_ranks(Cancel(request_id=request.request_id, attempt=request.attempt, reason=reason, phase=phase))
        elif sequence.is_incoming:
            self._forget(sequence, reason)
        self._remove(sequence)
        self._abort_soon(sequence)

    def _remove(self, sequence: VllmSequence) -> None:
        sequence.is_dropped = self._has_changed = True
        del self._sequences[sequence.request_id]
        if not self._sequences:
            self._emptied_at = time.monotonic()

    def _abort_soon(self, sequence: VllmSequence) -> None:
        """Abort a request in vLLM. One that is just being added is aborted afterwards."""
        if sequence.answer is not None:
            if sequence.task is not None and sequence.task is not asyncio.current_task():
                sequence.task.cancel()
            self._spawn(sequence.answer.abort(), f"abort {sequence.request_id}")

    def _refuse(self, router: bytes, message: Message, why: str, *, retryable: bool) -> None:
        """Reject a message, if it refers to a request."""
        if not getattr(message, "request_id", ""):
            return
        if isinstance(message, DecodeRequest) and message.prefill_worker:
            self._tell_ranks(Forget(request_id=message.request_id, attempt=message.attempt, reason=why))
        self._report_failed(router, message, "queue", why, retryable=retryable)

    def _report_failed(self, router: bytes, request: Any, phase: str, why: str, *, retryable: bool) -> None:
        attempt = getattr(request, "attempt", 0)
        self._reports.flush()  # a stop string in its last tokens may end the request before the failure
        self._reports.fail(router, request.request_id, attempt, phase, why, retryable=retryable)
        self.metrics.count_failed(phase)

    # ------------------------------------------------------------ steps, status and liveness

    def _on_steps(self, done: StepsDone) -> None:
        now = time.monotonic()
        for shape, step_s in done.steps:
            self._step_times.add(shape, step_s, self._step_fit.model)
            self._step_fit.observe(shape, step_s)
            self._rate.add(shape.num_tokens + shape.num_rows, step_s)
            self.metrics.steps.inc()
            self.metrics.step_seconds.observe(step_s)
        self.metrics.preemptions.inc(done.num_preempted)
        self._last, self._last_at, self._worked_at, self._has_stepped = done, now, now, True

    async def _tick(self) -> None:
        while self.failure is None:
            now = time.monotonic()
            self._guard(self._expire, now)
            self._guard(self._watch, now)
            self._guard(self._flush)
            await asyncio.sleep(TICK_S)

    def _expire(self, now: float) -> None:
        for sequence in [each for each in self._sequences.values() if each.deadline < now]:
            phase = self._phase_of(sequence)
            self._fail(sequence, phase, f"the request exceeded its deadline in phase {phase}", retryable=False)
        if now - self._progress_told_at >= PROGRESS_INTERVAL_S:
            self._report_progress()
            self._progress_told_at, self._has_stepped = now, False
        if self._model.adapters is not None and self._model.adapters.has_retired:
            self._model.adapters.free(frozenset(each.request.adapter for each in self._sequences.values()))
        if self._reset_is_due and not self._sequences:  # vLLM keeps its cache while requests use it
            self._reset_is_due = False
            self._spawn(self._reset_cache(), "reset prefix cache")

    def _phase_of(self, sequence: VllmSequence) -> str:
        if sequence.phase in (Phase.EXPECTING, Phase.SENDING):
            return "transfer"
        return "decode" if sequence.phase is Phase.RUNNING else "prefill"

    def _report_progress(self) -> None:
        """Report requests that make progress but have no new token.

        Those that wait for KV make progress if their prefill worker does, which reports it.
        """
        for sequence in self._sequences.values():
            if sequence.phase is Phase.SENDING or (sequence.phase is Phase.WAITING and self._has_stepped):
                self._reports.add_delta(sequence.router, sequence.delta())

    async def _reset_cache(self) -> None:
        if await self._model.client.reset_prefix_cache():
            self._model.cached.clear()
        else:  # the last request has just ended, or the next has begun
            await asyncio.sleep(RESET_S)
            self._reset_is_due = True

    def _watch(self, now: float) -> None:
        """Detect that vLLM has died, and set the limit of the current step."""
        if self._model.client.has_died:
            self._die(CoreDied(self._model.core_problem()))
            return
        if problem := self._model.thread.failure:
            self._die(CoreDied(problem))
            return
        in_vllm = [each for each in self._sequences.values() if each.answer is not None]
        # While transfers hold blocks, prompts may wait for them without a step.
        waits_for_blocks = any(each.phase is Phase.SENDING for each in in_vllm)
        if not in_vllm or waits_for_blocks:
            self._worked_at, self._limit_s = now, self._step_times.idle_limit_s
        else:
            shape = self._next_shape(in_vllm)
            self._limit_s = max(FLOOR_S, self._step_times.limit_s(shape, self._step_fit.model))
        if now - self._worked_at <= TICK_S * 2:
            self.num_steps += 1
        self._ticked_at = now

    def _next_shape(self, sequences: list[VllmSequence]) -> StepShape:
        """Return the largest step that vLLM may be computing."""
        rows = [len(each.token_ids) for each in sequences if each.phase is Phase.RUNNING]
        prompts = StepShape.sum(each.remaining_shape for each in sequences if each.phase is Phase.WAITING)
        most = self._model.facts.max_step_tokens
        share = min(1.0, most / prompts.num_tokens) if prompts.num_tokens else 0.0
        return StepShape(int(prompts.num_tokens * share), int(prompts.num_pairs * share), len(rows), sum(rows))

    def _snapshot(self) -> EngineStatus:
        sequences, model, last = list(self._sequences.values()), self._step_fit.model, self._last
        by_phase = Counter(each.phase for each in sequences)
        waiting = [each for each in sequences if each.phase is Phase.WAITING]
        computing = max(0, min(len(waiting), (last.num_running if last else 0) - by_phase[Phase.RUNNING]))
        shape = StepShape.sum(each.remaining_shape for each in waiting)
        if last is not None and last.num_waiting_tokens < shape.num_tokens:
            new = sum(each.remaining_shape.num_tokens for each in waiting if each.added_at > self._last_at)
            left = min(shape.num_tokens, last.num_waiting_tokens + new)
            shape = StepShape(left, shape.num_pairs * left // max(1, shape.num_tokens))
        context = sum(len(each.token_ids) for each in sequences if each.phase is Phase.RUNNING)
        rows = StepShape.of_rows(by_phase[Phase.RUNNING], context)
        facts, adapters = self._model.facts, self._model.adapters
        in_batch = [each for each in sequences if each.phase is Phase.RUNNING]
        return EngineStatus(
            num_running=by_phase[Phase.RUNNING] + computing,
            num_waiting=len(waiting) - computing,
            num_transferring=by_phase[Phase.EXPECTING] + by_phase[Phase.SENDING],
            num_waiting_tokens=shape.num_tokens,
            blocks=self._block_counts(),
            tokens_per_s=self._rate.tokens_per_s,
            step_time_s=self._rate.step_time_s,
            num_dropped_frames=self._model.link.num_dropped,
            full_tokens_per_s=model.tokens_per_s(facts.max_step_tokens),
            waiting_s=model.steps_s(shape, facts.max_step_tokens, rows) if shape.num_tokens else 0.0,
            num_context_tokens=context,
            step_model=model,
            serials=self._serials,
            num_adapters=len(adapters) if adapters is not None else 0,
            adapters_running=_users(in_batch),
            adapters_waiting=_users(each for each in sequences if each.phase is not Phase.RUNNING),
        )

    def _block_counts(self) -> BlockCounts:
        """Return the blocks by state. vLLM counts cached blocks without an owner as free."""
        total = self._model.facts.num_blocks
        available = total
        # Without requests nothing owns blocks; blocks that are not free after a while have been lost.
        if self._last is not None and (self._sequences or time.monotonic() - self._emptied_at > SETTLE_S):
            available = max(0, min(total, self._last.num_free_blocks))
        cached = min(available, len(self._model.cached))
        return BlockCounts(available - cached, cached, total - available)

    # ------------------------------------------------------------ messages and tasks

    def _emit(self, router: bytes, message: Message) -> None:
        self._outbox.append((router, message))

    def _flush_soon(self) -> None:
        """Send all messages of this iteration of the event loop together."""
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._guard, self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self.failure is not None:
            return
        now = time.monotonic()
        if self._has_changed or now - self.status.at >= TICK_S / 2:  # more tokens alone change it little
            self._has_changed = False
            self.status = replace(self._snapshot(), at=now)  # before messages of the requests it includes
        self._reports.flush()
        if self._outbox:
            messages, self._outbox = self._outbox, []
            self._send(messages)

    def _guard(self, work: Callable[..., None], *args: object) -> None:
        """Run a callback of the event loop, which only logs errors, and die with its error."""
        try:
            work(*args)
        except Exception as error:  # state may be inconsistent, so requests could get mixed up
            self._die(error)

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._is_stopped:
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """Give up: routers count this as the worker's death, and recover its requests."""
        if self.failure is not None or self._is_stopped:
            return
        log.error("engine died: %s", error, exc_info=None if isinstance(error, CoreDied) else error)
        self.failure = error

    async def _stop(self) -> None:
        """End all requests without messages."""
        for sequence in list(self._sequences.values()):
            if self.failure is None:
                self._drop(sequence, "the worker is stopping")
            else:
                self._remove(sequence)
        self._is_stopped = True
        if self._ticking is not None:
            self._ticking.cancel()
        left = set(self._tasks)
        if left:
            _, left = await asyncio.wait(left, timeout=2.0)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)
        self._model.on_event = _ignore
        self.status = replace(self.status, num_running=0, num_waiting=0, num_transferring=0)


_ignore: Callable[[int, LinkEvent], None] = lambda rank, event: None  # noqa: E731


def _users(sequences: Iterable[VllmSequence]) -> Counter[str]:
    """Count the sequences per adapter digest."""
    return Counter(sequence.request.adapter for sequence in sequences if sequence.request.adapter)
