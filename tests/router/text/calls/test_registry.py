"""The registry of tool-call formats, and their names in settings and documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.config import RouterConfig, fields_of
from router.text.calls import FORMATS
from router.text.calls.deepseek import DeepSeekFormat
from router.text.calls.registry import FAMILIES, format_hinted, format_in, format_named

NAMES = {*(each.name for each in FORMATS), *FAMILIES}


def test_the_setting_has_the_names_of_all_formats() -> None:
    (field,) = (field for field in fields_of(RouterConfig) if field.name == "tool_parser")
    assert set(field.rule.choices) == {"auto", "none", *NAMES}
    assert len(field.rule.choices) == len(NAMES) + 2


def test_every_format_is_documented(repository: Path) -> None:
    page = (repository / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    heads = re.findall(r"^- ((?:`[\w.-]+`(?:, )?)+) \(", page, re.MULTILINE)
    missing = NAMES - {name for head in heads for name in re.findall(r"`(.+?)`", head)}
    assert not missing, f"add a line to the list of formats in docs/reference/api.md for {sorted(missing)}"


def test_a_family_is_found_under_its_name() -> None:
    assert {format_named(name).name for name in FAMILIES} == {"hermes"}
    assert not FAMILIES.keys() & {each.name for each in FORMATS}


def test_a_name_stands_for_the_last_variant() -> None:
    found = format_named("deepseek")
    assert isinstance(found, DeepSeekFormat) and not found.fenced
    with pytest.raises(LookupError):
        format_named("auto")


def test_no_hint_is_part_of_another_one() -> None:
    hints = [hint for each in FORMATS for hint in each.hints]
    assert [format_hinted(hint) for hint in hints] == [each for each in FORMATS for _ in each.hints]


def test_a_call_inside_a_text_is_of_no_format() -> None:
    assert (
        format_in('<tool_call>{"name": "probe_function", "arguments": {"probe_argument": "probe value"}}</tool_call>')
        is not None
    )
    assert format_in(r'<tool_call>"{\"name\": \"probe_function\", \"probe_argument\": \"probe value\"}"') is None
