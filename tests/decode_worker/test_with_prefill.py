"""Both engines in their own threads, joined by the real wire; the test plays the router. Tokens equal the oracle's."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common.engine.kv.block_pool import BlockPool
from common.engine.kv.cache import KVCache
from common.engine.models.load import load_model
from common.engine.run.runner import ModelRunner
from common.engine.sampling.sampler import Sampler
from common.engine.transfer.sender import KVSender
from common.engine.worker.contract import RequestReceived
from common.engine.worker.loop import EngineConfig
from common.engine.worker.metrics import WorkerMetrics
from common.model_files.resolve import resolve_model
from common.wire.message_fields import pack_tokens
from common.wire.messages import (
    AbortRequest,
    DecodeRequest,
    KVTarget,
    Message,
    PrefillRequest,
    RequestFailed,
    TokenOutput,
)
from common.wire.sampling_params import SamplingParams
from prefill_worker.engine import PrefillEngine
from prefill_worker.launcher import PromptLauncher
from prefill_worker.scheduler import PrefillScheduler

from ..engine_rig import sending

Rig = Any  # EngineRig of conftest, which test modules cannot import


class Service:
    """`decode` is conftest's engine; this adds a prefill engine with a sender to it."""

    def __init__(self, decode: Rig, *, num_blocks: int, num_streams: int = 1, shared: bool = False) -> None:
        self.decode = decode
        self.kv = KVCache(decode.model.config, num_blocks, 16, "float32", share=shared)
        self.sent: list[tuple[bytes, Message]] = []
        sender = KVSender(
            decode.context,
            *sending(self.kv, is_required=shared),
            self.kv.block_bytes,
            ("p", 5, "layout"),
            lambda event: self.prefill.notify(event),
            lease_s=30.0,
            num_streams=num_streams,
        )
        self.prefill = PrefillEngine(
            self.sent.extend,
            EngineConfig(identity=("p", 5), eos_token_ids=decode.eos, max_model_len=1024, max_waiting=64),
            PrefillScheduler(BlockPool(num_blocks, 16), max_num_batched_tokens=32, max_num_seqs=4),
            # A model of its own: a model's buffers serve one thread.
            PromptLauncher(
                ModelRunner(load_model(resolve_model("tiny-random")), self.kv), Sampler(decode.model.config.vocab_size)
            ),
            sender,
            WorkerMetrics("m", "p", lambda: self.prefill.status),
        )
        sender.start()
        self.prefill.start()
        decode.engine.start()

    def ask(self, tokens: list[int], name: str, *, attempt: int = 0, **params: object) -> None:
        sampling = SamplingParams(**({"max_tokens": 12, "temperature": 0.0} | params))  # type: ignore[arg-type]
        decode = DecodeRequest(
            request_id=name, attempt=attempt, prompt=pack_tokens(tokens), params=sampling, prefill_worker="p"
        )
        self.decode.tell(decode)
        prefill = PrefillRequest(
            request_id=name,
            attempt=attempt,
            prompt=pack_tokens(tokens),
            params=sampling,
            decode=KVTarget("d", 7, self.decode.receiver.address),
        )
        self.prefill.submit(RequestReceived(b"router", prefill))

    def abort(self, name: str) -> None:
        for engine in (self.prefill, self.decode.engine):
            engine.submit(RequestReceived(b"router", AbortRequest(request_id=name, attempt=9)))

    def first_token(self, name: str, attempt: int = 0) -> int:
        """What the prefill worker told the router."""
        outputs = [message for _, message in self.sent if isinstance(message, TokenOutput)]
        deltas = [delta for output in outputs for delta in output.outputs if delta.token_ids]  # others report progress
        (token,) = {delta.token_ids for delta in deltas if (delta.request_id, delta.attempt) == (name, attempt)}
        return token[0]

    def wait(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < end, "the condition did not come true"
            assert self.prefill.alive and self.decode.engine.alive
            time.sleep(0.002)

    def settle(self) -> None:
        """Until both workers hold nothing; raises when a block is left."""
        for engine in (self.prefill, self.decode.engine):
            self.wait(lambda engine=engine: engine._inbox.empty() and engine.is_empty)  # type: ignore[misc]
        assert self.prefill.check_integrity().owned == self.decode.engine.check_integrity().owned == 0


@pytest.fixture(params=["tcp", "shm"])
def make_service(make_engine: Callable[..., Rig], request: pytest.FixtureRequest) -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def make(decode_blocks: int = 32, prefill_blocks: int = 32, num_streams: int = 1) -> Service:
        decode = make_engine(num_blocks=decode_blocks, watermark=0.05)
        shared = request.param == "shm"
        services.append(Service(decode, num_blocks=prefill_blocks, num_streams=num_streams, shared=shared))
        return services[-1]

    yield make
    for service in services:
        service.prefill.stop()


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def test_a_decode_worker_learns_the_link_from_its_transfers(make_service: Callable[..., Service]) -> None:
    service = make_service(64, 64)
    for length in (100, 33):
        service.ask(prompt(length, length), f"r{length}")
    service.wait(lambda: all(service.decode.reason(name) for name in ("r100", "r33")))
    service.settle()
    links = service.decode.engine.snapshot().links
    assert {links.tcp.num_transfers, links.shm.num_transfers} == {0, 2}
    assert links.usual.block_bytes == service.kv.block_bytes
    assert links.usual.is_known  # both coefficients are 0 where all KV was there when the prompts ended


@pytest.mark.slow_except("shm-14-12-3")
@pytest.mark.parametrize(("decode_blocks", "prefill_blocks", "num_streams"), [(64, 64, 1), (14, 12, 3)])
def test_tokens_equal_the_oracle(
    make_service: Callable[..., Service], decode_blocks: int, prefill_blocks: int, num_streams: int
) -> None:
    service = make_service(decode_blocks, prefill_blocks, num_streams)
    prompts = {f"r{length}": prompt(length, length) for length in (1, 15, 16, 17, 33, 64, 100, 130)}
    for name, tokens in prompts.items():
        service.ask(tokens, name)
    service.wait(lambda: all(service.decode.reason(name) for name in prompts))
    for name, tokens in prompts.items():
        expected = service.decode.oracle(tokens, 12)
        assert service.decode.tokens(name) == expected
        assert service.first_token(name) == expected[0]
    service.settle()


def test_sampled_tokens_equal_the_oracle_and_turns_share_their_prefix(make_service: Callable[..., Service]) -> None:
    service = make_service()
    params: dict[str, Any] = {"temperature": 1.0, "seed": 4, "presence_penalty": 0.5}
    history = prompt(20)
    for turn in range(4):
        service.ask(history, f"turn{turn}", **params)
        service.wait(functools.partial(service.decode.reason, f"turn{turn}"))
        answer = service.decode.tokens(f"turn{turn}")
        assert answer == service.decode.oracle(history, 12, **params)
        history = history + answer + prompt(10, turn)
    service.settle()
    shipped, computed = service.decode.receiver.num_bytes // service.kv.block_bytes, 20 + 3 * 22
    assert shipped < computed // 16 + 4


def test_an_abort_storm_leaves_nothing_behind(make_service: Callable[..., Service]) -> None:
    service, rng = make_service(24, 24), random.Random(0)
    for wave in range(6):
        for number in range(8):
            service.ask(prompt(rng.randrange(1, 120), number), f"r{wave}-{number}")
        time.sleep(rng.random() * 0.03)
        for number in range(8):
            if number != 3:
                service.abort(f"r{wave}-{number}")
    service.wait(lambda: all(service.decode.reason(f"r{wave}-3") for wave in range(6)))
    service.settle()
    assert not [
        m for _, m in service.sent + service.decode.sent if isinstance(m, RequestFailed) and "-3" in m.request_id
    ]


def test_attempts_in_quick_succession_end_with_the_right_tokens(make_service: Callable[..., Service]) -> None:
    service, tokens = make_service(), prompt(200)
    for attempt in range(5):
        service.ask(tokens, "a", attempt=attempt)
        time.sleep(0.004 * attempt)
    service.wait(lambda: service.decode.reason("a", attempt=4))
    assert service.decode.tokens("a", attempt=4) == service.decode.oracle(tokens, 12)
    service.settle()
