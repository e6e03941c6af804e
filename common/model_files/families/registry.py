"""Registry of the supported model families. Add new makers to `FAMILIES`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from common.model_files.architecture import FieldReader
from common.model_files.families import (
    deepseek,
    dots,
    ernie,
    exaone,
    gemma,
    glm,
    gpt_oss,
    granite,
    llama,
    minimax,
    mistral,
    olmo,
    phi,
    qwen,
    seed_oss,
    smollm,
    solar,
)
from common.model_files.families.family import Family

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for maker in (
        *(llama, mistral, qwen, phi, gpt_oss, smollm, granite, seed_oss, ernie, deepseek, glm),
        *(minimax, dots, solar, exaone, olmo, gemma),
    )
    for family in maker.FAMILIES
}
"""Families by `model_type`."""
WRAPPERS: Mapping[str, Family] = {wrapper: family for family in FAMILIES.values() for wrapper in family.wrappers}
"""Families by the `model_type` of multimodal models, for language models that do not name another."""


def _by_architecture() -> Mapping[str, list[Family]]:
    found = defaultdict(list)
    for family in FAMILIES.values():
        if family.gguf is not None:
            found[family.gguf.architecture].append(family)
    return dict(found)


GGUF_ARCHITECTURES: Mapping[str, list[Family]] = _by_architecture()
"""Families by GGUF's `general.architecture`. One family of each has no condition."""


def gguf_family(architecture: str, reader: FieldReader) -> Family:
    """Return the family of a GGUF file with the metadata `reader`. Raises ModelError if it is not supported."""
    if architecture not in GGUF_ARCHITECTURES:
        raise reader.refuse(f"GGUF architecture {architecture!r}", ", ".join(GGUF_ARCHITECTURES))
    usual, special = None, None
    for family in GGUF_ARCHITECTURES[architecture]:
        assert family.gguf is not None
        if family.gguf.applies is None:
            usual = family
        elif family.gguf.applies(reader):
            special = family
    found = special or usual
    assert found is not None
    return found
