"""What a router is put together from: one model or several, and the file that names them, which may change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.config import RouterConfig
from common.errors import ConfigError, ModelNotFound
from common.model_files.tiny import make_tiny_model
from router.auth.keys import Limits
from router.server.serving import Serving
from router.siblings.part import RouterPart

FILE = """
[[model]]
model = "tiny-random"
name = "small"
aliases = ["old"]

[[model]]
model = "{folder}"
hold = false
tool_parser = "none"
"""


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Any]:
    """Makes a `Serving` of a file, which is closed."""
    made: list[Serving] = []
    folder = make_tiny_model(tmp_path / "large", seed=3)

    def make(text: str = FILE, **settings: Any) -> tuple[Serving, Path]:
        file = tmp_path / "models.toml"
        file.write_text(text.format(folder=folder))
        settings = {"decode": ("tcp://127.0.0.1:1",), "response_store": "memory", "models_file": str(file)} | settings
        made.append(Serving(RouterConfig(**settings)))
        return made[-1], file

    yield make
    for one in made:
        await one.app.state.responses.close()
        one.app.state.service.gate.close()
        await one.close()


async def test_each_model_has_settings_of_its_own_and_all_share_the_threads(serving: Any) -> None:
    found, _ = serving()
    small, large = found.app.state.service.models.services.values()
    assert (small.model_name, large.model_name) == ("small", "large")
    assert (small.config.tool_parser, large.config.tool_parser) == ("auto", "none")
    assert small.text._threads is large.text._threads
    assert small.gate is large.gate is found.app.state.service.gate


async def test_one_model_of_a_file_has_no_front_and_no_census(serving: Any) -> None:
    found, _ = serving('[[model]]\nmodel = "tiny-random"\nname = "small"\naliases = ["old"]\n')
    service = found.app.state.service
    assert found.census is None and service.front is None
    assert service.models.one("old") is service.models.one(None) is service
    assert service.check_model("old") == "small" and service.check_model("tiny-random") == "tiny-random"


async def test_a_changed_file_changes_names_splits_and_limits(serving: Any, tmp_path: Path) -> None:
    found, file = serving()
    service = found.app.state.service
    watching = asyncio.create_task(service.gate.watch())
    changed = FILE.replace('aliases = ["old"]', 'aliases = ["new"]\nrequests_per_minute = 5')
    changed += '[[split]]\nname = "chat"\nweights = {{ small = 1, large = 0 }}\n'
    file.write_text(changed.format(folder=tmp_path / "large"))
    service.gate.reload()
    async with asyncio.timeout(60):
        while not service.models.catalog.knows("new"):  # noqa: ASYNC110 (no event tells of it)
            await asyncio.sleep(0.01)
    watching.cancel()
    assert service.models.one("chat").model_name == service.models.one("new").model_name == "small"
    assert service.gate.models._of_all["small"].quota.limits == Limits(requests_per_minute=5)
    with pytest.raises(ModelNotFound):
        service.models.one("old")


@pytest.mark.parametrize(
    ("old", "new"), [('"tiny-random"', '"tiny-gemma3"'), ('name = "small"', 'name = "tiny"'), ('"none"', '"hermes"')]
)
async def test_other_models_need_a_restart(serving: Any, tmp_path: Path, old: str, new: str) -> None:
    found, file = serving()
    file.write_text(FILE.replace(old, new).format(folder=tmp_path / "large"))
    with pytest.raises(ConfigError, match="the same models"):
        await found._read_anew()
    assert found.app.state.service.models.one("old").model_name == "small"


def test_one_router_cannot_scale_the_deployments_of_several_models() -> None:
    config = RouterConfig(
        model="tiny-random", more_models=("other",), planner="kubernetes", decode_deployment="decode", max_decode=4
    )
    with pytest.raises(ConfigError, match="a router for each model"):
        Serving(config)


def test_several_models_are_served_by_one_process(tmp_path: Path) -> None:
    config = RouterConfig(model="tiny-random", more_models=("other",), decode=("tcp://127.0.0.1:1",))
    with pytest.raises(ConfigError, match="router_processes=2 is refused: 1 with several models"):
        Serving(config, part=RouterPart(0, 2, tmp_path))


@pytest.mark.parametrize(("task", "missing"), [("embed", "prefill"), ("generate", "decode")])
def test_a_model_needs_workers_of_the_role_that_its_task_needs(task: Any, missing: str) -> None:
    other = {"embed": "decode", "generate": "prefill"}[task]
    with pytest.raises(ConfigError, match=missing):
        Serving(RouterConfig(model="tiny-random", task=task, **{other: ("tcp://127.0.0.1:1",)}))
