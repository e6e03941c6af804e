from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.load.input_file import read_table
from benchmarks.plan.spec import merged, spec_of
from common.errors import ConfigError

from .conftest import make_spec, make_values


@pytest.mark.parametrize(
    ("more", "field"),
    (
        ({"goals": {"ttft_ms": 0.0, "tpot_ms": 0.0}}, "goals.ttft_ms"),
        ({"goals": {"quantile": 1.0}}, "goals.quantile"),
        ({"load": {"rate": 0.0}}, "load.rate"),
        ({"load": {"rates": [[0, 3]], "rate": 0.0}, "duration_s": 0.0}, "duration_s"),
        ({"decode": {"price": -1.0}}, "decode.price"),
        ({"decode": {"most": 0}}, "decode.most"),
        ({"bounds": {"max_cost": 0.5}}, "bounds.max_cost"),
        ({"bounds": {"max_worker": 3}}, "bounds"),
        ({"search": {"max_num_seqs": [8, 0]}}, "search.max_num_seqs[1]"),
        (
            {"prefill": {"coefficients": {"token_s": 0.0}}, "decode": {"coefficients": {"token_s": 0.0}}},
            "prefill.coeff",
        ),
    ),
)
def test_bad_input_names_its_field(more: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_spec(**more)
    assert refused.value.field.startswith(field)


def test_a_load_at_a_rate_lasts_for_about_600_requests() -> None:
    assert make_spec(duration_s=0.0, load={"rate": 2.0}).arrivals_s == 300.0
    assert make_spec(duration_s=0.0, load={"rate": 100.0}).arrivals_s == 60.0


def test_tables_are_merged_by_their_keys() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"c": 3}, "d": [2]}) == {"a": {"b": 1, "c": 3}, "d": [2]}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    (
        ("a.toml", "= 1", "is not valid TOML: "),
        ("a.json", "{", "is not valid JSON: "),
        ("b.json", "[1]", "has no table"),
    ),
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{name} {problem}"):
        read_table(tmp_path / name, "plan")


def test_the_examples_are_read(repository: Path) -> None:
    found = [
        spec_of(read_table(file, "plan")) for file in sorted((repository / "benchmarks" / "data").glob("plan*.toml"))
    ]
    assert found and all(spec.bounds.max_workers <= 16 for spec in found)
    assert spec_of(make_values()).prefill.price == 1.0
