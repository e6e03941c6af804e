"""When a worker changes its role: what the policy orders under loads that last, swing, or fit no pool."""

from __future__ import annotations

import math
from typing import Any

import pytest

from common.config import RouterConfig
from common.latency.link_model import LinkModel
from common.latency.step_model import StepModel
from common.wire.messages import ChangeRole, Message
from router.dispatch import role_changes
from router.dispatch.load import DispatchCounters
from router.dispatch.role_changes import ANSWER_S, RoleChanges
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import Worker
from router.policy.roles import REFUSED_S, RoleChange, RoleLimits, RolePolicy, SplitForecast, drain_of

from ...fake_worker import heartbeat_of, hello_of

MODEL = StepModel(fixed_s=0.005, token_s=1e-4, row_s=1e-3, context_s=1e-7, num_steps=1000)
TICK_S = 0.25
AFTER_S, INTERVAL_S = 2.0, 10.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Role changes come sooner than by default."""
    monkeypatch.setattr(role_changes, "CHANGE_AFTER_S", 1.0)
    monkeypatch.setattr(role_changes, "CHANGE_INTERVAL_S", 5.0)


class Pools:
    """Ready workers of both roles, and a policy that is asked at each tick; what it orders is carried out at once."""

    def __init__(self, prefill: int = 2, decode: int = 2, *, able: bool = True, **limits: Any) -> None:
        names = {f"p{i}": "prefill" for i in range(prefill)} | {f"d{i}": "decode" for i in range(decode)}
        of = {role: [name for name in names if names[name] == role] for role in ("prefill", "decode")}
        self.registry = WorkerRegistry(of["prefill"], of["decode"], worker_timeout_s=2.0)
        self.limits = RoleLimits(**{"after_s": AFTER_S, "interval_s": INTERVAL_S} | limits)
        self.policy, self.now, self.able, self.orders = RolePolicy(self.limits), 0.0, able, list[RoleChange]()
        self.waits_s, self.places, self.context = 0.0, 0.0, 100
        for name, role in names.items():
            self.registry.on_hello(name, self.hello(name, role), 0.0)
        self.beat()

    def hello(self, name: str, role: str, epoch: int = 1, **fields: Any) -> Any:
        home = self.registry.workers[name].home
        return hello_of(name, role, epoch=epoch, home=home, changes_role=self.able, max_num_seqs=10, **fields)

    def beat(self) -> None:
        """Prefill workers say that prompts wait `waits_s`, decode workers that `places` of their places are taken."""
        for worker in self.registry.workers.values():
            load: dict[str, Any] = {"num_running": round(10 * self.places), "num_context_tokens": self.context}
            if worker.role == "prefill":
                load = {"waiting_s": self.waits_s, "num_waiting_tokens": round(1e4 * self.waits_s)}
            beat = heartbeat_of(worker.worker_id, epoch=worker.epoch, step_model=MODEL, **load)
            self.registry.on_heartbeat(worker.address, beat, self.now)

    @property
    def of(self) -> dict[str, list[Worker]]:
        return {"prefill": self.registry.ready("prefill"), "decode": self.registry.ready("decode")}

    def run(
        self, seconds: float, *, waits_s: float = 0.0, places: float = 0.0, refused: Any = None, every_s: float = TICK_S
    ) -> list[RoleChange]:
        """So much load for so long; the orders that came of it. Each `every_s` a request is refused for a role."""
        self.waits_s, self.places = waits_s, places
        known = len(self.orders)
        for number in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.beat()
            if refused and number % round(every_s / TICK_S) == 0:
                self.policy.refused(refused, self.now)
            order = self.policy.choose(self.of["prefill"], self.of["decode"], self.now)
            if order is not None:
                self.orders.append(order)
                worker = self.registry.workers[order.address]
                hello = self.hello(worker.address, order.role, epoch=worker.epoch + 1)
                self.registry.on_hello(order.address, hello, self.now)
        return self.orders[known:]

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.of["prefill"]), len(self.of["decode"])


def test_a_decode_worker_helps_where_prompts_wait_and_says_why() -> None:
    pools = Pools(1, 2)
    (order,) = pools.run(5.0, waits_s=3.0, places=0.2)
    assert (order.address, order.role) == ("d0", "prefill")
    assert "prompts wait 3.00 s" in order.reason and "decode load would be 0.40 with 1 of 2" in order.reason
    assert pools.counts == (2, 1)


def test_a_prefill_worker_helps_where_decode_is_full() -> None:
    pools = Pools(2, 1)
    (order,) = pools.run(5.0, places=1.3)
    assert (order.address, order.role) == ("p0", "decode")
    assert "decode load is 1.30 with 1 workers, and would be 0.65" in order.reason
    assert pools.counts == (1, 2)


def test_nothing_changes_before_the_load_has_lasted() -> None:
    pools = Pools(1, 2)
    assert pools.run(AFTER_S - TICK_S, waits_s=3.0) == []
    assert pools.run(2 * TICK_S, waits_s=3.0) != []


@pytest.mark.parametrize("period_s", [0.5, 1.0, 2 * AFTER_S - 2 * TICK_S])
def test_a_load_that_swings_faster_than_that_changes_nothing(period_s: float) -> None:
    pools = Pools(2, 2)
    for _ in range(20):
        pools.run(period_s / 2, waits_s=3.0)
        pools.run(period_s / 2, places=1.3)
    assert pools.orders == []


def test_a_load_that_swings_slowly_changes_no_more_often_than_allowed() -> None:
    pools = Pools(2, 2)
    for _ in range(10):
        pools.run(5.0, waits_s=3.0)
        pools.run(5.0, places=1.3)
    assert 1 < len(pools.orders) <= 100.0 / INTERVAL_S


def test_after_a_change_the_same_load_does_not_order_it_back() -> None:
    pools = Pools(2, 2)
    pools.run(5.0, waits_s=3.0, places=0.3)
    assert pools.counts == (3, 1)
    assert pools.run(60.0, waits_s=0.6, places=0.6) == []  # the work of three shared by three, of two by one


@pytest.mark.parametrize(
    ("load", "least"), [({"waits_s": 9.0}, (1, 2)), ({"places": 3.0}, (2, 1)), ({"waits_s": 9.0}, (0, 0))]
)
def test_pools_keep_their_least_numbers(load: dict[str, float], least: tuple[int, int]) -> None:
    pools = Pools(*(max(1, number) for number in least), least=least)
    assert pools.run(60.0, **load) == []


def test_an_empty_prefill_pool_is_filled_by_what_waits_on_decode_workers() -> None:
    pools = Pools(0, 2)
    pools.waits_s = 3.0
    for worker in pools.of["decode"]:
        worker.estimates.observed_s = 3.0
    assert [order.role for order in pools.run(5.0)] == ["prefill"]


def test_when_both_pools_are_behind_none_gives() -> None:
    assert Pools(2, 2).run(60.0, waits_s=3.0, places=1.3) == []


def test_a_worker_that_may_not_change_is_left_alone() -> None:
    assert Pools(1, 2, able=False).run(60.0, waits_s=3.0) == []


def test_a_worker_that_comes_home_is_the_first_to_go() -> None:
    pools = Pools(2, 2)
    assert pools.run(5.0, places=1.3)[0].address == "p0"
    pools.run(INTERVAL_S)
    assert pools.run(5.0, waits_s=3.0)[0].address == "p0"


def test_a_worker_that_takes_longer_to_drain_than_prompts_wait_stays() -> None:
    pools = Pools(1, 2)
    pools.context = 2_000_000  # four seconds of copying
    assert pools.run(20.0, waits_s=3.0, places=0.1) == []
    pools.context = 1000
    assert pools.run(5.0, waits_s=3.0, places=0.1)


def test_a_worker_that_alone_has_its_layout_stays() -> None:
    pools = Pools(1, 2)
    for worker in pools.of["decode"]:
        pools.registry.on_hello(worker.address, pools.hello(worker.address, "decode", fingerprint=worker.address), 0.0)
    pools.beat()
    assert pools.run(60.0, waits_s=3.0) == []


def test_goals_say_how_long_prompts_may_wait_and_how_long_tokens_may_take() -> None:
    assert Pools(1, 2).run(5.0, waits_s=0.5) == []
    assert Pools(1, 2, ttft_s=0.8).run(5.0, waits_s=0.5)
    assert Pools(2, 1).run(5.0, places=0.8) == []
    assert Pools(2, 1, tpot_s=0.01).run(5.0, places=0.8)  # 8 rows take 13 ms, 4 take 9


def test_a_goal_for_tokens_that_no_number_of_workers_meets_moves_none() -> None:
    pools = Pools(2, 1, tpot_s=0.001)
    assert pools.run(60.0, places=0.1) == []  # a lone row takes 6 ms


@pytest.mark.parametrize(("role", "load"), [("prefill", {"waits_s": 0.2}), ("decode", {"places": 0.9})])
def test_requests_refused_for_a_goal_show_which_pool_is_behind(role: str, load: dict[str, float]) -> None:
    pools = Pools(2, 2)
    (order,) = pools.run(5.0, refused=role, every_s=1.0, **load)
    assert order.role == role and "requests are rejected" in order.reason


def test_a_refusal_now_and_then_changes_nothing() -> None:
    pools = Pools(2, 2)
    assert pools.run(60.0, waits_s=0.2, refused="prefill", every_s=2 * REFUSED_S) == []
    assert pools.run(60.0, places=0.9) == []


def test_a_pool_that_refuses_requests_gives_no_worker() -> None:
    pools = Pools(2, 2)
    pools.policy.refused("decode", pools.now)
    assert pools.run(REFUSED_S, waits_s=3.0, refused="decode") == []


# ---------------------------------------------------------------- the router that orders


class Router:
    """`RoleChanges` over pools that never carry its orders out by themselves."""

    def __init__(self, router_id: str = "a", **settings: Any) -> None:
        self.pools = Pools(1, 2)
        self.sent: list[tuple[str, Message]] = []
        self.counters = DispatchCounters()
        config = RouterConfig(role_change=True, **settings)
        self.changes = RoleChanges(config, self.pools.registry, self.send, router_id, self.counters)

    def send(self, address: str, message: Message) -> bool:
        self.sent.append((address, message))
        return True

    def run(self, seconds: float, planner: str = "a", waiting_s: float = 3.0, **beat: Any) -> None:
        pools = self.pools
        for _ in range(round(seconds / TICK_S)):
            pools.now += TICK_S
            for worker in pools.registry.workers.values():
                load = {"waiting_s": waiting_s} if worker.role == "prefill" else {}
                draining = beat if worker.address in {address for address, _ in self.sent} else {}
                told = heartbeat_of(
                    worker.worker_id, epoch=worker.epoch, planner=planner, step_model=MODEL, **load, **draining
                )
                pools.registry.on_heartbeat(worker.address, told, pools.now)
            self.changes.tick(pools.now)


def test_the_router_that_workers_name_gives_one_order_at_a_time() -> None:
    router = Router()
    router.run(3.0)
    ((address, order),) = router.sent
    assert (
        address == "d0" and isinstance(order, ChangeRole) and order.role == "prefill" and "prompts wait" in order.reason
    )
    router.run(30.0, draining=True)
    assert len(router.sent) == 1


def test_it_follows_requests_that_admission_refused() -> None:
    router = Router()
    router.run(3.0, waiting_s=0.1)
    assert router.sent == []
    for _ in range(8):
        router.counters.num_refused_for["prefill"] += 1
        router.run(0.5, waiting_s=0.1)
    assert len(router.sent) == 1


def test_an_order_that_is_not_obeyed_is_closed_with_a_warning_and_given_again_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    router = Router()
    router.run(3.0)
    router.run(ANSWER_S + 1.0)
    assert "did not become a prefill worker" in caplog.text
    router.run(5.0)
    assert len(router.sent) == 2


@pytest.mark.parametrize("planner", ["b", ""])
def test_another_router_gives_none(planner: str) -> None:
    router = Router()
    router.run(10.0, planner)
    assert router.sent == []


def test_without_the_setting_a_router_gives_none() -> None:
    router = Router()
    router.changes._is_on = False
    router.run(10.0)
    assert router.sent == []


def test_a_change_that_another_router_ordered_counts_as_one() -> None:
    router = Router()
    pools = router.pools
    router.run(TICK_S)
    pools.registry.on_hello("d1", pools.hello("d1", "prefill", epoch=2), pools.now)
    pools.registry.on_hello("d1", pools.hello("d1", "decode", epoch=3), pools.now)
    assert pools.registry.role_changes == {("decode", "prefill"): 1, ("prefill", "decode"): 1}
    router.run(4.5)
    assert router.sent == []
    router.run(3.0)
    assert len(router.sent) == 1


# ---------------------------------------------------------------- forecasts of whole splits


def forecast(missed: dict[int, float], **fields: Any) -> SplitForecast:
    """Of 100 requests in ten seconds."""
    values: dict[str, Any] = {"num_offered": 100.0, "seconds": 10.0, "lasting_s": math.inf, "num_seen": 100}
    return SplitForecast(missed, **(values | fields), load="10 requests/s")


def orders_of(pools: Pools, seen: SplitForecast, seconds: float = AFTER_S + TICK_S) -> list[RoleChange]:
    """The orders within so long under a forecast that stays."""
    found = []
    for _ in range(round(seconds / TICK_S) + 1):
        pools.now += TICK_S
        pools.beat()
        while (order := pools.policy.choose(pools.of["prefill"], pools.of["decode"], pools.now, seen)) is not None:
            found.append(order)
    return found


def test_the_best_split_is_reached_by_several_orders_at_once() -> None:
    pools = Pools(1, 4)
    seen = forecast({0: 90.0, 1: 60.0, 2: 40.0, 3: 10.0, 4: 2.0})
    found = orders_of(pools, seen)
    assert [(order.address, order.role) for order in found] == [(f"d{i}", "prefill") for i in range(3)]
    assert "60.0 of 100.0 requests would miss a goal with 1 prefill and 4 decode" in found[0].reason


def test_of_splits_that_are_as_good_the_nearest_is_taken() -> None:
    assert len(orders_of(Pools(1, 4), forecast({1: 60.0, 2: 1.0, 3: 0.5, 4: 0.0}))) == 1


@pytest.mark.parametrize(
    ("fields", "missed"),
    [
        ({}, {1: 8.0, 2: 0.0}),  # too little
        ({"num_seen": 4}, {1: 25.0, 2: 0.0}),  # enough, if more requests had been seen
        ({"lasting_s": AFTER_S}, {1: 90.0, 2: 0.0}),  # over before it helps
    ],
)
def test_a_split_that_does_not_pay_is_left_alone(fields: dict[str, Any], missed: dict[int, float]) -> None:
    assert orders_of(Pools(1, 2), forecast(missed, **fields), 20.0) == []


def test_a_split_stops_at_the_least_of_a_pool() -> None:
    assert len(orders_of(Pools(1, 4, least=(0, 3)), forecast({1: 60.0, 2: 30.0, 3: 0.0}))) == 1


def test_what_is_measured_changes_nothing_that_the_forecast_calls_worse() -> None:
    for missed, num in (({0: 9.0, 1: 5.0, 2: 50.0}, 0), ({0: 9.0, 1: 5.0, 2: 5.0}, 1)):
        pools = Pools(1, 2)
        pools.waits_s = 3.0
        assert len(orders_of(pools, forecast(missed))) == num


def test_the_drain_of_a_worker_is_that_of_the_link_that_it_has() -> None:
    pools = Pools(1, 2)
    (worker, _), pools.places = pools.of["decode"], 0.5
    pools.beat()
    unknown_s = drain_of(worker, pools.now)
    slow = LinkModel(latency_s=0.5, byte_s=1e-9, block_bytes=1000, num_transfers=9)
    worker.load.pool_link, worker.forecast_inputs = slow, None
    assert drain_of(worker, pools.now) > unknown_s + 5 * 0.5 - 0.1
