r"""Converter from GBNF, llama.cpp's grammar format, to Lark's. xgrammar's EBNF is GBNF with extensions.

    root ::= "(" root ")" | [a-z]+   ->   start: T0 start T1 | T2    T0: /\x{28}/    T1: /\x{29}/    T2: /[a-z]+/

The grammar library has a lexer: it always takes the longest terminal that is allowed at a position, and does not
backtrack. GBNF has no terminals: `"if" "x" | [a-z]+ "!"` accepts `ifx`. A part of a rule therefore becomes a terminal
only if this does not change the language: wherever the terminal may end and another symbol may follow, no allowed
terminal could match more characters. All other parts are split, down to single characters if necessary, which are
exact but slow.

Rules are renamed, because names in GBNF may differ only in case and may be `start`. The time is linear in the text.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

MAX_GROUP_DEPTH = 64
"""Maximum depth of nested groups."""
MAX_REPEATED = 8
"""Maximum number of stacked repetitions, such as the three in `a+{2}?`."""
MAX_TERMINALS = 400
"""Maximum number of terminals to compare with each other. Grammars with more are split into characters."""
MAX_STATES = 1_000
"""Maximum number of states of a terminal's automaton."""
MAX_STEPS = 100_000
"""Maximum number of steps of all comparisons together."""
MAX_ROUNDS = 8
"""Rounds of splitting ambiguous terminals. After the last one, all terminals are split."""
MAX_SYMBOLS = 32_768
"""Maximum number of symbols of a grammar. Each takes at least four characters of the output."""
LARGE_REPETITION, LARGE_ITEM = 4_096, 8
"""Minimum characters of a repetition, and of its item, to write it as a rule. The lexer has a state for each character,
so large repetitions are not terminals."""
SURROGATES = range(0xD800, 0xE000)

TOKEN = re.compile(
    r"""
    (?P<blank>[ \t\r\n]+ | \#[^\r\n]*)
  | (?P<literal>"[^"\\]*(?:\\.[^"\\]*)*")
  | (?P<set>\[[^\]\\]*(?:\\.[^\]\\]*)*\])
  | (?P<count>\{[ \t\r\n]*[0-9]{1,9}[ \t\r\n]*(?:,[ \t\r\n]*(?:[0-9]{1,9}[ \t\r\n]*)?)?\})
  | (?P<define>::=)
  | (?P<name>[\w-]+)
  | (?P<times>[*+?])
  | (?P<sign>[|().])
    """,
    re.VERBOSE | re.DOTALL,
)
REPEATS = ("count", "times")
CHARACTER = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])|[^\\]", re.DOTALL)
LETTERS = {"n": 10, "r": 13, "t": 9, "a": 7, "b": 8, "f": 12, "v": 11, "e": 27, "0": 0}
THEMSELVES = frozenset("\\\"'[]-^/?")
"""Characters that a backslash leaves unchanged."""
HEAD = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*|//[^\r\n]*)*+[\w-]*[ \t]*::=")


class GbnfError(ValueError):
    """Invalid GBNF. The message names the line."""


@dataclass(eq=False, slots=True)
class Node:
    """A part of a rule."""


@dataclass(eq=False, slots=True)
class Characters(Node):
    """One character of a set."""

    ranges: list[tuple[int, int]]
    is_negated: bool = False


@dataclass(eq=False, slots=True)
class Literal(Node):
    text: str


@dataclass(eq=False, slots=True)
class Concatenation(Node):
    items: list[Node]


@dataclass(eq=False, slots=True)
class Choice(Node):
    items: list[Node]


@dataclass(eq=False, slots=True)
class Repetition(Node):
    item: Node
    least: int
    most: int | None


@dataclass(eq=False, slots=True)
class Reference(Node):
    name: str


def is_gbnf(text: str) -> bool:
    """Whether a grammar begins with a rule `name ::= ...`, which GBNF has and Lark's format does not."""
    return HEAD.match(text) is not None


def gbnf_to_lark(text: str) -> str:
    """Convert a grammar to Lark's format, with the same language. Raises GbnfError."""
    return _Conversion(parse(text)).lark()


