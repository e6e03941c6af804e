"""Formats, beside what independent validators say of the same texts."""

from __future__ import annotations

import functools
import ipaddress
import json
import random
import string
import uuid
from collections.abc import Callable
from datetime import date

import llguidance
import pytest

from common.grammar.vocabulary import compile_grammar
from common.model_files.resolve import resolve_model
from router.text.answer_grammar import json_grammar
from router.text.schema.keywords import FORMATS

from ....random_documents import Documents

NUM_ANSWERS = 25
NUM_CHANGES = 1500
LETTERS = set(string.ascii_letters + string.digits + "-")
DISPUTED = {
    "uri-template": "its validator refuses `{a:1000}`, which RFC 6570 allows",
    "relative-json-pointer": "its validator refuses the digits of `10`",
    "iri": "its validator refuses characters beyond the first plane",
    "iri-reference": "its validator refuses characters beyond the first plane",
}


@functools.cache
def documents() -> Documents:
    return Documents(resolve_model("tiny-random"))


@functools.cache
def matcher(name: str) -> llguidance.LLMatcher:
    found, problem = compile_grammar(documents().vocabulary, json_grammar({"type": "string", "format": name}))
    assert not problem
    return found


def takes(name: str, text: str) -> bool:
    return documents().accepts(matcher(name), json.dumps(text, ensure_ascii=False).encode())


@functools.cache
def validator(name: str) -> Callable[[str], bool]:
    from jsonschema import Draft202012Validator  # seconds to import

    return lambda text: Draft202012Validator.FORMAT_CHECKER.conforms(text, name)


@pytest.mark.parametrize("name", sorted(FORMATS - DISPUTED.keys()))
def test_every_answer_is_of_its_format(name: str) -> None:
    rng = random.Random(name)
    for _ in range(NUM_ANSWERS):
        if (text := documents().draw(matcher(name), rng)) is not None:
            assert validator(name)(json.loads(text)), text


def is_date(text: str) -> bool:
    try:
        return len(text) == 10 and date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def is_time(text: str) -> bool:
    """RFC 3339's `date-time` without leap seconds."""
    head, _, tail = text.partition("T")
    clock, rest = tail[:8], tail[8:].upper()
    if not is_date(head) or len(clock) != 8 or clock.count(":") != 2:
        return False
    if rest.startswith("."):
        digits = rest[1:].rstrip("Z") if rest.endswith("Z") else rest[1:-6]
        if not (digits.isascii() and digits.isdigit()):
            return False
        rest = rest[1 + len(digits) :]
    if rest != "Z" and not (len(rest) == 6 and rest[0] in "+-" and rest[3] == ":"):
        return False
    numbers = [*clock.split(":"), *(rest[1:].split(":") if rest != "Z" else ())]
    most = (23, 59, 59, 23, 59)
    return all(
        len(each) == 2 and each.isdigit() and int(each) <= limit for each, limit in zip(numbers, most, strict=False)
    )


def is_ipv6(text: str) -> bool:
    try:
        return "%" not in text and bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


def is_ipv4(text: str) -> bool:
    try:
        return bool(ipaddress.IPv4Address(text))
    except ValueError:
        return False


def is_hostname(text: str) -> bool:
    """RFC 1123's, without labels that stand for names in other scripts."""
    labels = text.split(".")
    return all(
        0 < len(label) < 64 and set(label) <= LETTERS and "-" not in (label[0], label[-1]) and label[2:4] != "--"
        for label in labels
    )


def is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False


CASES: dict[str, tuple[Callable[[str], bool], list[str], str]] = {
    "date": (is_date, ["2024-02-29", "2023-02-28", "1900-02-28", "2000-12-31", "0004-02-29", "2100-04-30"], "0123459-"),
    "date-time": (is_time, ["2024-02-29T23:59:59Z", "1985-04-12T10:20:50.52+23:59", "0400-12-31T00:00:00-00:00"],
                  "01239:.TZ+-6"),
    "ipv6": (is_ipv6, ["::", "1::", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "a:b::c:d", "1:2:3:4:5:6:10.0.0.255",
                       "1::2:3:4:5:6:7"], "01af:."),
    "ipv4": (is_ipv4, ["0.0.0.0", "255.249.100.99", "10.20.30.40"], "01259."),
    "hostname": (is_hostname, ["a", "a-b.c", "example.com", "a1--b.x-y", "x" * 63, "3com.1"], "a1-.x"),
    "uuid": (is_uuid, ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], "0a-g"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_changed_texts_are_judged_alike(name: str) -> None:
    judge, texts, alphabet = CASES[name]
    rng = random.Random(name)
    judged = {True: 0, False: 0}
    for i in range(NUM_CHANGES):
        text = [*rng.choice(texts)]
        for _ in range(i and rng.randint(1, 3)):
            at = rng.randrange(len(text) + 1)
            text[at : at + rng.randint(0, 1)] = rng.choice(["", rng.choice(alphabet)])
        expected = judge("".join(text))
        judged[expected] += 1
        assert takes(name, "".join(text)) is expected, "".join(text)
    assert min(judged.values()) > 20, judged


@pytest.mark.parametrize(
    ("name", "texts", "others"),
    [
        ("date", ["2024-02-29", "2000-02-29", "0001-01-01"], ["2023-02-29", "1900-02-29", "0000-01-01", "2024-2-9"]),
        ("time", ["23:59:59Z", "08:30:06.283185+00:20"], ["23:59:60Z", "08:30:60Z", "24:00:00Z", "08:30:06"]),
        ("date-time", ["1985-04-12T23:20:50.52Z", "1996-12-19t16:39:57-08:00"], ["2023-02-29T00:00:00Z"]),
        ("hostname", ["a--b.de", "x" * 63], ["ab--c.de", "xn--a", "x" * 64, "-a", "a-", "a..b", "a."]),
        ("uri", ["http://[::ffff:1.2.3.4]:80/", "urn:a:b"], ["//a", "http://[1::2::3]/", "http://[1]/"]),
    ],
)  # fmt: skip
def test_texts_at_the_edges(name: str, texts: list[str], others: list[str]) -> None:
    assert [text for text in texts if not takes(name, text)] == []
    assert [text for text in others if takes(name, text)] == []
