"""`diptych top` before a real router: as text, as JSON, and in a terminal of its own."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import pty
import signal
import struct
import sys
import termios
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from common.errors import Unavailable
from router.cli.client_flags import DEFAULT_URL, top_parser
from router.cli.router_client import LoadSource, WrongUrl
from router.cli.top import drawn, main

OPEN, CLOSE, HOME = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H"
KEY = "a-key-of-sixteen-or-more"
NOBODY = "http://127.0.0.1:1"


async def top(*arguments: str, **environ: str) -> tuple[int, str, str]:
    """(exit status, output, errors) of the command."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "common.cli", "top", *arguments, env=os.environ | environ,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, errors = await process.communicate()
    return process.returncode or 0, out.decode(), errors.decode()


async def test_a_picture_as_text(running: Any) -> None:
    assert (await running.completion(max_tokens=5)).status_code == 200
    status, out, errors = await top("--once", running.url)
    assert (status, errors) == (0, "")
    assert "Model       tiny-random" in out and "decode-0             decode  ready" in out
    assert "\x1b" not in out
    assert next(line for line in out.splitlines() if line.startswith("First token")).split()[-1] == "1"


async def test_the_answer_as_json(running: Any) -> None:
    status, out, _ = await top("--json", running.url.removeprefix("http://"))
    assert status == 0 and json.loads(out)["workers"][0]["worker_id"] == "decode-0"


@pytest.mark.slow
async def test_the_key_comes_as_option_or_variable(start: Any) -> None:
    running = await start(api_key=KEY)
    status, out, errors = await top("--once", running.url)
    assert (status, out) == (1, "") and "requires an API key: set --api-key or DIPTYCH_API_KEY" in errors
    assert (await top("--once", running.url, "--api-key", KEY))[0] == 0
    assert (await top("--once", running.url, DIPTYCH_API_KEY=KEY))[0] == 0


async def test_a_key_without_rights_is_told_so(start: Any, tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nname = "plain"\nkey = "{KEY}"\n')
    running = await start(api_key_file=str(keys))
    answer = await asyncio.to_thread(LoadSource.of(running.url, KEY).ask)
    assert answer.load is None and "use one with admin = true" in answer.problem


def away(engine: Any) -> Any:
    """In place of an engine's load."""
    raise Unavailable("it is away")


async def test_a_router_that_fails_is_quoted(running: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(type(running.engine), "load", away)
    answer = await asyncio.to_thread(LoadSource.of(running.url).ask)
    assert answer.problem == "the router answers HTTP 503: it is away"


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x:99999", "http://[::1"])
def test_no_address_is_refused(url: str, capsys: Any) -> None:
    with pytest.raises(WrongUrl):
        LoadSource.of(url)
    assert main([url]) == 2
    assert capsys.readouterr().err.startswith("diptych top: ")


def test_what_an_address_may_leave_out() -> None:
    assert LoadSource.of("router:8000").url == "http://router:8000"
    assert LoadSource.of("https://[fd00::7]/behind/").url == "https://[fd00::7]:443/behind"
    with pytest.raises(WrongUrl):
        LoadSource.of("x", key="two\nlines")


def test_no_router_is_a_line(capsys: Any) -> None:
    assert main(["--once", NOBODY]) == 1
    errors = capsys.readouterr().err
    assert errors == f"diptych top: {NOBODY}: the router does not answer: Connection refused\n"


@pytest.mark.parametrize(
    "body",
    [
        b"SSH-2.0\r\n",
        b"\x1b[2J\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n[1]",
        b"HTTP/1.1 200 OK\r\n\r\n<p>hi",
        b'HTTP/1.1 500 X\r\n\r\n{"error": {"message": "\\u001b[2J"}}',
        b"",
    ],
)
async def test_another_server_is_a_line(body: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(body)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        found = await asyncio.to_thread(LoadSource.of(f"127.0.0.1:{server.sockets[0].getsockname()[1]}").ask)
    assert found.load is None and found.problem and found.problem.isprintable()


def test_a_load_of_another_shape_is_a_line() -> None:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as printed:
        console.print(drawn({"traffic": {}, "workers": 3}))
    assert printed.get() == "The server is not a Diptych router of this version.\n"


class Terminal:
    """The command in a terminal of 80 columns."""

    def __init__(self, process: asyncio.subprocess.Process, fd: int) -> None:
        self.process, self._fd, self.shown = process, fd, ""

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    async def until(self, words: str) -> None:
        while words not in self.shown:
            assert await self.read(), self.shown

    async def end(self) -> int:
        """The exit status; all that was shown until then is in `shown`."""
        while await self.read():
            pass
        return await self.process.wait()

    @property
    def reads_lines(self) -> bool:
        return bool(termios.tcgetattr(self._fd)[3] & termios.ICANON)

    async def read(self) -> bytes:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._fd, ready.set)
        try:
            async with asyncio.timeout(60):
                await ready.wait()
        finally:
            loop.remove_reader(self._fd)
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the command has ended
            data = b""
        self.shown += data.decode()
        return data


@pytest.fixture
async def terminal() -> Any:
    opened: list[tuple[asyncio.subprocess.Process, int]] = []

    async def run(*arguments: str) -> Terminal:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "common.cli", "top", *arguments, stdin=theirs, stdout=theirs, stderr=theirs,
            env=os.environ | {"TERM": "xterm"}, start_new_session=True,
            preexec_fn=controls(theirs),
        )  # fmt: skip
        os.close(theirs)
        opened.append((process, ours))
        return Terminal(process, ours)

    yield run
    for process, ours in opened:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)


