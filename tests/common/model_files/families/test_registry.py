"""The registry of model families: each can be told apart, and is documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.model_files.families import FAMILIES, WRAPPERS, Family
from common.model_files.families.registry import GGUF_ARCHITECTURES

MODELS = (Path(__file__).parents[4] / "docs" / "reference" / "models.md").read_text()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_family_has_the_norms_and_the_experts_that_its_decoder_and_its_files_name(family: Family) -> None:
    """A GGUF file has a name for the norm of each place; a layer's experts are in one decoder's reach."""
    assert bool(family.latents) == (family.decoder == "deepseek")
    if family.gguf is not None:
        assert family.norms.keys() <= family.gguf.norms.keys()
        assert len({family.gguf.norms[place] for place in family.norms}) == len(family.norms)


def test_each_architecture_of_gguf_has_one_family_without_a_condition() -> None:
    for architecture, families in GGUF_ARCHITECTURES.items():
        usual = [family for family in families if family.gguf is not None and family.gguf.applies is None]
        assert len(usual) == 1, architecture


@pytest.mark.parametrize("name", [*FAMILIES, *WRAPPERS, *GGUF_ARCHITECTURES])
def test_every_name_is_in_the_documentation(name: str) -> None:
    """In docs/reference/models.md: a `model_type` in the list of families, an architecture in the list of GGUF."""
    internal = {"qwen3_vl_moe_text"}  # its wrapper stands for it
    assert name in internal or re.search(rf"`{re.escape(name)}`", MODELS), "add it to docs/reference/models.md"
