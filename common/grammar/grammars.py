"""Compiled grammars of a worker, and the thread that computes slow masks.

Threads compile grammars; the engine requests one and gets an event. Another thread computes the masks of slow grammars,
so that no step waits for them. The grammar library releases the GIL while it works.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import PriorityQueue

import llguidance

from common.errors import RequestError
from common.grammar.checks import GrammarChecks, Verdict
from common.grammar.grammar import Constraint, GrammarState
from common.grammar.token_rules import TokensToBytes
from common.grammar.vocabulary import brief, build_vocabulary, compile_grammar
from common.model_files import ModelFiles

log = logging.getLogger(__name__)
MAX_CACHED, MAX_CACHED_BYTES = 64, 256 * 2**20
"""Maximum number and total bytes of cached grammars. Each grows with use, up to `MAX_LEXER_STATES`."""
MAX_SALTS = 4096
"""Maximum number of salts that share a compiled grammar. One more clears the set, and all of them wait again."""
GRAMMAR_TIMEOUT_S = 20.0
"""Maximum time, in seconds, that a request waits for its grammar. Seconds only when many slow ones arrive together."""
OnMask = Callable[[], None]


@dataclass(frozen=True, slots=True, order=True)
class _Job:
    """Request for one mask. Ordered by the CPU time that the answer has used, then by age."""

    spent_s: float
    number: int
    constraint: Constraint | None = field(compare=False)
    output_token_ids: Sequence[int] = field(compare=False)
    on_ready: Callable[[], None] = field(compare=False)


class MaskThread:
    """Thread that computes masks. It starts with the first job. `submit` and `close` are thread-safe."""

    def __init__(self) -> None:
        self._jobs: PriorityQueue[_Job] = PriorityQueue()
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, constraint: Constraint, output_token_ids: Sequence[int], on_ready: Callable[[], None]) -> None:
        """Queue the mask that follows `output_token_ids`. The thread then calls `on_ready`, which must not raise."""
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="masks", daemon=True)
                self._thread.start()
            self._jobs.put(_Job(constraint.spent_s, next(self._numbers), constraint, output_token_ids, on_ready))

    def close(self) -> None:
        """Stop the thread after its current mask, and drop all queued jobs."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._jobs.put(_Job(-1.0, next(self._numbers), None, (), lambda: None))
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()).constraint is not None:
            job.constraint.allowed(job.output_token_ids)
            job.on_ready()


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """A compiled grammar, or the `problem` of compiling it. A problem `is_final` if every worker would have it.

    Answers share the library's automaton, and with it the error of an answer that exceeded the library's limits: such a
    grammar `is_spoilt`, and the next request compiles it again.
    """

    grammar: str
    first: Constraint
    is_final: bool = True
    num_bytes: int = 0
    state: GrammarState = field(default_factory=GrammarState)
    salts: set[str] = field(default_factory=set)
    """Salts of the requests that waited for this grammar. Requests of other salts wait too, so that response times do
    not reveal the grammars of other tenants."""

    @property
    def problem(self) -> str:
        return self.first.problem

    @property
    def is_spoilt(self) -> bool:
        return self.state.is_spoilt

    def constraint(self) -> Constraint:
        """Create a constraint for a new answer, with the mask of the first token."""
        return self.first.copy()


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """Event that delivers a requested grammar to the engine."""

    compiled: CompiledGrammar


OnReady = Callable[[CompiledGrammar], None]


@dataclass(slots=True)
class _Lanes:
    """A thread for grammars that take milliseconds, and one for those that take up to a second."""

    quick: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="grammar"))
    slow: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="grammar-large"))


