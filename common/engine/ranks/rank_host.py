"""`diptych rank-host`: the ranks of a worker that are on another host than rank 0.

join rank 0 ─> a process for each rank, with three connections to rank 0 ─> until rank 0 or a rank is gone ─> join ...

The ranks talk to rank 0 without this process: it starts them, and sees to it that none of them is left. At SIGTERM it
asks rank 0 to drain, and ends once rank 0 has.
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
from common.engine.ranks.admission import LINKS, Handshake, NotAdmitted, Purpose, RankAnswer, Versions, Wish, key_of
from common.engine.ranks.channel import RANK_END_S, Channel
from common.engine.ranks.connection import dial
from common.errors import ConfigError, RankLost
from common.machine import ChildProcess
from common.observe import setup_logging
from common.wire import warn_of_readers

log = logging.getLogger("common.engine.ranks.rank_host")
RETRY_S = 1.0
POLL_S = 0.2
SEND_S = 10.0
LEAVING = b"leaving"
"""What rank 0 gets on a host's own connection when the host wants to end."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The ranks of this host, as processes, and the connection that tells of rank 0's end."""

    control: Channel
    ranks: Sequence[ChildProcess]

    def end(self) -> str:
        """Why they cannot go on, "" while they can. Waits a moment for a reason."""
        if self.control.is_cut(POLL_S):
            return "rank 0 is gone"
        gone = [rank for rank in self.ranks if not rank.alive]
        return f"{gone[0].name} ended with status {gone[0].returncode}" if gone else ""

    def close(self) -> None:
        """Rank 0 sees this host's end, and each rank sees rank 0's; one that stays is killed."""
        self.control.close()
        deadline = time.monotonic() + RANK_END_S
        for rank in self.ranks:
            rank.wait(deadline)


class RankHost:
    """`run`, which `stop` ends. One thread runs it."""

    def __init__(self, config: RankHostConfig) -> None:
        """Raises ConfigError for a bad key file."""
        self._config, self._key = config, key_of(config.curve_key)
        self._stopping = threading.Event()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """End once rank 0 has drained; at once where no rank runs."""
        self._stopping.set()

    def run(self) -> None:
        """Serve one rank 0 after the other until `stop`. Raises NotAdmitted, or RankLost at the deadline."""
        while (joined := self._join()) is not None:
            log.info("%d ranks of %s run here", len(joined.ranks), self._config.leader)
            try:
                why = self._watch(joined)
            finally:
                joined.close()
            if self.is_stopping:
                break
            log.warning("%s: the ranks of this host have ended, and it waits for the next rank 0", why)

    def _watch(self, joined: Joined) -> str:
        """Waits for the end of rank 0 or of a rank; why it came."""
        has_asked = False
        while not (why := joined.end()):
            if self.is_stopping and not has_asked:
                has_asked = True
                with contextlib.suppress(RankLost):  # then `end` says so
                    joined.control.send(LEAVING, SEND_S)
        return why

    def _join(self) -> Joined | None:
        """Tries until the deadline. None once `stop` was called."""
        until, logged = time.monotonic() + self._config.leader_timeout_s, ""
        while not self.is_stopping:
            try:
                return self._try_to_join()
            except (OSError, RankLost) as error:
                if time.monotonic() > until:
                    where, limit_s = self._config.leader, self._config.leader_timeout_s
                    raise RankLost(f"no worker at {where} took this host within {limit_s:g} s: {error}") from error
                if str(error) != logged:
                    logged = str(error)
                    log.info("waits for a worker at %s: %s", self._config.leader, logged)
            self._stopping.wait(RETRY_S)
        return None

    def _try_to_join(self) -> Joined:
        with contextlib.ExitStack() as stack:
            control, answer = self._ask("host")
            stack.callback(control.close)
            ranks: list[ChildProcess] = []
            for rank in answer.ranks:
                ranks.append(self._start(rank, answer.session))
                stack.callback(ranks[-1].kill)
            stack.pop_all()
        return Joined(control, ranks)

    def _start(self, rank: int, session: bytes) -> ChildProcess:
        """The process of a rank, which alone keeps its connections."""
        with contextlib.ExitStack() as stack:
            given = []
            for purpose in LINKS:
                channel, _ = self._ask(purpose, session, rank)
                stack.callback(channel.close)
                given.append(channel.descriptor)
            child = ChildProcess(f"rank {rank}")
            child.launch([sys.executable, "-P", "-m", "common.engine.ranks", *map(str, given)], pass_fds=given)
        return child

    def _ask(self, purpose: Purpose, session: bytes = b"", rank: int = 0) -> tuple[Channel, RankAnswer]:
        """A connection to rank 0 that both sides have proven to be of one worker."""
        channel = dial(self._config.leader)
        with _closed_on_error(channel):
            handshake = Handshake(channel, self._key, leads=False)
            versions = Versions.of_this_host()
            handshake.send(Wish(purpose=purpose, versions=versions, session=session, rank=rank))
            answer = handshake.receive(RankAnswer)
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
    """The exit status: 0 after SIGTERM, 1 where no worker came in time, 2 for what is refused."""
    config = load(RankHostConfig, argv)
    setup_logging("rank-host", config.log_level, json=config.log_json)
    warn_of_readers(config.curve_key)
    try:
        host = RankHost(config)

        def on_signal(number: int, frame: FrameType | None) -> None:
            if host.is_stopping:
                os._exit(1)  # the second one: rank 0 sees that this host is gone and ends, and the ranks end with it
            host.stop()

        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, on_signal)
        host.run()
    except (ConfigError, NotAdmitted) as error:
        log.error("cannot start: %s", error)
        return 2
    except RankLost as error:
        log.error("ends: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
