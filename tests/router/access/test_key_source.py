"""The keys of two processes of one router: what one of them accepts, the other goes by at its next look."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import RouterConfig
from common.errors import ConfigError
from router.access.keys import KeySource
from router.siblings.part import RouterPart

KEYS = '[[key]]\nname = "{}"\nkey = "a-key-of-enough-characters"\n'
WRONG = KEYS.format("carol") + "colour = 3\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS.format("alice"))
    return path


def source(file: Path, index: int = 0) -> KeySource:
    folder = file.parent / "folder"
    folder.mkdir(exist_ok=True)
    return KeySource(RouterConfig(decode=("tcp://a:1",), api_key_file=str(file)), RouterPart(index, 2, folder))


def names(keys: KeySource) -> list[str]:
    return [] if keys.ring is None else [key.name for key in keys.ring.keys]


def test_one_process_reads_a_settled_file_and_the_other_follows_at_its_next_look(file: Path) -> None:
    first, second = source(file), source(file, 1)
    assert not first.look() and not second.look()
    file.write_text(KEYS.format("bob"))
    assert not first.look(), "it may be half written"
    assert first.look() and names(first) == ["alice"]
    first.read()
    assert names(first) == ["bob"] and names(second) == ["alice"]
    assert second.look(), "though its own look at the file has seen it once only"
    second.read()
    assert names(second) == ["bob"] and not first.look()


def test_the_file_goes_before_what_another_process_accepted(file: Path) -> None:
    """Otherwise the change that came behind that would be missed."""
    first, second = source(file), source(file, 1)
    file.write_text(KEYS.format("bob"))
    assert not first.look() and first.look()
    first.read()
    file.write_text(KEYS.format("carol"))
    second.watch.look()  # type: ignore[union-attr]
    assert second.look()
    second.read()
    assert names(second) == ["carol"]
    assert first.look()
    first.read()
    assert names(first) == ["carol"]


def test_a_process_that_is_started_again_goes_by_what_the_others_accepted(file: Path) -> None:
    first = source(file)
    file.write_text(WRONG)
    assert not first.look() and first.look()
    with pytest.raises(ConfigError, match="line 4 must have only name"):
        first.read()
    again = source(file, 1)
    assert names(again) == names(first) == ["alice"]
    assert again.look(), "the file is another one than what is in force"
    with pytest.raises(ConfigError, match="line 4 must have only name"):
        again.read()
    assert names(again) == ["alice"] and not again.look() and not first.look()


def test_the_copy_is_for_the_processes_alone(file: Path) -> None:
    source(file)
    (copy,) = (file.parent / "folder").iterdir()
    assert copy.stat().st_mode & 0o777 == 0o600 and copy.read_bytes() == file.read_bytes()


def test_a_router_of_one_process_has_no_copy(file: Path) -> None:
    keys = KeySource(RouterConfig(decode=("tcp://a:1",), api_key_file=str(file)))
    assert names(keys) == ["alice"] and not keys.look()
    file.unlink()
    assert not keys.look() and keys.look()
    with pytest.raises(ConfigError, match="a readable file"):
        keys.read()
    assert names(keys) == ["alice"]
    assert KeySource(RouterConfig(decode=("tcp://a:1",))).ring is None
