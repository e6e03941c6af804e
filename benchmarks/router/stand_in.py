"""Stand-ins for workers, all in one process: they speak the real wire and make tokens at will, without a model."""

from __future__ import annotations

import math
import time
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

import zmq

from benchmarks.router.steps import ALL, Pace, Steps
from benchmarks.router.tally import Tally
from common import __version__
from common.latency.step_model import StepModel
from common.wire.codec import decode, encode
from common.wire.message_fields import Role
from common.wire.messages import (
    AbortRequest,
    DecodeRequest,
    Message,
    PrefillRequest,
    RouterHello,
    Timeline,
    TokenDelta,
    TokenOutput,
    WorkerHeartbeat,
    WorkerHello,
)
from common.wire.sockets import bind

BEAT_S: Final = 0.1
SOON_S: Final = 0.001
"""Sockets are waited for in milliseconds, which would join steps that follow each other sooner."""
MANY: Final = 1 << 24
"""Blocks, sequences and tokens: a stand-in never lacks room."""
BLOCK_SIZE: Final = 16
PACE: Final = StepModel(fixed_s=1e-5, token_s=1e-9, row_s=1e-9, context_s=0.0)
"""So fast that no policy of the router holds a request back."""
TIMELINE: Final = Timeline(prefill_s=0.01, decode_s=0.1)


@dataclass(slots=True)
class Sequence:
    """A stream: the output position of its next token, and when its tokens were sent if that is asked for."""

    router: bytes
    request: DecodeRequest
    index: int = 0
    times: array[float] = field(default_factory=lambda: array("d"))


