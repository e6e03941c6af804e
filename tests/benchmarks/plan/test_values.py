"""Values for Helm that the chart's schema takes, and that a YAML reader reads as they are meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.plan.candidate import Candidate, Flags
from benchmarks.plan.values import name_of, render, values_of
from common.errors import ConfigError

from .conftest import make_spec

FLAGS = Flags(512, 2048, 128, 256)
PICKS = (Candidate(2, 3, FLAGS), Candidate(0, 2, FLAGS))


def broken(values: Any, repository: Path) -> list[str]:
    import jsonschema

    schema = json.loads((repository / "helm" / "values.schema.json").read_text(encoding="utf-8"))
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(values)]


@pytest.mark.parametrize("pick", PICKS, ids=("two pools", "one pool"))
def test_the_charts_schema_takes_them(repository: Path, pick: Candidate) -> None:
    spec = make_spec(prefill={"max_num_seqs": 16}, settings={"max_wait_s": 20.0}, routers=2)
    values = values_of(spec, pick, "meta-llama/Llama-3.1-8B-Instruct")
    assert yaml.safe_load(render(values, ["Why: it is cheap."])) == values
    assert not broken(values, repository)
    assert broken(values | {"prefil": {}}, repository)
    assert list(values["models"]) == ["llama-3-1-8b-instruct"]
    prefill, decode = (values[role]["pools"]["default"] for role in ("prefill", "decode"))
    assert decode["replicas"] == pick.num_decode and decode["settings"]["max_num_seqs"] == 128
    assert prefill == {"enabled": False} if pick.is_one_pool else prefill["replicas"] == 2


def test_a_block_size_that_no_worker_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        values_of(make_spec(model={"block_size": 512}), PICKS[0], "m")


@pytest.mark.parametrize(
    ("model", "name"),
    (("smollm2-135m", "smollm2-135m"), ("A/b_C.gguf", "b-c-gguf"), ("/", "model"), ("x" * 50, "x" * 40)),
)
def test_names_are_those_of_kubernetes(model: str, name: str) -> None:
    assert name_of(model) == name


@pytest.mark.parametrize("value", ("yes", "1", "a: b", "# c", "", "- d", 0.5, 3.0, True, None, [], {}, [1, [2]], "é"))
def test_what_is_written_is_read_back(value: Any) -> None:
    table = {"key": value, "list": [{"a": value, "b": [value]}]}
    assert yaml.safe_load(render(table, [])) == table
