from __future__ import annotations

import pytest

from common.wire.message_fields import Role
from router.fleet.discovery import Endpoint, effective_endpoints


def at(role: Role, number: int, **conditions: bool) -> Endpoint:
    return Endpoint(role, f"tcp://10.0.0.{number}:7001", **conditions)


def test_one_that_serves_is_enough_to_believe_the_others() -> None:
    endpoints = [at("decode", 1), at("decode", 2, serving=False), at("prefill", 3)]
    assert effective_endpoints(endpoints) == (endpoints, frozenset())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_of_which_none_serves_is_used_and_the_other_untouched(role: Role) -> None:
    other: Role = "decode" if role == "prefill" else "prefill"
    rest = [at(other, 1), at(other, 2, serving=False), at(role, 3, serving=False, terminating=True)]
    used, doubted = effective_endpoints([at(role, 4, serving=False), at(role, 5, serving=False), *rest])
    assert doubted == {role}
    assert used == [at(role, 4), at(role, 5), *rest]


def test_those_that_end_say_nothing_of_the_others() -> None:
    used, doubted = effective_endpoints([at("decode", 1, terminating=True), at("decode", 2, serving=False)])
    assert [endpoint.withheld for endpoint in used] == ["terminating", ""] and doubted == {"decode"}
    assert effective_endpoints([at("decode", 1, serving=False, terminating=True)])[1] == frozenset()
