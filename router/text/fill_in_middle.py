"""Fill-in-the-middle prompts: the model completes the text between a prefix and a suffix (Bavarian et al., 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.model_files import Tokenizer


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Names of a model's fill-in-the-middle tokens. `suffix_first`: the suffix precedes the prefix."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False


FORMATS = (
    FimTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    FimTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    FimTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FimTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    FimTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    FimTokens("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)


@dataclass(frozen=True, slots=True)
class FimFormat:
    """Token ids of a model's fill-in-the-middle format. `middle` is () for a format without that token."""

    prefix: int
    suffix: int
    middle: tuple[int, ...]
    suffix_first: bool

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """Build the prompt for an answer between the tokens `before` and `after`."""
        if self.suffix_first:
            return [self.suffix, *after, self.prefix, *before]
        return [self.prefix, *before, self.suffix, *after, *self.middle]


def middle_form(tokenizer: Tokenizer) -> FimFormat | None:
    """Return the fill-in-the-middle format of a tokenizer, or None if it has no such tokens."""
    for marks in FORMATS:
        names = [marks.prefix, marks.suffix, *filter(None, (marks.middle,))]
        ids = [token_id for name in names if (token_id := tokenizer.token_to_id(name)) is not None]
        if len(ids) == len(names):
            return FimFormat(ids[0], ids[1], tuple(ids[2:]), marks.suffix_first)
    return None
