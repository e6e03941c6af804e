"""The format of gpt-oss (Harmony). Answers are messages in channels, including reasoning and calls:

<|channel|>analysis<|message|>The user asks for the weather.<|end|><|start|>assistant
<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

without the line break, or with <|channel|>final<|message|>Hello! instead of the call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from router.text.answer_grammar import json_expression, literal, rule
from router.text.calls.format import (
    PROBE_NAME,
    TEXT,
    CallFormat,
    Function,
    Message,
    Spell,
    Wanted,
    arguments_rules,
    opening,
)
from router.text.calls.scanner import CallScanner, Extent
from router.text.parts import CallPart, Part, ThoughtPart, first_mark
from router.text.thought_marks import ThoughtMarks

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
CALL, CONSTRAIN, RETURN = "<|call|>", "<|constrain|>", "<|return|>"
FUNCTIONS = "functions."
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
BEGINNINGS = (CHANNEL, START, " to=")
"""Texts that begin a message header. The last one occurs if the prompt ends after the author's role."""
ENDS = (END, CALL, RETURN, START, CHANNEL)
"""Texts that end a message. The last two begin the next message, if the model omitted the end."""
MAX_HEAD_CHARS = 512
"""Maximum length of a message header. A longer one is treated as text."""
END_TOKENS = frozenset(mark.encode() for mark in (END, CALL, RETURN, START))


class HarmonyScanner(CallScanner):
    """Splits an answer into its channels: reasoning, text and calls.

    Text before the first header is plain text. Calls of functions not in `names`, and calls whose arguments are not a
    JSON object, are returned as text. Without `thoughts`, so is reasoning.
    """

    def __init__(self, *, start: int = 0, names: Collection[str] = (), thoughts: bool = True) -> None:
        self._names, self._thoughts = names, thoughts
        self._is_whole, self._extent = True, Extent()
        self._head_length, self._called = 0, ""
        self._thought_before = self._thought_now = False
        super().__init__(start=start)

    @property
    def calls_are_whole(self) -> bool:
        return self._is_whole

    def flush(self, *, cut: bool) -> list[Part]:
        parts: list[Part] = []
        if not cut:
            if self._step == self._thought:
                self._emit_thought(len(self._held), parts)
            elif self._step in (self._begin, self._head, self._text, self._call, self._between):
                self._emit_text(len(self._held), parts)
        self._held = ""
        return parts

    def _begin(self, parts: list[Part]) -> bool:
        if any(self._held.startswith(mark) for mark in BEGINNINGS):
            return self._move_to(self._head)
        may_begin = not self._held or any(mark.startswith(self._held) for mark in BEGINNINGS)
        return not may_begin and self._move_to(self._text)

    def _head(self, parts: list[Part]) -> bool:
        """Read a message header."""
        position, mark = first_mark(self._held, (MESSAGE, END, CALL, RETURN))
        if not mark and position <= MAX_HEAD_CHARS:
            return False
        if mark != MESSAGE:
            self._emit_text(1, parts)
            return self._move_to(self._text)
        head = self._held[:position]
        channel, self._called = CHANNEL_NAME.search(head), _called_in(head)
        if self._called in self._names:
            self._head_length = position + len(MESSAGE)
            return self._move_to(self._call)
        if self._thoughts and channel is not None and channel[1] == "analysis":
            self._thought_before, self._thought_now = self._thought_before or self._thought_now, False
            return self._move_to(self._thought, position + len(MESSAGE))
        return self._move_to(self._text, position + len(MESSAGE))

    def _text(self, parts: list[Part]) -> bool:
        position, mark = first_mark(self._held, ENDS)
        self._emit_text(position, parts)
        return bool(mark) and self._end_with(mark)

    def _thought(self, parts: list[Part]) -> bool:
        position, mark = first_mark(self._held, ENDS)
        self._emit_thought(position, parts)
        return bool(mark) and self._end_with(mark)

    def _emit_thought(self, length: int, parts: list[Part]) -> None:
        """Return the first characters of the held text as reasoning, on a new line if it is a new message."""
        if length:
            parting = "\n" if self._thought_before and not self._thought_now else ""
            parts.append(ThoughtPart(parting + self._held[:length]))
            self._thought_now = True
            self._held = self._held[length:]

    def _call(self, parts: list[Part]) -> bool:
        """Read from the header of a call, which is held, to its arguments."""
        said = self._held[self._head_length :].lstrip()
        if not said:
            return False
        if not said.startswith("{"):
            self._emit_text(self._head_length, parts)
            return self._move_to(self._text)
        parts.append(CallPart(self.num_calls, self._called))
        self.num_calls += 1
        self._extent, self._is_whole = Extent(), False
        return self._move_to(self._arguments, len(self._held) - len(said))

    def _arguments(self, parts: list[Part]) -> bool:
        length = self._extent.measure(self._held)
        if length:
            parts.append(CallPart(self.num_calls - 1, arguments=self._held[:length]))
        self._held = self._held[length:]
        self._is_whole = self._extent.complete
        return self._is_whole and self._move_to(self._between)

    def _end_with(self, mark: str) -> bool:
        return self._move_to(self._between, len(mark) if mark in (END, CALL, RETURN) else 0)

    def _between(self, parts: list[Part]) -> bool:
        """Read what follows a message: the header of the next one, or text without a header."""
        mark: str | None = ""
        while mark is not None:
            self._held = self._held.removeprefix(mark).lstrip()
            mark = next((end for end in (END, CALL, RETURN) if self._held.startswith(end)), None)
        if any(mark.startswith(self._held) for mark in ENDS):
            return self._held in (START, CHANNEL) and self._move_to(self._head)
        begins = self._held.startswith((START, CHANNEL))
        return self._move_to(self._head if begins else self._text)


