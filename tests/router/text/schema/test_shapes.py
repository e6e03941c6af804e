"""Comparisons of values with schemas: their work is bounded, whatever the schema and the value."""

from __future__ import annotations

from typing import Any

import pytest

from router.text.calls.format import Function
from router.text.calls.tagged import as_json, reader_of
from router.text.schema import keywords, patterns, shapes
from router.text.schema.patterns import matches


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Any) -> None:
        self._function, self.num_calls = function, 0

    def __call__(self, *args: Any) -> Any:
        self.num_calls += 1
        return self._function(*args)


def converted(text: str, schema: dict[str, Any], definitions: dict[str, Any] | None = None) -> str:
    """Convert the text of an argument that may also be a string."""
    argument = {"anyOf": [{"type": "string"}, schema]}
    function = Function("f", None, {"properties": {"x": argument}, "$defs": definitions or {}})
    return as_json(text, reader_of(function.shapes, "x"))


@pytest.mark.parametrize(("inner", "is_array"), [("null", True), ("1", False)])
def test_nested_alternatives_do_not_multiply_the_work(
    monkeypatch: pytest.MonkeyPatch, inner: str, is_array: bool
) -> None:
    compared = Counted(keywords.type_of)
    monkeypatch.setattr(shapes, "type_of", compared)
    nested = {"$ref": "#/$defs/n"}
    arrays = [{"type": "array", "items": nested, "maxItems": i + 1} for i in range(6)]
    text = f"{'[' * 5}{inner}{']' * 5}"
    found = converted(text, nested, {"n": {"anyOf": [*arrays, {"type": "null"}]}})
    assert found == (text if is_array else f'"{text}"')
    assert compared.num_calls < 300


def test_a_comparison_that_takes_too_many_steps_makes_the_value_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each combination of alternatives leads to another one, so results of comparisons do not recur."""
    monkeypatch.setattr(shapes, "MAX_COMPARISON_STEPS", 5_000)
    compared = Counted(keywords.type_of)
    monkeypatch.setattr(shapes, "type_of", compared)
    kinds = {
        f"k{i}": {"anyOf": [{"type": "array", "items": {"$ref": f"#/$defs/k{j}"}} for j in (3 * i % 16, 5 * i % 16)]}
        for i in range(16)
    }
    every = {"allOf": [{"$ref": f"#/$defs/k{i}"} for i in range(1, 6)]}
    assert converted("[[[1]]]", every, kinds) == '"[[[1]]]"'
    assert 0 < compared.num_calls <= 2_500
    assert converted("[[]]", every, kinds) == "[[]]"


def test_a_comparison_compiles_few_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Counted(lambda _pattern, _text: False)
    monkeypatch.setattr(shapes, "matches", tried)
    several = [{"type": "string", "pattern": f"^{i}"} for i in range(2 * patterns.LEXERS_KEPT)]
    assert converted('["x"]', {"type": "array", "items": {"anyOf": several}}) == r'"[\"x\"]"'
    assert tried.num_calls <= patterns.LEXERS_KEPT


def test_a_scanner_finds_what_was_computed_when_the_schemas_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemas are read in a thread, and scanners run on the event loop."""
    kinds = [{"type": "object", "properties": {"y": {"type": "integer"}}}, {"type": "string", "maxLength": 3}]
    function = Function("f", None, {"properties": {"x": {"anyOf": kinds}}, "additionalProperties": {"anyOf": kinds}})
    function.read()
    monkeypatch.setattr(shapes.Shapes, "_found_cases", None)
    for name in ("x", "z"):
        reader = reader_of(function.shapes, name)
        assert reader is not None and reader.types == {"object", "string"}


def test_texts_do_not_depend_on_those_that_a_pattern_read_before() -> None:
    """A long text can exhaust the limit of the compiled pattern."""
    pattern = "^([a-z]{1,50}[0-9]?){1,200}$"
    assert matches(pattern, "ab") and not matches(pattern, "ab" * 500)
    assert matches(pattern, "cd") and not matches(pattern, "-")
