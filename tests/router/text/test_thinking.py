"""Separation of thoughts from answers that arrive in pieces of any size."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from common.model_files.families import FAMILIES
from router.text.calls.registry import format_named
from router.text.thinking import MAX_BLANKS, ThinkingScanner, ThoughtPosition, ThoughtTokens
from router.text.thought_marks import KNOWN, ThoughtMarks, marks_in

THINK = KNOWN[0]
OPENED, BEFORE = ThoughtPosition.OPENED, ThoughtPosition.BEFORE

CASES = [
    ("<think>\nWell.\n\nHm.\n</think>\n\nYes.", False, ("Well.\n\nHm.", "Yes.")),
    ("Well.\n</think>\n\nYes.\n", True, ("Well.", "Yes.\n")),
    ("  <think></think>Yes.", False, ("", "Yes.")),
    ("<think>\n\n</think>\n\n", False, ("", "")),
    ("Yes <think>no</think>.", False, ("", "Yes <think>no</think>.")),
    ("<thinking>", False, ("", "<thinking>")),
    ("<thi", False, ("", "<thi")),
    (" ", False, ("", " ")),
    ("", False, ("", "")),
    ("a </thin k> b </think>c</think>d", True, ("a </thin k> b", "c</think>d")),
    ("cut off </thi", True, ("cut off </thi", "")),
    ("cut off \n", True, ("cut off", "")),
    ("<think>cut", False, ("cut", "")),
    ("</think>x", True, ("", "x")),
    ("</think> \n x \n y", True, ("", "x \n y")),
]


def taken_apart(
    pieces: list[str], *, inside: bool, cut: bool = False, marks: ThoughtMarks = THINK, keeps_blanks: bool = False
) -> tuple[str, str]:
    scanner = ThinkingScanner(marks, OPENED if inside else BEFORE, keeps_blanks=keeps_blanks)
    parts = [scanner.push(piece) for piece in pieces] + [scanner.flush(cut=cut)]
    return "".join([thought for thought, _ in parts]), "".join([said for _, said in parts])


@pytest.mark.parametrize(("text", "inside", "expected"), CASES)
def test_however_it_is_cut(text: str, inside: bool, expected: tuple[str, str]) -> None:
    assert taken_apart([text], inside=inside) == expected
    assert taken_apart(list(text), inside=inside) == expected
    for first, second in itertools.combinations(range(len(text)), 2):
        assert taken_apart([text[:first], text[first:second], text[second:]], inside=inside) == expected


@pytest.mark.parametrize("end", range(len("<think>\nWell.\n</think>")))
def test_an_answer_that_is_cut_off_shows_no_part_of_a_mark(end: int) -> None:
    begun = "<think>\nWell.\n</think>"[:end]
    thought, text = taken_apart(list(begun), inside=False, cut=True)
    assert text == "" and thought == begun.removeprefix("<think>").partition("<")[0].strip() * (end >= len("<think>"))


def test_a_thought_is_not_held_longer_than_it_must_be() -> None:
    scanner = ThinkingScanner(THINK, OPENED)
    assert scanner.push("I think") == ("I think", "")
    assert scanner.push(" so") == (" so", "")
    assert scanner.push(" </thi") == ("", "")
    assert scanner.push("s>") == (" </this>", "")
    assert scanner.push("</think>Yes") == ("", "Yes")
    assert scanner.push(" <th") == ("", " <th")


def test_an_answer_without_a_thought_is_held_for_no_longer_than_its_first_characters() -> None:
    scanner = ThinkingScanner(THINK)
    assert scanner.push("<") == ("", "")
    assert scanner.push("b> it is") == ("", "<b> it is")


@pytest.mark.parametrize("marks", KNOWN, ids=lambda marks: marks.start)
def test_all_known_marks(marks: ThoughtMarks) -> None:
    template = f"{{{{ '{marks.start}' + m.reasoning + '{marks.end}{marks.head}' + m.content + '{marks.tail}' }}}}"
    assert marks_in(template) == marks
    answer = f"\n\n{marks.head}\nYes.\n\n{marks.tail}\n" if marks.tail else f"\n\n{marks.head}Yes."
    text = f"{marks.start}\nHm, {marks.end[:-1]}. {marks.end}"
    for said, expected in ((answer, "Yes."), ("\n\nYes.", "Yes.")):
        for pieces in ([text + said], list(text + said)):
            assert taken_apart(pieces, inside=False, marks=marks) == (f"Hm, {marks.end[:-1]}.", expected)
            assert taken_apart(pieces, inside=False, marks=marks, keeps_blanks=True)[1] == said


WRAPPED, SOLAR = (marks_in(template) for template in ("</think><response></response>", "<|end|><|begin|>assistant"))


@pytest.mark.parametrize(
    ("marks", "answer", "cut", "expected"),
    [
        (WRAPPED, "<think>a</think>\n<response>\nb </response> c</response>d\n</response>\n", False,
         ("a", "b </response> c</response>d")),
        (WRAPPED, "<think>a</think><response>b\n</respo", False, ("a", "b\n</respo")),
        (WRAPPED, "<think>a</think><response>b\n</respo", True, ("a", "b")),
        (WRAPPED, "<think>a</think><response>b\n", True, ("a", "b\n")),
        (WRAPPED, "<think>a</think> <resp", True, ("a", "")),
        (WRAPPED, "<think>a</think> <resp", False, ("a", "<resp")),
        (WRAPPED, "<think>a</think>b</response>", False, ("a", "b</response>")),
        (WRAPPED, "<response>b</response>", False, ("", "<response>b</response>")),
        (SOLAR, "<|content|>b", False, ("", "b")),
        (SOLAR, "<|cont", True, ("", "")),
        (SOLAR, "<|contra", False, ("", "<|contra")),
    ],
)  # fmt: skip
def test_what_surrounds_an_answer_is_not_part_of_it(
    marks: ThoughtMarks, answer: str, cut: bool, expected: tuple[str, str]
) -> None:
    """Pieces of all sizes. A tail within an answer is text, as is a wrapper without a thought."""
    for size in range(1, len(answer) + 1):
        pieces = [answer[start : start + size] for start in range(0, len(answer), size)]
        assert taken_apart(pieces, inside=False, cut=cut, marks=marks) == expected, size


def test_an_answer_after_a_closed_thought_may_be_wrapped() -> None:
    scanner = ThinkingScanner(WRAPPED, ThoughtPosition.CLOSED)
    assert scanner.push("<response>\nb\n</response>\n") == ("", "b") and scanner.flush(cut=False) == ("", "")


def test_a_template_without_marks_is_of_a_model_that_does_not_think() -> None:
    assert marks_in("{{ m.content }}") is None and marks_in(None) is None
    assert marks_in("{{ m.content.split('</think>')[-1] }}") == THINK
    assert marks_in("{{ m.content.split('</think>')[-1] }}", lambda text: "response" in text) == WRAPPED


def test_the_page_of_models_has_known_formats_and_marks(repository: Path) -> None:
    page = (repository / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    _, *rows = re.findall(r"^\| (`.+?) \| .+? \| (\S.*?) \| (\S.*?) \|$", page.replace("\\|", "¦"), re.MULTILINE)
    listed = {name for types, _, _ in rows for name in re.findall(r"`(\w+)`", types)}
    assert FAMILIES.keys() - {"qwen3_vl_moe_text"} <= listed  # its wrapper stands for it
    for types, calls, thoughts in rows:
        assert calls == "–" or {format_named(name).name for name in re.findall(r"`(.+?)`", calls)}, types
        marks = {mark.replace("¦", "|") for mark in re.findall(r"`(.+?)`", thoughts)}
        assert marks <= {"analysis", *(known.start for known in KNOWN)} and bool(marks) is (thoughts != "–"), types


@pytest.mark.parametrize(
    ("prompt_end", "continued", "position"),
    [
        ("assistant\n<think>\n", "", OPENED),
        ("<think>", "<think>", OPENED),
        ("<think>\n\n</think>\n\n", "", ThoughtPosition.CLOSED),
        ("<think>so</think>", "<think>so</think>", ThoughtPosition.CLOSED),
        ("assistant\n", "", BEFORE),
        ("<think>so I", "<think>so I", ThoughtPosition.WITHIN),
        ("<think>so</think>I", "<think>so</think>I", ThoughtPosition.AFTER),
        ("I", "I", ThoughtPosition.AFTER),
        ("", "", BEFORE),
    ],
)
def test_where_a_prompt_ends(prompt_end: str, continued: str, position: ThoughtPosition) -> None:
    assert ThoughtPosition.of(THINK, prompt_end, continued) is position


def test_a_mark_that_ends_every_message_closes_only_a_thought() -> None:
    assert SOLAR is not None
    assert ThoughtPosition.of(SOLAR, "Hi<|end|><|begin|>assistant", "") is BEFORE
    assert ThoughtPosition.of(SOLAR, "<|think|><|end|><|begin|>assistant", "") is ThoughtPosition.CLOSED


@pytest.mark.parametrize("begin", ["", "<think>so", "<think>so</think><response>b"])
def test_little_white_space_is_held(begin: str) -> None:
    """Held text is read again for each piece of an answer."""
    scanner, blanks = ThinkingScanner(WRAPPED), "\n" * 10_000
    scanner.push(begin)
    for char in blanks:
        scanner.push(char)
        assert len(scanner._held) <= MAX_BLANKS + 1


def test_an_end_mark_that_also_ends_other_messages() -> None:
    marks = next(each for each in KNOWN if each.ends_turns)
    for prompt_end, position in (
        ("<|content|>hi<|end|><|begin|>assistant", ThoughtPosition.BEFORE),
        ("<|end|><|begin|>assistant<|think|><|end|><|begin|>assistant", ThoughtPosition.CLOSED),
        ("<|end|><|begin|>assistant<|think|>", ThoughtPosition.OPENED),
    ):
        assert ThoughtPosition.of(marks, prompt_end, "") is position
    assert ThoughtPosition.of(KNOWN[0], "<|Assistant|></think>\n", "") is ThoughtPosition.CLOSED


@pytest.mark.parametrize("marks", [("<t>", "t"), ("~~~", "~~~"), ("Think:", "|")], ids=str)
def test_tokens_of_a_thought_include_its_start_mark(marks: tuple[str, str]) -> None:
    """Which may contain the end mark."""
    start, end = marks
    answer = f"\n{start}hm{end}Hello {end}"
    for begins_inside, counted in ((False, f"\n{start}hm{end}"), (True, f"hm{end}")):
        counter = ThoughtTokens(lambda char: bytes([char]), ThoughtMarks(start, end), begins_inside=begins_inside)
        counter.push(answer.removeprefix("" if not begins_inside else f"\n{start}").encode())
        assert counter.count == len(counted) and not counter._tail