def controls(fd: int) -> Callable[[], None]:
    """Makes the terminal that of the process, whose parent ignores ctrl-c, as scripts in the background do."""

    def take() -> None:
        fcntl.ioctl(fd, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    return take


def given_back(shown: str) -> bool:
    """Whether the terminal ends with its own buffer and cursor."""
    return all(shown.rfind(on) > shown.rfind(off) for on, off in ((CLOSE, OPEN), ("\x1b[?25h", "\x1b[?25l")))


@pytest.mark.parametrize("key", [b"q", b"\x03", b"\x04"])
async def test_a_key_ends_it_and_gives_the_terminal_back(running: Any, terminal: Any, key: bytes) -> None:
    shown = await terminal(running.url)
    await shown.until("decode-0")
    assert shown.shown.startswith(OPEN) and not shown.reads_lines
    shown.press(b"x")  # means nothing
    shown.press(key)
    assert await shown.end() == 0
    assert given_back(shown.shown) and "Traceback" not in shown.shown


async def test_a_signal_gives_the_terminal_back(running: Any, terminal: Any) -> None:
    shown = await terminal(running.url)
    await shown.until("decode-0")
    shown.process.terminate()
    assert await shown.end() == 0
    assert given_back(shown.shown) and "Traceback" not in shown.shown


@pytest.mark.slow
async def test_a_router_that_fails_is_a_line_and_is_asked_again(
    running: Any, terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = await terminal("--interval-s", "0.2", running.url)
    await shown.until("decode-0")
    with monkeypatch.context() as patched:
        patched.setattr(type(running.engine), "load", away)
        await shown.until("This data is from")
        assert "The router answers HTTP 503: it is away." in shown.shown
    while "This data is from" in (last := shown.shown.rpartition(HOME)[2]) or "decode-0" not in last:
        assert await shown.read()
    shown.press(b"q")
    assert await shown.end() == 0


async def test_no_router_at_the_start_is_a_line(terminal: Any) -> None:
    shown = await terminal(NOBODY)
    await shown.until("The router does not answer: Connection refused.")
    shown.press(b"q")
    assert await shown.end() == 0
    assert "Traceback" not in shown.shown


@pytest.mark.parametrize(
    "argv", [["--url", "http://r:1"], ["http://r:1"], ["--once", "http://r:1"], ["--url=http://r:1"]]
)
def test_the_router_is_named_by_an_option_or_alone(argv: list[str]) -> None:
    assert top_parser().parse_args(argv).url == "http://r:1"
    assert top_parser().parse_args([]).url == DEFAULT_URL


def test_two_routers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--url", "http://r:1", "http://r:2"])
    assert capsys.readouterr().err == "diptych top: URL: not allowed with argument --url\n"
