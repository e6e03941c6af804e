"""What a router remembers of what happened to its workers."""

from __future__ import annotations

from typing import Any

from router.fleet.prefix_index import PrefixIndex
from router.fleet.registry import WorkerRegistry
from router.fleet.worker_monitor import NUM_KEPT, FleetEvents, WorkerMonitor

from ...fake_worker import heartbeat_of, hello_of

D = "tcp://d:1"


class Deaf:
    """A listener to whom nothing matters."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: True


class Rig:
    """A router that knows one decode worker."""

    def __init__(self) -> None:
        self.registry = WorkerRegistry([], [D], worker_timeout_s=2.0)
        self.lives = WorkerMonitor(self.registry, PrefixIndex(), Deaf(), lambda _: None, lambda *_: True)

    def starts(self, now: float, epoch: int = 1, role: str = "decode") -> None:
        self.lives.on_message(D, hello_of("decode-0", role, home="decode", epoch=epoch), now)
        self.lives.on_message(D, heartbeat_of("decode-0", epoch=epoch), now)

    def events(self, now: float) -> list[tuple[float, str, str, str, str]]:
        """The oldest first."""
        found = reversed(self.lives.events.recent(now))
        return [(now - one.age_s, one.kind, one.worker, one.role, one.detail) for one in found]


def test_a_cut_connection_silence_and_a_restart() -> None:
    rig = Rig()
    rig.starts(1.0)
    rig.lives.on_cut(D, 5.0)
    rig.starts(6.0, epoch=2)
    rig.starts(7.0, epoch=3)
    rig.lives.sweep(8.0)
    rig.lives.sweep(9.0)
    rig.lives.sweep(9.5)
    assert rig.events(20.0) == [
        (1.0, "ready", "decode-0", "decode", ""),
        (5.0, "lost", "decode-0", "decode", "not reachable"),
        (6.0, "ready", "decode-0", "decode", ""),
        (7.0, "lost", "decode-0", "decode", "restarted (epoch 3)"),
        (7.0, "ready", "decode-0", "decode", ""),
        (9.5, "lost", "decode-0", "decode", "silent for more than 2 s"),
    ]


def test_a_change_of_role_is_no_loss() -> None:
    rig = Rig()
    rig.starts(1.0)
    rig.starts(3.0, epoch=2, role="prefill")
    assert rig.events(9.0)[1:] == [
        (3.0, "role", "decode-0", "prefill", "was decode"),
        (3.0, "ready", "decode-0", "prefill", ""),
    ]


def test_only_the_latest_are_kept() -> None:
    rig, events = Rig(), FleetEvents()
    for number in range(NUM_KEPT + 7):
        events.add("found", rig.registry.workers[D], float(number))
    assert [event.age_s for event in events.recent(100.0)] == [100.0 - number for number in range(56, 6, -1)]
