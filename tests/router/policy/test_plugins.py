"""Routing policies by name and from modules, and what happens when one of them fails."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from common.config import RouterConfig
from common.config.field import fields_of
from common.errors import ConfigError
from router.__main__ import main
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import Worker, WorkerState
from router.policy.plugins import POLICIES, GuardedPolicy, load_policy
from router.policy.policy import Choice, Policy, choice_error, possible_choices, predict
from router.policy.request_shape import RequestShape
from router.policy.routing import RoutingPolicy

from ...fake_worker import hello_of

SHAPE = RequestShape(500, 100, {})
MODULE = """
from router.policy import Policy, RoutingPolicy

class Mine(RoutingPolicy):
    pass

class Unfinished(Policy):
    pass

class Broken(RoutingPolicy):
    def __init__(self, *values):
        raise RuntimeError("no settings")

def function(*values):
    return RoutingPolicy()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_policies.py").write_text(MODULE)
    (tmp_path / "bad_policies.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_policies"
    sys.modules.pop("own_policies", None)


def workers(fingerprints: dict[str, str] | None = None) -> tuple[list[Worker], list[Worker]]:
    """Two ready prefill workers, p0 and p1, and two decode workers, d0 and d1."""
    registry = WorkerRegistry(["p0", "p1"], ["d0", "d1"], worker_timeout_s=2.0)
    for address, worker in registry.workers.items():
        fingerprint = (fingerprints or {}).get(address, "f")
        registry.on_hello(
            address,
            hello_of(address, worker.role, fingerprint=fingerprint, block_size=16, num_blocks=1000, max_num_seqs=8),
            0.0,
        )
        worker.state = WorkerState.READY
    return registry.ready("prefill"), registry.ready("decode")


@pytest.mark.parametrize("name", POLICIES)
def test_each_name_makes_a_policy_with_the_settings(name: str) -> None:
    policy, chance = load_policy(name, 7, Random(1)), Random(1)
    assert type(policy) is POLICIES[name] and policy.local_prefill_threshold == 7
    assert policy.chance.random() == chance.random()


def test_the_default_is_the_built_in_policy_and_the_help_names_all() -> None:
    field = next(field for field in fields_of(RouterConfig) if field.name == "routing_policy")
    assert POLICIES[field.default] is RoutingPolicy
    assert all(name in field.rule.details for name in POLICIES)


def test_a_class_of_a_module_is_a_policy(module: str) -> None:
    assert type(load_policy(f"{module}:Mine", 7)).__name__ == "Mine"


@pytest.mark.parametrize(
    ("name", "words"),
    (
        ("best", f"one of {', '.join(POLICIES)}, or module:Class"),
        ("no_such_module:Mine", "No module named 'no_such_module'"),
        ("bad_policies:Mine", "division by zero"),
        ("own_policies:Missing", "no attribute 'Missing'"),
        ("own_policies:function", "a subclass of router.policy.Policy"),
        ("own_policies:Unfinished", "abstract"),
        ("own_policies:Broken", "no settings"),
    ),
)
def test_what_is_no_policy_is_refused(module: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match="routing_policy=.*must be one of diptych") as refusal:
        load_policy(name, 64)
    assert words in str(refusal.value)


@pytest.mark.parametrize("name", ("", "Best!", "module:", ":Class", "module:Class:more"))
def test_what_cannot_be_a_policy_is_refused_with_the_settings(name: str) -> None:
    with pytest.raises(ConfigError, match="routing_policy"):
        RouterConfig(decode=("tcp://127.0.0.1:1",), routing_policy=name)


@pytest.mark.parametrize("processes", ("1", "2"))
def test_a_router_refuses_to_start_with_an_unknown_policy(processes: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--decode", "tcp://127.0.0.1:1", "--routing-policy", "best", "--router-processes", processes]
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 2
    assert "invalid --routing-policy best: must be one of diptych, random" in capsys.readouterr().err


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_makes_valid_choices(name: str) -> None:
    policy, (prefill, decode) = load_policy(name, 64, Random(3)), workers({"p0": "g", "d1": "g"})
    for shape in (SHAPE, RequestShape(20, 100, {}), RequestShape(500, 1, {}), RequestShape(500, 100, {}, alone=True)):
        choice = policy.choose(prefill, decode, shape, 0.0)
        assert choice is not None and choice_error(choice, prefill, decode, shape) == ""
        first = policy.choose_prefill(prefill, decode[0], shape, 0.0)
        assert first is None or (first.address == "p1" and not shape.alone)
    assert policy.choose(prefill, [], SHAPE, 0.0) is None


def test_the_possible_choices_are_those_that_fit() -> None:
    prefill, decode = workers({"p0": "g", "d1": "g"})
    pairs = [
        (choice.prefill and choice.prefill.address, choice.decode and choice.decode.address)
        for choice in possible_choices(prefill, decode, SHAPE)
    ]
    assert pairs == [(None, "d0"), ("p1", "d0"), (None, "d1"), ("p0", "d1")]
    for shape in (SHAPE, RequestShape(500, 1, {}), RequestShape(500, 100, {}, alone=True)):
        every = [Choice(first, then) for first in (None, *prefill) for then in (None, *decode)]
        fits = [one for one in every if not choice_error(one, prefill, decode, shape)]
        found = list(possible_choices(prefill, decode, shape))
        assert len(found) == len(fits) and all(one in fits for one in found)


class Scripted(Policy):
    """Returns, or raises, what it is told."""

    answer: Choice | Exception | None = None

    def choose(
        self, prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape, now: float
    ) -> Choice | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def guarded(answer: Choice | Exception | None) -> tuple[GuardedPolicy, list[None]]:
    policy, errors = Scripted(), list[None]()
    policy.answer = answer
    return GuardedPolicy(policy, lambda: errors.append(None)), errors


def test_a_choice_without_a_forecast_gets_one() -> None:
    prefill, decode = workers()
    policy, errors = guarded(Choice(prefill[1], decode[1]))
    choice = policy.choose(prefill, decode, SHAPE, 0.0)
    assert choice == Choice(prefill[1], decode[1], predict(prefill[1], decode[1], SHAPE, 0.0)) and not errors
    assert choice.forecast.prompt_s > 0 and choice.forecast.token_s > 0


def test_none_makes_the_request_wait() -> None:
    policy, errors = guarded(None)
    assert policy.choose(*workers(), SHAPE, 0.0) is None and not errors


@pytest.mark.parametrize("case", ("raises", "nobody", "stranger", "no decode", "layouts", "two for one", "no choice"))
def test_the_built_in_policy_decides_for_one_that_fails(case: str, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = workers({"p0": "g"})
    strangers, shape = workers()[1], RequestShape(500, 100, {}, alone=case == "two for one")
    policy, errors = guarded(
        {
            "raises": ZeroDivisionError("mine"),
            "nobody": Choice(None, None),
            "stranger": Choice(None, strangers[0]),
            "no decode": Choice(prefill[1], None),
            "layouts": Choice(prefill[0], decode[0]),
            "two for one": Choice(prefill[1], decode[0]),
            "no choice": "d0",  # type: ignore[dict-item]
        }[case]
    )
    with caplog.at_level(logging.ERROR):
        for now in (0.0, 1.0, 61.0):
            assert policy.choose(prefill, decode, shape, now) == RoutingPolicy().choose(prefill, decode, shape, now)
    assert len(errors) == 3
    assert [record.getMessage()[:31] for record in caplog.records] == ["routing policy Scripted failed,"] * 2


def test_a_new_prefill_worker_is_guarded_too() -> None:
    prefill, decode = workers({"p0": "g"})
    policy, errors = guarded(Choice(prefill[1], decode[0]))
    assert policy.choose_prefill(prefill, decode[0], SHAPE, 0.0) is prefill[1] and not errors
    policy, errors = guarded(Choice(prefill[0], decode[0]))
    assert policy.choose_prefill(prefill, decode[0], SHAPE, 0.0) is prefill[1] and len(errors) == 1
    policy, errors = guarded(ValueError())
    assert policy.choose_prefill(prefill, decode[0], SHAPE, 0.0) is prefill[1] and len(errors) == 1


@pytest.mark.parametrize("name", [name for name in POLICIES if POLICIES[name] is not RoutingPolicy])
def test_workers_that_keep_failing_are_left_out_while_there_are_others(name: str) -> None:
    """They fail fast, and so look idle."""
    (prefill, decode), policy = workers(), GuardedPolicy(load_policy(name, 64, Random(3)))
    decode[0].life.suspect = prefill[0].life.suspect = True
    for _ in range(20):
        choice = policy.choose(prefill, decode, SHAPE, 0.0)
        assert choice is not None and choice.prefill in (None, prefill[1]) and choice.decode is decode[1]
        assert policy.choose_prefill(prefill, decode[1], SHAPE, 0.0) in (None, prefill[1])
    decode[1].life.suspect = prefill[1].life.suspect = True
    assert policy.choose(prefill, decode, SHAPE, 0.0) is not None
