"""Admission of the other hosts of a worker, each with two connections.

rank host   JoinRequest(host) ──>               JoinRequest(engine, session) ──>
worker                            <── session                                    <── JoinResponse
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from common.config import WorkerConfig
from common.engine.ranks import Channel
from common.engine.vllm.admission import (
    KEYS_DIFFER,
    Handshake,
    JoinRequest,
    JoinResponse,
    NotAdmitted,
    Versions,
    key_of,
)
from common.engine.vllm.connection import configured, normalized_address
from common.errors import RankLost
from common.wire import DropLog, in_url, listen

log = logging.getLogger(__name__)
MOST_HANDSHAKES = 64
"""Maximum number of unauthenticated connections. Further ones are closed at once."""
ACCEPT_POLL_S = 0.1
SESSION_BYTES = 16
JOIN_S = 900.0
"""Maximum time, in seconds, until all hosts have joined."""
BACKLOG = 128


@dataclass(slots=True)
class JoinedHost:
    """Another host. `control` shows when it is gone or wants to leave. `engine` is None until it has connected."""

    name: str
    control: Channel
    session: bytes
    engine: Channel | None = None

    def close(self) -> None:
        for channel in (self.control, self.engine):
            if channel is not None:
                channel.close()


class RankHosts:
    """Admits hosts until all have joined. Hosts without the key get no information."""

    def __init__(self, listener: socket.socket, key: bytes, num_others: int) -> None:
        """Takes ownership of `listener`. `num_others` excludes this host."""
        self._listener, self._key = listener, key
        self._hosts: list[JoinedHost | None] = [None] * num_others
        self._versions = Versions.of_this_host()
        self._lock = threading.Lock()  # for the fields below, which connection threads change
        self._is_over = False
        self._num_handshakes = 0
        self._refusals = DropLog(log, "a connection to the rank port")

    def wait(self, timeout_s: float) -> Sequence[JoinedHost]:
        """Return all hosts. The caller closes them. Raises RankLost at the deadline.

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
            return JoinResponse(problem="the hosts of this worker have already started", again=True)
        theirs, ours = request.versions, self._versions
        if theirs != ours:
            return JoinResponse(
                problem=f"it has {theirs}, the worker has {ours}: install the same versions on every host of the worker"
            )
        if request.purpose == "engine":
            host = self._host_of(request)
            is_expected = host is not None and host.engine is None
            return JoinResponse() if is_expected else JoinResponse(problem="its host has not joined", again=True)
        if None not in self._hosts:
            problem = f"all {len(self._hosts) + 1} hosts of --rank-hosts have already joined"
            return JoinResponse(problem=problem, again=True)
        return JoinResponse(session=secrets.token_bytes(SESSION_BYTES))

    def _keep(self, request: JoinRequest, answer: JoinResponse, channel: Channel, name: str) -> bool:
        if request.purpose == "host":
            number = self._hosts.index(None)
            channel.peer = f"host {number + 1} at {name}"
            self._hosts[number] = JoinedHost(name, channel, answer.session)
            log.info("%s has joined", channel.peer)
            return True
        if (host := self._host_of(request)) is None:
            return False
        channel.peer, host.engine = host.control.peer, channel
        return True

    def _host_of(self, request: JoinRequest) -> JoinedHost | None:
        """Return the host that a connection belongs to."""
        known = (host for host in self._hosts if host is not None)
        return next((host for host in known if host.session == request.session), None)

    def _all_complete(self) -> Sequence[JoinedHost]:
        """Return all hosts once all have opened both connections, else (). Drops hosts that are gone."""
        with self._lock:
            for index, host in enumerate(self._hosts):
                if host is not None and host.control.is_cut():
                    log.warning("%s disconnected before all hosts had joined", host.control.peer)
                    host.close()
                    self._hosts[index] = None
            self._refusals.flush(time.monotonic())
            there = [host for host in self._hosts if host is not None and host.engine is not None]
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
    num_others = config.rank_hosts - 1
    log.info(
        "waiting up to %d s for %d other hosts at %s: start `diptych rank-host` on them", JOIN_S, num_others, where
    )
    return RankHosts(listener, key, num_others).wait(JOIN_S)
