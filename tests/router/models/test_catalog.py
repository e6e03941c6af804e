from __future__ import annotations

from collections import Counter

import pytest

from common.errors import ConfigError, ModelNotFound
from router.access.errors import Forbidden
from router.access.keys import ApiKey
from router.models.catalog import Catalog, draw
from router.models.models_file import ModelEntry, ModelTable, Split

SMALL = ModelEntry("org/small", "small", aliases=("fast",), fallbacks=("large",))
LARGE = ModelEntry("/models/large", aliases=("best",), fallbacks=("spare", "small"))
SPARE = ModelEntry("spare")
CHAT = Split("chat", {"small": 90.0, "large": 10.0, "spare": 0.0})


def catalog(*splits: Split) -> Catalog:
    return Catalog(ModelTable((SMALL, LARGE, SPARE), splits or (CHAT,)), ("org/small", "large", "spare"))


def key_for(*models: str) -> ApiKey:
    return ApiKey("alice", (), models=models)


@pytest.mark.parametrize("name", ["small", "fast", "org/small", None])
def test_a_model_goes_by_its_name_its_aliases_and_what_it_calls_itself(name: str | None) -> None:
    assert catalog().chain(name)[0] == "small"


def test_fallbacks_follow_nearer_ones_first_and_each_once() -> None:
    assert catalog().chain("small") == ("small", "large", "spare")
    assert catalog().chain("best") == ("large", "spare", "small")
    assert catalog().chain("spare") == ("spare",)


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(
        ModelNotFound,
        match="The model 'huge' does not exist. Available models: 'small', 'fast', 'large', 'best', 'spare', 'chat'.",
    ):
        catalog().chain("huge")
    with pytest.raises(ModelNotFound, match="Available models: 'spare'.$"):
        catalog().chain("x" * 5000, key_for("spare"))


def test_a_user_stays_at_the_model_that_the_split_drew() -> None:
    split = catalog()
    drawn = {split.chain("chat", requester=f"user:{n}")[0] for n in range(50) for _ in range(3)}
    assert drawn == {"small", "large"}
    assert all(split.chain("chat", requester="user:7") == split.chain("chat", requester="user:7") for _ in range(20))


def test_a_split_draws_by_weight_and_never_what_has_none() -> None:
    drawn = Counter(draw(CHAT.weights, "chat", f"request:{n}") for n in range(10_000))
    assert drawn["small"] == pytest.approx(9000, abs=150) and drawn["spare"] == 0


def test_a_changed_weight_moves_users_only_to_the_model_that_gained() -> None:
    users = [f"user:{n}" for n in range(2000)]
    before = {user: draw({"a": 90, "b": 10}, "s", user) for user in users}
    after = {user: draw({"a": 90, "b": 30}, "s", user) for user in users}
    moved = {(before[user], after[user]) for user in users if before[user] != after[user]}
    assert moved == {("a", "b")}


def test_two_splits_draw_on_their_own() -> None:
    weights = {"a": 1.0, "b": 1.0}
    both = Counter((draw(weights, "x", str(n)), draw(weights, "y", str(n))) for n in range(4000))
    assert all(count == pytest.approx(1000, abs=120) for count in both.values()) and len(both) == 4


def test_a_key_gets_the_models_of_its_list_under_each_of_their_names() -> None:
    found, key = catalog(), key_for("small")
    assert [one.name for one in found.listed(key)] == ["small", "fast"]
    assert found.chain("fast", key) == ("small",)  # the fallback is not on the list
    assert found.chain(None, key_for("best"))[0] == "large"
    for name in ("large", "best", "chat"):
        with pytest.raises(
            Forbidden, match="The key 'alice' may not use the model .* Available models: 'small', 'fast'"
        ):
            found.chain(name, key)


def test_a_key_may_use_a_split_that_is_listed_or_whose_models_all_are() -> None:
    found = catalog()
    assert found.chain("chat", key_for("chat"), "user:1")[0] in ("small", "large")
    assert found.may_use(key_for("small", "large"), "chat")
    assert not found.may_use(key_for("small", "spare"), "chat")


def test_a_key_for_another_routers_models_gets_nothing_here() -> None:
    assert list(catalog().listed(key_for("elsewhere"))) == []
    with pytest.raises(Forbidden, match="Available models: none"):
        catalog().chain(None, key_for("elsewhere"))


@pytest.mark.parametrize(
    ("models", "splits", "what"),
    [
        ((ModelEntry("a", "x"), ModelEntry("b", "x")), (), "x"),
        ((ModelEntry("a"), ModelEntry("b", aliases=("a",))), (), "a"),
        ((ModelEntry("a"), ModelEntry("b")), (Split("a", {"b": 1.0}),), "a"),
        ((ModelEntry("a"), ModelEntry("b")), (Split("s", {"a": 1.0}), Split("s", {"b": 1.0})), "s"),
        ((ModelEntry("a", fallbacks=("c",)), ModelEntry("b")), (), "c"),
        ((ModelEntry("a"), ModelEntry("b")), (Split("s", {"c": 1.0}),), "c"),
        ((ModelEntry("a"), ModelEntry("a", "other")), (), "a"),
    ],
)
def test_a_name_that_is_taken_or_unknown_is_refused(
    models: tuple[ModelEntry, ...], splits: tuple[Split, ...], what: str
) -> None:
    with pytest.raises(ConfigError, match=f"={what!r}: must be"):
        Catalog(ModelTable(models, splits), [entry.model for entry in models])
