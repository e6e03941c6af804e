"""Workers whose ranks are on several hosts, as real processes: this one is rank 0, without engine and router."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.config import DecodeWorkerConfig
from common.engine.ranks import group, kv_memory, loading
from common.engine.ranks.loading import Ranks, load_ranked
from common.engine.run.loaded import LoadedModel
from common.errors import ModelError, RankLost
from common.model_files.resolve import resolve_model
from common.model_files.tiny import make_tiny_model
from common.wire.curve import KeyPair, write_key_pair

from ....adapters import make_adapter, merge
from ..models.generation import prompt, transformers_greedy, transformers_model
from .rank_hosts import RankHostProcess, free_port
from .test_ranks import copy_blocks, go_on, run, worker

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.slow]

GONE_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("hosts") / "tiny")


@contextmanager
def spread(
    folder: Path, logs: Path, size: int, hosts: int, flags: tuple[str, ...] = (), **settings: object
) -> Iterator[tuple[LoadedModel, list[RankHostProcess]]]:
    """A worker and its rank hosts, none of which is left."""
    port = free_port()
    others = [RankHostProcess(logs, port, *flags, name=f"rank-host-{number}") for number in range(1, hosts)]
    for other in others:
        other.start()
    given = {"model": str(folder), "dtype": "float32", "quantization": "none", "num_blocks": 32, **settings}
    config = DecodeWorkerConfig(**given, tensor_parallel_size=size, rank_hosts=hosts, rank_port=port)
    try:
        loaded = load_ranked(resolve_model(str(folder)), config)
        try:
            yield loaded, others
        finally:
            assert loaded.others is not None
            loaded.others.close()
    except BaseException:
        print("\n".join(other.log_tail() for other in others))
        raise
    finally:
        for other in others:
            other.end()


@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (4, 2)])
def test_ranks_of_several_hosts_answer_as_one(folder: Path, tmp_path: Path, size: int, hosts: int) -> None:
    """The prompt on several hosts, tokens on one, further tokens on several."""
    tokens = prompt(41)
    with worker(folder, 1) as one, spread(folder, tmp_path, size, hosts) as (many, _):
        start = run(one, tokens, 0, (31, 29, 27, 25, 23))
        expected = [start, *go_on(one, [*tokens, start], 23, (31, 29, 27, 25, 23))]
        assert many.fingerprint == one.fingerprint
        here, there, back = (7, 2, 30, 11, 4), (1, 20, 9, 3, 5), (8, 9, 10, 12, 13)
        first = run(many, tokens, 0, here)
        copy_blocks(many, here[:3], one, there[:3])
        on_one = go_on(one, [*tokens, first], 11, there)
        copy_blocks(one, there[:4], many, back[:4])
        on_many = go_on(many, [*tokens, first, *on_one], 12, back)
        assert [first, *on_one, *on_many] == expected
        assert many.others is not None
        assert not many.others.failure and not many.others.is_leaving


def test_an_adapter_is_put_into_the_ranks_of_other_hosts(folder: Path, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a", folder, seed=1, rank=4)
    merged = merge(tmp_path / "merged", folder, path)
    tokens, table = prompt(41), (7, 2, 30, 11)
    expected = transformers_greedy(transformers_model(merged), tokens, 1)[0]
    with spread(folder, tmp_path, 2, 2, max_loras=1) as (loaded, _):
        assert loaded.adapters is not None
        place = loaded.adapters.load(path.name, str(path)).place
        assert run(loaded, tokens, 0, table, adapter=place) == expected[0]


def failure_of(loaded: LoadedModel, timeout_s: float = GONE_S) -> str:
    deadline = time.monotonic() + timeout_s
    assert loaded.others is not None
    while not (why := loaded.others.failure):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return why


@pytest.mark.parametrize("victim", ["a rank", "the rank host"])
def test_a_death_on_another_host_ends_the_worker(folder: Path, tmp_path: Path, victim: str) -> None:
    with spread(folder, tmp_path, 2, 2) as (loaded, (host,)):
        (rank,) = host.children()
        os.kill(rank if victim == "a rank" else host.pid, signal.SIGKILL)
        why = failure_of(loaded)
        assert why in ("rank 1 at 127.0.0.1 is gone", "the host of rank 1 at 127.0.0.1 is gone")
        if victim == "a rank":
            with pytest.raises(RankLost):
                run(loaded, [1, 2, 3], 0, [0])
            host.wait_for("rank host stopped its ranks")


def is_running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ranks_of_other_hosts_end_with_rank_0_and_join_the_next(folder: Path, tmp_path: Path) -> None:
    """The same rank host serves two workers, one after the other."""
    port = free_port()
    host = RankHostProcess(tmp_path, port)
    host.start()
    files = resolve_model(str(folder))
    given = {"model": str(folder), "dtype": "float32", "quantization": "none", "num_blocks": 8}
    config = DecodeWorkerConfig(**given, tensor_parallel_size=2, rank_hosts=2, rank_port=port, kernel_check=False)
    try:
        for _ in range(2):
            loaded = load_ranked(files, config)
            (rank,) = host.children()
            assert run(loaded, [1, 2, 3], 0, [0]) >= 0
            assert loaded.others is not None
            loaded.others.close()
            deadline = time.monotonic() + GONE_S
            while is_running(rank):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        host.terminate()
        host.wait(time.monotonic() + GONE_S)
        assert (host.returncode, host.forced) == (0, False), host.log_tail()
    finally:
        host.end()


def test_a_rank_host_that_is_asked_to_end_asks_the_worker_to_drain(folder: Path, tmp_path: Path) -> None:
    with spread(folder, tmp_path, 2, 2, kernel_check=False) as (loaded, (host,)):
        assert loaded.others is not None
        os.kill(host.pid, signal.SIGTERM)
        deadline = time.monotonic() + GONE_S
        while not loaded.others.is_leaving:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert run(loaded, [1, 2, 3], 0, [0]) >= 0  # its ranks go on until the worker ends
        assert not loaded.others.failure and isinstance(loaded.others, Ranks)
        loaded.others.processes.close()
        host.wait(time.monotonic() + GONE_S)
        assert (host.returncode, host.forced) == (0, False), host.log_tail()


def test_a_frozen_rank_ends_the_worker_at_the_deadlines(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sum, and when its KV is asked for: its kernel answers, so the connections stay."""
    monkeypatch.setattr(group, "COLLECTIVE_S", 20.0)
    monkeypatch.setattr(kv_memory, "ORDER_S", 1.0)
    with spread(folder, tmp_path, 2, 2) as (loaded, (host,)), worker(folder, 1) as one:
        (rank,) = host.children()
        os.kill(rank, signal.SIGSTOP)
        assert loaded.others is not None and not loaded.others.failure
        with pytest.raises(RankLost, match="a collective failed"):
            run(loaded, [1, 2, 3], 0, [0])
        with pytest.raises(RankLost, match=r"cannot receive from rank 1 at 127\.0\.0\.1: timed out"):
            copy_blocks(loaded, [0], one, [0])
        assert "rank 1 at 127.0.0.1 is gone" in failure_of(loaded)


