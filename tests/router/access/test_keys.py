from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from common.config import RouterConfig
from common.errors import ConfigError
from router.access.keys import ANONYMOUS, ApiKey, KeyRing, KeySource, Limits, digest_of, read_keys, ring_of
from router.access.new_key import main
from router.siblings.part import RouterPart

SECRET = "a-key-of-sixteen-or-more"
FILE = f"""
[[key]]
name = "alice"
sha256 = "{digest_of(SECRET.encode()).hex()}"
requests_per_minute = 60
tokens_per_minute = 1000

[[key]]
name = "bob"
key = ["bobs-new-secret-key", "bobs-old-secret-key"]
cache_group = "team"
admin = true
concurrent_requests = 2
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    return file


def test_a_file_of_keys(path: Path) -> None:
    alice, bob = read_keys(str(path))
    assert (alice.name, alice.limits, alice.cache_group, alice.admin) == ("alice", Limits(60, 1000, 0), "", False)
    assert (bob.name, bob.limits, bob.cache_group, bob.admin) == ("bob", Limits(0, 0, 2), "team", True)
    assert alice.digests == (digest_of(SECRET.encode()),)


def test_a_secret_finds_its_key(path: Path) -> None:
    ring = ring_of(str(path), "the-one-of-the-flag")
    assert ring is not None
    found = {given: ring.find(given.encode()) for given in (SECRET, "bobs-old-secret-key", "the-one-of-the-flag")}
    assert [key.name for key in found.values() if key] == ["alice", "bob", "default"]
    for wrong in ("", SECRET[:-1], SECRET + " ", SECRET.upper(), "\xff"):
        assert ring.find(wrong.encode("latin-1")) is None


def test_without_file_and_flag_no_key_is_needed() -> None:
    assert ring_of("", "") is None


def test_the_last_of_two_equal_secrets_counts() -> None:
    digest = digest_of(b"same")
    ring = KeyRing([ApiKey("first", (digest,)), ApiKey("last", (digest,))])
    found = ring.find(b"same")
    assert found is not None and found.name == "last"


@pytest.mark.parametrize("given", [b"3", b"none of them"])
def test_a_look_takes_as_many_steps_whatever_the_number_of_keys(given: bytes) -> None:
    """A scan of ten thousand keys of eight secrets would take 6 ms of the event loop."""
    steps = []
    for num_keys in (10, 1000):
        ring = KeyRing([ApiKey(f"k{i}", (digest_of(b"%d" % i),)) for i in range(num_keys)])
        events: list[str] = []
        sys.setprofile(lambda frame, event, _, events=events: events.append(event))
        ring.find(given)
        sys.setprofile(None)
        steps.append(len(events))
    assert steps[0] == steps[1]


BAD = {
    "syntax": ('[[key]]\nname = "a"\nsha256 = oops\n', "line 3"),
    "no table": ("", "at least one"),
    "other table": ('[keys.a]\nkey = "x"\n', "'keys'"),
    "no name": ('\n[[key]]\nkey = "0123456789abcdef"\n', "line 2 must have a name"),
    "bad name": ('[[key]]\nname = "a b"\nkey = "0123456789abcdef"\n', "line 2"),
    "no secret": ('[[key]]\nname = "a"\n', "line 1 must have 1 to 8 values of sha256"),
    "short secret": ('[[key]]\nname = "a"\nkey = "hush"\n', "line 3"),
    "spaces": ('[[key]]\nname = "a"\nkey = "hush hush hush hush"\n', "line 3"),
    "no digest": ('[[key]]\nname = "a"\nsha256 = "hush"\n', "line 3"),
    "no text": ('[[key]]\nname = "a"\nkey = 5\n', "line 3"),
    "unknown field": ('[[key]]\nname = "a"\nkey = "0123456789abcdef"\nlimit = 5\n', "line 4 must have only name"),
    "negative": ('[[key]]\nname = "a"\nkey = "0123456789abcdef"\ntokens_per_minute = -1\n', "line 4"),
    "a bool for a number": ('[[key]]\nname = "a"\nkey = "0123456789abcdef"\nrequests_per_minute = true\n', "line 4"),
    "admin": ('[[key]]\nname = "a"\nkey = "0123456789abcdef"\nadmin = 1\n', "line 4"),
    "same name": ('[[key]]\nname = "a"\nkey = "0123456789abcdef"\n' * 2, "line 5"),
    "same key": ("".join(f'[[key]]\nname = "{name}"\nkey = "hush-hush-hush-hush"\n' for name in "ab"), "'b'"),
    "not UTF-8": ("[[key]]\nname = 'hush\udcff'\n", "not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_its_line_and_without_its_secrets(path: Path, name: str) -> None:
    text, where = BAD[name]
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as refused:
        read_keys(str(path))
    assert str(path) in str(refused.value) and where in str(refused.value)
    assert "hush" not in str(refused.value) and "0123456789abcdef" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(str(tmp_path / "nowhere"))


def test_the_name_of_the_flag_is_taken(path: Path) -> None:
    path.write_text('[[key]]\nname = "default"\nkey = "0123456789abcdef"\n')
    assert len(read_keys(str(path))) == 1
    with pytest.raises(ConfigError, match="--api-key"):
        ring_of(str(path), "another")


def test_no_two_tenants_share_a_salt() -> None:
    digest = (b"x" * 32,)
    keys = [ApiKey("a", digest), ApiKey("b", digest), ApiKey("c", digest, cache_group="a")]
    salts = {key.salt(own) for key in keys for own in ("", "a", "b", keys[0].salt(""))}
    assert len(salts) == 12
    assert keys[0].salt("mine") == ApiKey("a", (b"y" * 32,)).salt("mine")  # a rotated key keeps its cache
    assert ApiKey("d", digest, cache_group="a").salt("") == keys[2].salt("")
    assert ANONYMOUS.salt("mine") == "mine"


def test_the_command_draws_a_key_and_its_entry(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["carol"]) == 0
    printed = capsys.readouterr()
    key = printed.err.strip().rpartition(" ")[2]
    assert len(key) > 40 and key not in printed.out
    path.write_text(FILE + printed.out)
    ring = ring_of(str(path), "")
    assert ring is not None
    carol = ring.find(key.encode())
    assert carol is not None and carol.name == "carol"
    assert main(["carol"]) == 0 and capsys.readouterr().out != printed.out
    assert tomllib.loads(printed.out)["key"][0]["name"] == "carol"


@pytest.mark.parametrize("name", ["", 'a"b', "a b", "x" * 65])
def test_the_command_refuses_a_bad_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert "invalid name" in capsys.readouterr().err


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
