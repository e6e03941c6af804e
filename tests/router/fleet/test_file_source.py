from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.config import RouterConfig
from common.errors import ConfigError
from router.fleet.discovery import Endpoint
from router.fleet.file_source import FileSource

A, B = "tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002"


class Heard:
    """A source, and what it published last."""

    def __init__(self, file: Path) -> None:
        self.endpoints: list[Sequence[Endpoint]] = []
        self.source = FileSource(file, self.endpoints.append, interval_s=0.01)


def test_changes_are_published_once(tmp_path: Path) -> None:
    file = tmp_path / "workers.json"
    heard = Heard(file)
    heard.source.read()
    assert "workers.json" in heard.source.status.explain("decode", 0.0) and not heard.endpoints
    file.write_text(json.dumps({"prefill": [A], "decode": [B, B]}))
    heard.source.read()
    heard.source.read()
    assert heard.endpoints == [(Endpoint("decode", B), Endpoint("prefill", A))]
    file.write_text(json.dumps({"decode": [B], "leaving": [B]}))
    heard.source.read()
    assert heard.endpoints[-1] == (Endpoint("decode", B, terminating=True),)


@pytest.mark.parametrize("text", ["", "[]", '{"decode": 5}', '{"decod": []}', '{"decode": ["tcp:'])
def test_a_bad_file_keeps_the_workers(tmp_path: Path, text: str) -> None:
    file = tmp_path / "workers.json"
    heard = Heard(file)
    file.write_text(json.dumps({"decode": [A]}))
    heard.source.read()
    file.write_text(text)
    heard.source.read()
    assert len(heard.endpoints) == 1 and heard.source.status.num_syncs["failed"] == 1
    file.unlink()
    heard.source.read()
    assert len(heard.endpoints) == 1


async def test_it_reads_until_it_is_cancelled(tmp_path: Path) -> None:
    heard = Heard(tmp_path / "workers.json")
    task = asyncio.create_task(heard.source.run())
    (tmp_path / "new").write_text(json.dumps({"decode": [A]}))
    (tmp_path / "new").replace(tmp_path / "workers.json")
    async with asyncio.timeout(30):
        while not heard.endpoints:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()


def test_what_does_not_fit_a_file_is_refused() -> None:
    RouterConfig(discovery="file", discovery_file="f").check_start()
    for settings in (
        {"discovery": "file"},
        {"discovery_file": "f"},
        {"discovery": "file", "discovery_file": "f", "decode": (A,)},
        {"discovery": "file", "discovery_file": "f", "decode_services": ("d:1",)},
    ):
        with pytest.raises(ConfigError):
            RouterConfig(**settings)  # type: ignore[arg-type]
