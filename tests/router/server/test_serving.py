"""What a router is put together from: one model or several, and the file that names them, which may change."""

from __future__ import annotations

import asyncio
import json
import os
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.config import RouterConfig
from common.errors import ConfigError, ModelNotFound
from common.machine import FOLDER_LOCK
from common.model_files.tiny import make_tiny_model
from router.access.access_control import ClientRequest
from router.access.errors import RateLimited
from router.access.keys import ANONYMOUS, Limits
from router.models.models_file import ModelEntry, check_planned, settings_of
from router.server.serving import Serving
from router.siblings.part import RouterPart

from ...kubernetes_api import KubernetesAPI

TEMPLATE = "{{ messages[-1].content }}"
FILE = """
[[model]]
model = "tiny-random"
name = "small"
aliases = ["old"]

[[model]]
model = "{folder}"
hold = false
tool_parser = "none"
chat_template = "{folder}/given.jinja"
slo_tpot_ms = 40
prefill = false
"""


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Any]:
    """Makes a `Serving` of a file, which is closed."""
    made: list[Serving] = []
    folder = make_tiny_model(tmp_path / "large", seed=3)
    (folder / "given.jinja").write_text(TEMPLATE)

    def make(text: str | None = FILE, part: RouterPart | None = None, **settings: Any) -> tuple[Serving, Path]:
        file = tmp_path / "models.toml"
        if text is not None:
            file.write_text(text.format(folder=folder))
        settings = {
            "decode": ("tcp://127.0.0.1:1",),
            "prefill": ("tcp://127.0.0.1:2",),
            "response_store": "memory",
            "models_file": str(file),
        } | settings
        made.append(Serving(RouterConfig(**settings), part=part))
        return made[-1], file

    yield make
    for one in made:
        await one.app.state.responses.close()
        one.app.state.router_state.access.close()
        await one.close()


async def test_each_model_has_settings_of_its_own_and_all_share_the_threads(serving: Any) -> None:
    found, _ = serving()
    small, large = found.app.state.router_state.models.served.values()
    assert (small.name, large.name) == ("small", "large")
    assert (small.config.tool_parser, large.config.tool_parser) == ("auto", "none")
    assert small.text.chat_template != TEMPLATE and large.text.chat_template == TEMPLATE
    assert [one.config.classes["default"].tpot_s for one in (small, large)] == [0.0, 0.04]
    assert [one.dispatcher.core.has_prefill for one in found.models] == [True, False]
    assert small.text._threads is large.text._threads


async def test_an_architecture_that_only_other_engines_know_is_served(serving: Any, tmp_path: Path) -> None:
    config = tmp_path / "large" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "new_model"}))
    found, _ = serving('[[model]]\nmodel = "{folder}"\n')
    model = found.app.state.router_state.models.default
    assert (model.name, model.text.eos_token_ids) == ("large", (259, 257))
    assert model.max_model_len == json.loads(config.read_text())["max_position_embeddings"]
    assert await model.text.encode("hello")


async def test_one_model_of_a_file_has_no_front_and_no_census(serving: Any) -> None:
    found, _ = serving('[[model]]\nmodel = "tiny-random"\nname = "small"\naliases = ["old"]\n')
    router_state = found.app.state.router_state
    assert found.census is None and len(router_state.models.served) == 1
    assert router_state.models.one("old") is router_state.models.one(None) is router_state.models.default
    assert [router_state.models.name_of(name, "small") for name in ("old", "tiny-random")] == ["small", "tiny-random"]


