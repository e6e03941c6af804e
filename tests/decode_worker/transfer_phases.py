"""A request of a decode engine in each phase of its transfer."""

from __future__ import annotations

from typing import Any

from ..engine_rig import prompt

Rig = Any  # EngineRig of conftest, which test modules cannot import
PHASES = {"expecting": "queue", "opened": "grant", "transferring": "transfer"}


def transferring(engine: Rig, tokens: list[int], name: str = "a", **options: Any) -> int:
    """A request with its grant: the first block that is missing."""
    engine.ask(tokens, name, remote=True, **options)
    return int(engine.granted(tokens, name))


def in_state(engine: Rig, state: str) -> None:
    """Bring request "a" into a state on a pool of eight blocks."""
    if state == "opened":
        transferring(engine, prompt(100, 1), "big")
    engine.ask(prompt(40), remote=True)
    engine.turn()
    if state != "expecting":
        engine.peer.open("a", 3)
        engine.until(lambda: engine.engine.scheduler.find("a").status.value == state)
