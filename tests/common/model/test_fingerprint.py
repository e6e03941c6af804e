from __future__ import annotations

import subprocess
import sys

import pytest

from diptych.common.model.fingerprint import layout_fingerprint

FIELDS = {
    "model_id": "m",
    "weights_hash": "abc",
    "num_layers": 30,
    "num_kv_heads": 3,
    "head_dim": 64,
    "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "quantization": "none",
    "block_size": 16,
    "protocol_version": 1,
}


def test_equal_layouts_have_equal_fingerprints() -> None:
    assert layout_fingerprint(**FIELDS) == layout_fingerprint(**dict(reversed(FIELDS.items())))


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_counts(name: str) -> None:
    other = FIELDS[name] + 1 if isinstance(FIELDS[name], int) else f"{FIELDS[name]}x"
    assert layout_fingerprint(**FIELDS | {name: other}) != layout_fingerprint(**FIELDS)


def test_a_cache_of_the_models_type_is_that_of_earlier_versions() -> None:
    assert layout_fingerprint(**FIELDS) == "79b8ac32629766dd2e32638cbd35eecc"


def test_fields_do_not_run_into_each_other() -> None:
    joined = FIELDS | {"model_id": "mabc", "weights_hash": ""}
    assert layout_fingerprint(**joined) != layout_fingerprint(**FIELDS)


def test_needs_no_torch() -> None:
    program = "import sys, diptych.common.model.fingerprint; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-P", "-c", program], text=True).strip() == "False"