async def test_a_changed_file_changes_names_splits_and_limits(serving: Any, tmp_path: Path) -> None:
    found, file = serving()
    router_state = found.app.state.router_state
    watching = asyncio.create_task(router_state.access.watch())
    changed = FILE.replace('aliases = ["old"]', 'aliases = ["new"]\nrequests_per_minute = 5')
    changed += '[[split]]\nname = "chat"\nweights = {{ small = 1, large = 0 }}\n'
    file.write_text(changed.format(folder=tmp_path / "large"))
    router_state.access.reload()
    async with asyncio.timeout(60):
        while not router_state.models.catalog.has("new"):  # noqa: ASYNC110 (no event tells of it)
            await asyncio.sleep(0.01)
    watching.cancel()
    assert router_state.models.one("chat").name == router_state.models.one("new").name == "small"
    assert router_state.access.models._of_all["small"].quota.limits == Limits(requests_per_minute=5)
    with pytest.raises(ModelNotFound):
        router_state.models.one("old")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *[('"tiny-random"', '"tiny-gemma3"'), ('name = "small"', 'name = "tiny"'), ('"none"', '"hermes"')],
        ("slo_tpot_ms = 40", "slo_tpot_ms = 50"),
        ("prefill = false", ""),
        ("prefill = false", "prefill = false\nmax_decode = 4"),
    ],
)
async def test_other_models_need_a_restart(serving: Any, tmp_path: Path, old: str, new: str) -> None:
    found, file = serving()
    file.write_text(FILE.replace(old, new).format(folder=tmp_path / "large"))
    with pytest.raises(ConfigError, match="the same models"):
        await found._read_anew()
    assert found.app.state.router_state.models.one("old").name == "small"


PLANNED = FILE.replace('aliases = ["old"]', 'decode_deployment = "small-decode"\nmax_decode = 4\nprice_decode = 2.5')


