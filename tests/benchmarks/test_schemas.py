from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.schemas.__main__ import main
from benchmarks.schemas.corpus import Sample, samples_of
from benchmarks.schemas.documents import Documents
from benchmarks.schemas.trial import tried
from benchmarks.schemas.validity import Validity
from common.grammar.checks import GrammarChecks
from common.model_files.resolve import resolve_model

PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
FORMAT = {"type": "string", "format": "path"}


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_corpora_are_read_in_each_layout(tmp_path: Path) -> None:
    tests = [{"valid": True, "data": 1}, {"valid": False, "data": ""}]
    write(tmp_path / "Github_easy" / "o1.json", PERSON)
    write(tmp_path / "mask" / "Snowplow---x.json", {"schema": FORMAT, "tests": tests})
    (tmp_path / "Glaive.jsonl").write_text(json.dumps({"unique_id": "g", "json_schema": json.dumps(UNIQUE)}) + "\n\n")
    assert list(samples_of([tmp_path])) == [
        Sample("Github_easy", "o1", PERSON),
        Sample("Glaive", "g", UNIQUE),
        Sample("Snowplow", "x", FORMAT, (1,), ("",)),
    ]


def test_what_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"schema": {}}\n{')
    with pytest.raises(ValueError, match=r"bad.jsonl:2: is not JSON"):
        list(samples_of([tmp_path]))


def test_a_run_reports_each_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, schema in (("a", PERSON), ("b", UNIQUE), ("c", FORMAT)):
        write(tmp_path / "few" / f"{name}.json", schema)
    out = tmp_path / "result.json"
    assert main([str(tmp_path / "few"), "--model", "tiny-random", "--documents", "2", "--output", str(out)]) == 0
    (split,) = json.loads(out.read_text())["splits"]
    counts = {key: split[key] for key in ("split", "schemas", "refused", "refused_by_llguidance", "answers", "wrong")}
    assert counts == {"split": "few", "schemas": 3, "refused": 1, "refused_by_llguidance": 2, "answers": 4, "wrong": 0}
    assert split["compile_ms"]["p99"] > 0 and split["mask_us"]["p50"] > 0
    assert "`uniqueItems` can be enforced" in capsys.readouterr().out


def test_wrong_answers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar of another schema stands for one that allows too much."""
    monkeypatch.setattr("benchmarks.schemas.trial.json_grammar", lambda schema: 'start: %json {"type": "string"}')
    files = resolve_model("tiny-random")
    checks = GrammarChecks(files, files.vocab_size)
    trial = tried(Sample("s", "n", {"type": "integer"}, (1,), ("x",)), Documents(files), checks, 3, "0")
    checks.close()
    assert trial.num_documents == 3 and len(trial.wrong) == 4 and trial.num_valid_refused == 1


@pytest.mark.parametrize(
    ("schema", "text", "matches"),
    [
        ({"multipleOf": 0.1}, b"0.3", True),
        ({"multipleOf": 0.1}, b"0.35", False),
        ({"type": "integer"}, b"1.0", True),
        ({"type": "integer"}, b"1.5", False),
        ({"minimum": 1}, b"1e-999999999999999999999", False),
        ({}, b"{", False),
    ],
)
def test_numbers_are_judged_in_decimals(schema: dict[str, Any], text: bytes, matches: bool) -> None:
    assert (not Validity(schema).problem(text)) is matches
