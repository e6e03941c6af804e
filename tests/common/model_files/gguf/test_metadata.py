from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from common.errors import ModelError
from common.model_files.gguf.metadata import read_gguf_head


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A GGUF file with a field of every kind and two tensors."""
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -5)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -300)
    writer.add_uint32("a.u32", 2**31)
    writer.add_int32("a.i32", -(2**31))
    writer.add_uint64("a.u64", 2**63)
    writer.add_int64("a.i64", -(2**63))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "é😀")
    writer.add_array("a.ints", [1, 2, 3])
    writer.add_array("a.strings", ["x", "", "yé"])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.ones(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "small.gguf"


def test_it_agrees_with_the_gguf_package(small: Path) -> None:
    head, oracle = read_gguf_head(small), gguf.GGUFReader(small)
    fields = {name: field.contents() for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
    assert head.metadata == fields and head.architecture == "llama"
    found = [(t.name, t.shape, t.type, t.offset) for t in head.tensors]
    assert found == [(t.name, tuple(t.shape), int(t.tensor_type), t.data_offset) for t in oracle.tensors]


def test_a_file_cut_anywhere_is_refused(small: Path, tmp_path: Path) -> None:
    content, cut = small.read_bytes(), tmp_path / "cut.gguf"
    first = read_gguf_head(small).tensors[0].offset
    for length in [0, 3, 8, *range(24, first, 17), first]:
        cut.write_bytes(content[:length])
        with pytest.raises(ModelError, match="cut.gguf"):
            read_gguf_head(cut)


def test_damaged_lengths_are_refused(small: Path) -> None:
    content = bytearray(small.read_bytes())
    for at in range(8, 24):
        damaged = bytes(content[:at]) + b"\xff" + bytes(content[at + 1 :])
        small.write_bytes(damaged)
        with pytest.raises(ModelError):
            read_gguf_head(small)


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(64))
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_gguf_head(tmp_path / "x.gguf")


def test_an_old_version_is_refused(small: Path) -> None:
    content = bytearray(small.read_bytes())
    content[4] = 1
    small.write_bytes(bytes(content))
    with pytest.raises(ModelError, match="version 1, must be 2 or 3"):
        read_gguf_head(small)
