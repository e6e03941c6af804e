"""All measurements and checks on one GPU. Prints a line with PASS or FAIL for each finding.

Parts run in the order of their usefulness: the chip's rates, the check of a worker's start, prefill and decode steps,
kernels compared with their floor and with torch's, products with quantised weights and of experts, attention over
latents, recorded steps; then transfers, the service, and the rest. `--parts first` and `--parts second` are the two
halves, for machines that limit a command to ten minutes.

The parts run in a separate process. A part is stopped at its deadline. When a part hangs in the driver, loses the
device or crashes, another process runs the parts that follow. A module that cannot be imported fails the parts that
need it: torch and Triton suffice for chip, agreement, engine, kernels, quantised, moe, mla, graphs, invariance.

Each finding is written to verdicts.txt and gpu.json in the output folder at once. At the end, gpu.png, logs.tgz (the
workers' logs) and triton-cache.tgz (compiled kernels, which a later run into the same folder uses) follow. The exit
status is 0 if every verdict is PASS, 1 if not, 2 without a CUDA device. --dry-run runs every part on the CPU, with tiny
sizes, in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.node.options import FAILED, LOST, NO_GPU, PASSED, parse, seconds_of
from benchmarks.gpu.node.verdict import ITSELF, Verdict
from benchmarks.time_limit import TimeOver, time_limit

RUNNER = ("-P", "-m", "benchmarks.gpu.node.run")
GRACE_S = 20.0
"""Seconds after a part's deadline until its process is killed."""
LEAST_S = 10.0
"""Minimum remaining time, in seconds, to start a process."""
POLL_S = 0.25
MOST_BYTES = 15 * 2**20
"""Maximum size of an archive, in bytes. Some machines limit the size of files that can be copied from them."""
SMALL_KINDS = (".cubin", ".json", ".hsaco", ".so")
"""Suffixes of the cached files of a kernel that Triton loads."""


