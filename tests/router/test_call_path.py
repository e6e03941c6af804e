"""How many calls between packages a reader follows from the chat endpoint to the request's submission."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("common", "kernels", "router", "tests")
MAX_CALLS, MAX_RETURNS = 26, 18


def package_of(code: CodeType) -> str:
    """The package of our code; "" for that of others. The tests' engine counts as `router.dispatch`."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT):
        return ""
    package = path.relative_to(ROOT).parent.parts
    if not package or package[0] not in PACKAGES:  # a virtual environment may stand in the repository
        return ""
    return ".".join(package).replace("tests.router", "router.dispatch")


def is_property(frame: FrameType) -> bool:
    """Whether a call reads a property of its first argument."""
    owner = type(frame.f_locals.get("self"))
    return isinstance(inspect.getattr_static(owner, frame.f_code.co_name, None), property)


class Recorder:
    """Records calls that cross from one package to another, from the endpoint on, until the request is submitted."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self.num_returns = 0
        self._left: set[str] = set()
        self._running = self._submitted = False
        self._seen: set[FrameType] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        name, package = frame.f_code.co_name, package_of(frame.f_code)
        if event != "call" or not package or self._submitted or frame in self._seen:
            return
        self._seen.add(frame)  # coroutines are entered again whenever they go on
        self._running |= name == "chat_completions"
        caller = frame.f_back
        while caller is not None and not package_of(caller.f_code):
            caller = caller.f_back
        if not self._running or name == "chat_completions" or caller is None:
            return
        self._submitted = name == "generate"
        before = package_of(caller.f_code)
        if package == before or is_property(frame):
            return
        self.calls.append((before, package, frame.f_code.co_qualname))
        stack = set()
        while caller is not None:
            stack.add(package_of(caller.f_code))
            caller = caller.f_back
        self.num_returns += package in self._left and package not in stack
        self._left.add(package)


async def test_a_chat_request_takes_few_calls_between_packages_until_it_is_submitted(running: Any) -> None:
    """Properties do not count. A return is a call into a package that was left before."""
    assert (await running.chat(max_tokens=2)).status_code == 200  # what is cached from then on
    recorder = Recorder()
    sys.setprofile(recorder)
    try:
        assert (await running.chat(max_tokens=2)).status_code == 200
    finally:
        sys.setprofile(None)
    lines = "\n".join(f"{before} -> {package}  {name}" for before, package, name in recorder.calls)
    print(f"{len(recorder.calls)} calls, {recorder.num_returns} returns\n{lines}")
    assert running.engine.requests
    assert 10 < len(recorder.calls) <= MAX_CALLS, lines
    assert recorder.num_returns <= MAX_RETURNS, lines
