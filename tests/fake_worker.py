"""A worker that follows a script: it speaks the messages of routers and workers as a real one does, without a model.

It does no I/O. A test gives it messages with `take`, and it answers through `send` and `ship`, which a subclass
carries: over sockets in tests/router/cluster.py, in any order in
tests/router/dispatch/test_dispatcher_states.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.wire.message_fields import unpack_tokens
from common.wire.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    AbortRequest,
    AnyMessage,
    DecodeRequest,
    HandOver,
    KVTarget,
    Message,
    PooledOutput,
    PrefillRequest,
    PromptLogprobs,
    RequestFailed,
    Timeline,
    TokenDelta,
    TokenOutput,
    WorkerHeartbeat,
    WorkerHello,
)
from common.wire.sampling_params import SamplingParams, TokenLogprobs

Work = PrefillRequest | DecodeRequest
NUM_BLOCKS = 1000


def hello_of(worker_id: str = "w", role: str = "decode", **fields: Any) -> WorkerHello:
    """The hello of a worker with 1,000 blocks of 4 tokens, but for these fields."""
    values = {
        "epoch": 1, "fingerprint": "f", "model": "m", "block_size": 4, "num_blocks": NUM_BLOCKS, "max_model_len": 4096,
        "max_num_seqs": 64, "kv_address": "tcp://127.0.0.1:1" if role == "decode" else "", "version": "0",
        "weights": "", "max_step_tokens": 0, "home": role,
        "oldest_protocol": OLDEST_PROTOCOL_VERSION, "protocol": PROTOCOL_VERSION,
    }  # fmt: skip
    return WorkerHello(worker_id=worker_id, role=role, **(values | fields))


def heartbeat_of(worker_id: str = "w", **fields: Any) -> WorkerHeartbeat:
    """The heartbeat of a worker that is ready and idle, but for these fields."""
    values = {
        "epoch": 1, "step": 1, "ready": True, "draining": False, "num_running": 0, "num_waiting": 0,
        "num_transferring": 0, "num_waiting_tokens": 0, "num_free_blocks": NUM_BLOCKS, "num_cached_blocks": 0,
        "num_owned_blocks": 0,
    }  # fmt: skip
    return WorkerHeartbeat(worker_id=worker_id, **(values | fields))


def next_token(tokens: list[int], rounding: int = 0, weights: int = 0) -> int:
    """The scripted model: a token that depends on those before it and on how many they are, so that a lost or repeated
    one shows in all that follow. Each rounding, and all weights, have tokens of their own."""
    exact = (sum((i + 1) * t for i, t in enumerate(tokens[-40:])) * 31 + len(tokens)) % 997
    return exact + 1000 * rounding + 10_000 * weights


def vector_of(tokens: list[int]) -> bytes:
    """What the fakes pool of a prompt: its first and last token, their number and their sum."""
    return array("f", [tokens[0], tokens[-1], len(tokens), sum(tokens)]).tobytes()


def expected(prompt: list[int], count: int) -> list[int]:
    """What an unfailed run answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class Job:
    """A request on a worker. `tokens`: prompt and answer, None while the KV is awaited; `index`: the next output."""

    router: bytes
    request: Work
    tokens: list[int] | None
    index: int
    order: HandOver | None = None


