"""Admission of the other hosts of a worker on rank 0. Each host opens three connections per rank.

rank host   JoinRequest(host) ──>                     JoinRequest(steps, 2) ──>               ...(adapters, 2) ──>
rank 0                            <── ranks, session                            <── JoinResponse
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from common.config import WorkerConfig
from common.engine.ranks.admission import (
    KEYS_DIFFER,
    Handshake,
    JoinRequest,
    JoinResponse,
    NotAdmitted,
    Purpose,
    Versions,
    key_of,
)
from common.engine.ranks.channel import Channel
from common.engine.ranks.connection import configured, normalized_address
from common.errors import RankLost
from common.wire import DropLog, in_url, listen

log = logging.getLogger(__name__)
MOST_HANDSHAKES = 64
"""Maximum number of unauthenticated connections. Further ones are closed at once."""
ACCEPT_POLL_S = 0.5
SESSION_BYTES = 16
JOIN_S = 900.0
"""Maximum time, in seconds, until all hosts have joined."""
BACKLOG = 128


@dataclass(slots=True)
class JoinedHost:
    """Another host, and the connections of its ranks. `control` shows when it is gone or wants to leave."""

    name: str
    control: Channel
    ranks: range
    session: bytes
    num_links: int
    links: dict[tuple[int, Purpose], Channel] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.links) == self.num_links

    def close(self) -> None:
        for channel in (self.control, *self.links.values()):
            channel.close()


class RankHosts:
    """Admits hosts until all have joined. Hosts without the key get no information."""

    def __init__(
        self, listener: socket.socket, key: bytes, *, num_others: int, ranks_per_host: int, engine: str = "diptych"
    ) -> None:
        """Takes ownership of `listener`. `num_others` excludes this host, which has the first ranks."""
        self._listener, self._key = listener, key
        self._hosts: list[JoinedHost | None] = [None] * num_others
        self._ranks_per_host = ranks_per_host
        self._versions, self._engine = Versions.of_this_host(), engine
        self._lock = threading.Lock()  # for the fields below, which connection threads change
        self._is_over = False
        self._num_handshakes = 0
        self._refusals = DropLog(log, "a connection to the rank port")

    def wait(self, timeout_s: float) -> Sequence[JoinedHost]:
        """Return all hosts in the order of their ranks. The caller closes them. Raises RankLost at the deadline.

        Afterwards no host is admitted.
        """
        until, waiting = time.monotonic() + timeout_s, select.poll()
        waiting.register(self._listener, select.POLLIN)
        joined: Sequence[JoinedHost] = ()
        try:
            while not joined:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise RankLost(self._missing_hosts(timeout_s))
                if waiting.poll(min(left_s, ACCEPT_POLL_S) * 1000):
                    self._accept()
                joined = self._all_complete()
        finally:
            self._listener.close()
            if not joined:
                self._end()
        return joined

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:  # such as out of descriptors, or a peer that has left
            self._refuse(f"cannot be accepted: {error}")
            return
        connection.setblocking(True)
        with self._lock:
            is_free = self._num_handshakes < MOST_HANDSHAKES
            self._num_handshakes += is_free
        if not is_free:
            connection.close()
            self._refuse(f"closed: {MOST_HANDSHAKES} others are not authenticated yet")
            return
        channel = Channel(configured(connection), f"the connection from {normalized_address(address[0])}")
        name = normalized_address(address[0])
        threading.Thread(target=self._admit, args=(channel, name), name="rank-admission", daemon=True).start()

    def _admit(self, channel: Channel, name: str) -> None:
        """Handle the first messages of a connection, on a separate thread, so that a silent one delays no other."""
        is_kept = False
        try:
            handshake = Handshake(channel, self._key, leads=True)
            try:
                request = handshake.receive(JoinRequest)
            except NotAdmitted:
                handshake.send(JoinResponse(problem=KEYS_DIFFER))
                raise
            with self._lock:  # the answer is small, so sending does not block
                answer = self._answer(request)
                handshake.send(answer)
                is_kept = not answer.problem and self._keep(request, answer, channel, name)
            if answer.problem:
                self._refuse(f"{channel.peer} is refused: {answer.problem}")
        except (RankLost, NotAdmitted) as error:
            self._refuse(str(error))
        finally:
            if not is_kept:
                channel.close()
            with self._lock:
                self._num_handshakes -= 1

    def _answer(self, request: JoinRequest) -> JoinResponse:
        """Return the answer to a request, without side effects."""
        if self._is_over:
            return JoinResponse(problem="the ranks of this worker are already running", again=True)
        theirs, ours = request.versions, self._versions
        if self._engine != "vllm":
            theirs, ours = (msgspec.structs.replace(each, vllm="") for each in (theirs, ours))
        if theirs != ours:
            return JoinResponse(
                problem=f"it has {theirs}, rank 0 has {ours}: install the same versions on every host of the worker"
            )
        if request.purpose != "host":
            host = self._host_of(request)
            is_known = host is not None and (request.rank, request.purpose) not in host.links
            return (
                JoinResponse()
                if is_known
                else JoinResponse(problem=f"rank {request.rank} is not assigned to it", again=True)
            )
        free = [index for index, host in enumerate(self._hosts) if host is None]
        if not free:
            problem = f"all {len(self._hosts) + 1} hosts of --rank-hosts have already joined"
            return JoinResponse(problem=problem, again=True)
        first = (free[0] + 1) * self._ranks_per_host
        ranks = tuple(range(first, first + self._ranks_per_host))
        return JoinResponse(session=secrets.token_bytes(SESSION_BYTES), ranks=ranks, engine=self._engine)

    def _keep(self, request: JoinRequest, answer: JoinResponse, channel: Channel, name: str) -> bool:
        if request.purpose == "host":
            ranks = range(answer.ranks[0], answer.ranks[-1] + 1)
            theirs = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
            channel.peer = f"the host of {theirs} at {name}"
            joined = JoinedHost(name, channel, ranks, answer.session, len(answer.links))
            self._hosts[ranks.start // self._ranks_per_host - 1] = joined
            log.info("%s has joined", channel.peer)
            return True
        if (host := self._host_of(request)) is None:
            return False
        if request.purpose != "engine":
            channel.peer = f"rank {request.rank} at {name}"
        else:
            channel.peer = host.control.peer
        host.links[request.rank, request.purpose] = channel
        return True

    def _host_of(self, request: JoinRequest) -> JoinedHost | None:
        """Return the host whose rank a connection is for."""
        known = (host for host in self._hosts if host is not None)
        return next((host for host in known if host.session == request.session and request.rank in host.ranks), None)

    def _all_complete(self) -> Sequence[JoinedHost]:
        """Return all hosts once all have opened all connections, else (). Drops hosts that are gone."""
        with self._lock:
            for index, host in enumerate(self._hosts):
                if host is not None and host.control.is_cut():
                    log.warning("%s disconnected before all hosts had joined", host.control.peer)
                    host.close()
                    self._hosts[index] = None
            self._refusals.flush(time.monotonic())
            there = [host for host in self._hosts if host is not None and host.is_complete]
            self._is_over = len(there) == len(self._hosts)
            return there if self._is_over else ()

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            for host in self._hosts:
                if host is not None:
                    host.close()

    def _missing_hosts(self, timeout_s: float) -> str:
        host, port = self._listener.getsockname()[:2]
        there = sum(host is not None for host in self._hosts)
        return (
            f"{there} of {len(self._hosts)} other hosts have joined at {in_url(host)}:{port} within {timeout_s:g} s: "
            "start `diptych rank-host --leader` with this address on each of them"
        )

    def _refuse(self, why: str) -> None:
        with self._lock:
            self._refusals.add(why, time.monotonic())


def wait_for_hosts(config: WorkerConfig) -> Sequence[JoinedHost]:
    """Wait for all other hosts to join. Raises OSError, ConfigError, and RankLost at the deadline."""
    if config.rank_hosts == 1:
        return ()
    key = key_of(config.curve_key)
    listener = listen(config.host, config.rank_port, BACKLOG)
    where = f"{in_url(config.host)}:{config.rank_port}"
    num_others, num_each = config.rank_hosts - 1, config.ranks_per_host
    log.info(
        "rank 0 waits up to %d s for %d other hosts with %d ranks each at %s: start `diptych rank-host` on them",
        JOIN_S,
        num_others,
        num_each,
        where,
    )
    hosts = RankHosts(listener, key, num_others=num_others, ranks_per_host=num_each, engine=config.engine)
    return hosts.wait(JOIN_S)


def links_of(hosts: Sequence[JoinedHost]) -> Mapping[tuple[int, Purpose], Channel]:
    """Return the connections of all ranks of other hosts."""
    return {which: channel for host in hosts for which, channel in host.links.items()}
