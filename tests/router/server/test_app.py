"""What an application loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
from common.config import RouterConfig
from router.server.serving import Serving

async def make():
    Serving(RouterConfig(model="tiny-random", decode=("tcp://127.0.0.1:1",), response_store=sys.argv[1]))

asyncio.run(make())
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""
STORES = (
    "sqlite3",
    "router.stored.database",
    "router.stored.responses",
    "router.stored.files",
    "router.stored.batches",
    "router.api.batches.service",
    "router.api.responses.background",
)


@pytest.mark.parametrize("store, loaded", [("off", ()), ("memory", STORES)])
def test_a_router_without_a_store_loads_none(store: str, loaded: tuple[str, ...]) -> None:
    command = [sys.executable, "-P", "-c", PROGRAM, store, *STORES]
    assert subprocess.check_output(command, text=True).split() == list(loaded)
