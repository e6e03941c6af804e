"""Logging as text lines or JSON objects. Structured fields go in `extra`:

log = logging.getLogger(__name__)
log.info("request finished", extra={"request_id": rid, "ttft_ms": 41.3})

14:03:22.118 INFO    decode-0  request finished  request_id=cmpl-7f ttft_ms=41.3

`logging` does not allow its own attribute names in `extra`: name, args, module, process, thread, message, ...
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections import deque
from datetime import UTC, datetime
from typing import TextIO

from common.packages import PACKAGES

REMIND_S = 60.0
"""Interval at which a lasting failure is logged again, in seconds."""

MAX_WARNINGS, MAX_WARNING_CHARS = 50, 500
"""Number and length of the kept warnings."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "vllm_process_name"}

# Messages may contain client input, which must not forge log lines or control a terminal.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}

_QUOTED = re.compile(r'[\s"=]')
"""Values that contain one of these are quoted."""


def fields_in(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields passed in `extra`, in order."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _text_of(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    text = str(value)
    if isinstance(value, int):
        return text
    return json.dumps(text, ensure_ascii=False) if not text or _QUOTED.search(text) else text


class LineFormatter(logging.Formatter):
    """`time LEVEL process  message  key=value ...`, followed by a traceback if there is one."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self.process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created)
        time = f"{at.hour:02}:{at.minute:02}:{at.second:02}.{at.microsecond // 1000:03}"
        line = f"{time} {record.levelname:<7} {self.process_name}  {record.getMessage()}"
        fields = " ".join(f"{name}={_text_of(value)}" for name, value in fields_in(record).items())
        if fields:
            line += f"  {fields}"
        if not line.isprintable():
            line = line.translate(_CONTROL)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC, ISO 8601), level, process, logger, message, the fields, exception."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self.process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self.process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in fields_in(record).items() if name not in entry}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class RecentWarnings(logging.Handler):
    """Keeps the last `MAX_WARNINGS` warnings and errors of this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[tuple[float, str]] = deque(maxlen=MAX_WARNINGS)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = f"{record.levelname} {record.getMessage()}"
        except Exception:  # as in logging: a wrong log call must not break its caller
            self.handleError(record)
            return
        fields = "".join(f" {name}={_text_of(value)}" for name, value in fields_in(record).items())
        self._kept.append((record.created, (text + fields).translate(_CONTROL)[:MAX_WARNING_CHARS]))

    def newest(self, now: float) -> list[dict[str, object]]:
        """Return the warnings with their ages in seconds, the newest first. `now` is wall-clock time."""
        return [{"age_s": max(0.0, now - at), "text": text} for at, text in reversed(self._kept)]


recent_warnings = RecentWarnings()


def setup_logging(process_name: str, level: str = "info", json: bool = False, stream: TextIO | None = None) -> None:
    """Configure logging of this process to `stream` (stderr). Other libraries log warnings only, except at "debug"."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter(process_name) if json else LineFormatter(process_name))
    logging.basicConfig(
        level=logging.WARNING if level != "debug" else logging.DEBUG, handlers=[handler, recent_warnings], force=True
    )
    if level == "error":
        logging.getLogger().setLevel(logging.ERROR)
    for ours in (*PACKAGES, "__main__"):
        logging.getLogger(ours).setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.captureWarnings(True)
