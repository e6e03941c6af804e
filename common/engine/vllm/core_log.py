"""Logging of vLLM's processes: lines in our format, and the error that ended one of them.

vLLM configures logging when it is imported, in every process, from a file named by an environment variable. The handler
of this file also ends orphaned processes: a worker that exits while vLLM loads a model cannot stop it otherwise.
"""

from __future__ import annotations

import copy
import json
import logging
import multiprocessing
import os
import re
import threading
import time
from pathlib import Path

from common.errors import MAX_SHOWN_CHARS

WORKER_PID = "DIPTYCH_VLLM_WORKER_PID"
"""Environment variable with the process id of the worker, whose own processes need no watch."""
VLLM_LEVEL = "VLLM_LOGGING_LEVEL"
"""Environment variable with the level of vLLM's log."""
WATCH_S = 1.0
"""Interval, in seconds, of checks that the parent process runs."""
EXCEPTION = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Killed)): (.+)$", re.MULTILINE)
"""Last line of a traceback."""
SECONDARY = (
    *("Engine core initialization failed", "WorkerProc initialization failed", "EngineCore encountered an issue"),
    *("cancelled", "See root cause"),
)
"""Parts of errors that only repeat that another process failed."""
MAX_REASON_CHARS = 6 * MAX_SHOWN_CHARS
EXPECTED = (
    *("Initializing KVConnectorBase_V1", "Enforce eager set", "Inductor compilation was disabled"),
    *("Model Runner V2 requires Triton", "Triton is not installed", "Reset SSM cache type"),
)
"""Beginnings of warnings at every good start, at least on CPUs, about which an operator can do nothing."""
LAST_WORDS = ("failed to start.", "encountered a fatal error.")
"""Ends of messages that a process of vLLM logs before an error ends it."""
STDERR = 2


class ExpectedWarnings(logging.Filter):
    """Drops `EXPECTED` warnings."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(EXPECTED)


class LineFormatter(logging.Formatter):
    """Formats log lines like Diptych's own. Omits tracebacks until the file `loaded` exists, if that is given."""

    def __init__(self, loaded: str = "") -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)-7s vllm %(processName)s: %(message)s", "%H:%M:%S")
        self._loaded = loaded

    def format(self, record: logging.LogRecord) -> str:
        if not record.exc_info or not self._loaded or Path(self._loaded).exists():
            return super().format(record)
        short = copy.copy(record)
        short.exc_info = short.exc_text = None
        return f"{super().format(short)} (traceback with --log-level debug)"


class CoreLogHandler(logging.FileHandler):
    """Appends errors of vLLM's processes to one file, and ends the process when its parent has ended.

    Until the file `loaded` exists, if that is given, a process that an error ends does not print its traceback.
    """

    def __init__(self, filename: str, *, loaded: str = "") -> None:
        super().__init__(filename, delay=True)
        self.setLevel(logging.ERROR)
        self._loaded = loaded
        if os.environ.get(WORKER_PID) != str(os.getpid()):
            threading.Thread(target=_watch_parent, args=(os.getppid(),), name="watch-parent", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if not self._loaded or multiprocessing.parent_process() is None:
            return
        if record.exc_info and str(record.msg).endswith(LAST_WORDS) and not Path(self._loaded).exists():
            silence_stderr()


def silence_stderr() -> None:
    """Drop what this process prints from now on: multiprocessing prints the traceback of the error that ends it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, STDERR)
    os.close(null)


def started_by() -> int:
    """Return the id of the process that started this one, which may have ended already."""
    parent = multiprocessing.parent_process()
    return (parent.pid if parent is not None else None) or os.getppid()


def _watch_parent(parent: int) -> None:
    """Exit when the parent has ended. `parent` is wrong if that was before this call, while modules were imported."""
    while os.getppid() == parent == started_by():
        time.sleep(WATCH_S)
    from common.engine.vllm.link import exit_orphaned  # imported late: vLLM configures logging at its first import

    exit_orphaned("its parent process has ended")


def write_logging_config(path: Path, errors: Path, loaded: Path, level: str) -> None:
    """Write vLLM's logging configuration to `path`. Its processes append errors to the file `errors`.

    `level` is that of our own log. Below warnings, vLLM logs dozens of lines at each start, so they are shown only at
    our level debug, or at the level in vLLM's own variable. The same applies to tracebacks before `loaded` exists: the
    worker logs why the start failed in one sentence.
    """
    own_level = os.environ.get(VLLM_LEVEL) or ("INFO" if level == "debug" else "WARNING")
    names, shows_all = ["stderr", "errors"], own_level.upper() in ("INFO", "DEBUG")
    own = {"handlers": names, "level": own_level.upper(), "propagate": False}
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "line": {"()": f"{__name__}.{LineFormatter.__name__}", "loaded": "" if shows_all else str(loaded)}
        },
        "filters": {"expected": {"()": f"{__name__}.{ExpectedWarnings.__name__}"}},
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": "line",
                "filters": [] if shows_all else ["expected"],
            },
            "errors": {
                "class": f"{__name__}.{CoreLogHandler.__name__}",
                "filename": str(errors),
                "loaded": "" if shows_all else str(loaded),
            },
        },
        "loggers": {"vllm": own},
    }
    path.write_text(json.dumps(config))


def first_error(errors: Path) -> str:
    """Return the message of the first error that is not a consequence of another, or "". For a start that failed."""
    return next(iter(_causes(errors)), "")


def last_error(errors: Path, offset: int) -> str:
    """Return the message of the last such error after `offset` bytes, or "". For an engine that has run."""
    return next(reversed(_causes(errors, offset)), "")


def _causes(errors: Path, offset: int = 0) -> list[str]:
    try:
        text = errors.read_bytes()[offset:].decode(errors="replace")
    except OSError:
        return []
    found = [f"{name}: {message}" if name != "ValueError" else message for name, message in EXCEPTION.findall(text)]
    causes = [one for one in found if not any(part in one for part in SECONDARY)]
    return [" ".join(one.split())[:MAX_REASON_CHARS] for one in causes]
