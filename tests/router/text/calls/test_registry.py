"""The registry of tool-call formats, and the names that the settings and the documentation have for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import RouterConfig, fields_of
from router.text.calls import FORMATS
from router.text.calls.deepseek import DeepSeekFormat
from router.text.calls.registry import format_in, format_named


def test_the_setting_has_the_names_of_all_formats() -> None:
    (field,) = (field for field in fields_of(RouterConfig) if field.name == "tool_parser")
    assert set(field.rule.choices) == {"auto", "none", *(each.name for each in FORMATS)}


def test_every_format_is_documented(repository: Path) -> None:
    page = (repository / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    missing = {each.name for each in FORMATS if f"\n- `{each.name}` (" not in page}
    assert not missing, f"add a line to the list of formats in docs/reference/api.md for {sorted(missing)}"


def test_a_name_stands_for_the_last_variant() -> None:
    found = format_named("deepseek")
    assert isinstance(found, DeepSeekFormat) and not found.fenced
    with pytest.raises(LookupError):
        format_named("auto")


def test_a_call_inside_a_text_is_of_no_format() -> None:
    assert (
        format_in('<tool_call>{"name": "probe_function", "arguments": {"probe_argument": "probe value"}}') is not None
    )
    assert format_in(r'<tool_call>"{\"name\": \"probe_function\", \"probe_argument\": \"probe value\"}"') is None
