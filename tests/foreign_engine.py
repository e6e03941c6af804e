"""An engine of another make, which a worker process serves through its contract alone.

It is one asyncio task on the process's own event loop, unlike ours, and uses nothing of our engine. A token is a
function of the tokens before it. `python -m tests.foreign_engine FLAGS` is a decode worker of it, whose model is loaded
once the file of FOREIGN_READY exists.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from common.blocks import BlockHasher
from common.config import DecodeWorkerConfig, load
from common.engine.kv import BlockCounts, BlockLog
from common.engine.worker.contract import (
    DutyOffer,
    EngineStatus,
    ModelFacts,
    RequestReceived,
    RouterLost,
    Send,
    WorkerParts,
)
from common.engine.worker.metrics import WorkerMetrics
from common.engine.worker.process import WorkerProcess, run_worker
from common.errors import BlockError, ModelError, RankLost
from common.model_files import ModelFiles
from common.wire import Role
from common.wire.message_fields import unpack_tokens
from common.wire.messages import (
    AbortRequest,
    DecodeRequest,
    Message,
    RequestFailed,
    ResetPrefixCache,
    TokenDelta,
    TokenOutput,
)

IDLE_S = 0.01
LIMIT_S = 30.0
PROGRESS_S = 1.0
KV_ADDRESS = "tcp://127.0.0.1:7,tcp://127.0.0.2:7"
"""Of two ranks, and known only once they have started."""
FACTS = ModelFacts(
    model_id="foreign", fingerprint="foreign-layout", weights="foreign-weights", max_model_len=2048, block_size=32,
    num_blocks=512, block_bytes=64, precision="integers", kv_dtype="integers", layout=(("dtype", "integers"),),
    max_num_seqs=16, max_step_tokens=100, changes_role=False, hands_over=False,
)  # fmt: skip


@dataclass
class Faults:
    """What a test does to steps: each takes `pace_s` longer, and raises `error`."""

    pace_s: float = 0.0
    error: Exception | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def next_token(token_ids: Sequence[int]) -> int:
    return (sum(token_ids[-8:]) * 31 + len(token_ids)) % 256


@dataclass(frozen=True)
class ForeignAdapter:
    digest: str
    rank: int = 4
    num_bytes: int = 100


class ForeignAdapters:
    def __init__(self) -> None:
        self.retired: list[str] = []

    def load(self, name: str, path: str) -> ForeignAdapter:
        if not path.startswith("/adapters/"):
            raise ModelError(f"no adapter in {path}")
        return ForeignAdapter(blake2b(path.encode(), digest_size=16).hexdigest())

    def retire(self, digest: str) -> None:
        self.retired.append(digest)


@dataclass
class ForeignModel:
    faults: Faults = field(default_factory=Faults)
    facts: ModelFacts = FACTS
    adapters: ForeignAdapters | None = field(default_factory=ForeignAdapters)
    failure: str = ""
    is_leaving: bool = False
    is_closed: bool = False

    def register_metrics(self, metrics: WorkerMetrics) -> None: ...

    def close(self) -> None:
        self.is_closed = True


@dataclass(eq=False)
class Answer:
    router: bytes
    request: DecodeRequest
    token_ids: list[int]
    deadline: float
    num_output: int = 0
    told_at: float = 0.0


class ForeignEngine:
    """Computes one token of each running answer per step."""

    turn_limit_s = LIMIT_S

    def __init__(self, duty: ForeignDuty, model: ForeignModel, send: Send) -> None:
        self._duty, self._model, self._send = duty, model, send
        self._commands: deque[object] = deque()
        self._answers: dict[str, Answer] = {}
        self._cached: dict[bytes, None] = {}
        self._serials: dict[bytes, int] = {}
        self._ended = threading.Event()
        self.num_steps, self._began = 0, time.monotonic()
        self.failure: BaseException | None = None
        self.status = EngineStatus(blocks=BlockCounts(model.facts.num_blocks, 0, 0))

    # ------------------------------------------------------------ the contract

    @property
    def alive(self) -> bool:
        return self.failure is None and not self._ended.is_set()

    @property
    def has_commands(self) -> bool:
        return bool(self._commands)

    @property
    def is_empty(self) -> bool:
        return not self._answers

    def is_stuck(self, now: float) -> bool:
        return now - self._began > LIMIT_S

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run())

    def submit(self, command: object) -> bool:
        self._commands.append(command)
        return True

    def notify(self, event: object) -> None:
        self._commands.append(event)

    def stop(self, timeout_s: float = 10.0) -> bool:
        self._loop.call_soon_threadsafe(self._task.cancel)
        return self._ended.wait(timeout_s)

    def check_integrity(self) -> BlockCounts:
        if (counts := self._counts()).total != self._model.facts.num_blocks:
            raise BlockError(f"{counts.total} blocks")
        return counts

    # ------------------------------------------------------------ the engine

    async def _run(self) -> None:
        try:
            while True:
                self._began, self.num_steps = time.monotonic(), self.num_steps + 1
                self._publish()
                while self._commands:
                    self._apply(self._commands.popleft())
                self._publish()
                self._expire(time.monotonic())
                if self._answers:
                    await asyncio.sleep(self._model.faults.pace_s)
                    self._step()
                else:
                    await asyncio.sleep(IDLE_S)
        except Exception as error:
            self.failure = error
        finally:
            self._ended.set()

    def _step(self) -> None:
        running = list(self._answers.values())[: self._max_num_seqs]
        try:
            self._model.faults.check()
        except RankLost:
            raise
        except Exception as error:
            for answer in running:
                self._end(answer)
                self._fail(answer.router, answer.request, "decode", f"the step failed: {error}", retryable=True)
            return
        deltas: dict[bytes, list[TokenDelta]] = defaultdict(list)
        for answer in running:
            token = next_token(answer.token_ids)
            answer.token_ids.append(token)
            answer.num_output += 1
            reason = "length" if answer.num_output >= answer.request.params.max_tokens else ""
            delta = TokenDelta(
                answer.request.request_id, answer.request.attempt, answer.num_output - 1, (token,), reason
            )
            deltas[answer.router].append(delta)
            if reason:
                self._end(answer)
        self._tell(deltas)

    def _apply(self, command: object) -> None:
        match command:
            case RequestReceived(router, DecodeRequest() as request):
                self._accept(router, request)
            case RequestReceived(router, AbortRequest(request_id=request_id, attempt=attempt)):
                known = self._answers.get(request_id)
                if known is not None and known.router == router and known.request.attempt <= attempt:
                    self._end(known)
            case RequestReceived(_, ResetPrefixCache()):
                self._cached.clear()
                self._duty.block_log.cleared()
            case RequestReceived(router, message):
                self._fail(router, message, "queue", f"this worker does not accept {type(message).__name__}")
            case RouterLost(router):
                self._serials.pop(router, None)
                for answer in [each for each in self._answers.values() if each.router == router]:
                    self._end(answer)

    def _accept(self, router: bytes, request: DecodeRequest) -> None:
        self._serials[router] = max(request.serial, self._serials.get(router, 0))
        self._publish()
        tokens = list(unpack_tokens(request.prompt))
        if (known := self._answers.get(request.request_id)) is not None:
            if known.router != router:
                self._fail(router, request, "queue", "the request id is in use by another router")
                return
            if known.request.attempt >= request.attempt:
                return
            self._end(known)
        if len(tokens) >= self._model.facts.max_model_len:
            self._fail(router, request, "queue", f"the prompt has {len(tokens)} tokens")
        elif request.adapter:
            self._fail(router, request, "queue", f"adapter {request.adapter} is not loaded", retryable=True)
        elif len(self._answers) >= self._max_num_seqs + self._duty.config.max_waiting:
            self._fail(router, request, "queue", "the worker is full", retryable=True)
        else:
            deadline = time.monotonic() + request.deadline_s
            self._answers[request.request_id] = Answer(router, request, tokens, deadline)

    def _expire(self, now: float) -> None:
        deltas: dict[bytes, list[TokenDelta]] = defaultdict(list)
        for answer in list(self._answers.values()):
            request = answer.request
            if answer.deadline < now:
                self._end(answer)
                self._fail(answer.router, request, "decode", "the request exceeded its deadline")
            elif now - answer.told_at > PROGRESS_S:
                answer.told_at = now
                progress = TokenDelta(request.request_id, request.attempt, answer.num_output, ())
                deltas[answer.router].append(progress)
        self._tell(deltas)

    def _end(self, answer: Answer) -> None:
        """Keep the full blocks of an answer, except its last token's, in the cache."""
        del self._answers[answer.request.request_id]
        hashes = BlockHasher(self._model.facts.block_size, answer.request.cache_salt).extend(answer.token_ids[:-1])
        for block_hash in hashes if answer.num_output else ():
            if block_hash not in self._cached:
                self._cached[block_hash] = None
                self._duty.block_log.stored(block_hash)
        self._publish()

    @property
    def _max_num_seqs(self) -> int:
        return min(self._model.facts.max_num_seqs, self._duty.config.places)

    def _counts(self) -> BlockCounts:
        facts = self._model.facts
        owned = sum(-(-len(answer.token_ids) // facts.block_size) for answer in self._answers.values())
        cached = len(self._cached)
        return BlockCounts(facts.num_blocks - owned - cached, cached, owned)

    def _publish(self) -> None:
        num_running = min(len(self._answers), self._max_num_seqs)
        waiting = list(self._answers.values())[num_running:]
        self.status = EngineStatus(
            num_running=num_running,
            num_waiting=len(waiting),
            num_waiting_tokens=sum(len(answer.token_ids) for answer in waiting),
            blocks=self._counts(),
            serials=dict(self._serials),
            at=time.monotonic(),
        )

    def _tell(self, deltas: dict[bytes, list[TokenDelta]]) -> None:
        identity = self._duty.parts.identity
        self._send(
            [
                (router, TokenOutput(worker_id=identity.worker_id, epoch=identity.epoch, outputs=tuple(each)))
                for router, each in deltas.items()
            ]
        )

    def _fail(self, router: bytes, message: Message, phase: str, why: str, *, retryable: bool = False) -> None:
        worker_id = self._duty.parts.identity.worker_id
        if request_id := getattr(message, "request_id", ""):
            attempt = getattr(message, "attempt", 0)
            failed = RequestFailed(
                worker_id=worker_id, request_id=request_id, attempt=attempt, phase=phase, message=why,
                retryable=retryable,
            )  # fmt: skip
            self._send([(router, failed)])


class ForeignDuty:
    role: Role = "decode"
    lend_address = ""

    def __init__(self, config: DecodeWorkerConfig, parts: WorkerParts) -> None:
        self.config, self.parts = config, parts
        self.block_log = BlockLog(parts.identity.epoch)
        self.kv_address = ""

    def bind(self) -> None: ...

    def close_kv(self) -> None: ...

    def build_engine(self, model: ForeignModel, send: Send) -> ForeignEngine:
        self.kv_address = KV_ADDRESS
        return ForeignEngine(self, model, send)


def foreign_offer(config: DecodeWorkerConfig, model: ForeignModel | None = None) -> DutyOffer[ForeignModel]:
    """Return the offer to decode with this engine."""
    served = model or ForeignModel()

    def load(files: ModelFiles) -> ForeignModel:
        file = os.environ.get("FOREIGN_READY", "")
        while file and not Path(file).exists():
            time.sleep(0.01)
        served.facts = replace(FACTS, model_id=files.model_id)
        return served

    return DutyOffer("decode", config, load, lambda parts: ForeignDuty(config, parts))


def main(argv: Sequence[str]) -> int:
    """Returns the status of the worker, or 9 if the process has loaded torch."""
    config = load(DecodeWorkerConfig, argv)
    status = run_worker(lambda: WorkerProcess(foreign_offer(config, ForeignModel(Faults(pace_s=0.01)))))
    return 9 if "torch" in sys.modules else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
