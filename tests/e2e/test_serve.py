"""`diptych serve` as a newcomer runs it: it comes up, answers, and every process of it ends within five seconds. And
when something hangs, the supervisor starts it again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from common.model_files.tiny import make_tiny_model

from ..rig import PATIENCE_S, READY_S, Program, command_with_faults, wait_until

pytestmark = pytest.mark.e2e

START_S = READY_S
NUM_TOKENS = 600


SERVE = (
    "import sys; from router.cli.serve import serve, supervisor; supervisor.STOP_GRACE_S = 60.0; sys.exit(serve.main())"
)
"""Processes end by themselves, however long they get no core."""


class Served(Program):
    """One `diptych serve` in a process group of its own."""

    def __init__(self, log: Path, *flags: str, program: Sequence[str] = ("-c", SERVE), wait: bool = True) -> None:
        super().__init__("serve", log, group=True)
        model = () if {"--models-file", "--models-dir"}.intersection(flags) else ("--model", "tiny-random")
        self.launch([sys.executable, "-P", *program, *model, "--port", "0", *flags])
        self.url = self._wait_for_url() if wait else ""

    def _wait_for_url(self) -> str:
        try:
            return self.wait_for_line("OpenAI base URL", START_S).split()[-1].removesuffix("/v1")
        except AssertionError:
            self.kill()
            raise

    def members(self) -> set[int]:
        """It and every process below it that is alive."""
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended while the list was read
                    state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                    if state != "Z":
                        parents[int(entry.name)] = int(parent)
        found = {self.pid} & parents.keys()
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return found

    def pid_of(self, worker: str) -> int:
        """The worker's process, 0 while it has none."""
        flag = f"--worker-id={worker}".encode()
        for pid in self.members() - {self.pid}:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if flag in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    return pid
        return 0

    def said(self, *words: str) -> bool:
        """Whether a line of its log has all of these."""
        return any(all(word in line for word in words) for line in self.output().splitlines())

    def end(self, number: int, *, whole_group: bool) -> set[int]:
        """Send a signal. The processes that are left when all had time to end by themselves."""
        members, deadline = self.members(), time.monotonic() + PATIENCE_S
        (os.killpg if whole_group else os.kill)(self.pid, number)
        wait_until(lambda: not self.alive, "the parent has ended")
        while any(map(is_alive, members)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not self.said("supervisor: killed")
        return set(filter(is_alive, members))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def served(tmp_path: Path) -> Iterator[list[Served]]:
    started: list[Served] = []
    yield started
    for one in started:
        one.kill()


def ask(url: str, model: str = "tiny-random") -> str:
    messages = [{"role": "user", "content": "x" * 200}]
    body = {"model": model, "messages": messages, "max_tokens": 5, "temperature": 0}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


@pytest.mark.slow
def test_a_pool_at_zero_is_started_for_those_who_ask(served: list[Served], tmp_path: Path) -> None:
    """The whole way: the router's plan, its gauges, a worker more, the file that lists it, and requests that use it."""
    goals = ("--slo-ttft-ms", "10000", "--slo-tpot-ms", "1000", "--planner-interval-s", "0.3")
    served.append(Served(tmp_path / "a.log", "--autoscale", "--prefill", "0", "--max-prefill", "1", *goals))
    ask(served[0].url)

    def asked_and_planned() -> bool:
        ask(served[0].url)
        return served[0].said("prefill", "ready: tiny-random") and served[0].said("(prefill): discovered")

    wait_until(asked_and_planned, "a prefill worker", PATIENCE_S)
    assert served[0].said("planner: wants 1 prefill workers", "role=prefill", "workers=1")
    assert served[0].end(signal.SIGTERM, whole_group=False) == set()


def both_of(folder: str, path: Path) -> tuple[str, str]:
    """The flags for tiny-random and the model of a folder."""
    file = path / "models.toml"
    file.write_text(f'[[model]]\nmodel = "tiny-random"\n[[model]]\nmodel = "{folder}"\n')
    return "--models-file", str(file)


@pytest.mark.slow
def test_of_two_models_the_one_that_is_asked_for_grows(served: list[Served], tmp_path: Path) -> None:
    folder = str(make_tiny_model(tmp_path / "another", seed=7))
    goals = ("--slo-ttft-ms", "10000", "--slo-tpot-ms", "1000", "--planner-interval-s", "0.3")
    flags = (
        *both_of(folder, tmp_path),
        "--threads",
        "1",
        "--prefill",
        "0",
        "--max-prefill",
        "1",
        "--max-decode",
        "1",
        *goals,
    )
    served.append(Served(tmp_path / "a.log", "--autoscale", *flags))

    def workers() -> list[tuple[str, str]]:
        reply = httpx.get(f"{served[0].url}/load", timeout=60, trust_env=False).json()
        return sorted((one["worker_id"], one["model"]) for one in reply["workers"] if one["state"] == "ready")

    at_first = [("decode-0", "tiny-random"), ("decode-1", "another")]
    wait_until(lambda: workers() == at_first, "one decode worker of each", PATIENCE_S)

    def asked_and_started() -> bool:
        ask(served[0].url, "another")
        return workers() == [*at_first, ("prefill-0", "another")]

    wait_until(asked_and_started, "a prefill worker of that model", PATIENCE_S)
    assert served[0].said("supervisor: adding", f"model={folder}", "role=prefill", "workers=1")
    assert not served[0].said("supervisor: adding", "model=tiny-random")
    assert served[0].end(signal.SIGTERM, whole_group=False) == set()


@pytest.mark.slow
def test_two_services_side_by_side_end_by_control_c_and_by_sigterm(served: list[Served], tmp_path: Path) -> None:
    served += [Served(tmp_path / "a.log"), Served(tmp_path / "b.log", "--prefill", "0")]
    first, second = served
    assert first.url != second.url
    assert ask(first.url) == ask(second.url)  # two pools and one: the same answer
    assert len(first.members()) == 7  # serve, router, prefill, decode, and the grammar compilers of these three
    assert first.end(signal.SIGINT, whole_group=True) == set()
    assert ask(second.url)
    assert second.end(signal.SIGTERM, whole_group=True) == set()


@pytest.mark.slow
def test_two_models_behind_one_router(served: list[Served], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "another", seed=7)
    served.append(Served(tmp_path / "a.log", *both_of(str(folder), tmp_path), "--prefill", "0"))
    assert served[0].said("Diptych serves tiny-random, another, ready after", "0 prefill + 2 decode + router")
    answers = {model: ask(served[0].url, model) for model in ("tiny-random", "another")}
    assert answers["tiny-random"] != answers["another"]
    assert served[0].end(signal.SIGTERM, whole_group=False) == set()


def test_sigterm_to_the_parent_alone_ends_everything(served: list[Served], tmp_path: Path) -> None:
    served.append(Served(tmp_path / "c.log", "--prefill", "0"))
    assert served[0].end(signal.SIGTERM, whole_group=False) == set()
    assert served[0].returncode == 0


@pytest.mark.slow
def test_killing_the_parent_ends_everything(served: list[Served], tmp_path: Path) -> None:
    served.append(Served(tmp_path / "d.log", "--prefill", "0"))
    assert served[0].end(signal.SIGKILL, whole_group=False) == set()


@pytest.mark.slow
def test_a_worker_that_freezes_while_it_starts_is_not_waited_for_without_end(
    served: list[Served], tmp_path: Path
) -> None:
    served.append(Served(tmp_path / "e.log", "--start-timeout-s", "4", wait=False))
    wait_until(lambda: served[0].pid_of("decode-0") != 0, "it was spawned")
    frozen = served[0].pid_of("decode-0")
    os.kill(frozen, signal.SIGSTOP)
    members = served[0].members()
    assert frozen in members
    wait_until(lambda: not served[0].alive, "it gave up")
    assert served[0].returncode == 1
    assert served[0].said("supervisor: start failed", "not ready within 4 s (--start-timeout-s)", "decode-0")
    wait_until(lambda: not any(map(is_alive, members)), "all of it is gone")


def stream(url: str, salt: object) -> str:
    body = {"model": "tiny-random", "prompt": "x" * 50, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/completions", json=body | {"cache_salt": str(salt)}, timeout=100, trust_env=False)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == NUM_TOKENS
    text: str = reply.json()["choices"][0]["text"]
    return text


def all_ready(one: Served) -> bool:
    workers = httpx.get(f"{one.url}/load", timeout=60, trust_env=False).json()["workers"]
    return all(worker["state"] == "ready" for worker in workers)


def wait_for_another(one: Served, name: str, pid: int) -> None:
    wait_until(lambda: one.pid_of(name) not in (0, pid), f"another process is {name}", patience_s=60)


@pytest.mark.slow
def test_what_hangs_is_started_again_and_what_starts_slowly_is_not(served: list[Served], tmp_path: Path) -> None:
    program = command_with_faults("serve", hang=tmp_path / "hang", slow_start=tmp_path / "slow")[2:]
    flags = ("--prefill", "0", "--decode", "2", "--threads", "1", "--liveness-s", "6.3", "--stall-timeout-s", "1")
    served.append(one := Served(tmp_path / "e.log", *flags, program=program))
    expected = stream(one.url, "alone")
    wait_until(lambda: all_ready(one), "both are used", patience_s=60)
    hung, frozen = one.pid_of("decode-1"), one.pid_of("decode-0")
    (tmp_path / "slow").touch()
    (tmp_path / "hang").touch()
    deadline = time.monotonic() + 60
    with ThreadPoolExecutor(6) as pool:
        while not one.said("decode-1 is unresponsive, stopping it", "HTTP 503: stuck"):
            assert time.monotonic() < deadline, "it was left alone"
            answers = pool.map(partial(stream, one.url), (f"{number} {time.monotonic()}" for number in range(6)))
            assert list(answers) == [expected] * 6  # requests that were on it went on elsewhere
    wait_for_another(one, "decode-1", hung)
    (tmp_path / "hang").unlink()
    slow = one.pid_of("decode-1")
    os.kill(frozen, signal.SIGSTOP)
    wait_for_another(one, "decode-0", frozen)
    assert one.said("decode-0 is unresponsive, stopping it", "no answer within")
    assert one.said("decode-0 exited, restarting it", "child=decode-0", "killed by signal 9")
    assert one.pid_of("decode-1") == slow  # silent for longer than the other, but since its start
    (tmp_path / "slow").unlink()
    assert stream(one.url, "again") == expected
    one.end(signal.SIGTERM, whole_group=False)


@pytest.mark.slow
def test_a_router_of_two_processes(served: list[Served], tmp_path: Path) -> None:
    served.append(Served(tmp_path / "a.log", "--prefill", "0", "--router-processes", "2"))
    assert ask(served[0].url) == ask(served[0].url)
    words = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in served[0].members()]
    assert sum(b"router.process" in each for each in words) >= 1  # the second is started once the first answers
    assert served[0].end(signal.SIGTERM, whole_group=False) == set()
