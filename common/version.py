"""Version of this build: the release, and the commit unless the commit is tagged as that release."""

from __future__ import annotations

import subprocess
from pathlib import Path

RELEASE = "0.1.0"
ROOT = Path(__file__).resolve().parents[1]
BUILT = Path("common", "version.txt")
"""File with the version of a built wheel or image. Source checkouts do not have it."""
GIT_TIMEOUT_S = 5.0


def version_of(root: Path = ROOT) -> str:
    """Return the version of the tree at `root`, such as "0.1.0" or "0.1.0+g1a2b3c4d5e6f".

    A build states it in a file, and an unpacked sdist in PKG-INFO. A source checkout asks git. Without any of them, the
    commit is unknown and the version is that of the release.
    """
    if (built := root / BUILT).is_file():
        return built.read_text(encoding="utf-8").strip()
    if (package := root / "PKG-INFO").is_file():
        lines = package.read_text(encoding="utf-8").splitlines()
        return next((line.partition(": ")[2] for line in lines if line.startswith("Version: ")), RELEASE)
    if not (root / ".git").exists():
        return RELEASE
    # With --git-dir, git accepts a checkout of another user and ignores the variable GIT_DIR.
    command = ["git", f"--git-dir={root / '.git'}", "describe", "--always", "--tags", "--abbrev=12"]
    command += ["--match", f"v{RELEASE}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return RELEASE
    described = done.stdout.strip()
    if done.returncode != 0 or described == f"v{RELEASE}":
        return RELEASE
    return f"{RELEASE}+g{described.rpartition('-g')[2]}"
