"""Marks around the thoughts of published models, and their detection in chat templates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The texts that begin and end a thought.

    `head` is text that models write between thought and answer, all of it special tokens, which answers omit. With
    `ends_messages`, the end mark also follows messages without a thought.
    """

    start: str
    end: str
    head: str = ""
    ends_messages: bool = False

    def begins_inside(self, prompt_end: str) -> bool:
        """Whether the prompt itself opens the thought, as some templates do."""
        return prompt_end.rstrip().endswith(self.start.rstrip())

    def ends_closed(self, prompt_end: str) -> bool:
        """Whether the prompt ends with a finished thought, as some templates write it to prevent thinking."""
        before, mark, after = prompt_end.rpartition(self.end.rstrip())
        if not mark or after.strip():
            return False
        return self.begins_inside(before) or not self.ends_messages

    def open_thought(self, text: str) -> str | None:
        """Return the unfinished thought at the end of `text`, without its start mark, or None."""
        _, mark, thought = text.rpartition(self.start)
        return thought if mark and self.end not in thought else None


KNOWN = (
    ThoughtMarks("<think>", "</think>"),  # DeepSeek, Qwen, GLM, MiniMax M2, Kimi K2, Granite 3.3, OLMo and others
    ThoughtMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThoughtMarks("<mm:think>", "</mm:think>"),  # MiniMax M3
    ThoughtMarks("<thought>", "</thought>"),  # EXAONE Deep
    ThoughtMarks("<longcat_think>", "</longcat_think>"),  # LongCat
    ThoughtMarks("[THINK]", "[/THINK]"),  # Mistral
    ThoughtMarks("◁think▷", "◁/think▷"),  # Kimi 1.5 and VL
    ThoughtMarks("<|channel>thought", "<channel|>"),  # Gemma 4
    ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>"),  # Command
    ThoughtMarks("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ThoughtMarks("<|think|>", "<|end|><|begin|>assistant", "<|content|>", ends_messages=True),  # Solar Open
    ThoughtMarks("Here is my thought process:", "Here is my response:"),  # Granite 3.2
)
"""Harmony's channels are part of its tool-call format."""


def marks_in(template: str | None) -> ThoughtMarks | None:
    """Detect the marks in the text of a chat template: the first known pair whose end occurs in it."""
    return next((marks for marks in KNOWN if template is not None and marks.end in template), None)
