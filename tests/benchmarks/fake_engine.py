"""OpenVINO's front with a pipeline that invents its tokens: a whole peer process in a few lines."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.compare.openvino_server import Front, serve
from benchmarks.compare.peer import Launch, Process

LONGEST = 20


class Handle:
    """One request: a token a step, but never more than LONGEST."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.made, self.num_read = min(wanted, LONGEST), 0, 0

    def can_read(self) -> bool:
        return self.num_read < self.made

    def read(self) -> dict[int, Any]:
        self.num_read += 1
        return {0: SimpleNamespace(generated_ids=[7])}

    def stop(self) -> None:
        self.wanted = self.made


class Pipeline:
    """What the front uses of OpenVINO's."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []

    def add_request(self, _number: int, _prompt: list[int], wanted: int) -> Handle:
        self.handles.append(Handle(wanted))
        return self.handles[-1]

    def step(self) -> None:
        for handle in self.handles:
            handle.made = min(handle.wanted, handle.made + 1)

    def has_non_finished_requests(self) -> bool:
        return any(handle.made < handle.wanted for handle in self.handles)


def fake_process(folder: Path, port: int) -> Launch:
    """This file as an engine; the id of a child that it starts will lie in `folder`/child.pid."""
    argv = (sys.executable, "-P", __file__, str(port), str(folder / "child.pid"))
    return Launch(f"http://127.0.0.1:{port}", (Process("fake", argv, f"http://127.0.0.1:{port}/health"),))


def main() -> None:
    """Arguments: the port, and a file for the id of a child process that does nothing."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(sys.argv[2]).write_text(str(child.pid))
    asyncio.run(serve(Front(Pipeline(), list, int), int(sys.argv[1])))


if __name__ == "__main__":
    main()
