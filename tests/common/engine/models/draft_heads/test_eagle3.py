"""EAGLE-3 heads: logits beside their formula in float64, whatever the chunks; the model's own, which stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.models.draft_heads.drafting_model import DraftingModel
from common.engine.models.draft_heads.load import load_drafting_model
from common.engine.models.load import load_model
from common.engine.run.runner import ModelRunner

from .....eagle3_heads import PlainEagle3, config_of, eagle3_folder
from .....families import CASES
from ..generation import SIZES, files_of, random_checkpoint
from .head_checks import TOKENS, check_draft_rows, check_every_bit, check_formula, check_rounding

LAYER = config_of(SIZES)
HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}),
    "qwen3": ("Qwen3", {"head_dim": 32}, {"head_dim": 32, "draft_vocab_size": 120, "own_embedding": True}),
    "other sizes": (
        "Llama",
        {},
        {
            **{"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4, "target_hidden_size": 96},
            **{"own_embedding": True, "draft_vocab_size": 100},
        },
    ),
    "more heads": ("Llama", {}, {"num_attention_heads": 8}),
    "speculators": (
        "Llama",
        {},
        {
            **{"layer": "layers.0.", "speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]},
            **{"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "transformer_layer_config": LAYER},
            "model_type": "speculators",
        },
    ),
    "normed states": (
        "Llama",
        {},
        {
            **{"state_norms": "fc_norm", "norm_output": True, "layer": "model.midlayer."},
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 2], "use_aux_hidden_state": True},
        },
    ),
    "normed input": ("Llama", {}, {"state_norms": "input_norm", "norm_before_residual": True}),
    "qwen3-moe": (*CASES["qwen3-moe"], {"head_dim": 32}),
    "gpt-oss": (*CASES["gpt-oss"], {"head_dim": 32}),
    "gemma2": (*CASES["gemma2"], {"draft_vocab_size": 120}),
    "olmo2": (*CASES["olmo2"], {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}),
}


class Checkpoints:
    """Models and heads of this module, made when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def folders(self, kind: str) -> tuple[Path, Path]:
        """The served model, and its head."""
        served = self._folder / kind.replace(" ", "-")
        if not served.exists():
            family, options, head = HEADS[kind]
            random_checkpoint(served, family, **options)
            eagle3_folder(served / "head", served, **head)
        return served, served / "head"

    def load(self, kind: str, **options: str) -> DraftingModel:
        served, head = self.folders(kind)
        return load_drafting_model(files_of(served), str(head), num_places=8, **options)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("eagle3"))


@pytest.mark.slow_except("llama", "qwen3")
@pytest.mark.parametrize("kind", HEADS)
def test_logits_are_those_of_the_formula(checkpoints: Checkpoints, kind: str) -> None:
    served, head = checkpoints.folders(kind)
    check_formula(PlainEagle3(head, served), lambda: checkpoints.load(kind))


@pytest.mark.slow_except("qwen3-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3", "speculators", "gemma2", "olmo2", "gpt-oss"])
def test_the_models_logits_keep_every_bit(checkpoints: Checkpoints, kind: str, dtype: str) -> None:
    served, _ = checkpoints.folders(kind)
    check_every_bit((load_model(files_of(served), dtype=dtype), checkpoints.load(kind, dtype=dtype)), dtype)


def test_a_step_stays_one_native_program(checkpoints: Checkpoints) -> None:
    """With a head that reads between layers it has as many operations as without one, and a few buffers more."""
    served, _ = checkpoints.folders("qwen3")
    alone, together = load_model(files_of(served), with_head=False), checkpoints.load("qwen3")
    for model in (alone, together):
        ModelRunner(model, KVCache(model.config, 4, 16, "float32")).forward([SequenceChunk(TOKENS[:20], 0, (1, 2))])
    program, other = alone.program, together._body.program
    if program is None:
        pytest.skip("no program runs here")
    assert other is not None and other.num_ops == program.num_ops
    assert program.num_buffers < other.num_buffers <= program.num_buffers + 3


def test_draft_rows_read_the_row_before(checkpoints: Checkpoints) -> None:
    check_draft_rows(checkpoints.load("qwen3"))


def test_what_is_kept_of_a_token_is_one_state(checkpoints: Checkpoints) -> None:
    """As wide as the head, not as three of the model's."""
    assert checkpoints.load("other sizes")._states.shape == (8 + 2, 64)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_its_matrices_are_rounded_as_the_models_are(checkpoints: Checkpoints, quantization: str) -> None:
    check_rounding(lambda **given: checkpoints.load("llama", **given), quantization)
