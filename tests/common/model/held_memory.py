"""Counts the memory that the weights of a loaded model take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor


def taken_bytes(*parts: object) -> int:
    """Of all tensors in these objects, each once; what lies in a mapped file of weights is none of it."""
    files = _mapped_files()
    found = {tensor.data_ptr(): tensor.nbytes for part in parts for tensor in _tensors(part, set())}
    return sum(size for address, size in found.items() if not any(address in span for span in files))


def _tensors(part: object, seen: set[int]) -> Iterator[Tensor]:
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, Tensor):
        yield part.to_dense() if part.is_mkldnn else part
        return
    inner: list[object] = []
    if isinstance(part, Mapping):
        inner = list(part.values())
    elif isinstance(part, list | tuple):
        inner = list(part)
    elif dataclasses.is_dataclass(part):
        inner = [getattr(part, field.name) for field in dataclasses.fields(part)]
    elif type(part).__module__.startswith(("common", "kernels")):
        inner = list(vars(part).values()) if hasattr(part, "__dict__") else []
    for one in inner:
        yield from _tensors(one, seen)


def _mapped_files() -> list[range]:
    """Addresses at which this process has mapped safetensors files."""
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            spans.append(range(first, last))
    return spans
