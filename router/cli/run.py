"""`diptych run [MODEL [PROMPT]]`: chat with a model in the terminal.

run ──> service at --url? ──no──> download, diptych serve (dies with this process) ──/ready──> chat

A service that already runs at the URL is used and left running.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common.errors import ModelError
from common.machine import ChildProcess, PrivateFolder
from common.model_files import DEFAULT_MODEL, find_model, local_models, resolve_model
from router.cli.client_flags import run_parser
from router.cli.router_client import MAX_ANSWER_BYTES, LoadSource, error_message, source_of
from router.request import CHAT_PATH, MODELS_PATH, OLLAMA_GENERATE_PATH

PROG = "diptych run"
ANSWER_S = 120.0
"""Maximum time without data from the service, which sends a comment every few seconds while an answer waits."""
LOAD_S = 600.0
"""Maximum time in which the service loads a model on demand."""
STOP_S = 15.0
"""Time for the service to stop."""
POLL_S = 0.2
MARK = '"""'
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""C0 and C1 control characters, except newline and tab."""
HINT = (
    f"{DEFAULT_MODEL} is a small model for trying things out. For better answers: diptych run Qwen/Qwen3-0.6B "
    "(downloads 1.5 GB)"
)
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
HELP = f"""\
  /bye            end (also Ctrl-D)
  /clear          forget the conversation
  /set NAME VALUE set a field of requests, such as /set temperature 0.2; without a value, remove it
  {MARK}             begin and end text of several lines
  Ctrl-C          stop an answer"""


class RunError(Exception):
    """The chat cannot start, or a request failed. The message is a sentence."""


@dataclass
class Service:
    """A running service. `model` is the name of the model at the service; "" selects its default."""

    source: LoadSource
    model: str = ""

    def models(self) -> list[dict[str, Any]] | None:
        """Return the models of the service, or None if nothing answers. Raises RunError for another answer."""
        try:
            with self._ask("GET", MODELS_PATH, None, 5.0) as reply:
                listed = json.loads(reply.read()).get("data")
        except ConnectionError:
            return None
        except (OSError, HTTPException, ValueError, AttributeError) as error:
            raise RunError(f"{self.source.url} does not answer: {error or type(error).__name__}") from error
        if not isinstance(listed, list):
            raise RunError(f"{self.source.url} is not an OpenAI-compatible service")
        return listed

    def is_ready(self) -> bool:
        """Whether the service would answer a request."""
        path = f"/ready?model={quote(self.model)}" if self.model else "/ready"
        try:
            with self._ask("GET", path, None, 5.0):
                return True
        except (RunError, OSError, HTTPException):
            return False

    def load(self) -> None:
        """Make the service load the model. Raises RunError."""
        try:
            with self._ask("POST", OLLAMA_GENERATE_PATH, {"model": self.model}, LOAD_S):
                pass
        except (OSError, HTTPException) as error:
            raise RunError(f"{self.source.url} did not load {self.model}: {error or type(error).__name__}") from error

    def answer(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of an answer. Raises RunError."""
        named = {"model": self.model} if self.model else {}
        request = {**named, "stream": True, "stream_options": {"include_usage": True}, **body}
        try:
            with self._ask("POST", CHAT_PATH, request, ANSWER_S) as reply:
                for line in reply:
                    data = line.removeprefix(b"data: ").strip()
                    if line.startswith(b"data: ") and data != b"[DONE]":
                        chunk = json.loads(data)
                        if error := chunk.get("error"):
                            raise RunError(str(error.get("message", error)))
                        yield chunk
        except (OSError, HTTPException, ValueError) as error:
            raise RunError(f"{self.source.url}: the answer broke off: {error or type(error).__name__}") from error

    @contextlib.contextmanager
    def _ask(self, method: str, path: str, body: object, timeout_s: float) -> Iterator[HTTPResponse]:
        with self.source.request(method, path, body, timeout_s) as reply:
            if reply.status != 200:
                message = error_message(reply.read(MAX_ANSWER_BYTES))
                raise RunError(message or f"the service answers HTTP {reply.status}")
            yield reply


def printable(text: object) -> str:
    """Remove the control characters of the terminal, except newline and tab."""
    return CONTROL.sub("", str(text))


