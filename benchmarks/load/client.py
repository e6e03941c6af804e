"""A streaming client of OpenAI-compatible servers that records the arrival of each token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from benchmarks.load.http_stream import HttpPool
from benchmarks.load.summary import INTERRUPTED, OK, RequestRecord
from benchmarks.load.workload import Prompt, RequestPlan

MAX_ERROR_BYTES = 4096
PROBE_TEXT = """
The quick brown fox jumps over the lazy dog while seven wizards quietly judge her boxing; ancient rivers carve deep
valleys between mountains, farmers harvest wheat, sailors follow stars, doctors study rare diseases, children paint
yellow houses, engineers measure pressure, temperature and current, poets argue about silence, bakers rise early, judges
weigh evidence, pilots land in heavy fog, markets open at nine, snow covers the northern road, bees return at dusk,
teachers explain fractions, musicians tune violins, lawyers draft contracts, scientists publish results, dancers
stretch, tailors cut cloth, chemists mix solvents, historians read letters, gardeners prune roses, and clocks strike
midnight.
0 1 2 3 4 5 6 7 8 9 A B C D E F G H I J K L M N O P Q R S T U V W X Y Z ! ? ( ) [ ] { } + - * / = < > % $ # @ & : ; ' "
"""
FALLBACK_TOKEN_IDS = range(1000, 10_000)
MIN_PROBED_TOKENS = 32


class EventReader:
    """Cuts a stream of bytes into the `data:` payloads of its server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class Answer:
    """Fills a RequestRecord from one streamed answer."""

    def __init__(self, record: RequestRecord, *, chat: bool) -> None:
        self.record, self._chat = record, chat
        self._events = EventReader()
        self._finished = False
        self._error = b""
        self._usage: dict[str, Any] = {}

    def on_body(self, arrival: float, data: bytes) -> None:
        for payload in self._events.feed(data):
            self._on_event(arrival, payload)

    def on_error_body(self, _arrival: float, data: bytes) -> None:
        self._error += data[: MAX_ERROR_BYTES - len(self._error)]

    def _on_event(self, arrival: float, payload: bytes) -> None:
        if payload == b"[DONE]":
            self._finished = True
            return
        event = orjson.loads(payload)
        if error := event.get("error"):
            self.record.outcome = "stream error"
            self.record.message = str(error.get("message") if isinstance(error, dict) else error)
        if usage := event.get("usage"):
            self._usage = usage
        for choice in event.get("choices", ()):
            self._finished = self._finished or choice.get("finish_reason") is not None
            if self._has_token(choice):
                self.record.token_times.append(arrival)

    def _has_token(self, choice: dict[str, Any]) -> bool:
        if self._chat:
            delta = choice.get("delta") or {}
            return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))
        # A completion's event without text is a token with an incomplete character, unless it has the finish reason.
        return bool(choice.get("text")) or choice.get("finish_reason") is None

    def close(self, status: int) -> None:
        """Set outcome and token counts of the complete answer."""
        record = self.record
        if status != 200:
            record.outcome, record.message = f"http {status}", error_message(self._error)
        elif not record.outcome and not self._finished:
            record.outcome, record.message = "truncated", "the stream ended without a finish reason or [DONE]"
        elif not record.outcome and not record.token_times:
            record.outcome, record.message = "empty", "the stream ended without a token"
        record.outcome = record.outcome or OK
        record.prompt_tokens = self._usage.get("prompt_tokens", record.prompt_tokens)
        record.output_tokens = self._usage.get("completion_tokens", len(record.token_times))
        record.cached_tokens = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@dataclass(frozen=True)
class RequestOptions:
    """Shared by all requests of a run."""

    model: str
    chat: bool = False
    ignore_eos: bool = True
    temperature: float = 0.0
    timeout_s: float = 600.0


