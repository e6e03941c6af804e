"""The front door's benchmark: a quick run whose tokens all arrive, and what counts them."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.router import __main__ as script
from benchmarks.router import figures
from benchmarks.router.figures import QUICK, Bench, Lost
from benchmarks.router.floors import at_random, evenly_spaced
from benchmarks.router.load import OPENING, Load, StreamClient
from benchmarks.router.steps import Pace, Steps
from benchmarks.router.tally import ENDED, EVENTS, FAILED, STARTED, TOKENS, Row, Tally
from benchmarks.router.vllm_arm import VllmArm
from benchmarks.stack import StackError
from common.model_files.resolve import resolve_model


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


@pytest.mark.slow
@pytest.mark.e2e
def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run itself fails unless every token that was made arrived and every answer ended."""
    out = tmp_path / "router.json"
    flags = ["--quick", "--model", "tiny-random", "--log-dir", str(tmp_path), "--output", str(out)]
    assert script.main(flags) == 0
    shown, result = capsys.readouterr().out, json.loads(out.read_text())
    router, plain = result["medians"]["router"], result["medians"]["plain uvicorn"]
    assert router.keys() > plain.keys() and plain["events_per_token"] == pytest.approx(1.0, abs=0.01)
    for found, most in itertools.product((router, plain), QUICK.steps):
        assert found[f"step{most}_p99_ms"] >= found[f"step{most}_p50_ms"] > 0
        assert found[f"step{most}_at_tokens_per_s"] == pytest.approx(QUICK.beside_rate, rel=0.1)
        assert found[f"step{most}_floor_p99_ms"] >= found[f"step{most}_floor_p50_ms"] > 0
    assert all(figures["tokens_per_s"] > 0 and figures["requests_per_s"] > 0 for figures in (router, plain))
    assert router["long_tokens"] >= QUICK.long_tokens and router["idle_streams"] == QUICK.idle
    assert router["large_per_s"] > 0 and 0 < router["events_per_token"] < 1.01
    assert result["conditions"]["size"]["streams"] == QUICK.streams
    assert "short requests/s" in shown


async def test_streams_are_opened_a_few_at_a_time() -> None:
    """A stream waits for the first token of one before it; a connection that is lost lets the next one in as well."""
    writers: list[asyncio.StreamWriter] = []
    came = asyncio.Condition()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with came:
            writers.append(writer)
            came.notify_all()

    async def wait_for(num: int) -> None:
        async with came, asyncio.timeout(30):
            await came.wait_for(lambda: len(writers) >= num)

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        tally = Tally(1)
        load = Load(cast(Any, None), tally, 0)
        port = server.sockets[0].getsockname()[1]
        opening = asyncio.create_task(load._open_streams(port, OPENING + 3, b"GET", False))
        await wait_for(OPENING)
        for number in range(3):
            assert len(writers) == OPENING + number and not opening.done()
            if number == 1:
                writers[number].close()
            else:
                writers[number].write(b'data: {"id":"a","text":"~"}\n\n')
            await wait_for(OPENING + number + 1)
        await opening
        assert (tally.total(STARTED), tally.total(FAILED)) == (2, 1)
        for stream in load._streams:
            stream.close()
        for writer in writers:
            writer.close()


def bench_of(tally: Tally) -> Bench:
    return Bench(cast(Any, SimpleNamespace(tally=tally, source=None, clients=[])), QUICK, 4.0)


