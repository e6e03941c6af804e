from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys

import psutil
import pytest

from common import __version__
from common.errors import ConfigError
from common.packages import install_command
from router.cli.main import COMMANDS, main
from router.cli.serve.processes import build_parser


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"diptych {__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["served"]) == 2
    assert "unknown command served; did you mean serve?; the commands are serve, router" in capsys.readouterr().err
    assert main(["--port", "3"]) == 2
    assert "unknown option --port; options follow the command" in capsys.readouterr().err


def test_a_reader_that_stops_is_no_error() -> None:
    """As in `diptych ls | head -1`."""
    command = [sys.executable, "-P", "-m", "common.cli", "ls", "--json"]
    buffered = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(60) == 141


CLOSED = """
import os
import sys
import common.cli as cli
def command():
    print("unread", flush=True)
    null = os.stat(os.devnull).st_rdev
    kept = [os.fstat(number).st_rdev == null and os.get_inheritable(number) for number in (0, 1)]
    return 7 if sys.stdin.read() == "" and all(kept) else 1
cli.COMMANDS = "__main__:command"
sys.exit(cli.main())
"""


def test_closed_standard_streams_are_empty() -> None:
    command = ["sh", "-c", '"$@" <&- >&-', "sh", sys.executable, "-P", "-c", CLOSED]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_a_module(command: str) -> None:
    assert importlib.util.find_spec(COMMANDS[command].module)


@pytest.mark.slow_except("prefill-worker")
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_needs_no_torch(command: str) -> None:
    program = (
        "import sys, router.cli.main as cli\n"
        "try:\n"
        f"    cli.main([{command!r}, '--help'])\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


OPTIONAL = (
    *("argcomplete", "fastapi", "httpx", "huggingface_hub", "jsonschema", "matplotlib", "multipart", "nixl", "numpy"),
    *("opentelemetry", "pydantic", "python_multipart", "rich", "safetensors", "torch", "transformers", "triton"),
)
"""Packages of the extras, and NumPy."""


@pytest.mark.parametrize("arguments", [["--help"], pytest.param(["-h"], marks=pytest.mark.slow), ["--help-all"]])
def test_help_needs_no_optional_package(arguments: list[str]) -> None:
    """In one process, because each would import for a second."""
    commands = [name for name in COMMANDS if arguments != ["--help-all"] or name in CONFIGURED]
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"
        "import router.cli.main as cli\n"
        f"for command in {commands!r}:\n"
        "    try:\n"
        f"        status = cli.main([command, *{arguments!r}])\n"
        "    except SystemExit as end:\n"
        "        status = end.code or 0\n"
        "    assert status == 0, command\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert all(f"usage: diptych {command} " in done.stdout for command in commands)
    assert not done.stderr


CONFIGURED = ("serve", "router", "prefill-worker", "decode-worker", "rank-host", "bench")


@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_short_help_of_serve_fits_a_page(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
        main(["help", "serve"])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 60
    assert shown.index("MODEL ") < shown.index("--port") < shown.index("--slo-ttft-ms") < shown.index("Examples:")
    assert "\x1b" not in shown


def test_a_model_is_named_once() -> None:
    parser = build_parser()
    assert parser.flags(["org/name", "--port", "1"])["model"] == "org/name"
    assert parser.flags(["--port", "1", "a", "--model", "a"])["model"] == "a"
    for argv, said in (
        (["a", "--model", "b"], "MODEL a and --model b differ: give one of them"),
        (["a", "b"], "unexpected argument 'b'"),
        (["a", "--prt", "3"], "unknown option --prt; did you mean --port?"),
    ):
        with pytest.raises(ConfigError) as refused:
            parser.flags(argv)
        assert str(refused.value) == said


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["size", "--rate", "many"], "invalid --rate many: must be a number above 0"),
        (["size", "--rate"], "option --rate needs a value"),
        (["batch", "in"], "missing OUT; diptych batch --help lists the options"),
        (
            ["batch", "in", "out", "--concurrency", "0"],
            "invalid --concurrency 0: must be a whole number from 1 to 10000",
        ),
        (["top", "--onze"], "unknown option --onze; did you mean --once?"),
        (["top", "--once=1"], "option --once takes no value"),
        (["top", "ftp://x"], "invalid URL ftp://x: must be http://HOST:PORT or https://HOST:PORT"),
        (["simulate", "s.toml", "--seed", "x"], "invalid --seed x: must be a whole number"),
        (["serve", "--model"], "option --model needs a value"),
    ],
)
def test_errors_are_one_sentence(
    argv: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (COMMANDS[argv[0]].module, f"{COMMANDS[argv[0]].module}.__main__"):
        monkeypatch.delitem(sys.modules, module, raising=False)  # as in a new process
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(argv))
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"diptych {argv[0]}: {said}\n"


@pytest.mark.parametrize(
    ("command", "hidden", "extra"),
    [("plan", "rich", "bench"), ("simulate", "rich", "bench"), ("top", "rich", "router")],
)
def test_a_command_without_its_packages_says_what_brings_them(command: str, hidden: str, extra: str) -> None:
    program = (
        f"import sys; sys.modules[{hidden!r}] = None; import router.cli.main as cli; sys.exit(cli.main([{command!r}]))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"diptych {command}: the package {hidden} is not installed")
    assert done.stderr.endswith(f"install it with {install_command(extra)}\n")


FIRST_PROCESS = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
WAITING = """
import sys
import common.cli as cli
cli.end_at_sigterm()
print("imports", flush=True)
sys.stdin.readline()
"""


def test_sigterm_ends_the_first_process_of_a_container_while_it_imports() -> None:
    if subprocess.run([*FIRST_PROCESS, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces of one's own here")
    command = [*FIRST_PROCESS, sys.executable, "-P", "-c", WAITING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as outside:
        assert outside.stdout is not None
        try:
            assert outside.stdout.readline() == "imports\n"
            (first,) = psutil.Process(outside.pid).children()
            first.send_signal(signal.SIGTERM)
            assert outside.wait(timeout=30) == 128 + signal.SIGTERM
        finally:
            outside.kill()
