"""Two decode engines: one has a stream, the other is to take it over; and a router's part in that."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from common.wire.message_fields import pack_tokens
from common.wire.messages import AbortRequest, DecodeRequest, HandOver, KVTarget, TokenDelta
from common.wire.sampling_params import SamplingParams

from ..engine_rig import prompt
from ..waiting import wait_until

Rig = Any  # EngineRig of conftest, which other modules cannot import


def nudge(old: Rig, new: Rig) -> None:
    """Turns in which a stream that leaves `old` for `new` is decoded no more than it must be."""
    if not old.engine._inbox.empty() or old.engine._handovers.wants_pause:
        old.turn()
    new.turn()
    time.sleep(0.001)


class Pair:
    """`old` has the stream, `new` is to take it. Their loops turn one after the other."""

    def __init__(self, make_engine: Callable[..., Rig], *, shared: bool = False, **options: Any) -> None:
        self.old: Rig = make_engine(worker_id="old", shared=shared, **options)
        self.new: Rig = make_engine(worker_id="new")
        self.filter_events(lambda event: True)
        self.prompts: dict[str, list[int]] = {}
        self.params: dict[str, dict[str, Any]] = {}

    def filter_events(self, passes: Callable[[object], bool]) -> None:
        """What the old worker's sender tells its engine."""
        notify = self.old.engine.notify

        def only(event: object) -> None:
            if passes(event):
                notify(event)

        self.old.sender._on_ended = self.old.sender._on_advanced = only

    def turn(self) -> None:
        self.old.turn()
        self.new.turn()

    def until(self, condition: Callable[[], object]) -> None:
        """While both decode as fast as they can."""
        wait_until(condition, meanwhile=self.turn)

    def wait(self, condition: Callable[[], object]) -> None:
        """While the old worker decodes no more than it must: no stream ends before it has left, on any machine."""
        wait_until(condition, meanwhile=self.nudge)

    def nudge(self) -> None:
        nudge(self.old, self.new)

    def start(self, length: int = 40, name: str = "a", *, count: int = 40, tokens: int = 3, **params: Any) -> None:
        """A stream on the old worker that has `tokens` tokens."""
        self.prompts[name] = prompt(length, length)
        self.params[name] = {"max_tokens": count, **params}
        self.old.ask(self.prompts[name], name, **self.params[name])
        wait_until(lambda: len(self.old.tokens(name)) >= tokens, meanwhile=self.old.turn)

    def hand_over(self, name: str = "a", *, new_attempt: int = 1, attempt: int = 0, reserved: int = 32) -> None:
        """Both messages of the router, which has every token that the old worker sent."""
        known = self.old.tokens(name)
        self.new.tell(self.request(name, known, new_attempt, reserved))
        self.old.tell(self.order(name, len(known), new_attempt, attempt, reserved))

    def request(self, name: str, known: list[int], attempt: int, reserved: int) -> DecodeRequest:
        return DecodeRequest(
            request_id=name,
            attempt=attempt,
            prompt=pack_tokens(self.prompts[name] + known),
            params=SamplingParams(**({"temperature": 0.0} | self.params[name])),
            prefill_worker="old",
            num_output_tokens=len(known),
            num_reserved_tokens=reserved,
        )

    def order(self, name: str, num_known: int, new_attempt: int, attempt: int, reserved: int) -> HandOver:
        return HandOver(
            request_id=name,
            attempt=attempt,
            new_attempt=new_attempt,
            target=KVTarget("new", 7, self.new.receiver.address),
            num_output_tokens=num_known,
            num_reserved_tokens=reserved,
        )

    def moved(self, name: str = "a") -> bool:
        return str(self.old.reason(name)) == "moved"

    def deltas(self, name: str = "a") -> list[TokenDelta]:
        return [*self.old.deltas(name, attempt=None), *self.new.deltas(name, attempt=None)]

    def merged(self, name: str = "a") -> list[int]:
        """What the router makes of all deltas, which must agree wherever they overlap."""
        tokens: dict[int, int] = {}
        for delta in self.deltas(name):
            for offset, token in enumerate(delta.token_ids):
                assert tokens.setdefault(delta.index + offset, token) == token
        assert sorted(tokens) == list(range(len(tokens)))
        return [tokens[index] for index in range(len(tokens))]

    def expected(self, name: str = "a") -> list[int]:
        params = dict(self.params[name])
        answer: list[int] = self.old.oracle(self.prompts[name], params.pop("max_tokens"), **params)
        return answer

    def finish(self, name: str = "a") -> None:
        """Until the stream is over and nothing is left of it; its tokens are those of an undisturbed run."""
        self.until(lambda: self.old.is_clean and self.new.is_clean)
        assert self.merged(name) == self.expected(name)

    def goes_on(self, name: str = "a", *, why: str) -> None:
        """The old worker says that it keeps the stream, and brings it to its end."""
        self.wait(lambda: self.old.failures(name))
        (failed,) = self.old.failures(name)
        assert (failed.phase, failed.retryable) == ("handover", True)
        assert why in failed.message
        self.new.tell(AbortRequest(request_id=name, attempt=failed.attempt))
        self.finish(name)
        assert not self.moved(name)
        assert self.old.tokens(name) == self.expected(name)
