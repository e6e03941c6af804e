from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.observe.logging import setup_logging
from common.packages import PACKAGES


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    ours = {name: logging.getLogger(name).level for name in (*PACKAGES, "__main__")}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in ours.items():
        logging.getLogger(name).setLevel(before)
    logging.captureWarnings(False)


def logged(level: str = "info", json_lines: bool = False) -> io.StringIO:
    stream = io.StringIO()
    root = logging.getLogger()
    root.handlers[:] = []
    setup_logging("decode-0", level, json_lines, stream)
    return stream


def test_a_line_reads_time_level_process_message_fields() -> None:
    out = logged()
    logging.getLogger("router.x").info(
        "request %s", "done", extra={"request_id": "r 1", "ttft_ms": 41.3333, "total_ms": 13_957.4, "n": 2}
    )
    line = out.getvalue()
    assert line[2] == ":"
    assert line[13:] == 'INFO    decode-0  request done  request_id="r 1" ttft_ms=41.33 total_ms=13957 n=2\n'


def test_what_others_sent_stays_within_its_line() -> None:
    out = logged()
    logging.getLogger("router.x").info("router %s", "a\n14:03:22 INFO forged\x1b[2J\u2028", extra={"id": "b\x07"})
    assert out.getvalue()[13:] == ("INFO    decode-0  router a\\x0a14:03:22 INFO forged\\x1b[2J\\x2028  id=b\\x07\n")


def test_json_lines_hold_the_fields() -> None:
    out = logged(json_lines=True)
    logging.getLogger("router.x").warning("late", extra={"wait_s": 0.5})
    entry = json.loads(out.getvalue())
    assert entry["time"].endswith("+00:00")
    assert (entry["level"], entry["process"], entry["message"], entry["wait_s"]) == ("warning", "decode-0", "late", 0.5)


@pytest.mark.parametrize("json_lines", [False, True])
def test_a_traceback_is_kept(json_lines: bool) -> None:
    out = logged(json_lines=json_lines)
    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("router.x").exception("failed")
    assert "ValueError: odd" in out.getvalue()
    assert out.getvalue().count("\n") == 1 or not json_lines


def test_libraries_are_quiet_until_something_is_wrong() -> None:
    out = logged()
    logging.getLogger("library").info("chatter")
    logging.getLogger("router.x").debug("detail")
    logging.getLogger("library").warning("trouble")
    assert out.getvalue().count("\n") == 1
    assert "trouble" in out.getvalue()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_of_ours_speaks_from_the_chosen_level_on(package: str) -> None:
    out = logged()
    logging.getLogger(f"{package}.x").info("news")
    logging.getLogger(package).debug("detail")
    assert out.getvalue()[13:] == "INFO    decode-0  news\n"


def test_every_logger_has_a_level_of_ours(repository: Path) -> None:
    """One of another name speaks from WARNING on, as those of libraries do: take `__name__`."""
    named = re.compile(r"""getLogger\("([a-z_.]+)"\)""")
    names = {
        name
        for package in PACKAGES
        for file in (repository / package).rglob("*.py")
        for name in named.findall(file.read_text(encoding="utf-8"))
    }
    assert {name for name in names if name.partition(".")[0] not in PACKAGES} == {"asyncio", "vllm"}


def test_the_level_error_silences_warnings() -> None:
    out = logged("error")
    logging.getLogger("library").warning("trouble")
    logging.getLogger("router").warning("trouble")
    assert out.getvalue() == ""
