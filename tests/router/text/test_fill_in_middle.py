from __future__ import annotations

import pytest
import tokenizers

from common.model_files.tokenizer import Tokenizer
from router.text.fill_in_middle import FORMATS, FimTokens, middle_form


def tokenizer_with(*names: str) -> Tokenizer:
    vocabulary = {"a": 0, "b": 1, **{name: i for i, name in enumerate(names, 2)}}
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a")))


@pytest.mark.parametrize("marks", FORMATS, ids=lambda marks: marks.prefix)
def test_each_form(marks: FimTokens) -> None:
    names = [name for name in (marks.prefix, marks.suffix, marks.middle) if name]
    form = middle_form(tokenizer_with(*names))
    assert form is not None
    prompt = form.prompt([0], [1])
    if marks.suffix_first:
        assert prompt == [3, 1, 2, 0]
    else:
        assert prompt == [2, 0, 3, 1, 4]


def test_a_model_without_all_the_marks_has_no_form() -> None:
    assert middle_form(tokenizer_with()) is None
    assert middle_form(tokenizer_with("<fim_prefix>", "<fim_suffix>")) is None