# ------------------------------------------------------------ reading


def parse(text: str) -> dict[str, Node]:
    """Parse a grammar into rules by name, in order. Raises GbnfError."""
    return _Parser(text).rules()


@dataclass(slots=True)
class _Token:
    kind: str
    text: str
    at: int
    begins_line: bool


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._read())

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        at = 0
        while at < len(self._tokens):
            head = self._tokens[at]
            if head.kind != "name" or not self._is_define(at + 1):
                raise self._error(head.at, "expected a rule, `name ::= ...`")
            if head.text in found:
                raise self._error(head.at, f"the rule `{head.text[:64]}` is defined twice")
            found[head.text], at = self._rule(at + 2)
        for name in {each.name: None for rule in found.values() for each in _references(rule)}:
            if name not in found:
                raise GbnfError(f"the rule `{name[:64]}` is not defined")
        if "root" not in found:
            raise GbnfError("the rule `root` is not defined")
        return found

    def _read(self) -> Iterator[_Token]:
        at, begins_line = 0, True
        while at < len(self._text):
            found = TOKEN.match(self._text, at)
            if found is None:
                raise self._error(at, f"unexpected character {self._text[at]!r}")
            at = found.end()
            kind = found.lastgroup or ""
            if kind == "blank":
                begins_line = begins_line or "\n" in found[0] or "\r" in found[0]
            else:
                yield _Token(kind, found[0], found.start(), begins_line)
                begins_line = False

    def _is_define(self, at: int) -> bool:
        return at < len(self._tokens) and self._tokens[at].kind == "define"

    def _rule(self, at: int) -> tuple[Node, int]:
        """Parse the right side of a rule from token `at`. Return it and the index of the next rule."""
        groups: list[list[list[Node]]] = [[[]]]
        begin = at
        while at < len(self._tokens):
            token = self._tokens[at]
            choices = groups[-1]
            if self._is_define(at + 1):
                if len(groups) > 1 or not token.begins_line or self._tokens[at - 1].text == "|" or at == begin:
                    raise self._error(token.at, "a rule begins before the previous one ends")
                break
            if token.text == "|" and token.kind == "sign":
                choices.append([])
            elif token.text == "(":
                if len(groups) > MAX_GROUP_DEPTH:
                    raise self._error(token.at, f"groups are nested deeper than {MAX_GROUP_DEPTH} levels")
                groups.append([[]])
            elif token.text == ")":
                if len(groups) == 1:
                    raise self._error(token.at, "`)` without `(`")
                group = _chosen(groups.pop())
                groups[-1][-1].append(group)
            elif token.kind in REPEATS:
                if not choices[-1]:
                    raise self._error(token.at, f"`{token.text}` follows no item to repeat")
                if at > begin + MAX_REPEATED and all(
                    each.kind in REPEATS for each in self._tokens[at - MAX_REPEATED : at]
                ):
                    raise self._error(token.at, f"more than {MAX_REPEATED} repetitions follow each other")
                choices[-1][-1] = self._repeated(choices[-1][-1], token)
            else:
                choices[-1].append(self._atom(token))
            at += 1
        if len(groups) > 1:
            raise self._error(self._tokens[at - 1].at, "`(` without `)`")
        return _chosen(groups[0]), at

    def _atom(self, token: _Token) -> Node:
        match token.kind:
            case "literal":
                return Literal("".join(map(chr, self._characters(token.text[1:-1], token.at))))
            case "set":
                return self._set(token)
            case "name":
                return Reference(token.text)
            case "sign":
                return Characters([(0, sys.maxunicode)])
        raise self._error(token.at, f"unexpected `{token.text}`")

    def _set(self, token: _Token) -> Characters:
        is_negated = token.text.startswith("[^")
        inside = token.text[2 if is_negated else 1 : -1]
        signs = [found[0] for found in CHARACTER.finditer(inside)]
        points = self._characters(inside, token.at)
        ranges: list[tuple[int, int]] = []
        at = 0
        while at < len(points):
            is_range = at + 2 < len(points) and signs[at + 1] == "-"
            low, high = points[at], points[at + 2] if is_range else points[at]
            if low <= high:  # a reversed range has no characters
                ranges.append((low, high))
            at += 3 if is_range else 1
        if not ranges:
            raise self._error(token.at, f"`{token.text[:64]}` has no characters")
        return Characters(ranges, is_negated)

    def _characters(self, text: str, at: int) -> list[int]:
        """Return the code points of a text with escapes."""
        found: list[int] = []
        end = 0
        for each in CHARACTER.finditer(text):
            if each.start() != end:
                break
            end = each.end()
            sign = each[0]
            if len(sign) == 1:
                point = ord(sign)
            elif len(sign) > 2:
                point = int(sign[2:], 16)
            elif sign[1] in THEMSELVES:
                point = ord(sign[1])
            else:
                point = LETTERS.get(sign[1], -1)
            if not 0 <= point <= sys.maxunicode or point in SURROGATES:
                raise self._error(at, f"`{sign}` is not a character")
            found.append(point)
        if end != len(text):
            raise self._error(at, f"`{text[end : end + 10]}` is not a character")
        return found

    def _repeated(self, node: Node, token: _Token) -> Node:
        if token.kind == "times":
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[token.text]
            return Repetition(node, least, most)
        numbers = [each.strip() for each in token.text[1:-1].split(",")]
        least, most = int(numbers[0]), int(numbers[-1]) if numbers[-1] else None
        if most is not None and most < least:
            raise self._error(token.at, f"`{token.text}` has a maximum below its minimum")
        return Repetition(node, least, most) if most != 0 else Concatenation([])

    def _error(self, at: int, what: str) -> GbnfError:
        return GbnfError(f"line {self._text.count(chr(10), 0, at) + 1}: {what}")


