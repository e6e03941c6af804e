"""A pull of cached blocks whose messages suffer: the answer is the true one, and nothing is held afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from benchmarks.stack import StackSettings
from common.wire.messages import KVPull

from ..e2e.test_pulls import PACE, asked, prompt, pulls
from ..paced import PacedStack, answer
from ..rig import READY_S, System, wait_until
from .wire_proxy import FRAME_FAULTS, Fault, Rule, WireProxy

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]
PROMPT, ANSWER = 64, 120
SEEDS = itertools.count(1)


TRANSPORTS = ("auto", "tcp")
PAIRS = [(TRANSPORTS[i % 2], fault) for i, fault in enumerate(fault for fault in Fault if fault not in FRAME_FAULTS)]
"""Each fault of an order to pull once; the order is the same for both transports."""


@pytest.fixture(scope="module")
def proxied(request: Any, tmp_path_factory: pytest.TempPathFactory, forge: None) -> Iterator[tuple[System, WireProxy]]:
    """One worker of each role, a millisecond a token: an answer's blocks come back to the prefill worker by a pull."""
    folder = tmp_path_factory.mktemp("pulls")
    (folder / "pace.json").write_bytes(msgspec.json.encode(PACE))
    flags = ("--kv-transport", request.param, "--kv-memory-gib", "0.1")
    with (
        WireProxy() as proxy,
        PacedStack(
            StackSettings(
                1,
                1,
                worker_flags=flags,
                router_flags=("--local-prefill-threshold", "0", "--worker-timeout-s", "2"),
                log_dir=folder / "logs",
                ready_timeout_s=READY_S,
                via=proxy.control,
            ),
            coefficients=folder / "pace.json",
        ) as stack,
    ):
        system = System(stack)
        system.wait_for_workers()
        yield system, proxy


def next_turn(system: System) -> int:
    """Have a conversation of two turns; how many tokens of the second one were cached."""
    turn = prompt(PROMPT, next(SEEDS))
    asked(system, (turn, ANSWER))
    system.settle()
    (found,) = asked(system, ([*turn, *answer(turn, ANSWER), *prompt(9, 5)], 4))
    return int(found["cached"])


@pytest.mark.parametrize("proxied", TRANSPORTS, indirect=True)
def test_an_undisturbed_pull(proxied: tuple[System, WireProxy]) -> None:
    system, _ = proxied
    wait_until(lambda: next_turn(system) == (PROMPT + ANSWER - 1) // 16 * 16, "the whole answer is pulled")
    assert pulls(system, "pulled") > 0


@pytest.mark.parametrize(("proxied", "fault"), PAIRS, indirect=["proxied"])
def test_a_pull_that_suffers_costs_time_alone(proxied: tuple[System, WireProxy], fault: Fault) -> None:
    """`asked` compares all tokens with the true ones."""
    system, proxy = proxied
    rule = proxy.inject(Rule(KVPull, fault))

    def struck() -> bool:
        next_turn(system)
        return rule.struck > 0

    wait_until(struck, "a pull was asked for")
    proxy.clear()
    system.settle()
    next_turn(system)
