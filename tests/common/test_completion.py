"""Tab completion, as a shell asks for it: the line in the environment, the answer on descriptor 8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from router.cli.completion import SHELLS, main
from router.cli.main import COMMANDS, parser_of


def completions(line: str, folder: Path) -> list[str]:
    answer = folder / "answer"
    environment = os.environ | {
        "DIPTYCH_CACHE": str(folder),
        "HF_HOME": str(folder),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    command = [sys.executable, "-P", "-m", "common.cli"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [one.strip() for one in answer.read_text().split("\n")]


def test_commands_options_and_values_are_completed(tmp_path: Path) -> None:
    assert completions("diptych se", tmp_path) == ["serve"]
    found = completions("diptych serve --slo-t", tmp_path)
    assert sorted(found) == ["--slo-tpot-ms", "--slo-ttft-ms"]
    assert sorted(completions("diptych decode-worker --kv-transport ", tmp_path)) == sorted(
        ("auto", "tcp", "shm", "nixl", "cuda-ipc")
    )
    assert completions("diptych top --onc", tmp_path) == ["--once"]
    assert completions("diptych help comp", tmp_path) == ["completion"]


def test_models_on_this_machine_are_completed(tmp_path: Path) -> None:
    (folder := tmp_path / "models" / "smollm2-135m").mkdir(parents=True)
    (folder / "model.gguf").write_bytes(b"")
    assert completions("diptych show smol", tmp_path) == ["smollm2-135m"]


def test_an_unfinished_quote_is_no_error(tmp_path: Path) -> None:
    completions('diptych serve "', tmp_path)


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_its_code(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([shell]) == 0
    assert "diptych" in capsys.readouterr().out


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tcsh"])
    assert capsys.readouterr().err == "diptych completion: invalid SHELL tcsh: must be one of bash, zsh, fish\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_parser(command: str) -> None:
    assert parser_of(command).prog == f"diptych {command}"
