"""How many calls of the router's own functions a short request takes: what each request pays shows here at once.

The time of a request depends on the machine, the number of calls does not. When a test fails, look at what the change
does for every request and few need; when all of it is needed, raise the bound.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest

import common
import router
from common.config import RouterConfig
from common.latency.step_model import StepModel
from common.wire.messages import TokenDelta, TokenOutput
from common.wire.sampling_params import SamplingParams
from router.dispatch.client import GenerationRequest
from router.dispatch.core import Actions, DispatchCore
from router.fleet.prefix_index import PrefixIndex
from router.fleet.registry import WorkerRegistry

from ..fake_worker import heartbeat_of, hello_of

OURS = tuple(str(Path(str(package.__file__)).parent) for package in (common, router))
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
PREFILL, DECODE = ("tcp://p:1",), tuple(f"tcp://d:{number}" for number in range(4))
FAST = StepModel(fixed_s=1e-5, token_s=1e-9, row_s=1e-9, num_steps=100)


class Calls:
    """Counts calls of functions of `OURS` in its block, each step of a coroutine among them."""

    def __enter__(self) -> Self:
        self.num = 0
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        self.num += event == "call" and frame.f_code.co_filename.startswith(OURS)


@pytest.mark.parametrize(("fields", "most"), [({}, 590), ({"stream": True}, 570)])
async def test_a_short_request_over_http(running: Any, fields: dict[str, Any], most: int) -> None:
    counted = []
    for _ in range(5):
        with Calls() as calls:
            reply = await running.http.post("/v1/chat/completions", json=CHAT | fields)
        assert reply.status_code == 200
        counted.append(calls.num)
    assert min(counted) <= most


def test_a_short_request_in_the_core() -> None:
    """With a prefill worker and four for decoding, of which the policy weighs each."""
    registry = WorkerRegistry(PREFILL, DECODE, worker_timeout_s=1.0)
    actions = Actions(lambda *_: True, lambda *_: None, lambda *_: lambda: None, lambda _: None)
    core = DispatchCore(RouterConfig(prefill=PREFILL, decode=DECODE, model="m"), registry, PrefixIndex(), actions)
    for address in (*PREFILL, *DECODE):
        role = "prefill" if address in PREFILL else "decode"
        registry.on_hello(address, hello_of(address, role), 0.0)
        registry.on_heartbeat(address, heartbeat_of(address, step_model=FAST), 0.0)
        core.on_ready(address, 0.0)
    counted = []
    for number in range(5):
        with Calls() as calls:
            for _ in range(2):  # before the body is read, and with it
                core.check_room(lambda num_tokens: False, 1.0)
            prompt = [number, *range(100)]
            state = core.submit(GenerationRequest(f"r{number}", prompt, SamplingParams(max_tokens=4)), 1.0)
            attempts = state.attempts
            assert attempts.prefill is not None and attempts.decode is not None
            for address, index, tokens, reason in (
                (attempts.prefill.address, 0, (7,), ""),
                (attempts.decode.address, 0, (7, 8, 9, 10), "length"),
            ):
                delta = TokenDelta(f"r{number}", 0, index, tokens, reason)
                core.on_output(address, TokenOutput(worker_id=address, epoch=1, outputs=(delta,)), 1.0)
                state.take_event()
            core.end(state)
        counted.append(calls.num)
    assert min(counted) <= 760
