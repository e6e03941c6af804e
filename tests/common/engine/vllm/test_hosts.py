"""Hosts with ranks of a vLLM: real connections in one process, without vLLM."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.config import DecodeWorkerConfig
from common.engine.ranks.channel import Channel
from common.engine.vllm import follower
from common.engine.vllm.admission import Handshake, JoinRequest, JoinResponse, Purpose, Versions, key_of
from common.engine.vllm.connection import dial
from common.engine.vllm.hosts import HOST_IP, INTERFACES, PROBLEM_S, EngineHosts, FollowerPlan, link_key
from common.engine.vllm.launch import CoreFiles
from common.engine.vllm.link import ConnectorSettings
from common.engine.vllm.rank_hosts import JoinedHost, RankHosts
from common.errors import ModelError, RankLost
from common.wire.curve import KeyPair, write_key_pair
from common.wire.listening import listen

from ....waiting import wait_until

WAIT_S = 10.0
SETTINGS = ConnectorSettings(
    link_address="tcp://127.0.0.1:9", link_key="", silence_s=60, worker_id="d", epoch=1, weights="w", kv_host="::",
    curve_key="/of/the/worker",
)  # fmt: skip
PLAN = FollowerPlan(
    arguments=("--model", "/models/m"), model="/models/m", settings=SETTINGS, link_nonce=b"", weights_hash="h",
    on_gpu=False, num_ranks=2, kv_space="4", log_level="info", log_json=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (HOST_IP, *INTERFACES):
        monkeypatch.setenv(name, "")  # restored later
        monkeypatch.delenv(name)


@pytest.fixture
def key(tmp_path: Path) -> str:
    write_key_pair(str(tmp_path / "key.toml"), KeyPair.generate())
    return str(tmp_path / "key.toml")


def ask(address: str, key: str, purpose: Purpose, **request: Any) -> tuple[Channel, JoinResponse]:
    channel = dial(address)
    handshake = Handshake(channel, key_of(key), leads=False)
    handshake.send(JoinRequest(purpose=purpose, **{"versions": Versions.of_this_host(), **request}))
    return channel, handshake.receive(JoinResponse)


@contextmanager
def joined(key: str) -> Iterator[tuple[EngineHosts, Channel, Channel]]:
    """A worker with one other host of two ranks, and the two connections of that host."""
    listener = listen("127.0.0.1", 0, 4)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    admission = RankHosts(listener, key_of(key), 1)
    found: list[JoinedHost] = []
    waiting = threading.Thread(target=lambda: found.extend(admission.wait(WAIT_S)))
    waiting.start()
    control, answer = ask(address, key, "host")
    engine, _ = ask(address, key, "engine", session=answer.session)
    waiting.join(WAIT_S)
    hosts = EngineHosts(found, key)
    try:
        yield hosts, control, engine
    finally:
        hosts.close()
        control.close()
        engine.close()


def test_a_host_gets_its_arguments_and_derives_the_key_of_the_link(key: str) -> None:
    with joined(key) as (hosts, _, engine):
        hosts.start(PLAN)
        packed = engine.receive(WAIT_S)
        plan = msgspec.json.decode(packed, type=FollowerPlan)
        assert link_key(key, plan.link_nonce) == hosts.link_key
        assert hosts.link_key not in packed and hosts.link_key.hex().encode() not in packed
        given = dict(zip(plan.arguments[::2], plan.arguments[1::2], strict=True))
        assert (given["--nnodes"], given["--node-rank"], given["--master-addr"]) == ("2", "1", plan.leader)
        assert plan.leader == "127.0.0.1"
        assert hosts.arguments()[-6:] == ("--node-rank", "0", *plan.arguments[-4:])
        assert hosts.advertised("10.0.0.1", 4) == ["10.0.0.1", "10.0.0.1", "127.0.0.1", "127.0.0.1"]
        assert os.environ[HOST_IP] == "127.0.0.1" and os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_worker_learns_why_a_host_runs_no_ranks(key: str) -> None:
    with joined(key) as (hosts, control, engine):
        assert (hosts.failure, hosts.is_leaving) == ("", False)
        control.send(b"leaving", WAIT_S)
        assert (hosts.failure, hosts.is_leaving) == ("", True)
        engine.send(b"a rank has ended", WAIT_S)
        wanted = "host 1 at 127.0.0.1: a rank has ended"
        assert (hosts.failure, hosts.failure) == (wanted, wanted)
    with joined(key) as (hosts, control, _):
        control.cut()
        assert (hosts.failure, hosts.is_leaving) == ("host 1 at 127.0.0.1 is gone", False)
    with joined(key) as (hosts, _, engine):
        engine.cut()
        assert hosts.failure == "host 1 at 127.0.0.1 is gone"


def test_a_host_that_reports_half_a_problem_does_not_stop_the_worker(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop reads the report."""
    given: list[float | None] = []
    receive = Channel.receive

    def noted(channel: Channel, timeout_s: float | None, most_bytes: int) -> bytes:
        given.append(timeout_s)
        return receive(channel, 0.001, most_bytes)

    with joined(key) as (hosts, _, engine):
        engine.try_send(b"half")
        monkeypatch.setattr(Channel, "receive", noted)
        wait_until(lambda: hosts.failure)
        assert "cannot receive from host 1 at 127.0.0.1" in hosts.failure
        assert given == [PROBLEM_S] and PROBLEM_S < 1.0


def test_hosts_are_left_if_the_worker_has_no_route_to_them(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RankLost("no route")

    with joined(key) as (hosts, control, _):
        monkeypatch.setattr("common.engine.vllm.hosts.wait_for_hosts", lambda config: hosts._hosts)
        monkeypatch.setattr("common.engine.vllm.hosts.prepare_network", refuse)
        with pytest.raises(RankLost, match="no route"):
            EngineHosts.wait(DecodeWorkerConfig(curve_key=key))
        assert control.is_cut(WAIT_S)


def test_a_host_runs_the_plan_with_its_own_key_file(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ConnectorSettings] = []

    def run(plan: FollowerPlan, settings: ConnectorSettings, files: object) -> str:
        seen.append(settings)
        raise ModelError("this host has no such model")

    monkeypatch.setattr(follower, "run", run)
    with joined(key) as (hosts, _, engine):
        hosts.start(PLAN)
        plan = msgspec.json.decode(engine.receive(WAIT_S), type=FollowerPlan)
        files = CoreFiles(tmp_path)
        assert follower.follow(plan, key, "10.0.0.2", files) == "this host has no such model"
        assert seen[0].link_key == hosts.link_key.hex()
        assert (seen[0].curve_key, seen[0].kv_host, seen[0].epoch) == (key, "::", 1)
        at_one = msgspec.structs.replace(plan.settings, kv_host="10.0.0.1")
        follower.follow(msgspec.structs.replace(plan, settings=at_one), key, "10.0.0.2", files)
        assert seen[1].kv_host == "10.0.0.2"


def test_other_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="this host must have the model at the worker's path"):
        follower.check_weights(str(tmp_path / "none"), "h")
