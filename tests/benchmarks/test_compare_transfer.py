"""The transfer engines' commands and arithmetic."""

import sys
from pathlib import Path

import pytest

from benchmarks.block_path import Shape
from benchmarks.compare.peer import PeerError
from benchmarks.compare.transfer import TRANSFER_PEERS, TransferPeer, parse, rows, steps

SHAPE = Shape(block_bytes=1024, num_blocks=4, io_threads=1, pinned=False)
SCRIPTS = {
    "good": "import os, sys; print('noise'); print('{\"gb_per_s\": [' + os.environ['RATE'] + ']}')",
    "bad": "raise SystemExit('no such library')",
}


@pytest.fixture
def env(tmp_path: Path) -> Path:
    """An environment whose python runs the script that --engine names."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    lines = [f"#!{sys.executable}", "import sys", f"exec({SCRIPTS!r}[sys.argv[sys.argv.index('--engine') + 1]])"]
    python.write_text("\n".join(lines))
    python.chmod(0o755)
    return tmp_path


def test_an_engine_runs_in_its_environment_and_says_its_rates(env: Path) -> None:
    assert TransferPeer("some", "good", {"RATE": "2.5"}).run(env, SHAPE, 1) == [2.5]


def test_an_engine_that_fails_is_an_error_with_its_words(env: Path) -> None:
    with pytest.raises(PeerError, match="no such library"):
        TransferPeer("some", "bad").run(env, SHAPE, 1)
    with pytest.raises(PeerError, match="No such file"):
        TransferPeer("some", "good").run(env / "absent", SHAPE, 1)


def test_every_engine_moves_what_the_wire_moves(tmp_path: Path) -> None:
    for peer in TRANSFER_PEERS:
        words = peer.command(tmp_path, SHAPE, 3)
        assert words[words.index("--num-blocks") + 1 : words.index("--num-blocks") + 4 : 2] == ["4", "1024"]
    transports = [(peer.engine, peer.env.get("UCX_TLS", "")) for peer in TRANSFER_PEERS]
    assert len(set(transports)) == len(TRANSFER_PEERS)


def test_ratios_are_to_the_engines() -> None:
    table = rows({"KV": [4.0, 6.0, 5.0], "Mooncake, TCP": [2.0, 2.5, 3.0]})
    assert table[0] == {
        "path": "KV",
        "gb_per_s": 5.0,
        "ratios": {"Mooncake, TCP": 2.0},
        "samples": [4.0, 6.0, 5.0],
    }


def test_installing_stays_in_the_environment(tmp_path: Path) -> None:
    create, *installs = steps(tmp_path)
    assert create[-1] == str(tmp_path)
    assert {step[0] for step in installs} == {str(tmp_path / "bin" / "python")}


def test_an_environment_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([])
    assert "--peer-env" in capsys.readouterr().err
