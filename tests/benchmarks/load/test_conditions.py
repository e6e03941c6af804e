"""The conditions that are written beside a result."""

from __future__ import annotations

import pytest

from benchmarks.load.conditions import conditions


def test_a_secret_is_not_in_the_command() -> None:
    for argv in (["--api-key", "hidden", "--rate", "1"], ["--api-key=hidden"]):
        command = conditions("diptych bench", argv)["command"]
        assert "hidden" not in command
        assert "***" in command


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("/home/me/traces", "traces"),
        ("--output=/home/me/result.json", "--output=result.json"),
        ("name=/home/me/env/,/srv/other", "name=env,other"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("512/64@1.6", "512/64@1.6"),
        ("results/one.json", "results/one.json"),
    ],
)
def test_folders_of_a_machine_are_not_in_the_command(argument: str, shown: str) -> None:
    assert conditions("diptych bench", [argument])["command"] == f"diptych bench {shown}"