async def test_models_are_planned_by_settings_of_their_own_within_one_budget(
    serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One names the Deployment that its router scales, the other is scaled by others."""
    api = KubernetesAPI(tmp_path / "serviceaccount").start()
    cluster = {"kubernetes_api": api.url, "kubernetes_credentials": str(api.folder)}
    found, _ = serving(PLANNED, planner="kubernetes", max_cost=9.0, **cluster)
    api.stop()
    small, large = (model.config for model in found.models)
    assert (small.planner, small.decode_deployment, small.planner_lease) == (
        "kubernetes",
        "small-decode",
        "diptych-planner-1",
    )
    assert (small.most("decode"), small.price_decode) == (4, 2.5)
    assert (large.planner, large.most("decode"), large.price_decode) == ("advice", 64, 1.0)
    planners = [model.planning._planner for model in found.models]
    assert planners[0]._budget is planners[1]._budget
    assert [planner._model for planner in planners] == ["small", "large"]


@pytest.mark.parametrize(
    ("text", "settings", "why"),
    [
        (
            PLANNED,
            {"decode_deployment": "d", "max_decode": 4},
            "decode_deployment='d': must be empty with several",
        ),
        (FILE, {}, "a decode_deployment for a model, for --planner kubernetes"),
        (
            PLANNED.replace("max_decode = 4", "max_decode = 0"),
            {},
            "a valid small: max_decode must be at least 1 with --planner kubernetes",
        ),
        (
            PLANNED,
            {"max_cost": 3.0},
            "max_cost=3.0: must be 0 or at least 3.5, the cost of the minimum number of workers of all models",
        ),
    ],
)
def test_plans_of_several_models_that_do_not_fit_together_are_refused(
    serving: Any, text: str, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        serving(text, planner="kubernetes", **settings)


@pytest.mark.parametrize("more", ["", "decode_deployment = 'd'\nmax_decode = 4\nplanner_lease = 'mine'"])
def test_one_model_has_the_lease_that_is_named(more: str) -> None:
    """Its right to use a Lease is for that name."""
    config = RouterConfig(
        planner="kubernetes",
        decode_deployment="" if more else "d",
        max_decode=4,
        models_file="m",
        planner_lease="given",
    )
    planned = dict(tomllib.loads(more))
    (own,) = settings_of(config, {"m": ModelEntry("m", planned=planned)})
    assert (own.planner, own.planner_lease) == ("kubernetes", "mine" if more else "given")


def test_a_file_of_one_model_must_name_its_deployment_too() -> None:
    config = RouterConfig(planner="kubernetes", models_file="m")
    with pytest.raises(ConfigError, match="a decode_deployment for a model"):
        check_planned(config, settings_of(config, {"m": ModelEntry("m")}))


async def test_no_prefill_pool_is_planned_for_a_model_that_has_none(serving: Any, tmp_path: Path) -> None:
    """Discovery may find prefill workers, of other models."""
    (tmp_path / "workers.json").write_text("{}")
    found, _ = serving(
        planner="advice", prefill=(), decode=(), discovery="file", discovery_file=str(tmp_path / "workers.json")
    )
    assert [one.dispatcher.core.has_prefill for one in found.models] == [True, False]
    assert [one.planning._roles for one in found.models] == [("prefill", "decode"), ("decode",)]


def test_several_models_name_their_own_deployments() -> None:
    config = RouterConfig(models_file="m.toml", planner="kubernetes", decode_deployment="decode", max_decode=4)
    with pytest.raises(ConfigError, match="for each model in --models-file"):
        check_planned(config, [config, config])


@pytest.fixture
def parts(tmp_path: Path) -> tuple[RouterPart, ...]:
    (tmp_path / FOLDER_LOCK).touch()
    return tuple(RouterPart(index, 2, tmp_path) for index in range(2))


@pytest.mark.slow
async def test_processes_of_a_router_grant_the_limits_of_a_model_together(serving: Any, parts: Any) -> None:
    text = FILE.replace('aliases = ["old"]', "requests_per_minute = 3")
    gates = [serving(text, part=part)[0].app.state.router_state.access for part in parts]
    visits = [ClientRequest(str(number), "POST", "/", "client", ANONYMOUS) for number in range(4)]
    for number, client_request in enumerate(visits[:3]):
        gates[number % 2].models.enter(client_request, "small")
    for access in gates:
        with pytest.raises(RateLimited, match="model 'small': limit 3 requests per minute for all keys together"):
            access.models.enter(visits[3], "small")


@pytest.mark.slow
async def test_a_process_that_is_started_again_goes_by_the_file_that_the_others_accepted(
    serving: Any, parts: Any, tmp_path: Path
) -> None:
    found, file = serving(part=parts[0])
    accepted = FILE.replace('"old"', '"new"').format(folder=tmp_path / "large")
    file.write_text(accepted)
    await found._read_anew()
    file.write_text(accepted.replace('"tiny-random"', '"tiny-gemma3"').replace('"new"', '"third"'))
    with pytest.raises(ConfigError, match="the same models"):
        await found._read_anew()
    again, _ = serving(None, part=parts[1])
    assert again.app.state.router_state.models.one("new").name == "small"
    assert not again.app.state.router_state.models.catalog.has("third")
    assert [again._source.watch.look() for _ in range(2)] == [True, False]  # it tries what the others refused, once
    with pytest.raises(ConfigError, match="the same models"):
        await again._read_anew()
    file.write_text("[[model]\n")
    third, _ = serving(None, part=parts[1])
    assert third.app.state.router_state.models.one("new").name == "small"


@pytest.mark.slow
async def test_all_processes_say_the_same_of_a_model(serving: Any, parts: Any, tmp_path: Path) -> None:
    os.utime(tmp_path / FOLDER_LOCK, (1234, 1234))
    assert [serving(part=part)[0].app.state.router_state.created for part in parts] == [1234, 1234]


@pytest.mark.parametrize(("task", "missing"), [("embed", "prefill"), ("generate", "decode")])
def test_a_model_needs_workers_of_the_role_that_its_task_needs(task: Any, missing: str) -> None:
    other = {"embed": "decode", "generate": "prefill"}[task]
    with pytest.raises(ConfigError, match=missing):
        Serving(RouterConfig(model="tiny-random", task=task, **{other: ("tcp://127.0.0.1:1",)}))
