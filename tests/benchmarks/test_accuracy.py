from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import accuracy
from common.model_files.tiny import make_tiny_model


def test_perplexity_of_certain_and_of_uniform_guesses() -> None:
    token_ids = [3, 1, 2, 0]
    certain = torch.full((4, 8), -1e9)
    for row, token in enumerate(token_ids[1:]):
        certain[row, token] = 0.0
    assert accuracy.perplexity(accuracy.logprobs_of(certain, token_ids)) == pytest.approx(1.0)
    assert accuracy.perplexity(accuracy.logprobs_of(torch.zeros(4, 8), token_ids)) == pytest.approx(8.0)


def test_a_variant_agrees_with_itself_and_not_with_its_opposite() -> None:
    logits = torch.randn(10, 16)
    assert accuracy.compare(logits, logits) == (10, pytest.approx(0.0, abs=1e-5))
    same, divergence = accuracy.compare(logits, -logits)
    assert same == 0
    assert divergence > 1.0


@pytest.mark.slow
def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model(tmp_path / "model")
    out = tmp_path / "accuracy.json"
    names = "float32,bfloat16,float32+int8,float32+int4,float32+fp8-wire"
    assert accuracy.main(["--model", str(folder), "--tokens", "8", "--variants", names, "--output", str(out)]) == 0
    rows = {row["name"]: row for row in json.loads(out.read_text())["results"]}
    assert rows["float32"]["agreement"] == 1.0
    assert rows["float32"]["divergence"] == pytest.approx(0.0, abs=1e-6)
    assert 0 < rows["float32+int8"]["divergence"] < rows["float32+int4"]["divergence"] < 1.0
    assert 0 < rows["float32+fp8-wire"]["divergence"] < 1.0
    assert rows["float32+fp8-wire"]["perplexity"] != rows["float32"]["perplexity"]
    assert "perplexity" in capsys.readouterr().out


def test_the_names_of_variants() -> None:
    assert accuracy.Variant.parse("bfloat16") == accuracy.Variant("bfloat16", "none")
    assert accuracy.Variant.parse("bfloat16+int8") == accuracy.Variant("bfloat16", "int8")
    assert accuracy.Variant.parse("float32+fp8-wire") == accuracy.Variant("float32", "none", fp8_wire=True)
    assert accuracy.Variant.parse("bfloat16+int8-cache") == accuracy.Variant("bfloat16", "none", kv_dtype="int8")
    assert accuracy.Variant.parse("bfloat16+auto+fp8-cache") == accuracy.Variant("bfloat16", "auto", kv_dtype="fp8")
    assert accuracy.Variant.parse("bfloat16+int8+fp8-wire") == accuracy.Variant("bfloat16", "int8", fp8_wire=True)
