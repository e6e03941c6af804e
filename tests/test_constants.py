"""Module constants: each is used, each fact has one owner, times carry their unit."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

PRODUCT = ("kernels", "common", "prefill_worker", "decode_worker", "router")
NAME = re.compile(r"_?[A-Z][A-Z0-9_]*")
OF_TIME = re.compile(r"(?:^|_)(?:TIMEOUT|INTERVAL|DELAY|BACKOFF|DEADLINE|GRACE|LINGER|LEASE|PAUSE|EVERY)(?:_|$)")
WITH_UNIT = re.compile(r"_(S|MS|NS)$")
WAITS = re.compile(r"\b(?:sleep|timeout|timeout_at|wait_for)\(([A-Z][A-Z0-9_]*)\)|\btimeout(?:_s)?=([A-Z][A-Z0-9_]*)\b")
# (name, value) defined in several files -> why these are different facts that happen to be equal
EQUAL_BY_CHANCE = {
    ("AUTO", "auto"): "a flag's value; OpenAI's `tool_choice`",
    ("BLOCK", 1024): "each kernel is tuned separately",
    ("BLOCK_K", 64): "each kernel is tuned separately",
    ("BLOCK_N", 64): "each kernel is tuned separately",
    ("NAME", '{"name": "'): "calls of different models",
    ("POLL_S", 0.02): "each loop has its own reason",
    ("POLL_S", 0.2): "each loop has its own reason",
    ("SMOOTHING", 0.1): "each average has its own memory",
    ("SMOOTHING", 0.2): "each average has its own memory",
    ("TILE", 4096): "each kernel is tuned separately",
}


@functools.cache
def texts(repository: Path) -> dict[str, str]:
    """The source of each file of the product."""
    files = (file for folder in PRODUCT for file in sorted((repository / folder).rglob("*.py")))
    return {file.relative_to(repository).as_posix(): file.read_text(encoding="utf-8") for file in files}


def assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        for target in targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            is_unpacked = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            values = value.elts if is_unpacked and isinstance(value, ast.Tuple) else [value] * len(names)
            for name, one in zip(names, values, strict=False):
                if isinstance(name, ast.Name) and NAME.fullmatch(name.id) and name.id != "_":
                    yield name.id, one


def literal(node: ast.expr) -> int | float | str | None:
    """A number or a text, arithmetic on literals included; None for anything else."""
    if any(
        not isinstance(one, ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop)
        for one in ast.walk(node)
    ):
        return None
    value = eval(compile(ast.Expression(node), "constant", "eval"))
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else None


@functools.cache
def constants(repository: Path) -> list[tuple[str, str, int | float | str | None]]:
    """(file, name, value) of each module constant of the product; the value is None where it is no literal."""
    return [
        (file, name, literal(node))
        for file, text in texts(repository).items()
        for name, node in assignments(ast.parse(text).body)
    ]


def test_every_constant_is_used(repository: Path) -> None:
    uses = Counter(name for text in texts(repository).values() for name in re.findall(rf"\b{NAME.pattern}\b", text))
    unused = [f"{file}: delete {name}, which nothing uses" for file, name, _ in constants(repository) if uses[name] < 2]
    assert not unused, "\n".join(unused)


def test_one_fact_has_one_owner(repository: Path) -> None:
    files: dict[tuple[str, object], set[str]] = defaultdict(set)
    for file, name, value in constants(repository):
        if value is not None:
            files[name, value].add(file)
    several = {fact: sorted(where) for fact, where in files.items() if len(where) > 1}
    wrong = [
        f"{name} = {value!r} stands in {', '.join(where)}: keep it in the lower of them and import it from there. "
        "If these are different facts, give them different names or add the reason to EQUAL_BY_CHANCE."
        for (name, value), where in several.items()
        if (name, value) not in EQUAL_BY_CHANCE
    ]
    wrong += [f"delete {fact} from EQUAL_BY_CHANCE: one file defines it" for fact in EQUAL_BY_CHANCE.keys() - several]
    assert not wrong, "\n".join(wrong)


def test_times_carry_their_unit(repository: Path) -> None:
    named = [
        f"{file}: {name}"
        for file, name, value in constants(repository)
        if isinstance(value, int | float) and OF_TIME.search(name) and not WITH_UNIT.search(name)
    ]
    waited = [
        f"{file}: {name}"
        for file, text in texts(repository).items()
        for name in ("".join(found) for found in WAITS.findall(text))
        if not name.endswith("_S")
    ]
    wrong = [f"{one} is a time: end its name with _S or _MS" for one in named + waited]
    assert not wrong, "\n".join(wrong)
