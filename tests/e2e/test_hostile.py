"""A system under CURVE answers as ever, strangers stay outside, and what even an insider sends does no harm."""

from __future__ import annotations

import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from benchmarks.stack import StackProcess, free_port
from common.wire.codec import encode
from common.wire.curve import Curve, KeyPair, write_key_pair
from common.wire.messages import RouterHello

from ..hostile import forged, garbage
from ..rig import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

MAX_KNOCKS = 20
"""Rounds of connections that are kept open until the end: descriptors are not endless, however long this takes."""
NOISE = (b"", b"\xff", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40)


class Keys:
    """A pair for the router and one for the workers; each trusts the other."""

    def __init__(self, folder: Path) -> None:
        self.pairs = {name: KeyPair.generate() for name in ("router", "worker", "stranger")}
        self.folder = folder
        for name, pair in self.pairs.items():
            write_key_pair(self.file(name), pair)
            other = "worker" if name == "router" else "router"
            (folder / f"{name}.trusted").write_text(f"{self.pairs[other].public.decode()} {other}\n")

    def file(self, name: str) -> str:
        return str(self.folder / name)

    def flags(self, name: str) -> tuple[str, ...]:
        return ("--curve-key", self.file(name), "--curve-authorized", f"{self.file(name)}.trusted")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def system(system_of: Any, keys: Keys) -> Any:
    return system_of(
        1,
        1,
        router_flags=("--local-prefill-threshold", "0", *keys.flags("router")),
        worker_flags=("--kv-transport", "tcp", *keys.flags("worker")),
    )


@pytest.fixture
def prompts(random_prompts: Any) -> list[list[int]]:
    found: list[list[int]] = random_prompts((40, 300, 800), vocab_size=256, seed=5)
    return found


def addresses(system: Any) -> list[str]:
    """Every socket that a stranger could connect to."""
    found = [
        worker.addresses.get(key, "")
        for worker in system.stack.workers()
        for key in ("address", "kv_address", "lend_address")
    ]
    return [address for address in found if address]


def test_the_answer_is_the_same(system: Any, prompts: list[list[int]], tiny_oracle: Any) -> None:
    assert system.generate(prompts, max_tokens=20) == [tiny_oracle.greedy(prompt, 20) for prompt in prompts]
    assert system.transfers("tcp") >= len(prompts)
    log = "".join(process.log.read_text() for process in (*system.stack.workers(), system.stack.router))
    assert "secret" not in log.lower()


@pytest.mark.parametrize(("name", "why"), [("", "it requires CURVE"), ("stranger", "every handshake fails")])
def test_another_router_is_told_why_it_gets_no_worker(
    system: Any, keys: Keys, tmp_path: Path, name: str, why: str
) -> None:
    port, (worker,) = free_port(), system.stack.workers("decode")
    command = [sys.executable, "-P", "-m", "router", "--model", system.stack.model, "--port", str(port)]
    flags = ("--curve-key", keys.file(name)) if name else ()
    router = StackProcess(
        "other", "router", [*command, "--decode", worker.addresses["address"], *flags], tmp_path / "log"
    )
    router.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client:

            def reason() -> str:
                try:
                    return str(client.get("/load").json()["workers"][0]["reason"])
                except httpx.TransportError:  # not listening yet
                    return ""

            wait_until(lambda: why in reason(), f"/load says: {why}", 60)
            reply = client.get("/ready")
            assert reply.status_code == 503 and why in reply.text
        line = f"worker at {worker.addresses['address']}: connection refused: {why}"
        wait_until(lambda: line in router.log.read_text(), "the log says so too")
    finally:
        router.stop()
    assert f"router {'other'}" not in worker.log.read_text()


class Bombardment:
    """Sends everything there is to every socket of a system until it is stopped."""

    def __init__(self, system: Any, keys: Keys) -> None:
        self.system, self.num_sent = system, 0
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.stopping = threading.Event()
        insider = Curve(keys.pairs["worker"])
        self.sockets = [self.dealer(address, curve) for address in addresses(system) for curve in (insider, None)]
        self.raw = ExitStack()
        self.thread = threading.Thread(target=self.main)

    def dealer(self, address: str, curve: Curve | None) -> zmq.Socket[bytes]:
        """With keys the attacker has stolen those of a worker."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.IMMEDIATE, 1)
        if curve is not None:
            curve.expect(dealer, next(iter(curve.trusted())))
        dealer.connect(address)
        return dealer

    def main(self) -> None:
        seed = 0
        while not self.stopping.is_set():
            if seed < MAX_KNOCKS:
                self.knock()
            for parts in self.salvo(seed):
                for dealer in self.sockets:
                    try:
                        dealer.send_multipart(parts, zmq.NOBLOCK)
                        self.num_sent += 1
                    except zmq.Again:  # not let in, or more than it reads
                        self.stopping.wait(0.001)
            seed += 1

    def salvo(self, seed: int) -> Iterator[list[bytes]]:
        yield [encode(RouterHello(router_id="mallory", epoch=seed))]
        yield from ([encode(message)] for message in forged(f"request-{seed}", worker_id="prefill-0"))
        yield from (parts for parts in garbage("a", seed) if sum(map(len, parts)) < 200_000)

    def knock(self) -> None:
        """Connections that never come to an end."""
        for address in addresses(self.system):
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            for noise in NOISE:
                connection = self.raw.enter_context(socket.create_connection((host, int(port)), timeout=20))
                try:
                    connection.sendall(noise)
                except OSError:  # cut off already
                    continue

    def __enter__(self) -> Bombardment:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.thread.join(60)
        self.raw.close()
        for dealer in self.sockets:
            dealer.close()
        self.context.term()


def test_a_bombardment_changes_no_answer(system: Any, keys: Keys, prompts: list[list[int]]) -> None:
    expected = system.generate(prompts, max_tokens=60)
    dropped = {worker.name: system.metric("diptych_frames_dropped", worker.role) for worker in system.stack.workers()}
    with Bombardment(system, keys) as bombardment:
        for _ in range(3):
            assert system.generate(prompts, max_tokens=60) == expected
        wait_until(lambda: bombardment.num_sent > 100, "much was sent")
        assert system.generate(prompts, max_tokens=60) == expected
    for worker in system.stack.workers():
        wait_until(
            lambda worker=worker: system.metric("diptych_frames_dropped", worker.role) > dropped[worker.name],
            f"{worker.name} dropped some of it",
        )
    assert system.generate(prompts, max_tokens=60) == expected


def test_a_worker_without_descriptors_comes_back(system: Any, prompts: list[list[int]]) -> None:
    """Connections that say nothing until none is left to give: the worker lives, and serves once they are gone."""
    expected = system.generate(prompts, max_tokens=10)
    (worker,) = system.stack.workers("decode")
    before = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)
    num_open = len(list(Path(f"/proc/{worker.pid}/fd").iterdir()))
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (num_open + 30, before[1]))
    port = int(worker.addresses["address"].rpartition(":")[2])
    with ExitStack() as raw:
        for _ in range(200):
            raw.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        time.sleep(0.5)  # most of them are accepted, the rest waits; nothing below depends on how many
        assert worker.alive
        assert system.generate(prompts, max_tokens=10) == expected  # over connections that were there before
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, before)
    wait_until(lambda: worker.alive and system.generate(prompts, max_tokens=10) == expected, "the worker serves")
