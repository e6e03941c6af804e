from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError, InvalidRequest
from router.access.access_control import ClientRequest
from router.access.errors import RateLimited
from router.access.keys import ANONYMOUS, ApiKey, Limits, read_keys
from router.access.limits import ModelLimits


class World:
    """Limits at a moment that the test sets."""

    def __init__(self, **limits: Limits) -> None:
        self.now, self.limited = 1000.0, list[tuple[str, str]]()
        self.limits = ModelLimits(lambda key, limit: self.limited.append((key, limit)), lambda: self.now)
        self.limits.change(limits)

    def enter(self, model: str, key: ApiKey = ANONYMOUS) -> ClientRequest:
        client_request = ClientRequest("id", "POST", "/", "client", key)
        self.limits.enter(client_request, model)
        return client_request


def test_a_model_without_limits_counts_nothing() -> None:
    assert World().enter("a").model_quotas == ()


def test_a_limit_is_of_its_model_alone_and_comes_back_with_time() -> None:
    world = World(a=Limits(requests_per_minute=2), b=Limits(requests_per_minute=2))
    world.enter("a"), world.enter("a")
    with pytest.raises(RateLimited, match="model 'a': limit 2 requests per minute for all keys together. .* in 30 s"):
        world.enter("a")
    world.enter("b")
    world.now += 30
    world.enter("a")
    assert world.limited == [("", "model_requests")]


def test_both_limits_count_and_a_refusal_by_one_leaves_the_other_as_it_was() -> None:
    world = World(a=Limits(concurrent_requests=5))
    key = ApiKey("alice", (), by_model=(("a", Limits(concurrent_requests=1)),))
    first = world.enter("a", key)
    with pytest.raises(RateLimited, match="key 'alice' at model 'a': limit 1 concurrent requests") as refused:
        world.enter("a", key)
    assert refused.value.of_key and world.limited == [("alice", "key_model_concurrency")]
    assert world.limits._of_all["a"].quota.num_active == 1
    world.limits.leave(first)
    world.limits.leave(first)  # once is enough
    assert world.limits._of_all["a"].quota.num_active == 0
    world.enter("a", key)


def test_a_prompt_that_one_limit_refuses_is_not_counted_by_the_other() -> None:
    world = World(a=Limits(tokens_per_minute=100))
    key = ApiKey("alice", (), by_model=(("a", Limits(tokens_per_minute=50)),))
    client_request = world.enter("a", key)
    world.limits.take_prompt(client_request, 30)
    with pytest.raises(RateLimited):
        world.limits.take_prompt(client_request, 30)
    with pytest.raises(InvalidRequest, match="The prompt has 60 tokens, but key 'alice' at model 'a' is limited to 50"):
        world.limits.take_prompt(client_request, 60)
    world.limits.spend(client_request, -30)
    world.limits.take_prompt(world.enter("a"), 100)


def test_changed_limits_keep_what_is_used() -> None:
    world = World(a=Limits(requests_per_minute=2))
    world.enter("a"), world.enter("a")
    world.limits.change({"a": Limits(requests_per_minute=3), "b": Limits(requests_per_minute=1)})
    world.enter("a"), world.enter("b")
    for model in "ab":
        with pytest.raises(RateLimited):
            world.enter(model)
    world.limits.change({"a": Limits()})
    world.enter("a")


def test_limits_of_a_changed_key_file() -> None:
    world = World()
    key = ApiKey("alice", (), by_model=(("a", Limits(requests_per_minute=1)),))
    world.limits.leave(world.enter("a", key))
    more = ApiKey("alice", (), by_model=(("a", Limits(requests_per_minute=2)),))
    world.limits.change_keys([more])
    world.limits.leave(world.enter("a", more))
    with pytest.raises(RateLimited):
        world.enter("a", more)
    world.limits.change_keys([])
    assert not world.limits._of_keys


HEAD = '[[key]]\nname = "alice"\nkey = "a-key-of-sixteen-or-more"\n'


def test_models_in_the_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(HEAD + 'models = ["a", "b", "a"]\n[key.by_model.a]\ntokens_per_minute = 7\n')
    (key,) = read_keys(str(file))
    assert key.models == ("a", "b")
    assert (key.limits_at("a"), key.limits_at("b")) == (Limits(tokens_per_minute=7), Limits())


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("models = []", "line 4 must have a list of 1 to 256 model names"),
        ("models = 'a'", "line 4 must have a list of 1 to 256 model names"),
        ("by_model = 3", "line 4 must have a table of up to 256 models"),
        (
            "by_model = { a = { rpm = 3 } }",
            "line 4 must have a table of up to 256 models, each with",
        ),
        ("by_model = { a = { tokens_per_minute = -3 } }", "line 4 must have a whole number from 0"),
    ],
)
def test_mistakes_in_the_key_file(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(HEAD + line + "\n")
    with pytest.raises(ConfigError, match=why):
        read_keys(str(file))