class Run:
    """One run: starts the processes that run the parts, and collects their results."""

    def __init__(self, options: Namespace, argv: Sequence[str], scratch: Path) -> None:
        self.options, self._argv, self._scratch = options, list(argv), scratch
        self._logs, self._cache, self._progress = scratch / "logs", scratch / "triton", scratch / "progress.json"
        self._logs.mkdir()
        self._cache.mkdir()
        self.has_gpu = True
        for name in ("gpu.json", "verdicts.txt"):
            (options.out / name).unlink(missing_ok=True)
        if (kept := options.out / "triton-cache.tgz").exists():
            with tarfile.open(kept) as file:
                file.extractall(self._cache, filter="data")

    def run(self) -> None:
        """Run all parts, until the time limit."""
        limit = self.options.time_limit_s
        until = time.monotonic() + limit if limit else float("inf")
        remaining = list(self.options.parts)
        try:
            with time_limit(0.0):
                while remaining and self.has_gpu:
                    left = until - time.monotonic()
                    if left < LEAST_S:
                        break
                    remaining = self._in_one_process(remaining, left)
        except TimeOver as end:
            print(f"STOPPED  {end}", flush=True)
            remaining = [part for part in remaining if part not in self._state()["done"]]
        for part in remaining if self.has_gpu else ():
            self._record(Verdict(part, ITSELF, False, "not run", "", "the time limit was reached"))

    def _in_one_process(self, parts: list[str], left_s: float) -> list[str]:
        """Run `parts` in a process until it ends. Returns the parts that did not run."""
        limit = left_s if left_s != float("inf") else 0.0
        rest = ("--progress", str(self._progress), "--logs", str(self._logs), "--left-s", str(limit))
        environment = os.environ | {"TRITON_CACHE_DIR": str(self._cache), "PYTHONUNBUFFERED": "1"}
        if self.options.dry_run:
            environment["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
        self._progress.write_text(json.dumps({"running": "", "since": time.monotonic(), "done": []}))
        command = [sys.executable, *RUNNER, *rest, *self._argv, "--parts", *parts]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        problem = ""
        try:
            while process.poll() is None and not problem:
                time.sleep(POLL_S)
                problem = self._overdue(parts[0], limit)
        finally:
            self._end(process)
        state = self._state()
        done = [*state["done"]]
        self._pack("logs", self._logs)
        if process.returncode == NO_GPU:
            self.has_gpu = False
            return parts
        if missing := state.get("problem"):  # no part can run
            self._record(Verdict(parts[0], ITSELF, False, missing, "torch and Triton"))
            return []
        if problem or not done or process.returncode not in (PASSED, FAILED):
            part = state["running"] or next((one for one in parts if one not in done), parts[-1])
            words = problem or describe(process.returncode)
            self._record(Verdict(part, ITSELF, False, words, "a normal exit"))
            done.append(part)
        return [part for part in parts if part not in done]

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._progress.read_text())
        return state

    def _overdue(self, first: str, limit: float) -> str:
        """Return why the process must be killed, or ""."""
        state = self._state()
        allowed = seconds_of(state["running"] or first, self.options)
        bounds = [bound for bound in (allowed, limit) if bound]
        took = time.monotonic() - state["since"]
        return f"did not stop within {GRACE_S:g} s of its deadline" if bounds and took > min(bounds) + GRACE_S else ""

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        """Kill the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _record(self, one: Verdict) -> None:
        """Add a verdict for a part whose process could not record it."""
        print(one, flush=True)
        found = self.found()
        found.setdefault("verdicts", []).append(one.as_json())
        (self.options.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
        with (self.options.out / "verdicts.txt").open("a", encoding="utf-8") as file:
            file.write(f"{one}\n")

    def found(self) -> dict[str, Any]:
        """The results up to now."""
        path = self.options.out / "gpu.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def pack(self) -> None:
        """Write the archives of logs and compiled kernels."""
        self._pack("logs", self._logs)
        self._pack("triton-cache", self._cache)

    def _pack(self, name: str, folder: Path) -> None:
        """Archive a folder. If compiled kernels are too large, archive only the files that Triton loads."""
        if not any(path.is_file() for path in folder.rglob("*")):
            return
        target = self.options.out / f"{name}.tgz"
        pack(target, folder)
        if target.stat().st_size > MOST_BYTES:
            pack(target, folder, SMALL_KINDS)


def pack(target: Path, folder: Path, kinds: tuple[str, ...] = ()) -> None:
    """Archive the files in a folder and its subfolders, or only those with the suffixes `kinds`."""
    with tarfile.open(target, "w:gz") as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and (not kinds or path.suffix in kinds):
                file.add(path, path.relative_to(folder))


def describe(status: int) -> str:
    """Describe how a process ended."""
    if status == LOST:
        return "lost the device; another process runs the parts that follow"
    return f"ended its process with {signal.Signals(-status).name if status < 0 else f'status {status}'}"


def main(argv: Sequence[str]) -> int:
    options = parse(argv, __doc__ or "")
    options.out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="diptych-gpu-"))
    try:
        run = Run(options, argv, scratch)
        try:
            run.run()
        finally:
            run.pack()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not run.has_gpu:
        return NO_GPU
    verdicts = run.found().get("verdicts", [])
    picture(run.found(), options.out / "gpu.png")
    failed = sum(not (one["ok"] or one["skipped"]) for one in verdicts)
    missing = sum(one["what"] == ITSELF for one in verdicts)
    print(f"{len(verdicts)} verdicts, {failed} FAIL; {options.out} has verdicts.txt, gpu.json, logs and kernels")
    return FAILED if failed or missing or not verdicts else PASSED


def picture(found: Mapping[str, Any], path: Path) -> None:
    """Drawn last, and only where there is matplotlib."""
    try:
        from benchmarks.gpu.node.picture import draw
    except ImportError as error:
        print(f"no picture: {error}")
        return
    draw(path, found)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
