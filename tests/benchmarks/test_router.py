"""The front door's benchmark: a quick run whose tokens all arrive, and what counts them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.router import __main__ as script
from benchmarks.router.figures import QUICK
from benchmarks.router.load import StreamClient
from benchmarks.router.steps import Pace, Steps
from benchmarks.router.tally import ENDED, EVENTS, STARTED, TOKENS, Row, Tally


class Closing:
    """A transport that is only closed."""

    def abort(self) -> None:
        pass

    def write(self, data: bytes) -> None:
        pass


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_client_counts_events_and_tokens_however_they_are_cut(size: int) -> None:
    tally = Tally(2)
    client = StreamClient(b"", Row(tally, 1), record=True)
    client.connection_made(cast(asyncio.Transport, Closing()))
    chunks = [b'data: {"id":"a-1","text":""}\n\n', *[b'data: {"id":"a-1","text":"~"}\n\n'] * 4, b"data: [DONE]\n\n"]
    data = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    for piece in (*pieces, b"0\r\n\r\n"):
        client.data_received(piece)
    assert [tally.total(field) for field in (TOKENS, EVENTS, STARTED, ENDED)] == [4, 6, 1, 1]
    assert sum(client.counts) == 4 and (client.id == "a-1" or size < 10)


def test_steps_follow_the_clock_or_the_readers() -> None:
    tally = Tally(1)
    steps = Steps(2, tally)
    assert steps.due(0.0, 3) is None
    steps.set(Pace.CLOCK, 1.0, 10.0)
    assert [steps.due(now, 3) for now in (9.9, 10.0, 10.1, 10.5, 10.9, 11.0)] == [None, 0, None, 1, None, 0]
    assert steps.due(12.0, 0) is None and steps.part == slice(0, None, 1)
    steps.set(Pace.CLOCK, 1.0, 15.0, 16)
    engines = [(steps.due(now, 60), steps.part.start) for now in (15.0, 15.3, 15.4, 15.6, 15.8)]
    assert engines == [(1, 0), (0, 1), (None, 1), (1, 1), (0, 0)], "two parts of each engine's thirty streams"
    steps.set(Pace.READ, 0.0, 20.0)
    steps.num_emitted = 2
    assert steps.due(20.0, 3) is None
    Row(tally, 0).add(TOKENS)
    assert steps.due(20.0, 3) == 1


@pytest.mark.e2e
def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run itself fails unless every token that was made arrived and every answer ended."""
    out = tmp_path / "router.json"
    flags = ["--quick", "--model", "tiny-random", "--log-dir", str(tmp_path), "--output", str(out)]
    assert script.main(flags) == 0
    shown, result = capsys.readouterr().out, json.loads(out.read_text())
    router, plain = result["medians"]["router"], result["medians"]["plain uvicorn"]
    assert router.keys() > plain.keys() and plain["events_per_token"] == pytest.approx(1.0, abs=0.01)
    assert all(figures["added_p99_ms"] >= figures["added_p50_ms"] > 0 for figures in (router, plain))
    assert all(figures["fine_p50_ms"] > 0 for figures in (router, plain))
    assert all(figures["tokens_per_s"] > 0 and figures["requests_per_s"] > 0 for figures in (router, plain))
    assert router["long_tokens"] >= QUICK.long_tokens and router["idle_streams"] == QUICK.idle
    assert router["large_per_s"] > 0 and 0 < router["events_per_token"] < 1.01
    assert result["conditions"]["size"]["streams"] == QUICK.streams
    assert "short requests/s" in shown


def test_latency_alone_needs_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--only", "latency"]) == 2
    assert "--rate" in capsys.readouterr().out


def test_fewer_open_files_mean_fewer_streams(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def limited(*_: Any) -> tuple[int, int]:
        return (3000, 3000)

    monkeypatch.setattr(script.resource, "getrlimit", limited)
    monkeypatch.setattr(script.resource, "setrlimit", lambda *_: None)
    size = script.size_of(script.parse([]), script.open_console())
    assert (size.idle, size.streams) == (2000, 1000)
    assert "allows 2,000 streams" in capsys.readouterr().out
