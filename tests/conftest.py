"""Fixtures, markers and time limits of all tests. No setting leaks into a test from the environment."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest

from .examples import register_profiles
from .forge import SharedForges, forged_processes
from .trust import load_trust_once

if TYPE_CHECKING:
    from .rig import Program

register_profiles()
load_trust_once()
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
"""Without it jsonschema leaves IRIs unchecked, which no test asks of it; with it its import takes two seconds."""
ROOT = Path(__file__).resolve().parents[1]

BEGAN = pytest.StashKey[float]()
FORGES = pytest.StashKey[SharedForges]()
NUM_THREADS = pytest.StashKey[int]()
LONG_S = 1200 if os.environ.get("TEST_ENGINE") == "vllm" else 360
"""A deadline is against what hangs: real processes start, and state machines run, at the pace of the machine. A worker
with vLLM takes a minute to start."""
STATE_MACHINE = "runTest"
"""Hypothesis' name of a test that runs one."""
ALL_SLOW = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget-s", type=float, default=0.0, help="say so when all tests take longer than this")
    parser.addoption("--longest-first", action="store_true", help="begin with tests that start real processes")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEGAN] = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # scripts ignore it for what they start in the background
    os.environ.setdefault("DIPTYCH_DEVICE", "cpu")  # of whole systems, on a machine with a GPU too
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"  # what tests start is here
    if os.environ.get("TEST_ENGINE") == "vllm" and "PYTEST_XDIST_WORKER" not in os.environ:
        from .rig import make_tiny_models_for_vllm

        make_tiny_models_for_vllm()
    gc.disable()  # next to nothing of what is collected is garbage: searching for it was a quarter of the time


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" in config.option.markexpr:
        config.pluginmanager.register(SlowTestFilter())


class SlowTestFilter:
    """Makes no items of functions that are marked slow when slow tests are deselected."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, obj: object) -> list[pytest.Item] | None:
        marks = getattr(obj, "pytestmark", ()) if isinstance(obj, FunctionType) else ()
        return [] if any(mark.name == "slow" for mark in marks) else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    took, budget = time.monotonic() - config.stash[BEGAN], config.getoption("--budget-s")
    if budget and took > budget:
        terminalreporter.section("over budget", yellow=True)
        terminalreporter.line(f"the tests took {took:.0f} s; {budget:.0f} s is what they may take.")
        terminalreporter.line("Make the slowest faster, or mark them with @pytest.mark.slow.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files in which every test is slow when slow tests are deselected: some import whole SDKs."""
    if "not slow" not in config.option.markexpr or not collection_path.name.startswith("test_"):
        return None
    return ALL_SLOW.search(collection_path.read_text(encoding="utf-8")) is not None or None


def case_of(item: pytest.Item) -> str:
    """The id of a test's parameters; "" without parameters."""
    return item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""


def is_case(case: str, name: str) -> bool:
    return case == name or (name.endswith("*") and case.startswith(name[:-1]))


def is_slow_case(item: pytest.Item) -> bool:
    """Whether `slow_cases` or `slow_except` selects the parameters of a test."""
    case = case_of(item)

    def is_named(marker: pytest.Mark) -> bool:
        return any(is_case(case, name) for name in marker.args)

    return any(is_named(marker) for marker in item.iter_markers("slow_cases")) or any(
        not is_named(marker) for marker in item.iter_markers("slow_except")
    )


def beyond_a_cover(items: Sequence[pytest.Function], strength: int) -> Iterator[pytest.Function]:
    """The cases of one test that add nothing once few others have all values of every `strength` parameters together.

    Which ones are few is chosen greedily, is the same in every run, and has other values together where it can.
    """
    needed, also = ({id(item): combinations(item, num) for item in items} for num in (strength, strength + 1))
    missing, new = set().union(*needed.values()), set().union(*also.values())
    while missing:
        best = max(needed, key=lambda key: (len(needed[key] & missing), len(also[key] & new)))
        missing -= needed.pop(best)
        new -= also[best]
    yield from (item for item in items if id(item) in needed)


def combinations(item: pytest.Function, num: int) -> set[tuple[tuple[str, int], ...]]:
    values = [(name, id(value)) for name, value in item.callspec.params.items()]
    return set(itertools.combinations(values, min(num, len(values))))


