"""When an environment is made, when it is kept, and what is said where it cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import environment
from .environment import CannotInstall, Client, programs_of

pytestmark = [pytest.mark.slow, pytest.mark.clients]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Client]:
    """The clients whose environments were made, in a folder of the test's own."""
    clients: list[Client] = []

    def make(client: Client, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        clients.append(client)

    monkeypatch.setattr(environment, "FOLDER", tmp_path)
    monkeypatch.setattr(environment, "_make", make)
    monkeypatch.setattr(environment, "_refused", {})
    return clients


def pin(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    monkeypatch.setattr(environment, "clients", lambda: {client.name: client})


def test_one_is_kept_until_its_pins_change(made: list[Client], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for version in ("1", "1", "2"):
        pin(monkeypatch, Client("c", (f"c=={version}",)))
        assert programs_of("c") == tmp_path / "c" / "bin"
    assert [client.version for client in made] == ["1", "2"]


def test_one_that_was_not_finished_is_made_again_by_the_next_run(
    made: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(client: Client, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        made.append(client)
        raise CannotInstall("no index")

    pin(monkeypatch, Client("c", ("c==1",)))
    with monkeypatch.context() as patch:
        patch.setattr(environment, "_make", fail)
        for _ in range(2):
            with pytest.raises(CannotInstall, match="no index"):
                programs_of("c")
    assert len(made) == 1, "it was tried twice"
    environment._refused.clear()
    programs_of("c")
    assert len(made) == 2


def test_a_client_for_a_python_that_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "FOLDER", tmp_path)
    pin(monkeypatch, Client("c", ("c==1",), python=(9, 1)))
    with pytest.raises(CannotInstall, match=r"c needs a Python from 9\.1 on and below"):
        programs_of("c")


def test_a_package_that_does_not_exist_is_told_with_the_words_of_pip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "FOLDER", tmp_path)
    pin(monkeypatch, Client("c", (str(tmp_path / "nothing.whl"),)))
    with pytest.raises(CannotInstall, match=r"nothing\.whl"):
        programs_of("c")


def test_every_row_is_pinned() -> None:
    for client in environment.clients().values():
        assert all("==" in requirement for requirement in client.requires) and client.python < client.before
        assert all("@" in package[1:] for package in client.npm)
