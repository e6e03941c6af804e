"""What an application loads."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, sys
from common.config import RouterConfig
from router.server.serving import Serving

async def make(store):
    Serving(RouterConfig(model="tiny-random", decode=("tcp://127.0.0.1:1",), response_store=store))

for store in ("off", "memory"):
    asyncio.run(make(store))
    print(*(name for name in sys.argv[1:] if name in sys.modules))
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


def test_a_router_without_a_store_loads_none() -> None:
    without, with_one = subprocess.check_output([sys.executable, "-P", "-c", PROGRAM, *STORES], text=True).splitlines()
    assert without.split() == [] and with_one.split() == list(STORES)
