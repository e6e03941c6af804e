"""Separation of thoughts from answers that arrive in pieces of any size."""

from __future__ import annotations

import itertools

import pytest

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
    assert marks_in(f"{{{{ '{marks.start}' + m.reasoning + '{marks.end}' }}}}") == marks
    text = f"{marks.start}\nHm, {marks.end[:-1]}. {marks.end}\n\nYes."
    for pieces in ([text], list(text)):
        assert taken_apart(pieces, inside=False, marks=marks) == (f"Hm, {marks.end[:-1]}.", "Yes.")
        assert taken_apart(pieces, inside=False, marks=marks, keeps_blanks=True)[1] == "\n\nYes."


def test_a_template_without_marks_is_of_a_model_that_does_not_think() -> None:
    assert marks_in("{{ m.content }}") is None and marks_in(None) is None
    assert marks_in("{{ m.content.split('</think>')[-1] }}") == THINK


@pytest.mark.parametrize(
    ("prompt_end", "continued", "position"),
    [
        ("assistant\n<think>\n", "", OPENED),
        ("<think>", "<think>", OPENED),
        ("<think>\n\n</think>\n\n", "", ThoughtPosition.AFTER),
        ("assistant\n", "", BEFORE),
        ("<think>so I", "<think>so I", ThoughtPosition.WITHIN),
        ("<think>so</think>I", "<think>so</think>I", ThoughtPosition.AFTER),
        ("I", "I", ThoughtPosition.AFTER),
        ("", "", BEFORE),
    ],
)
def test_where_a_prompt_ends(prompt_end: str, continued: str, position: ThoughtPosition) -> None:
    assert ThoughtPosition.of(THINK, prompt_end, continued) is position


@pytest.mark.parametrize("begin", ["", "<think>so"])
def test_little_white_space_is_held(begin: str) -> None:
    """Held text is read again for each piece of an answer."""
    scanner, blanks = ThinkingScanner(THINK), "\n" * 10_000
    scanner.push(begin)
    for char in blanks:
        scanner.push(char)
        assert len(scanner._held) <= MAX_BLANKS + 1


def test_an_end_mark_that_also_ends_other_messages() -> None:
    marks = next(each for each in KNOWN if each.ends_messages)
    for prompt_end, position in (
        ("<|content|>hi<|end|><|begin|>assistant", ThoughtPosition.BEFORE),
        ("<|end|><|begin|>assistant<|think|><|end|><|begin|>assistant", ThoughtPosition.AFTER),
        ("<|end|><|begin|>assistant<|think|>", ThoughtPosition.OPENED),
    ):
        assert ThoughtPosition.of(marks, prompt_end, "") is position
    assert ThoughtPosition.of(KNOWN[0], "<|Assistant|></think>\n", "") is ThoughtPosition.AFTER


@pytest.mark.parametrize("marks", [("<t>", "t"), ("~~~", "~~~"), ("Think:", "|")], ids=str)
def test_tokens_of_a_thought_include_its_start_mark(marks: tuple[str, str]) -> None:
    """Which may contain the end mark."""
    start, end = marks
    answer = f"\n{start}hm{end}Hello {end}"
    for begins_inside, counted in ((False, f"\n{start}hm{end}"), (True, f"hm{end}")):
        counter = ThoughtTokens(lambda char: bytes([char]), ThoughtMarks(start, end), begins_inside=begins_inside)
        counter.push(answer.removeprefix("" if not begins_inside else f"\n{start}").encode())
        assert counter.count == len(counted) and not counter._tail
