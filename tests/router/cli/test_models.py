"""`diptych ls`, `show`, `rm`, `ps` and `run`."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.model_files import resolve_model
from router.cli import ps, run
from router.cli.main import main as diptych
from router.cli.models import ls, rm, show
from router.cli.router_client import LoadSource


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path / "cache"


def test_a_model_is_listed_described_and_deleted(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ls.main([]) == 0 and "diptych pull smollm2-135m" in capsys.readouterr().err
    resolve_model("tiny-random")
    assert ls.main([]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "tiny-random",
        "0.8",
        "MB",
        "safetensors",
        "Diptych",
        "-",
    ]
    assert show.main(["tiny:random"]) == 0
    shown = capsys.readouterr().out
    assert "capabilities  completion, chat\n" in shown and "0.8 MB weights + 0.5 kB per token = 2.9 MB" in shown
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    assert rm.main(["tiny-random"]) == 1 and "was not deleted" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert rm.main(["tiny-random"]) == 1
    said = capsys.readouterr()
    assert said.out.endswith("[y/N] \n") and said.err == "diptych rm: cannot ask without a terminal: confirm with -y\n"
    assert rm.main(["tiny-random", "absent"]) == 1  # nothing is deleted if a name is wrong
    assert "diptych rm: the model 'absent' is not on this machine" in capsys.readouterr().err
    assert rm.main(["tiny-random", "-y"]) == 0 and "deleted tiny-random: 0.8 MB" in capsys.readouterr().out
    assert show.main(["org/absent"]) == 1
    assert "org/absent is not in the Hugging Face cache" in capsys.readouterr().err


def test_only_files_of_the_model_are_deleted_from_a_folder(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine/m-Q4_0.gguf", "mine/tokenizer.json", "mine/thesis.txt"):
        (path := tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100_000))
    arguments = ["mine", "--models-dir", str(tmp_path / "own")]
    folder = tmp_path / "own" / "mine"
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert rm.main(arguments) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"Delete {folder} (0.2 MB, 2 files in {folder})? ")
    assert said.endswith(f"deleted {folder}: 0.2 MB; other files in the folder are kept\n")
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_fetch_is_the_former_name_of_pull(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        diptych(["fetch", "--help"])
    assert end.value.code == 0 and "usage: diptych pull [options] [MODEL]" in capsys.readouterr().out


async def test_running_models_with_their_workers(
    running: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["--url", running.url, "--json"]
    assert await asyncio.to_thread(ps.main, command) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["ready"], row["in_flight"], row["idle_s"]) == ("tiny-random", True, 2, None)
    assert row["replicas"] == {"decode": 1} and row["memory_bytes"] is None
    await running.completion(max_tokens=2)
    load = running.engine.load()
    idle = replace(load, stages={"decode": 0}, workers=(replace(load.workers[0], memory_bytes=3_000_000),))
    monkeypatch.setattr(running.engine, "load", lambda: idle)
    assert await asyncio.to_thread(ps.main, command) == 0
    assert 0 <= json.loads(capsys.readouterr().out)[0]["idle_s"] < 60
    assert await asyncio.to_thread(ps.main, command[:2]) == 0
    assert re.search(r"tiny-random  ready  1 decode  3\.0 MB +0 +\d+ s ago", capsys.readouterr().out)


def test_models_on_demand_are_listed_while_they_are_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    def model(name: str, state: str, expires_in_s: float | None) -> dict[str, Any]:
        facts = {"id": name, "root": name, "ready": state == "loaded", "num_in_flight": 0, "idle_s": 60.0}
        return facts | {"state": state, "expires_in_s": expires_in_s}

    models = [model("a", "loaded", 240.0), model("b", "idle", None), model("c", "loaded", None)]
    worker = {"role": "decode", "num_blocks": 1, "memory_bytes": 10**9}
    found = ps.rows({"models": models, "workers": [worker | {"model": one["root"]} for one in models]})
    assert [row["name"] for row in found] == ["a", "c"]
    assert [ps._cells(row)[1:] for row in found] == [
        ("loaded", "1 decode", "1.0 GB", "0", "60 s ago", "in 4 min"),
        ("loaded", "1 decode", "1.0 GB", "0", "60 s ago", "never"),
    ]
    assert ps._cells(found[0] | {"name": "a\x1b[2J"})[0] == "a?[2J"


def test_run_downloads_a_model_for_a_service_that_loads_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    listed, fetched = [{"id": "a", "state": "idle"}], list[str]()

    def fetch(model: str) -> str:
        fetched.append(model)
        listed.append({"id": model, "state": "idle"})
        return model

    monkeypatch.setattr(run, "_local_name", fetch)
    monkeypatch.setattr(run.Service, "models", lambda self: listed)
    service = run.Service(LoadSource("127.0.0.1", 1))
    assert run._selected(service, "a", listed)["id"] == "a" and not fetched
    assert run._selected(service, "org/b", listed)["id"] == "org/b" and fetched == ["org/b"]
    with pytest.raises(run.RunError, match="serves a, not c"):
        run._selected(service, "c", [{"id": "a"}])
    with pytest.raises(run.RunError, match="serves a, org/b, not c"):
        run._selected(run.Service(LoadSource("192.0.2.1", 1)), "c", listed)


async def test_run_asks_a_service_that_runs(
    running: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, models = list[Any](), run.Service.models
    monkeypatch.setattr(run.Service, "models", lambda self: asked.append(self) or models(self))
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert await asyncio.to_thread(run.main, ["tiny:random", "--url", running.url, "say", "--verbose", "hi"]) == 0
    out, errors = capsys.readouterr()
    assert out.strip() and "prompt tokens, first token after" in errors
    assert len(asked) == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert await asyncio.to_thread(run.main, ["--url", running.url, "other", "hi"]) == 1
    assert "serves tiny-random, not other: stop it" in capsys.readouterr().err


def test_a_chat_keeps_its_conversation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Echo(run.Service):
        def answer(self, body: Any) -> Any:
            sent.append(body | {"messages": [*body["messages"]]})
            if body["messages"][-1]["content"] == "too slow":
                raise KeyboardInterrupt
            for text in body["messages"][-1]["content"].split():
                yield {"choices": [{"delta": {"content": text}}]}
                if text == "interrupt":
                    raise KeyboardInterrupt

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    sent: list[Any] = []
    lines = [
        '"""two',
        'lines"""',
        "/set temperature 0.5",
        "interrupt me",
        "/clear",
        "/set temperature",
        "too slow",
        "again",
        "/bye",
    ]
    monkeypatch.setattr(sys, "stdin", Terminal("\n".join(lines)))
    chat = run.Chat(Echo(LoadSource("127.0.0.1", 1), "m"), {}, [{"role": "system", "content": "s"}])
    run.converse(chat)
    assert [body["messages"][-1]["content"] for body in sent] == ["two\nlines", "interrupt me", "too slow", "again"]
    assert [body.get("temperature") for body in sent] == [None, 0.5, None, None]
    assert chat.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "again"},
    ]
    assert "twolines" in capsys.readouterr().out


def test_no_service_is_started_for_another_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.Service, "models", lambda self: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    assert run.main(["--url", "http://192.0.2.1:8000"]) == 1
    assert capsys.readouterr().err == "diptych run: no service answers at http://192.0.2.1:8000\n"


@pytest.mark.slow
async def test_run_starts_and_stops_its_own_service() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-P", "-m", "common.cli", "run", "--url", url, "tiny-random", "hi"]
    process = await asyncio.create_subprocess_exec(
        *command, "--", "--prefill", "0", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0 and out.strip()
    assert run.Service(LoadSource.of(url)).models() is None
