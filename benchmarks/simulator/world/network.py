"""Links that flows share max-min fairly.

A flow crosses one link out of its sender and one into its receiver. Of all flows, those of the link with the least
fair share get that share; what they leave to other links is shared among the rest ("progressive filling": Bertsekas
and Gallager, "Data Networks", 1992, section 6.5.2). Only flows that share links, directly or through others, are shared
out again when a flow begins or ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from benchmarks.simulator.world.clock import Clock, Timer

NOTHING_BYTES, NOTHING_S = 0.5, 1e-9
"""Less than a byte, or what crosses in a nanosecond, is left of a flow only by rounding."""


@dataclass(slots=True, eq=False)
class Link:
    """One direction of one worker's network: `rate` in bytes a second. `num_bytes` have crossed it."""

    name: str
    rate: float
    num_bytes: float = 0.0
    flows: dict[int, Flow] = field(default_factory=dict)  # in the order in which they began


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way. `on_empty` is called whenever all that were added have crossed."""

    number: int
    links: tuple[Link, Link]
    on_empty: Callable[[], None]
    left: float = 0.0
    rate: float = 0.0
    at: float = 0.0
    num_added: float = 0.0
    num_crossed: float = 0.0
    timer: Timer | None = None


class Network:
    """All flows. `num_bytes_dropped` were added to flows that ended before they had crossed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._number = 0
        self.num_bytes_added = self.num_bytes_crossed = self.num_bytes_dropped = 0.0

    def open(self, sender: Link, receiver: Link, on_empty: Callable[[], None]) -> Flow:
        """A flow without bytes yet."""
        self._number += 1
        return Flow(self._number, (sender, receiver), on_empty)

    def add(self, flow: Flow, num_bytes: float) -> None:
        """Put more bytes behind those that the flow has."""
        flow.num_added += num_bytes
        self.num_bytes_added += num_bytes
        if flow.left > 0.0:
            self._settle((flow,))
            flow.left += num_bytes
            self._set_timer(flow)
            return
        flow.left, flow.at = num_bytes, self._clock.now
        for link in flow.links:
            link.flows[flow.number] = flow
        sender, receiver = flow.links
        if len(sender.flows) == len(receiver.flows) == 1:  # as most are
            flow.rate = min(sender.rate, receiver.rate)
            self._set_timer(flow)
        else:
            self._share(flow.links)

    def close(self, flow: Flow) -> None:
        """End a flow; what has not crossed is dropped."""
        if flow.left <= 0.0:
            return
        self._settle((flow,))
        self.num_bytes_dropped += flow.left
        self._leave(flow)

    # ------------------------------------------------------------ inside

    def _leave(self, flow: Flow) -> None:
        flow.left = flow.rate = 0.0
        if flow.timer is not None:
            flow.timer.cancel()
        for link in flow.links:
            del link.flows[flow.number]
        if flow.links[0].flows or flow.links[1].flows:
            self._share(flow.links)

    def _on_timer(self, flow: Flow) -> None:
        self._settle((flow,))
        if flow.left > max(NOTHING_BYTES, NOTHING_S * flow.rate):
            self._set_timer(flow)
            return
        self._cross(flow, flow.left)
        self._leave(flow)
        flow.on_empty()

    def _cross(self, flow: Flow, num_bytes: float) -> None:
        flow.left -= num_bytes
        flow.num_crossed += num_bytes
        self.num_bytes_crossed += num_bytes
        for link in flow.links:
            link.num_bytes += num_bytes

    def _settle(self, flows: Iterable[Flow]) -> None:
        """Let the bytes cross that did since the flows' rates were set."""
        for flow in flows:
            self._cross(flow, min(flow.left, flow.rate * (self._clock.now - flow.at)))
            flow.at = self._clock.now

    def _set_timer(self, flow: Flow) -> None:
        if flow.timer is not None:
            flow.timer.cancel()
        flow.timer = self._clock.after(flow.left / flow.rate, lambda: self._on_timer(flow))

    def _share(self, changed: Iterable[Link]) -> None:
        flows = _connected(changed)
        self._settle(flows)
        for flow, rate in fair_rates(flows).items():
            if rate != flow.rate:
                flow.rate = rate
                self._set_timer(flow)


def _connected(links: Iterable[Link]) -> list[Flow]:
    """The flows of these links, and of all links that these flows lead to."""
    found: dict[int, Flow] = {}
    todo = list(links)
    seen = {id(link) for link in todo}
    while todo:
        for number, flow in todo.pop().flows.items():
            if number not in found:
                found[number] = flow
                new = [link for link in flow.links if id(link) not in seen]
                seen.update(id(link) for link in new)
                todo += new
    return [found[number] for number in sorted(found)]


def fair_rates(flows: Iterable[Flow]) -> dict[Flow, float]:
    """The rate of each flow, in bytes a second."""
    waiting: dict[int, list[Flow]] = {}
    room: dict[int, float] = {}
    for flow in flows:
        for link in flow.links:
            waiting.setdefault(id(link), []).append(flow)
            room.setdefault(id(link), link.rate)
    rates: dict[Flow, float] = {}
    while waiting:
        tightest = min(waiting, key=lambda name: room[name] / len(waiting[name]))
        share = max(math.ulp(0.0), room[tightest] / len(waiting[tightest]))
        for flow in waiting[tightest]:
            rates[flow] = share
        full = set(waiting.pop(tightest))
        for name in list(waiting):
            room[name] = max(0.0, room[name] - share * sum(flow in full for flow in waiting[name]))
            if left := [flow for flow in waiting[name] if flow not in full]:
                waiting[name] = left
            else:
                del waiting[name]
    return rates
