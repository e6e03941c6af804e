"""Marks around the thoughts of published models, and their detection in chat templates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The texts that begin and end a thought, and those around the answer that follows it, which clients do not see.

    `head` may precede the answer, and `tail` may end an answer that has the head. With `head_alone`, answers without a
    thought may have them too. With `ends_turns`, `end` is also what separates a user's message from the answer.
    """

    start: str
    end: str
    head: str = ""
    tail: str = ""
    head_alone: bool = False
    ends_turns: bool = False

    def begins_inside(self, prompt_end: str) -> bool:
        """Whether the prompt itself opens the thought, as some templates do."""
        return prompt_end.rstrip().endswith(self.start.rstrip())

    def ends_closed(self, prompt_end: str) -> bool:
        """Whether the prompt ends with a finished thought, as some templates write it to prevent thinking."""
        before, mark, rest = prompt_end.rstrip().rpartition(self.end.rstrip())
        is_thought = not self.ends_turns or before.rstrip().endswith(self.start.rstrip())
        return bool(mark) and not rest and is_thought

    def num_known(self, is_known: Callable[[str], bool]) -> int:
        """Number of texts around an answer that a model knows, minus the number of those that it does not."""
        return sum(1 if is_known(text) else -1 for text in (self.head, self.tail) if text)

    def open_thought(self, text: str) -> str | None:
        """Return the unfinished thought at the end of `text`, without its start mark, or None."""
        _, mark, thought = text.rpartition(self.start)
        return thought if mark and self.end not in thought else None


KNOWN = (
    ThoughtMarks("<think>", "</think>"),  # DeepSeek, Qwen, GLM, MiniMax M2, Kimi K2, OLMo and others
    ThoughtMarks("<think>", "</think>", "<response>", "</response>"),  # Granite 3.3, ERNIE 4.5
    ThoughtMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThoughtMarks("<mm:think>", "</mm:think>"),  # MiniMax M3
    ThoughtMarks("<thought>", "</thought>"),  # EXAONE Deep
    ThoughtMarks("<longcat_think>", "</longcat_think>"),  # LongCat
    ThoughtMarks("[THINK]", "[/THINK]"),  # Mistral
    ThoughtMarks("◁think▷", "◁/think▷"),  # Kimi 1.5 and VL
    ThoughtMarks("<|channel>thought", "<channel|>"),  # Gemma 4
    ThoughtMarks(
        "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", head_alone=True
    ),  # Command
    ThoughtMarks("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ThoughtMarks(
        "<|think|>", "<|end|><|begin|>assistant", "<|content|>", head_alone=True, ends_turns=True
    ),  # Solar Open
    ThoughtMarks("Here is my thought process:", "Here is my response:"),  # Granite 3.2
)
"""Harmony's channels are part of its tool-call format."""


def marks_in(template: str | None, is_token: Callable[[str], bool] = lambda text: False) -> ThoughtMarks | None:
    """Detect the marks in the text of a chat template: the known ones whose end occurs in it.

    Among several, selects those whose other texts occur in it or are tokens of the model, then the first.
    """
    source = template or ""
    found = [marks for marks in KNOWN if marks.end in source]
    return max(found, key=lambda marks: marks.num_known(lambda text: text in source or is_token(text)), default=None)
