from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.config import PrefillWorkerConfig, RouterConfig
from common.config.sources import read
from common.errors import ConfigError
from router.access.keys import Limits
from router.models.models_file import ModelEntry, Split, read_models, settings_of, table_of

FILE = """
[[model]]
model = "org/small"
name = "small"
aliases = ["fast"]
fallbacks = ["large"]
chat_template = "small.jinja"
requests_per_minute = 600
concurrent_requests = 3

[[model]]
model = "large"
hold = false

[[split]]
name = "chat"
weights = { small = 95, large = 5 }
"""


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "models.toml"
    file.write_text(text)
    return str(file)


def test_a_file_of_models(tmp_path: Path) -> None:
    table = read_models(write(tmp_path, FILE))
    limits = Limits(requests_per_minute=600, concurrent_requests=3)
    small = ModelEntry("org/small", "small", ("fast",), ("large",), limits=limits, chat_template="small.jinja")
    assert table.models == (small, ModelEntry("large", holds=False))
    assert table.splits == (Split("chat", {"small": 95.0, "large": 5.0}),)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", r"at least one \[\[model\]\]"),
        ("[[models]]\nmodel='a'", "without 'models'"),
        ("[[model]]\nname='a'", "model 1: model must be a name"),
        ("[[model]]\nmodel='a'\nalias='b'", "model 1: alias must be one of the fields model, name"),
        ("[[model]]\nmodel='a'\naliases=['b c']", "model 1: aliases must be"),
        ("[[model]]\nmodel='a'\nhold=1", "model 1: hold must be true or false"),
        ("[[model]]\nmodel='a'\ntokens_per_minute=-1", "model 1: tokens_per_minute must be"),
        ("[[model]]\nmodel='a'\n[[split]]\nname='s'", "split 1: weights must be"),
        (
            "[[model]]\nmodel='a'\n[[split]]\nname='s'\nweights={a=0}",
            "split 1: weights must be a table with at least one number above 0",
        ),
        ("[[model]]\nmodel='a'\n[[split]]\nname='s'\nweights={a=inf}", "split 1: weights.a must be a number from 0"),
        (
            "[[model]]\nmodel='a'\nreasoning_end=' </a>'",
            "model 1: reasoning_end must be a text of up to 256 characters",
        ),
        ("[[model]]\nmodel='a'\nslo_ttft_ms='1 s'", "model 1: slo_ttft_ms must be 0 .* milliseconds"),
        ("[[model]]\nmodel='a'\nslo_tpot_ms=nan", "model 1: slo_tpot_ms must be 0 .* milliseconds"),
        ("[[model]]\nmodel='a'\nmin_decode=1.5", "model 1: min_decode must be 0 to 1024"),
        ("[[model]]\nmodel='a'\nprice_prefill=0", "model 1: price_prefill must be 0.001 to"),
        (
            "[[model]]\nmodel='a'\ndecode_deployment='Not/A/Name'",
            "model 1: decode_deployment must be a valid Kubernetes name",
        ),
        ("[[model]]\nmodel='a'\nmax_cost=3", "model 1: max_cost must be one of the fields model, name"),
        ("[[model]\n", "a valid TOML file"),
    ],
)
def test_a_file_with_an_error_names_the_place(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_models(write(tmp_path, text))


def test_marks_of_thoughts_are_those_of_a_model(tmp_path: Path) -> None:
    text = "[[model]]\nmodel='a'\nreasoning_start='Let me think:'\nreasoning_end='◁/think▷'\n[[model]]\nmodel='b'"
    file = write(tmp_path, text)
    models = dict(zip("ab", read_models(file).models, strict=True))
    marked, plain = settings_of(
        router_of("--models-file", file, "--reasoning-start", "<a>", "--reasoning-end", "</a>"), models
    )
    assert (marked.reasoning_start, marked.reasoning_end) == ("Let me think:", "◁/think▷")
    assert (plain.reasoning_start, plain.reasoning_end) == ("<a>", "</a>")
    forced, free = (
        [one.reasoning_in_form for one in settings_of(router_of("--models-file", file, *flags), given)]
        for flags, given in (
            (("--reasoning-in-form",), {"a": replace(models["a"], reasoning_in_form=False), "b": models["b"]}),
            ((), {"a": replace(models["a"], reasoning_in_form=True), "b": models["b"]}),
        )
    )
    assert (forced, free) == ([False, True], [True, False])
    models["a"] = replace(models["a"], reasoning_end="")
    with pytest.raises(ConfigError, match="a valid a: reasoning_end must be a text, because"):
        settings_of(router_of("--models-file", file), models)


def test_settings_of_the_planner_are_those_of_a_model(tmp_path: Path) -> None:
    text = "[[model]]\nmodel='a'\nmin_prefill=0\nmax_decode=8\nprice_decode=4\ndecode_deployment='leaderworkersets/a-d'"
    (entry,) = read_models(write(tmp_path, text)).models
    assert entry.planned == {
        "min_prefill": 0,
        "max_decode": 8,
        "price_decode": 4.0,
        "decode_deployment": "leaderworkersets/a-d",
    }


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_models(str(tmp_path / "none.toml"))


def router_of(*flags: str, **environ: str) -> RouterConfig:
    return read(RouterConfig, [*flags, "--decode", "tcp://127.0.0.1:1"], environ=environ)


def test_one_model_is_what_it_was() -> None:
    config = router_of("--model", "a", "--served-model-name", "mine")
    assert table_of(config).models == (ModelEntry("a", "mine"),)


def test_several_models_are_named_by_a_file_only() -> None:
    with pytest.raises(
        ConfigError,
        match=r"option --model is given 2 times \(a, b\): a worker serves one model, a router several",
    ):
        router_of("--model", "a", "--model=b")
    with pytest.raises(ConfigError, match="option --model is given 2 times"):
        read(PrefillWorkerConfig, ["--model", "a", "--model", "b"], environ={})


@pytest.mark.parametrize(
    "flags",
    [
        ("--models-file", "m.toml", "--served-model-name", "c"),
        ("--models-file", "m.toml", "--model", "a"),
        ("--models-file", "m.toml", "--chat-template", "a.jinja"),
    ],
)
def test_settings_that_exclude_each_other(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        router_of(*flags)


def test_the_example_of_the_documentation_is_read(tmp_path: Path, repository: Path) -> None:
    page = (repository / "docs" / "guides" / "serve-your-model.md").read_text(encoding="utf-8")
    example = page.partition("```toml\n# models.toml\n")[2].partition("```")[0]
    table = read_models(write(tmp_path, example))
    assert [entry.name for entry in table.models] == ["small", "large"]
    assert (table.models[0].fallbacks, table.splits[0].weights) == (("large",), {"small": 95.0, "large": 5.0})