class StandIn:
    """One worker: a ROUTER socket and its sequences."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], role: Role, number: int, token_id: int) -> None:
        self.role, self.worker_id, self._epoch, self._step = role, f"{role}-{number}", number + 1, 1
        self._token_id = token_id
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.SNDHWM, 0)
        self.address = bind(self.socket, "127.0.0.1", 0)
        self.running: dict[str, Sequence] = {}
        self._routers: dict[bytes, int] = {}
        self.longest_prompt = 0

    def take(self, steps: Steps) -> None:
        """Handle every message that is there."""
        while True:
            try:
                router, data = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            match decode(data):
                case RouterHello():
                    self._routers[router] = 0
                    self.send(router, self._hello())
                    self._beat(router)
                case PrefillRequest() | DecodeRequest() as request:
                    self._routers[router] = request.serial
                    self._begin(router, request, steps)
                case AbortRequest(request_id=request_id):
                    self.running.pop(request_id, None)

    def step(self, steps: Steps, part: slice = ALL, *, last: bool = False) -> None:
        """A token for each sequence of a part, in one message to each router; the `last` one ends it.

        Tokens are stamped when their message is made: to make it is the engine's work.
        """
        outputs: dict[bytes, list[TokenDelta]] = defaultdict(list)
        running = list(self.running.items())[part]
        for request_id, sequence in running:
            ends = last or sequence.index + 1 == sequence.request.params.max_tokens
            delta = TokenDelta(
                request_id,
                sequence.request.attempt,
                sequence.index,
                (self._token_id,),
                "length" if ends else "",
                timeline=TIMELINE if ends else None,
            )
            outputs[sequence.router].append(delta)
            sequence.index += 1
        steps.num_emitted += len(running)
        for router, deltas in outputs.items():
            data = encode(TokenOutput(worker_id=self.worker_id, epoch=self._epoch, outputs=tuple(deltas)))
            now = time.monotonic()
            self.socket.send_multipart([router, data])
            for delta in deltas:
                self.running[delta.request_id].times.append(now)
                if delta.finish_reason:
                    del self.running[delta.request_id]

    def beat(self) -> None:
        self._step += 1
        for router in self._routers:
            self._beat(router)

    def send(self, router: bytes, message: Message) -> None:
        self.socket.send_multipart([router, encode(message)])

    def _begin(self, router: bytes, request: PrefillRequest | DecodeRequest, steps: Steps) -> None:
        """Send the first token; a decode worker repeats the one of a prefill worker, as real ones do."""
        most = request.params.max_tokens
        self.longest_prompt = max(self.longest_prompt, len(request.prompt) // 4)
        prefills = isinstance(request, PrefillRequest)
        count = most if steps.pace is Pace.ONCE and not prefills else 1
        reason = "length" if count >= most else ""
        delta = TokenDelta(request.request_id, request.attempt, 0, (self._token_id,) * count, reason, timeline=TIMELINE)
        self._tell(router, delta)
        if isinstance(request, PrefillRequest):
            steps.num_emitted += 1
            return
        steps.num_emitted += count - bool(request.prefill_worker)
        if not reason:
            self.running[request.request_id] = Sequence(router, request, count, array("d", [time.monotonic()]))

    def _tell(self, router: bytes, *deltas: TokenDelta) -> None:
        self.send(router, TokenOutput(worker_id=self.worker_id, epoch=self._epoch, outputs=deltas))

    def _hello(self) -> WorkerHello:
        return WorkerHello(
            worker_id=self.worker_id,
            role=self.role,
            epoch=self._epoch,
            fingerprint="stand-in",
            model="stand-in",
            block_size=BLOCK_SIZE,
            num_blocks=MANY,
            max_model_len=MANY,
            max_num_seqs=MANY,
            kv_address="tcp://127.0.0.1:1" if self.role == "decode" else "",
            version=__version__,
            weights="stand-in",
            home=self.role,
            max_step_tokens=MANY,
        )

    def _beat(self, router: bytes) -> None:
        beat = WorkerHeartbeat(
            worker_id=self.worker_id,
            epoch=self._epoch,
            step=self._step,
            ready=True,
            draining=False,
            num_running=len(self.running),
            num_waiting=0,
            num_transferring=0,
            num_waiting_tokens=0,
            num_free_blocks=MANY,
            num_cached_blocks=0,
            num_owned_blocks=0,
            step_model=PACE,
            serial=self._routers[router],
        )
        self.send(router, beat)


class StandIns:
    """The body of the process: workers, their steps, and the commands of the benchmark."""

    def __init__(self, pipe: Connection, tally: Tally, num_prefill: int, num_decode: int, token_id: int) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        prefill = [StandIn(context, "prefill", number, token_id) for number in range(num_prefill)]
        self._decode = [StandIn(context, "decode", number, token_id) for number in range(num_decode)]
        self._workers = [*prefill, *self._decode]
        self._pipe, self._steps = pipe, Steps(num_decode, tally)
        self._poller = zmq.Poller()
        for worker in self._workers:
            self._poller.register(worker.socket, zmq.POLLIN)
        self._poller.register(pipe.fileno(), zmq.POLLIN)
        pipe.send({role: [one.address for one in self._workers if one.role == role] for role in ("prefill", "decode")})

    def run(self) -> None:
        """Until the benchmark says "end"."""
        beat_at = 0.0
        while True:
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + BEAT_S
                for worker in self._workers:
                    worker.beat()
            turn = self._steps.due(now, self._num_running)
            if turn is not None:
                self._decode[turn].step(self._steps, self._steps.part)
            wait_s = 0.0 if turn is not None else self._steps.wait_s(now, self._num_running, max(0.0, beat_at - now))
            if self._steps.pace is Pace.CLOCK and wait_s < SOON_S:
                time.sleep(wait_s)
                wait_s = 0.0
            for ready, _ in self._poller.poll(math.ceil(wait_s * 1000)):
                if ready == self._pipe.fileno():
                    if not self._obey(*self._pipe.recv()):
                        return
                else:
                    next(one for one in self._workers if one.socket is ready).take(self._steps)

    @property
    def _num_running(self) -> int:
        return sum(len(worker.running) for worker in self._decode)

    def _obey(self, command: str, *values: Any) -> bool:
        """Carry out a command and answer; False at the end."""
        answer: Any = None
        match command:
            case "pace":
                self._steps.set(Pace(values[0]), values[1], time.monotonic(), values[2])
            case "finish":
                self._steps.set(Pace.HOLD, 0.0, 0.0)
                for worker in self._decode:
                    worker.step(self._steps, last=True)
            case "times":
                answer = {name: list(one.times) for worker in self._decode for name, one in worker.running.items()}
            case "report":
                answer = {
                    "num_emitted": self._steps.num_emitted,
                    "num_running": self._num_running,
                    "longest_prompt": max(worker.longest_prompt for worker in self._workers),
                }
                for worker in self._workers:
                    worker.longest_prompt = 0
        self._pipe.send(answer)
        return command != "end"


def serve(pipe: Connection, tally: Tally, num_prefill: int, num_decode: int, token_id: int) -> None:
    """Body of the process: sends the addresses by role, then obeys."""
    StandIns(pipe, tally, num_prefill, num_decode, token_id).run()