def test_a_stall_is_told_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time begins anew with each stream, so that slow machines are waited for and stuck ones are not."""
    tally, clock = Tally(1), [0.0]
    row = Row(tally, 0)

    def pass_time(_: float) -> None:
        clock[0] += 50.0
        if clock[0] <= 400.0:
            row.add(STARTED)

    monkeypatch.setattr(figures, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=pass_time))
    bench_of(tally)._wait(STARTED, 0, 6, "streams began")
    with pytest.raises(StackError, match="8 of 10 streams began, no other one within 60 s"):
        bench_of(tally)._wait(STARTED, 0, 10, "streams began")
    row.add(FAILED)
    with pytest.raises(Lost, match="1 answers failed"):
        bench_of(tally)._wait(STARTED, 0, 10, "streams began")


@pytest.mark.parametrize(("burst", "p50", "p99"), [(1, 1, 1), (0.5, 1, 1), (16, 8, 16), (250, 125, 248)])
def test_the_floor_of_a_burst_is_the_work_before_a_token(burst: float, p50: int, p99: int) -> None:
    floor = evenly_spaced(burst, 1e-5)
    assert (floor.p50_s, floor.p99_s) == (pytest.approx(p50 * 1e-5), pytest.approx(p99 * 1e-5))


def test_bursts_at_random_wait_for_each_other() -> None:
    """The mean wait of an M/D/1 queue is half of what an M/M/1 queue has; here its median and tail at two loads."""
    half = at_random(1, 1e-5, 50_000)
    assert 1e-5 <= half.p50_s < 2e-5 and 4e-5 < half.p99_s < 6e-5
    busy = at_random(1, 1e-5, 90_000)
    assert busy.p50_s > half.p50_s and 2e-4 < busy.p99_s < 3e-4
    few = at_random(16, 1e-5, 1_000)
    assert few.p99_s == pytest.approx(evenly_spaced(16, 1e-5).p99_s, rel=0.3)
    assert at_random(4, 1e-5, 100_000).p50_s == math.inf


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


# ---------------------------------------------------------------- vLLM's front end, where there is no vLLM


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in executor over a vLLM of which only the names exist."""
    for name in ("vllm", "vllm.v1", "vllm.v1.executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, attribute, value in (
        ("vllm.v1.executor.abstract", "Executor", object),
        ("vllm.v1.kv_cache_interface", "FullAttentionSpec", SimpleNamespace),
        ("vllm.v1.outputs", "ModelRunnerOutput", SimpleNamespace),
    ):
        module = ModuleType(name)
        setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("STAND_IN_TOKEN", "7")
    monkeypatch.delitem(sys.modules, "benchmarks.router.vllm_executor", raising=False)
    made = importlib.import_module("benchmarks.router.vllm_executor").StandInExecutor()
    made._init_executor()
    yield made
    sys.modules.pop("benchmarks.router.vllm_executor", None)


def scheduled(counts: dict[str, int], *, new: dict[str, int] | None = None, over: Sequence[str] = ()) -> Any:
    begun = [
        SimpleNamespace(req_id=name, prompt_token_ids=[1] * num, num_computed_tokens=0)
        for name, num in (new or {}).items()
    ]
    return SimpleNamespace(scheduled_new_reqs=begun, num_scheduled_tokens=counts, finished_req_ids=set(over))


def test_the_stand_in_executor_samples_when_a_prompt_is_computed(executor: Any) -> None:
    first = executor.execute_model(scheduled({"a": 3, "b": 2}, new={"a": 5, "b": 2}))
    assert (first.req_ids, first.sampled_token_ids) == (["a", "b"], [[], [7]])
    second = executor.execute_model(scheduled({"b": 1, "a": 2}), non_block=True).result()
    assert second.req_id_to_index == {"b": 0, "a": 1} and second.sampled_token_ids == [[7], [7]]
    executor.execute_model(scheduled({}, over=["a", "b"]))
    assert not executor._running


def test_vllm_gets_the_tokenizer_and_template_of_the_model(tmp_path: Path) -> None:
    options = script.parse(["--vllm", str(tmp_path / "python"), "--model", "tiny-random", "--no-plain"])
    _, make = script.arms_of(options, tmp_path, QUICK, 110)
    arm = make()
    assert isinstance(arm, VllmArm) and not arm.paced
    arm._write_model(tmp_path)
    files = resolve_model("tiny-random", weights=False)
    told = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert told["chat_template"] == files.chat_template and told["eos_token"] == files.eos_token
    assert (tmp_path / "tokenizer.json").read_bytes() == files.tokenizer.read_bytes()
    assert (tmp_path / "vllm_executor.py").exists()
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == files.vocab_size