class Grammars:
    """Compiles grammars for a model, and caches the most recent ones within `MAX_CACHED_BYTES`. Reference-counted.

    `checks` first compiles each grammar in a process that can be killed; those that pass are compiled again here, at
    the same cost. `vocab_size` is the width of the logits, which may exceed the tokenizer's number of tokens.
    """

    def __init__(self, files: ModelFiles, vocab_size: int, checks: GrammarChecks | None = None) -> None:
        """Build the vocabulary. Holds the GIL, so call it before the worker is ready. Takes ownership of `checks`."""
        self._vocab_size = vocab_size
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._problem = ""
        self._checks = checks or GrammarChecks(files, vocab_size)
        self._lanes, self._lock, self._masks = _Lanes(), threading.Lock(), MaskThread()
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._waiting: dict[str, list[tuple[str, OnReady]]] = {}
        self._num_users = 1
        try:
            self._vocabulary = build_vocabulary(files.tokenizer, files.eos_token_ids, vocab_size)
        except Exception as error:  # requests without grammars still work
            self._problem = f"the grammar cannot be used: {brief(str(error))}"
            log.warning(
                "grammars: requests with tools or structured output will be refused, fix the model's tokenizer: %s",
                self._problem,
            )

    def start(self) -> None:
        """Start the checking process before the first grammar arrives."""
        if not self._problem:
            self._checks.start()

    def get(self, grammar: str, on_ready: OnReady, salt: str = "") -> CompiledGrammar | None:
        """Return the grammar if it is compiled or has a problem; else None, and a thread calls `on_ready` later.

        Compiled grammars are cached per `salt`: requests of other salts wait as for a new grammar.
        """
        if self._problem:
            return self._refused(grammar, self._problem)
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None and not known.is_spoilt and salt in known.salts:
                self._compiled.move_to_end(grammar)
                return known
            waiting = self._waiting.setdefault(grammar, [])
            waiting.append((salt, on_ready))
            if len(waiting) > 1:
                return None
        try:
            self._checks.submit(grammar, salt=salt).add_done_callback(lambda found: self._on_checked(grammar, found))
        except (RequestError, ValueError) as error:
            self._finish(self._failed(grammar, error))
        return None

    def compute_mask(self, constraint: Constraint, output_token_ids: Sequence[int], on_ready: OnMask) -> None:
        """Compute `constraint.allowed` on the mask thread, then call `on_ready` there.

        Do not use the constraint until then.
        """
        self._masks.submit(constraint, output_token_ids, on_ready)

    @property
    def to_bytes(self) -> TokensToBytes | None:
        """Function that returns the bytes of tokens, with the names of control tokens; None without a vocabulary.

        Skips the byte 0xFF, which UTF-8 does not use.
        """
        vocabulary = self._vocabulary
        return None if vocabulary is None else lambda token_ids: vocabulary.decode_bytes(list(token_ids))

    def constraint(self, grammar: str) -> Constraint:
        """Wait for `grammar` and return a constraint for a new answer. For benchmarks and tests, not for engines."""
        found: Future[CompiledGrammar] = Future()
        known = self.get(grammar, found.set_result)
        return (known or found.result(GRAMMAR_TIMEOUT_S)).constraint()

    def shared(self) -> Grammars:
        """Return the same object with one more user, who must close it as well."""
        with self._lock:
            self._num_users += 1
        return self

    def close(self) -> None:
        """Release one use. The last one stops all threads; requests that wait for a grammar get a problem instead."""
        with self._lock:
            self._num_users -= 1
            if self._num_users > 0:
                return
        self._checks.close()
        self._lanes.quick.shutdown(wait=False, cancel_futures=True)
        self._lanes.slow.shutdown(wait=False, cancel_futures=True)
        self._masks.close()

    # ------------------------------------------------------------ on other threads

    def _on_checked(self, grammar: str, found: Future[Verdict]) -> None:
        try:
            verdict = found.result()
            if verdict.problem:
                self._finish(self._refused(grammar, verdict.problem))
            else:
                lane = self._lanes.quick if verdict.is_quick else self._lanes.slow
                lane.submit(self._compile, grammar, verdict.num_bytes)
        except Exception as error:  # the check failed, or the worker is shutting down
            self._finish(self._failed(grammar, error))

    def _compile(self, grammar: str, num_bytes: int) -> None:
        try:
            assert self._vocabulary is not None  # without a vocabulary, nothing is checked
            matcher, problem = compile_grammar(self._vocabulary, grammar)
            state = GrammarState()
            first = Constraint(matcher, self._vocab_size, problem, state)
            first.allowed(())
            found = CompiledGrammar(grammar, first, num_bytes=num_bytes, state=state)
        except Exception as error:
            found = self._failed(grammar, error)
        self._finish(found)

    def _failed(self, grammar: str, error: Exception) -> CompiledGrammar:
        return self._refused(grammar, f"the grammar cannot be used: {brief(str(error))}", is_final=False)

    def _refused(self, grammar: str, problem: str, *, is_final: bool = True) -> CompiledGrammar:
        return CompiledGrammar(grammar, Constraint(None, self._vocab_size, problem), is_final=is_final)

    def _finish(self, found: CompiledGrammar) -> None:
        with self._lock:
            waiting = self._waiting.pop(found.grammar, [])
            if found.is_final:
                before = self._compiled.get(found.grammar)
                if before is not None and len(before.salts) < MAX_SALTS:
                    found.salts |= before.salts
                found.salts.update(salt for salt, _ in waiting)
                self._compiled[found.grammar] = found
                self._compiled.move_to_end(found.grammar)
                self._evict_oldest()
        for _, on_ready in waiting:
            on_ready(found)

    def _evict_oldest(self) -> None:
        """Drop the least recently used grammars. Running answers keep theirs alive."""
        num_bytes = sum(each.num_bytes + len(each.grammar) for each in self._compiled.values())
        while len(self._compiled) > 1 and (num_bytes > MAX_CACHED_BYTES or len(self._compiled) > MAX_CACHED):
            _, oldest = self._compiled.popitem(last=False)
            num_bytes -= oldest.num_bytes + len(oldest.grammar)
