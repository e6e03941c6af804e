"""A stack with a man in the middle of all its wires, and what every test of it asks and checks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.stack import Stack
from common.wire.messages import Message

from .streams import Ask, Client, Heard, answers, difference, plan
from .watch import settle
from .wire_proxy import Fault, Rule, WireProxy

LEASE_S, TRANSFER_TIMEOUT_S, WORKER_TIMEOUT_S = 2.0, 1.0, 1.0
REQUEST_TIMEOUT_S = 60.0
STRIKE_TIMEOUT_S = 60.0

WORKER_FLAGS = ("--heartbeat-s", "0.1", "--router-timeout-s", "5")
PREFILL_FLAGS = ("--kv-lease-s", str(LEASE_S))
DECODE_FLAGS = ("--transfer-timeout-s", str(TRANSFER_TIMEOUT_S), "--grant-timeout-s", "20", "--num-blocks", "128")
ROUTER_FLAGS = (
    *("--heartbeat-s", "0.1", "--worker-timeout-s", str(WORKER_TIMEOUT_S)),
    *("--local-prefill-threshold", "0", "--request-timeout-s", str(REQUEST_TIMEOUT_S)),
)


def some_asks() -> list[Ask]:
    """Three streams, short and long, greedy and seeded, one with log-probabilities."""
    bodies = [ask.body for ask in plan(5, 3, prompt_len=(40, 700), num_tokens=1)]
    for body, num_tokens in zip(bodies, (12, 24, 16), strict=True):
        body |= {"max_tokens": num_tokens, "ignore_eos": True, "logprobs": None, "stop": None}
    bodies[1]["logprobs"] = 2
    return [Ask(body) for body in bodies]


def long_asks(count: int) -> list[Ask]:
    """Prompts of which one fits into a decode worker at a time."""
    return of_length(count, prompt_len=(1300, 1400), num_tokens=12)


def of_length(count: int, *, prompt_len: tuple[int, int], num_tokens: int) -> list[Ask]:
    """Streams that end by their number of tokens only."""
    bodies = [ask.body for ask in plan(6, count, prompt_len=prompt_len)]
    return [Ask({**body, "max_tokens": num_tokens, "ignore_eos": True, "stop": None}) for body in bodies]


@dataclass
class Rig:
    """`expected` keeps the undisturbed answers by the bodies' identity: each set of asks is asked for once."""

    stack: Stack
    proxy: WireProxy
    _expected: dict[str, list[Heard]] = field(default_factory=dict)

    async def expected(self, name: str, asks: Sequence[Ask]) -> list[Heard]:
        """The undisturbed answers to a named set of asks."""
        if name not in self._expected:
            async with Client(self.stack.url) as client:
                self._expected[name] = await answers(client, asks, salt="undisturbed")
        return self._expected[name]

    def strike(self, kind: type[Message], fault: Fault, **options: object) -> Rule:
        """Have the next message of this kind suffer."""
        return self.proxy.inject(Rule(kind, fault, **options))  # type: ignore[arg-type]

    async def ask(self, asks: Sequence[Ask], salt: str) -> list[Heard]:
        """All answers, whatever they are. `salt` keeps earlier cases' cached prefixes out."""
        async with Client(self.stack.url) as client:
            asked = (client.ask(ask, salt=salt, patience_s=2 * REQUEST_TIMEOUT_S) for ask in asks)
            return list(await asyncio.gather(*asked))

    async def same_answers(self, salt: str, *, name: str = "some", asks: Sequence[Ask] = ()) -> None:
        """Ask, and hear what is heard when nothing is wrong."""
        asks = asks or some_asks()
        expected = await self.expected(name, asks)
        heard = await self.ask(asks, salt)
        problems = [difference(one, should) for one, should in zip(heard, expected, strict=True)]
        assert not any(problems), f"{salt}: {problems}"

    async def struck(self, rule: Rule) -> None:
        """Wait until a rule has done what it is there for, once or more."""
        await self.struck_times(rule, 1)

    async def struck_times(self, rule: Rule, times: int) -> None:
        deadline = time.monotonic() + STRIKE_TIMEOUT_S
        while rule.struck < times:
            assert time.monotonic() < deadline, f"no {rule.kind.__name__} came by: {dict(self.proxy.num_passed)}"
            await asyncio.sleep(0.01)

    async def quiet(self) -> None:
        """No fault any more, no block held by a request, every process healthy and ready."""
        self.proxy.clear()
        await settle(self.stack)
        await asyncio.to_thread(self.stack.wait_ready, time.monotonic() + 90)
