"""One worker process that is told to end, with the test as its router and as its decode worker."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from benchmarks.stack import StackProcess
from common.wire.codec import decode, encode
from common.wire.message_fields import pack_tokens
from common.wire.messages import (
    AbortRequest,
    DecodeRequest,
    KVAck,
    KVOpen,
    KVTarget,
    Message,
    PrefillRequest,
    RequestFailed,
    RouterHello,
    TokenOutput,
    WorkerHeartbeat,
)
from common.wire.sampling_params import SamplingParams

pytestmark = pytest.mark.e2e

PATIENCE_S = 120.0
PROMPT = pack_tokens(range(40))
LONG = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
Kind = TypeVar("Kind", bound=Message)


class DrainedWorker(StackProcess):
    """A worker of a role, its control socket, and a KV socket that it may be told to ship to."""

    def __init__(self, role: str, folder: Path) -> None:
        log = folder / f"{role}.log"
        flags = ("--model", "tiny-random", "--kv-memory-gib", "0.05", "--threads", "1", "--drain-timeout-s", "60")
        flags = (*flags, "--router-timeout-s", "300")  # the test sends no heartbeats
        flags = (*flags, "--address-file", str(log.with_suffix(".json")))
        super().__init__(role, role, [sys.executable, "-P", "-m", f"{role}_worker", *flags], log)
        self.start()
        deadline = time.monotonic() + PATIENCE_S
        self.wait_for_addresses(deadline)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control = self.context.socket(zmq.DEALER)
        self.control.connect(self.addresses["address"])
        self.kv = self.context.socket(zmq.ROUTER)
        self.kv.bind("tcp://127.0.0.1:*")
        self.tell(RouterHello(router_id="test", epoch=1))
        while not self.hear(WorkerHeartbeat).ready:
            self.check(deadline, "was not ready")

    def tell(self, message: Message) -> None:
        self.control.send(encode(message))

    def hear(self, kind: type[Kind]) -> Kind:
        """The next message of a kind; others are passed over."""
        while True:
            assert self.control.poll(int(PATIENCE_S * 1000)), f"no {kind.__name__}\n{self.log_tail()}"
            message = decode(self.control.recv())
            if isinstance(message, kind):
                return message

    def drain(self) -> None:
        self.send_signal(signal.SIGTERM)
        while not self.hear(WorkerHeartbeat).draining:
            assert self.alive

    def refuses(self, message: DecodeRequest | PrefillRequest) -> bool:
        self.tell(message)
        failed = self.hear(RequestFailed)
        return (failed.request_id, failed.phase, failed.retryable) == (message.request_id, "queue", True)

    def wait_until_owned(self, num_blocks: int) -> None:
        """A heartbeat tells what was owned after the step before it: a slow first step is not in it yet."""
        deadline = time.monotonic() + PATIENCE_S
        while (owned := self.hear(WorkerHeartbeat).num_owned_blocks) != num_blocks:
            self.check(deadline, f"owns {owned} blocks, not {num_blocks}")

    def how_it_ends(self) -> tuple[int | None, bool]:
        """The exit status, and whether it took force."""
        self.wait(time.monotonic() + PATIENCE_S)
        return self.returncode, self.forced


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drain")


@pytest.fixture
def worker(request: pytest.FixtureRequest, folder: Path, forge: None) -> Iterator[DrainedWorker]:
    worker = DrainedWorker(request.param, folder)
    yield worker
    worker.stop()
    worker.context.destroy(linger=0)


def asked(name: str) -> DecodeRequest:
    return DecodeRequest(request_id=name, attempt=0, prompt=PROMPT, params=LONG)


@pytest.mark.parametrize("worker", ["decode"], indirect=True)
def test_a_decode_worker_takes_nothing_new_and_ends_when_it_is_empty(worker: DrainedWorker) -> None:
    worker.tell(asked("a"))
    worker.hear(TokenOutput)
    worker.drain()
    assert worker.refuses(asked("b"))
    worker.hear(TokenOutput)  # what runs goes on
    worker.tell(AbortRequest(request_id="a", attempt=0))
    assert worker.how_it_ends() == (0, False)
    assert "draining: 1 requests finish or move within 60 s" in worker.log.read_text()


@pytest.mark.parametrize("worker", ["decode"], indirect=True)
def test_a_second_signal_cuts(worker: DrainedWorker) -> None:
    for name in "abcdefgh":  # far from their ends when it comes
        worker.tell(asked(name))
    worker.hear(TokenOutput)
    worker.drain()
    worker.send_signal(signal.SIGTERM)
    assert worker.how_it_ends() == (1, False)


@pytest.mark.parametrize("worker", ["prefill"], indirect=True)
def test_a_prefill_worker_keeps_what_it_holds_until_it_is_acknowledged(worker: DrainedWorker) -> None:
    target = KVTarget("d", 7, worker.kv.get_string(zmq.LAST_ENDPOINT))
    fields: dict[str, Any] = {"attempt": 0, "prompt": PROMPT, "params": LONG, "decode": target}
    worker.tell(PrefillRequest(request_id="a", **fields))
    assert worker.kv.poll(int(PATIENCE_S * 1000)), "no KVOpen"
    peer, opened = worker.kv.recv_multipart()
    assert isinstance(decode(opened), KVOpen)
    worker.drain()
    assert worker.refuses(PrefillRequest(request_id="b", **fields))
    worker.wait_until_owned(3)
    worker.kv.send_multipart([peer, encode(KVAck(request_id="a", attempt=0))])
    assert worker.how_it_ends() == (0, False)
