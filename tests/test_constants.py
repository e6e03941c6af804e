"""Module constants: used, one owner for each fact, numbers with their unit or their reason."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

PRODUCT = ("kernels", "common", "prefill_worker", "decode_worker", "router")
NAME = re.compile(r"_?[A-Z][A-Z0-9_]*")
UNITS = re.compile(r"_(S|MS|NS|BYTES|KIB|MIB|GIB|BITS|CHARS|TOKENS|ROWS|STEPS|SHARE|HWM)$|^GIB$")
OF_TIME = re.compile(r"(?:^|_)(?:TIMEOUT|INTERVAL|DELAY|BACKOFF|DEADLINE|GRACE|LINGER|LEASE|PAUSE|EVERY)(?:_|$)")
WAITS = re.compile(r"\b(?:sleep|timeout|timeout_at|wait_for)\(([A-Z][A-Z0-9_]*)\)|\btimeout(?:_s)?=([A-Z][A-Z0-9_]*)\b")
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Pow, ast.LShift, ast.USub)
# (name, value) in several files -> why these are several facts that are equal by chance
EQUAL_BY_CHANCE = {
    ("ARGUMENTS", '", "arguments": '): "of different models' calls",
    ("AUTO", "auto"): "a flag's value; OpenAI's `tool_choice`",
    ("BLOCK", 1024): "each kernel is tuned alone",
    ("BLOCK_K", 64): "each kernel is tuned alone",
    ("BLOCK_N", 64): "each kernel is tuned alone",
    ("NAME", '{"name": "'): "of different models' calls",
    ("POLL_S", 0.02): "each loop has its own reason",
    ("POLL_S", 0.2): "each loop has its own reason",
    ("SMOOTHING", 0.1): "each average has its own memory",
    ("SMOOTHING", 0.2): "each average has its own memory",
    (
        "SWIGLU_ALPHA",
        1.702,
    ): "kernels have it built in, and the router refuses checkpoints that want another, without torch",
    (
        "SWIGLU_LIMIT",
        7.0,
    ): "kernels have it built in, and the router refuses checkpoints that want another, without torch",
    ("TILE", 4096): "each kernel is tuned alone",
}
# Rooms in which a name may have another value in each file, and why.
SEVERAL_VALUES = {
    "common/ranks": "rank 0 and a host that brings ranks each have their own times",
    "kernels/gpu": "each kernel is tuned alone",
    "kernels/gpu/products": "each kernel is tuned alone",
}
# Numbers without unit or reason that stand for a word, by file.
CODES = {
    "common/ranks/loading.py": {"BACKLOG"},
    "common/ranks/remote_heads.py": {"READ", "WRITE", "CLEAR"},
    "common/ranks/sharded_source.py": {"ROWS", "COLUMNS"},
    "common/ranks/step_message.py": {"HEAD", "FIELDS", "RECORD", "REPLAY", "REPLAY_HEAD", "SAMPLE", "ALL_LOGITS"},
    "common/runner/seats.py": {"NO_SEAT"},
}


class Constant(NamedTuple):
    name: str
    value: object
    """None where it is no literal."""
    has_reason: bool


def literal(node: ast.expr) -> object:
    """A number, a text or a tuple of them; None for anything else."""
    try:
        plain = ast.literal_eval(node)
    except ValueError:
        parts = {type(one) for one in ast.walk(node)}
        if not parts <= {ast.BinOp, ast.UnaryOp, ast.Constant, *ARITHMETIC}:
            return None
        plain = eval(compile(ast.Expression(node), "constant", "eval"))
    is_plain = isinstance(plain, int | float | str | tuple) and not isinstance(plain, bool)
    return plain if is_plain and all(isinstance(one, Hashable) for one in _parts(plain)) else None


def _parts(value: object) -> Sequence[object]:
    return value if isinstance(value, tuple) else (value,)


def is_told(body: Sequence[ast.stmt]) -> bool:
    """Whether a docstring stands behind the first statement, or behind a block of assignments that it begins."""
    for node, behind in itertools.pairwise(body):
        if behind.lineno != (node.end_lineno or 0) + 1:
            return False
        if isinstance(behind, ast.Expr):
            return isinstance(behind.value, ast.Constant)
        if not isinstance(behind, ast.Assign | ast.AnnAssign):
            return False
    return False


@functools.cache
def constants(repository: Path) -> dict[str, list[Constant]]:
    """The module constants of each file of the product."""
    found: dict[str, list[Constant]] = {}
    for file in (file for folder in PRODUCT for file in sorted((repository / folder).rglob("*.py"))):
        text = file.read_text(encoding="utf-8")
        body, lines = ast.parse(text).body, text.splitlines()
        for place, node in enumerate(body):
            if isinstance(node, ast.Assign):
                targets: list[ast.expr] = node.targets
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                targets = [node.target]
            else:
                continue
            assert node.value is not None
            has_reason = (
                is_told(body[place:]) or "#" in lines[node.lineno - 1] or lines[node.lineno - 2].startswith("#")
            )
            for target in targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                values = node.value.elts if several and isinstance(node.value, ast.Tuple) else [node.value] * len(names)
                for name, value in zip(names, values, strict=False):
                    if isinstance(name, ast.Name) and NAME.fullmatch(name.id) and name.id != "_":
                        one = Constant(name.id, literal(value), has_reason)
                        found.setdefault(file.relative_to(repository).as_posix(), []).append(one)
    return found


@functools.cache
def num_uses(repository: Path) -> dict[str, int]:
    """How often the product names each of them, where it is assigned included."""
    uses: dict[str, int] = defaultdict(int)
    for folder in PRODUCT:
        for file in (repository / folder).rglob("*.py"):
            for name in re.findall(r"\b_?[A-Z][A-Z0-9_]*\b", file.read_text(encoding="utf-8")):
                uses[name] += 1
    return uses


def test_every_constant_is_used(repository: Path) -> None:
    """Delete what this names."""
    uses = num_uses(repository)
    assert [
        f"{file}: {one.name}" for file, all_ in constants(repository).items() for one in all_ if uses[one.name] < 2
    ] == []


def test_one_fact_has_one_owner(repository: Path) -> None:
    """Import it from the lower of the two files, or give each its own name; `EQUAL_BY_CHANCE` is for other cases."""
    files: dict[tuple[str, object], set[str]] = defaultdict(set)
    for file, all_ in constants(repository).items():
        for one in all_:
            if one.value is not None:
                files[one.name, one.value].add(file)
    several = {key: sorted(where) for key, where in files.items() if len(where) > 1}
    assert several.keys() == EQUAL_BY_CHANCE.keys(), several.keys() ^ EQUAL_BY_CHANCE.keys()


def test_a_name_stands_for_one_number_in_a_room(repository: Path) -> None:
    """Say in the name what tells the two apart."""
    files: dict[tuple[str, str], set[str]] = defaultdict(set)
    for file, all_ in constants(repository).items():
        for one in all_:
            if isinstance(one.value, int | float):
                files[file.rpartition("/")[0], one.name].add(file)
    several = [
        f"{name}: {sorted(where)}"
        for (room, name), where in files.items()
        if len(where) > 1 and room not in SEVERAL_VALUES
    ]
    assert several == []


def test_numbers_have_a_unit_or_a_reason(repository: Path) -> None:
    """End the name with the unit, or say behind it, in a docstring, what it counts and why it is so large."""
    wrong = [
        f"{file}: {one.name}"
        for file, all_ in constants(repository).items()
        for one in all_
        if isinstance(one.value, int | float) and not one.has_reason and not UNITS.search(one.name)
        if one.name not in CODES.get(file, ())
    ]
    assert wrong == []


def test_times_carry_their_unit(repository: Path) -> None:
    """End the name with _S or _MS."""
    named = [
        f"{file}: {one.name}"
        for file, all_ in constants(repository).items()
        for one in all_
        if isinstance(one.value, int | float) and OF_TIME.search(one.name) and not re.search(r"_(S|MS|NS)$", one.name)
    ]
    waited = [
        f"{file}: {name}"
        for file in constants(repository)
        for found in WAITS.findall((repository / file).read_text(encoding="utf-8"))
        if not (name := found[0] or found[1]).endswith("_S")
    ]
    assert named + waited == []


@pytest.mark.parametrize(
    ("text", "value"), [("5 * 2**20", 5 * 2**20), ("-1", -1), ('("a", 1)', ("a", 1)), ("len(x)", None), ("A + 1", None)]
)
def test_literals_are_known(text: str, value: object) -> None:
    assert literal(ast.parse(text, mode="eval").body) == value