class CompletionClient:
    """Streams completions from one server; `complete` records failures of the server instead of raising."""

    def __init__(self, url: str, options: RequestOptions, *, api_key: str = "", keep_alive: bool = True) -> None:
        self._options = options
        self._pool = HttpPool(url, headers=auth_headers(api_key), keep_alive=keep_alive)
        self._path = "/v1/chat/completions" if options.chat else "/v1/completions"

    def body(self, prompt: Prompt, output_len: int) -> bytes:
        options = self._options
        fields: dict[str, Any] = {
            "model": options.model,
            "max_tokens": output_len,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if options.ignore_eos:
            fields["ignore_eos"] = True
        return orjson.dumps(fields)

    async def complete(self, plan: RequestPlan, record: RequestRecord, body: bytes | None = None) -> None:
        """Send `plan` (`body`, if it was built ahead) and fill `record`; cancellation marks it interrupted."""
        body = self.body(plan.prompt, plan.output_len) if body is None else body
        record.prompt_tokens = plan.input_len
        answer = Answer(record, chat=self._options.chat)
        record.start = time.perf_counter()
        try:
            async with asyncio.timeout(self._options.timeout_s):
                status = await self._pool.post(self._path, body, answer.on_body, answer.on_error_body)
            answer.close(status)
        except TimeoutError:
            record.outcome, record.message = "timeout", f"no complete answer within {self._options.timeout_s:g} s"
        except asyncio.CancelledError:
            record.outcome = INTERRUPTED
            raise
        except OSError as error:
            record.outcome = record.outcome or ("truncated" if record.token_times else "connect")
            record.message = record.message or str(error)
        except (ValueError, TypeError, AttributeError) as error:  # an answer that is not HTTP, JSON or OpenAI's shape
            record.outcome, record.message = "bad answer", str(error)

    async def close(self) -> None:
        """Call when no request is in flight."""
        await self._pool.close()


class ServerError(Exception):
    """The server does not answer the questions that a run begins with."""


@dataclass(frozen=True)
class Server:
    """The server's own description, before the load starts."""

    model: str
    version: str
    max_model_len: int | None


def auth_headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def error_message(body: bytes) -> str:
    """The message of an error in OpenAI's shape, or the start of any other body."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def ask_server(client: httpx.Client, model: str) -> Server:
    """The server's model (the first listed, unless `model` names one) and version. Raises ServerError."""
    try:
        answer = client.get("/v1/models")
        answer.raise_for_status()
        listed = answer.json()["data"]
        entry: dict[str, Any] = next((entry for entry in listed if model in ("", entry["id"])), {"id": model})
    except httpx.ConnectError as error:
        remedy = "start one with `diptych serve`, or name another with --url"
        raise ServerError(f"no server answers at {client.base_url} ({error}); {remedy}") from error
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        if not model:
            raise ServerError(f"{client.base_url}: cannot ask for the model ({error}); name it with --model") from error
        entry = {"id": model}
    if not entry["id"]:
        raise ServerError(f"{client.base_url}: lists no model; name it with --model")
    return Server(entry["id"], _version(client), entry.get("max_model_len"))


def _version(client: httpx.Client) -> str:
    try:
        return str(client.get("/version").json()["version"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):  # few servers have it
        return ""


def ask_token_ids(client: httpx.Client, model: str, vocab_size: int = 0) -> tuple[int, ...]:
    """Token ids for prompts: those of ordinary text in the server's own vocabulary, never special tokens.

    `vocab_size` names a range instead; a server without /tokenize gets ids that most vocabularies have.
    """
    if vocab_size:
        return tuple(range(min(1000, vocab_size // 4), vocab_size))
    fields = {"model": model, "prompt": PROBE_TEXT, "content": PROBE_TEXT, "add_special_tokens": False}
    try:
        ids = client.post("/tokenize", json=fields).json()["tokens"]
        known = sorted({int(token) for token in ids})
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        known = []
    return tuple(known) if len(known) >= MIN_PROBED_TOKENS else tuple(FALLBACK_TOKEN_IDS)
