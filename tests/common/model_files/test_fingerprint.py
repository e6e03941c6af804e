from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from common.model_files.fingerprint import layout_fingerprint, weights_fingerprint

FIELDS: dict[str, Any] = {
    "model_id": "m",
    "weights_hash": "abc",
    "num_layers": 30,
    "num_kv_heads": 3,
    "head_dim": 64,
    "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "quantization": "none",
    "block_size": 16,
    "latent_dim": 0,
    "batch_invariant": False,
    "draft_head": "",
    "kv_scales": (),
}


def test_equal_layouts_have_equal_fingerprints() -> None:
    assert layout_fingerprint(**FIELDS) == layout_fingerprint(**dict(reversed(FIELDS.items())))


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_counts(name: str) -> None:
    value = FIELDS[name]
    other = ((0.5, 0.25),) if name == "kv_scales" else value + 1 if isinstance(value, int) else f"{value}x"
    assert layout_fingerprint(**FIELDS | {name: other}) != layout_fingerprint(**FIELDS)


def test_scales_count_each_in_its_place() -> None:
    scales = [
        ((0.5, 0.25), (0.5, 0.25)),
        ((0.25, 0.5), (0.5, 0.25)),
        ((0.5, 0.25), (0.5, 0.250001)),
        ((0.5, 0.25),),
        (),
    ]
    assert len({layout_fingerprint(**FIELDS | {"kv_scales": each}) for each in scales}) == len(scales)


def test_fields_do_not_run_into_each_other() -> None:
    joined = FIELDS | {"model_id": "mabc", "weights_hash": ""}
    assert layout_fingerprint(**joined) != layout_fingerprint(**FIELDS)


def test_needs_no_torch() -> None:
    program = "import sys, common.model_files.fingerprint; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-P", "-c", program], text=True).strip() == "False"


def test_weights_are_told_apart_by_model_content_and_how_they_are_kept() -> None:
    """Not by number types, nor by the cache's layout: an answer may go on with other rounding."""
    known = weights_fingerprint("m", "abc", "none")
    others = [("n", "abc", "none"), ("m", "abd", "none"), ("m", "abc", "int8"), ("ma", "bc", "none")]
    assert len({known, *(weights_fingerprint(*other) for other in others)}) == 5
    assert weights_fingerprint("m", "abc", "none") == known
