"""Weights without a folder: their text, and which files have the tensors of a model."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelError
from common.model_files import ReceivedWeights, resolve_model, with_received
from common.model_files.tiny import make_tiny_model


def changed(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A safetensors file with another header."""
    (length,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + length])
    change(head)
    encoded = json.dumps(head).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data[8 + length :]


def test_weights_are_recognised_by_their_content(tmp_path: Path) -> None:
    path = tmp_path / "a:b c.safetensors"
    path.write_bytes(b"data")
    weights = ReceivedWeights(hashlib.sha256(b"data").hexdigest(), 4, path)
    assert ReceivedWeights.parse(str(weights)) == weights and weights.is_here()
    path.write_bytes(b"date")
    assert not weights.is_here()
    path.unlink()
    assert not weights.is_here()
    for text in ("", "/folder", "org/name", "tensors:", f"tensors:{'0' * 64}:4:relative"):
        assert ReceivedWeights.parse(text) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda head: None, ""),
        (lambda head: head.pop("model.norm.weight"), "1 of the model's .* tensors are missing: model.norm.weight"),
        (lambda head: [head.pop(n) for n in [*head] if "layers" in n], "tensors are missing: .* and [0-9]+ more"),
        (lambda head: head.update(x=head["lm_head.weight"]), "1 tensors do not exist in the model: x"),
        (lambda head: head["model.norm.weight"].update(dtype="I32"), "tensor model.norm.weight is 'I32' of shape"),
        (lambda head: head["model.norm.weight"].update(shape=[8, 8]), r"of shape '?\[8, 8\]"),
        (lambda head: head["model.norm.weight"].pop("shape"), "is not a safetensors file"),
    ],
)
def test_a_file_must_have_the_tensors_of_the_model(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], why: str
) -> None:
    files = resolve_model(str(make_tiny_model(tmp_path / "model")))
    path = tmp_path / "new"
    path.write_bytes(changed(files.weights[0].read_bytes(), change))
    if not why:
        found = with_received(files, path, "0f" * 32)
        assert (found.weights, found.weights_hash, found.config) == ((path,), "0f" * 8, files.config)
        path.write_bytes(path.read_bytes()[:-1])
        why = "is damaged"
    with pytest.raises(ModelError, match=why):
        with_received(files, path, "0f" * 32)
