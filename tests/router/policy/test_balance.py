"""Which answers move between ready decode workers, and how often."""

from __future__ import annotations

import math

import msgspec
import pytest

from common.latency.step_model import StepModel, StepShape
from router.fleet.registry import WorkerRegistry
from router.policy.balance import HORIZON_S, Running, choose_move, overload_reason, until_full_s

from ...fake_worker import heartbeat_of, hello_of

A, B, C = "tcp://a:1", "tcp://b:1", "tcp://c:1"
MODEL = StepModel(fixed_s=0.01, row_s=1e-3, context_s=1e-7, num_steps=500)


def fleet(**load: tuple[int, int, int]) -> WorkerRegistry:
    """Workers of 100 blocks, each with (running answers, blocks they hold, blocks that will come) on average."""
    registry = WorkerRegistry([], [A, B, C][: len(load)], worker_timeout_s=2.0)
    for address, (num_running, num_held, num_more) in zip(registry.workers, load.values(), strict=True):
        layout = {"block_size": 16, "num_blocks": 100, "max_num_seqs": 8, "max_model_len": 1600}
        registry.on_hello(address, hello_of(address, "decode", **layout), 0.0)
        for _ in range(num_running):
            registry.book(
                address, 0.0, prompt=StepShape(), num_blocks=num_held, num_tokens=16 * num_held, num_more=num_more
            )
        beat = {
            "num_running": num_running, "num_context_tokens": 16 * num_held * num_running, "step_model": MODEL,
            "num_free_blocks": 100 - num_running * num_held, "serial": 10**6,
        }  # fmt: skip
        registry.on_heartbeat(address, heartbeat_of(address, **beat), 0.0)
    return registry


def one(name: str, num_blocks: int = 20, num_more: int = 20, tpot_s: float = 0.0) -> Running:
    return Running(name, 16 * num_blocks, num_blocks, 16 * num_more, num_more, tpot_s)


def moved(registry: WorkerRegistry, *answers: Running, busy: tuple[str, ...] = ()) -> tuple[str, str, str] | None:
    move = choose_move(registry.workers[A], registry.ready("decode"), answers, busy)
    return None if move is None else (move.request_id, move.target.address, move.reason)


def test_a_worker_knows_when_its_blocks_run_out() -> None:
    workers = fleet(a=(4, 20, 20), b=(4, 20, 4), c=(1, 20, 20)).workers
    step_s = 0.01 + 4e-3 + 1e-7 * 1280
    assert until_full_s(workers[A]) == pytest.approx(20 * 16 * step_s / 4)
    assert until_full_s(workers[B]) == until_full_s(workers[C]) == math.inf
    assert [overload_reason(workers[address], 0.0) for address in (A, B, C)] == ["blocks", "", ""]


def test_a_worker_with_time_left_is_left_alone() -> None:
    worker = fleet(a=(2, 10, 45)).workers[A]
    assert worker.load.num_spare_blocks < 0
    assert until_full_s(worker) > HORIZON_S and overload_reason(worker, 0.0) == ""


def test_the_answer_that_frees_most_for_its_copy_moves_to_the_emptiest_worker() -> None:
    registry = fleet(a=(4, 20, 20), b=(1, 20, 5), c=(0, 0, 0))
    assert moved(registry, one("old", 22, 4), one("young", 18, 22), one("mid")) == ("young", C, "blocks")


def test_an_answer_that_is_about_to_end_stays() -> None:
    registry = fleet(a=(4, 20, 20), b=(0, 0, 0))
    assert moved(registry, one("ends", 20, 1)) is None
    assert moved(registry, one("ends", 20, 1), one("lasts")) == ("lasts", B, "blocks")


@pytest.mark.parametrize("load", [(2, 20, 10), (1, 60, 0), (8, 1, 0)], ids=["grows", "is full", "no place"])
def test_a_worker_without_room_for_what_the_answer_becomes_gets_none(load: tuple[int, int, int]) -> None:
    assert moved(fleet(a=(4, 20, 20), b=load), one("x")) is None


def test_one_move_at_a_time_touches_a_worker() -> None:
    registry = fleet(a=(4, 20, 20), b=(0, 0, 0), c=(0, 0, 0))
    assert moved(registry, one("x"), busy=(A,)) is None
    assert moved(registry, one("x"), busy=(B,)) == ("x", C, "blocks")


def test_an_answer_leaves_a_worker_whose_steps_miss_its_goal() -> None:
    registry = fleet(a=(6, 5, 10), b=(1, 5, 5))
    assert moved(registry, one("x", 5, 10, tpot_s=0.0155), one("y", 4, 10)) == ("y", B, "tokens")
    assert moved(registry, one("x", 5, 10, tpot_s=0.017)) is None, "steps take 16 ms"
    assert moved(fleet(a=(6, 5, 10), b=(4, 5, 5)), one("x", 5, 10, tpot_s=0.0155)) is None, "no better there"


def test_an_answer_whose_kv_cannot_move_stays() -> None:
    registry = fleet(a=(4, 20, 20), b=(0, 0, 0))
    registry.on_hello(A, msgspec.structs.replace(registry.workers[A].identity, hands_over=False), 0.0)
    assert moved(registry, one("x")) is None, "the other worker would compute it again"


def test_a_move_is_no_reason_to_move_back() -> None:
    """After a move the source, as it is then, gets nothing back from the target."""
    registry = fleet(a=(4, 20, 20), b=(0, 0, 0))
    assert moved(registry, one("x")) is not None
    after = fleet(a=(1, 20, 20), b=(3, 20, 20))
    assert choose_move(after.workers[A], after.ready("decode"), [one("x")]) is None


# ---------------------------------------------------------------- with workers that follow a script
