"""Rank hosts as real processes: each a process group of its own, as another host would be."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

from common.machine.child_process import ChildProcess

LISTENING = range(20_000, 30_000)


def free_port() -> int:
    """One below those that Linux gives to outgoing connections."""
    start = LISTENING.start + os.getpid() * 7 % (len(LISTENING) - 500)
    for port in range(start, start + 500):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


class RankHostProcess(ChildProcess):
    """`diptych rank-host` for a worker's rank 0 at a port of this machine."""

    log: Path

    def __init__(self, folder: Path, port: int, *flags: str, name: str = "rank-host") -> None:
        super().__init__(name, folder / f"{name}.log", group=True)
        self.leader = f"127.0.0.1:{port}"
        self.flags = flags

    def start(self) -> None:
        command = [sys.executable, "-P", "-m", "common.engine.vllm.rank_host", "--leader", self.leader, *self.flags]
        self.launch(command)

    def children(self) -> list[int]:
        """The process that runs its ranks."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                is_rank = (
                    folder.name.isdigit() and b"common.engine.vllm.follower\0" in (folder / "cmdline").read_bytes()
                )
                if is_rank and int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == self.pid:
                    found.append(int(folder.name))
            except OSError:  # it ended meanwhile
                continue
        return sorted(found)

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Until its log has this."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log.read_text():
            assert time.monotonic() < deadline and self.alive, self.describe_end()
            time.sleep(0.05)

    def end(self) -> None:
        """With all that it started."""
        self.send_signal(signal.SIGKILL)
        self.wait(time.monotonic() + 10.0)
