"""Workers that change between prefill and decode while streams run: no stream fails, and no token is another.

The test gives the orders itself, as one more router that every worker knows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import zmq

from benchmarks.stack import StackProcess
from common.wire.codec import decode, encode
from common.wire.messages import ChangeRole, Message, RouterHello, WorkerHeartbeat, WorkerHello

from ..rig import samples, wait_until
from .test_handover import LENGTHS, come_back, flags, handovers, is_used, router_lines, under_load

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.slow]

PATIENCE_S = 60.0
Kind = TypeVar("Kind", bound=Message)


@contextmanager
def orders_to(worker: StackProcess) -> Iterator[zmq.Socket[bytes]]:
    """The worker's control socket, at which it has heard our hello."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(worker.addresses["address"])
        tell(socket, RouterHello(router_id="test", epoch=time.monotonic_ns()))
        hear(socket, WorkerHello)
        yield socket


def tell(socket: zmq.Socket[bytes], message: Message) -> None:
    socket.send(encode(message))


def hear(socket: zmq.Socket[bytes], kind: type[Kind]) -> Kind:
    """The next message of a kind; others are passed over."""
    while True:
        assert socket.poll(int(PATIENCE_S * 1000)), f"no {kind.__name__}"
        message = decode(socket.recv())
        if isinstance(message, kind):
            return message


def change(worker: StackProcess, role: Any) -> WorkerHello:
    """Order a change twice, and what the worker then says who it is."""
    with orders_to(worker) as socket:
        for reason in ("for a test", "again, which changes nothing"):
            tell(socket, ChangeRole(role=role, reason=reason))
        return hear(socket, WorkerHello)


def works_as(system: Any, worker: StackProcess, role: str) -> bool:
    """Whether the router may use the worker in this role."""
    labels = (f'worker="{worker.name}"', f'role="{role}"', 'state="ready"')
    return any(all(label in line for label in labels) for line in router_lines(system, "diptych_worker_state"))


def changing(system_of: Any) -> tuple[Any, StackProcess]:
    """A system whose workers may change their roles, and its first decode worker."""
    shape = flags("auto")  # through shared memory, which outlasts a duty
    system = system_of(1, 2, **shape | {"worker_flags": (*shape["worker_flags"], "--role-change")})
    return system, system.stack.workers("decode")[0]


def test_a_decode_worker_becomes_a_prefill_worker_and_back_while_streams_run(
    system_of: Any, random_prompts: Any
) -> None:
    system, worker = changing(system_of)
    with under_load(system, random_prompts(LENGTHS, vocab_size=256, seed=1)) as load:
        load.wait_for_streams(6)
        running = "vllm:num_requests_running"
        wait_until(lambda: sum(samples(worker, running)) >= 2, "it has streams of its own", PATIENCE_S)
        before = handovers(system)
        hello = change(worker, "prefill")
        assert (hello.role, hello.home, hello.kv_address) == ("prefill", "decode", "")
        wait_until(lambda: works_as(system, worker, "prefill"), "it computes prompts", PATIENCE_S)
        assert handovers(system) > before
        served = system.requests_of(worker)
        wait_until(lambda: system.requests_of(worker) > served, "it computed one", PATIENCE_S)
        again = change(worker, "decode")
        assert (again.role, again.home) == ("decode", "decode") and again.epoch > hello.epoch
        wait_until(lambda: works_as(system, worker, "decode"), "it decodes", PATIENCE_S)
        served = system.requests_of(worker)
        wait_until(lambda: system.requests_of(worker) > served, "it decoded one", PATIENCE_S)
    counted = router_lines(system, "diptych_role_changes_total")
    assert {line.rsplit(" ", 1)[1] for line in counted} == {"1.0"} and len(counted) == 2


def test_a_worker_that_dies_while_it_changes_starts_where_it_is_at_home(system_of: Any, random_prompts: Any) -> None:
    system, worker = changing(system_of)
    with under_load(system, random_prompts(LENGTHS, vocab_size=256, seed=2)) as load:
        load.wait_for_streams(6)
        with orders_to(worker) as socket:
            tell(socket, ChangeRole(role="prefill", reason="it will not live to see it"))
            while not hear(socket, WorkerHeartbeat).draining:
                assert worker.alive, worker.log_tail()
            worker.kill()
        come_back(system, worker)
        wait_until(lambda: works_as(system, worker, "decode"), "it starts where it is at home", PATIENCE_S)


def test_a_pinned_worker_stays_what_it_is(system_of: Any, random_prompts: Any) -> None:
    system = system_of(1, 1)
    (worker,) = system.stack.workers("prefill")
    with orders_to(worker) as socket:
        tell(socket, ChangeRole(role="decode", reason="for a test"))
        wait_until(lambda: "the role is fixed" in worker.log_tail(), "it refuses", PATIENCE_S)
    prompts = random_prompts((40,), vocab_size=256, seed=3)
    assert system.generate(prompts, max_tokens=4)
    assert is_used(system, worker)
