"""A build states its version, and a source checkout that of its commit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from common.version import BUILT, RELEASE, version_of


def git(root: Path, *command: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    return subprocess.run(("git", "-C", str(root), *who, *command), check=True, capture_output=True, text=True).stdout


def test_a_checkout_names_its_commit_unless_it_is_the_release(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")
    first = git(tmp_path, "rev-parse", "--short=12", "HEAD").strip()
    assert version_of(tmp_path) == f"{RELEASE}+g{first}"
    git(tmp_path, "tag", "-a", "-m", "release", f"v{RELEASE}")
    assert version_of(tmp_path) == RELEASE
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "two")
    second = git(tmp_path, "rev-parse", "--short=12", "HEAD").strip()
    assert version_of(tmp_path) == f"{RELEASE}+g{second}" != f"{RELEASE}+g{first}"


def test_neither_the_owner_of_a_checkout_nor_another_repository_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, another user often owns the checkout. In a git hook, GIT_DIR names the hook's repository."""
    for name in ("here", "other"):
        git(tmp_path, "init", "-q", name)
        git(tmp_path / name, "commit", "-q", "--allow-empty", "-m", name)
    commit = git(tmp_path / "here", "rev-parse", "--short=12", "HEAD").strip()
    if os.geteuid() == 0:
        os.chown(tmp_path / "here", 12345, 12345)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert version_of(tmp_path / "here") == f"{RELEASE}+g{commit}"


def test_a_build_states_it(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "a repository that holds an installed package")
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: diptych\nVersion: 0.1.0+g0123456789ab\n")
    assert version_of(tmp_path) == "0.1.0+g0123456789ab"
    (tmp_path / BUILT.parent).mkdir()
    (tmp_path / BUILT).write_text("0.1.0+gba9876543210\n")
    assert version_of(tmp_path) == "0.1.0+gba9876543210"


def test_without_a_repository_it_is_the_release(tmp_path: Path) -> None:
    assert version_of(tmp_path) == RELEASE
