from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys

import psutil
import pytest

from common import __version__
from router.cli.main import COMMANDS, main


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


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_a_module(command: str) -> None:
    assert importlib.util.find_spec(COMMANDS[command].module)


@pytest.mark.slow_except("prefill-worker", "top", "keygen", "fetch", "size")
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
    assert f"pip install 'diptych[{extra}]', or in a checkout with -e '.[{extra}]'" in done.stderr


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
