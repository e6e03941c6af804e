"""Requests to the other processes of a router."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from router.siblings import RouterPart, Siblings


async def test_a_process_that_has_ended_is_left_out_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = RouterPart(0, 2, tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(part.socket_of(1)))  # its file stays
    siblings = Siblings(part, lambda: lambda: b"")
    assert await siblings.ask_all("/metrics") == {}
    assert await siblings.ask("GET", "/v1/responses/a", "", {}) is None
    await siblings.close()
    assert [record.sibling for record in caplog.records] == [1, 1]  # type: ignore[attr-defined]
