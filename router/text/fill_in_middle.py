"""Prompts with a text behind the answer, in the forms that models learn to fill in (Bavarian et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.model_files import Tokenizer


@dataclass(frozen=True, slots=True)
class MiddleMarks:
    """The tokens around the two texts. `suffix_first`: the text behind the answer comes first, without `middle`."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False


FORMS = (
    MiddleMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    MiddleMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    MiddleMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    MiddleMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    MiddleMarks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    MiddleMarks("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)


@dataclass(frozen=True, slots=True)
class MiddleForm:
    """The ids of a model's marks; `middle` is () for a form without that mark."""

    prefix: int
    suffix: int
    middle: tuple[int, ...]
    suffix_first: bool

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The prompt whose answer stands between the tokens `before` and `after`."""
        if self.suffix_first:
            return [self.suffix, *after, self.prefix, *before]
        return [self.prefix, *before, self.suffix, *after, *self.middle]


def middle_form(tokenizer: Tokenizer) -> MiddleForm | None:
    """The form of the model with this tokenizer; None for one that has no such tokens."""
    for marks in FORMS:
        names = [marks.prefix, marks.suffix, *filter(None, (marks.middle,))]
        ids = [token_id for name in names if (token_id := tokenizer.token_to_id(name)) is not None]
        if len(ids) == len(names):
            return MiddleForm(ids[0], ids[1], tuple(ids[2:]), marks.suffix_first)
    return None