def select(service: Service, wanted: str, listed: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the listed model that `wanted` names; "" selects the first. Raises RunError."""
    if not listed:
        raise RunError(f"{service.source.url} serves no model that this key may use")
    if not wanted:
        return listed[0]
    names = {str(one["id"]) for one in listed}
    last = wanted.rpartition("/")[2]
    for name in (wanted, wanted.replace(":", "-"), last, Path(last).stem):
        if found := [one for one in listed if name in (one["id"], one.get("root"))]:
            return found[0]
    raise RunError(
        f"{service.source.url} serves {', '.join(sorted(names))}, not {wanted}: stop it, or start another service with "
        "--url http://127.0.0.1:8001"
    )


def start(service: Service, model: str, arguments: Sequence[str], folder: Path) -> ChildProcess:
    """Start a service for a model and wait until it is ready. Raises RunError."""
    source = service.source
    if source.tls or source.path or not _is_this_machine(source.host):
        raise RunError(f"no service answers at {source.url}")
    log = folder / "serve.log"
    child = ChildProcess("diptych serve", log, group=True, tied=True)
    command = [sys.executable, "-P", "-m", "common.cli", "serve", *([model] if model else [])]
    command += ["--host", source.host, "--port", str(source.port), *arguments]
    environment = {**os.environ, "DIPTYCH_API_KEY": source.key} if source.key else None
    child.launch(command, environment)
    began, spinner = time.monotonic(), sys.stderr.isatty()
    try:
        while child.alive and not service.is_ready():
            if spinner:
                waited_s = time.monotonic() - began
                print(f"\rstarting {model or 'the default model'} ... {waited_s:.0f} s ", end="", file=sys.stderr)
            time.sleep(POLL_S)
        if not child.alive:  # also if another service answers at the URL
            lines = child.log_tail().splitlines()
            raise RunError("\n".join(("the service did not start:", *lines[-5:])))
    except BaseException:
        child.stop(STOP_S)
        raise
    finally:
        if spinner:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return child


def _is_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass
class Chat:
    """A conversation. `fields` are further fields of each request."""

    service: Service
    fields: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)
    verbose: bool = False
    """Whether numbers follow each answer."""
    hint: str = ""
    """Printed on stderr after the first answer."""

    def say(self, text: str, *, thoughts: bool) -> None:
        """Send a message and print the answer as it arrives. Ctrl-C ends the answer and keeps its text.

        A message without an answer is forgotten.
        """
        self.messages.append({"role": "user", "content": text})
        began, first_at, parts = time.monotonic(), 0.0, list[str]()
        usage: dict[str, int] = {}
        is_thinking = False
        chunks = self.service.answer({"messages": self.messages, **self.fields})
        try:
            for chunk in chunks:
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    delta = choice.get("delta", {})
                    thought, content = delta.get("reasoning_content") or "", delta.get("content") or ""
                    first_at = first_at or (time.monotonic() if thought or content else 0.0)
                    if thought and thoughts:
                        print(f"{DIM if not is_thinking else ''}{printable(thought)}", end="", flush=True)
                        is_thinking = True
                    if content:
                        print(f"{PLAIN + chr(10) if is_thinking else ''}{printable(content)}", end="", flush=True)
                        is_thinking = False
                        parts.append(content)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            if not parts:  # there is nothing to keep: some models accept no empty answer
                self.messages.pop()
                return
        except RunError:
            self.messages.pop()
            raise
        finally:
            chunks.close()  # type: ignore[attr-defined]  # a generator
            print(PLAIN if is_thinking else "")
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        if self.hint:
            print(self.hint, file=sys.stderr)
            self.hint = ""
        if self.verbose and usage:
            ended = time.monotonic()
            rate = (usage["completion_tokens"] - 1) / (ended - first_at) if first_at and ended > first_at else 0.0
            print(
                f"{usage['prompt_tokens']:,} prompt tokens, first token after {(first_at or ended) - began:.2f} s, "
                f"{usage['completion_tokens']:,} tokens at {rate:.1f}/s",
                file=sys.stderr,
            )

    def clear(self) -> None:
        """Forget all messages except for the system prompt."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def set(self, text: str) -> None:
        """Set or remove a field: "NAME VALUE", whose value is JSON or a string."""
        name, _, value = text.partition(" ")
        if not name:
            print(json.dumps(self.fields))
        elif not value.strip():
            self.fields.pop(name, None)
        else:
            try:
                self.fields[name] = json.loads(value)
            except ValueError:
                self.fields[name] = value.strip()


def converse(chat: Chat) -> None:
    """Read messages and print answers until /bye or the end of the input."""
    print(f"{printable(chat.service.model)}: /? for help, /bye to end")
    while True:
        try:
            text = _read_message()
        except KeyboardInterrupt:
            print("\n/bye or Ctrl-D ends")
            continue
        except EOFError:
            print()
            return
        command, _, rest = text.strip().partition(" ")
        if command == "/bye":
            return
        if command in ("/?", "/help"):
            print(HELP)
        elif command == "/clear":
            chat.clear()
        elif command == "/set":
            chat.set(rest.strip())
        elif text.strip():
            try:
                chat.say(text, thoughts=True)
            except RunError as error:
                print(f"{PROG}: {printable(error)}", file=sys.stderr)


def _read_message() -> str:
    """Read a line, or several between marks. Raises EOFError at the end of the input."""
    text = input(">>> ")
    if not text.lstrip().startswith(MARK):
        return text
    lines = [text.lstrip().removeprefix(MARK)]
    while not lines[-1].rstrip().endswith(MARK):
        lines.append(input("... "))
    lines[-1] = lines[-1].rstrip().removesuffix(MARK)
    return "\n".join(lines).strip("\n")


def _local_name(model: str) -> str:
    """Download a model, with progress, and return its value for `--model`. Raises ModelError."""
    if not model:
        return model
    try:
        resolve_model(model, supported=False)
        return model
    except ModelError as error:
        try:
            return find_model(model, local_models()).name
        except ModelError:
            raise error from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns exit status 0, 1 if there is no answer, 2 for invalid arguments, 130 after Ctrl-C."""
    given = list(sys.argv[1:] if argv is None else argv)
    own, serve = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    options = run_parser().parse_intermixed_args(own)  # also options before the prompt
    source = source_of(options, PROG)
    if source is None:
        return 2
    words = [" ".join(options.prompt)] if options.prompt else []
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    prompt = "\n\n".join([*words, *([piped] if piped else [])])
    child = None
    with PrivateFolder("run") as folder:
        try:
            service, wanted = Service(source), options.model
            listed = service.models()
            if listed is None:
                name = _local_name(options.model)
                child = start(service, name, serve, folder.path)
                listed = service.models()
                wanted = resolve_model(name, supported=False).model_id if name else ""
            model = _selected(service, wanted, listed or ())  # another service may have taken the port
            service.model = str(model["id"])
            if model.get("state") not in (None, "loaded"):
                _load(service)
            _chat(service, options, prompt)
        except (RunError, ModelError) as error:
            print(f"{PROG}: {printable(error)}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            if child is not None:
                child.stop(STOP_S)
    return 0


def _selected(service: Service, wanted: str, listed: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the model of the service that `wanted` names; "" selects the first.

    A service on this machine that loads models on demand also serves one that is downloaded now. Raises RunError, and
    ModelError if the model cannot be downloaded.
    """
    try:
        return select(service, wanted, listed)
    except RunError:
        is_on_demand = any("state" in one for one in listed) and _is_this_machine(service.source.host)
        if not (wanted and is_on_demand):
            raise
    _local_name(wanted)
    return select(service, wanted, service.models() or ())


def _load(service: Service) -> None:
    """Wait until a service that loads models on demand has loaded the model of the chat. Raises RunError."""
    spinner = sys.stderr.isatty()
    if spinner:
        print(f"loading {printable(service.model)} ...", end="", file=sys.stderr, flush=True)
    try:
        service.load()
    finally:
        if spinner:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _chat(service: Service, options: argparse.Namespace, prompt: str) -> None:
    fields: dict[str, Any] = {"reasoning_effort": "none"} if options.no_think else {}
    system = [{"role": "system", "content": options.system}] if options.system else []
    chat = Chat(service, fields, system, options.verbose)
    if service.model == DEFAULT_MODEL and sys.stderr.isatty():
        chat.hint = HINT
    if prompt or not sys.stdin.isatty():
        chat.say(prompt, thoughts=False)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (editing and history of input())
    converse(chat)


if __name__ == "__main__":
    sys.exit(main())
