"""`diptych rank-host`: runs vLLM's ranks of a worker that are on another host.

    join the worker ─> a process with its own connection, which starts the ranks ─> until either is gone ─> join ...

At SIGTERM it asks the worker to drain, and exits when the worker has.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from common.config import RankHostConfig, load
from common.engine.ranks import RANK_END_S, Channel
from common.engine.vllm.admission import (
    Handshake,
    JoinRequest,
    JoinResponse,
    NotAdmitted,
    Purpose,
    Versions,
    key_of,
)
from common.engine.vllm.connection import dial
from common.errors import ConfigError, RankLost
from common.machine import ChildProcess
from common.observe import setup_logging
from common.wire import warn_if_readable

log = logging.getLogger("common.engine.vllm.rank_host")
RETRY_S = 1.0
POLL_S = 0.2
SEND_S = 10.0
LEAVING = b"leaving"
"""Message to the worker, on the control connection, when the host wants to leave."""


@dataclass(frozen=True, slots=True)
class JoinedRanks:
    """The process that runs the ranks of this host, and the control connection to the worker."""

    control: Channel
    follower: ChildProcess

    def end(self) -> str:
        """Return why the ranks must stop, or "". Waits briefly for a reason."""
        if self.control.is_cut(POLL_S):
            return "the worker is gone"
        return "" if self.follower.alive else f"their process exited with status {self.follower.returncode}"

    def close(self) -> None:
        """Disconnect from the worker and wait for the ranks, which exit with it. Kills those that do not."""
        self.control.close()
        self.follower.wait(time.monotonic() + RANK_END_S)


class RankHost:
    """Rank host. One thread calls `run`, which `stop` ends."""

    def __init__(self, config: RankHostConfig) -> None:
        """Raises ConfigError for an invalid key file."""
        self._config, self._key = config, key_of(config.curve_key)
        self._stopping = threading.Event()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Stop after the worker has drained, or at once if no rank runs."""
        self._stopping.set()

    def run(self) -> None:
        """Serve one worker after another until `stop`. Raises NotAdmitted, or RankLost at the deadline."""
        while (joined := self._join()) is not None:
            log.info("rank host has joined the worker at %s", self._config.leader)
            try:
                why = self._watch(joined)
            finally:
                joined.close()
            if self.is_stopping:
                break
            log.warning(
                "rank host stopped its ranks (%s) and waits for the next worker at %s", why, self._config.leader
            )

    def _watch(self, joined: JoinedRanks) -> str:
        """Wait until the worker or a rank is gone. Return the reason."""
        has_asked = False
        while not (why := joined.end()):
            if self.is_stopping and not has_asked:
                has_asked = True
                with contextlib.suppress(RankLost):  # then `end` returns the reason
                    joined.control.send(LEAVING, SEND_S)
        return why

    def _join(self) -> JoinedRanks | None:
        """Try to join until the deadline. Return None after `stop`."""
        until, logged = time.monotonic() + self._config.leader_timeout_s, ""
        while not self.is_stopping:
            try:
                return self._try_to_join()
            except (OSError, RankLost) as error:
                if time.monotonic() > until:
                    where, limit_s = self._config.leader, self._config.leader_timeout_s
                    raise RankLost(f"no worker at {where} accepted this host within {limit_s:g} s: {error}") from error
                if str(error) != logged:
                    logged = str(error)
                    log.info("rank host waits for a worker at %s: %s", self._config.leader, logged)
            self._stopping.wait(RETRY_S)
        return None

    def _try_to_join(self) -> JoinedRanks:
        with contextlib.ExitStack() as stack:
            control, answer = self._ask("host")
            stack.callback(control.close)
            engine, _ = self._ask("engine", answer.session)
            with contextlib.closing(engine):  # the follower inherits it
                follower = ChildProcess("vLLM", group=True)
                program = ("common.engine.vllm.follower", self._config.curve_key, str(engine.descriptor))
                follower.launch([sys.executable, "-P", "-m", *program], pass_fds=[engine.descriptor])
            stack.pop_all()
        return JoinedRanks(control, follower)

    def _ask(self, purpose: Purpose, session: bytes = b"") -> tuple[Channel, JoinResponse]:
        """Open a connection to the worker, on which both sides have proven to have the same key."""
        channel = dial(self._config.leader)
        with _closed_on_error(channel):
            handshake = Handshake(channel, self._key, leads=False)
            versions = Versions.of_this_host()
            handshake.send(JoinRequest(purpose=purpose, versions=versions, session=session))
            answer = handshake.receive(JoinResponse)
            if answer.problem:
                kind = RankLost if answer.again else NotAdmitted
                raise kind(f"{channel.peer} refuses this host: {answer.problem}")
        return channel, answer


@contextlib.contextmanager
def _closed_on_error(channel: Channel) -> Iterator[None]:
    try:
        yield
    except BaseException:
        channel.close()
        raise


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 0 after SIGTERM, 1 if no worker accepted in time, 2 if the host was refused."""
    config = load(RankHostConfig, argv)
    setup_logging("rank-host", config.log_level, json=config.log_json)
    warn_if_readable(config.curve_key)
    try:
        host = RankHost(config)

        def on_signal(number: int, frame: FrameType | None) -> None:
            if host.is_stopping:
                os._exit(1)  # second signal: the worker notices that this host is gone and exits, and the ranks with it
            host.stop()

        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, on_signal)
        host.run()
    except (ConfigError, NotAdmitted) as error:
        log.error("rank host cannot start: %s", error)
        return 2
    except RankLost as error:
        log.error("rank host exits: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
