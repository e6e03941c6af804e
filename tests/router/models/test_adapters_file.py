"""The file of `--lora-file`: what it says, what is refused, and which model an adapter is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.wire.messages import MAX_ADAPTERS
from router.models.adapters_file import AdapterEntry, AdaptersSource, adapters_of
from router.models.catalog import Catalog
from router.models.models_file import ModelEntry, ModelTable
from router.siblings.part import RouterPart

SQL = '[[adapter]]\nname = "sql"\npath = "/adapters/sql"\n'


def test_what_a_file_says() -> None:
    text = SQL + '[[adapter]]\nname = "poems"\npath = "/adapters/poems"\nmodel = "small"\nrevision = "2"\n'
    expected = (AdapterEntry("sql", "/adapters/sql"), AdapterEntry("poems", "/adapters/poems", "small", "2"))
    assert adapters_of("f", text.encode()) == expected


@pytest.mark.parametrize("text", ["", "adapter = []", "\ufeff# none"])
def test_a_file_may_name_none(text: str) -> None:
    assert adapters_of("f", text.encode()) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[adapter", "a valid TOML file"),
        ("[[model]]\n", "unknown field `model`"),
        ("[adapter]\n", r"Expected `array`, got `object` - at `\$.adapter`"),
        ('[[adapter]]\nname = "a"\n', r"missing required field `path` - at `\$.adapter\[0\]`"),
        (SQL + "rank = 3\n", r"unknown field `rank` - at `\$.adapter\[0\]`"),
        (SQL + '[[adapter]]\nname = "a b"\npath = "/x"\n', r"matching regex .* - at `\$.adapter\[1\].name`"),
        ('[[adapter]]\nname = "a"\npath = ""\n', r"length >= 1 - at `\$.adapter\[0\].path`"),
        ('[[adapter]]\nname = "a"\npath = 3\n', r"got `int` - at `\$.adapter\[0\].path`"),
        (SQL + SQL, "unique adapter names; 'sql' occurs twice"),
        ("#" * (1024 * 1024 + 1), "at most 1,048,576 bytes"),
        (
            "".join(f'[[adapter]]\nname = "a{i}"\npath = "/a"\n' for i in range(MAX_ADAPTERS + 1)),
            f"length <= {MAX_ADAPTERS}",
        ),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"lora_file='f': must be .*{message}"):
        adapters_of("f", text.encode())


@pytest.fixture
def catalog() -> Catalog:
    table = ModelTable((ModelEntry("org/small", "small", aliases=("fast",)), ModelEntry("org/large", "large")))
    return Catalog(table, ["org-small", "org-large"])


@pytest.mark.parametrize(("given", "model"), [("", "small"), ("fast", "small"), ("large", "large")])
def test_an_adapter_is_for_the_model_that_it_names(tmp_path: Path, catalog: Catalog, given: str, model: str) -> None:
    file = tmp_path / "adapters.toml"
    file.write_text(SQL + f'model = "{given}"\n')
    assert [entry.model for entry in AdaptersSource(str(file), catalog).entries] == [model]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SQL + 'model = "other"\n', "adapter 'sql' has one of the models small, large, not 'other'"),
        (SQL.replace('"sql"', '"fast"'), "names that no model, alias or split has, unlike 'fast'"),
    ],
)
def test_an_adapter_of_no_model_is_refused(tmp_path: Path, catalog: Catalog, text: str, message: str) -> None:
    file = tmp_path / "adapters.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        AdaptersSource(str(file), catalog)
    with pytest.raises(ConfigError, match="a readable file"):
        AdaptersSource(str(tmp_path / "none"), catalog)


def test_a_refused_change_has_no_effect_also_on_a_process_that_is_started_again(
    tmp_path: Path, catalog: Catalog
) -> None:
    file, part = tmp_path / "adapters.toml", RouterPart(0, 2, tmp_path)
    file.write_text(SQL)
    source = AdaptersSource(str(file), catalog, part)
    file.write_text(SQL + SQL)
    source.watch.look()
    assert source.watch.look()
    with pytest.raises(ConfigError):
        source.read(catalog)
    assert [entry.name for entry in source.entries] == ["sql"]
    again = AdaptersSource(str(file), catalog, part)
    assert again.entries == source.entries
    file.write_text(SQL.replace("sql", "poems"))
    again.watch.look()
    assert again.watch.look() and [entry.name for entry in again.read(catalog)] == ["poems"]