def _chosen(choices: list[list[Node]]) -> Node:
    found = [items[0] if len(items) == 1 else Concatenation(items) for items in choices]
    return found[0] if len(found) == 1 else Choice(found)


def _children(node: Node) -> Sequence[Node]:
    if isinstance(node, Concatenation | Choice):
        return node.items
    return (node.item,) if isinstance(node, Repetition) else ()


def _walk(node: Node) -> Iterator[Node]:
    left = [node]
    while left:
        here = left.pop()
        yield here
        left.extend(reversed(_children(here)))


def _references(node: Node) -> Iterator[Reference]:
    return (each for each in _walk(node) if isinstance(each, Reference))


# ------------------------------------------------------------ sets of first characters


def _mask(low: int, high: int) -> int:
    """Return the bits of a range: one for each ASCII character, and 64 shared by all others."""
    found = 0
    if low < 128:
        found |= (1 << (min(high, 127) + 1)) - (1 << low)
    if high >= 128:
        low = max(low, 128)
        if high - low >= 63:
            return found | OTHERS
        for point in range(low, high + 1):
            found |= 1 << (128 + point % 64)
    return found


OTHERS = ((1 << 64) - 1) << 128
"""Bits of characters beyond ASCII, by their code points modulo 64."""


def _mask_of(node: Characters) -> int:
    """Return the bits of a set's characters. Other characters may share them."""
    if not node.is_negated:
        found = 0
        for low, high in node.ranges:
            found |= _mask(low, high)
        return found
    ascii_only = 0
    for low, high in node.ranges:
        if low < 128:
            ascii_only |= _mask(low, min(high, 127))
    return (((1 << 128) - 1) & ~ascii_only) | OTHERS


@dataclass(slots=True)
class _Facts:
    """Properties of a part: whether it is nullable, its first characters, all its characters, its written length."""

    is_nullable: bool
    first: int
    every: int
    size: int


