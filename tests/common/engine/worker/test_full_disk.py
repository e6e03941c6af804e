"""A worker on a machine whose disk is full, as a real process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FULL = """
import errno, os, sys
from common.engine.worker import process
write, failures = process._write_whole, [1, 2]
def full(path, text):
    if failures:
        failures.pop()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    write(path, text)
process._write_whole, process.ADDRESS_RETRY_S = full, 0.1
from decode_worker.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_it_writes_its_addresses_once_there_is_room(tmp_path: Path) -> None:
    file = tmp_path / "addresses.json"
    command = [sys.executable, "-c", FULL, "--model", "tiny-random", "--address-file", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as worker:
        until = time.monotonic() + 120
        while not file.exists() and worker.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        worker.terminate()
        _, log = worker.communicate(timeout=60)
    (told,) = [line for line in log.splitlines() if "--address-file" in line]
    assert f"cannot write {file}: no space is left on the disk" in told and "retrying every 0.1 s" in told
    assert json.loads(file.read_text())["address"].startswith("tcp://127.0.0.1:")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a file that is always full")
def test_it_ends_at_once_when_its_log_cannot_be_written() -> None:
    program = (
        "import sys\nfrom common.engine.worker.process import end_process\n"
        "sys.stdout = open('/dev/full', 'w')\nsys.stdout.write('x')\nend_process(3)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, check=False, timeout=120)
    assert (ended.returncode, ended.stderr) == (3, b"")
