"""`diptych serve` whose worker decode-1 can be made to hang. Arguments: FOLDER, flags of serve.

Once FOLDER/hang exists, its next step never ends; while FOLDER/slow exists, it neither answers nor gets on once it has
told its addresses. The same file is the worker's program, with the word `worker` before the folder.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

VICTIM = "decode-1"


def serve(folder: str, flags: list[str]) -> int:
    from router.local.child import Child
    from router.local.serve import main

    usual = Child.command

    def command(self: Child) -> list[str]:
        words = usual(self)  # python -P -m MODULE flags
        return words if self.name != VICTIM else [*words[:2], __file__, "worker", folder, *words[4:]]

    Child.command = command  # type: ignore[method-assign]
    return main(flags)


def work(folder: Path, flags: list[str]) -> int:
    from common.runner.runner import ModelRunner
    from common.worker.process import WorkerProcess
    from decode_worker.__main__ import main

    run, start = ModelRunner.run, WorkerProcess._start_engine

    def run_or_hang(self: ModelRunner, *arguments: Any) -> Any:
        if (folder / "hang").exists():
            threading.Event().wait()
        return run(self, *arguments)

    async def start_slowly(self: WorkerProcess, *arguments: Any) -> None:
        while (folder / "slow").exists():
            time.sleep(0.05)  # noqa: ASYNC251 (like an import or a compiler: the event loop stands still)
        await start(self, *arguments)

    ModelRunner.run = run_or_hang  # type: ignore[method-assign]
    WorkerProcess._start_engine = start_slowly  # type: ignore[method-assign]
    return main(flags)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        raise SystemExit(work(Path(sys.argv[2]), sys.argv[3:]))
    raise SystemExit(serve(sys.argv[1], sys.argv[2:]))