def _called_in(head: str) -> str:
    """Return the function that a message header names as recipient, or ""."""
    recipient = RECIPIENT.search(head)
    return recipient[1].removeprefix(FUNCTIONS) if recipient else ""


class ChannelTokens:
    """Counter for tokens of messages in the `analysis` channel, including their delimiters, which are special tokens.

    `raw` returns the bytes of a token. Calls of the functions in `names` do not count.
    """

    def __init__(self, raw: Callable[[int], bytes], names: Collection[str]) -> None:
        self._raw, self._names = raw, names
        self._head: list[bytes] | None = None  # header of the current message; None while in its content
        self._in_thought = False
        self.count = 0

    def push(self, token_ids: Iterable[int]) -> None:
        """Count the next tokens of the answer."""
        for token in map(self._raw, token_ids):
            if self._head is not None:
                self._extend_head(self._head, token)
            elif token == CHANNEL.encode():
                self._head, self._in_thought = [token], False
            elif self._in_thought:
                self.count += token != START.encode()
                self._in_thought = token not in END_TOKENS

    def _extend_head(self, head: list[bytes], token: bytes) -> None:
        head.append(token)
        if token != MESSAGE.encode():
            return
        text = b"".join(head).decode(errors="replace")
        channel = CHANNEL_NAME.match(text)
        is_thought = channel is not None and channel[1] == "analysis"
        self._in_thought = is_thought and _called_in(text) not in self._names
        self.count += len(head) if self._in_thought else 0
        self._head = None


class HarmonyFormat(CallFormat):
    """Messages with a channel each. The prompt ends with `<|start|>assistant`."""

    name = "harmony"
    marks = (CHANNEL, MESSAGE, START, END, CALL, CONSTRAIN, RETURN)
    rendered_call = rf"to=functions\.{PROBE_NAME}\b.{{0,40}}<\|message\|>"
    has_channels = True
    thought_marks = ThoughtMarks(f"{CHANNEL}analysis{MESSAGE}", END)

    def scanner(
        self, *, start: int, only_calls: bool, functions: Mapping[str, Function], thoughts: bool = True
    ) -> HarmonyScanner:
        return HarmonyScanner(start=start, names=functions, thoughts=thoughts)

    def grammar(self, wanted: Wanted, spell: Spell) -> str:
        """Write the grammar: any number of reasoning or commentary messages, then a call or, if allowed, the answer.

        No commentary may precede an answer with a schema, because clients see both as one text.
        """
        channel, message = spell(CHANNEL), spell(MESSAGE)
        rules = remark_rules(spell, only_thoughts=wanted.answer is not None and not wanted.required)
        json_type = json_type_of(spell)
        calls = f"({called_rules(wanted)}) {spell(CALL)}?"
        last = ["call"]
        if not wanted.required:
            last.append("final")
            if wanted.answer is None:
                rules += rule("final", f"{channel} {literal('final')} {message} TEXT")
            else:
                rules += rule("final", f"{channel} {literal('final')} {json_type} {message} answer")
                rules += rule("answer", json_expression(wanted.answer))
        rules += rule("start", f"remark* ({' | '.join(last)})")
        rules += rule("call", calls)
        rules += rule("begun_call", f"{channel} {literal('commentary')}")
        return rules + rule("typed", f"{json_type} {message}") + arguments_rules(wanted.functions)

    def prelude(self, spell: Spell) -> str:
        final = f"{spell(CHANNEL)} {literal('final')} {json_type_of(spell)} {spell(MESSAGE)}"
        return rule("prelude", f"remark* {final}") + remark_rules(spell, only_thoughts=True)

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        channel = f"{CHANNEL}commentary to={FUNCTIONS}"
        return "".join([f"{channel}{name} {CONSTRAIN}json{MESSAGE}{arguments}{CALL}" for name, arguments in calls])

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Rename reasoning to the field that the template reads."""
        return [_with_thinking(message) for message in messages]


def remark_rules(spell: Spell, *, only_thoughts: bool) -> str:
    """Write the rule `remark`, a message of reasoning or commentary that another message follows, and `TEXT`."""
    ended, rules = opening(spell(END), "ended")
    kinds = literal("analysis") if only_thoughts else f"({literal('analysis')} | {literal('commentary')})"
    said = f"{spell(CHANNEL)} {kinds} {spell(MESSAGE)} {ended} {spell(START)} {literal('assistant')}"
    return rules + rule("remark", said) + rule("TEXT", TEXT)


def json_type_of(spell: Spell) -> str:
    """Return the right side of a rule for the optional content type of a message, apart from the name before it."""
    blank, constrain = literal(" "), spell(CONSTRAIN)
    return f"(({blank} {constrain}? | {constrain}) {literal('json')})?"


def called_rules(wanted: Wanted) -> str:
    """Return the right side of a rule for a call. The recipient is in the channel or before it."""
    recipients = [literal(f" to={FUNCTIONS}{function.name}") for function in wanted.functions]
    after = [f"begun_call {recipient} typed arguments_{i}" for i, recipient in enumerate(recipients)]
    before = [f"{recipient} begun_call typed arguments_{i}" for i, recipient in enumerate(recipients)]
    return " | ".join(after + before)


def _with_thinking(message: Message) -> dict[str, Any]:
    """Rename reasoning to `thinking`, and merge the text into it if the message has calls, as the template requires."""
    changed = {key: value for key, value in message.items() if key != "reasoning_content"}
    if thought := message.get("reasoning_content"):
        changed["thinking"] = thought
        if message.get("tool_calls") and message.get("content"):
            changed |= {"thinking": f"{thought}\n{message['content']}", "content": ""}
    return changed
