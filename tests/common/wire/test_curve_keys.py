"""Key files and `diptych keygen`: what is written can be read, what is wrong is refused by name and never shown."""

from __future__ import annotations

import itertools
import logging
import os
import stat
from pathlib import Path

import pytest

from common.config import DecodeWorkerConfig, RouterConfig
from common.config.sources import read
from common.errors import ConfigError
from common.wire.curve import Curve, KeyPair, read_authorized, read_key_pair, warn_if_readable, write_key_pair
from common.wire.keygen import main

PAIR = KeyPair.generate()
OTHER = KeyPair.generate()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "curve.toml"
    write_key_pair(str(path), PAIR)
    return path


def refusal(path: Path | str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_key_pair(str(path))
    assert PAIR.secret.decode() not in str(caught.value)
    return caught.value


def test_what_is_written_can_be_read_by_its_owner_alone(file: Path) -> None:
    assert read_key_pair(str(file)) == PAIR
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert PAIR.secret.decode() not in repr(PAIR)


def test_keygen_writes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "key")
    assert main([path]) == 0
    public = capsys.readouterr().out.strip()
    assert read_key_pair(path).public.decode() == public
    assert main([path]) == 2
    assert "--force" in capsys.readouterr().err
    assert main([path, "--public"]) == 0
    assert capsys.readouterr().out.strip() == public
    assert main([path, "--force"]) == 0
    assert capsys.readouterr().out.strip() != public
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600 and os.listdir(tmp_path) == ["key"]
    assert main([str(tmp_path / "no" / "folder")]) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "its public key is missing"),
        ("public = 5", "its public key is missing"),
        (f'public = "{PAIR.public.decode()}"', "its secret key is missing"),
        (f'public = "{PAIR.public.decode()[:39]}"\nsecret = "{PAIR.secret.decode()}"', "39 characters"),
        (f'public = "{PAIR.public.decode()}"\nsecret = "{PAIR.secret.decode()}x"', "41 characters"),
        (f'public = "{PAIR.public.decode()}"\nsecret = "{"#" * 40}"', "secret key has 40 characters"),
        (f'public = "{PAIR.public.decode()}"\nsecret = "{"~" * 40}"', "secret key"),
        (f'public = "{PAIR.public.decode()}"\nsecret = "{"ä" * 40}"', "secret key"),
        (f'public = "{OTHER.public.decode()}"\nsecret = "{PAIR.secret.decode()}"', "do not match"),
        (PAIR.secret.decode(), "not TOML"),
    ],
    ids=itertools.count(),
)
def test_a_bad_pair_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    error = refusal(path)
    assert error.field == "curve_key" and error.value == str(path) and says in error.allowed


def test_a_pair_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent").allowed
    assert "directory" in refusal(tmp_path).allowed


def test_a_list_has_keys_comments_and_names(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text(f"# ours\n\n  {PAIR.public.decode()}  the routers, 2026 \n#\n{OTHER.public.decode()}\n")
    assert read_authorized(str(path)) == {PAIR.public: "the routers, 2026", OTHER.public: ""}


@pytest.mark.parametrize("line", ["x", "#nonsense", "x" * 39, "ä" * 40, "#" * 40, "~" * 40])
def test_a_bad_line_is_refused_by_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "list"
    path.write_text(f"# ours\n{line}\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        read_authorized(str(path))
    assert caught.value.field == "curve_authorized"


def test_others_who_may_read_are_told_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_if_readable(str(file))
    assert not caplog.messages
    file.chmod(0o640)
    with caplog.at_level(logging.WARNING):
        warn_if_readable(str(file))
    assert str(file) in caplog.text and PAIR.secret.decode() not in caplog.text


def test_a_libzmq_without_curve_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmq.has", lambda what: False)
    with pytest.raises(ConfigError, match="without CURVE"):
        Curve.load(str(file))


def test_a_worker_goes_beyond_loopback_with_a_key_or_when_told_so(file: Path) -> None:
    with pytest.raises(ConfigError, match="--curve-key or --allow-remote"):
        DecodeWorkerConfig(host="0.0.0.0")
    assert DecodeWorkerConfig(host="0.0.0.0", allow_remote=True)
    assert DecodeWorkerConfig(host="0.0.0.0", curve_key=str(file))


@pytest.mark.parametrize("cls", [DecodeWorkerConfig, RouterConfig])
def test_a_process_with_a_bad_key_does_not_start(cls: type, tmp_path: Path, file: Path) -> None:
    argv = ["--decode", "tcp://127.0.0.1:1"] if cls is RouterConfig else []
    assert read(cls, [*argv, "--curve-key", str(file)], environ={}).curve_key == str(file)
    for bad in (["--curve-key", str(tmp_path / "absent")], ["--curve-authorized", str(file)]):
        with pytest.raises(ConfigError, match="invalid --curve-(key|authorized)"):
            read(cls, [*argv, *bad], environ={})
    with pytest.raises(ConfigError, match="--curve-authorized"):
        read(cls, [*argv, "--curve-key", str(file), "--curve-authorized", str(file)], environ={})