class FakeWorker(ABC):
    """Its state, and what it says to whom. `hello` and `beat` replace fields of its hello and of its heartbeats."""

    def __init__(self, worker_id: str, role: str, epoch: int = 1, **hello: Any) -> None:
        self.worker_id, self.role, self.epoch, self.step = worker_id, role, epoch, 1
        self.hello, self.beat = hello, dict[str, Any]()
        self.routers: dict[bytes, int] = {}  # with the serial of the last request from each
        self.jobs: dict[str, Job] = {}
        self.received: list[AnyMessage] = []
        self.script: Callable[[list[int]], int] = next_token
        self.stop_at = math.inf  # tokens of an answer, at which it ends by itself
        self.logprobs_per_message = 5
        self.serving = True
        # Of each request and each order; True: the test does what is to be done.
        self.on_request: Callable[[bytes, Work], bool] = lambda router, request: False
        self.on_handover: Callable[[bytes, HandOver], bool] = lambda router, order: False

    # ------------------------------------------------------------ carried by a subclass

    @abstractmethod
    def send(self, router: bytes, message: Message) -> None: ...

    @abstractmethod
    def ship(self, request_id: str, attempt: int, target: KVTarget, tokens: list[int]) -> None:
        """Bring the KV of these tokens to another worker."""

    # ------------------------------------------------------------ what routers say

    def take(self, router: bytes, message: AnyMessage) -> None:
        """Accept work, an abort or an order; nothing else changes what it does."""
        self.received.append(message)
        match message:
            case AbortRequest(request_id=request_id, attempt=attempt):
                if request_id in self.jobs and self.jobs[request_id].request.attempt <= attempt:
                    del self.jobs[request_id]
            case PrefillRequest() | DecodeRequest() if self.serving and not self.on_request(router, message):
                self.start(router, message)
            case HandOver() if not self.on_handover(router, message):
                self.obey(router, message)

    def start(self, router: bytes, request: Work) -> Job | None:
        """Begin to serve a request, unless this attempt or a later one is known."""
        self.routers[router] = max(self.routers.get(router, 0), request.serial)
        known = self.jobs.get(request.request_id)
        if known is not None and known.request.attempt >= request.attempt:
            return None
        awaits_kv = isinstance(request, DecodeRequest) and request.prefill_worker
        tokens = None if awaits_kv else unpack_tokens(request.prompt)
        job = self.jobs[request.request_id] = Job(router, request, tokens, request.num_output_tokens)
        return job

    def obey(self, router: bytes, order: HandOver) -> None:
        """Note that a request is to go on elsewhere."""
        job = self.jobs.get(order.request_id)
        if job is None or job.request.attempt != order.attempt or job.tokens is None:
            self.fail(router, order)
        else:
            job.order = order

    # ------------------------------------------------------------ what it does

    def advance(self, job: Job) -> None:
        """Say the next token, or all that came with the KV. A prefill worker has done its part then."""
        assert job.tokens is not None
        request, prompt = job.request, unpack_tokens(job.request.prompt)
        if request.params.pooling:
            self.send_pooled(job.router, request, prompt)
            self.output(job.router, request, 0, [], "stop")
            del self.jobs[request.request_id]
            return
        if job.index == request.num_output_tokens:
            self.send_logprobs(job.router, request, prompt)
        tokens = job.tokens[len(prompt) - request.num_output_tokens + job.index :]
        if not tokens:
            tokens = [self.script(job.tokens)]
            job.tokens += tokens
        index, job.index = job.index, job.index + len(tokens)
        reason = self.reason(request.params, job.index)
        self.output(job.router, request, index, tokens, reason)
        if isinstance(request, PrefillRequest) and request.decode is not None and not reason:
            self.ship(request.request_id, request.attempt, request.decode, job.tokens)  # an ended answer needs no KV
        if reason or isinstance(request, PrefillRequest):
            del self.jobs[request.request_id]

    def hand_over(self, job: Job) -> None:
        """Leave a request to the target of its order."""
        assert job.tokens is not None and job.order is not None
        order = job.order
        del self.jobs[order.request_id]
        self.ship(order.request_id, order.new_attempt, order.target, job.tokens)
        self.output(job.router, job.request, job.index, [], "moved")

    def reason(self, params: SamplingParams, count: int) -> str:
        if count >= self.stop_at:
            return "stop"
        return "length" if count >= params.max_tokens else ""

    # ------------------------------------------------------------ what it says

    def output(self, router: bytes, request: Work, index: int, tokens: list[int], reason: str = "") -> None:
        delta = TokenDelta(
            request.request_id, request.attempt, index, tuple(tokens), reason,
            timeline=Timeline(prefill_s=0.5) if self.role == "prefill" else Timeline(decode_s=0.25),
        )  # fmt: skip
        self.send_delta(router, delta)

    def send_delta(self, router: bytes, delta: TokenDelta) -> None:
        self.send(router, TokenOutput(worker_id=self.worker_id, epoch=self.epoch, outputs=(delta,)))

    def send_logprobs(self, router: bytes, request: Work, tokens: list[int]) -> None:
        """Log-probabilities of the prompt, `logprobs_per_message` at a time, if wanted."""
        if request.params.prompt_logprobs < 0 or request.num_output_tokens:
            return
        found = [TokenLogprobs(-float(token)) for token in tokens[1:]]
        for first in range(0, len(found), self.logprobs_per_message):
            part = tuple(found[first : first + self.logprobs_per_message])
            told = PromptLogprobs(
                worker_id=self.worker_id, epoch=self.epoch, request_id=request.request_id, attempt=request.attempt,
                start=first + 1, logprobs=part,
            )  # fmt: skip
            self.send(router, told)

    def send_pooled(self, router: bytes, request: Work, tokens: list[int]) -> None:
        """The vector of a prompt: `vector_of` its tokens."""
        told = PooledOutput(
            worker_id=self.worker_id, epoch=self.epoch, request_id=request.request_id, attempt=request.attempt,
            values=vector_of(tokens),
        )  # fmt: skip
        self.send(router, told)

    def fail(
        self,
        router: bytes,
        request: Work | HandOver,
        *,
        phase: str = "",
        text: str = "scripted",
        retryable: bool = True,
    ) -> bool:
        """Refuse or give up a request, or an order; True: nothing else is to be done for it."""
        is_order = isinstance(request, HandOver)
        failed = RequestFailed(
            worker_id=self.worker_id, request_id=request.request_id,
            attempt=request.new_attempt if is_order else request.attempt,
            phase=phase or ("handover" if is_order else "queue"), message=text, retryable=retryable,
        )  # fmt: skip
        self.send(router, failed)
        return True

    def hello_message(self) -> WorkerHello:
        return hello_of(self.worker_id, self.role, epoch=self.epoch, **self.hello)

    def heartbeat(self, router: bytes) -> WorkerHeartbeat:
        load = {"step": self.step, "num_running": len(self.jobs), "serial": self.routers.get(router, 0)}
        return heartbeat_of(self.worker_id, epoch=self.epoch, **(load | self.beat))

    def of(self, kinds: Any) -> list[AnyMessage]:
        return [message for message in self.received if isinstance(message, kinds)]
