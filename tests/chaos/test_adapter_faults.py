"""Orders to load an adapter that suffer on their way: all workers follow them in the end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.model_files.resolve import resolve_model
from common.wire.messages import SetAdapter

from ..adapters import make_adapter
from ..rig import System
from .rig import DECODE_FLAGS, PREFILL_FLAGS, ROUTER_FLAGS, WORKER_FLAGS, Rig
from .wire_proxy import FRAME_FAULTS, Fault, WireProxy

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]
PROMPT = list(range(1, 60))
NUM_TOKENS = 20
PATIENCE_S = 120.0
NAMES = itertools.count(1)


@pytest.fixture(scope="module")
def shared_rig(stacks: Any) -> Iterator[Rig]:
    with WireProxy() as proxy:
        stack = stacks(
            1,
            1,
            worker_flags=(*WORKER_FLAGS, "--max-loras", "2"),
            prefill_flags=PREFILL_FLAGS,
            decode_flags=DECODE_FLAGS,
            router_flags=ROUTER_FLAGS,
            via=proxy.control,
        )
        yield Rig(stack, proxy)
        stack.stop()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(
        tmp_path_factory.mktemp("adapters") / "a", resolve_model("tiny-random").weights[0].parent, seed=7
    )


def order(rig: Rig, path: str, **body: Any) -> None:
    reply = httpx.post(f"{rig.stack.url}/v1/{path}", json=body, timeout=PATIENCE_S, trust_env=False)
    assert reply.status_code == 200, reply.text


def answer_after_loading(rig: Rig, adapter: Path) -> list[int]:
    """What the model says with an adapter that is loaded for this answer alone."""
    name = f"a{next(NAMES)}"
    order(rig, "load_lora_adapter", lora_name=name, lora_path=str(adapter))
    (answer,) = System(rig.stack).generate([PROMPT], model=name, max_tokens=NUM_TOKENS)
    order(rig, "unload_lora_adapter", lora_name=name)
    return answer


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault not in FRAME_FAULTS])
def test_an_order_that_suffers_is_followed_all_the_same(shared_rig: Rig, adapter: Path, fault: Fault) -> None:
    expected = answer_after_loading(shared_rig, adapter)
    assert expected != System(shared_rig.stack).generate([PROMPT], max_tokens=NUM_TOKENS)[0], "it changes nothing"
    rule = shared_rig.strike(SetAdapter, fault)
    assert answer_after_loading(shared_rig, adapter) == expected

    async def recovers() -> None:
        await shared_rig.struck(rule)
        await shared_rig.quiet()

    asyncio.run(recovers())
