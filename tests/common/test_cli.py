from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from diptych.common import __version__
from diptych.common.cli import COMMANDS, main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"diptych {__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["served"]) == 2
    assert "it is one of serve, router" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_a_module(command: str) -> None:
    assert importlib.util.find_spec(COMMANDS[command][0])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_needs_no_torch(command: str) -> None:
    program = (
        "import sys, diptych.common.cli as cli\n"
        "try:\n"
        f"    cli.main([{command!r}, '--help'])\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