def test_another_key_ends_a_rank_host_with_status_2(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "START_S", 10.0)
    for name in ("worker.key", "other.key"):
        write_key_pair(str(tmp_path / name), KeyPair.generate())
    wrong = ("--curve-key", str(tmp_path / "other.key"))
    with (
        pytest.raises(RankLost, match="0 of 1 other hosts have joined at 127.0.0.1:[0-9]+ within 10 s"),
        spread(folder, tmp_path, 2, 2, wrong, curve_key=str(tmp_path / "worker.key")),
    ):
        pytest.fail("it has started")
    log = (tmp_path / "rank-host-1.log").read_text()
    assert "its --curve-key differs or is missing on one side: use the same file on every host of the worker" in log


def test_hosts_with_one_key_join(folder: Path, tmp_path: Path) -> None:
    write_key_pair(str(tmp_path / "worker.key"), KeyPair.generate())
    key = str(tmp_path / "worker.key")
    with spread(folder, tmp_path, 2, 2, ("--curve-key", key), curve_key=key, kernel_check=False) as (loaded, _):
        assert run(loaded, [1, 2, 3], 0, [0]) >= 0


def test_no_worker_within_the_deadline_is_status_1(tmp_path: Path) -> None:
    host = RankHostProcess(tmp_path, free_port(), "--leader-timeout-s", "0.5")
    host.start()
    host.wait(time.monotonic() + GONE_S)
    assert (host.returncode, host.forced) == (1, False)
    assert "accepted this host within 0.5 s: [Errno 111] Connection refused" in host.log_tail()


def test_a_model_that_is_another_on_a_host_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = loading.plans

    def damaged(files: object, *more: object) -> object:
        from msgspec.structs import replace

        return resolve(replace(files, weights_hash="0" * 16), *more)  # type: ignore[arg-type,type-var]

    monkeypatch.setattr(loading, "plans", damaged)
    with (
        pytest.raises(ModelError, match="rank 1 at 127.0.0.1: the weights at .* have hash [0-9a-f]{16}, those of"),
        spread(folder, tmp_path, 2, 2),
    ):
        pytest.fail("it has started")
