"""NIXL for tests: its packages in a folder of their own, without what they ask for (CUDA's libraries, torch)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.model_files.cache_folder import locked

VERSION = "1.5.1"
FOLDER = Path(__file__).resolve().parents[2] / "build" / f"nixl-{VERSION}"
INSTALL_S = 600.0


def nixl_env(tls: str = "") -> dict[str, str]:
    """The environment in which workers have NIXL. `tls`: the transports that UCX may use, "": whichever it picks.

    Skips the test where the packages cannot be had.
    """
    done = FOLDER / ".done"
    with locked(FOLDER.parent / "nixl.lock"):
        if not done.exists():
            pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
            wheels = (f"nixl=={VERSION}", f"nixl-cu12=={VERSION}")
            ended = subprocess.run(
                (*pip, "--target", str(FOLDER), *wheels), capture_output=True, text=True, timeout=INSTALL_S, check=False
            )
            if ended.returncode != 0:
                pytest.skip(f"NIXL cannot be installed: {ended.stderr.strip()[-500:]}")
            done.touch()
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {"PYTHONPATH": os.pathsep.join(paths), **({"UCX_TLS": tls} if tls else {})}