def mark_slow_cases(items: Sequence[pytest.Item]) -> None:
    covered: dict[tuple[Any, ...], list[pytest.Function]] = {}
    for item in items:
        if is_slow_case(item):
            item.add_marker(pytest.mark.slow)
        elif isinstance(item, pytest.Function) and not item.get_closest_marker("slow"):
            for marker in item.iter_markers("quick_cover"):
                covered.setdefault((item.parent, item.originalname, *marker.args), []).append(item)
    for (*_, strength), cases in covered.items():
        for item in beyond_a_cover(cases, strength):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Fail to collect a test whose `slow_cases` or `slow_except` names parameters that do not exist."""
    made = yield
    items = [item for item in made if isinstance(item, pytest.Function)] if isinstance(made, list) else []
    cases = [case_of(item) for item in items]
    for marker in items[0].own_markers if items else ():
        if marker.name in ("slow_cases", "slow_except"):
            absent = [name for name in marker.args if not any(is_case(case, name) for case in cases)]
            if absent:
                raise pytest.Collector.CollectError(
                    f"{items[0].originalname}: {marker.name} names {absent}, which are not among its ids: {cases}"
                )
    return made


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow cases, skip what this machine cannot run, extend timeouts of processes. Only GPU tests need torch."""
    if config.getoption("longest_first"):
        items.sort(key=lambda item: item.get_closest_marker("e2e") is None)
    mark_slow_cases(items)
    absent = {}
    if any(item.get_closest_marker("gpu") for item in items) and not has_cuda():
        absent["gpu"] = "no CUDA device"
    if find_spec("vllm") is None:
        absent["vllm"] = "vLLM is not installed: make test-vllm"
    if os.environ.get("TEST_ENGINE") == "vllm":
        absent["own_engine"] = "only Diptych's engine promises it"
    for item in items:
        is_long = item.get_closest_marker("e2e") or item.name == STATE_MACHINE
        if is_long and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_S))
        for marker, reason in absent.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules that were imported to collect the tests stay: no search for garbage sees them, not even one here."""
    if (torch := sys.modules.get("torch")) is not None:
        session.config.stash[NUM_THREADS] = torch.get_num_threads()
    gc.freeze()
    gc.enable()


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def no_settings_from_outside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where models are kept, what kernels are compiled for, and for whole systems the device (cuda: on a GPU)."""
    kept = {"DIPTYCH_CACHE", "DIPTYCH_MARCH", *(("DIPTYCH_DEVICE",) if request.node.get_closest_marker("e2e") else ())}
    for name in list(os.environ):
        if name.startswith("DIPTYCH_") and name not in kept:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def signals_still_end_the_process() -> Iterator[None]:
    """A handler that a test or a command leaves behind makes later signals do nothing."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.fixture(autouse=True)
def same_number_of_threads(pytestconfig: pytest.Config) -> None:
    """Undo what earlier tests and fixtures set: loading a model as a worker does sets torch's threads to all cores.

    On cores that other tests use, each parallel loop of a tiny model then takes many times as long.
    """
    if (torch := sys.modules.get("torch")) is not None:
        before = pytestconfig.stash.setdefault(NUM_THREADS, torch.get_num_threads())
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Routers store responses in the user's folder for state: tests have one of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module", autouse=True)
def what_a_file_leaves_open_is_its_own() -> Iterator[None]:
    """A socket that a test forgot is found in its own file, not in a later one in which garbage is collected.

    Objects left after a file stay, as imported modules do: to go through it after each file took 0.1 s.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Processes that run tests side by side fork workers and routers from the same two."""
    stash = node.config.stash
    if FORGES not in stash:
        stash[FORGES] = SharedForges()
        node.config.add_cleanup(stash[FORGES].close)
    node.workerinput["forges"] = stash[FORGES].folder


@pytest.fixture(scope="session")
def forge(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stacks fork their workers and routers from processes that have imported what these need."""
    if os.environ.get("TEST_ENGINE") == "vllm":  # it must be imported after its environment is prepared
        yield
        return
    if (given := getattr(request.config, "workerinput", None)) is not None:
        with forged_processes(given["forges"]):
            yield
        return
    own = SharedForges()
    with forged_processes(own.folder):
        yield
    own.close()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts a program with the options of `subprocess.Popen`; what still runs after the test is killed."""
    from .rig import Program

    started: list[Program] = []

    def run(*command: str, **options: Any) -> Program:
        started.append(Program("the program", tmp_path / f"program-{len(started)}.log"))
        started[-1].launch(command, **options)
        return started[-1]

    yield run
    for program in started:
        program.kill()


@pytest.fixture
def repository() -> Path:
    """The folder with pyproject.toml."""
    return ROOT


@pytest.fixture(scope="session")
def tiny() -> tuple[Any, tuple[int, ...]]:
    """The tiny random model in float32, and its end tokens."""
    from common.engine.models.load import load_model
    from common.model_files.resolve import resolve_model

    files = resolve_model("tiny-random")
    return load_model(files), files.eos_token_ids
