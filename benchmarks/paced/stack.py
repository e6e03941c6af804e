"""A stack of paced workers: real processes whose model waits as long as coefficients say."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.paced.model import Coefficients, write_folder
from benchmarks.stack import Stack, StackProcess, StackSettings

MODEL: Final = "paced"
EXAMPLE: Final = Path(__file__).parent.parent / "data" / "paced.json"
"""Round numbers of about the size that an 8B model on one GPU has."""
MAX_MODEL_LEN: Final = 131_072
PLAIN_FLAGS: Final = ("--threads", "1", "--kv-memory-gib", "0.25")
"""Before those that are given."""
START_S: Final = 20.0
"""For each process: two cores import torch for all of them."""


class PacedStack(Stack):
    """A stack of paced workers. `settings` need not name their model.

    `slower` names workers (such as "decode-0") with a file of coefficients of their own.
    Raises ModelError for a file that does not hold coefficients, StackError as `Stack`.
    """

    def __init__(
        self,
        settings: StackSettings,
        *,
        coefficients: Path = EXAMPLE,
        slower: Mapping[str, Path] | None = None,
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:
        found = Coefficients.read(coefficients)
        self._coefficients, self._slower = coefficients.resolve(), dict(slower or {})
        self._folder = tempfile.TemporaryDirectory(prefix="diptych-paced-")
        model = write_folder(found, Path(self._folder.name) / MODEL, max_model_len)
        super().__init__(
            replace(
                settings,
                model=str(model),
                dtype="float32",
                worker_flags=("--threads", "1", *settings.worker_flags),
                ready_timeout_s=max(settings.ready_timeout_s, START_S * settings.num_processes),
            )
        )

    def _worker(self, role: str, index: int, flags: Sequence[str], cores: Sequence[int]) -> StackProcess:
        name = f"{role}-{index}"
        log = self.log_dir / f"{name}.log"
        file = str(self._slower.get(name, self._coefficients))
        own = ("--worker-id", name, "--address-file", str(log.with_suffix(".json")))
        command = [sys.executable, "-P", "-m", "benchmarks.paced.worker", file, role, *own, *flags]
        return StackProcess(name, role, command, log, cores)

    def stop(self) -> None:
        super().stop()
        self._folder.cleanup()