class _Regular:
    """The rules without recursion, and the properties of their parts."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._facts: dict[Node, _Facts] = {}
        self.names = self._without_recursion()

    def facts(self, node: Node) -> _Facts:
        if (known := self._facts.get(node)) is None:
            known = self._facts[node] = self._found(node)
        return known

    def _without_recursion(self) -> set[str]:
        users: dict[str, list[str]] = defaultdict(list)
        missing: dict[str, int] = {}
        for name, rule in self._rules.items():
            used = {each.name for each in _references(rule)}
            missing[name] = len(used)
            for each in used:
                users[each].append(name)
        left = [name for name, number in missing.items() if not number]
        found: set[str] = set()
        while left:
            name = left.pop()
            found.add(name)
            self.facts(self._rules[name])  # after the rules that it uses, so this recurses into no rule
            for user in users[name]:
                missing[user] -= 1
                if not missing[user]:
                    left.append(user)
        return found

    def _found(self, node: Node) -> _Facts:
        match node:
            case Characters():
                mask = _mask_of(node)
                return _Facts(False, mask, mask, 1)
            case Literal(text=text):
                every = 0
                for character in text:
                    every |= _mask(ord(character), ord(character))
                return _Facts(not text, _mask(ord(text[0]), ord(text[0])) if text else 0, every, len(text))
            case Concatenation(items=items):
                whole = _Facts(True, 0, 0, 0)
                for part in map(self.facts, items):
                    whole.first |= part.first if whole.is_nullable else 0
                    whole.is_nullable &= part.is_nullable
                    whole.every |= part.every
                    whole.size += part.size
                return whole
            case Choice(items=items):
                parts = [self.facts(item) for item in items]
                whole = _Facts(any(part.is_nullable for part in parts), 0, 0, sum(part.size for part in parts))
                for part in parts:
                    whole.first |= part.first
                    whole.every |= part.every
                return whole
            case Repetition(item=item, least=least, most=most):
                part = self.facts(item)
                times = max(least, 2) if most is None else most
                return _Facts(part.is_nullable or not least, part.first, part.every, part.size * times)
            case Reference(name=name):
                return self.facts(self._rules[name])
        raise TypeError(node)


# ------------------------------------------------------------ symbols


@dataclass(eq=False, slots=True)
class _Symbol:
    """A terminal (a `node` or a concatenation, without `items`), or another part of a rule."""

    node: Node
    items: list[_Symbol] = field(default_factory=list)
    terminal: Node | None = None
    origin: Node | None = None
    """Part to split when the parts that this terminal joins must be separate terminals."""
    is_nullable: bool = False
    first: int = 0
    follow: int = 0
    parents: list[_Symbol] = field(default_factory=list)


class _Conversion:
    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._regular = _Regular(rules)
        self._split: set[Node] = set()
        """Parts without recursion that must not be terminals."""
        self._apart: set[Node] = set()
        """Parts whose items are separate terminals."""
        self._open = {name for name in rules if name not in self._regular.names}
        self._joins_all = False
        self._steps = self._num_built = 0
        self._symbols: list[_Symbol] = []
        self._bodies: dict[str, _Symbol] = {}
        self._is_flat: dict[Node, bool] = {}
        self._automata: dict[Node, _Automaton | None] = {}

    def lark(self) -> str:
        self._split_large()
        for self._joins_all in (True, False):
            self._build()
            disputed = self._disputed()
            if disputed is not None and not disputed:
                return _written(self._bodies, self._rules)
        for _ in range(MAX_ROUNDS):
            if disputed is None or self._num_built > 2 * MAX_SYMBOLS:
                break
            for symbol in disputed:
                self._divide(symbol)
            self._build()
            disputed = self._disputed()
            if disputed is not None and not disputed:
                return _written(self._bodies, self._rules)
        for name, rule in self._rules.items():
            self._open.add(name)
            self._split.update(_walk(rule))
        self._build()
        return _written(self._bodies, self._rules)

    def _split_large(self) -> None:
        """Split large repetitions of large items, and all parts that contain them."""
        users: dict[Node, list[Node]] = defaultdict(list)
        names: dict[str, list[Node]] = defaultdict(list)
        large: list[Node] = []
        for rule in self._rules.values():
            for node in _walk(rule):
                for child in _children(node):
                    users[child].append(node)
                if isinstance(node, Reference):
                    names[node.name].append(node)
                if isinstance(node, Repetition) and self._is_terminal(node):
                    size, item = self._regular.facts(node).size, self._regular.facts(node.item).size
                    large += [node] if size > LARGE_REPETITION and item > LARGE_ITEM else []
        bodies = {rule: name for name, rule in self._rules.items()}
        while large:
            node = large.pop()
            if node in self._split:
                continue
            self._split.add(node)
            large += users[node]
            if node in bodies:
                self._open.add(bodies[node])
                large += names[bodies[node]]

    def _build(self) -> None:
        """Build the symbols of all rules that are not terminals, starting with `root`."""
        self._symbols, self._bodies, self._is_flat, self._automata = [], {}, {}, {}
        left = ["root"]
        while left:
            name = left.pop()
            if name not in self._bodies:
                self._bodies[name] = self._lowered(self._rules[name])
                left += [
                    each.node.name
                    for each in _below(self._bodies[name])
                    if isinstance(each.node, Reference) and each.terminal is None
                ]
        self._analyse()

    def _is_terminal(self, node: Node) -> bool:
        """Whether a part can be a terminal."""
        known = self._is_flat.get(node)
        if known is None:
            if node in self._split:
                known = isinstance(node, Characters) or (isinstance(node, Literal) and len(node.text) < 2)
            elif isinstance(node, Reference):
                known = node.name not in self._open
            else:
                known = all(map(self._is_terminal, _children(node)))
            self._is_flat[node] = known
        return known

    def _lowered(self, node: Node) -> _Symbol:
        if self._is_terminal(node):
            return self._added(_Symbol(node, terminal=node))
        match node:
            case Literal(text=text):
                items = [self._lowered_character(character) for character in text]
            case Concatenation(items=parts):
                items = [self._joined(node, run, Concatenation) for run in self._runs(node, parts)]
            case Choice(items=parts):
                flat = [part for part in parts if self._is_terminal(part)]
                if node in self._apart or node in self._split or len(flat) < 2:
                    items = [self._lowered(part) for part in parts]
                else:
                    items = [self._lowered(part) for part in parts if not self._is_terminal(part)]
                    items.append(self._joined(node, flat, Choice))
            case Repetition(item=item):
                items = [self._lowered(item)]
            case _:
                items = []
        return self._added(_Symbol(node, items))

    def _lowered_character(self, character: str) -> _Symbol:
        node = Literal(character)
        return self._added(_Symbol(node, terminal=node))

    def _runs(self, node: Node, parts: list[Node]) -> Iterator[list[Node]]:
        """Yield groups of parts that become one terminal: all, or one part with nullable neighbours (blanks)."""
        run: list[Node] = []
        is_apart = node in self._apart or node in self._split
        for part in parts:
            if run and (is_apart or not self._joins(run, part)):
                yield run
                run = []
            run.append(part)
        if run:
            yield run

    def _joins(self, run: list[Node], part: Node) -> bool:
        if not (self._is_terminal(run[-1]) and self._is_terminal(part)):
            return False
        facts = self._regular.facts
        return self._joins_all or facts(part).is_nullable or all(facts(each).is_nullable for each in run)

    def _joined(self, origin: Node, parts: list[Node], kind: type[Concatenation | Choice]) -> _Symbol:
        if len(parts) == 1:
            return self._lowered(parts[0])
        node = kind(parts)
        return self._added(_Symbol(node, terminal=node, origin=origin))

    def _added(self, symbol: _Symbol) -> _Symbol:
        if len(self._symbols) == MAX_SYMBOLS:
            raise GbnfError(f"the grammar is too large, or too ambiguous: it has more than {MAX_SYMBOLS:,} symbols")
        self._symbols.append(symbol)
        self._num_built += 1
        for item in symbol.items:
            item.parents.append(symbol)
        return symbol

    def _divide(self, symbol: _Symbol) -> None:
        """Split a terminal into the next smaller terminals."""
        node = symbol.terminal
        if symbol.origin is not None:
            self._apart.add(symbol.origin)
            return
        while isinstance(node, Reference):
            self._open.add(node.name)
            self._split.add(node)
            node = self._rules[node.name]
        if node is not None:
            self._split.add(node)

    # ------------------------------------------------------------ sets of first and following characters

    def _analyse(self) -> None:
        terminals = [symbol for symbol in self._symbols if symbol.terminal is not None]
        for symbol in self._symbols:
            if symbol.terminal is not None:
                symbol.first = self._regular.facts(symbol.node).first
            elif isinstance(symbol.node, Reference):
                symbol.items = [self._bodies[symbol.node.name]]
                symbol.items[0].parents.append(symbol)
        whole = self._derived(terminals)
        for name, body in self._bodies.items():
            if body not in whole:
                raise GbnfError(f"the rule `{name[:64]}` never ends: it matches no text")
        for symbol in self._derived(each for each in terminals if self._regular.facts(each.node).is_nullable):
            symbol.is_nullable = True
        begins: dict[_Symbol, list[_Symbol]] = defaultdict(list)
        for symbol in self._symbols:
            for item in symbol.items:
                begins[item].append(symbol)
                if isinstance(symbol.node, Concatenation | Literal) and not item.is_nullable:
                    break
        _spread(self._symbols, begins, "first")
        _spread(self._symbols, self._ends(), "follow")

    def _derived(self, terminals: Iterable[_Symbol]) -> set[_Symbol]:
        """Return the symbols that match a text of only these terminals, or the empty text."""
        missing: dict[_Symbol, int] = {}
        found = set(terminals)
        for symbol in self._symbols:
            is_sequence = isinstance(symbol.node, Concatenation | Literal)
            missing[symbol] = len(symbol.items) if is_sequence else 1
            is_optional = isinstance(symbol.node, Repetition) and not symbol.node.least
            if symbol.terminal is None and (is_optional or not missing[symbol]):
                found.add(symbol)
        left = [*found]
        while left:
            for parent in left.pop().parents:
                missing[parent] -= 1
                if not missing[parent] and parent not in found:
                    found.add(parent)
                    left.append(parent)
        return found

    def _ends(self) -> dict[_Symbol, list[_Symbol]]:
        """Return the symbols that each symbol may end with, and record the characters that follow all others."""
        found: dict[_Symbol, list[_Symbol]] = {}
        for symbol in self._symbols:
            node = symbol.node
            found[symbol] = symbol.items
            if isinstance(node, Repetition) and symbol.items and node.most != 1:
                symbol.items[0].follow |= symbol.items[0].first
            elif isinstance(node, Concatenation | Literal):
                found[symbol] = ends = []
                first, is_last = 0, True
                for item in reversed(symbol.items):
                    item.follow |= first
                    if is_last:
                        ends.append(item)
                    first = item.first | (first if item.is_nullable else 0)
                    is_last &= item.is_nullable
        return found

    # ------------------------------------------------------------ ambiguous terminals

    def _disputed(self) -> list[_Symbol] | None:
        """Return terminals that could match more characters where they, or others with a common prefix, may end.

        Returns None if the comparison takes too many steps.
        """
        kinds: dict[str, list[_Symbol]] = defaultdict(list)
        writer = _Writer(self._rules)
        for symbol in self._symbols:
            if symbol.terminal is not None:
                kinds[writer.key(symbol.terminal)].append(symbol)
        if len(kinds) == 1 and len(self._symbols) == 1:
            return []
        terminals = [(found, self._regular.facts(found[0].node), _union(found)) for found in kinds.values()]
        if len(terminals) > MAX_TERMINALS:
            return None
        disputed: dict[_Symbol, None] = {}
        for ones, facts, follow in terminals:
            for others, other, _ in terminals:
                is_close = other.size > 1 and facts.first & other.first and other.every & follow
                if is_close and self._may_continue(self._automaton(ones[0]), self._automaton(others[0]), follow):
                    disputed.update(dict.fromkeys(others))
        return [*disputed] if self._steps <= MAX_STEPS else None

    def _automaton(self, symbol: _Symbol) -> _Automaton | None:
        """Return the automaton of a terminal, or None if it is too large."""
        if symbol.node not in self._automata:
            self._automata[symbol.node] = _automaton(symbol.node, self._rules)
        return self._automata[symbol.node]

    def _may_continue(self, one: _Automaton | None, other: _Automaton | None, follow: int) -> bool:
        """Whether a text of `one`, followed by a character of `follow`, may be a prefix of a text of `other`."""
        if one is None or other is None:
            return True
        left = [(one.begin, other.begin, False)]
        seen = set(left)
        while left:
            a, b, is_begun = left.pop()
            self._steps += 1
            if self._steps > MAX_STEPS:
                return True
            if is_begun and a == one.end and other.masks[b] & follow:
                return True
            steps = [(to, b, is_begun) for to in one.silent[a]] + [(a, to, is_begun) for to in other.silent[b]]
            if one.masks[a] & other.masks[b]:
                steps.append((a + 1, b + 1, True))
            for step in steps:
                if step not in seen:
                    seen.add(step)
                    left.append(step)
        return False


def _spread(symbols: list[_Symbol], targets: dict[_Symbol, list[_Symbol]], name: str) -> None:
    """Propagate the bits of the attribute `name` from each symbol to its targets, until nothing changes."""
    left = deque(symbols)
    waiting = set(symbols)
    while left:
        symbol = left.popleft()
        waiting.remove(symbol)
        bits = getattr(symbol, name)
        for target in targets.get(symbol, ()):
            before = getattr(target, name)
            if bits & ~before:
                setattr(target, name, before | bits)
                if target not in waiting:
                    waiting.add(target)
                    left.append(target)


def _union(symbols: list[_Symbol]) -> int:
    found = 0
    for symbol in symbols:
        found |= symbol.follow
    return found


def _below(symbol: _Symbol) -> Iterator[_Symbol]:
    left = [symbol]
    while left:
        here = left.pop()
        yield here
        left += here.items


@dataclass(slots=True)
class _Automaton:
    """Automaton of a terminal. A state with a mask consumes a character; other states have empty transitions."""

    begin: int
    end: int
    masks: list[int]
    silent: list[list[int]]


def _automaton(node: Node, rules: dict[str, Node]) -> _Automaton | None:
    """Build an automaton that accepts all texts of a part, and more repetitions. Return None if it is too large."""
    masks: list[int] = []
    silent: list[list[int]] = []

    def state(mask: int = 0) -> int:
        if len(masks) >= MAX_STATES:
            raise OverflowError
        masks.append(mask)
        silent.append([])
        return len(masks) - 1

    def build(node: Node, depth: int) -> tuple[int, int]:
        if depth > 3 * MAX_GROUP_DEPTH:
            raise OverflowError
        match node:
            case Characters():
                begin = state(_mask_of(node))
                return begin, state()
            case Reference(name=name):
                return build(rules[name], depth + 1)
            case Repetition(item=item, least=least, most=most):
                begin, end = state(), state()
                first, last = build(item, depth + 1)
                silent[begin].append(first)
                silent[last].append(end)
                if not least:
                    silent[begin].append(end)
                if most != 1:
                    silent[last].append(first)
                return begin, end
            case Choice(items=items):
                begin, end = state(), state()
                for item in items:
                    first, last = build(item, depth + 1)
                    silent[begin].append(first)
                    silent[last].append(end)
                return begin, end
            case _:
                parts = (
                    node.items if isinstance(node, Concatenation) else node.text if isinstance(node, Literal) else ()
                )
                begin = end = state()
                for part in parts:
                    first, last = (
                        build(part, depth + 1)
                        if isinstance(part, Node)
                        else (state(_mask(ord(part), ord(part))), state())
                    )
                    silent[end].append(first)
                    end = last
                return begin, end

    try:
        begin, end = build(node, 0)
    except OverflowError:
        return None
    return _Automaton(begin, end, masks, silent)


# ------------------------------------------------------------ writing


def _written(bodies: dict[str, _Symbol], rules: dict[str, Node]) -> str:
    return _Writer(rules).written(bodies)


class _Writer:
    """Writes symbols as rules `r0`, `r1`, ... and terminals as `T0`, `T1`, ...."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._lines: list[str] = []
        self._rule_names: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        self._names: dict[Node, str] = {}
        self._number = 0
        self._left: list[tuple[str, Node]] = []

    def written(self, bodies: dict[str, _Symbol]) -> str:
        self._rule_names = {name: "start" if name == "root" else f"r{i}" for i, name in enumerate(bodies)}
        self._number = len(bodies)
        for name, body in bodies.items():
            self._lines.append(f"{self._rule_names[name]}: {self._alternatives(body)}")
        while self._left:
            terminal, node = self._left.pop()
            self._lines.append(f"{terminal}: {self.key(node)}")
        return "".join(f"{line}\n" for line in self._lines)

    def key(self, node: Node) -> str:
        """Return the right side of a terminal's rule. It identifies the terminal."""
        match node:
            case Choice(items=items):
                return " | ".join(map(self._part, items))
            case Concatenation(items=items):
                return " ".join(map(self._part, items)) or '""'
            case _:
                return self._part(node)

    def _part(self, node: Node) -> str:
        """Write a part of a terminal: a regular expression, or another terminal's name if the part refers to rules."""
        if (expression := _expression(node)) is not None:
            return f"/{expression}/" if expression else '""'
        if isinstance(node, Reference):
            return self._named(self._rules[node.name])
        if isinstance(node, Repetition):
            part = self._part(node.item)
            return (f"({part})" if isinstance(node.item, Repetition) else part) + _times(node)
        return self._named(node)

    def _named(self, node: Node) -> str:
        if node not in self._names:
            self._names[node] = f"T{self._number}"
            self._number += 1
            self._left.append((self._names[node], node))
        return self._names[node]

    def _alternatives(self, symbol: _Symbol) -> str:
        if symbol.terminal is None and isinstance(symbol.node, Choice):
            return " | ".join(map(self._sequence, symbol.items))
        return self._sequence(symbol)

    def _sequence(self, symbol: _Symbol) -> str:
        if symbol.terminal is None and isinstance(symbol.node, Concatenation | Literal):
            return " ".join(map(self._item, symbol.items)) or '""'
        return self._item(symbol)

    def _item(self, symbol: _Symbol) -> str:
        if symbol.terminal is not None:
            key = self.key(symbol.terminal)
            if key == '""':
                return key
            if key not in self._terminals:
                self._terminals[key] = f"T{self._number}"
                self._number += 1
                self._lines.append(f"{self._terminals[key]}: {key}")
            return self._terminals[key]
        if isinstance(symbol.node, Reference):
            return self._rule_names[symbol.node.name]
        if isinstance(symbol.node, Repetition):
            item = self._item(symbol.items[0])
            return (item if item.isalnum() else f"({item})") + _times(symbol.node)
        name = f"r{self._number}"
        self._number += 1
        self._lines.append(f"{name}: {self._alternatives(symbol)}")
        return name


def _times(node: Repetition) -> str:
    sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.least, node.most))
    if node.least == node.most:
        return f"{{{node.least}}}"
    return sign or f"{{{node.least},{'' if node.most is None else node.most}}}"


def _expression(node: Node) -> str | None:
    """Write a part as a regular expression. Return None if it refers to rules."""
    match node:
        case Characters(ranges=ranges, is_negated=is_negated):
            inside = "".join(_point(low) if low == high else f"{_point(low)}-{_point(high)}" for low, high in ranges)
            return f"[{'^' if is_negated else ''}{inside}]"
        case Literal(text=text):
            return "".join(_point(ord(character)) for character in text)
        case Concatenation(items=items) | Choice(items=items):
            parts = []
            for item in items:
                if (part := _expression(item)) is None:
                    return None
                parts.append(part)
            return f"(?:{'|'.join(parts)})" if isinstance(node, Choice) else "".join(parts)
        case Repetition(item=item):
            part = _expression(item)
            return None if part is None else f"(?:{part}){_times(node)}"
    return None


def _point(point: int) -> str:
    character = chr(point)
    return character if character.isascii() and character.isalnum() else f"\\x{{{point:x}}}"
